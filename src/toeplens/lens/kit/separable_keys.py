"""Queries and keys whose content can be moved to any position, from tensors or from a model's layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypedDict, get_args

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from toeplens.encodings import PositionalEncoding, attention_logits
from toeplens.encodings.rotary import Pairing, Rotary
from toeplens.lens.kit import terms
from toeplens.lens.kit.position import known_key_part, position_parts, to_float64
from toeplens.lens.kit.rotation import RotaryPairs, as_rotation
from toeplens.lens.kit.toeplitz import Layout, is_broadcastable, sequence_ends, to_bhnd
from toeplens.lens.kit.trace import AttentionTrace, CountedQueries, LayerTrace
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.options import PositiveInt, check_value

MAX_TOTAL_LOGITS = 1 << 31  # limit on the logits of all tables; above it only the first sequences are used
_MAX_LOGITS = 1 << 22  # logits of tables in memory at once


@dataclass(frozen=True, kw_only=True)
class PermutableKeys:
    """Keys whose content can be moved to any position, and which of them each query sees.

    content        [B, G, N, d] keys before the rotation, minus their position part; head h reads h // (H / G)
    position_part  [B or 1, G or 1, N, d] that part of the keys, before the rotation; None if there is none
    ends           [B] number of tokens of each sequence; later positions are padding
    query_mask     [B, N] the queries that count; None if all do
    causal         whether query i sees key j only for j <= i
    window         maximum number of keys that a query sees up to its own, on either side if not causal; None for all
    chunk          number of positions per chunk; queries see only keys of their own chunk. None without chunks
    """

    content: Float[Tensor, "B G N d"]
    position_part: Float[Tensor, "_B _G N d"] | None
    ends: Int[Tensor, "B"]
    query_mask: Bool[Tensor, "B N"] | None = None
    causal: bool
    window: int | None = None
    chunk: int | None = None

    def span(self, queries: Int[Tensor, "Q"]) -> tuple[Int[Tensor, "Q"], Int[Tensor, "Q"]]:
        """The first position that each query sees, and the one after the last, without regard to padding."""
        first, end = queries * 0, queries * 0 + self.content.shape[2]
        if self.chunk is not None:
            first = queries - queries % self.chunk
            end = first + self.chunk
        if self.window is not None:
            first, end = torch.maximum(first, queries + 1 - self.window), torch.minimum(end, queries + self.window)
        return first, queries + 1 if self.causal else end

    def num_visible(self) -> Int[Tensor, "B N"]:
        """Number of keys that each query sees; 0 for padding and for queries that do not count."""
        rows, ends = torch.arange(self.content.shape[2], device=self.ends.device), self.ends.unsqueeze(1)
        first, end = self.span(rows)
        num_visible = torch.where(rows < ends, torch.minimum(end, ends) - first, 0)
        return num_visible if self.query_mask is None else num_visible * self.query_mask

    def visible_mask(self, queries: Int[Tensor, "Q"]) -> Bool[Tensor, "B Q N"]:
        """Which keys each of these queries sees."""
        rows = torch.arange(self.content.shape[2], device=self.ends.device)
        first, end = (x.unsqueeze(1) for x in self.span(queries))
        present = rows < self.ends.unsqueeze(1)
        return (rows >= first) & (rows < end) & present.unsqueeze(1) & present[:, queries].unsqueeze(-1)

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """The logits of one query, in float64, with other contents at the n positions that it sees.

        ``contents`` says whose content is at each of them, counted from the first; 0, 1, ..., n - 1 is the original.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PairwiseLogits(PermutableKeys):
    """The logits of a layer, in float64, as a function of one query and one key content; the rest stays in place.

    A query's table M_jm is the logit at position j of the key whose content is that of position m. What the encoding
    reads in addition (`PositionalEncoding.key_features`) belongs to the position.
    """

    layer: LayerTrace

    @classmethod
    def from_layer(
        cls, layer: LayerTrace, position_part: Float[Tensor, "B G R d"] | None, query_mask: Bool[Tensor, "B N"]
    ) -> PairwiseLogits:
        """From a layer and the position part of its keys. Raises `InputError` if one table is too large."""
        layer = to_float64(layer)
        heads, length = layer.q.shape[1:3]
        longest = math.isqrt((_MAX_LOGITS << 6) // heads)
        if length > longest:
            name = type(layer.encoding).__name__
            raise invalid("tokens", f"be at most {longest} per sequence with {name} and {heads} heads", length)
        work = (query_mask.sum(1) * heads * length**2).cumsum(0)
        in_limit = (work <= MAX_TOTAL_LOGITS) | (torch.arange(len(work), device=work.device) == 0)
        return cls(
            layer=layer,
            content=layer.k if position_part is None else layer.k - position_part.double(),
            position_part=position_part,
            ends=layer.present.sum(1),
            query_mask=query_mask & in_limit.unsqueeze(1),
            causal=layer.causal,
        )

    def tables(self) -> Iterator[tuple[slice, Int[Tensor, "Q"], Float[Tensor, "b H Q N N"], Bool[Tensor, "b Q N"]]]:
        """Sequences, queries, their tables [position, content], and the visible keys; some at a time."""
        assert self.query_mask is not None
        _, heads, length, _ = self.layer.q.shape
        tables_per_step = max(1, _MAX_LOGITS // (heads * length**2))
        for queries in torch.arange(length, device=self.query_mask.device).split(min(tables_per_step, length)):
            step = max(1, tables_per_step // len(queries))
            for start in range(0, len(self.query_mask), step):
                sequences = slice(start, start + step)
                if self.query_mask[sequences, queries].any():
                    visible = self.visible_mask(queries)[sequences] & self.query_mask[sequences, queries].unsqueeze(-1)
                    last = int(queries[-1]) + 1 if self.causal else length
                    yield sequences, queries, self._table(sequences, queries, last), visible

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """See `PermutableKeys.logits`."""
        query_index = torch.tensor([query], device=self.ends.device)
        start = int(self.span(query_index)[0])
        contents = contents + start
        table = self._table(slice(sequence, sequence + 1), query_index, int(contents.max()) + 1)[0, :, 0]
        return table[:, torch.arange(start, start + contents.shape[-1], device=table.device), contents]

    def _table(self, sequences: slice, queries: Int[Tensor, "Q"], contents: int) -> Float[Tensor, "b H Q N N"]:
        """The logits of the first ``contents`` contents at every position; 0 for the others."""
        q, key_content, part = self.layer.q, self.content[sequences], self.position_part
        part = part if part is None or len(part) == 1 else part[sequences]
        table = q.new_zeros(len(key_content), q.shape[1], len(queries), key_content.shape[2], key_content.shape[2])
        for content in range(contents):
            keys = key_content[:, :, content : content + 1].expand_as(key_content)
            keys = keys if part is None else keys + part
            table[..., content] = self.layer.call_attention(attention_logits, q, keys, sequences, queries).detach()
        return table


KeySplit = Literal["known", "none", "input", "mean", "ablate"]


class AttentionOptionArguments(TypedDict, total=False):
    """The fields of `AttentionOptions` as keyword arguments, for editors."""

    rotation: Float[Tensor, "*_H n"] | RotaryPairs | PositionalEncoding | None
    pairing: Pairing | None
    rotated: bool
    layout: Layout | None
    bias: Float[Tensor, "*_H D"] | None
    k_position: Float[Tensor, "*_B N d"] | None
    causal: bool
    scale: float
    lengths: Int[Tensor, "B"] | None
    split: KeySplit
    counted: CountedQueries
    window: int | None
    chunk: int | None


@dataclass(frozen=True)
class AttentionOptions:
    """Arguments in addition to queries and keys; see `toeplens.lens.behaviour`."""

    rotation: Tensor | RotaryPairs | PositionalEncoding | None = None
    pairing: Pairing | None = None
    rotated: bool = False
    layout: Layout | None = None
    bias: Tensor | None = None
    k_position: Tensor | None = None
    causal: bool = True
    scale: float = 1.0
    lengths: Tensor | None = None
    split: KeySplit = "known"
    counted: CountedQueries = "all"
    window: int | None = None
    chunk: int | None = None

    def require_trace_alone(self, q: AttentionTrace | LayerTrace, k: Tensor | None) -> None:
        """Refuse what is no trace, and arguments that are read from a trace."""
        if not isinstance(q, AttentionTrace | LayerTrace):
            raise invalid("q", "be a torch.Tensor, an AttentionTrace or one of its layers", q)
        for name, value in {"k": k, **vars(self), "rotated": self.rotated or None}.items():
            if name not in ("causal", "scale", "split", "counted") and value is not None:
                raise InputError(f"{name} must not be set with a trace.")


# a process's first multi-threaded cosines can differ by up to 7e-9 from later ones; 1e-9 would refuse at random
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
_NUM_CHECKED = 4  # queries per sequence whose logits are recomputed
_MAX_ELEMENTS = 2**21  # numbers of moved keys in memory at once


@dataclass(frozen=True, kw_only=True)
class SeparableKeys(PermutableKeys):
    """Queries, and keys whose logits are in closed form.

    q              [B, H, N, d] queries, rotated, times the scale of the logits
    groups         [d] the pair that each dimension belongs to, from 1, two dimensions each; 0 where it is not rotated
    phase_factors  [H or 1, N, n] of the conjugates of a key's pairs at each position: e^(-iota j theta)
    bias           [H or 1, D] by offset, 0 .. N-1 if causal, otherwise -(N-1) .. N-1; None if there is none
    table          [B or 1, H or 1, N, N] a bias by query and position, independent of content; None if there is none
    """

    q: Float[Tensor, "B H N d"]
    groups: Int[Tensor, "d"]
    phase_factors: Complex[Tensor, "_H N n"]
    bias: Float[Tensor, "_H D"] | None = None
    table: Float[Tensor, "_B _H N N"] | None = None

    @property
    def num_pairs(self) -> int:
        """Number n of rotated pairs of dimensions."""
        return self.phase_factors.shape[-1]

    def order_pairs_first(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """Reorder the dimensions, in float64: the rotated pairs one after the other, then the unrotated ones."""
        return x[..., self._pairs_first].double()

    @cached_property
    def _pairs_first(self) -> slice | Int[Tensor, "d"]:
        return terms.index_of(self.groups.argsort(stable=True).roll(2 * self.num_pairs))

    def key_heads(self, heads: slice = slice(None)) -> Int[Tensor, "h"]:
        """The key head of each head."""
        count = self.q.shape[1]
        return torch.arange(count, device=self.q.device)[heads] // (count // self.content.shape[1])

    def logits(self, sequence: int, query: int, contents: Int[Tensor, "*K n"]) -> Float[Tensor, "H *K n"]:
        """See `PermutableKeys.logits`."""
        n = contents.shape[-1]
        start = int(self.span(torch.tensor([query]))[0])
        rows = torch.arange(start, start + n, device=self.q.device)
        q = self.order_pairs_first(self.q[sequence, :, query])
        v = replace_pairs(complex_pairs(q, self.num_pairs).unsqueeze(1) * self.phase_factors[:, rows], q.unsqueeze(1))
        keys = self.order_pairs_first(self.content[sequence, :, start : int(self.ends[sequence])])[self.key_heads()]
        step = max(1, _MAX_ELEMENTS // v.numel())
        parts = contents.reshape(-1, n).split(step)
        logits = torch.cat([torch.einsum("hnd,hknd->hkn", v, keys[:, chunk]) for chunk in parts], dim=1)
        logits = logits + self.position_logits(sequence, torch.tensor([query], device=rows.device))[..., rows]
        return logits.unflatten(1, contents.shape[:-1]) if contents.ndim > 1 else logits[:, 0]

    def position_logits(self, sequence: int, queries: Int[Tensor, "Q"]) -> Float[Tensor, "_H Q N"]:
        """The part of a sequence's logits that does not depend on content: the keys' position part and the biases."""
        length, count = self.q.shape[2], self.num_pairs
        logits = self.q.new_zeros(1, len(queries), length, dtype=torch.float64)
        if self.position_part is not None:
            q = self.order_pairs_first(self.q[sequence][:, queries])
            part = self.order_pairs_first(_select_sequence(self.position_part, sequence))
            part = part[self.key_heads()] if len(part) > 1 else part
            rotated = complex_pairs(part, count).conj() * self.phase_factors
            logits = logits + (complex_pairs(q, count) @ rotated.mT).real
            logits = logits + q[..., 2 * count :] @ part[..., 2 * count :].mT
        if self.bias is not None:
            offsets = queries.unsqueeze(1) - torch.arange(length, device=queries.device)
            first = 0 if self.causal else length - 1
            logits = logits + self.bias.double()[:, (first + offsets).clamp(0, self.bias.shape[1] - 1)]
        return logits if self.table is None else logits + _select_sequence(self.table, sequence)[:, queries].double()


def _select_sequence(x: Float[Tensor, "_B *rest"], sequence: int) -> Float[Tensor, "*rest"]:
    """One sequence's part of what may be shared by all."""
    return x[sequence if len(x) > 1 else 0]


def iter_layer_keys(
    q: Tensor | AttentionTrace | LayerTrace, k: Tensor | None, options: AttentionOptions
) -> Iterator[tuple[int, str, PermutableKeys]]:
    """Layer, split and keys: for each layer of a trace, one at a time; for tensors once, as layer -1."""
    if not isinstance(q, Tensor):
        options.require_trace_alone(q, k)
        choose("split", options.split, get_args(KeySplit))
        if isinstance(q, LayerTrace) and options.split not in ("known", "none"):
            raise invalid("split", "be 'known' or 'none' for a single layer", options.split)
        for layer in (q,) if isinstance(q, LayerTrace) else q:
            part, name = None, options.split
            if isinstance(q, AttentionTrace) and options.split not in ("known", "none"):
                part = layer.project_part(*position_parts(q, layer, options.split))[1]
            elif options.split == "known":
                part = known_key_part(layer)
                part, name = (None, "none") if part is None or not part.any() else (part, "input")
            yield layer.layer, name, _keys_from_layer(layer, part, options.counted)
    elif isinstance(options.rotation, PositionalEncoding):
        if options.bias is not None:
            raise InputError("bias must not be set with an encoding.")
        q, k, options = prepare_tensors(q, k, options)
        bare = replace(options, rotation=None, pairing=None, scale=1.0)
        yield -1, "none", _keys_with_encoding(_keys_from_tensors(q, k, bare), options)
    else:
        yield -1, "none", _keys_from_tensors(*prepare_tensors(q, k, options))


def prepare_tensors(q: Tensor, k: Tensor | None, options: AttentionOptions) -> tuple[Tensor, Tensor, AttentionOptions]:
    """Queries and keys before the rotation, times its magnitude, and other arguments; with heads before tokens."""
    if options.counted != "all":
        raise InputError(f"counted must not be set for tensors, got {options.counted!r}.")
    rotation, k_position, layout = options.rotation, options.k_position, options.layout
    if layout == "bnhd" and k_position is not None and k_position.ndim > 2:
        k_position = k_position.transpose(-3, -2)
    q, k = to_bhnd(q, k, layout, required=rotation is not None, num_heads=getattr(rotation, "num_heads", None))
    if options.rotated and (rotation is None or isinstance(rotation, PositionalEncoding)):
        raise InputError("rotated must be False without a rotation by frequencies.")
    if options.rotated and k_position is not None:
        raise InputError("k_position must not be set with rotated=True.")
    if rotation is not None and not isinstance(rotation, PositionalEncoding):
        rotation = as_rotation(rotation, options.pairing, q)
        if options.rotated:
            q, k = (rotation.rotate(x, inverse=True) for x in (q, k))
        q, k = rotation.scale(q), rotation.scale(k)
        k_position = None if k_position is None else rotation.scale(k_position)
        rotation = replace(rotation, magnitude=1.0)
    return q, k, replace(options, layout="bhnd", rotation=rotation, rotated=False, k_position=k_position)


def _keys_with_encoding(bare: SeparableKeys, options: AttentionOptions) -> PermutableKeys:
    """Unrotated queries and keys with an encoding's rotation and bias, handled as a layer's."""
    encoding, pairing = options.rotation, options.pairing
    assert isinstance(encoding, PositionalEncoding)
    heads, length, width = bare.q.shape[1:]
    if (encoding.num_heads, encoding.head_dim) != (heads, width):
        got = f"{encoding.num_heads} heads of {encoding.head_dim}"
        raise invalid("rotation", f"have {heads} heads of {width} dimensions, as q has", got=got)
    if pairing is not None and isinstance(encoding, Rotary) and pairing != encoding.pairing:
        raise invalid("pairing", f"be {encoding.pairing!r}, as in the encoding", pairing)
    double_encoding = copy.deepcopy(encoding).to(bare.q.device).double()
    rows = torch.arange(length, device=bare.q.device)
    keys = bare.content.double() if bare.position_part is None else bare.content.double() + bare.position_part
    inputs = keys.new_zeros(len(keys), length, 1)
    layer = LayerTrace(
        layer=-1,
        inputs=inputs,
        key_inputs=inputs,
        position_vectors=None,
        q=bare.q,
        k=keys,
        v=keys,
        encoding=double_encoding,
        positions=double_encoding.to_positions(rows),
        rows=rows,
        scale=options.scale,
        causal=bare.causal,
        lengths=bare.ends,
        project_part=lambda q, k: (q, k),
    )
    position_part = None if bare.position_part is None else bare.position_part.expand_as(keys)
    keys = _keys_from_layer(layer, position_part, "all")
    query_mask = keys.query_mask if isinstance(keys, PairwiseLogits) else None
    return replace(keys, query_mask=query_mask, window=bare.window, chunk=bare.chunk)


def _keys_from_tensors(q: Tensor, k: Tensor, options: AttentionOptions) -> SeparableKeys:
    rotation, bias, k_position, causal = options.rotation, options.bias, options.k_position, options.causal
    assert rotation is None or isinstance(rotation, RotaryPairs)
    for name, size in (("window", options.window), ("chunk", options.chunk)):
        check_value(name, size, PositiveInt | None)
    bias = None if bias is None else torch.as_tensor(bias, device=q.device)
    if q.ndim == k.ndim == 2:
        q, k = q[None], k[None]
    heads, length, width = q.shape[-3:]
    ends = sequence_ends(options.lengths, q)
    if k_position is not None:
        if k_position.shape[-2:] != k.shape[-2:] or not is_broadcastable(k_position.shape[:-2], k.shape[:-2]):
            raise invalid("k_position", "broadcast to the shape of k", got=f"shape {list(k_position.shape)}")
        k = k.double() - k_position.double()
        k_position = k_position.expand(*[1] * (k.ndim - k_position.ndim), *k_position.shape)
        if k.ndim != 4:
            k_position = k_position.expand(*k.shape[:-3], *k_position.shape[-3:])
        k_position = k_position.reshape(-1, *k_position.shape[-3:])
    rotation = RotaryPairs(q.new_zeros(0), "half", width) if rotation is None else rotation
    groups, frequencies = rotation.groups(q.device), torch.atleast_2d(rotation.frequencies.to(q.device))
    table = None
    if bias is not None and bias.ndim == 4:
        bias, table = None, bias
        if q.ndim != 4 or not is_broadcastable(table.shape, (*q.shape[:2], length, length)):
            expected = [*q.shape[:-3], heads, length, length]
            raise invalid("bias", f"have 4 dimensions that broadcast to {expected}", got=f"shape {list(table.shape)}")
        table = table.expand(-1, -1, length, length)
    if bias is not None:
        bias = bias.unsqueeze(0) if bias.ndim == 1 else bias
        offsets = length if causal else 2 * length - 1
        if bias.ndim != 2 or len(bias) not in (1, heads) or bias.shape[1] != offsets:
            raise invalid("bias", f"have shape [{offsets}] or [{heads}, {offsets}]", got=f"shape {list(bias.shape)}")
    phases = torch.arange(length, device=q.device).double().unsqueeze(-1) * frequencies.unsqueeze(-2)
    phase_factors = torch.polar(torch.ones_like(phases), -phases)
    return SeparableKeys(
        q=terms.rotate_pairs((q.double() * options.scale).reshape(-1, *q.shape[-3:]), groups, phase_factors.conj()),
        content=k.reshape(-1, *k.shape[-3:]),
        position_part=k_position,
        groups=groups,
        phase_factors=phase_factors,
        bias=bias,
        causal=causal,
        ends=ends,
        window=_effective_size(options.window, length),
        chunk=_effective_size(options.chunk, length),
        table=table,
    )


def _effective_size(size: int | None, length: int) -> int | None:
    return None if size is None or size >= length else size


def _keys_from_layer(layer: LayerTrace, part: Tensor | None, counted: CountedQueries) -> PermutableKeys:
    """A layer in closed form if its logits have one, otherwise by its own logits; spot-checked."""
    encoding, name = layer.encoding, type(layer.encoding).__name__
    if encoding.overrides("transform_weights"):
        raise InputError(
            f"encoding: {name} changes the weights after the softmax, so its logits do not show the whole effect of "
            "position."
        )
    keys = _closed_form(layer, part, counted)
    if keys is not None and _matches_layer(layer, keys):
        return keys
    if layer.key_features is None and encoding.overrides("key_features"):
        raise InputError(f"encoding: {name} reads the tokens' content. Use a trace of the model.")
    keys = PairwiseLogits.from_layer(layer, part, layer.query_mask(counted))
    if not _matches_layer(keys.layer, keys):
        raise InputError(f"encoding: logits of {name} depend on the content of other keys, so keys cannot be moved.")
    return keys


def _closed_form(layer: LayerTrace, part: Tensor | None, counted: CountedQueries) -> SeparableKeys | None:
    """The rotation of pairs, bias by offset and position part of the keys; None for encodings that do more."""
    encoding, bias, table = layer.encoding, None, None
    rotation = None if encoding.data_dependent else _rotation_factors(layer)
    if rotation is None or any(map(encoding.overrides, ("score", "transform_logits"))):
        return None
    if encoding.overrides("bias"):
        if "bias" in encoding._inputs_argument:
            return None
        bias = terms.bias_by_offset(layer, causal=layer.causal)
        if bias is None:
            table = terms.bias_by_position(to_float64(layer))
    q = layer.rotate(layer.q.double(), layer.q.double())[0] * layer.scale
    return SeparableKeys(
        q=q,
        content=layer.k if part is None else layer.k.double() - part.double(),
        position_part=part,
        groups=rotation[0],
        phase_factors=rotation[1],
        bias=bias,
        table=table,
        causal=layer.causal,
        ends=layer.present.sum(1),
        query_mask=layer.query_mask(counted),
    )


def _rotation_factors(layer: LayerTrace) -> tuple[Int[Tensor, "d"], Complex[Tensor, "_H R n"]] | None:
    """The pairs of dimensions and their factors at each position, found by rotating keys of 1; None if not known."""
    encoding, (heads, length, width) = layer.encoding, layer.q.shape[1:]
    groups = torch.zeros(width, dtype=torch.long, device=layer.q.device)
    if not encoding.overrides("rotate"):
        return groups, torch.zeros(1, length, 0, dtype=torch.complex128, device=groups.device)
    if not isinstance(encoding, Rotary) or encoding.is_per_sequence(layer.positions):
        return None
    pairs = encoding.frequencies.shape[-1]
    groups = terms.encoding_groups(encoding, width, groups.device)
    if groups is None:
        return None
    first, second = terms.pairs_index(groups, pairs)
    unit_keys = torch.zeros(1, heads, length, width, dtype=torch.float64, device=groups.device)
    unit_keys[..., first] = 1
    rotated = layer.rotate(unit_keys, unit_keys)[1][0]
    phase_factors = torch.complex(rotated[..., first], -rotated[..., second])
    return groups, phase_factors[:1] if (phase_factors == phase_factors[:1]).all() else phase_factors


def _matches_layer(layer: LayerTrace, keys: PermutableKeys) -> bool:
    """Whether these are the layer's own logits, in the original order and (for another sequence) in reverse."""
    worst = largest = 0.0
    for sequence, in_order in ((0, True), (len(layer.q) - 1, False)):
        end = int(keys.ends[sequence])
        if not end:
            continue
        contents, changed_k = torch.arange(end, device=layer.q.device), layer.k
        if not in_order:
            contents, changed_k = contents.flip(0), changed_k.clone()
            position_part = 0 if keys.position_part is None else keys.position_part[sequence, :, :end]
            changed_k[sequence, :, :end] = (keys.content[sequence, :, :end].flip(1) + position_part).to(changed_k.dtype)
        queries = torch.linspace(0, end - 1, min(_NUM_CHECKED, end), device=layer.q.device).round().long().unique()
        selected = slice(sequence, sequence + 1)
        expected = layer.logits(layer.q, changed_k, sequences=selected, queries=queries)[0].double()
        for index, query in enumerate(queries.tolist()):
            num_visible = query + 1 if keys.causal else end
            logits = keys.logits(sequence, query, contents[:num_visible])
            worst = max(worst, float((logits - expected[:, index, :num_visible]).abs().max()))
            largest = max(largest, float(expected[:, index, :num_visible].abs().max()))
    return worst <= _TOLERANCE.get(layer.q.dtype, 0.05) * largest


def complex_pairs(x: Float[Tensor, "*B d"], pairs: int) -> Complex[Tensor, "*B n"]:
    """The rotated pairs of dimensions in the order of `SeparableKeys.order_pairs_first`, as complex numbers."""
    copied = x[..., : 2 * pairs].clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(copied.unflatten(-1, (pairs, 2)))


def interleave_complex(z: Complex[Tensor, "*B n"]) -> Float[Tensor, "*B two_n"]:
    """Real and imaginary parts, alternating."""
    return torch.view_as_real(z).flatten(-2)


def replace_pairs(z: Complex[Tensor, "*B n"], x: Float[Tensor, "*_B d"]) -> Float[Tensor, "*_B2 d"]:
    """Dimensions in the order of `SeparableKeys.order_pairs_first`, with other values of the rotated pairs."""
    return torch.cat((interleave_complex(z), x[..., 2 * z.shape[-1] :].expand(*z.shape[:-1], -1)), dim=-1)


@dataclass(frozen=True)
class QueryBlock:
    """Some queries of some sequences, with the keys that any of them sees.

    keys                without chunks; with a window only if causal
    sequences, queries  indices of the part's sequences and of its counted queries in the whole
    rows                indices of these queries in the part
    """

    keys: SeparableKeys
    sequences: Int[Tensor, "b"]
    queries: Int[Tensor, "n"]
    rows: Int[Tensor, "n"]


def query_blocks(keys: SeparableKeys) -> Iterator[QueryBlock]:
    """Parts that contain each query once, with the keys that it sees; queries that see no key are left out.

    A two-sided window becomes causal by shifting: with query i at position i + r, the keys from i - r to i + r are a
    window of 2 r + 1 that ends there. The last r queries have no such position, but they do in the reversed sequence.
    A query with neither sees all keys.
    """
    length, device = keys.q.shape[2], keys.q.device
    all_sequences, size = torch.arange(len(keys.q), device=device), keys.chunk or length
    for start in range(0, length, size):
        chunk = _slice_keys(keys, all_sequences, start, min(start + size, length))
        if keys.causal or keys.window is None:
            rows = torch.arange(chunk.q.shape[2], device=device)
            yield QueryBlock(chunk, all_sequences, start + rows, rows)
            continue
        for end in chunk.ends.unique().tolist():
            sequences = all_sequences[chunk.ends == end]
            for block in _two_sided_blocks(_slice_keys(chunk, sequences, 0, end), keys.window - 1):
                yield replace(block, sequences=sequences, queries=start + block.queries)


def _two_sided_blocks(keys: SeparableKeys, reach: int) -> Iterator[QueryBlock]:
    """Parts of unpadded sequences whose queries see ``reach`` keys on either side of their own."""
    count, device = keys.q.shape[2], keys.q.device
    all_sequences, positions = torch.arange(len(keys.q), device=device), torch.arange(count, device=device)
    full_rows = positions[max(0, count - reach) : reach]
    if len(full_rows):
        query_mask = ((positions >= count - reach) & (positions < reach)).expand(len(all_sequences), -1)
        query_mask = query_mask if keys.query_mask is None else query_mask & keys.query_mask
        yield QueryBlock(replace(keys, window=None, query_mask=query_mask), all_sequences, full_rows, full_rows)
    if reach < count:
        yield QueryBlock(_delay_queries(keys, reach), all_sequences, positions[: count - reach], positions[reach:])
    last = min(2 * reach, count)
    if last > reach:
        tail = _slice_keys(keys, all_sequences, count - last, count)
        dims: dict[str, int | tuple[int, int]] = dict.fromkeys(("phase_factors", "bias", "query_mask"), 1)
        dims |= {"table": (2, 3), **dict.fromkeys(("q", "content", "position_part"), 2)}
        flipped = {name: x.flip(dim) for name, dim in dims.items() if (x := getattr(tail, name)) is not None}
        delayed, queries = _delay_queries(replace(tail, **flipped), reach), positions[max(count - reach, reach) :]
        yield QueryBlock(delayed, all_sequences, queries, positions[reach:last].flip(0))


def _delay_queries(keys: SeparableKeys, shift: int) -> SeparableKeys:
    """Causal keys with each query ``shift`` positions later; the last queries are left out."""
    count = keys.q.shape[2]
    q = torch.zeros_like(keys.q)
    q[:, :, shift:] = keys.q[:, :, : count - shift]
    query_mask = (torch.arange(count, device=q.device) >= shift).expand(len(q), -1)
    if keys.query_mask is not None:
        query_mask = query_mask & keys.query_mask.roll(shift, 1)
    bias = None if keys.bias is None else keys.bias[:, count - 1 - shift : 2 * count - 1 - shift]
    table = None if keys.table is None else keys.table.roll(shift, 2)
    window = _effective_size(2 * shift + 1, count)
    return replace(keys, q=q, causal=True, query_mask=query_mask, bias=bias, table=table, window=window)


def _slice_keys(keys: SeparableKeys, sequences: Int[Tensor, "b"], start: int, stop: int) -> SeparableKeys:
    """Some sequences from position ``start`` up to ``stop``, without chunks."""
    length, count = keys.q.shape[2], stop - start
    if len(sequences) == len(keys.q) and count == length:
        return replace(keys, chunk=None)
    rows, bias = slice(start, stop), keys.bias
    position_part, table = (x if x is None or len(x) == 1 else x[sequences] for x in (keys.position_part, keys.table))
    if bias is not None:
        bias = bias[:, :count] if keys.causal else bias[:, length - count : length - 1 + count]
    return replace(
        keys,
        q=keys.q[sequences][:, :, rows],
        content=keys.content[sequences][:, :, rows],
        position_part=None if position_part is None else position_part[:, :, rows],
        phase_factors=keys.phase_factors[:, rows],
        bias=bias,
        table=None if table is None else table[:, :, rows, rows],
        ends=(keys.ends[sequences] - start).clamp(0, count),
        query_mask=None if keys.query_mask is None else keys.query_mask[sequences][:, rows],
        window=_effective_size(keys.window, count),
        chunk=None,
    )
