"""Decomposition of attention logits into content and position, exactly; the record of a class logit's relevance.

In addition, `kinds_of` estimates what position only and content only contribute to a head's logits, using the other
sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import invalid
from toeplens.ground.records import Record
from toeplens.lens.kit import terms
from toeplens.lens.kit.position import Split, position_parts
from toeplens.lens.kit.toeplitz import ToeplitzProfile
from toeplens.lens.kit.trace import AttentionTrace

KINDS = ("position", "content", "coupled")  # kinds of parts of a logit
PURE = 0.9  # a head is named after one kind from this share on
FEWEST = 4  # sequences needed for a name: with 3, one head in 20 of one kind was misnamed (24 tokens)


@dataclass(frozen=True)
class LogitParts:
    """The logits of one layer as a sum of parts (theory, sections 1 to 3).

    split             the estimator of the position part (see `position_parts`)
    names             the parts: the four products of content and position of query and key, the query's first;
                      ``bias``, which does not depend on content; and, for encodings that multiply functions of the
                      offset by content (Shaw, Transformer-XL, DeBERTa), ``content-offset`` and ``position-offset``
    shares            shares of the parts, in the order of ``names``
    frequencies       [H or 1, n] of a rotation, in radians per position; None without one
    frequency_shares  shares of the four products by frequency: [H, 4 (n + 1)], product after product, starting with
                      the dimensions that are not rotated; None if the encoding is not a rotation of pairs
    kinds             shares of `KINDS`. position: the logits of mean contents at their positions. content: the logits
                      of contents at the mean offset. coupled: the rest, where both interact (0 for a bias). NaN with
                      one sequence, and if the mean of the rotation is not known. Means are over the other sequences
                      (`kinds_of`)
    kernel            Toeplitz profile of the logits of mean contents: the head's position kernel
    profile           Toeplitz profile of the logits, over all sequences
    variance          [H] of the logits over the visible pairs
    error             largest difference between the sum of the parts and the model's own logits, relative to the
                      largest logit, over the queries that were checked
    """

    layer: int
    split: Split
    sequences: int
    names: tuple[str, ...]
    shares: terms.Shares
    frequencies: Float[Tensor, "_ n"] | None
    frequency_shares: terms.Shares | None
    kinds: terms.Shares
    kernel: ToeplitzProfile
    profile: ToeplitzProfile
    variance: Float[Tensor, "H"]
    error: float
    _pieces: terms.Pieces = field(repr=False)

    @torch.no_grad()
    def matrix(self, name: str, sequence: int = 0) -> Float[Tensor, "H R R"]:
        """One part of one sequence's logits; 0 for masked keys. ``total`` is the sum of all parts."""
        if name != "total" and name not in self.names:
            raise invalid("name", f"be one of {', '.join(self.names)}, total", name)
        batch = self._pieces.of(slice(sequence, sequence + 1))
        rows = torch.arange(batch.present.shape[1], device=batch.present.device)
        wanted = self.names if name == "total" else (name,)
        return torch.stack([batch.rows(each, rows) for each in wanted]).sum(0)

    def by_frequency(self) -> terms.Shares | None:
        """Shares of the dimensions that are not rotated, then of each frequency, summed over products: [H, n + 1]."""
        if self.frequency_shares is None:
            return None
        both = (self.frequency_shares.logits, self.frequency_shares.softmax)
        return terms.Shares(*(shares.unflatten(-1, (len(terms.PRODUCTS), -1)).sum(1) for shares in both))

    def branches(self) -> terms.Shares | None:
        """Shares of the dimensions that are not rotated and of those that are: the two branches of MLA, [H, 2]."""
        if (found := self.by_frequency()) is None:
            return None
        both = (found.logits, found.softmax)
        return terms.Shares(*(torch.stack((shares[:, 0], shares[:, 1:].sum(-1)), dim=-1) for shares in both))

    def named(self) -> list[str]:
        """Each head's kind by its shares of the logits.

        ``position`` or ``content`` from a share of `PURE` on; ``sum`` if the two together reach `PURE`; ``product`` if
        coupled does; otherwise ``mixed``. ``unknown`` if the shares are undefined or come from fewer than `FEWEST`
        sequences; ``flat`` if the logits do not vary.
        """
        names = []
        flat = self.shares.logits.isnan().all(-1).tolist()
        for still, (position, content, coupled) in zip(flat, self.kinds.logits.tolist(), strict=True):
            shares = {"position": position, "content": content, "product": coupled, "sum": position + content}
            name = next((name for name, share in shares.items() if share >= PURE), "mixed")
            name = "unknown" if self.sequences < FEWEST or math.isnan(coupled) else name
            names.append("flat" if still else name)
        return names


