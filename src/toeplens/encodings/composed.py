"""Several encodings combined into one: all their hooks act together; incompatible combinations raise an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.additive import Sinusoidal
from toeplens.encodings.base import HOOKS, Coupling, PositionalEncoding, Seen
from toeplens.encodings.lengths import Tempered
from toeplens.encodings.logits import DeBERTa, Shaw, TransformerXL
from toeplens.encodings.rotary import PoPE, XPos
from toeplens.encodings.shapes import Earlier, Keys, Notes, Positions, Queries, ScoreMod, Stream, Turned
from toeplens.ground import InputError, invalid

ALONE = ("rotate", "score", "transform_logits", "transform_weights", "add_values")  # hooks for one encoding
LINEAR = (Shaw, TransformerXL, DeBERTa)  # these read queries and keys in the logits and add products with them
Part = PositionalEncoding | type[PositionalEncoding]


def _alone(name: str) -> Any:
    """A hook that only one encoding may use: that of the encoding that has it."""

    def call(self: Composed, *given: Any, seen: Seen | None = None) -> Any:
        for index in self._acting[name]:
            return self._ask(index, name, *given, seen=seen)
        return getattr(PositionalEncoding, name)(self, *given)

    return call


def compose(*encodings: PositionalEncoding, names: Sequence[str] = ()) -> Composed:
    """Combine encodings into one, named by their classes unless ``names`` are given; see `Composed`.

    Raises `InputError` for encodings that cannot be combined.
    """
    return Composed(*encodings, names=names)


class Composed(PositionalEncoding):
    """Several encodings that act together, in the order of attention's steps, not in the order listed.

    Input vectors are added first. Then the rotation acts, and temperatures (`Tempered`) multiply queries. All biases
    are added to the product of queries and keys (`score`). Last, logits, weights and outputs are changed, each by at
    most one encoding. Later steps see queries and keys as earlier steps left them. Key features are stored side by
    side, and each encoding reads its own.

    The factor of q . k is 1/sqrt(d) unless one of them publishes another (`t5`: 1), which then applies to all.

    These raise an error: two encodings with the same hook, except input vectors, biases and temperatures; a rotation
    with a `score`; a bias or `score` with an encoding that computes new logits; an encoding that reads queries in the
    logits with `pope` and `xpos`, whose queries are wider or depend on the sequence's middle; the same sinusoids twice;
    different sizes, coordinates, query widths or published scales.
    """

    def __init__(self, *encodings: PositionalEncoding, names: Sequence[str] = ()) -> None:
        parts = _names(encodings, names)
        each = list(parts.values())
        _check(parts)
        super().__init__(**each[0].sizes)
        self.names = tuple(parts)
        self.parts = nn.ModuleList(each)
        self._acting = {hook: [i for i, part in enumerate(each) if part.overrides(hook)] for hook in HOOKS}
        self._acting["rotate"].sort(key=lambda i: isinstance(each[i], Tempered))
        self._seeing = frozenset(h for h, acting in self._acting.items() if any(h in each[i]._seeing for i in acting))
        for fact, value in joint_facts(each).items():
            setattr(self, fact, value)
        reading = [part for part in each if _reads(part)]
        if any(_turns(part) for part in each) and not all(isinstance(part, LINEAR) for part in reading):
            self.data_dependent = True  # it reads a rotated query, which differs at every position
        self.toeplitz = not self.data_dependent and _is_toeplitz(each)
        self.length_dependent = any(part.length_dependent for part in each)
        self.factorable = bool(self._acting["bias"]) and all(part.factorable for part in self._biased())
        self.scale_terms = next((part.scale_terms for part in each if part.scale_terms != 1), 1)
        self.pair_width = max(1, sum(part.pair_width for part in each if any(map(part.overrides, HOOKS[2:]))))
        self._first = next((i for i, part in enumerate(each) if part.coupling != "none"), 0)  # provides the positions
        self.axes = each[self._first].axes
        acting = [part for part in each if part.coupling != "none" or part.layers]
        if acting and all(part.layers is not None for part in acting):
            self.layers = frozenset().union(*(part.layers or () for part in acting))
        self._noted = self._layout()

    # ---- the hooks ------------------------------------------------------------------------------------------------

    def embed(self, x: Stream, positions: Positions) -> Stream:
        for part in self.each():
            x = part.embed(x, positions)
        return x

    def note(self, x: Stream, before: Earlier | None = None) -> Notes | None:
        """The key features of all encodings, as one row per token; `own_notes` splits them again."""
        made: list[Any] = [
            self._part(index).note(x, None if before is None else self._own_notes(index, before))
            for index in self._noted
        ]
        if len(made) < 2:
            return made[0] if made else None
        return torch.cat([notes.transpose(1, 2).flatten(2) for notes in made], dim=-1).unsqueeze(1)

    def rotate(
        self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, *, seen: Seen | None = None
    ) -> Turned:
        for index in self._acting["rotate"]:
            q, k = self._ask(index, "rotate", q, k, q_positions, k_positions, seen=seen)
        return q, k

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, seen: Seen | None = None
    ) -> Float[Tensor, "*H_Nq_Nk"] | None:
        made = [self._ask(index, "bias", q_positions, k_positions, seen=seen) for index in self._acting["bias"]]
        biases: list[Tensor] = [bias for bias in made if bias is not None]
        return sum(biases[1:], biases[0]) if biases else None

    def bias_product(
        self, q_positions: Positions, k_positions: Positions, *, seen: Seen | None = None
    ) -> tuple[Float[Tensor, "*_B H Nq r"], Float[Tensor, "*_B H Nk r"]]:
        """The products of all biases, concatenated."""
        acting = self._acting["bias"]
        pairs = [self._ask(index, "bias_product", q_positions, k_positions, seen=seen) for index in acting]
        return _beside([a for a, _ in pairs]), _beside([b for _, b in pairs])

    score, transform_logits, transform_weights, add_values = map(_alone, ALONE[1:])

    def score_mod(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> ScoreMod | None:
        """All score functions in turn; None unless every bias has one."""
        acting = self._acting["bias"]
        made = [self._part(index).score_mod(q_positions, k_positions, self._own(index, seen)) for index in acting]

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            for mod in made:
                assert mod is not None
                score = mod(score, batch, head, query, key)
            return score

        return None if not made or None in made else add

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Float[Tensor, "H D"] | Complex[Tensor, "H n D"] | None:
        """The sum of the biases' kernels, if there is a bias; otherwise the rotation's kernel.

        Input vectors do not contribute if anything else is present. For several input vectors, whose inner products
        mix, it is None.
        """
        if biases := self._biased():
            made = [part.kernel(offsets) for part in biases]
            real = [kernel for kernel in made if kernel is not None and not kernel.is_complex()]
            return sum(real[1:], real[0]) if len(real) == len(made) else None
        acting = [part for part in self.each() if part.coupling != "none"]
        if self.coupling in ("none", "input"):
            return acting[0].kernel(offsets) if len(acting) == 1 else None if acting else self._part(0).kernel(offsets)
        if self.overrides("rotate") and "transform_logits" in self._seeing:
            return None  # functions of a rotated query, which differs at every position
        hooks = ("rotate", "score", "transform_logits", "add_values")
        kernels = [part.kernel(offsets) for part in acting if any(map(part.overrides, hooks))]
        rows = [kernel for kernel in kernels if kernel is not None and kernel.is_complex()]
        if len(rows) < len(kernels) or not rows:
            return None
        heads = max(len(kernel) for kernel in rows)
        return torch.cat([kernel.expand(heads, -1, -1) for kernel in rows], dim=1)

    # ---- how a model uses it --------------------------------------------------------------------------------------

    def each(self) -> list[PositionalEncoding]:
        """The combined encodings, in the order given."""
        return [self._part(index) for index in range(len(self.parts))]

    def for_layer(self, layer: int) -> PositionalEncoding:
        parts = [part.for_layer(layer) for part in self.each()]
        same = all(ours is theirs for ours, theirs in zip(parts, self.each(), strict=True))
        return self if same else Composed(*parts, names=self.names)

    def place(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        if self.axes > 1:
            return self._part(self._first).place(tokens)
        for part in self.each():
            tokens = part.place(tokens)
        return tokens

    def factors_at(self, q_positions: Positions, k_positions: Positions) -> bool:
        return self.factorable and all(part.factors_at(q_positions, k_positions) for part in self._biased())

    def overrides(self, name: str) -> bool:
        """Whether any of them acts through the hook ``name``."""
        if name == "bias_product":
            return self.factorable
        return bool(self._acting[name]) if name in self._acting else any(part.overrides(name) for part in self.each())

    @property
    def turns_alike(self) -> bool:
        return all(self._part(index).turns_alike for index in self._acting["rotate"])

    @property
    def query_dim(self) -> int:
        return self._part(0).query_dim

    def check_positions(self, positions: Positions) -> None:
        for part in self.each():
            part.check_positions(positions)

    # ---- each with its own ----------------------------------------------------------------------------------------

    def _part(self, index: int) -> PositionalEncoding:
        return cast(PositionalEncoding, self.parts[index])

    def _biased(self) -> list[PositionalEncoding]:
        return [self._part(index) for index in self._acting["bias"]]

    def _ask(self, index: int, name: str, *arguments: Any, seen: Seen | None) -> Any:
        part = self._part(index)
        if name not in part._seeing:
            return getattr(part, name)(*arguments)
        assert seen is not None
        return getattr(part, name)(*arguments, seen=self._own(index, seen))

    def _own(self, index: int, seen: Seen) -> Seen:
        """The inputs with this encoding's key features only."""
        if seen.notes is None or (len(self._noted) == 1 and index in self._noted):
            return seen
        return replace(seen, notes=self._own_notes(index, seen.notes) if index in self._noted else None)

    def _own_notes(self, index: int, notes: Float[Tensor, "B _ N _"]) -> Float[Tensor, "B _ N _"]:
        """This encoding's part of the combined key features, in their widest dtype."""
        if len(self._noted) == 1:
            return notes
        columns, heads = self._noted[index]
        return notes[:, 0, :, columns].unflatten(-1, (heads, -1)).transpose(1, 2)

    @torch.no_grad()
    def _layout(self) -> dict[int, tuple[slice, int]]:
        """The columns of each encoding's key features in the combined ones, and their heads, from one token."""
        found: dict[int, tuple[slice, int]] = {}
        start = 0
        for index, part in enumerate(self.each()):
            device = next((x.device for x in chain(part.parameters(), part.buffers())), None)
            notes = part.note(torch.zeros(1, 1, self.d_model, device=device)) if part.overrides("note") else None
            if notes is not None:
                stop = start + notes[0, :, 0].numel()
                found[index], start = (slice(start, stop), notes.shape[1]), stop
        return found


