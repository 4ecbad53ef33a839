"""How heads use the frequencies of a rotation: by the norms of their pairs, and by their share of the logit variance.

A logit is Re sum_t q_t conj(k_t) kernel_t(i - j), a sum over pairs of dimensions with one frequency each (theory,
section 3). `ablate_bands` measures the effect of removing one frequency of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Unpack, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings import FrequencyMask, Rotary
from toeplens.encodings.rotary import Pairing
from toeplens.lens.kit import separable_keys, terms
from toeplens.lens.kit.intervals import bootstrap_means
from toeplens.lens.kit.interventions import Batch, Metric, counted_batches, example_metrics, harm
from toeplens.lens.kit.rotation import RotaryPairs
from toeplens.lens.kit.separable_keys import (
    AttentionOptionArguments,
    AttentionOptions,
    SeparableKeys,
    iter_layer_keys,
    query_blocks,
)
from toeplens.lens.kit.toeplitz import Layout, check_finite, sequence_ends, sum_over_keys
from toeplens.lens.kit.trace import AttentionTrace, CountedQueries, LayerTrace, Source
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.records import NonNegativeInt, PositiveInt, Record


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
    q: Float[Tensor, "*_B _H _N _d"],
    k: Float[Tensor, "*_B2 _H2 _N _d"],
    pairs: int | None = None,
    lengths: Int[Tensor, "_B"] | None = None,
    *,
    rotation: RotaryPairs | Tensor | None = None,
    pairing: Pairing | None = None,
    rotated: bool = False,
    layout: Layout | None = None,
) -> RotaryOffsets:
    """How fixed the angle between queries and keys is, pair by pair (after Jonasson 2025, arXiv 2503.01832; float64).

    The paper calls pairs with large values in queries and keys at a fixed angle rotary offset features; the measure is
    ours. Arguments are as in `toeplens.lens.behaviour`; the frequencies are needed only for rotated queries and keys,
    so ``pairs``, the number of rotated pairs from the first dimension on, may take the place of ``rotation``. Raises
    `InputError` for shapes that do not fit and numbers that are not finite.
    """
    if (pairs is None) == (rotation is None) or (rotated and rotation is None):
        raise InputError("rotation must be set, or pairs for q and k before the rotation.")
    if pairs is not None:
        if not 0 <= 2 * pairs <= q.shape[-1]:
            raise invalid("pairs", f"fit the dimensions of q {list(q.shape)}", pairs)
        rotation = torch.zeros(pairs)
    options = AttentionOptions(rotation=rotation, pairing=pairing, rotated=rotated, layout=layout)
    q, k, options = separable_keys.prepare_tensors(q, k, options)
    if not isinstance(options.rotation, RotaryPairs):
        raise invalid("rotation", "be frequencies, or come from lens.rope or lens.rotation_of", options.rotation)
    first, second = terms.pairs_index(options.rotation.groups(q.device), options.rotation.num_pairs)
    present = torch.arange(q.shape[-2], device=q.device) < sequence_ends(lengths, q).unsqueeze(1)
    sums, sizes = [], []
    for name, x in (("q", q), ("k", k)):
        x = terms.zero_padding(x.double().reshape(-1, *x.shape[-3:]), present)
        check_finite(x.sum(), **{name: x})
        total = x.sum((0, 2))
        sums.append(torch.complex(total[..., first], total[..., second]))
        sizes.append((x[..., first].square() + x[..., second].square()).sqrt().sum((0, 2)))
    group = torch.arange(q.shape[-3], device=q.device) // (q.shape[-3] // k.shape[-3])
    strength = sums[0].abs() * sums[1].abs()[group] / (sizes[0] * sizes[1][group])
    return RotaryOffsets(strength, (sums[0] * sums[1][group].conj()).angle())


_MAX_ELEMENTS = 1 << 17  # target size of a working tensor [sequences, heads, positions, dimensions], for the cache


@dataclass(frozen=True)
class FrequencyRecord(Record):
    """The saved form of a `FrequencyUse`: its numbers by the names there, and

    norms            shares of the norms (`FrequencyUse.norm_shares`)
    logits, softmax  shares of the variance of the logits
    centre, massive  `FrequencyUse.centre`; the share of the largest dimension in the energy of queries, and of keys
    """

    layers: tuple[NonNegativeInt, ...]
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
    shares: terms.TermShares
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
        head_dim = self.q_energy.shape[-1]
        if not 1 <= top <= head_dim:
            raise invalid("top", f"be from 1 to {head_dim} (the head dimension)", top)
        q, k = (energy.topk(top, dim=-1).values.sum(-1) for energy in (self.q_energy, self.k_energy))
        return q, k

    def centre(self, kind: Literal["logits", "softmax"] = "logits") -> Float[Tensor, "*LH"]:
        """The mean log2 frequency, weighted by the positive shares of the variance, in octaves.

        ``softmax``: of the variance within queries. They differ if a pair adds a large term to all logits of a query,
        which the softmax ignores. 0 is one radian per position, in either direction; NaN without a positive share.
        """
        rotated = self.frequencies.nan_to_num() != 0
        weight = getattr(self.shares, kind)[..., 1:-1].clamp(min=0) * rotated
        octaves = torch.where(rotated, self.frequencies.abs(), torch.ones_like(self.frequencies)).log2()
        return (weight * octaves).sum(-1) / weight.sum(-1)


@torch.no_grad()
def frequency_use(
    q: Float[Tensor, "*_B _N _d"] | AttentionTrace | LayerTrace,
    k: Float[Tensor, "*_B2 _N _d"] | None = None,
    **arguments: Unpack[AttentionOptionArguments],
) -> FrequencyUse:
    """Norm and variance use of every frequency, for the layers of a trace or for tensors.

    Exact, in O(N d^2) time per head, in float64, over all visible pairs of all sequences.

    Arguments
        q          [..., H, N, d] queries, or [N, d], before the rotation; or an `AttentionTrace` or one of its layers,
                   from which the rest is read
        k          [..., G, N, d] keys, before the rotation; head h reads key head h // (H / G). Or [N, d]
        arguments  as in `toeplens.lens.behaviour`

    Raises `InputError` for tensors that do not fit or are not finite, and its subclass `NotSeparable` for encodings
    whose logits are not a sum over pairs of dimensions plus a bias.
    """
    options = AttentionOptions(**arguments)
    if not isinstance(q, Tensor):
        options.require_trace_alone(q, k)
        if isinstance(q, LayerTrace):
            return _use_of_layer(q, options.counted)
        results = [_use_of_layer(layer, options.counted) for layer in q]
        num_pairs = max(use.frequencies.shape[-1] for use in results)
        return _stack_uses(tuple(q.layers), [_pad_pairs(use, num_pairs) for use in results])
    q, k, options = separable_keys.prepare_tensors(q, k, options)
    [(_, _, keys)] = iter_layer_keys(q, k, options)
    rotation = options.rotation
    if not isinstance(keys, SeparableKeys):
        raise terms.NotSeparable(
            f"rotation: logits of {type(rotation).__name__} are not a sum over pairs of dimensions and a bias."
        )
    frequencies = None
    if isinstance(rotation, RotaryPairs):
        frequencies = rotation.frequencies.to(q.device)
    elif isinstance(rotation, Rotary):  # the frequencies for sequences of this length
        frequencies = rotation.frequencies_at(torch.arange(q.shape[-2], device=rotation.frequencies.device))
    is_matrix = q.ndim == 2
    use = _compute_use(keys, *((q[None], k[None]) if is_matrix else (q, k)), frequencies)
    return _stack_uses((), [use], lambda results: results[0][0]) if is_matrix else use


def _stack_uses(
    layers: tuple[int, ...], uses: list[FrequencyUse], join: Callable[[list[Tensor]], Tensor] = torch.stack
) -> FrequencyUse:
    values = {
        field.name: join([getattr(use, field.name) for use in uses])
        for field in fields(FrequencyUse)
        if field.name not in ("layers", "shares")
    }
    shares = terms.TermShares(join([use.shares.logits for use in uses]), join([use.shares.softmax for use in uses]))
    return FrequencyUse(layers=layers, shares=shares, **values)


def _pad_pairs(use: FrequencyUse, pairs: int) -> FrequencyUse:
    """The use of one layer, padded to this number of frequencies."""
    missing = pairs - use.frequencies.shape[-1]
    both = use.shares.logits, use.shares.softmax
    padded = (torch.cat((x[..., :-1], x.new_zeros(len(x), missing), x[..., -1:]), dim=-1) for x in both)
    shares = terms.TermShares(*padded)
    frequencies = F.pad(use.frequencies, (0, missing), value=torch.nan)
    return replace(use, frequencies=frequencies, norms=F.pad(use.norms, (0, missing)), shares=shares)


def _use_of_layer(layer: LayerTrace, counted: CountedQueries) -> FrequencyUse:
    encoding, name = layer.encoding, type(layer.encoding).__name__
    if encoding.data_dependent or encoding.overrides("transform_logits") or encoding.overrides("transform_weights"):
        raise terms.NotSeparable(f"encoding: logits of {name} are not a sum over pairs of dimensions and a bias.")
    rotation = terms.pair_rotation(layer)
    [(_, _, keys)] = iter_layer_keys(layer, None, AttentionOptions(split="none", counted=counted))
    if not isinstance(keys, SeparableKeys) or (rotation is None and keys.num_pairs):
        problem = "does not rotate pairs of dimensions by a function of the offset only"
        raise terms.NotSeparable(f"encoding: {name} {problem}.")
    table = None if keys.table is None else terms.bias_by_position(layer)  # in the layer's precision
    frequencies = None if rotation is None else rotation.frequencies
    return _compute_use(replace(keys, table=table), layer.q, layer.k, frequencies)


def _shares_by_group(
    logit_batches: Iterable[terms.BatchLogits], groups: Int[Tensor, "d"], count: int, num_pairs: float
) -> tuple[terms.TermShares, Float[Tensor, "H"]]:
    """The shares of each group of dimensions and of the fixed term, and the variance, from all sequences' logits."""
    sums = []
    for logits in logit_batches:
        products = logits.product_sums(logits.q, logits.k)
        bias = torch.zeros_like(products[..., 0]) + sum(map(logits.fixed_sums, logits.fixed))
        energy = products[1].abs().sum(-1) + bias[1].abs()
        sums.append((products.sum(-1) + bias, terms.sum_by_group(products, groups, count), bias, energy))
    total, products, bias, energy = (torch.stack(values).sum(0) for values in zip(*sums, strict=True))
    variances = terms.centred_sums(total, total, num_pairs)
    groups_and_bias = terms.split_columns(terms.centred_sums(products, total, num_pairs))
    groups_and_bias.append(terms.centred_sums(bias, total, num_pairs))
    return terms.shares_of(groups_and_bias, variances, energy), (variances[0] / num_pairs).clamp(min=0)


