"""Queries and keys whose content can be moved to any position, from tensors or from a model's layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from toeplens.encodings import PositionalEncoding, attention_logits
from toeplens.encodings.rotary import Pairing, Rotary
from toeplens.ground import InputError, choose, invalid
from toeplens.lens.kit import terms
from toeplens.lens.kit.position import in_float64, known_key_part, position_parts
from toeplens.lens.kit.toeplitz import Layout, as_bhnd, broadcasts, ends_of, heads_of
from toeplens.lens.kit.trace import AttentionTrace, Counted, LayerTrace

WORK = 1 << 31  # limit on the logits of all tables; above it only the first sequences are used
_AT_ONCE = 1 << 22  # logits of tables in memory at once


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys whose content can be moved to any position, and which of them each query sees.

    content  [B, G, N, d] keys before the rotation, minus their position part; head h reads h // (H / G)
    places   [B or 1, G or 1, N, d] the keys' position part, before the rotation; None if there is none
    ends     [B] number of tokens of each sequence; later positions are padding
    asked    [B, N] the queries that count; None if all do
    causal   whether query i sees key j only for j <= i
    window   maximum number of keys that a query sees up to its own, on either side if not causal; None for no limit
    chunk    number of positions per chunk; queries see only keys of their own chunk. None without chunks
    """

    content: Float[Tensor, "B G N d"]
    places: Float[Tensor, "_B _G N d"] | None
    ends: Int[Tensor, "B"]
    asked: Bool[Tensor, "B N"] | None = None
    causal: bool
    window: int | None = None
    chunk: int | None = None

    def span(self, queries: Int[Tensor, "Q"]) -> tuple[Int[Tensor, "Q"], Int[Tensor, "Q"]]:
        """The first position that each query sees, and the one after the last, without regard to padding."""
        first, beyond = queries * 0, queries * 0 + self.content.shape[2]
        if self.chunk is not None:
            first = queries - queries % self.chunk
            beyond = first + self.chunk
        if self.window is not None:
            first, beyond = (
                torch.maximum(first, queries + 1 - self.window),
                torch.minimum(beyond, queries + self.window),
            )
        return first, queries + 1 if self.causal else beyond

    def seen(self) -> Int[Tensor, "B N"]:
        """Number of keys that each query sees; 0 for padding and for queries that do not count."""
        rows, ends = torch.arange(self.content.shape[2], device=self.ends.device), self.ends.unsqueeze(1)
        first, beyond = self.span(rows)
        seen = torch.where(rows < ends, torch.minimum(beyond, ends) - first, 0)
        return seen if self.asked is None else seen * self.asked

    def visible(self, queries: Int[Tensor, "Q"]) -> Bool[Tensor, "B Q N"]:
        """Which keys each of these queries sees."""
        rows = torch.arange(self.content.shape[2], device=self.ends.device)
        first, beyond = (x.unsqueeze(1) for x in self.span(queries))
        present = rows < self.ends.unsqueeze(1)
        return (rows >= first) & (rows < beyond) & present.unsqueeze(1) & present[:, queries].unsqueeze(-1)

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """The logits of one query, in float64, with other contents at the n positions that it sees.

        ``contents`` says whose content is at each of them, counted from the first; 0, 1, ..., n - 1 is the original.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PairwiseLogits(Keys):
    """The logits of a layer, in float64, as a function of one query and one key content; the rest stays in place.

    A query's table M_jm is the logit at position j of the key whose content is that of position m. What the encoding
    reads in addition (`PositionalEncoding.note`) belongs to the position.
    """

    layer: LayerTrace

    @classmethod
    def of(cls, layer: LayerTrace, part: Float[Tensor, "B G R d"] | None, asked: Bool[Tensor, "B N"]) -> PairwiseLogits:
        """From a layer and the position part of its keys. Raises `InputError` if one table is too large."""
        layer = in_float64(layer)
        heads, length = layer.q.shape[1:3]
        longest = math.isqrt((_AT_ONCE << 6) // heads)
        if length > longest:
            name = type(layer.encoding).__name__
            raise invalid("tokens", f"be at most {longest} per sequence with {name} and {heads} heads", length)
        work = (asked.sum(1) * heads * length**2).cumsum(0)
        within = (work <= WORK) | (torch.arange(len(work), device=work.device) == 0)
        return cls(
            layer=layer,
            content=layer.k if part is None else layer.k - part.double(),
            places=part,
            ends=layer.present.sum(1),
            asked=asked & within.unsqueeze(1),
            causal=layer.causal,
        )

    def tables(self) -> Iterator[tuple[slice, Int[Tensor, "Q"], Float[Tensor, "b H Q N N"], Bool[Tensor, "b Q N"]]]:
        """Sequences, queries, their tables [position, content], and the visible keys; some at a time."""
        assert self.asked is not None
        _, heads, length, _ = self.layer.q.shape
        at_once = max(1, _AT_ONCE // (heads * length**2))
        for queries in torch.arange(length, device=self.asked.device).split(min(at_once, length)):
            step = max(1, at_once // len(queries))
            for start in range(0, len(self.asked), step):
                some = slice(start, start + step)
                if self.asked[some, queries].any():
                    seen = self.visible(queries)[some] & self.asked[some, queries].unsqueeze(-1)
                    last = int(queries[-1]) + 1 if self.causal else length
                    yield some, queries, self._table(some, queries, last), seen

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """See `Keys.logits`."""
        only = torch.tensor([query], device=self.ends.device)
        start = int(self.span(only)[0])
        contents = contents + start
        table = self._table(slice(sequence, sequence + 1), only, int(contents.max()) + 1)[0, :, 0]
        return table[:, torch.arange(start, start + contents.shape[-1], device=table.device), contents]

    def _table(self, sequences: slice, queries: Int[Tensor, "Q"], contents: int) -> Float[Tensor, "b H Q N N"]:
        """The logits of the first ``contents`` contents at every position; 0 for the others."""
        q, own = self.layer.q, self.content[sequences]
        places = self.places if self.places is None or len(self.places) == 1 else self.places[sequences]
        made = q.new_zeros(len(own), q.shape[1], len(queries), own.shape[2], own.shape[2])
        for content in range(contents):
            keys = own[:, :, content : content + 1].expand_as(own)
            keys = keys if places is None else keys + places
            made[..., content] = self.layer.formed(attention_logits, q, keys, sequences, queries).detach()
        return made


KeySplit = Literal["known", "none", "input", "mean", "ablate"]


@dataclass(frozen=True)
class Given:
    """Arguments in addition to queries and keys; see `toeplens.lens.behaviour`."""

    rotation: Tensor | PositionalEncoding | None = None
    pairing: Pairing | None = None
    layout: Layout | None = None
    bias: Tensor | None = None
    k_position: Tensor | None = None
    causal: bool = True
    scale: float = 1.0
    lengths: Tensor | None = None
    split: KeySplit = "known"
    counted: Counted = "all"
    window: int | None = None
    chunk: int | None = None

    def require_trace_alone(self, k: Tensor | None) -> None:
        """Refuse arguments that are read from a trace."""
        for name, value in {"k": k, **vars(self)}.items():
            if name not in ("causal", "scale", "split", "counted") and value is not None:
                raise InputError(f"{name} must not be set with a trace.")


# a process's first multi-threaded cosines can differ by up to 7e-9 from later ones; 1e-9 would refuse at random
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
_CHECKED = 4  # queries per sequence whose logits are recomputed
_NUMBERS = 2**21  # numbers of moved keys in memory at once


@dataclass(frozen=True, kw_only=True)
class MovableKeys(Keys):
    """Queries, and keys whose logits are in closed form.

    q        [B, H, N, d] queries, rotated, times the scale of the logits
    groups   [d] the pair that each dimension belongs to, from 1, two dimensions each; 0 where it is not rotated
    turns    [H or 1, N, n] factors of the conjugates of a key's pairs at each position: e^(-iota j theta)
    bias     [H or 1, D] by offset, 0 .. N-1 if causal, otherwise -(N-1) .. N-1; None if there is none
    table    [B or 1, H or 1, N, N] a bias by query and position, independent of content; None if there is none
    """

    q: Float[Tensor, "B H N d"]
    groups: Int[Tensor, "d"]
    turns: Complex[Tensor, "_H N n"]
    bias: Float[Tensor, "_H D"] | None = None
    table: Float[Tensor, "_B _H N N"] | None = None

    @property
    def pairs(self) -> int:
        """Number n of rotated pairs of dimensions."""
        return self.turns.shape[-1]

    def ordered(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """Reorder the dimensions, in float64: the rotated pairs one after the other, then the unrotated ones."""
        order = self.groups.argsort(stable=True)
        return x[..., terms.index_of(order.roll(2 * self.pairs))].double()

    def key_heads(self, heads: slice = slice(None)) -> Int[Tensor, "h"]:
        """The key head of each head."""
        count = self.q.shape[1]
        return torch.arange(count, device=self.q.device)[heads] // (count // self.content.shape[1])

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """See `Keys.logits`."""
        n = contents.shape[-1]
        start = int(self.span(torch.tensor([query]))[0])
        rows = torch.arange(start, start + n, device=self.q.device)
        q = self.ordered(self.q[sequence, :, query])
        v = turned_by(complex_pairs(q, self.pairs).unsqueeze(1) * self.turns[:, rows], q.unsqueeze(1))
        keys = self.ordered(self.content[sequence, :, start : int(self.ends[sequence])])[self.key_heads()]
        step = max(1, _NUMBERS // v.numel())
        parts = contents.reshape(-1, n).split(step)
        made = torch.cat([torch.einsum("hnd,hknd->hkn", v, keys[:, at]) for at in parts], dim=1)
        made = made + self.of_positions(sequence, torch.tensor([query], device=rows.device))[..., rows]
        return made.unflatten(1, contents.shape[:-1]) if contents.ndim > 1 else made[:, 0]

    def of_positions(self, sequence: int, queries: Int[Tensor, "Q"]) -> Float[Tensor, "_H Q N"]:
        """The part of a sequence's logits that does not depend on content: the keys' position part and the biases."""
        length, count = self.q.shape[2], self.pairs
        made = self.q.new_zeros(1, len(queries), length, dtype=torch.float64)
        if self.places is not None:
            q, own = self.ordered(self.q[sequence][:, queries]), self.ordered(_of(self.places, sequence))
            own = own[self.key_heads()] if len(own) > 1 else own
            turned = complex_pairs(own, count).conj() * self.turns
            made = made + (complex_pairs(q, count) @ turned.mT).real + q[..., 2 * count :] @ own[..., 2 * count :].mT
        if self.bias is not None:
            offsets = queries.unsqueeze(1) - torch.arange(length, device=queries.device)
            first = 0 if self.causal else length - 1
            made = made + self.bias.double()[:, (first + offsets).clamp(0, self.bias.shape[1] - 1)]
        return made if self.table is None else made + _of(self.table, sequence)[:, queries].double()


def _of(x: Float[Tensor, "_B *rest"], sequence: int) -> Float[Tensor, "*rest"]:
    """One sequence's part of what may be shared by all."""
    return x[sequence if len(x) > 1 else 0]


