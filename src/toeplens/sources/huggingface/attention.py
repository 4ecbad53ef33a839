"""The parts of one attention call, and the logits and weights that they form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError

AT_ONCE = 1 << 24  # numbers per block
_HIDES = -1e8
_FAR = 1e3  # added values that mask keys are at least this large
FILLS = -_FAR  # a value that replaces a logit (is not added to it) may mask the key from here on
_EMPTY, _STEPS = 2, 8  # octaves without values between biases and masking values; search steps per octave


def blocks(queries: int, numbers: int, at_once: int | None = None) -> Iterator[slice]:
    """Slices of the queries, each as long as ``at_once`` numbers allow (`AT_ONCE`), with ``numbers`` per query."""
    step = max(1, (at_once or AT_ONCE) // max(1, numbers))
    yield from (slice(start, min(start + step, queries)) for start in range(0, queries, step))


def low(dtype: torch.dtype) -> float:
    """A value below every masking value (models add the minimum of their dtype, or -1e9 and less): compared with a
    visible key, the weight of such a key is 0 in every precision."""
    return max(torch.finfo(dtype).min / 4, _HIDES)


def hides_from(term: Float[Tensor, "_B _H Nq Nk"]) -> float:
    """The value from which on down added values may mask keys, whatever dtype they were made in.

    That is `low`, or a value further up that is large and far below all values nearer to 0: -65504 or -10000 in
    float32. A bias that grows with distance has no such gap.
    """
    lowest = low(term.dtype)
    if not bool(((term <= -_FAR) & (term > lowest)).any()):
        return lowest
    steps = torch.zeros(_STEPS * 1024, dtype=torch.bool, device=term.device)
    for _, part in _parts(term):
        some = part[(part <= -_FAR / 2**_EMPTY) & (part > lowest)].double()
        steps[(-some).log2().mul(_STEPS).floor().long()] = True
    filled = steps.nonzero().flatten().tolist()
    for step, before in zip(filled, [-torch.inf, *filled], strict=False):
        if step - before > _EMPTY * _STEPS and 2 ** (step / _STEPS) >= _FAR / 2 ** (1 / _STEPS):
            return -(2 ** ((step - 1) / _STEPS))
    return lowest


def bias_and_mask(
    terms: Sequence[Float[Tensor, "_B _H _Nq _Nk"]],
    hidden: Sequence[Bool[Tensor, "_B _H _Nq _Nk"]],
    keys: int,
    rows: Int[Tensor, "R"],
    weights: Callable[[Tensor | None, Tensor | None], Float[Tensor, "B H R Nk"]],
) -> tuple[Tensor | None, Tensor | None]:
    """The sum of the added terms where keys are visible, and the mask of visible keys; None if they do nothing.

    An added term masks a key if it makes its weight 0; this distinguishes it from a bias (see `hides_from`). It is
    tested at the queries with known weights, ``rows``, that see any key; ``weights`` returns those, or computes them
    with a bias and a mask. ``hidden`` are additional masks, True where keys are masked.
    """
    levels, lowest = [hides_from(term) for term in terms], [low(term.dtype) for term in terms]
    for place, term in enumerate(terms):
        if levels[place] > lowest[place]:
            own = weights(*_split(terms, hidden, keys, lowest))
            if (visible := _split(terms, hidden, keys, levels)[1]) is not None:
                hides = (at_rows(term, rows) <= levels[place]) & at_rows(visible, rows).any(-1, keepdim=True)
                levels[place] = lowest[place] if bool((own * hides).any()) else levels[place]
    return _split(terms, hidden, keys, levels)


def _split(
    terms: Sequence[Tensor], hidden: Sequence[Tensor], keys: int, levels: Sequence[float]
) -> tuple[Tensor | None, Tensor | None]:
    """`bias_and_mask`, given the value of each term from which on down it masks keys."""
    masks = [*hidden, *(term <= level for term, level in zip(terms, levels, strict=True))]
    covered = torch.zeros((1, 1, 1, keys), dtype=torch.bool, device=masks[0].device) if masks else None
    for mask in masks:
        covered = mask | covered if covered is not None else mask
    bias: Tensor | None = None
    for term, level in zip(terms, levels, strict=True):
        rest = term.masked_fill(term <= level, 0)
        if bool(rest.any()):
            bias = rest if bias is None else bias + rest
    if bias is not None:
        bias = bias.expand(*bias.shape[:-1], keys)
        bias = bias if covered is None else bias.masked_fill(covered, 0)
    return bias, ~covered if covered is not None and bool(covered.any()) else None


def at_rows(x: Float[Tensor, "_B _H _Nq _Nk"] | Bool[Tensor, "_B _H _Nq _Nk"], rows: Int[Tensor, "R"]) -> Tensor:
    """These queries of a queries-by-keys table, which may have one row for all."""
    return x if x.shape[-2] == 1 else x.index_select(2, rows)


def one_way(visible: Bool[Tensor, "_B _H Nq Nk"]) -> bool:
    """Whether no query sees a later key."""
    return not any(bool(part.triu(1 + rows.start).any()) for rows, part in _parts(visible))


def just_causal(visible: Bool[Tensor, "_B _H Nq Nk"]) -> bool:
    """Whether every query sees exactly its own key and those before."""
    return all(bool((part == _earlier(rows, part)).all()) for rows, part in _parts(visible))


def reach_of(visible: Bool[Tensor, "_B _H Nq Nk"] | None, causal: bool) -> tuple[int | None, int | None]:
    """The smallest window, or the size of the chunks, that contain all visible keys of a mask, or neither.

    A query sees at most that many keys up to its own, on either side if not causal; or no key of an earlier chunk.
    """
    if visible is None:
        return None, None
    reach, keys, firsts = 0, visible.shape[-1], []
    for rows, part in _parts(visible):
        near = part.any(0).any(0)
        own = torch.arange(rows.start, rows.stop, device=near.device)
        first = near.to(torch.uint8).argmax(-1)
        last = keys - 1 - near.flip(-1).to(torch.uint8).argmax(-1)
        reach = max(reach, int(((torch.maximum(own - first, last - own) + 1) * near.any(-1)).max()))
        firsts.append(torch.where(near.any(-1), first, own))
    if reach >= keys:
        return None, None
    first = torch.cat(firsts)
    chunk = int(first.clamp(max=1).argmax())  # the first query that does not see key 0
    places = torch.arange(len(first), device=first.device)
    if causal and chunk > 1 and bool((first == places - places % chunk).all()):
        return None, chunk
    return reach, None


def padded_lengths(
    visible: Bool[Tensor, "B _H Nq Nk"], causal: bool, window: int | None = None, chunk: int | None = None
) -> Int[Tensor, "B"] | str | None:
    """Number of tokens of each sequence, if only padding, ``causal``, a window and chunks mask keys: None without
    padding, a string that describes the visible keys if anything else is masked."""
    keys = visible.shape[-1]
    seen = torch.zeros(visible.shape[0], keys, dtype=torch.bool, device=visible.device)
    for _, part in _parts(visible):
        seen |= part.any(2).any(1)
    ends = seen.sum(-1)
    there = torch.arange(keys, device=seen.device) < ends.unsqueeze(-1)
    for rows, part in _parts(visible):
        wanted = there[:, None, None, :].expand(-1, 1, rows.stop - rows.start, -1)
        if causal:
            wanted = wanted & _earlier(rows, part)
        if window is not None:
            wanted = wanted & _earlier(rows, part, 1 - window) & ~_earlier(rows, part, window)
        if chunk is not None:
            own, other = (places // chunk for places in _places(rows, part))
            wanted = wanted & (own == other)
        if bool(((part != wanted) & there[:, None, rows, None]).any()):
            return "some of the keys"
    return None if bool(there.all()) else ends


def by_offset(
    bias: Float[Tensor, "B Nq Nk"], seen: Bool[Tensor, "B Nq Nk"] | None, causal: bool, relative: bool, allowed: float
) -> Float[Tensor, "D"] | None:
    """One head's bias by offset -(N-1) .. N-1, where keys are visible; None if it does not depend only on the offset,
    up to ``allowed`` of the largest. If ``relative``, the value at each query's own key is subtracted first."""
    length = bias.shape[1]
    sums, counts = torch.zeros(2, 2 * length - 1, dtype=torch.float64, device=bias.device)

    def each() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in blocks(length, bias.shape[0] * bias.shape[2]):
            part = bias[:, rows].double()
            there = torch.ones_like(part, dtype=torch.bool) if seen is None else seen[:, rows].expand_as(part)
            there = there & _earlier(rows, part) if causal else there
            own = torch.arange(rows.start, rows.stop, device=bias.device).unsqueeze(-1)
            if relative:
                places = own.expand(len(part), -1, 1)
                part, there = part - part.gather(2, places), there & there.gather(2, places)
            at = own - torch.arange(bias.shape[2], device=bias.device) + length - 1
            yield at.expand_as(part)[there], part[there]

    size = 0.0
    for at, values in each():
        sums.index_add_(0, at, values)
        counts.index_add_(0, at, torch.ones_like(values))
        size = max(size, float(values.abs().max()) if len(values) else 0.0)
    table = sums / counts.clamp_min(1)
    missed = (float((table[at] - values).abs().max()) for at, values in each() if len(at))
    return table if all(miss <= allowed * size for miss in missed) else None


