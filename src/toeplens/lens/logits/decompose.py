"""Attention logits taken apart into content and position, exactly, and each part's share of the whole.

Beside the parts, what position alone and content alone give of a head's logits, each without the sequence that is
looked at (`kinds_of`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings import PositionalEncoding
from toeplens.ground import invalid
from toeplens.lens.kit.position import Split, position_parts
from toeplens.lens.kit.terms import (
    BIAS,
    PRODUCTS,
    Batch,
    CovarianceSums,
    NoForm,
    Pieces,
    Shares,
    Whole,
    Written,
    by_column,
    checked,
    grouped,
    rest,
    shares_of,
    spread,
)
from toeplens.lens.kit.toeplitz import ToeplitzProfile
from toeplens.lens.kit.trace import AttentionTrace

KINDS = ("position", "content", "coupled")  # kinds of parts of a logit
PURE = 0.9  # share from which a head is named after one kind
FEWEST = 4  # sequences that a name needs: of 3, one head in 20 of one kind was named otherwise (24 tokens)


@dataclass(frozen=True)
class LogitParts:
    """The logits of one layer as a sum of parts (theory, sections 1 to 3).

    layer             from 0
    split             the estimator of the position part (see `position_parts`)
    sequences         how many sequences stand behind it
    names             the parts: the four products of content and position of query and key, the query's first;
                      ``bias``, what is added whatever the content is; and, for encodings that weigh functions of the
                      offset by content (Shaw, Transformer-XL, DeBERTa), ``content-offset`` and ``position-offset``
    shares            of the parts, in the order of ``names``
    frequencies       [H or 1, n] radians a position, of a rotation; None without one
    frequency_shares  of the four products by frequency: [H, 4 (n + 1)], product after product, the dimensions that are
                      not rotated first; None where the encoding is no rotation of pairs
    kinds             shares of `KINDS`: what mean contents give at their positions (position), what contents give at
                      the mean offset (content), the rest, where both work together (coupled; 0 for a bias). NaN with
                      one sequence, which has no mean, and where the mean of the rotation is not known. Means are of
                      the other sequences (`kinds_of`)
    kernel            Toeplitz profile of what mean contents give: the head's position kernel, and how Toeplitz it is
    profile           Toeplitz profile of the logits, all sequences together
    variance          [H] of the logits over the visible pairs
    error             largest difference between the sum of the parts and the model's own logits, relative to the
                      largest of these, over the queries that were looked at
    """

    layer: int
    split: Split
    sequences: int
    names: tuple[str, ...]
    shares: Shares
    frequencies: Float[Tensor, "_ n"] | None
    frequency_shares: Shares | None
    kinds: Shares
    kernel: ToeplitzProfile
    profile: ToeplitzProfile
    variance: Float[Tensor, "H"]
    error: float
    _pieces: Pieces = field(repr=False)

    @torch.no_grad()
    def matrix(self, name: str, sequence: int = 0) -> Float[Tensor, "H R R"]:
        """One part of one sequence's logits, written out; 0 where a key is not seen. ``total`` is their sum."""
        if name != "total" and name not in self.names:
            raise invalid("name", f"be one of {', '.join(self.names)}, total", name)
        batch = self._pieces.of(slice(sequence, sequence + 1))
        rows = torch.arange(batch.present.shape[1], device=batch.present.device)
        wanted = self.names if name == "total" else (name,)
        return torch.stack([batch.rows(each, rows) for each in wanted]).sum(0)

    def by_frequency(self) -> Shares | None:
        """Shares of the dimensions that are not rotated, then of each frequency, the products together: [H, n + 1]."""
        if self.frequency_shares is None:
            return None
        both = (self.frequency_shares.logits, self.frequency_shares.softmax)
        return Shares(*(shares.unflatten(-1, (len(PRODUCTS), -1)).sum(1) for shares in both))

    def branches(self) -> Shares | None:
        """Shares of the dimensions that are not rotated and of those that are: MLA's two branches, [H, 2]."""
        found = self.by_frequency()
        if found is None:
            return None
        both = (found.logits, found.softmax)
        return Shares(*(torch.stack((shares[:, 0], shares[:, 1:].sum(-1)), dim=-1) for shares in both))

    def named(self) -> list[str]:
        """Each head's kind by its shares of the logits.

        ``position`` or ``content`` from `PURE` on; ``sum`` where the two make up `PURE` together; ``product`` where
        coupled does; else ``mixed``; ``unknown`` where the kinds have no shares, or come from fewer than `FEWEST`
        sequences and are as much chance as anything; ``flat`` where the logits do not vary.
        """
        names = []
        flat = self.shares.logits.isnan().all(-1).tolist()
        for still, (position, content, coupled) in zip(flat, self.kinds.logits.tolist(), strict=True):
            if still:
                names.append("flat")
            elif self.sequences < FEWEST or math.isnan(coupled):
                names.append("unknown")
            elif position >= PURE:
                names.append("position")
            elif content >= PURE:
                names.append("content")
            elif coupled >= PURE:
                names.append("product")
            elif position + content >= PURE:
                names.append("sum")
            else:
                names.append("mixed")
        return names