def movable_from(
    q: Tensor | AttentionTrace | LayerTrace, k: Tensor | None, given: Given
) -> Iterator[tuple[int, str, Keys]]:
    """Layer, split and keys: for each layer of a trace, one at a time; for tensors once, as layer -1."""
    if not isinstance(q, Tensor):
        given.require_trace_alone(k)
        choose("split", given.split, get_args(KeySplit))
        if isinstance(q, LayerTrace) and given.split not in ("known", "none"):
            raise invalid("split", "be 'known' or 'none' for a single layer", given.split)
        for layer in (q,) if isinstance(q, LayerTrace) else q:
            part, name = None, given.split
            if isinstance(q, AttentionTrace) and given.split not in ("known", "none"):
                part = layer.part(*position_parts(q, layer, given.split))[1]
            elif given.split == "known":
                part = known_key_part(layer)
                part, name = (None, "none") if part is None or not part.any() else (part, "input")
            yield layer.layer, name, _of_layer(layer, part, given.counted)
    elif given.counted != "all":
        raise InputError(f"counted must not be set for tensors, got {given.counted!r}.")
    elif k is None:
        raise InputError("k must be set with q.")
    elif isinstance(given.rotation, PositionalEncoding):
        if given.bias is not None:
            raise InputError("bias must not be set with an encoding.")
        q, k, given = in_bhnd(q, k, given)
        bare = replace(given, rotation=None, pairing=None, scale=1.0)
        yield -1, "none", _with_encoding(_of_tensors(q, k, bare), given)
    else:
        yield -1, "none", _of_tensors(*in_bhnd(q, k, given))


