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
from toeplens.encodings.base import HOOKS, AttentionInputs, CachedFeatures, Coupling, KeyFeatures, PositionalEncoding
from toeplens.encodings.length_extrapolation import QueryTemperature
from toeplens.encodings.logits import DeBERTa, Shaw, TransformerXL
from toeplens.encodings.rotary import PoPE, XPos
from toeplens.encodings.shapes import Keys, Positions, Queries, RotatedQK, ScoreMod, Stream
from toeplens.utils import InputError, invalid

EXCLUSIVE_HOOKS = ("rotate", "score", "transform_logits", "transform_weights", "add_values")  # hooks for one encoding
LINEAR_ENCODINGS = (Shaw, TransformerXL, DeBERTa)  # they read queries and keys in the logits and add products with them
EncodingOrClass = PositionalEncoding | type[PositionalEncoding]


def _exclusive_hook(name: str) -> Any:
    """A hook that only one encoding may use: that of the encoding that has it."""

    def call_hook(self: Composed, *arguments: Any, inputs: AttentionInputs | None = None) -> Any:
        for index in self._parts_by_hook[name]:
            return self._call_part(index, name, *arguments, inputs=inputs)
        return getattr(PositionalEncoding, name)(self, *arguments)

    return call_hook


def compose(*encodings: PositionalEncoding, names: Sequence[str] = ()) -> Composed:
    """Combine encodings into one, named by their classes unless ``names`` are given; see `Composed`.

    Raises `InputError` for encodings that cannot be combined.
    """
    return Composed(*encodings, names=names)


