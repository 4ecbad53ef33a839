"""The parts of one attention call, and the logits and weights that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.utils import InputError

AT_ONCE = 1 << 24  # numbers per block
_MASK_LIMIT = -1e8
_MIN_MASK = 1e3  # added values that mask keys are at least this large
MASK_FILL = -_MIN_MASK  # a value that replaces a logit (is not added to it) may mask the key from here on
_GAP_OCTAVES = 2  # octaves without values between biases and masking values
_OCTAVE_STEPS = 8  # search steps per octave


def blocks(queries: int, numbers: int, at_once: int | None = None) -> Iterator[slice]:
    """Slices of the queries, each as long as ``at_once`` numbers allow (`AT_ONCE`), with ``numbers`` per query."""
    step = max(1, (at_once or AT_ONCE) // max(1, numbers))
    yield from (slice(start, min(start + step, queries)) for start in range(0, queries, step))


def masking_limit(dtype: torch.dtype) -> float:
    """A value below every masking value (models add the minimum of their dtype, or -1e9 and less): compared with a
    visible key, the weight of such a key is 0 in every precision."""
    return max(torch.finfo(dtype).min / 4, _MASK_LIMIT)


def mask_threshold(term: Float[Tensor, "_B _H Nq Nk"]) -> float:
    """The value from which on down added values may mask keys, whatever dtype they were made in.

    That is `masking_limit`, or a value further up that is large and far below all values nearer to 0: -65504 or -10000
    in float32. A bias that grows with distance has no such gap.
    """
    lowest = masking_limit(term.dtype)
    if not bool(((term <= -_MIN_MASK) & (term > lowest)).any()):
        return lowest
    steps = torch.zeros(_OCTAVE_STEPS * 1024, dtype=torch.bool, device=term.device)
    for _, block in _row_blocks(term):
        values = block[(block <= -_MIN_MASK / 2**_GAP_OCTAVES) & (block > lowest)].double()
        steps[(-values).log2().mul(_OCTAVE_STEPS).floor().long()] = True
    filled = steps.nonzero().flatten().tolist()
    for step, before in zip(filled, [-torch.inf, *filled], strict=False):
        if step - before > _GAP_OCTAVES * _OCTAVE_STEPS and 2 ** ((step + 1) / _OCTAVE_STEPS) >= _MIN_MASK:
            return -(2 ** ((step - 1) / _OCTAVE_STEPS))
    return lowest


def bias_and_mask(
    terms: Sequence[Float[Tensor, "_B _H _Nq _Nk"]],
    masks: Sequence[Bool[Tensor, "_B _H _Nq _Nk"]],
    keys: int,
    rows: Int[Tensor, "R"],
    weights: Callable[[Tensor | None, Tensor | None], Float[Tensor, "B H R Nk"]],
) -> tuple[Tensor | None, Tensor | None]:
    """The sum of the added terms where keys are visible, and the mask of visible keys; None if they do nothing.

    An added term masks a key if it makes its weight 0; this distinguishes it from a bias (see `mask_threshold`). It is
    tested at the queries with known weights, ``rows``, that see any key; ``weights`` returns those, or computes them
    with a bias and a mask. ``masks`` are additional masks, True where keys are masked.
    """
    levels, lowest = [mask_threshold(term) for term in terms], [masking_limit(term.dtype) for term in terms]
    for index, term in enumerate(terms):
        if levels[index] > lowest[index]:
            own_weights = weights(*_split(terms, masks, keys, lowest))
            if (visible := _split(terms, masks, keys, levels)[1]) is not None:
                is_masked = (at_rows(term, rows) <= levels[index]) & at_rows(visible, rows).any(-1, keepdim=True)
                levels[index] = lowest[index] if bool((own_weights * is_masked).any()) else levels[index]
    return _split(terms, masks, keys, levels)


def _split(
    terms: Sequence[Tensor], extra_masks: Sequence[Tensor], keys: int, levels: Sequence[float]
) -> tuple[Tensor | None, Tensor | None]:
    """`bias_and_mask`, given the value of each term from which on down it masks keys."""
    masks = [*extra_masks, *(term <= level for term, level in zip(terms, levels, strict=True))]
    covered = torch.zeros((1, 1, 1, keys), dtype=torch.bool, device=masks[0].device) if masks else None
    for mask in masks:
        covered = mask | covered if covered is not None else mask
    bias: Tensor | None = None
    for term, level in zip(terms, levels, strict=True):
        unmasked = term.masked_fill(term <= level, 0)
        if bool(unmasked.any()):
            bias = unmasked if bias is None else bias + unmasked
    if bias is not None:
        bias = bias.expand(*bias.shape[:-1], keys)
        bias = bias if covered is None else bias.masked_fill(covered, 0)
    return bias, ~covered if covered is not None and bool(covered.any()) else None


def at_rows(x: Float[Tensor, "_B _H _Nq _Nk"] | Bool[Tensor, "_B _H _Nq _Nk"], rows: Int[Tensor, "R"]) -> Tensor:
    """These queries of a queries-by-keys table, which may have one row for all."""
    return x if x.shape[-2] == 1 else x.index_select(2, rows)


def no_later_keys(visible: Bool[Tensor, "_B _H Nq Nk"]) -> bool:
    """Whether no query sees a later key."""
    return not any(bool(block.triu(1 + rows.start).any()) for rows, block in _row_blocks(visible))


def is_causal_mask(visible: Bool[Tensor, "_B _H Nq Nk"]) -> bool:
    """Whether every query sees exactly its own key and those before."""
    return all(bool((block == _is_earlier(rows, block)).all()) for rows, block in _row_blocks(visible))


def reach_of(visible: Bool[Tensor, "_B _H Nq Nk"] | None, causal: bool) -> tuple[int | None, int | None]:
    """The smallest window, or the size of the chunks, that contain all visible keys of a mask, or neither.

    A query sees at most that many keys up to its own, on either side if not causal; or no key of an earlier chunk.
    """
    if visible is None:
        return None, None
    reach, keys, firsts = 0, visible.shape[-1], []
    for rows, block in _row_blocks(visible):
        is_visible = block.any(0).any(0)
        queries = torch.arange(rows.start, rows.stop, device=is_visible.device)
        first = is_visible.to(torch.uint8).argmax(-1)
        last = keys - 1 - is_visible.flip(-1).to(torch.uint8).argmax(-1)
        reach = max(reach, int(((torch.maximum(queries - first, last - queries) + 1) * is_visible.any(-1)).max()))
        firsts.append(torch.where(is_visible.any(-1), first, queries))
    if reach >= keys:
        return None, None
    first = torch.cat(firsts)
    chunk = int(first.clamp(max=1).argmax())  # the first query that does not see key 0
    positions = torch.arange(len(first), device=first.device)
    if causal and chunk > 1 and bool((first == positions - positions % chunk).all()):
        return None, chunk
    return reach, None


def padded_lengths(
    visible: Bool[Tensor, "B _H Nq Nk"], causal: bool, window: int | None = None, chunk: int | None = None
) -> Int[Tensor, "B"] | str | None:
    """Number of tokens of each sequence, if only padding, ``causal``, a window and chunks mask keys: None without
    padding, a string that describes the visible keys if anything else is masked."""
    keys = visible.shape[-1]
    is_visible = torch.zeros(visible.shape[0], keys, dtype=torch.bool, device=visible.device)
    for _, block in _row_blocks(visible):
        is_visible |= block.any(2).any(1)
    ends = is_visible.sum(-1)
    is_token = torch.arange(keys, device=is_visible.device) < ends.unsqueeze(-1)
    for rows, block in _row_blocks(visible):
        expected = is_token[:, None, None, :].expand(-1, 1, rows.stop - rows.start, -1)
        if causal:
            expected = expected & _is_earlier(rows, block)
        if window is not None:
            expected = expected & _is_earlier(rows, block, 1 - window) & ~_is_earlier(rows, block, window)
        if chunk is not None:
            q_chunk, k_chunk = (positions // chunk for positions in _positions(rows, block))
            expected = expected & (q_chunk == k_chunk)
        if bool(((block != expected) & is_token[:, None, rows, None]).any()):
            return "some of the keys"
    return None if bool(is_token.all()) else ends


def by_offset(
    bias: Float[Tensor, "B N K"], visible: Bool[Tensor, "B N K"] | None, causal: bool, relative: bool, allowed: float
) -> Float[Tensor, "D"] | None:
    """One head's bias by offset -(N-1) .. N-1, where keys are visible; None if it does not depend only on the offset,
    up to ``allowed`` of the largest. If ``relative``, the value at each query's own key is subtracted first."""
    length = bias.shape[1]
    sums, counts = torch.zeros(2, 2 * length - 1, dtype=torch.float64, device=bias.device)

    def offset_values() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in blocks(length, bias.shape[0] * bias.shape[2]):
            block = bias[:, rows].double()
            seen = torch.ones_like(block, dtype=torch.bool) if visible is None else visible[:, rows].expand_as(block)
            seen = seen & _is_earlier(rows, block) if causal else seen
            queries = torch.arange(rows.start, rows.stop, device=bias.device).unsqueeze(-1)
            if relative:
                own_keys = queries.expand(len(block), -1, 1)
                block, seen = block - block.gather(2, own_keys), seen & seen.gather(2, own_keys)
            offsets = queries - torch.arange(bias.shape[2], device=bias.device) + length - 1
            yield offsets.expand_as(block)[seen], block[seen]

    size = 0.0
    for offsets, values in offset_values():
        sums.index_add_(0, offsets, values)
        counts.index_add_(0, offsets, torch.ones_like(values))
        size = max(size, float(values.abs().max()) if len(values) else 0.0)
    table = sums / counts.clamp_min(1)
    errors = (float((table[offsets] - values).abs().max()) for offsets, values in offset_values() if len(offsets))
    return table if all(error <= allowed * size for error in errors) else None