def in_bhnd(q: Tensor, k: Tensor, given: Given) -> tuple[Tensor, Tensor, Given]:
    """Queries, keys and other arguments with heads before tokens."""
    encoding, part = given.rotation, given.k_position
    layout = given.layout
    if layout is None and isinstance(encoding, PositionalEncoding) and q.ndim > 2:
        layout = "bhnd" if q.shape[-3] == encoding.num_heads else None  # the encoding knows the number of heads
    if layout == "bnhd" and part is not None and part.ndim > 2:
        part = part.transpose(-3, -2)
    q, k = as_bhnd(q, k, layout, required=encoding is not None)
    return q, k, replace(given, layout="bhnd", k_position=part)


def _with_encoding(bare: MovableKeys, given: Given) -> Keys:
    """Unrotated queries and keys with an encoding's rotation and bias, handled as a layer's."""
    encoding, pairing = given.rotation, given.pairing
    assert isinstance(encoding, PositionalEncoding)
    heads, length, width = bare.q.shape[1:]
    if (encoding.num_heads, encoding.head_dim) != (heads, width):
        got = f"{encoding.num_heads} heads of {encoding.head_dim}"
        raise invalid("rotation", f"have {heads} heads of {width} dimensions, as q has", got=got)
    if pairing is not None and isinstance(encoding, Rotary) and pairing != encoding.pairing:
        raise invalid("pairing", f"be {encoding.pairing!r}, as in the encoding", pairing)
    own = copy.deepcopy(encoding).to(bare.q.device).double()
    rows = torch.arange(length, device=bare.q.device)
    keys = bare.content.double() if bare.places is None else bare.content.double() + bare.places
    inputs = keys.new_zeros(len(keys), length, 1)
    layer = LayerTrace(
        layer=-1,
        inputs=inputs,
        key_inputs=inputs,
        added=None,
        q=bare.q,
        k=keys,
        v=keys,
        encoding=own,
        positions=own.place(rows),
        rows=rows,
        scale=given.scale,
        causal=bare.causal,
        lengths=bare.ends,
        part=lambda q, k: (q, k),
    )
    part = None if bare.places is None else bare.places.expand_as(keys)
    keys = _of_layer(layer, part, "all")
    asked = keys.asked if isinstance(keys, PairwiseLogits) else None
    return replace(keys, asked=asked, window=bare.window, chunk=bare.chunk)