def _names(encodings: Sequence[PositionalEncoding], names: Sequence[str]) -> dict[str, PositionalEncoding]:
    """All encodings with their names, including nested ones; equal names are numbered."""
    if names and len(names) != len(encodings):
        raise invalid("names", f"have one entry per encoding ({len(encodings)})", len(names))
    found: list[tuple[str, PositionalEncoding]] = []
    for number, each in enumerate(encodings):
        if not isinstance(each, PositionalEncoding):
            raise invalid("encoding", "be an encoding that was built", each)
        if isinstance(each, Composed):
            found += zip(each.names, each.each(), strict=True)
        else:
            found.append((names[number] if names else type(each).__name__, each))
    if len(found) < 2:
        raise invalid("encoding", "be at least two encodings", len(found))
    counts = Counter(name for name, _ in found)
    return {f"{name} {n}" if counts[name] > 1 else name: part for n, (name, part) in enumerate(found, 1)}


def _beside(factors: Sequence[Tensor]) -> Tensor:
    """Combine the factors of several products into those of their sum."""
    lead = torch.broadcast_shapes(*(factor.shape[:-1] for factor in factors))
    return torch.cat([factor.expand(*lead, -1) for factor in factors], dim=-1)


# ---- joint attributes and compatibility -----------------------------------------------------------------------------