def _parts(visible: Tensor) -> Iterator[tuple[slice, Tensor]]:
    numbers = visible.shape[0] * visible.shape[1] * visible.shape[3]
    for rows in blocks(visible.shape[2], numbers):
        yield rows, visible[:, :, rows]


def _earlier(rows: slice, part: Tensor, by: int = 0) -> Bool[Tensor, "R Nk"]:
    """Whether a key is at least ``by`` positions before the query."""
    own, other = _places(rows, part)
    return other <= own - by


def _places(rows: slice, part: Tensor) -> tuple[Int[Tensor, "R 1"], Int[Tensor, "Nk"]]:
    """Positions of queries and keys."""
    own = torch.arange(rows.start, rows.stop, device=part.device)
    return own.unsqueeze(-1), torch.arange(part.shape[-1], device=part.device)


@dataclass(frozen=True, kw_only=True)
class Attention:
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
        made = q.flatten(2, 3) @ k.to(dtype).transpose(-2, -1)
        made = made.unflatten(2, q.shape[2:4]).flatten(1, 2)
        if self.softcap is not None:
            made = self.softcap * (made / self.softcap).tanh()
        if self.bias is not None:
            made = made + at_rows(self.bias[..., keys], rows).to(dtype)
        if self.visible is not None:
            made = made.masked_fill(~at_rows(self.visible[..., keys], rows), -torch.inf)
        if self.causal and len(rows):
            place = (keys.start or 0) + torch.arange(k.shape[2], device=rows.device)
            after = slice(max(0, int(rows.min()) + 1 - (keys.start or 0)), None)  # all queries see earlier keys
            made[..., after].masked_fill_(place[after] > rows.unsqueeze(-1), -torch.inf)
        return made

    def seen(self, rows: Int[Tensor, "R"], keys: slice) -> Bool[Tensor, "_B _H R K"]:
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
            more = self.sinks.view(1, -1, 1)
        else:
            more = self.sinks[:, : len(logits)].transpose(0, 1)
            more = more if rows is None else more.index_select(2, rows)
            if more.shape[2] != logits.shape[2]:
                some = f"{logits.shape[2]} queries are unknown. Give fewer tokens"
                raise InputError(f"sinks: each of {more.shape[2]} queries has its own, so the weights of {some}.")
        more = more.to(logits.dtype).unsqueeze(-1).expand(*logits.shape[:3], 1)
        return torch.cat((logits, more), -1).softmax(-1)[..., :-1]
