"""Ablation effects of each attention head of a Hugging Face model, or of its position, on the loss or last states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.backends.hf import effect_metric, replay
from toeplens.backends.hf.calls import AttentionCall, CallKey
from toeplens.backends.hf.capture import capture_attention
from toeplens.backends.hf.effect_metric import NO_LABEL, EffectMetric, MetricName, cross_entropies, in_blocks, upcast
from toeplens.backends.hf.interventions import Change, changed_outputs, outputs_without_position
from toeplens.backends.hf.offload import reread_for_gradients
from toeplens.backends.hf.replay import CallAddress, HeadChange, Replay, ReplayedPasses
from toeplens.encodings import FrequencyMask
from toeplens.lens.frequency import BandRemoval
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.machine import is_out_of_memory

_DRAWS = 4  # draws of labels
_SPAN = 8  # neighbouring positions whose products are included
_LOGITS = 1 << 24  # logits in memory at once
_MAX_NUMBERS = 1 << 27  # numbers of outputs in memory at once
Method = Literal["exact", "position", "attribution"]
EstimateTarget = Literal["exact", "position"]
TargetCall = tuple[str, str, str, int, int]  # module, side, kind, layer, heads


class NoGradient(InputError):
    """An attribution was requested where there is no gradient."""


class NoPosition(InputError):
    """Position was to be removed from heads that have none."""


@dataclass(frozen=True)
class _EffectsBase:
    block_effects: tuple[Float[np.ndarray, "B K _H"], ...]
    baseline: Float[np.ndarray, "B"] | None
    metric: MetricName

    @property
    def effects(self) -> tuple[Float[np.ndarray, "B _H"], ...]:
        """The effect of each head, or band, in each sequence, for each call."""
        return tuple(blocks.mean(1) for blocks in self.block_effects)


@dataclass(frozen=True)
class HeadEffects(_EffectsBase):
    """The effects of the heads.

    block_effects  for each attention call, [B, K, H] float64: the effect of ablating a head in each sequence, split
                   over K blocks of its tokens, whose mean is the effect; K is 1 if there are enough sequences for
                   intervals. For ``loss``: its increase, in nats per predicted token. For ``states``: the mean squared
                   distance of the last hidden states from the intact ones, relative to their variance over the tokens.
                   Blocks are of predicted tokens, for ``attribution`` of the head's own outputs. NaN if undefined, and
                   for heads that were not chosen
    baseline       [B] the intact loss; None for ``states``
    metric         ``loss`` or ``states``
    method         ``exact``, ``position`` or ``attribution``
    replayed       number of calls that were replayed from their layer on; the others took whole passes
    """

    method: Method
    replayed: int


@dataclass(frozen=True)
class BandEffects(_EffectsBase):
    """The effects of freezing or removing frequency bands in all heads of a layer; otherwise as `HeadEffects`.

    bands        for each call, the pairs of each band; none without a known rotation
    frequencies  for each call, those of the rotation, in radians per position
    off          how a band was removed
    """

    bands: tuple[tuple[tuple[int, ...], ...], ...]
    frequencies: tuple[Float[np.ndarray, "_pairs"], ...]
    off: BandRemoval


@torch.inference_mode(False)  # tensors made in inference mode have no gradients
def head_effects(
    model: Any,
    inputs: Mapping[str, Any],
    calls: Sequence[TargetCall],
    *,
    method: Method = "exact",
    mask_token: int | None = None,
    seed: int = 0,
    chosen: Sequence[Sequence[int]] | None = None,
    on_call: Callable[[int, Float[np.ndarray, "B K _H"]], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> HeadEffects:
    """Ablate each head of a transformers model separately: its output, before the projection, is 0 at every position.

    With ``position``, only its position is removed: its output is computed with frozen rotation and without its bias.

    The effect is measured on the mean cross-entropy: of the next token for a causal language model, of the decoder's
    next token for an encoder-decoder with such a head, and of 15 % of the tokens, which are masked, for a masked
    language model with a given mask token. For all other models, the effect is measured on the last hidden states.
    Padding is ignored.

    The layers before a head's layer run once, and several heads share a pass if sequences are short. Passes without
    ablation, for long sequences of their first tokens, test whether that gives the intact states; if not (layers that
    share keys, or pass on more than one output), whole passes are run. The model is restored afterwards.

    Arguments
        model        a `transformers.PreTrainedModel`
        inputs       arguments of its ``forward`` by name; with ``decoder_input_ids`` for an encoder-decoder
        calls        the attention to ablate: module (optionally followed by its class), side, kind, layer and number of
                     heads, as in `AttentionCall`
        method       ``exact``: ablate each head; ``position``: remove position from each (NaN for a head without
                     rotation or bias); ``attribution``: estimate the ablation of all heads (`head_estimates`)
        mask_token   index of the mask token
        seed         seed of the tokens to mask, and of the labels drawn for an estimate
        chosen       for each call the heads to change (default: all). Does not reduce the work of ``attribution``
        on_call      except for ``attribution``, called with the index of each finished call and its ``block_effects``
        on_progress  called with the number of finished heads, and of all heads

    Raises `InputError` for a call that the pass does not have, for an attribution without a loss, for ``position`` if
    no head has any, and for a model whose head or attention is not supported.
    """
    choose("method", method, get_args(Method))
    counts = [heads for *_, heads in calls]
    if method == "attribution":
        estimates = head_estimates(model, inputs, calls, mask_token=mask_token, seed=seed)
        if on_progress is not None:
            on_progress(sum(counts), sum(counts))
        return estimates
    metric = _build_metric(model, inputs, calls, mask_token, seed)
    heads = [range(count) for count in counts] if chosen is None else chosen
    replacements: list[Tensor | None] = [None] * len(calls)
    if method == "position":
        replacements = _outputs_without_position(model, metric.inputs, calls)
        heads = [() if x is None else indices for x, indices in zip(replacements, heads, strict=True)]
    with _open_passes(model, metric, calls) as (passes, addresses):

        def change(index: int, chosen: Sequence[int]) -> HeadChange:
            return _head_replacement(passes.batch, counts[index], chosen, replacements[index])

        calls_ok = replay.verified_calls(passes, addresses)
        arguments = passes, addresses, counts, heads, change, on_call, on_progress, calls_ok
        effects, replayed = replay.measure_effects(*arguments)
    return HeadEffects(tuple(effects), passes.intact_loss, metric.name, method, replayed)


@torch.inference_mode(False)
def head_estimates(
    model: Any,
    inputs: Mapping[str, Any],
    calls: Sequence[TargetCall],
    *,
    target: EstimateTarget = "exact",
    mask_token: int | None = None,
    seed: int = 0,
) -> HeadEffects:
    """Estimates of `head_effects` on a loss for all heads at once, from one forward and a few backward passes.

    They are of first and second order in the change of a head's output, and may be far from its exact effect.

    Arguments
        model, inputs, calls, mask_token  as in `head_effects`
        target  what to estimate: ablating each head, or removing its position (NaN for a head without any)
        seed    seed of the tokens to mask, and of the labels to draw

    Raises `NoGradient` if effects are measured on states, or weights have no gradients, and `InputError` as
    `head_effects` does.
    """
    choose("target", target, get_args(EstimateTarget))
    if any(weight.is_inference() for weight in model.parameters()):
        raise NoGradient("method must be exact for weights made in inference mode, got attribution.")
    metric = _build_metric(model, inputs, calls, mask_token, seed)
    if metric.name == "states":
        raise NoGradient("method must be exact for last hidden states, got attribution.")
    replacements: list[Tensor | None] = [None] * len(calls)
    indices = range(len(calls))
    if target == "position":
        replacements = _outputs_without_position(model, metric.inputs, calls)
        indices = [index for index in indices if replacements[index] is not None]
    with _open_passes(model, metric, calls) as (passes, addresses):
        effects = [np.full((passes.batch, metric.blocks, heads), np.nan) for *_, heads in calls]
        probes = {addresses[i]: _GradientProbe(passes.batch, calls[i][-1], replacements[i]) for i in indices}
        try:
            estimates = _estimate_effects(passes, probes, seed) if probes else []
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            model_class = f"{passes.class_name}, whose gradient does not reach all heads"
            raise NoGradient(f"method must be exact for {model_class}, got attribution.") from error
        for index, estimate in zip(indices, estimates, strict=True):
            effects[index] = estimate
    return HeadEffects(tuple(effects), passes.intact_loss, metric.name, "attribution", 0)


@torch.inference_mode(False)
def band_effects(
    model: Any,
    inputs: Mapping[str, Any],
    calls: Sequence[TargetCall],
    *,
    bands: int = 8,
    off: BandRemoval = "rotation",
    mask_token: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> BandEffects:
    """Remove each band of frequencies from each layer's rotation, in all its heads, and measure the effect.

    The pairs of a rotation are cut, in order, into bands of equal size (up to one pair). As in `head_effects`, passes
    continue from the changed layer, and the metric is the same.

    Arguments
        model, inputs, calls, mask_token, seed  as in `head_effects`
        bands        maximum number of bands of a rotation; never more than its pairs
        off          ``rotation``: the band is frozen; ``pair``: its part of every logit is set to 0
        on_progress  called with the number of finished bands, and of all bands

    Raises `InputError` as `head_effects` does, and if no call has a known rotation.
    """
    choose("off", off, get_args(BandRemoval))
    if bands < 1:
        raise invalid("bands", "be at least 1", bands)
    metric = _build_metric(model, inputs, calls, mask_token, seed)
    layers = _BandOutputs(model, metric.inputs, [call[1:4] for call in calls], bands, off)
    if calls and not any(layers.bands):
        raise NoPosition("effects: 'bands' needs a known rotation, but no head of these layers has one.")
    counts = [len(call_bands) for call_bands in layers.bands]
    with _open_passes(model, metric, calls) as (passes, addresses):
        chosen = [range(count) for count in counts]
        effects, _ = replay.measure_effects(passes, addresses, counts, chosen, layers.change, on_progress=on_progress)
    return BandEffects(tuple(effects), passes.intact_loss, metric.name, layers.bands, layers.frequencies, off)


def _build_metric(
    model: Any, inputs: Mapping[str, Any], calls: Sequence[TargetCall], mask_token: int | None, seed: int
) -> EffectMetric:
    """What effects are measured on, with inputs copied out of inference mode, so that they allow gradients."""
    inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return EffectMetric.of(model, inputs, {side for _, side, *_ in calls}, mask_token, seed)


@contextmanager
def _open_passes(
    model: Any, metric: EffectMetric, calls: Sequence[TargetCall]
) -> Iterator[tuple[ReplayedPasses, list[CallAddress]]]:
    layout = replay.layout_of(model)
    with replay.observe_passes(model, layout):
        passes = ReplayedPasses(model, layout, metric)
        yield passes, [address_of(model, call, passes.addresses) for call in calls]


def address_of(model: nn.Module, call: TargetCall, order: Sequence[CallAddress]) -> CallAddress:
    """The address of a call in the pass; for a module that is called repeatedly, by its layer."""
    name, _, _, layer, _ = call
    module = dict(model.named_modules(remove_duplicate=False)).get(name.split(" (")[0])
    matches = [address for address in order if address.module is module]
    if len(matches) > 1:
        same_class = [address for address in order if type(address.module) is type(module)]
        matches = [address for address in same_class[layer : layer + 1] if address.module is module]
    if not matches:
        raise InputError(f"calls: {name} of layer {layer} is not called in the forward pass.")
    return matches[0]


def _outputs_without_position(model: Any, inputs: dict[str, Any], calls: Sequence[TargetCall]) -> list[Tensor | None]:
    keys = [call[1:4] for call in calls]
    outputs = outputs_without_position(model, inputs, keys)
    if calls and not outputs:
        raise NoPosition("effects: 'position' needs a rotation or a bias, but no head of these layers has one.")
    return [outputs.get(key) for key in keys]


def _head_replacement(batch: int, count: int, heads: Sequence[int], replacement: Tensor | None) -> HeadChange:
    chosen = (torch.tensor(heads).unsqueeze(-1) == torch.arange(count)).repeat_interleave(batch, 0)

    def replace_heads(outputs: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
        replay.check_shape(outputs, *chosen.shape)
        other = outputs.new_zeros(()) if replacement is None else replacement.to(outputs).repeat(len(heads), 1, 1, 1)
        return torch.where(chosen.to(outputs.device)[:, None, :, None], other, outputs)

    return replace_heads


@dataclass(eq=False)
class _GradientProbe:
    """Adds to each head's output, at each position, a zero variable times the difference from its replacement."""

    rows: int
    heads: int
    replacement: Tensor | None
    variable: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, heads: Float[Tensor, "B N H dv"]) -> Float[Tensor, "B N H dv"]:
        replay.check_shape(heads, self.rows, self.heads)
        self.variable = torch.zeros(heads.shape[:3], dtype=upcast(heads).dtype, device=heads.device, requires_grad=True)
        difference = -heads if self.replacement is None else self.replacement.to(heads) - heads
        return (heads + self.variable.unsqueeze(-1) * difference).to(heads.dtype)