def joint_facts(parts: Sequence[Part]) -> dict[str, Any]:
    """The class attributes of combined encodings that follow from the parts; input vectors come last."""
    every: list[Coupling] = [coupling for part in parts for coupling in (part.coupling, *part.also_couples)]
    found = sorted(dict.fromkeys(each for each in every if each != "none"), key=lambda coupling: coupling == "input")
    return {
        "coupling": found[0] if found else "none",
        "also_couples": tuple(found[1:]),
        "data_dependent": any(part.data_dependent for part in parts),
        "bounded": any(part.bounded for part in parts),
        "shared": all(part.shared for part in parts),
        "citation": "; ".join(dict.fromkeys(part.citation for part in parts if part.citation)),
        "formula": r",\qquad ".join(part.formula for part in parts if part.formula),
    }


def _turns(part: PositionalEncoding) -> bool:
    return part.overrides("rotate") and not isinstance(part, Tempered)


def _reads(part: PositionalEncoding) -> bool:
    """Whether it reads queries and keys when it changes the logits."""
    return "transform_logits" in part._seeing and part.overrides("transform_logits")


def _is_toeplitz(parts: Iterable[PositionalEncoding]) -> bool:
    """Whether the logits still depend only on the offset.

    They do not for input vectors combined with anything, as queries and keys then contain positions, nor for a rotation
    combined with an encoding that reads (rotated) queries and keys in the logits.
    """
    acting = [part for part in parts if part.coupling != "none"]
    if len(acting) < 2:
        return all(part.toeplitz for part in acting)
    added = any("input" in (part.coupling, *part.also_couples) for part in acting)
    turned = any(part.overrides("rotate") for part in acting) and any(map(_reads, acting))
    return all(part.toeplitz for part in acting) and not added and not turned


