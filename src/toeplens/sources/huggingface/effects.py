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

from toeplens.encodings import BandControl
from toeplens.ground import InputError, choose, invalid
from toeplens.ground.machine import out_of_memory
from toeplens.lens.frequency import Off
from toeplens.sources.huggingface import replay
from toeplens.sources.huggingface.calls import AttentionCall, Place
from toeplens.sources.huggingface.capture import captured
from toeplens.sources.huggingface.interventions import Change, changed_outputs, without_position
from toeplens.sources.huggingface.outcome import NONE, Effect, Outcome, cross_entropies, in_blocks, pieces, wide
from toeplens.sources.huggingface.replay import Address, Altered, Passes, Replay

_DRAWS = 4  # draws of labels
_SPAN = 8  # neighbouring positions whose products are included
_LOGITS = 1 << 24  # logits in memory at once
_HELD = 1 << 27  # numbers of outputs in memory at once
Method = Literal["exact", "position", "attribution"]
Taken = Literal["exact", "position"]
Silenced = tuple[str, str, str, int, int]  # module, side, kind, layer, heads


class NoGradient(InputError):
    """An attribution was requested where there is no gradient."""


class NoPosition(InputError):
    """Position was to be removed from heads that have none."""


@dataclass(frozen=True)
class _Effects:
    parts: tuple[Float[np.ndarray, "B K _H"], ...]
    baseline: Float[np.ndarray, "B"] | None
    outcome: Effect

    @property
    def effects(self) -> tuple[Float[np.ndarray, "B _H"], ...]:
        """The effect of each head, or band, in each sequence, for each call."""
        return tuple(each.mean(1) for each in self.parts)


@dataclass(frozen=True)
class HeadEffects(_Effects):
    """The effects of the heads.

    parts     for each attention call, [B, K, H] float64: the effect of ablating a head in each sequence, split over K
              blocks of its tokens, whose mean is the effect; K is 1 if there are enough sequences for intervals. For
              ``loss``: its increase, in nats per predicted token. For ``states``: the mean squared distance of the last
              hidden states from the intact ones, relative to their variance over the tokens. Blocks are of predicted
              tokens, for ``attribution`` of the head's own outputs. NaN if undefined, and for heads that were not
              chosen
    baseline  [B] the intact loss; None for ``states``
    outcome   ``loss`` or ``states``
    method    ``exact``, ``position`` or ``attribution``
    replayed  number of calls that were replayed from their layer on; the others took whole passes
    """

    method: Method
    replayed: int


@dataclass(frozen=True)
class BandEffects(_Effects):
    """The effects of freezing or removing frequency bands in all heads of a layer; otherwise as `HeadEffects`.

    bands        for each call, the pairs of each band; none without a known rotation
    frequencies  for each call, those of the rotation, in radians per position
    off          how a band was removed
    """

    bands: tuple[tuple[tuple[int, ...], ...], ...]
    frequencies: tuple[Float[np.ndarray, "_pairs"], ...]
    off: Off