@torch.no_grad()
def decompose(trace: AttentionTrace, layer: int, *, split: Split = "mean") -> LogitParts:
    """Decompose the logits of one layer exactly, in O(N d^2) per head unless a term depends on both query and key.

    Raises `NoForm`, an `InputError`, for encodings without such a decomposition: the position part depends on the
    content of other tokens, the encoding acts after the softmax, or it is not linear in queries and keys. Every call
    checks that the parts sum to the model's own logits.
    """
    found = trace[layer]
    encoding, name = found.encoding, type(found.encoding).__name__
    if encoding.data_dependent:
        raise terms.NoForm(
            f"encoding: the position part of {name} depends on the content of other tokens, so logits are not a sum "
            "of content and position parts."
        )
    if encoding.overrides("score"):
        raise terms.NoForm(
            f"encoding: {name} forms several products of a query and a key, so its logits are not one sum."
        )
    if encoding.overrides("transform_weights"):
        raise terms.NoForm(
            f"encoding: {name} acts on the weights after the softmax, so its logits do not show the whole effect of "
            "position."
        )
    pieces = terms.Pieces(found, *position_parts(trace, found, split))
    error = terms.checked(pieces)
    found_parts: dict[str, list[terms.CovarianceSums]] = {}  # covariances of each part with the whole, by dimension
    for _, batch in pieces.batches():
        logits = batch.whole()
        for part, (q, k) in batch.products.items():
            found_parts.setdefault(part, []).append(logits.products(q, k))
        for part, fixed in batch.fixed.items():
            found_parts.setdefault(part, []).append(logits.known(fixed).unsqueeze(-1))
    parts = {part: torch.stack(sums).sum(0) for part, sums in found_parts.items()}
    sums = torch.stack([part.sum(-1) for part in parts.values()])
    whole = sums.sum(0)
    energy = torch.stack([part[1].abs().sum(-1) for part in parts.values()]).sum(0)
    variances = terms.spread(whole, whole, pieces.pairs)
    frequencies = frequency_shares = None
    if (rotation := pieces.rotation) is not None:
        columns = []
        for part in terms.PRODUCTS:
            by_group = terms.grouped(parts[part], rotation.groups)
            columns += terms.by_column(terms.spread(by_group, whole, pieces.pairs))
        frequencies, frequency_shares = rotation.frequencies, terms.shares_of(columns, variances, energy)
    return LogitParts(
        layer=layer,
        split=split,
        sequences=len(found.q),
        names=tuple(parts),
        shares=terms.shares_of([terms.spread(part, whole, pieces.pairs) for part in sums], variances, energy),
        frequencies=frequencies,
        frequency_shares=frequency_shares,
        kinds=kinds_of(pieces),
        kernel=terms.profile(pieces.mean, pieces.mean.q, pieces.mean.k),
        profile=terms.profile(found, pieces.q, pieces.k),
        variance=(variances[0] / pieces.pairs).clamp(min=0),
        error=error,
        _pieces=pieces,
    )


def kinds_of(pieces: terms.Pieces) -> terms.Shares:
    """Shares of `KINDS` in the logits, [H, 3]; NaN with one sequence, and if the mean of the rotation is not known.

    With mean query and key by position, position is the logits of these means at their positions, plus the bias.
    Content is the logits of queries and keys minus these means, at the mean rotation. Coupled is the rest. The means
    are over the other sequences, so no share is biased for independent queries and keys. If queries and keys of one
    sequence are correlated (those of one token are), position contains 1 / (B - 1) of the correlation's part of the
    mean logits. Only positions that at least two sequences reach are used.
    """
    heads = pieces.q.shape[1]
    if len(pieces.q) < 2:
        unknown = pieces.q.new_full((heads, len(KINDS)), torch.nan)
        return terms.Shares(unknown, unknown)
    layer, lengths = pieces.layer, pieces.layer.lengths
    if lengths is not None and lengths.max() > (second := lengths.topk(2).values[1]):
        nothing = torch.zeros_like(layer.inputs), torch.zeros_like(layer.key_inputs)
        pieces = terms.Pieces(replace(layer, lengths=lengths.clamp(max=second)), *nothing)
    found = []
    energy = pieces.q.new_zeros(heads)
    for sequences, batch in pieces.batches():
        whole = batch.whole()
        own = whole.products(whole.q, whole.k)
        fixed = [whole.known(term) for term in whole.fixed]
        energy = energy + own[1].abs().sum(-1) + sum(term[1].abs() for term in fixed)
        (q, mean_q), (k, mean_k) = (_split(x, pieces.present, sequences, whole) for x in (pieces.q, pieces.k))
        turned_q, turned_k = batch.layer.turn(mean_q, mean_k)
        position = whole.products(turned_q * batch.layer.scale, turned_k).sum(-1)
        if batch.layer.encoding.overrides("transform_logits"):
            position = position + whole.known(terms.Written(terms.rest(batch.layer, mean_q, mean_k)))
        elif terms.BIAS in batch.fixed:
            position = position + whole.known(batch.fixed[terms.BIAS])
        if (rotation := pieces.rotation) is not None:
            q = rotation.turn_by_mean(q, pieces.layer)
        found.append((own.sum(-1) + sum(fixed), position, whole.products(q * pieces.layer.scale, k).sum(-1)))
    total, position, content = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    variances = terms.spread(total, total, pieces.pairs)
    position, content = (terms.spread(term, total, pieces.pairs) for term in (position, content))
    if pieces.rotation is None and pieces.layer.encoding.overrides("rotate"):
        content = content[0] * torch.nan, content[1] * torch.nan
    coupled = variances[0] - position[0] - content[0], variances[1] - position[1] - content[1]
    return terms.shares_of([position, content, coupled], variances, energy)


