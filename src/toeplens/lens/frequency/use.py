"""How heads use the frequencies of a rotation: by the norms of their pairs, and by what makes their logits vary.

A logit is Re sum_t q_t conj(k_t) kernel_t(i - j), a sum over pairs of dimensions, each with a frequency of its own
(theory, section 3). What a model loses without a frequency is measured in `toeplens.lens.frequency.bands`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.encodings import PositionalEncoding
from toeplens.encodings.rotary import Pairing
from toeplens.ground import InputError
from toeplens.ground.reading import Count
from toeplens.ground.records import Record
from toeplens.lens.frequency.layers import LayerUse, layer_use
from toeplens.lens.frequency.tensors import tensors_use
from toeplens.lens.kit.movable import placed_from, rates_of
from toeplens.lens.kit.shares import Shares
from toeplens.lens.kit.trace import AttentionTrace, Counted


@dataclass(frozen=True)
class FrequencyRecord(Record):
    """What is written down of a `FrequencyUse`: its numbers by the names there, and

    norms            the norms' shares (`FrequencyUse.norm_shares`)
    logits, softmax  the shares of the variance of the logits
    centre, massive  see `FrequencyUse.centre`; what the largest dimension has of the energies of queries, and of keys
    """

    layers: tuple[Count, ...]
    frequencies: Float[np.ndarray, "*LH F"]
    norms: Float[np.ndarray, "*LH F+1"]
    logits: Float[np.ndarray, "*LH F+2"]
    softmax: Float[np.ndarray, "*LH F+2"]
    variance: Float[np.ndarray, "*LH"]
    centre: Float[np.ndarray, "*LH"]
    massive: Float[np.ndarray, "2 *LH"]


@dataclass(frozen=True)
class FrequencyUse:
    """What each head does with each frequency (measures, "Frequency use and control").

    Columns are groups of dimensions: first those that are not turned, then the pairs t = 0 .. n - 1, in the order of
    the rotation (of a trace the highest frequency first). In a layer without a rotation all is in the first column.
    Arrays are as given for a trace; without their L for tensors; without L and H for q [N, d].

    layers       from 0; empty for tensors
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
    frequencies: Float[Tensor, "*LH n"]
    norms: Float[Tensor, "*LH g"]
    shares: Shares
    variance: Float[Tensor, "*LH"]
    q_energy: Float[Tensor, "*LH d"]
    k_energy: Float[Tensor, "*LH d"]

    def norm_shares(self) -> Float[Tensor, "*LH g"]:
        """The norms over their sum; NaN where all are 0."""
        return self.norms / self.norms.sum(-1, keepdim=True)

    def to_dict(self) -> dict[str, Any]:
        """Its record, as plain lists and numbers for JSON; None for NaN."""
        named = {
            "frequencies": self.frequencies,
            "norms": self.norm_shares(),
            "logits": self.shares.logits,
            "softmax": self.shares.softmax,
            "variance": self.variance,
            "centre": self.centre(),
            "massive": torch.stack(self.massive()),
        }
        return FrequencyRecord(self.layers, **{name: x.cpu().numpy() for name, x in named.items()}).to_dict()

    def massive(self, top: int = 1) -> tuple[Float[Tensor, "*LH"], Float[Tensor, "*LH"]]:
        """What the ``top`` largest dimensions have of the squared norms of queries and of keys (Jin et al. 2025).

        Spread evenly it would be top / d.
        """
        most = self.q_energy.shape[-1]
        if not 1 <= top <= most:
            raise InputError(f"top: {top} was given; it must be from 1 to {most}, the dimensions of a head.")
        q, k = (energy.topk(top, dim=-1).values.sum(-1) for energy in (self.q_energy, self.k_energy))
        return q, k

    def centre(self) -> Float[Tensor, "*LH"]:
        """The mean log2 of the frequencies, each weighed by its share of the variance, if that is positive.

        The rotation's centre of gravity in octaves (0: one radian a position); NaN without a positive share.
        """
        weight = self.shares.logits[..., 1:-1].clamp(min=0) * (self.frequencies > 0)
        octaves = torch.where(self.frequencies > 0, self.frequencies, torch.ones_like(self.frequencies)).log2()
        return (weight * octaves).sum(-1) / weight.sum(-1)


@torch.no_grad()
def frequency_use(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    *,
    rotation: Float[Tensor, "*_H _n"] | PositionalEncoding | None = None,
    pairing: Pairing = "interleaved",
    bias: Float[Tensor, "*_H2 _D"] | None = None,
    causal: bool = True,
    scale: float = 1.0,
    lengths: Int[Tensor, "_B"] | None = None,
    window: int | None = None,
    counted: Counted = "all",
) -> FrequencyUse:
    """Norm and variance use of every frequency, of the layers of a trace or of tensors.

    Exact, in O(N d^2) time a head, in float64; of sequences together, over all of their visible pairs.

    Arguments
        q        [..., H, N, d] queries, or [N, d], before any rotation; or an `AttentionTrace`, where the rest is read
        k        [..., G, N, d] keys; head h reads key head h // (H / G). Or [N, d]
        rotation, pairing, bias, causal, scale, lengths, window  as in `toeplens.lens.following.behaviour.behaviour`
        counted  of a trace, which queries count: ``all``, or those ``used``: of a layer that is read out in one place,
                 that one

    Raises `InputError` for tensors that do not fit or are not finite, and `NoForm`, one of its kind, where an
    encoding's logits are no sum over pairs of dimensions and a bias.
    """
    if isinstance(q, AttentionTrace):
        for name, value in (("k", k), ("rotation", rotation), ("bias", bias), ("lengths", lengths), ("window", window)):
            if value is not None:
                raise InputError(f"{name}: it was given beside a trace; a trace has its own.")
        found = [layer_use(layer, counted) for layer in q]
        most = max(one.frequencies.shape[-1] for one in found)
        return _use(tuple(q.layers), [one.with_columns(most) for one in found], torch.stack)
    options = (rotation, pairing, bias, None, causal, scale, lengths)
    [(_, _, placed)] = placed_from(q, k, *options, "known", counted, window)
    assert k is not None
    plain = q.ndim == 2
    queries, keys = (q[None], k[None]) if plain else (q, k)
    one = tensors_use(placed, queries, keys, rates_of(rotation, q.shape[-2]))
    return _use((), [one], lambda found: found[0][0] if plain else found[0])


def _use(layers: tuple[int, ...], found: list[LayerUse], together: Callable[[list[Tensor]], Tensor]) -> FrequencyUse:
    return FrequencyUse(
        layers=layers,
        frequencies=together([one.frequencies for one in found]),
        norms=together([one.norms for one in found]),
        shares=Shares(together([one.shares.logits for one in found]), together([one.shares.softmax for one in found])),
        variance=together([one.variance for one in found]),
        q_energy=together([one.q_energy for one in found]),
        k_energy=together([one.k_energy for one in found]),
    )
