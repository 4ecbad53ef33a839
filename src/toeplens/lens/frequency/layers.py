"""How the heads of one layer use the frequencies of its rotation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.pieces import NoForm, Pieces, checked
from toeplens.lens.kit.shares import Shares, grouped, shares_of, spread
from toeplens.lens.kit.terms import Common, Whole, sum_of
from toeplens.lens.kit.trace import Counted, LayerTrace


@dataclass(frozen=True)
class LayerUse:
    """One layer's part of `toeplens.lens.frequency.use.FrequencyUse`, with the same fields."""

    frequencies: Float[Tensor, "H n"]
    norms: Float[Tensor, "H g"]
    shares: Shares
    variance: Float[Tensor, "H"]
    q_energy: Float[Tensor, "H d"]
    k_energy: Float[Tensor, "H d"]

    def with_columns(self, pairs: int) -> LayerUse:
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


def layer_use(layer: LayerTrace, counted: Counted) -> LayerUse:
    """Of a traced layer; raises `NoForm` where its logits are no sum over pairs of dimensions and a bias."""
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
    wholes = (batch.whole() for _, batch in pieces.batches())
    q, k = (by_group(x, groups, count) for x in (pieces.q, pieces.k))
    seen = k.cumsum(2) if layer.causal else k.sum(2, keepdim=True)
    return LayerUse(
        frequencies,
        (q * seen).sum((0, 2)) / pieces.pairs,  # a running sum, no pairs formed
        *shares_by_group(wholes, groups, count, pieces.pairs),
        *(energy_shares(x) for x in (pieces.q, pieces.k)),
    )


def shares_by_group(
    wholes: Iterable[Whole], groups: Int[Tensor, "d"], count: int, pairs: float
) -> tuple[Shares, Float[Tensor, "H"]]:
    """The shares of each group of dimensions and of the fixed term, if there is one, and the variance.

    Arguments
        wholes  the logits of all sequences, some at a time
        groups  [d] the group of each dimension, 0 .. ``count`` - 1
        pairs   visible pairs of all sequences
    """
    whole, parts, biases, energies = [], [], [], []
    for one in wholes:
        part = one.products(one.q, one.k)
        bias = Common(*(torch.zeros_like(x.sum(-1)) for x in vars(part).values()))
        for fixed in one.fixed:
            bias = bias + one.known(fixed)
        energies.append(part.inner.abs().sum(-1) + bias.inner.abs())
        parts.append(grouped(part, groups, count))
        biases.append(bias)
        whole.append(part.summed() + bias)
    total, part, bias = (sum_of(found) for found in (whole, parts, biases))
    variances = spread(total, total, pairs)
    whole_spread = spread(part, total, pairs)
    terms = [(whole_spread[0][..., g], whole_spread[1][..., g]) for g in range(count)]
    terms.append(spread(bias, total, pairs))
    return shares_of(terms, variances, torch.stack(energies).sum(0)), (variances[0] / pairs).clamp(min=0)


def by_group(x: Float[Tensor, "B H N d"], groups: Int[Tensor, "d"], count: int) -> Float[Tensor, "B H N g"]:
    """The norm of each group of dimensions."""
    return x.new_zeros(*x.shape[:-1], count).index_add_(-1, groups, x.square()).sqrt()


def energy_shares(x: Float[Tensor, "B H N d"]) -> Float[Tensor, "H d"]:
    """Each dimension's share of the squared norms; NaN where they are 0."""
    energy = x.square().sum((0, 2))
    return energy / energy.sum(-1, keepdim=True)