@torch.no_grad()
def decompose(trace: AttentionTrace, layer: int, *, split: Split = "mean") -> LogitParts:
    """Take one layer's logits apart; exact, and in O(N d^2) a head where nothing of queries by keys is given.

    Raises `NoForm`, an `InputError`, where the encoding has no such form: its position part depends on the content of
    other tokens, it acts after the softmax, or it is not linear in queries and keys. That the parts sum to the model's
    own logits is checked on every call.
    """
    found = trace[layer]
    _require_form(found.encoding)
    pieces = Pieces(found, *position_parts(trace, found, split))
    error = checked(pieces)
    parts = _commons(pieces)
    sums = torch.stack([part.sum(-1) for part in parts.values()])
    whole = sums.sum(0)
    energy = torch.stack([part[1].abs().sum(-1) for part in parts.values()]).sum(0)
    variances = spread(whole, whole, pieces.pairs)
    rotation = pieces.rotation
    columns = (
        None
        if rotation is None
        else [
            column
            for name in PRODUCTS
            for column in by_column(spread(grouped(parts[name], rotation.groups), whole, pieces.pairs))
        ]
    )
    return LogitParts(
        layer=layer,
        split=split,
        sequences=len(found.q),
        names=tuple(parts),
        shares=shares_of([spread(part, whole, pieces.pairs) for part in sums], variances, energy),
        frequencies=None if rotation is None else rotation.frequencies,
        frequency_shares=None if columns is None else shares_of(columns, variances, energy),
        kinds=kinds_of(pieces),
        kernel=pieces.kernel(),
        profile=pieces.profile(),
        variance=(variances[0] / pieces.pairs).clamp(min=0),
        error=error,
        _pieces=pieces,
    )


def _require_form(encoding: PositionalEncoding) -> None:
    name = type(encoding).__name__
    if encoding.data_dependent:
        raise NoForm(
            f"encoding: the position part of {name} depends on the content of other tokens, so logits are not a sum "
            "of content and position parts."
        )
    if encoding.overrides("score") and not encoding.data_dependent:
        raise NoForm(f"encoding: {name} forms several products of a query and a key, so its logits are not one sum.")
    if encoding.overrides("transform_weights"):
        raise NoForm(
            f"encoding: {name} acts on the weights after the softmax, so its logits do not show the whole effect of "
            "position."
        )


def _commons(pieces: Pieces) -> dict[str, CovarianceSums]:
    """What each part has in common with the whole, by dimension, over all sequences."""
    parts: dict[str, list[CovarianceSums]] = {}
    for _, batch in pieces.batches():
        whole = batch.whole()
        for name, (q, k) in batch.products.items():
            parts.setdefault(name, []).append(whole.products(q, k))
        for name, fixed in batch.fixed.items():
            parts.setdefault(name, []).append(whole.known(fixed).unsqueeze(-1))
    return {name: torch.stack(found).sum(0) for name, found in parts.items()}