def _energy_shares(squares: Float[Tensor, "B H N d"]) -> Float[Tensor, "H d"]:
    """Each dimension's share of the squared norms; NaN if they are 0."""
    energy = squares.sum((0, 2))
    return energy / energy.sum(-1, keepdim=True)


def _compute_use(
    keys: SeparableKeys,
    q: Float[Tensor, "*_B _H _N _d"],
    k: Float[Tensor, "*_B2 _G _N _d"],
    rotation: Float[Tensor, "*_H2 _n"] | None,
) -> FrequencyUse:
    """The use of queries and keys, given before the rotation too, with the frequencies of the rotation."""
    q, k = (x.reshape(-1, *x.shape[-3:]) for x in (q, k))
    heads, length, width = q.shape[1:]
    present, query_mask = _key_and_query_masks(keys)
    num_pairs = float(keys.num_visible().sum())
    keys = keys if num_pairs else replace(keys, window=None)  # no sequence has tokens
    frequencies = (q.new_zeros(1, 0) if rotation is None else rotation).double().expand(heads, -1)
    heads_per_step = max(1, _MAX_ELEMENTS // (length * width))
    uses = []
    for start in range(0, heads, heads_per_step):
        head_slice = slice(start, min(start + heads_per_step, heads))
        logit_batches = _logit_batches(keys, head_slice, max(1, _MAX_ELEMENTS // (length * width * heads_per_step)))
        key_heads, key_index = keys.key_heads(head_slice).unique(return_inverse=True)
        masked = ((q[:, head_slice], query_mask), (k[:, key_heads], present))
        q_squares, k_squares = (terms.zero_padding(x.double(), mask).square() for x, mask in masked)
        groups = keys.groups, 1 + keys.num_pairs
        norms, key_norms = (terms.sum_by_group(x, *groups).sqrt() for x in (q_squares, k_squares))
        total = norms.new_zeros(norms.shape[1], norms.shape[3])
        for block in query_blocks(replace(keys, q=norms, content=key_norms, bias=None, table=None)):
            part = block.keys
            query_norms = part.q if part.query_mask is None else terms.zero_padding(part.q, part.query_mask)
            key_sums = sum_over_keys(part.content, part.causal, part.window)[:, key_index]
            total += (query_norms * key_sums).sum((0, 2))
        shares, variance = _shares_by_group(logit_batches, keys.groups, 1 + keys.num_pairs, num_pairs)
        energies = _energy_shares(q_squares), _energy_shares(k_squares)[key_index]
        uses.append(FrequencyUse((), frequencies[head_slice], total / num_pairs, shares, variance, *energies))
    return _stack_uses((), uses, torch.cat)


def _key_and_query_masks(keys: SeparableKeys) -> tuple[Bool[Tensor, "B N"], Bool[Tensor, "B N"]]:
    """The keys and the queries that count."""
    present = torch.arange(keys.q.shape[2], device=keys.q.device) < keys.ends.unsqueeze(1)
    return present, present if keys.query_mask is None else present & keys.query_mask


def _logit_batches(all_keys: SeparableKeys, heads: slice, batch_size: int) -> Iterator[terms.BatchLogits]:
    """The logits of some heads, of ``batch_size`` sequences at a time."""

    def select_heads(x: Tensor, dim: int = 0) -> Tensor:
        return x if x.shape[dim] == 1 else x.narrow(dim, heads.start, heads.stop - heads.start)

    head_keys, fixed = all_keys.key_heads(heads), []
    for block in query_blocks(all_keys):
        keys = block.keys
        factors, length = select_heads(keys.phase_factors), keys.q.shape[2]
        is_shared = len(factors) == 1
        key_heads, key_index = head_keys.unique(return_inverse=True) if is_shared else (head_keys, slice(None))
        if keys.bias is not None:  # at all offsets, 0 where no key is visible
            bias = select_heads(keys.bias).double().expand(len(head_keys), -1)
            fixed = [terms.ToeplitzMatrix.from_bias(bias, length, keys.causal, keys.window)]
        present, query_mask = _key_and_query_masks(keys)
        for start in range(0, len(present), batch_size):
            sequences = slice(start, start + batch_size)
            if keys.table is not None:
                table = select_heads(keys.table if len(keys.table) == 1 else keys.table[sequences], 1).double()
                visible = keys.visible_mask(torch.arange(length, device=table.device))[sequences]
                visible = (visible & query_mask[sequences].unsqueeze(-1)).unsqueeze(1)
                fixed = [terms.DenseMatrix((table * visible).expand(-1, len(head_keys), -1, -1))]
            q = terms.zero_padding(keys.q[sequences, heads], query_mask[sequences])
            k = terms.zero_padding(keys.content[sequences][:, key_heads].double(), present[sequences])
            k = terms.rotate_pairs(k, keys.groups, factors.conj())[:, key_index]
            yield terms.BatchLogits(q, k, fixed, present[sequences], keys.causal, query_mask[sequences], keys.window)


BandRemoval = Literal["rotation", "pair"]


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

    LABEL = "band ablation"

    drops: Float[np.ndarray, "L H n"]
    low: Float[np.ndarray, "L H n"]
    high: Float[np.ndarray, "L H n"]
    baseline: float
    examples: PositiveInt
    metric: Metric
    off: BandRemoval


@torch.no_grad()
def ablate_bands(
    source: Source,
    batches: Iterable[Batch],
    *,
    off: BandRemoval = "rotation",
    metric: Metric = "loss",
    layers: Collection[int] | None = None,
    bootstrap: int = 1000,
) -> BandAblation:
    """Remove each frequency from each head and measure the effect on the model (measures, "Frequency use", c).

    For one layer and band, the changed outputs of all heads are computed at once, and the model continues from there
    with one head changed at a time: as much work as n head ablations.

    Arguments
        source     a model with a rotation in at least one layer (`toeplens.backends`)
        batches, metric, bootstrap  as in `toeplens.lens.ablate_heads`
        off        how the band is removed, see `BandAblation`
        layers     the layers to ablate (default: all with a rotation); the others are NaN
    """
    choose("off", off, get_args(BandRemoval))
    choose("metric", metric, get_args(Metric))
    batch_list, pairs = counted_batches(batches), source.pairs_per_layer
    max_pairs = max(pairs)
    if max_pairs == 0:
        raise InputError("encoding: no layer of this model rotates pairs of dimensions.")
    chosen_layers = range(len(pairs)) if layers is None else layers
    bands = [(layer, band) for layer, count in enumerate(pairs) if layer in chosen_layers for band in range(count)]
    if not bands:
        rotary_layers = [layer for layer, count in enumerate(pairs) if count]
        raise invalid("layers", f"include a layer with a rotation ({rotary_layers})", list(chosen_layers))
    single_head_gains = 1 - torch.eye(source.num_heads)

    def logits_of(index: int) -> Iterator[Tensor]:
        tokens, _, lengths = batch_list[index]
        for layer, state in enumerate(source.states(tokens, lengths)):
            if not layer:
                yield source.replay(state, torch.ones(1, source.num_heads))
            for band in range(pairs[layer]) if layer in chosen_layers else ():
                frequency_mask = FrequencyMask(**{"freeze" if off == "rotation" else "drop": (band,)})
                yield source.replay(state, single_head_gains, [source.head_outputs_with(state, frequency_mask)])

    (intact,), (changed,) = example_metrics([metric], batch_list, logits_of)
    harms = harm(metric, intact, changed)
    low, high = bootstrap_means(harms.T, samples=bootstrap)
    shape = (source.num_layers, source.num_heads, max_pairs)

    filled = np.full((3, *shape), np.nan)
    layer, band = np.transpose(bands)
    for array, values in zip(filled, (harms.mean(-1), low, high), strict=True):
        array[layer, :, band] = values.reshape(len(bands), -1)
    drops, low, high = filled
    return BandAblation(drops, low, high, float(intact.mean()), len(intact), metric, off)
