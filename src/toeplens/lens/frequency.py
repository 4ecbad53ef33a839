"""How heads use the frequencies of a rotation: by the norms of their pairs, and by what makes their logits vary.

A logit is Re sum_t q_t conj(k_t) kernel_t(i - j), a sum over pairs of dimensions, each with a frequency of its own
(theory, section 3). What a model loses without a frequency is measured in `toeplens.lens.bands`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.ground import InputError
from toeplens.lens.decompose import NoForm, checked
from toeplens.lens.pieces import BIAS, Pieces
from toeplens.lens.position_effect import listed
from toeplens.lens.shares import Shares, grouped, shares_of, spread
from toeplens.lens.terms import Common, sum_of
from toeplens.lens.trace import AttentionTrace, Counted, LayerTrace

_CONTENT = "content-content"


@dataclass(frozen=True)
class FrequencyUse:
    """What each head does with each frequency (measures, "Frequency use and control").

    Columns are groups of dimensions: first those that are not turned, then the pairs t = 0 .. n - 1, the highest
    frequency first. In a layer without a rotation all is in the first column.

    layers       from 0
    frequencies  [L, H, n] radians a position; 0 where a head's pair does not turn, NaN in a layer without a rotation
    norms        [L, H, 1 + n] mean over the visible pairs of ||q_i^(t)|| ||k_j^(t)||, without the scale
    shares       of the variance of the logits, Cov(L_t, L) / Var(L): [L, H, 1 + n + 1], the last for what an encoding
                 adds whatever the content (a bias; else 0). They sum to 1 and may be negative; NaN where the logits do
                 not vary. ``softmax`` is with each query's mean removed
    variance     [L, H] of the logits over the visible pairs
    q_energy, k_energy  [L, H, d] each dimension's share of the squared norms of all queries, of all keys, before they
                 are turned; NaN where they are 0
    """

    layers: tuple[int, ...]
    frequencies: Float[Tensor, "L H n"]
    norms: Float[Tensor, "L H g"]
    shares: Shares
    variance: Float[Tensor, "L H"]
    q_energy: Float[Tensor, "L H d"]
    k_energy: Float[Tensor, "L H d"]

    def norm_shares(self) -> Float[Tensor, "L H g"]:
        """The norms over their sum; NaN where all are 0."""
        return self.norms / self.norms.sum(-1, keepdim=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; None for NaN. Of the energies, what the largest dimension has."""
        named = {
            "frequencies": self.frequencies,
            "norms": self.norm_shares(),
            "logits": self.shares.logits,
            "softmax": self.shares.softmax,
            "variance": self.variance,
            "centre": self.centre(),
            "massive": torch.stack(self.massive()),
        }
        return {"layers": list(self.layers), **{name: listed(x.cpu().numpy()) for name, x in named.items()}}

    def massive(self, top: int = 1) -> tuple[Float[Tensor, "L H"], Float[Tensor, "L H"]]:
        """What the ``top`` largest dimensions have of the squared norms of queries and of keys (Jin et al. 2025).

        Spread evenly it would be top / d.
        """
        most = self.q_energy.shape[-1]
        if not 1 <= top <= most:
            raise InputError(f"top: {top} was given; it must be from 1 to {most}, the dimensions of a head.")
        q, k = (energy.topk(top, dim=-1).values.sum(-1) for energy in (self.q_energy, self.k_energy))
        return q, k

    def centre(self) -> Float[Tensor, "L H"]:
        """The mean log2 of the frequencies, each weighed by its share of the variance, if that is positive.

        The rotation's centre of gravity in octaves (0: one radian a position); NaN without a positive share.
        """
        weight = self.shares.logits[..., 1:-1].clamp(min=0) * (self.frequencies > 0)
        octaves = torch.where(self.frequencies > 0, self.frequencies, torch.ones_like(self.frequencies)).log2()
        return (weight * octaves).sum(-1) / weight.sum(-1)