@torch.inference_mode(False)  # tensors made in inference mode have no gradients
def head_effects(
    model: Any,
    inputs: Mapping[str, Any],
    calls: Sequence[Silenced],
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
        on_call      except for ``attribution``, called with the index of each finished call and its `parts`
        on_progress  called with the number of finished heads, and of all heads

    Raises `InputError` for a call that the pass does not have, for an attribution without a loss, for ``position`` if
    no head has any, and for a model whose head or attention is not supported.
    """
    choose("method", method, get_args(Method))
    counts = [heads for *_, heads in calls]
    if method == "attribution":
        found = head_estimates(model, inputs, calls, mask_token=mask_token, seed=seed)
        if on_progress is not None:
            on_progress(sum(counts), sum(counts))
        return found
    outcome = _outcome(model, inputs, calls, mask_token, seed)
    wanted = [range(count) for count in counts] if chosen is None else chosen
    instead: list[Tensor | None] = [None] * len(calls)
    if method == "position":
        instead = _without_position(model, outcome.inputs, calls)
        wanted = [() if put is None else heads for put, heads in zip(instead, wanted, strict=True)]
    with _passes(model, outcome, calls) as (passes, places):

        def change(index: int, heads: Sequence[int]) -> Altered:
            return _replaced(passes.batch, counts[index], heads, instead[index])

        known = replay.intact_from(passes, places)
        effects, replayed = replay.one_by_one(passes, places, counts, wanted, change, on_call, on_progress, known)
    return HeadEffects(tuple(effects), passes.intact_loss, outcome.effect, method, replayed)


@torch.inference_mode(False)
def head_estimates(
    model: Any,
    inputs: Mapping[str, Any],
    calls: Sequence[Silenced],
    *,
    of: Taken = "exact",
    mask_token: int | None = None,
    seed: int = 0,
) -> HeadEffects:
    """Estimates of `head_effects` on a loss for all heads at once, from one forward and a few backward passes.

    They are of first and second order in the change of a head's output, and may be far from its exact effect.

    Arguments
        model, inputs, calls, mask_token  as in `head_effects`
        of    what to estimate: ablating each head, or removing its position (NaN for a head without any)
        seed  seed of the tokens to mask, and of the labels to draw

    Raises `NoGradient` if effects are measured on states, or weights have no gradients, and `InputError` as
    `head_effects` does.
    """
    choose("of", of, get_args(Taken))
    if any(weight.is_inference() for weight in model.parameters()):
        raise NoGradient("method must be exact for weights made in inference mode, got attribution.")
    outcome = _outcome(model, inputs, calls, mask_token, seed)
    if outcome.effect == "states":
        raise NoGradient("method must be exact for last hidden states, got attribution.")
    instead: list[Tensor | None] = [None] * len(calls)
    there = range(len(calls))
    if of == "position":
        instead = _without_position(model, outcome.inputs, calls)
        there = [index for index in there if instead[index] is not None]
    with _passes(model, outcome, calls) as (passes, places):
        effects = [np.full((passes.batch, outcome.blocks, heads), np.nan) for *_, heads in calls]
        probes = {places[i]: _Probe(passes.batch, calls[i][-1], instead[i]) for i in there}
        try:
            made = _attributed(passes, probes, seed) if probes else []
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            what = f"{passes.kind}, whose gradient does not reach all heads"
            raise NoGradient(f"method must be exact for {what}, got attribution.") from error
        for index, each in zip(there, made, strict=True):
            effects[index] = each
    return HeadEffects(tuple(effects), passes.intact_loss, outcome.effect, "attribution", 0)


@torch.inference_mode(False)
def band_effects(
    model: Any,
    inputs: Mapping[str, Any],
    calls: Sequence[Silenced],
    *,
    bands: int = 8,
    off: Off = "rotation",
    mask_token: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> BandEffects:
    """Remove each band of frequencies from each layer's rotation, in all its heads, and measure the effect.

    The pairs of a rotation are cut, in order, into bands of equal size (up to one pair). As in `head_effects`, passes
    continue from the changed layer, and the outcome is the same.

    Arguments
        model, inputs, calls, mask_token, seed  as in `head_effects`
        bands        maximum number of bands of a rotation; never more than its pairs
        off          ``rotation``: the band is frozen; ``pair``: its part of every logit is set to 0
        on_progress  called with the number of finished bands, and of all bands

    Raises `InputError` as `head_effects` does, and if no call has a known rotation.
    """
    choose("off", off, get_args(Off))
    if bands < 1:
        raise invalid("bands", "be at least 1", bands)
    outcome = _outcome(model, inputs, calls, mask_token, seed)
    layers = _Layers(model, outcome.inputs, [call[1:4] for call in calls], bands, off)
    if calls and not any(layers.bands):
        raise NoPosition("effects: 'bands' needs a known rotation, but no head of these layers has one.")
    counts = [len(each) for each in layers.bands]
    with _passes(model, outcome, calls) as (passes, places):
        every = [range(count) for count in counts]
        effects, _ = replay.one_by_one(passes, places, counts, every, layers.change, on_progress=on_progress)
    return BandEffects(tuple(effects), passes.intact_loss, outcome.effect, layers.bands, layers.frequencies, off)


def _outcome(
    model: Any, inputs: Mapping[str, Any], calls: Sequence[Silenced], mask_token: int | None, seed: int
) -> Outcome:
    """The measured outcome, with inputs copied out of inference mode, so that they allow gradients."""
    inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return Outcome.of(model, inputs, {side for _, side, *_ in calls}, mask_token, seed)


@contextmanager
def _passes(model: Any, outcome: Outcome, calls: Sequence[Silenced]) -> Iterator[tuple[Passes, list[Address]]]:
    anatomy = replay.anatomy_of(model)
    with replay.observed(model, anatomy):
        passes = Passes(model, anatomy, outcome)
        yield passes, [place_of(model, call, passes.order) for call in calls]


def place_of(model: nn.Module, call: Silenced, order: Sequence[Address]) -> Address:
    """The address of a call in the pass; for a module that is called repeatedly, by its layer."""
    name, _, _, layer, _ = call
    module = dict(model.named_modules(remove_duplicate=False)).get(name.split(" (")[0])
    own = [each for each in order if each.module is module]
    if len(own) > 1:
        alike = [each for each in order if type(each.module) is type(module)]
        own = [each for each in alike[layer : layer + 1] if each.module is module]
    if not own:
        raise InputError(f"calls: {name} of layer {layer} is not called in the forward pass.")
    return own[0]


def _without_position(model: Any, inputs: Mapping[str, Any], calls: Sequence[Silenced]) -> list[Tensor | None]:
    places = [call[1:4] for call in calls]
    found = without_position(model, inputs, places)
    if calls and not found:
        raise NoPosition("effects: 'position' needs a rotation or a bias, but no head of these layers has one.")
    return [found.get(place) for place in places]


def _replaced(batch: int, count: int, heads: Sequence[int], put: Tensor | None) -> Altered:
    chosen = (torch.tensor(heads).unsqueeze(-1) == torch.arange(count)).repeat_interleave(batch, 0)

    def replaced(outputs: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
        replay.fits(outputs, *chosen.shape)
        other = outputs.new_zeros(()) if put is None else put.to(outputs).repeat(len(heads), 1, 1, 1)
        return torch.where(chosen.to(outputs.device)[:, None, :, None], other, outputs)

    return replaced


@dataclass(eq=False)
class _Probe:
    """Adds to each head's output, at each position, a zero variable times the difference from its replacement."""

    rows: int
    heads: int
    instead: Tensor | None
    at: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, heads: Float[Tensor, "B N H dv"]) -> Float[Tensor, "B N H dv"]:
        replay.fits(heads, self.rows, self.heads)
        self.at = torch.zeros(heads.shape[:3], dtype=wide(heads).dtype, device=heads.device, requires_grad=True)
        by = -heads if self.instead is None else self.instead.to(heads) - heads
        return (heads + self.at.unsqueeze(-1) * by).to(heads.dtype)