def _of_tensors(q: Tensor, k: Tensor, given: Given) -> MovableKeys:
    rotation, bias, k_position, causal = given.rotation, given.bias, given.k_position, given.causal
    assert not isinstance(rotation, PositionalEncoding)
    for name, size in (("window", given.window), ("chunk", given.chunk)):
        if size is not None and size < 1:
            raise invalid(name, "be at least 1", size)
    if q.ndim == k.ndim == 2:
        q, k = q[None], k[None]
    heads_of(q, k)
    heads, length, width = q.shape[-3:]
    ends = ends_of(given.lengths, q)
    if k_position is not None:
        if k_position.shape[-2:] != k.shape[-2:] or not broadcasts(k_position.shape[:-2], k.shape[:-2]):
            raise invalid("k_position", "broadcast to the shape of k", got=f"shape {list(k_position.shape)}")
        k = k.double() - k_position.double()
        k_position = k_position.expand(*[1] * (k.ndim - k_position.ndim), *k_position.shape)
        if k.ndim != 4:
            k_position = k_position.expand(*k.shape[:-3], *k_position.shape[-3:])
        k_position = k_position.reshape(-1, *k_position.shape[-3:])
    frequencies = q.new_zeros(1, 0) if rotation is None else rotation
    frequencies = frequencies.unsqueeze(0) if frequencies.ndim == 1 else frequencies
    pairs = frequencies.shape[-1]
    if frequencies.ndim != 2 or len(frequencies) not in (1, heads) or 2 * pairs > width:
        got = f"shape {list(frequencies.shape)}"
        raise invalid("rotation", f"have shape [n] or [{heads}, n] with 2n <= {width}", got=got)
    groups = torch.zeros(width, dtype=torch.long, device=q.device)
    if rotation is not None:
        groups[: 2 * pairs] = terms.pair_numbers(pairs, given.pairing, q.device)
    table = None
    if bias is not None and bias.ndim == 4:
        bias, table = None, bias
        if q.ndim != 4 or not broadcasts(table.shape, (*q.shape[:2], length, length)):
            needed = [*q.shape[:-3], heads, length, length]
            raise invalid("bias", f"have 4 dimensions that broadcast to {needed}", got=f"shape {list(table.shape)}")
        table = table.expand(-1, -1, length, length)
    if bias is not None:
        bias = bias.unsqueeze(0) if bias.ndim == 1 else bias
        offsets = length if causal else 2 * length - 1
        if bias.ndim != 2 or len(bias) not in (1, heads) or bias.shape[1] != offsets:
            raise invalid("bias", f"have shape [{offsets}] or [{heads}, {offsets}]", got=f"shape {list(bias.shape)}")
    phases = torch.arange(length, device=q.device).double().unsqueeze(-1) * frequencies.double().unsqueeze(-2)
    turns = torch.polar(torch.ones_like(phases), -phases)
    return MovableKeys(
        q=terms.turned_pairs((q.double() * given.scale).reshape(-1, *q.shape[-3:]), groups, turns.conj()),
        content=k.reshape(-1, *k.shape[-3:]),
        places=k_position,
        groups=groups,
        turns=turns,
        bias=bias,
        causal=causal,
        ends=ends,
        window=_shorter(given.window, length),
        chunk=_shorter(given.chunk, length),
        table=table,
    )