@torch.no_grad()
def frequency_use(trace: AttentionTrace, *, counted: Counted = "all") -> FrequencyUse:
    """Norm and variance use of every frequency, in the layers of a trace; exact, in O(N d^2) a head, in float64.

    Arguments
        counted  which queries count: ``all``, or those ``used``: of a layer that is read out in one place, that one

    Raises `NoForm`, an `InputError`, where an encoding's logits are no sum over pairs of dimensions and a bias.
    """
    found = [_layer(layer, counted) for layer in trace]
    most = max(one.frequencies.shape[-1] for one in found)
    wide = [one.with_columns(most) for one in found]

    def stacked(of: Callable[[_LayerUse], Tensor]) -> Tensor:
        return torch.stack([of(one) for one in wide])

    return FrequencyUse(
        layers=tuple(trace.layers),
        frequencies=stacked(lambda one: one.frequencies),
        norms=stacked(lambda one: one.norms),
        shares=Shares(stacked(lambda one: one.shares.logits), stacked(lambda one: one.shares.softmax)),
        variance=stacked(lambda one: one.variance),
        q_energy=stacked(lambda one: one.q_energy),
        k_energy=stacked(lambda one: one.k_energy),
    )


@dataclass(frozen=True)
class _LayerUse:
    frequencies: Float[Tensor, "H n"]
    norms: Float[Tensor, "H g"]
    shares: Shares
    variance: Float[Tensor, "H"]
    q_energy: Float[Tensor, "H d"]
    k_energy: Float[Tensor, "H d"]

    def with_columns(self, pairs: int) -> _LayerUse:
        """The same with columns for so many frequencies, as other layers have."""
        more = pairs - self.frequencies.shape[-1]
        shares = (
            torch.cat((x[..., :-1], x.new_zeros(len(x), more), x[..., -1:]), dim=-1)
            for x in (self.shares.logits, self.shares.softmax)
        )
        return replace(
            self,
            frequencies=F.pad(self.frequencies, (0, more), value=torch.nan),
            norms=F.pad(self.norms, (0, more)),
            shares=Shares(*shares),
        )


def _layer(layer: LayerTrace, counted: Counted) -> _LayerUse:
    encoding, name = layer.encoding, type(layer.encoding).__name__
    if encoding.data_dependent or encoding.overrides("transform_logits") or encoding.overrides("transform_weights"):
        raise NoForm(f"encoding: the logits of {name} are no sum over pairs of dimensions and a bias.")
    pieces = Pieces(layer, torch.zeros_like(layer.inputs), torch.zeros_like(layer.key_inputs), counted)
    checked(pieces)
    heads = layer.q.shape[1]
    if pieces.rotation is None:
        if encoding.overrides("rotate"):
            raise NoForm(f"encoding: {name} does not turn pairs of dimensions by a function of the offset alone.")
        groups = torch.zeros(layer.q.shape[-1], dtype=torch.long, device=layer.q.device)
        frequencies = pieces.q.new_empty(heads, 0)
    else:
        groups = pieces.rotation.groups
        frequencies = pieces.rotation.frequencies.double().expand(heads, -1)
    count = 1 + frequencies.shape[-1]
    whole, parts, biases = [], [], []
    for _, batch in pieces.batches():
        one = batch.whole()
        part = one.products(*batch.products[_CONTENT])
        bias = one.known(batch.fixed[BIAS]) if BIAS in batch.fixed else None
        if bias is None:
            bias = Common(*(torch.zeros_like(x.sum(-1)) for x in vars(part).values()))
        parts.append(grouped(part, groups, count))
        biases.append(bias)
        whole.append(part.summed() + bias)
    total, by_group, bias = (sum_of(found) for found in (whole, parts, biases))
    variances = spread(total, total, pieces.pairs)
    whole_spread = spread(by_group, total, pieces.pairs)
    terms = [(whole_spread[0][..., g], whole_spread[1][..., g]) for g in range(count)]
    terms.append(spread(bias, total, pieces.pairs))
    energies = [x.square().sum((0, 2)) for x in (pieces.q, pieces.k)]
    q_energy, k_energy = (energy / energy.sum(-1, keepdim=True) for energy in energies)
    return _LayerUse(
        frequencies,
        _norms(pieces, groups, count),
        shares_of(terms, variances),
        variances[0] / pieces.pairs,
        q_energy,
        k_energy,
    )


def _norms(pieces: Pieces, groups: Int[Tensor, "d"], count: int) -> Float[Tensor, "H g"]:
    """Mean over the visible pairs of the product of norms, group by group; a running sum, no pairs formed."""
    q, k = (_by_group(x, groups, count) for x in (pieces.q, pieces.k))
    seen = k.cumsum(2) if pieces.layer.causal else k.sum(2, keepdim=True)
    return (q * seen).sum((0, 2)) / pieces.pairs


def _by_group(x: Float[Tensor, "B H N d"], groups: Int[Tensor, "d"], count: int) -> Float[Tensor, "B H N g"]:
    return x.new_zeros(*x.shape[:-1], count).index_add_(-1, groups, x.square()).sqrt()
