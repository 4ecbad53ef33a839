"""How heads use the frequencies of a rotation: by the norms of their pairs, and by their share of the logit variance.

A logit is Re sum_t q_t conj(k_t) kernel_t(i - j), a sum over pairs of dimensions with one frequency each (theory,
section 3). `ablate_bands` measures the effect of removing one frequency of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings import BandControl, PositionalEncoding, Rotary
from toeplens.encodings.rotary import Pairing
from toeplens.ground import InputError, choose, invalid
from toeplens.ground.records import AtLeast1, Count, Record
from toeplens.lens.kit import terms
from toeplens.lens.kit.intervals import bootstrap_means
from toeplens.lens.kit.interventions import Batch, Metric, counted_batches, examples_answers, harm
from toeplens.lens.kit.movable import Given, MovableKeys, in_bhnd, movable_from, parts_of
from toeplens.lens.kit.toeplitz import Layout, as_bhnd, over_keys
from toeplens.lens.kit.trace import AttentionTrace, Counted, LayerTrace, Source


class RotaryOffsets(NamedTuple):
    """Rotary offsets of each head and pair, before the rotation.

    strength  [H, n] |E q| |E k| / (E|q| E|k|), means over the tokens of all sequences, pairs as complex numbers: 1 if
              all queries have one direction and all keys have one, near 0 if the directions of either are spread out.
              NaN if either is 0
    angle     [H, n] of E q conj(E k), radians in (-pi, pi]: the pair's part of the logit is largest at the offset i - j
              whose rotation brings this angle back to 0
    """

    strength: Float[Tensor, "H n"]
    angle: Float[Tensor, "H n"]


@torch.no_grad()
def rotary_offsets(
    q: Float[Tensor, "B H N d"],
    k: Float[Tensor, "B G N d"],
    pairs: int,
    lengths: Int[Tensor, "B"] | None = None,
    *,
    pairing: Pairing,
    layout: Layout | None = None,
) -> RotaryOffsets:
    """How fixed the angle between queries and keys is, pair by pair (after Jonasson 2025, arXiv 2503.01832; float64).

    The paper calls pairs with large values in queries and keys at a fixed angle rotary offset features; the measure is
    ours. ``pairs`` is the number of rotated pairs; the other arguments are as in `toeplens.lens.behaviour`. Raises
    `InputError` for shapes that do not fit.
    """
    q, k = as_bhnd(q, k, layout, required=True)
    if not 0 <= 2 * pairs <= q.shape[-1] or q.shape[1] % k.shape[1]:
        raise invalid("pairs", f"fit the dimensions of q {list(q.shape)} and k {list(k.shape)}", pairs)
    order = terms.pair_numbers(pairs, pairing, q.device).argsort(stable=True)
    there = torch.ones(len(q), q.shape[2], dtype=torch.float64, device=q.device)
    if lengths is not None:
        there = (torch.arange(q.shape[2], device=q.device) < lengths.to(q.device).unsqueeze(1)).double()
    weight = (there / there.sum())[:, None, None, :]
    means, sizes = [], []
    for x in (q[..., order].double(), k[..., order].double()):
        means.append(torch.view_as_complex((weight @ x).sum((0, 2)).unflatten(-1, (-1, 2))))
        sizes.append((weight @ (x[..., 0::2].square() + x[..., 1::2].square()).sqrt()).sum((0, 2)))
    group = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // k.shape[1])
    strength = means[0].abs() * means[1].abs()[group] / (sizes[0] * sizes[1][group])
    return RotaryOffsets(strength, (means[0] * means[1][group].conj()).angle())


_AT_ONCE = 1 << 19  # target size of a working tensor [sequences, heads, positions, dimensions]


@dataclass(frozen=True)
class FrequencyRecord(Record):
    """The saved form of a `FrequencyUse`: its numbers by the names there, and

    norms            shares of the norms (`FrequencyUse.norm_shares`)
    logits, softmax  shares of the variance of the logits
    centre, massive  `FrequencyUse.centre`; the share of the largest dimension in the energy of queries, and of keys
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
    """How each head uses each frequency (measures, "Frequency use and control").

    Columns are groups of dimensions: first those that are not rotated, then the pairs t = 0 .. n - 1, in the order of
    the rotation (for a trace the highest frequency first). There is no L for one layer and for tensors, and no L and H
    for q [N, d].

    layers       from 0; empty for one layer and for tensors
    frequencies  [L, H, n] radians per position; 0 for a pair that is not rotated, NaN in a layer without a rotation
    norms        [L, H, 1 + n] mean over the visible pairs of ||q_i^(t)|| ||k_j^(t)||, without the scale
    shares       shares of the logits' variance, Cov(L_t, L) / Var(L): [L, H, 1 + n + 1]; the last is for what an
                 encoding adds regardless of content (a bias; otherwise 0). They sum to 1 and may be negative; NaN if
                 the logits do not vary
    softmax      the same with each query's mean removed
    variance     [L, H] of the logits over the visible pairs
    q_energy, k_energy  [L, H, d] each dimension's share of the squared norms of all queries, and of all keys, before
                 the rotation; NaN if they are 0
    """

    layers: tuple[int, ...]
    frequencies: Float[Tensor, "*LH n"]
    norms: Float[Tensor, "*LH g"]
    shares: terms.Shares
    variance: Float[Tensor, "*LH"]
    q_energy: Float[Tensor, "*LH d"]
    k_energy: Float[Tensor, "*LH d"]

    def norm_shares(self) -> Float[Tensor, "*LH g"]:
        """The norms divided by their sum; NaN if all are 0."""
        return self.norms / self.norms.sum(-1, keepdim=True)

    def to_dict(self) -> dict[str, Any]:
        """The `FrequencyRecord`, as plain lists and numbers for JSON; None for NaN."""
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
        """The share of the ``top`` largest dimensions in the squared norms of queries and of keys (Jin et al. 2025).

        A uniform spread gives top / d.
        """
        most = self.q_energy.shape[-1]
        if not 1 <= top <= most:
            raise invalid("top", f"be from 1 to {most} (the head dimension)", top)
        q, k = (energy.topk(top, dim=-1).values.sum(-1) for energy in (self.q_energy, self.k_energy))
        return q, k

    def centre(self) -> Float[Tensor, "*LH"]:
        """The mean log2 frequency, weighted by the positive shares of the variance, in octaves.

        0 is one radian per position, in either direction; NaN without a positive share.
        """
        turned = self.frequencies.nan_to_num() != 0
        weight = self.shares.logits[..., 1:-1].clamp(min=0) * turned
        octaves = torch.where(turned, self.frequencies.abs(), torch.ones_like(self.frequencies)).log2()
        return (weight * octaves).sum(-1) / weight.sum(-1)


