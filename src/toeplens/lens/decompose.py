"""Attention logits taken apart into content and position, exactly, and each part's share of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings import PositionalEncoding
from toeplens.ground import InputError
from toeplens.lens.pieces import BIAS, PRODUCTS, Pieces, rest
from toeplens.lens.shares import Shares, grouped, shares_of, spread
from toeplens.lens.splits import Split, position_parts
from toeplens.lens.terms import Common, Written, sum_of
from toeplens.lens.toeplitz import ToeplitzProfile
from toeplens.lens.trace import AttentionTrace, LayerTrace

KINDS = ("position", "content", "coupled")
PURE = 0.9  # share from which a head is named after one kind
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class NoForm(InputError):
    """The encoding has no split of its logits into content and position."""


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
                      one sequence, which has no mean, and where the mean of the rotation is not known
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
            raise InputError(f"name: {name!r} was asked for; the parts are {', '.join(self.names)} and 'total'.")
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
        coupled does; else ``mixed``; ``unknown`` where the kinds have no shares; ``flat`` where the logits do not
        vary.
        """
        names = []
        flat = self.shares.logits.isnan().all(-1).tolist()
        for still, (position, content, coupled) in zip(flat, self.kinds.logits.tolist(), strict=True):
            if still:
                names.append("flat")
            elif position >= PURE:
                names.append("position")
            elif content >= PURE:
                names.append("content")
            elif coupled >= PURE:
                names.append("product")
            elif position + content >= PURE:
                names.append("sum")
            else:
                names.append("unknown" if math.isnan(coupled) else "mixed")
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
    whole, parts, mean, content = _commons(pieces)
    variances = spread(whole, whole, pieces.pairs)
    rotation = pieces.rotation
    by_group = None if rotation is None else [grouped(parts[name], rotation.groups) for name in PRODUCTS]
    position, plain = (None if one is None else spread(one, whole, pieces.pairs) for one in (mean, content))
    return LogitParts(
        layer=layer,
        split=split,
        sequences=len(found.q),
        names=tuple(parts),
        shares=shares_of([spread(part.summed(), whole, pieces.pairs) for part in parts.values()], variances),
        frequencies=None if rotation is None else rotation.frequencies,
        frequency_shares=None if by_group is None else _frequency_shares(by_group, whole, pieces.pairs, variances),
        kinds=_kinds(position, plain, variances),
        kernel=pieces.kernel(),
        profile=pieces.profile(),
        variance=variances[0] / pieces.pairs,
        error=error,
        _pieces=pieces,
    )


def checked(pieces: Pieces) -> float:
    """How far the parts are from the layer's own logits; raises `NoForm` where that is more than rounding."""
    error = pieces.error()
    if not error <= _TOLERANCE.get(pieces.layer.q.dtype, 0.05):
        raise NoForm(
            f"encoding: the parts of {type(pieces.layer.encoding).__name__} do not sum to its logits (off by "
            f"{error:.2g} of the largest); it is not linear in queries and keys, so that content and position are no "
            "sum there."
        )
    return error


def _require_form(encoding: PositionalEncoding) -> None:
    name = type(encoding).__name__
    if encoding.data_dependent:
        raise NoForm(
            f"encoding: the position part of {name} depends on the content of other tokens, so that its logits are no "
            "sum of content and position parts."
        )
    if encoding.overrides("transform_weights"):
        raise NoForm(
            f"encoding: {name} acts on the weights after the softmax, so that its logits are not all of its position."
        )


def _commons(pieces: Pieces) -> tuple[Common, dict[str, Common], Common | None, Common | None]:
    """What the parts, the mean contents and the contents alone have in common with the whole, over all sequences."""
    several = pieces.q.shape[0] > 1
    mean = pieces.mean
    mean_q, mean_k = mean.turned
    affine = several and pieces.layer.encoding.overrides("transform_logits")
    mean_rest = rest(mean, mean.q, mean.k) if affine else None
    parts: dict[str, list[Common]] = {}
    means: list[Common] = []
    contents: list[Common] = []
    for sequences, batch in pieces.batches():
        whole = batch.whole()
        for name, (q, k) in batch.products.items():
            parts.setdefault(name, []).append(whole.products(q, k))
        for name, fixed in batch.fixed.items():
            common = whole.known(fixed)
            parts.setdefault(name, []).append(Common(*(x.unsqueeze(-1) for x in vars(common).values())))
        if not several:
            continue
        there = whole.there
        position = whole.products(mean_q * pieces.layer.scale * there, mean_k * there).summed()
        if mean_rest is not None:
            position = position + whole.known(Written(mean_rest * there * there.transpose(-2, -1)))
        elif BIAS in batch.fixed:
            position = position + whole.known(batch.fixed[BIAS])
        means.append(position)
        alone = _content(pieces, sequences, mean)
        if alone is not None:
            contents.append(whole.products(alone[0] * pieces.layer.scale * there, alone[1] * there).summed())
    summed = {name: sum_of(found) for name, found in parts.items()}
    total = sum_of([part.summed() for part in summed.values()])
    return total, summed, sum_of(means) if means else None, sum_of(contents) if contents else None


def _content(pieces: Pieces, sequences: slice, mean: LayerTrace) -> tuple[Tensor, Tensor] | None:
    """Queries and keys without their positions' means, the queries turned by the mean rotation; None if not known."""
    layer, rotation = pieces.layer, pieces.rotation
    if rotation is None and layer.encoding.overrides("rotate"):
        return None
    count = pieces.present.sum(0).double()[None, None, :, None]
    weight = count / count.sum()
    q, k = (x[sequences] - m + (m * weight).sum(2, keepdim=True) for x, m in ((pieces.q, mean.q), (pieces.k, mean.k)))
    return (q, k) if rotation is None else (rotation.turn_by_mean(q, layer), k)


def _frequency_shares(parts: list[Common], whole: Common, pairs: float, variances: tuple[Tensor, Tensor]) -> Shares:
    spreads = [spread(part, whole, pairs) for part in parts]
    flat = [(one[..., g], rows[..., g]) for one, rows in spreads for g in range(one.shape[-1])]
    return shares_of(flat, variances)


def _kinds(
    position: tuple[Tensor, Tensor] | None,
    content: tuple[Tensor, Tensor] | None,
    variances: tuple[Tensor, Tensor],
) -> Shares:
    unknown = torch.full_like(variances[0], torch.nan)
    position, content = position or (unknown, unknown), content or (unknown, unknown)
    rest = (variances[0] - position[0] - content[0], variances[1] - position[1] - content[1])
    return shares_of([position, content, rest], variances)
