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

from toeplens.lens.kit import terms
from toeplens.lens.kit.position import Split, position_parts
from toeplens.lens.kit.toeplitz import ToeplitzProfile
from toeplens.lens.kit.trace import AttentionTrace
from toeplens.utils import invalid
from toeplens.utils.records import Record

KINDS = ("position", "content", "coupled")  # kinds of parts of a logit
PURE_SHARE = 0.9  # a head is named after one kind from this share on
MIN_SEQUENCES = 4  # sequences needed for a name: with 3, one head in 20 of one kind was misnamed (24 tokens)


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
    shares: terms.TermShares
    frequencies: Float[Tensor, "_ n"] | None
    frequency_shares: terms.TermShares | None
    kinds: terms.TermShares
    kernel: ToeplitzProfile
    profile: ToeplitzProfile
    variance: Float[Tensor, "H"]
    error: float
    _layer_terms: terms.LayerTerms = field(repr=False)

    @torch.no_grad()
    def matrix(self, name: str, sequence: int = 0) -> Float[Tensor, "H R R"]:
        """One part of one sequence's logits; 0 for masked keys. ``total`` is the sum of all parts."""
        if name != "total" and name not in self.names:
            raise invalid("name", f"be one of {', '.join(self.names)}, total", name)
        batch = self._layer_terms.batch_terms(slice(sequence, sequence + 1))
        rows = torch.arange(batch.present.shape[1], device=batch.present.device)
        names = self.names if name == "total" else (name,)
        return torch.stack([batch.query_rows(part, rows) for part in names]).sum(0)

    def by_frequency(self) -> terms.TermShares | None:
        """Shares of the dimensions that are not rotated, then of each frequency, summed over products: [H, n + 1]."""
        if self.frequency_shares is None:
            return None
        both = (self.frequency_shares.logits, self.frequency_shares.softmax)
        return terms.TermShares(*(shares.unflatten(-1, (len(terms.PRODUCTS), -1)).sum(1) for shares in both))

    def branches(self) -> terms.TermShares | None:
        """Shares of the dimensions that are not rotated and of those that are: the two branches of MLA, [H, 2]."""
        if (frequency_shares := self.by_frequency()) is None:
            return None
        both = (frequency_shares.logits, frequency_shares.softmax)
        return terms.TermShares(*(torch.stack((shares[:, 0], shares[:, 1:].sum(-1)), dim=-1) for shares in both))

    def head_kinds(self) -> list[str]:
        """Each head's kind by its shares of the logits.

        ``position`` or ``content`` from a share of `PURE_SHARE` on; ``sum`` if the two together reach it; ``product``
        if coupled does; otherwise ``mixed``. ``unknown`` if the shares are undefined or come from fewer than
        `MIN_SEQUENCES` sequences; ``flat`` if the logits do not vary.
        """
        names = []
        flat = self.shares.logits.isnan().all(-1).tolist()
        for is_flat, (position, content, coupled) in zip(flat, self.kinds.logits.tolist(), strict=True):
            shares = {"position": position, "content": content, "product": coupled, "sum": position + content}
            name = next((name for name, share in shares.items() if share >= PURE_SHARE), "mixed")
            name = "unknown" if self.sequences < MIN_SEQUENCES or math.isnan(coupled) else name
            names.append("flat" if is_flat else name)
        return names


@torch.no_grad()
def decompose(trace: AttentionTrace, layer: int, *, split: Split = "mean") -> LogitParts:
    """Decompose the logits of one layer exactly, in O(N d^2) per head unless a term depends on both query and key.

    Raises `NotSeparable`, an `InputError`, for encodings without such a decomposition: the position part depends on the
    content of other tokens, the encoding acts after the softmax, or it is not linear in queries and keys. Every call
    checks that the parts sum to the model's own logits.
    """
    layer_trace = trace[layer]
    encoding, name = layer_trace.encoding, type(layer_trace.encoding).__name__
    if encoding.data_dependent:
        raise terms.NotSeparable(
            f"encoding: the position part of {name} depends on the content of other tokens, so logits are not a sum "
            "of content and position parts."
        )
    if encoding.overrides("score"):
        raise terms.NotSeparable(
            f"encoding: {name} forms several products of a query and a key, so its logits are not one sum."
        )
    if encoding.overrides("transform_weights"):
        raise terms.NotSeparable(
            f"encoding: {name} acts on the weights after the softmax, so its logits do not show the whole effect of "
            "position."
        )
    layer_terms = terms.LayerTerms(layer_trace, *position_parts(trace, layer_trace, split))
    error = terms.check_error(layer_terms)
    part_sums: dict[str, list[terms.CovarianceSums]] = {}  # covariances of each part with the whole, by dimension
    for _, batch in layer_terms.batches():
        logits = batch.logits()
        for part, (q, k) in batch.products.items():
            part_sums.setdefault(part, []).append(logits.product_sums(q, k))
        for part, fixed in batch.fixed.items():
            part_sums.setdefault(part, []).append(logits.fixed_sums(fixed).unsqueeze(-1))
    parts = {part: torch.stack(sums).sum(0) for part, sums in part_sums.items()}
    sums = torch.stack([part.sum(-1) for part in parts.values()])
    total = sums.sum(0)
    energy = torch.stack([part[1].abs().sum(-1) for part in parts.values()]).sum(0)
    variances = terms.centred_sums(total, total, layer_terms.num_pairs)
    frequencies = frequency_shares = None
    if (rotation := layer_terms.rotation) is not None:
        columns = []
        for part in terms.PRODUCTS:
            by_group = terms.sum_by_group(parts[part], rotation.groups)
            columns += terms.split_columns(terms.centred_sums(by_group, total, layer_terms.num_pairs))
        frequencies, frequency_shares = rotation.frequencies, terms.shares_of(columns, variances, energy)
    centred = [terms.centred_sums(part, total, layer_terms.num_pairs) for part in sums]
    return LogitParts(
        layer=layer,
        split=split,
        sequences=len(layer_trace.q),
        names=tuple(parts),
        shares=terms.shares_of(centred, variances, energy),
        frequencies=frequencies,
        frequency_shares=frequency_shares,
        kinds=kinds_of(layer_terms),
        kernel=terms.layer_profile(layer_terms.mean_layer, layer_terms.mean_layer.q, layer_terms.mean_layer.k),
        profile=terms.layer_profile(layer_trace, layer_terms.q, layer_terms.k),
        variance=(variances[0] / layer_terms.num_pairs).clamp(min=0),
        error=error,
        _layer_terms=layer_terms,
    )