def kinds_of(pieces: Pieces) -> Shares:
    """Shares of `KINDS` in the logits, [H, 3]; NaN with one sequence, and where the mean of the rotation is not known.

    With mean query and key by position, position is what the means give at their places, and the bias; content is what
    queries and keys without their positions' means give at the mean rotation; coupled is the rest. A mean over B
    sequences holds a B-th of each of them, which would pass for position (by 1 / B^2 of content) and for coupled (by
    2 / B). The means are therefore those of the other sequences: of independent queries and keys no share is then
    biased. Where queries and keys of one sequence are correlated (those of one token are), position holds 1 / (B - 1)
    of what that adds to the mean logits.

    The pairs are those at positions that two sequences or more reach, so that there are others.
    """
    heads = pieces.q.shape[1]
    if len(pieces.q) < 2:
        unknown = pieces.q.new_full((heads, len(KINDS)), torch.nan)
        return Shares(unknown, unknown)
    pieces = _reached_twice(pieces)
    every, positions, contents = [], [], []
    energy = pieces.q.new_zeros(heads)
    for sequences, batch in pieces.batches():
        whole = batch.whole()
        own = whole.products(whole.q, whole.k)
        fixed = [whole.known(term) for term in whole.fixed]
        energy = energy + own[1].abs().sum(-1) + sum(term[1].abs() for term in fixed)
        every.append(own.sum(-1) + sum(fixed))
        q, k, position_q, position_k = _split(pieces, sequences, whole)
        positions.append(_position(batch, whole, position_q, position_k))
        if (rotation := pieces.rotation) is not None:
            q = rotation.turn_by_mean(q, pieces.layer)
        contents.append(whole.products(q * pieces.layer.scale, k).sum(-1))
    total, position, content = (torch.stack(found).sum(0) for found in (every, positions, contents))
    variances = spread(total, total, pieces.pairs)
    position, content = (spread(term, total, pieces.pairs) for term in (position, content))
    if pieces.rotation is None and pieces.layer.encoding.overrides("rotate"):
        content = content[0] * torch.nan, content[1] * torch.nan
    coupled = variances[0] - position[0] - content[0], variances[1] - position[1] - content[1]
    return shares_of([position, content, coupled], variances, energy)


def _reached_twice(pieces: Pieces) -> Pieces:
    """The same with the longest sequence as long as the next."""
    layer, lengths = pieces.layer, pieces.layer.lengths
    if lengths is None:
        return pieces
    longest, second = lengths.topk(2).values.tolist()
    if longest == second:
        return pieces
    nothing = torch.zeros_like(layer.inputs), torch.zeros_like(layer.key_inputs)
    return Pieces(replace(layer, lengths=lengths.clamp(max=second)), *nothing)


def _split(pieces: Pieces, sequences: slice, whole: Whole) -> tuple[Float[Tensor, "B H N d"], ...]:
    """Queries and keys as content, and as position: the others' means at each place, and what they leave of the own."""
    others = (pieces.present.sum(0) - pieces.present[sequences].long()).double()
    at, all_places = others[:, None, :, None], others.sum(1)[:, None, None, None]
    contents, means = [], []
    for x in (pieces.q, pieces.k):
        rest_of_them = x.sum(0) - x[sequences]
        mean = rest_of_them / at.clamp(min=1)
        contents.append((x[sequences] - mean + rest_of_them.sum(2, keepdim=True) / all_places) * whole.there)
        means.append(mean * whole.there)
    return *contents, *means


def _position(
    batch: Batch, whole: Whole, mean_q: Float[Tensor, "B H N d"], mean_k: Float[Tensor, "B H N d"]
) -> CovarianceSums:
    q, k = batch.layer.turn(mean_q, mean_k)
    found = whole.products(q * batch.layer.scale, k).sum(-1)
    if batch.layer.encoding.overrides("transform_logits"):
        return found + whole.known(Written(rest(batch.layer, mean_q, mean_k)))
    return found + whole.known(batch.fixed[BIAS]) if BIAS in batch.fixed else found