def _split(
    x: Float[Tensor, "B H N d"], present: Bool[Tensor, "B N"], sequences: slice, whole: terms.Whole
) -> tuple[Float[Tensor, "b H N d"], Float[Tensor, "b H N d"]]:
    """Some sequences' queries or keys as content and as position: the mean of the others at each position."""
    others = (present.sum(0) - present[sequences].long()).double()
    rest_of_them = x.sum(0) - x[sequences]
    mean = rest_of_them / others[:, None, :, None].clamp(min=1)
    level = rest_of_them.sum(2, keepdim=True) / others.sum(1)[:, None, None, None]
    return (x[sequences] - mean + level) * whole.there, mean * whole.there


# ---- relevance -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relevance(Record):
    """The relevance of content and position for each example's logit (`toeplens.sources.relevance`), in units of it.

    content             [B, N] of the token embedding at each position
    position_input      [B, N] of the vector added to it
    position_attention  [B, N] of position in attention, half at the query's and half at the key's position
    biases              [B] of the biases of linear maps and the shifts of norms
    softmax             [B] remainder of the softmax rule
    target              [B] the logit; the five above add up to it
    classes             [B] the class of the logit
    by_layer            [L, H] position in attention, summed over the pairs, mean over the examples
    by_offset           [L, H, D] the same at each offset i - j, query minus key, of positions in the sequence
    offsets             [D] the offsets: 0 .. N-1 if causal, otherwise -(N-1) .. N-1
    """

    WORDS = "relevance"

    content: Float[np.ndarray, "B N"]
    position_input: Float[np.ndarray, "B N"]
    position_attention: Float[np.ndarray, "B N"]
    biases: Float[np.ndarray, "B"]
    softmax: Float[np.ndarray, "B"]
    target: Float[np.ndarray, "B"]
    classes: Int[np.ndarray, "B"]
    by_layer: Float[np.ndarray, "L H"]
    by_offset: Float[np.ndarray, "L H D"]
    offsets: Int[np.ndarray, "D"]

    @property
    def position(self) -> Float[np.ndarray, "B N"]:
        """Relevance of position at each position, from the input and from attention."""
        return self.position_input + self.position_attention

    @property
    def total(self) -> Float[np.ndarray, "B"]:
        """The sum of all parts, equal to the logit."""
        return (self.content + self.position).sum(1) + self.biases + self.softmax

    @property
    def share(self) -> Float[np.ndarray, "B"]:
        """Position's share of the summed absolute values, taken position by position; NaN if all are 0."""
        position = np.abs(self.position_input).sum(1) + np.abs(self.position_attention).sum(1)
        return np.divide(position, self._size, out=np.full_like(position, np.nan), where=self._size > 0)

    @property
    def errors(self) -> Float[np.ndarray, "B"]:
        """Error of the sum of the parts, relative to the sum of their absolute values; 0 if all are 0."""
        with np.errstate(invalid="ignore"):
            off, size = np.abs(self.total - self.target), self._size + np.abs(self.target)
        return np.where(off == 0, 0, off / np.where(size == 0, 1, size))

    @property
    def _size(self) -> Float[np.ndarray, "B"]:
        places = np.abs(self.content) + np.abs(self.position_input) + np.abs(self.position_attention)
        return places.sum(1) + np.abs(self.biases) + np.abs(self.softmax)