class Composed(PositionalEncoding):
    """Several encodings that act together, in the order of attention's steps, not in the order listed.

    Input vectors are added first. Then the rotation acts, and a `QueryTemperature` multiplies queries. All biases are
    added to the product of queries and keys (`score`). Last, logits, weights and outputs are changed, each by at most
    one encoding. Later steps see queries and keys as earlier steps left them. Key features are stored side by side, and
    each encoding reads its own.

    The factor of q . k is 1/sqrt(d) unless one of them publishes another (`t5`: 1), which then applies to all.

    These raise an error: two encodings with the same hook, except input vectors, biases and temperatures; a rotation
    with a `score`; a bias or `score` with an encoding that computes new logits; an encoding that reads queries in the
    logits with `pope` and `xpos`, whose queries are wider or depend on the sequence's middle; the same sinusoids twice;
    different sizes, coordinates, query widths or published scales.
    """

    def __init__(self, *encodings: PositionalEncoding, names: Sequence[str] = ()) -> None:
        parts = _name_parts(encodings, names)
        members = list(parts.values())
        _check_compatible(parts)
        super().__init__(**members[0].sizes)
        self.names = tuple(parts)
        self.parts = nn.ModuleList(members)
        self._parts_by_hook = {hook: [i for i, part in enumerate(members) if part.overrides(hook)] for hook in HOOKS}
        self._parts_by_hook["rotate"].sort(key=lambda i: isinstance(members[i], QueryTemperature))
        known = [part._inputs_argument for part in members]
        self._inputs_argument = {h: "inputs" for h, on in self._parts_by_hook.items() if any(h in known[i] for i in on)}
        for attribute, value in joint_attributes(members).items():
            setattr(self, attribute, value)
        reading = [part for part in members if _reads_qk(part)]
        if any(_rotates(part) for part in members) and not all(isinstance(part, LINEAR_ENCODINGS) for part in reading):
            self.data_dependent = True  # it reads a rotated query, which differs at every position
        self.toeplitz = not self.data_dependent and _is_toeplitz(members)
        self.length_dependent = any(part.length_dependent for part in members)
        self.factorable = bool(self._parts_by_hook["bias"]) and all(part.factorable for part in self._bias_parts())
        self.scale_terms = next((part.scale_terms for part in members if part.scale_terms != 1), 1)
        self.pair_width = max(1, sum(part.pair_width for part in members if any(map(part.overrides, HOOKS[2:]))))
        self._position_part = next((i for i, p in enumerate(members) if p.coupling != "none"), 0)  # gives the positions
        self.axes = members[self._position_part].axes
        active = [part for part in members if part.coupling != "none" or part.layers]
        if active and all(part.layers is not None for part in active):
            self.layers = frozenset().union(*(part.layers or () for part in active))
        self._feature_columns = self._find_feature_columns()

    # ---- the hooks ------------------------------------------------------------------------------------------------

    def embed(self, x: Stream, positions: Positions) -> Stream:
        for part in self.encodings():
            x = part.embed(x, positions)
        return x

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures | None:
        """The key features of all encodings, as one row per token; `_part_features` splits them again."""
        features: list[Any] = [
            self._part(index).key_features(x, None if cached is None else self._part_features(index, cached))
            for index in self._feature_columns
        ]
        if len(features) < 2:
            return features[0] if features else None
        return torch.cat([part_features.transpose(1, 2).flatten(2) for part_features in features], dim=-1).unsqueeze(1)

    def rotate(
        self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs | None = None
    ) -> RotatedQK:
        for index in self._parts_by_hook["rotate"]:
            q, k = self._call_part(index, "rotate", q, k, q_positions, k_positions, inputs=inputs)
        return q, k

    def bias(
        self, q_positions: Positions, k_positions: Positions, *, inputs: AttentionInputs | None = None
    ) -> Float[Tensor, "*H_Nq_Nk"] | None:
        active = self._parts_by_hook["bias"]
        results = [self._call_part(index, "bias", q_positions, k_positions, inputs=inputs) for index in active]
        biases: list[Tensor] = [bias for bias in results if bias is not None]
        return sum(biases[1:], biases[0]) if biases else None

    def bias_product(
        self, q_positions: Positions, k_positions: Positions, *, inputs: AttentionInputs | None = None
    ) -> tuple[Float[Tensor, "*_B H Nq r"], Float[Tensor, "*_B H Nk r"]]:
        """The products of all biases, concatenated."""
        active = self._parts_by_hook["bias"]
        pairs = [self._call_part(index, "bias_product", q_positions, k_positions, inputs=inputs) for index in active]
        return _concat_factors([a for a, _ in pairs]), _concat_factors([b for _, b in pairs])

    score, transform_logits, transform_weights, add_values = map(_exclusive_hook, EXCLUSIVE_HOOKS[1:])

    def score_mod(self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs) -> ScoreMod | None:
        """All score functions in turn; None unless every bias has one."""
        active = self._parts_by_hook["bias"]
        mods = [self._part(i).score_mod(q_positions, k_positions, self._part_inputs(i, inputs)) for i in active]

        def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            for mod in mods:
                assert mod is not None
                score = mod(score, batch, head, query, key)
            return score

        return None if not mods or None in mods else add

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Float[Tensor, "H D"] | Complex[Tensor, "H n D"] | None:
        """The sum of the biases' kernels, if there is a bias; otherwise the rotation's kernel.

        Input vectors do not contribute if anything else is present. For several input vectors, whose inner products
        mix, it is None.
        """
        if biases := self._bias_parts():
            kernels_of_biases = [part.kernel(offsets) for part in biases]
            biases_kernels = [kernel for kernel in kernels_of_biases if kernel is not None and not kernel.is_complex()]
            return sum(biases_kernels[1:], biases_kernels[0]) if len(biases_kernels) == len(kernels_of_biases) else None
        active = [part for part in self.encodings() if part.coupling != "none"]
        if self.coupling in ("none", "input"):
            return active[0].kernel(offsets) if len(active) == 1 else None if active else self._part(0).kernel(offsets)
        if self.overrides("rotate") and "transform_logits" in self._inputs_argument:
            return None  # functions of a rotated query, which differs at every position
        hooks = ("rotate", "score", "transform_logits", "add_values")
        kernels = [part.kernel(offsets) for part in active if any(map(part.overrides, hooks))]
        rows = [kernel for kernel in kernels if kernel is not None and kernel.is_complex()]
        if len(rows) < len(kernels) or not rows:
            return None
        heads = max(len(kernel) for kernel in rows)
        return torch.cat([kernel.expand(heads, -1, -1) for kernel in rows], dim=1)

    # ---- how a model uses it --------------------------------------------------------------------------------------

    def encodings(self) -> list[PositionalEncoding]:
        """The combined encodings, in the order given."""
        return [self._part(index) for index in range(len(self.parts))]

    def for_layer(self, layer: int) -> PositionalEncoding:
        parts = [part.for_layer(layer) for part in self.encodings()]
        is_unchanged = all(ours is theirs for ours, theirs in zip(parts, self.encodings(), strict=True))
        return self if is_unchanged else Composed(*parts, names=self.names)

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        if self.axes > 1:
            return self._part(self._position_part).to_positions(tokens)
        for part in self.encodings():
            tokens = part.to_positions(tokens)
        return tokens

    def has_low_rank_bias(self, q_positions: Positions, k_positions: Positions) -> bool:
        return self.factorable and all(part.has_low_rank_bias(q_positions, k_positions) for part in self._bias_parts())

    def overrides(self, name: str) -> bool:
        """Whether any of them acts through the hook ``name``."""
        if name == "bias_product":
            return self.factorable
        parts = self._parts_by_hook.get(name)
        return any(part.overrides(name) for part in self.encodings()) if parts is None else bool(parts)

    @property
    def rotation_is_shared(self) -> bool:
        return all(self._part(index).rotation_is_shared for index in self._parts_by_hook["rotate"])

    @property
    def query_dim(self) -> int:
        return self._part(0).query_dim

    def check_positions(self, positions: Positions) -> None:
        for part in self.encodings():
            part.check_positions(positions)

    # ---- each with its own ----------------------------------------------------------------------------------------

    def _part(self, index: int) -> PositionalEncoding:
        return cast(PositionalEncoding, self.parts[index])

    def _bias_parts(self) -> list[PositionalEncoding]:
        return [self._part(index) for index in self._parts_by_hook["bias"]]

    def _call_part(self, index: int, name: str, *arguments: Any, inputs: AttentionInputs | None) -> Any:
        part = self._part(index)
        if name not in part._inputs_argument:
            return getattr(part, name)(*arguments)
        assert inputs is not None
        return getattr(part, name)(*arguments, **{part._inputs_argument[name]: self._part_inputs(index, inputs)})

    def _part_inputs(self, index: int, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs with this encoding's key features only."""
        if inputs.key_features is None or (len(self._feature_columns) == 1 and index in self._feature_columns):
            return inputs
        features = self._part_features(index, inputs.key_features) if index in self._feature_columns else None
        return replace(inputs, key_features=features)

    def _part_features(self, index: int, features: Float[Tensor, "B _ N _"]) -> Float[Tensor, "B _ N _"]:
        """This encoding's part of the combined key features, in their widest dtype."""
        if len(self._feature_columns) == 1:
            return features
        columns, heads = self._feature_columns[index]
        return features[:, 0, :, columns].unflatten(-1, (heads, -1)).transpose(1, 2)

    @torch.no_grad()
    def _find_feature_columns(self) -> dict[int, tuple[slice, int]]:
        """The columns of each encoding's key features in the combined ones, and their heads, from one token."""
        columns: dict[int, tuple[slice, int]] = {}
        start = 0
        for index, part in enumerate(self.encodings()):
            device = next((x.device for x in chain(part.parameters(), part.buffers())), None)
            token = torch.zeros(1, 1, self.d_model, device=device)
            features = part.key_features(token) if part.overrides("key_features") else None
            if features is not None:
                stop = start + features[0, :, 0].numel()
                columns[index], start = (slice(start, stop), features.shape[1]), stop
        return columns


def _name_parts(encodings: Sequence[PositionalEncoding], names: Sequence[str]) -> dict[str, PositionalEncoding]:
    """All encodings with their names, including nested ones; equal names are numbered."""
    if names and len(names) != len(encodings):
        raise invalid("names", f"have one entry per encoding ({len(encodings)})", len(names))
    named: list[tuple[str, PositionalEncoding]] = []
    for number, encoding in enumerate(encodings):
        if not isinstance(encoding, PositionalEncoding):
            raise invalid("encoding", "be an encoding that was built", encoding)
        if isinstance(encoding, Composed):
            named += zip(encoding.names, encoding.encodings(), strict=True)
        else:
            named.append((names[number] if names else type(encoding).__name__, encoding))
    if len(named) < 2:
        raise invalid("encoding", "be at least two encodings", len(named))
    counts = Counter(name for name, _ in named)
    return {f"{name} {n}" if counts[name] > 1 else name: part for n, (name, part) in enumerate(named, 1)}


def _concat_factors(factors: Sequence[Tensor]) -> Tensor:
    """Combine the factors of several products into those of their sum."""
    shape = torch.broadcast_shapes(*(factor.shape[:-1] for factor in factors))
    return torch.cat([factor.expand(*shape, -1) for factor in factors], dim=-1)


# ---- joint attributes and compatibility -----------------------------------------------------------------------------


def joint_attributes(parts: Sequence[EncodingOrClass]) -> dict[str, Any]:
    """The class attributes of combined encodings that follow from the parts; input vectors come last."""
    couplings: list[Coupling] = [coupling for part in parts for coupling in (part.coupling, *part.also_couples)]
    ordered = sorted(dict.fromkeys(name for name in couplings if name != "none"), key=lambda name: name == "input")
    return {
        "coupling": ordered[0] if ordered else "none",
        "also_couples": tuple(ordered[1:]),
        "data_dependent": any(part.data_dependent for part in parts),
        "bounded": any(part.bounded for part in parts),
        "forms_logits": any(part.forms_logits for part in parts),
        "shared": all(part.shared for part in parts),
        "citation": "; ".join(dict.fromkeys(part.citation for part in parts if part.citation)),
        "formula": r",\qquad ".join(part.formula for part in parts if part.formula),
    }


def _rotates(part: PositionalEncoding) -> bool:
    return part.overrides("rotate") and not isinstance(part, QueryTemperature)


def _reads_qk(part: PositionalEncoding) -> bool:
    """Whether it reads queries and keys when it changes the logits."""
    return "transform_logits" in part._inputs_argument and part.overrides("transform_logits")


def _is_toeplitz(parts: Iterable[PositionalEncoding]) -> bool:
    """Whether the logits still depend only on the offset.

    They do not for input vectors combined with anything, as queries and keys then contain positions, nor for a rotation
    combined with an encoding that reads (rotated) queries and keys in the logits.
    """
    active = [part for part in parts if part.coupling != "none"]
    if len(active) < 2:
        return all(part.toeplitz for part in active)
    has_input_vectors = any("input" in (part.coupling, *part.also_couples) for part in active)
    reads_rotated = any(part.overrides("rotate") for part in active) and any(map(_reads_qk, active))
    return all(part.toeplitz for part in active) and not has_input_vectors and not reads_rotated


def _check_compatible(parts: Mapping[str, PositionalEncoding]) -> None:
    """Raise `InputError` naming the first two encodings that cannot be combined."""
    for (a, first), (b, second) in combinations(parts.items(), 2):
        for size, value in first.sizes.items():
            if value != second.sizes[size]:
                raise invalid(size, f"be the same for {a!r} and {b!r}", got=f"{value} and {second.sizes[size]}")
        if reason := _conflict(first, second):
            raise InputError(f"encoding: {a!r} and {b!r} {reason}.")


def _conflict(one: PositionalEncoding, other: PositionalEncoding) -> str:
    """Why two encodings cannot be combined; empty if they can."""
    if one is other:
        return "are the same object"
    both_active = "none" not in (one.coupling, other.coupling)
    both_scaled = one.scale_terms != 1 and other.scale_terms != 1
    for quantity, first, second in (
        ("dimensions of a query", one.query_dim, other.query_dim),
        ("coordinates of a position", *((one.axes, other.axes) if both_active else (1, 1))),
        ("terms in the published factor of q . k", *((one.scale_terms, other.scale_terms) if both_scaled else (1, 1))),
    ):
        if first != second:
            return f"have {first} and {second} {quantity}"
    for hook in EXCLUSIVE_HOOKS:
        if one.overrides(hook) and other.overrides(hook) and (hook != "rotate" or (_rotates(one) and _rotates(other))):
            return f"cannot be combined: both use {hook}"
    if one.axes == other.axes > 1 and not _is_equal(*(e.to_positions(torch.arange(e.max_len)) for e in (one, other))):
        return "must use the same grid"
    waves = [(encoding.layout, encoding.frequencies) for encoding in (one, other) if isinstance(encoding, Sinusoidal)]
    if len(waves) == 2 and waves[0][0] == waves[1][0] and _is_equal(waves[0][1], waves[1][1]):
        return "both add the same waves at the input"
    for first, second in ((one, other), (other, one)):
        if _rotates(first) and second.overrides("score"):
            return "cannot be combined: the rotate of one does not go with the score of the other"
        for hook in ("score", "bias"):
            if first.forms_logits and second.overrides(hook):
                return f"cannot be combined: the transform_logits of one would discard the {hook} of the other"
        if _reads_qk(first) and isinstance(second, (PoPE, XPos)):
            return "cannot be combined: the transform_logits of one needs unscaled queries and keys"
    return ""


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or b.is_meta or torch.equal(a.cpu(), b.cpu()))