def _estimate_effects(
    passes: ReplayedPasses, probes: Mapping[CallAddress, _GradientProbe], seed: int
) -> list[Float[np.ndarray, "B K _H"]]:
    """Estimated effects of each probed call's heads in each sequence, in nats per predicted token; NaN without a label.

    Let a_i = d_i . dl/dz_i at position i, with l the loss of a sequence of n labels, and b_i the same for n l with
    drawn labels. The estimate is sum_i a_i + mean over draws of sum over spans (sum_i b_i)^2 / 2n. The sum over
    positions is split over blocks of the head's own positions (the mean of these parts is the sum).
    """
    labels = passes.metric.labels
    assert labels is not None
    with torch.enable_grad(), _gradients_disabled(passes.model), reread_for_gradients(passes.model):
        run = passes.run(changes=probes)
        labels = labels.to(run.states.device)
        predicted = (labels != NO_LABEL).sum(1)
        each, variables = 1 / predicted.clamp_min(1).view(-1, 1, 1), [probe.variable for probe in probes.values()]
        total = [torch.zeros_like(variable, dtype=torch.float64) for variable in variables]
        random = torch.Generator().manual_seed(seed)
        # the gradient of the summed losses of all labels at the last hidden states, for the true and for drawn labels
        gradients = [torch.zeros_like(run.states) for _ in range(1 + _DRAWS)]
        for positions in effect_metric.label_chunks(labels, passes.vocabulary, _LOGITS):
            states, own_labels = run.states.detach()[:, positions], labels[:, positions]
            readout = passes.readout
            shares, slopes = _slopes_by_gradient(run, states) if readout is None else readout.slopes(states)
            for gradient, drawn in zip(gradients, [own_labels, *_draw_labels(shares, own_labels, random)], strict=True):
                gradient[:, positions] = slopes(drawn).to(gradient)
        for number, upstream in enumerate(gradients):
            slopes = torch.autograd.grad(run.states, variables, upstream, retain_graph=True)
            for index, slope in enumerate(x.double() for x in slopes):
                if number:  # of drawn labels: products with the sums over spans
                    count = slope.shape[1]
                    sums = F.pad(slope, (0, 0, 0, -count % _SPAN)).unflatten(1, (-1, _SPAN)).sum(2)
                    slope = slope * sums.repeat_interleave(_SPAN, 1)[:, :count]
                total[index] += slope * each.to(slope.device) / (2 * _DRAWS if number else 1)
    known, blocks = (predicted > 0).view(-1, 1, 1), passes.metric.blocks
    split = [torch.stack([in_blocks(x.to(known.device), blocks) for x in effects.unbind(2)], 2) for effects in total]
    return [torch.where(known, each, torch.nan).cpu().numpy() for each in split]