def _shorter(size: int | None, length: int) -> int | None:
    return None if size is None or size >= length else size


def _of_layer(layer: LayerTrace, part: Float[Tensor, "B G R d"] | None, counted: Counted) -> Keys:
    """A layer in closed form if its logits have one, otherwise by its own logits; spot-checked."""
    encoding, name = layer.encoding, type(layer.encoding).__name__
    if encoding.overrides("transform_weights"):
        raise InputError(
            f"encoding: {name} changes the weights after the softmax, so its logits do not show the whole effect of "
            "position."
        )
    keys = _closed_form(layer, part, counted)
    if keys is not None and _is_true(layer, keys):
        return keys
    if layer.notes is None and encoding.overrides("note"):
        raise InputError(f"encoding: {name} reads the tokens' content. Use a trace of the model.")
    keys = PairwiseLogits.of(layer, part, layer.counted(counted))
    if not _is_true(keys.layer, keys):
        raise InputError(f"encoding: logits of {name} depend on the content of other keys, so keys cannot be moved.")
    return keys


def _closed_form(layer: LayerTrace, part: Float[Tensor, "B G R d"] | None, counted: Counted) -> MovableKeys | None:
    """The rotation of pairs, bias by offset and position part of the keys; None for encodings that do more."""
    encoding, bias, table = layer.encoding, None, None
    rotation = None if encoding.data_dependent else _rotation_of(layer)
    if rotation is None or any(map(encoding.overrides, ("score", "transform_logits"))):
        return None
    if encoding.overrides("bias"):
        if "bias" in encoding._seeing:
            return None
        bias = terms.bias_by_offset(layer, causal=layer.causal)
        if bias is None:
            table = terms.bias_by_position(in_float64(layer))
    q = layer.turn(layer.q.double(), layer.q.double())[0] * layer.scale
    return MovableKeys(
        q=q,
        content=layer.k if part is None else layer.k.double() - part.double(),
        places=part,
        groups=rotation[0],
        turns=rotation[1],
        bias=bias,
        table=table,
        causal=layer.causal,
        ends=layer.present.sum(1),
        asked=layer.counted(counted),
    )