def _check(parts: Mapping[str, PositionalEncoding]) -> None:
    """Raise `InputError` naming the first two encodings that cannot be combined."""
    for (a, one), (b, other) in combinations(parts.items(), 2):
        for size, value in one.sizes.items():
            if value != other.sizes[size]:
                raise invalid(size, f"be the same for {a!r} and {b!r}", got=f"{value} and {other.sizes[size]}")
        if why := _conflict(one, other):
            raise InputError(f"encoding: {a!r} and {b!r} {why}.")


def _conflict(one: PositionalEncoding, other: PositionalEncoding) -> str:
    """Why two encodings cannot be combined; empty if they can."""
    if one is other:
        return "are the same object"
    acting = "none" not in (one.coupling, other.coupling)
    scaled = one.scale_terms != 1 and other.scale_terms != 1
    for what, first, second in (
        ("dimensions of a query", one.query_dim, other.query_dim),
        ("coordinates of a position", *((one.axes, other.axes) if acting else (1, 1))),
        ("terms in the published factor of q . k", *((one.scale_terms, other.scale_terms) if scaled else (1, 1))),
    ):
        if first != second:
            return f"have {first} and {second} {what}"
    for hook in ALONE:
        if one.overrides(hook) and other.overrides(hook) and (hook != "rotate" or (_turns(one) and _turns(other))):
            return f"cannot be combined: both use {hook}"
    if one.axes == other.axes > 1 and not _same(*(each.place(torch.arange(each.max_len)) for each in (one, other))):
        return "must use the same grid"
    waves = [(each.layout, each.frequencies) for each in (one, other) if isinstance(each, Sinusoidal)]
    if len(waves) == 2 and waves[0][0] == waves[1][0] and _same(waves[0][1], waves[1][1]):
        return "both add the same waves at the input"
    for first, second in ((one, other), (other, one)):
        if _turns(first) and second.overrides("score"):
            return "cannot be combined: the rotate of one does not go with the score of the other"
        for hook in ("score", "bias"):
            if first.forms_logits and second.overrides(hook):
                return f"cannot be combined: the transform_logits of one would discard the {hook} of the other"
        if _reads(first) and isinstance(second, (PoPE, XPos)):
            return "cannot be combined: the transform_logits of one needs unscaled queries and keys"
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or b.is_meta or torch.equal(a.cpu(), b.cpu()))