def _slopes_by_gradient(
    run: Replay, states: Float[Tensor, "B n d"]
) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
    """`Readout.slopes` for any head."""
    states = states.requires_grad_()
    logits = run.logits(states)

    def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
        return torch.autograd.grad(cross_entropies(logits, labels).sum(), states, retain_graph=True)[0]

    return upcast(logits.detach()).softmax(-1), slopes


def _draw_labels(
    shares: Float[Tensor, "B n V"], labels: Int[Tensor, "B n"], random: torch.Generator
) -> Iterator[Int[Tensor, "B n"]]:
    """Labels drawn from the model's predictions, where there are labels."""
    cumulative = shares.cumsum(-1)
    uniform = torch.rand((*labels.shape, _DRAWS), generator=random, dtype=torch.float32).to(cumulative)
    draws = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True).clamp_max(shares.shape[-1] - 1)
    for draw in draws.to(labels.device).unbind(-1):
        yield torch.where(labels == NO_LABEL, NO_LABEL, draw)


@contextmanager
def _gradients_disabled(model: nn.Module) -> Iterator[None]:
    trainable = [weight.requires_grad_(False) for weight in model.parameters() if weight.requires_grad]
    try:
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)


class _BandOutputs:
    """The layers' rotations, and their head outputs without each band, for some layers at a time."""

    def __init__(
        self, model: Any, inputs: Mapping[str, Any], keys: Sequence[CallKey], most: int, off: BandRemoval
    ) -> None:
        self.model, self.inputs, self.keys, self.off = model, inputs, keys, off
        self._sizes: dict[CallKey, int] = {}
        self._cached: dict[CallKey, list[Tensor]] = {}
        frequencies: dict[CallKey, Float[np.ndarray, "_pairs"]] = {}

        def record(call: AttentionCall) -> None:
            self._sizes[call.key] = call.heads.numel()
            if call.rotation is not None and call.unknown is None:
                frequencies[call.key] = call.rotation.frequencies.cpu().numpy()

        capture_attention(model, inputs, record)
        self.frequencies = tuple(frequencies.get(key, np.empty(0)) for key in keys)
        cuts = [np.array_split(np.arange(len(pairs)), max(1, min(most, len(pairs)))) for pairs in self.frequencies]
        self.bands = tuple(tuple(tuple(band.tolist()) for band in cut if len(band)) for cut in cuts)

    def change(self, index: int, chosen: Sequence[int]) -> HeadChange:
        """Remove one band of a call per copy, or none."""
        without_band = self._outputs(index)

        def replace_copies(outputs: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
            copies = zip(outputs.unflatten(0, (len(chosen), -1)), chosen, strict=True)
            return torch.cat([x if band == replay.UNCHANGED else without_band[band].to(x) for x, band in copies])

        return replace_copies

    def _outputs(self, index: int) -> list[Tensor]:
        """All heads' outputs without each band of a call; computed together with as many later calls as fit."""
        key = self.keys[index]
        if key not in self._cached:
            self._cached.clear()
            budget, indices = _MAX_NUMBERS, dict[CallKey, int]()
            for later, other_key in enumerate(self.keys[index:], index):
                budget -= len(self.bands[later]) * self._sizes[other_key]
                if indices and budget < 0:
                    break
                indices[other_key] = later
            removal = "freeze" if self.off == "rotation" else "drop"

            def collect(call: AttentionCall) -> None:
                for band in self.bands[indices[call.key]] if call.key in indices else ():
                    mask = FrequencyMask(**{removal: band})
                    change = Change(layer=call.layer, kind=call.kind, side=call.side, bands=mask)
                    self._cached.setdefault(call.key, []).append(changed_outputs(call, change).to(call.heads.dtype))

            capture_attention(self.model, self.inputs, collect)
        return self._cached[key]