def _rotation_of(layer: LayerTrace) -> tuple[Int[Tensor, "d"], Complex[Tensor, "_H R n"]] | None:
    """The pairs of dimensions and their factors at each position, found by rotating keys of 1; None if not known."""
    encoding, (heads, length, width) = layer.encoding, layer.q.shape[1:]
    groups = torch.zeros(width, dtype=torch.long, device=layer.q.device)
    if not encoding.overrides("rotate"):
        return groups, torch.zeros(1, length, 0, dtype=torch.complex128, device=groups.device)
    if not isinstance(encoding, Rotary) or encoding.by_sequence(layer.positions):
        return None
    pairs = encoding.frequencies.shape[-1]
    groups = terms.groups_of(encoding, width, groups.device)
    if groups is None:
        return None
    first, second = terms.pairs_index(groups, pairs)
    ones = torch.zeros(1, heads, length, width, dtype=torch.float64, device=groups.device)
    ones[..., first] = 1
    turned = layer.turn(ones, ones)[1][0]
    turns = torch.complex(turned[..., first], -turned[..., second])
    return groups, turns[:1] if (turns == turns[:1]).all() else turns


def _is_true(layer: LayerTrace, keys: Keys) -> bool:
    """Whether these are the layer's own logits, in the original order and (for another sequence) in reverse."""
    worst = largest = 0.0
    for sequence, as_it_is in ((0, True), (len(layer.q) - 1, False)):
        end = int(keys.ends[sequence])
        if not end:
            continue
        contents, changed = torch.arange(end, device=layer.q.device), layer.k
        if not as_it_is:
            contents, changed = contents.flip(0), changed.clone()
            own = 0 if keys.places is None else keys.places[sequence, :, :end]
            changed[sequence, :, :end] = (keys.content[sequence, :, :end].flip(1) + own).to(changed.dtype)
        queries = torch.linspace(0, end - 1, min(_CHECKED, end), device=layer.q.device).round().long().unique()
        part = slice(sequence, sequence + 1)
        true = layer.logits(layer.q, changed, sequences=part, queries=queries)[0].double()
        for index, query in enumerate(queries.tolist()):
            seen = query + 1 if keys.causal else end
            made = keys.logits(sequence, query, contents[:seen])
            worst = max(worst, float((made - true[:, index, :seen]).abs().max()))
            largest = max(largest, float(true[:, index, :seen].abs().max()))
    return worst <= _TOLERANCE.get(layer.q.dtype, 0.05) * largest


def complex_pairs(x: Float[Tensor, "*B d"], pairs: int) -> Complex[Tensor, "*B n"]:
    """The rotated pairs of `MovableKeys.ordered` dimensions as complex numbers."""
    copied = x[..., : 2 * pairs].clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(copied.unflatten(-1, (pairs, 2)))


def joined(z: Complex[Tensor, "*B n"]) -> Float[Tensor, "*B two_n"]:
    """Real and imaginary parts, alternating."""
    return torch.view_as_real(z).flatten(-2)


def turned_by(z: Complex[Tensor, "*B n"], x: Float[Tensor, "*_B d"]) -> Float[Tensor, "*_B2 d"]:
    """`MovableKeys.ordered` dimensions with other values of the rotated pairs."""
    return torch.cat((joined(z), x[..., 2 * z.shape[-1] :].expand(*z.shape[:-1], -1)), dim=-1)


@dataclass(frozen=True)
class Part:
    """Some queries of some sequences, with the keys that any of them sees.

    keys                without chunks; with a window only if causal
    sequences, queries  indices of the part's sequences and of its counted queries in the whole
    rows                indices of these queries in the part
    """

    keys: MovableKeys
    sequences: Int[Tensor, "b"]
    queries: Int[Tensor, "n"]
    rows: Int[Tensor, "n"]