@torch.no_grad()
def frequency_use(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace | LayerTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    **around: Any,
) -> FrequencyUse:
    """Norm and variance use of every frequency, for the layers of a trace or for tensors.

    Exact, in O(N d^2) time per head, in float64, over all visible pairs of all sequences.

    Arguments
        q        [..., H, N, d] queries, or [N, d], before any rotation; or an `AttentionTrace` or one of its layers,
                 from which the rest is read
        k        [..., G, N, d] keys, before any rotation; head h reads key head h // (H / G). Or [N, d]
        around   as in `toeplens.lens.behaviour`

    Raises `InputError` for tensors that do not fit or are not finite, and its subclass `NoForm` for encodings whose
    logits are not a sum over pairs of dimensions plus a bias.
    """
    given = Given(**around)
    if not isinstance(q, Tensor):
        given.require_trace_alone(k)
        if isinstance(q, LayerTrace):
            return _layer_use(q, given.counted)
        found = [_layer_use(layer, given.counted) for layer in q]
        most = max(one.frequencies.shape[-1] for one in found)
        return _together(tuple(q.layers), [_with_columns(one, most) for one in found])
    if k is not None:
        q, k, given = in_bhnd(q, k, given)
    [(_, _, keys)] = movable_from(q, k, given)
    rates = given.rotation
    if not isinstance(keys, MovableKeys):
        raise terms.NoForm(
            f"rotation: logits of {type(rates).__name__} are not a sum over pairs of dimensions and a bias."
        )
    assert k is not None
    if isinstance(rates, PositionalEncoding):  # the frequencies for sequences of this length
        places = torch.arange(q.shape[-2], device=q.device)
        rates = rates.frequencies_at(places.to(rates.frequencies.device)) if isinstance(rates, Rotary) else None
    plain = q.ndim == 2
    one = _use(keys, *((q[None], k[None]) if plain else (q, k)), rates)
    return _together((), [one], lambda found: found[0][0]) if plain else one


def _together(
    layers: tuple[int, ...], found: list[FrequencyUse], join: Callable[[list[Tensor]], Tensor] = torch.stack
) -> FrequencyUse:
    made = {
        field.name: join([getattr(one, field.name) for one in found])
        for field in fields(FrequencyUse)
        if field.name not in ("layers", "shares")
    }
    shares = terms.Shares(join([one.shares.logits for one in found]), join([one.shares.softmax for one in found]))
    return FrequencyUse(layers=layers, shares=shares, **made)


def _with_columns(use: FrequencyUse, pairs: int) -> FrequencyUse:
    """The use of one layer, padded to this number of frequencies."""
    more = pairs - use.frequencies.shape[-1]
    both = use.shares.logits, use.shares.softmax
    shares = terms.Shares(*(torch.cat((x[..., :-1], x.new_zeros(len(x), more), x[..., -1:]), dim=-1) for x in both))
    frequencies = F.pad(use.frequencies, (0, more), value=torch.nan)
    return replace(use, frequencies=frequencies, norms=F.pad(use.norms, (0, more)), shares=shares)