def _attributed(passes: Passes, probes: Mapping[Address, _Probe], seed: int) -> list[Float[np.ndarray, "B K _H"]]:
    """Estimated effects of each probed call's heads in each sequence, in nats per predicted token; NaN without a label.

    Let a_i = d_i . dl/dz_i at position i, with l the loss of a sequence of n labels, and b_i the same for n l with
    drawn labels. The estimate is sum_i a_i + mean over draws of sum over spans (sum_i b_i)^2 / 2n. The sum over
    positions is split over blocks of the head's own positions (the mean of these parts is the sum).
    """
    labels = passes.outcome.labels
    assert labels is not None
    with torch.enable_grad(), _without_gradients(passes.model):
        run = passes.run(changes=probes)
        labels = labels.to(run.states.device)
        predicted = (labels != NONE).sum(1)
        each, ends = 1 / predicted.clamp_min(1).view(-1, 1, 1), [probe.at for probe in probes.values()]
        total = [torch.zeros_like(end, dtype=torch.float64) for end in ends]
        random = torch.Generator().manual_seed(seed)
        # the gradient of the summed losses of all labels at the last hidden states, for the true and for drawn labels
        gradients = [torch.zeros_like(run.states) for _ in range(1 + _DRAWS)]
        for some in pieces(labels, passes.vocabulary, _LOGITS):
            states, own = run.states.detach()[:, some], labels[:, some]
            shares, slopes = _by_gradient(run, states) if passes.readout is None else passes.readout.slopes(states)
            for gradient, drawn in zip(gradients, [own, *_drawn(shares, own, random)], strict=True):
                gradient[:, some] = slopes(drawn).to(gradient)
        for number, upstream in enumerate(gradients):
            slopes = torch.autograd.grad(run.states, ends, upstream, retain_graph=True)
            for place, slope in enumerate(x.double() for x in slopes):
                if number:  # of drawn labels: products with the sums over spans
                    count = slope.shape[1]
                    sums = F.pad(slope, (0, 0, 0, -count % _SPAN)).unflatten(1, (-1, _SPAN)).sum(2)
                    slope = slope * sums.repeat_interleave(_SPAN, 1)[:, :count]
                total[place] += slope * each.to(slope.device) / (2 * _DRAWS if number else 1)
    known, blocks = (predicted > 0).view(-1, 1, 1), passes.outcome.blocks
    split = [torch.stack([in_blocks(x.to(known.device), blocks) for x in found.unbind(2)], 2) for found in total]
    return [torch.where(known, each, torch.nan).cpu().numpy() for each in split]