def parts_of(keys: MovableKeys) -> Iterator[Part]:
    """Parts that contain each query once, with the keys that it sees; queries that see no key are left out.

    A two-sided window becomes causal by shifting: with query i at position i + r, the keys from i - r to i + r are a
    window of 2 r + 1 that ends there. The last r queries have no such position, but they do in the reversed sequence.
    A query with neither sees all keys.
    """
    length, device = keys.q.shape[2], keys.q.device
    every, size = torch.arange(len(keys.q), device=device), keys.chunk or length
    for start in range(0, length, size):
        chunk = _cut(keys, every, start, min(start + size, length))
        if keys.causal or keys.window is None:
            rows = torch.arange(chunk.q.shape[2], device=device)
            yield Part(chunk, every, start + rows, rows)
            continue
        for end in chunk.ends.unique().tolist():
            some = every[chunk.ends == end]
            for part in _on_both_sides(_cut(chunk, some, 0, end), keys.window - 1):
                yield replace(part, sequences=some, queries=start + part.queries)


def _on_both_sides(keys: MovableKeys, reach: int) -> Iterator[Part]:
    """Parts of unpadded sequences whose queries see ``reach`` keys on either side of their own."""
    count, device = keys.q.shape[2], keys.q.device
    every, places = torch.arange(len(keys.q), device=device), torch.arange(count, device=device)
    whole = places[max(0, count - reach) : reach]
    if len(whole):
        asked = ((places >= count - reach) & (places < reach)).expand(len(every), -1)
        asked = asked if keys.asked is None else asked & keys.asked
        yield Part(replace(keys, window=None, asked=asked), every, whole, whole)
    if reach < count:
        yield Part(_later(keys, reach), every, places[: count - reach], places[reach:])
    last = min(2 * reach, count)
    if last > reach:
        end = _cut(keys, every, count - last, count)
        dims = {"q": 2, "content": 2, "places": 2, "turns": 1, "bias": 1, "asked": 1, "table": (2, 3)}
        back = {name: x.flip(dim) for name, dim in dims.items() if (x := getattr(end, name)) is not None}
        yield Part(
            _later(replace(end, **back), reach), every, places[max(count - reach, reach) :], places[reach:last].flip(0)
        )


def _later(keys: MovableKeys, by: int) -> MovableKeys:
    """Causal keys with each query ``by`` positions later; the last queries are left out."""
    count = keys.q.shape[2]
    q = torch.zeros_like(keys.q)
    q[:, :, by:] = keys.q[:, :, : count - by]
    asked = (torch.arange(count, device=q.device) >= by).expand(len(q), -1)
    if keys.asked is not None:
        asked = asked & keys.asked.roll(by, 1)
    bias = None if keys.bias is None else keys.bias[:, count - 1 - by : 2 * count - 1 - by]
    table = None if keys.table is None else keys.table.roll(by, 2)
    return replace(keys, q=q, causal=True, asked=asked, bias=bias, table=table, window=_shorter(2 * by + 1, count))


def _cut(keys: MovableKeys, some: Int[Tensor, "b"], start: int, stop: int) -> MovableKeys:
    """Some sequences from position ``start`` up to ``stop``, without chunks."""
    length, count = keys.q.shape[2], stop - start
    if len(some) == len(keys.q) and count == length:
        return replace(keys, chunk=None)
    rows, bias = slice(start, stop), keys.bias
    places, table = (x if x is None or len(x) == 1 else x[some] for x in (keys.places, keys.table))
    if bias is not None:
        bias = bias[:, :count] if keys.causal else bias[:, length - count : length - 1 + count]
    return replace(
        keys,
        q=keys.q[some][:, :, rows],
        content=keys.content[some][:, :, rows],
        places=None if places is None else places[:, :, rows],
        turns=keys.turns[:, rows],
        bias=bias,
        table=None if table is None else table[:, :, rows, rows],
        ends=(keys.ends[some] - start).clamp(0, count),
        asked=None if keys.asked is None else keys.asked[some][:, rows],
        window=_shorter(keys.window, count),
        chunk=None,
    )