def _layer_use(layer: LayerTrace, counted: Counted) -> FrequencyUse:
    encoding, name = layer.encoding, type(layer.encoding).__name__
    if encoding.data_dependent or encoding.overrides("transform_logits") or encoding.overrides("transform_weights"):
        raise terms.NoForm(f"encoding: logits of {name} are not a sum over pairs of dimensions and a bias.")
    rotation = terms.rotation_of(layer)
    [(_, _, keys)] = movable_from(layer, None, Given(split="none", counted=counted))
    if not isinstance(keys, MovableKeys) or (rotation is None and keys.pairs):
        raise terms.NoForm(f"encoding: {name} does not rotate pairs of dimensions by a function of the offset only.")
    table = None if keys.table is None else terms.bias_by_position(layer)  # in the layer's precision
    return _use(replace(keys, table=table), layer.q, layer.k, None if rotation is None else rotation.frequencies)


def _shares_by_group(
    wholes: Iterable[terms.Whole], groups: Int[Tensor, "d"], count: int, pairs: float
) -> tuple[terms.Shares, Float[Tensor, "H"]]:
    """The shares of each group of dimensions and of the fixed term, and the variance, from all sequences' logits."""
    found = []
    for one in wholes:
        part = one.products(one.q, one.k)
        bias = torch.zeros_like(part[..., 0]) + sum(map(one.known, one.fixed))
        energy = part[1].abs().sum(-1) + bias[1].abs()
        found.append((part.sum(-1) + bias, terms.grouped(part, groups, count), bias, energy))
    total, part, bias, energy = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    variances = terms.spread(total, total, pairs)
    spreads = [*terms.by_column(terms.spread(part, total, pairs)), terms.spread(bias, total, pairs)]
    return terms.shares_of(spreads, variances, energy), (variances[0] / pairs).clamp(min=0)


def _energy_shares(x: Float[Tensor, "B H N d"]) -> Float[Tensor, "H d"]:
    """Each dimension's share of the squared norms; NaN if they are 0."""
    energy = x.square().sum((0, 2))
    return energy / energy.sum(-1, keepdim=True)