def _by_gradient(
    run: Replay, states: Float[Tensor, "B n d"]
) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
    """`Readout.slopes` for any head."""
    states = states.requires_grad_()
    logits = run.logits(states)

    def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
        return torch.autograd.grad(cross_entropies(logits, labels).sum(), states, retain_graph=True)[0]

    return wide(logits.detach()).softmax(-1), slopes


def _drawn(
    shares: Float[Tensor, "B n V"], labels: Int[Tensor, "B n"], random: torch.Generator
) -> Iterator[Int[Tensor, "B n"]]:
    """Labels drawn from the model's predictions, where there are labels."""
    reached = shares.cumsum(-1)
    at = torch.rand((*labels.shape, _DRAWS), generator=random, dtype=torch.float32).to(reached) * reached[..., -1:]
    found = torch.searchsorted(reached, at, right=True).clamp_max(shares.shape[-1] - 1)
    for each in found.to(labels.device).unbind(-1):
        yield torch.where(labels == NONE, NONE, each)


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    learnt = [weight.requires_grad_(False) for weight in model.parameters() if weight.requires_grad]
    try:
        yield
    finally:
        for weight in learnt:
            weight.requires_grad_(True)


class _Layers:
    """The layers' rotations, and their head outputs without each band, for some layers at a time."""

    def __init__(self, model: Any, inputs: Mapping[str, Any], places: Sequence[Place], most: int, off: Off) -> None:
        self.model, self.inputs, self.places, self.off = model, inputs, places, off
        self._sizes: dict[Place, int] = {}
        self._held: dict[Place, list[Tensor]] = {}
        found: dict[Place, Float[np.ndarray, "_pairs"]] = {}

        def look(call: AttentionCall) -> None:
            self._sizes[call.place] = call.heads.numel()
            if call.rotation is not None and call.unknown is None:
                found[call.place] = call.rotation.frequencies.cpu().numpy()

        captured(model, inputs, look)
        self.frequencies = tuple(found.get(place, np.empty(0)) for place in places)
        cuts = [np.array_split(np.arange(len(each)), max(1, min(most, len(each)))) for each in self.frequencies]
        self.bands = tuple(tuple(tuple(band.tolist()) for band in cut if len(band)) for cut in cuts)

    def change(self, index: int, chosen: Sequence[int]) -> Altered:
        """Remove one band of a call per copy, or none."""
        held = self._outputs(index)

        def altered(outputs: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
            copies = zip(outputs.unflatten(0, (len(chosen), -1)), chosen, strict=True)
            return torch.cat([own if band == replay.NOTHING else held[band].to(own) for own, band in copies])

        return altered

    def _outputs(self, index: int) -> list[Tensor]:
        """All heads' outputs without each band of a call; computed together with as many later calls as fit."""
        place = self.places[index]
        if place not in self._held:
            self._held.clear()
            room, wanted = _HELD, dict[Place, int]()
            for later, each in enumerate(self.places[index:], index):
                room -= len(self.bands[later]) * self._sizes[each]
                if wanted and room < 0:
                    break
                wanted[each] = later
            way = "still" if self.off == "rotation" else "silent"

            def keep(call: AttentionCall) -> None:
                for band in self.bands[wanted[call.place]] if call.place in wanted else ():
                    change = Change(layer=call.layer, kind=call.kind, side=call.side, bands=BandControl(**{way: band}))
                    self._held.setdefault(call.place, []).append(changed_outputs(call, change).to(call.heads.dtype))

            captured(self.model, self.inputs, keep)
        return self._held[place]