def _row_blocks(visible: Tensor) -> Iterator[tuple[slice, Tensor]]:
    numbers = visible.shape[0] * visible.shape[1] * visible.shape[3]
    for rows in blocks(visible.shape[2], numbers):
        yield rows, visible[:, :, rows]


def _is_earlier(rows: slice, block: Tensor, distance: int = 0) -> Bool[Tensor, "R Nk"]:
    """Whether a key is at least ``distance`` positions before the query."""
    queries, keys = _positions(rows, block)
    return keys <= queries - distance


def _positions(rows: slice, block: Tensor) -> tuple[Int[Tensor, "R 1"], Int[Tensor, "Nk"]]:
    """Positions of queries and keys."""
    queries = torch.arange(rows.start, rows.stop, device=block.device)
    return queries.unsqueeze(-1), torch.arange(block.shape[-1], device=block.device)


@dataclass(frozen=True, kw_only=True)
class AttentionFunction:
    """Weights = factor softmax(softcap(scale q . k) + bias) over the visible keys and sinks.

    q, k, v    [B, H, Nq, d], [B, G, Nk, d], [B, G, Nk, dv] as they enter the products; head h reads h // (H / G)
    scale      factor of q . k
    softcap    c of c tanh(x / c), applied to the scaled product; None without a softcap
    sinks      [H] one extra logit per head, which takes weight but has no value; [H, B, Nq] if each query has its own;
               None without sinks
    bias       [B or 1, H or 1, Nq or 1, Nk] added after the softcap, 0 at masked keys; None without a bias
    causal     whether keys after the query are masked
    visible    the same shape as the bias: whether the query sees the key; None if only ``causal`` masks keys
    factor     [B, H, Nq, Nk] factor of the weights after the softmax; None without one
    """

    q: Float[Tensor, "B H Nq d"] = field(repr=False)
    k: Float[Tensor, "B G Nk d"] = field(repr=False)
    v: Float[Tensor, "B G2 Nk dv"] = field(repr=False)
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "H"] | Float[Tensor, "H B Nq"] | None = None
    bias: Float[Tensor, "_B _H _Nq Nk"] | None = field(default=None, repr=False)
    causal: bool = False
    visible: Bool[Tensor, "_B _H _Nq Nk"] | None = field(default=None, repr=False)
    factor: Float[Tensor, "B H Nq Nk"] | None = field(default=None, repr=False)

    def logits(
        self, rows: Int[Tensor, "R"] | None = None, keys: slice = slice(None), dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "B H R K"]:
        """softcap(scale q . k) + bias at these queries and keys (default: all); -inf for masked keys."""
        rows = torch.arange(self.q.shape[2], device=self.q.device) if rows is None else rows
        k = self.k[:, :, keys]  # the heads of a group are rows of one product, so keys are not repeated
        q = (self.scale * self.q.index_select(2, rows).to(dtype)).unflatten(1, (k.shape[1], -1))
        logits = q.flatten(2, 3) @ k.to(dtype).transpose(-2, -1)
        logits = logits.unflatten(2, q.shape[2:4]).flatten(1, 2)
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.bias is not None:
            logits = logits + at_rows(self.bias[..., keys], rows).to(dtype)
        if self.visible is not None:
            logits = logits.masked_fill(~at_rows(self.visible[..., keys], rows), -torch.inf)
        if self.causal and len(rows):
            positions = (keys.start or 0) + torch.arange(k.shape[2], device=rows.device)
            after = slice(max(0, int(rows.min()) + 1 - (keys.start or 0)), None)  # all queries see earlier keys
            logits[..., after].masked_fill_(positions[after] > rows.unsqueeze(-1), -torch.inf)
        return logits

    def is_visible(self, rows: Int[Tensor, "R"], keys: slice) -> Bool[Tensor, "_B _H R K"]:
        """Whether these queries see these keys."""
        later = torch.arange(self.k.shape[2], device=rows.device)[keys] > rows.unsqueeze(-1)
        later = later & self.causal
        return ~later[None, None] if self.visible is None else at_rows(self.visible[..., keys], rows) & ~later

    def softmax(
        self, logits: Float[Tensor, "B H R K"], rows: Int[Tensor, "R"] | None = None, keys: slice = slice(None)
    ) -> Float[Tensor, "B H R K"]:
        """The weights of these queries and keys (default: all). A sink is one more logit of each head, whose weight is
        dropped. Raises `InputError` for some of the queries without ``rows`` if each query has its own sink."""
        if self.factor is not None:
            factor = self.factor[: len(logits), ..., keys]
            factor = factor if rows is None else at_rows(factor, rows)
            return replace(self, factor=None).softmax(logits, rows) * factor.to(logits.dtype)
        if self.sinks is None:
            return logits.softmax(-1)
        if self.sinks.ndim == 1:
            sinks = self.sinks.view(1, -1, 1)
        else:
            sinks = self.sinks[:, : len(logits)].transpose(0, 1)
            sinks = sinks if rows is None else sinks.index_select(2, rows)
            if sinks.shape[2] != logits.shape[2]:
                problem = f"{logits.shape[2]} queries are unknown. Give fewer tokens"
                raise InputError(f"sinks: each of {sinks.shape[2]} queries has its own, so the weights of {problem}.")
        sinks = sinks.to(logits.dtype).unsqueeze(-1).expand(*logits.shape[:3], 1)
        return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