def kinds_of(layer_terms: terms.LayerTerms) -> terms.TermShares:
    """Shares of `KINDS` in the logits, [H, 3]; NaN with one sequence, and if the mean of the rotation is not known.

    With mean query and key by position, position is the logits of these means at their positions, plus the bias.
    Content is the logits of queries and keys minus these means, at the mean rotation. Coupled is the rest. The means
    are over the other sequences, so no share is biased for independent queries and keys. If queries and keys of one
    sequence are correlated (those of one token are), position contains 1 / (B - 1) of the correlation's part of the
    mean logits. Only positions that at least two sequences reach are used.
    """
    heads = layer_terms.q.shape[1]
    if len(layer_terms.q) < 2:
        unknown = layer_terms.q.new_full((heads, len(KINDS)), torch.nan)
        return terms.TermShares(unknown, unknown)
    layer, lengths = layer_terms.layer, layer_terms.layer.lengths
    if lengths is not None and lengths.max() > (second := lengths.topk(2).values[1]):
        zeros = torch.zeros_like(layer.inputs), torch.zeros_like(layer.key_inputs)
        layer_terms = terms.LayerTerms(replace(layer, lengths=lengths.clamp(max=second)), *zeros)
    sums = []
    energy = layer_terms.q.new_zeros(heads)
    for sequences, batch in layer_terms.batches():
        logits = batch.logits()
        product_sums = logits.product_sums(logits.q, logits.k)
        fixed = [logits.fixed_sums(term) for term in logits.fixed]
        energy = energy + product_sums[1].abs().sum(-1) + sum(term[1].abs() for term in fixed)
        both, present = (layer_terms.q, layer_terms.k), layer_terms.present
        (q, mean_q), (k, mean_k) = (_split_position(x, present, sequences, logits) for x in both)
        rotated_q, rotated_k = batch.layer.rotate(mean_q, mean_k)
        position = logits.product_sums(rotated_q * batch.layer.scale, rotated_k).sum(-1)
        if batch.layer.encoding.overrides("transform_logits"):
            position = position + logits.fixed_sums(terms.DenseMatrix(terms.added_logits(batch.layer, mean_q, mean_k)))
        elif terms.BIAS in batch.fixed:
            position = position + logits.fixed_sums(batch.fixed[terms.BIAS])
        if (rotation := layer_terms.rotation) is not None:
            q = rotation.rotate_by_mean(q, layer_terms.layer)
        content = logits.product_sums(q * layer_terms.layer.scale, k).sum(-1)
        sums.append((product_sums.sum(-1) + sum(fixed), position, content))
    total, position, content = (torch.stack(values).sum(0) for values in zip(*sums, strict=True))
    variances = terms.centred_sums(total, total, layer_terms.num_pairs)
    position, content = (terms.centred_sums(term, total, layer_terms.num_pairs) for term in (position, content))
    if layer_terms.rotation is None and layer_terms.layer.encoding.overrides("rotate"):
        content = content[0] * torch.nan, content[1] * torch.nan
    coupled = variances[0] - position[0] - content[0], variances[1] - position[1] - content[1]
    return terms.shares_of([position, content, coupled], variances, energy)


def _split_position(
    x: Float[Tensor, "B H N d"], present: Bool[Tensor, "B N"], sequences: slice, logits: terms.BatchLogits
) -> tuple[Float[Tensor, "b H N d"], Float[Tensor, "b H N d"]]:
    """Some sequences' queries or keys as content and as position: the mean of the others at each position."""
    num_others = (present.sum(0) - present[sequences].long()).double()
    others_sum = x.sum(0) - x[sequences]
    mean = others_sum / num_others[:, None, :, None].clamp(min=1)
    level = others_sum.sum(2, keepdim=True) / num_others.sum(1)[:, None, None, None]
    return (x[sequences] - mean + level) * logits.key_weight, mean * logits.key_weight


# ---- relevance -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relevance(Record):
    """The relevance of content and position for each example's logit (`toeplens.backends.relevance`), in units of it.

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

    LABEL = "relevance"

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
            gap, size = np.abs(self.total - self.target), self._size + np.abs(self.target)
        return np.where(gap == 0, 0, gap / np.where(size == 0, 1, size))

    @property
    def _size(self) -> Float[np.ndarray, "B"]:
        sizes = np.abs(self.content) + np.abs(self.position_input) + np.abs(self.position_attention)
        return sizes.sum(1) + np.abs(self.biases) + np.abs(self.softmax)