def _use(
    keys: MovableKeys,
    q: Float[Tensor, "*_B _H _N _d"],
    k: Float[Tensor, "*_B2 _G _N _d"],
    rotation: Float[Tensor, "*_H2 _n"] | None,
) -> FrequencyUse:
    """The use of queries and keys, given before the rotation too, with the frequencies of the rotation."""
    q, k = (x.reshape(-1, *x.shape[-3:]) for x in (q, k))
    heads, length, width = q.shape[1:]
    present, asked = _counted(keys)
    pairs = float(keys.seen().sum())
    frequencies = (q.new_zeros(1, 0) if rotation is None else rotation).double().expand(heads, -1)
    together = max(1, _AT_ONCE // (length * width))
    found = []
    for start in range(0, heads, together):
        some = slice(start, min(start + together, heads))
        wholes = _wholes(keys, some, max(1, _AT_ONCE // (length * width * together)))
        once, each = keys.key_heads(some).unique(return_inverse=True)
        own_q, own_k = (
            terms.where_present(q[:, some].double(), asked),
            terms.where_present(k[:, once].double(), present),
        )
        norms, others = (terms.grouped(x.square(), keys.groups, 1 + keys.pairs).sqrt() for x in (own_q, own_k))
        total = norms.new_zeros(norms.shape[1], norms.shape[3])
        for part in parts_of(replace(keys, q=norms, content=others, bias=None, table=None)):
            own = part.keys
            seen = own.q if own.asked is None else terms.where_present(own.q, own.asked)
            total += (seen * over_keys(own.content, own.causal, own.window)[:, each]).sum((0, 2))
        shares, variance = _shares_by_group(wholes, keys.groups, 1 + keys.pairs, pairs)
        energies = _energy_shares(own_q), _energy_shares(own_k)[each]
        found.append(FrequencyUse((), frequencies[some], total / pairs, shares, variance, *energies))
    return _together((), found, torch.cat)


def _counted(keys: MovableKeys) -> tuple[Bool[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """The keys and the queries that count."""
    present = torch.arange(keys.q.shape[2], device=keys.q.device) < keys.ends.unsqueeze(1)
    return present, present if keys.asked is None else present & keys.asked


def _wholes(whole: MovableKeys, heads: slice, at_once: int) -> Iterator[terms.Whole]:
    """The logits of some heads, of ``at_once`` sequences at a time."""

    def own(x: Tensor, dim: int = 0) -> Tensor:
        return x if x.shape[dim] == 1 else x.narrow(dim, heads.start, heads.stop - heads.start)

    of_key, fixed = whole.key_heads(heads), []
    for part in parts_of(whole):
        keys = part.keys
        turns, length = own(keys.turns), keys.q.shape[2]
        once, each = of_key.unique(return_inverse=True) if len(turns) == 1 else (of_key, slice(None))
        if keys.bias is not None:  # at all offsets, 0 where no key is visible
            bias = own(keys.bias).double().expand(len(of_key), -1)
            fixed = [terms.Offsets.of(bias, length, keys.causal, keys.window)]
        present, asked = _counted(keys)
        for start in range(0, len(present), at_once):
            some = slice(start, start + at_once)
            if keys.table is not None:
                table = own(keys.table if len(keys.table) == 1 else keys.table[some], 1).double()
                seen = keys.visible(torch.arange(length, device=table.device))[some] & asked[some].unsqueeze(-1)
                fixed = [terms.Written((table * seen.unsqueeze(1)).expand(-1, len(of_key), -1, -1))]
            q = terms.where_present(keys.q[some, heads], asked[some])
            k = terms.where_present(keys.content[some][:, once].double(), present[some])
            k = terms.turned_pairs(k, keys.groups, turns.conj())[:, each]
            yield terms.Whole(q, k, fixed, present[some], keys.causal, asked[some], keys.window)


Off = Literal["rotation", "pair"]


@dataclass(frozen=True)
class BandAblation(Record):
    """The effect of changing one band (one frequency of one head) with everything else unchanged.

    drops      [L, H, n] mean over the counted examples, positive for harm; NaN in a layer without a rotation
    low, high  paired bootstrap interval over examples, not corrected for the number of bands: among many bands some
               intervals miss 0 by chance. [0, 0] for a band without an effect on any example, however few there are
    baseline   the metric of the intact model
    examples   number of examples counted
    metric     ``accuracy``, ``loss`` or ``kl`` (see `ablate_heads`)
    off        ``rotation``: the pair is not rotated, but its content still counts; ``pair``: the pair is removed
    """

    WORDS = "band ablation"

    drops: Float[np.ndarray, "L H n"]
    low: Float[np.ndarray, "L H n"]
    high: Float[np.ndarray, "L H n"]
    baseline: float
    examples: AtLeast1
    metric: Metric
    off: Off


@torch.no_grad()
def ablate_bands(
    source: Source,
    batches: Iterable[Batch],
    *,
    off: Off = "rotation",
    metric: Metric = "loss",
    layers: Collection[int] | None = None,
    bootstrap: int = 1000,
) -> BandAblation:
    """Remove each frequency from each head and measure the effect on the model (measures, "Frequency use", c).

    For one layer and band, the changed outputs of all heads are computed at once, and the model continues from there
    with one head changed at a time: as much work as n head ablations.

    Arguments
        source     a model with a rotation in at least one layer (`toeplens.sources`)
        batches, metric, bootstrap  as in `toeplens.lens.ablate_heads`
        off        how the band is removed, see `BandAblation`
        layers     the layers to ablate (default: all with a rotation); the others are NaN
    """
    choose("off", off, get_args(Off))
    choose("metric", metric, get_args(Metric))
    kept, pairs = counted_batches(batches), source.pairs
    most = max(pairs)
    if most == 0:
        raise InputError("encoding: no layer of this model rotates pairs of dimensions.")
    wanted = range(len(pairs)) if layers is None else layers
    places = [(layer, band) for layer, count in enumerate(pairs) if layer in wanted for band in range(count)]
    if not places:
        turning = [layer for layer, count in enumerate(pairs) if count]
        raise invalid("layers", f"include a layer with a rotation ({turning})", list(wanted))
    one_by_one = 1 - torch.eye(source.num_heads)

    def answers(index: int) -> Iterator[Tensor]:
        tokens, _, lengths = kept[index]
        for layer, state in enumerate(source.states(tokens, lengths)):
            if not layer:
                yield source.replay(state, torch.ones(1, source.num_heads))
            for band in range(pairs[layer]) if layer in wanted else ():
                control = BandControl(**{"still" if off == "rotation" else "silent": (band,)})
                yield source.replay(state, one_by_one, [source.outputs_under(state, control)])

    (before,), (after,) = examples_answers([metric], kept, answers)
    harms = harm(metric, before, after)
    low, high = bootstrap_means(harms.T, samples=bootstrap)
    shape = (source.num_layers, source.num_heads, most)

    filled = np.full((3, *shape), np.nan)
    layer, band = np.transpose(places)
    for array, values in zip(filled, (harms.mean(-1), low, high), strict=True):
        array[layer, :, band] = values.reshape(len(places), -1)
    drops, low, high = filled
    return BandAblation(drops, low, high, float(before.mean()), len(before), metric, off)
