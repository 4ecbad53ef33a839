"""What each band of frequencies of a Hugging Face model's rotations is worth, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from toeplens.encodings import BandControl
from toeplens.ground import InputError, choose
from toeplens.lens.frequency.bands import Off
from toeplens.sources.huggingface.capture.calls import AttentionCall, Place
from toeplens.sources.huggingface.capture.passes import captured
from toeplens.sources.huggingface.effects.anatomy import anatomy_of, observed
from toeplens.sources.huggingface.effects.head_effects import NoPosition, Silenced, intact_loss, place_of
from toeplens.sources.huggingface.effects.outcome import Effect, outcome_of
from toeplens.sources.huggingface.effects.replays import NOTHING, Passes, one_by_one
from toeplens.sources.huggingface.effects.replays import Change as Altered
from toeplens.sources.huggingface.interventions.change import Change, changed_outputs

_HELD = 1 << 27  # numbers of outputs that are held at once


@dataclass(frozen=True)
class BandEffects:
    """What each band does.

    parts        for each call of attention, [B, K, n] float64, as in `HeadEffects`: what it changes that a band is
                 stopped, or silenced, in all heads of the layer
    bands        for each call, the pairs of each band; none where nothing is rotated, or it is not known how
    frequencies  for each call, the rotation's, radians a position
    baseline     [B] the intact loss; None for ``states``
    outcome      ``loss`` or ``states``
    off          what became of a band
    """

    parts: tuple[Float[np.ndarray, "B K _n"], ...]
    bands: tuple[tuple[tuple[int, ...], ...], ...]
    frequencies: tuple[Float[np.ndarray, "_pairs"], ...]
    baseline: Float[np.ndarray, "B"] | None
    outcome: Effect
    off: Off

    @property
    def effects(self) -> tuple[Float[np.ndarray, "B _n"], ...]:
        """What each band changes in each sequence, for each call."""
        return tuple(each.mean(1) for each in self.parts)


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
    """Take each band of frequencies from each layer's rotation, in all its heads, and measure what that changes.

    The pairs of a rotation, in their order, are cut into bands that are alike in number up to one. Passes go on from
    the layer that is changed, and what is measured is the same, as in `head_effects`.

    Arguments
        model, inputs, calls, mask_token, seed  as in `head_effects`
        bands        of a rotation, at most; it has no more than pairs
        off          ``rotation``: the band stands still; ``pair``: its part of every logit is 0
        on_progress  is called with the bands that are done, and all

    Raises `InputError` as `head_effects`, and where no call has a rotation that is known.
    """
    choose("off", off, get_args(Off))
    if bands < 1:
        raise InputError(f"bands: {bands} was given; it must be at least 1.")
    inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    outcome = outcome_of(model, inputs, {side for _, side, *_ in calls}, mask_token, seed)
    places: list[Place] = [(side, kind, layer) for _, side, kind, layer, _ in calls]
    layers = _Layers(model, outcome.inputs, places, bands, off)
    if calls and not any(layers.bands):
        raise NoPosition("effects: bands was given; no head of these layers has a rotation that is known.")
    anatomy = anatomy_of(model)
    with observed(model, anatomy):
        passes = Passes(model, anatomy, outcome)
        addresses = [place_of(model, call, passes.order) for call in calls]
        counts = [len(each) for each in layers.bands]
        effects, _ = one_by_one(
            passes,
            addresses,
            counts,
            [range(count) for count in counts],
            layers.change,
            lambda index, parts: None,
            on_progress or (lambda done, total: None),
        )
    return BandEffects(tuple(effects), layers.bands, layers.frequencies, intact_loss(passes), outcome.effect, off)


@dataclass(eq=False)
class _Layers:
    """The layers' rotations, and what their heads put out without each band: of some layers at a time."""

    model: Any
    inputs: Mapping[str, Any]
    places: Sequence[Place]
    most: int
    off: Off
    bands: tuple[tuple[tuple[int, ...], ...], ...] = ()
    frequencies: tuple[Float[np.ndarray, "_pairs"], ...] = ()
    _sizes: dict[Place, int] = field(default_factory=dict)
    _held: dict[Place, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found: dict[Place, Float[np.ndarray, "_pairs"]] = {}

        def look(call: AttentionCall) -> None:
            self._sizes[call.place] = call.heads.numel()
            if call.rotation is not None and call.unknown is None:
                found[call.place] = call.rotation.frequencies.cpu().numpy()

        captured(self.model, self.inputs, look)
        self.frequencies = tuple(found.get(place, np.empty(0)) for place in self.places)
        self.bands = tuple(
            tuple(tuple(band.tolist()) for band in np.array_split(np.arange(len(each)), min(self.most, len(each))))
            if len(each)
            else ()
            for each in self.frequencies
        )

    def change(self, index: int, chosen: Sequence[int]) -> Altered:
        """A band of a call a copy, or nothing."""
        held = self._outputs(index)

        def altered(outputs: Float[Tensor, "R N H dv"]) -> Float[Tensor, "R N H dv"]:
            copies = outputs.unflatten(0, (len(chosen), -1))
            made = [own if band == NOTHING else held[band].to(own) for own, band in zip(copies, chosen, strict=True)]
            return torch.cat(made)

        return altered

    def _outputs(self, index: int) -> list[Tensor]:
        """Of each band of a call, all heads' outputs without it; with it those of as many later calls as have room."""
        place = self.places[index]
        if place not in self._held:
            self._held.clear()
            room, wanted = _HELD, dict[Place, int]()
            for later, each in enumerate(self.places[index:], index):
                room -= len(self.bands[later]) * self._sizes[each]
                if wanted and room < 0:
                    break
                wanted[each] = later
            captured(self.model, self.inputs, lambda call: self._keep(call, wanted))
        return self._held[place]

    def _keep(self, call: AttentionCall, wanted: Mapping[Place, int]) -> None:
        if call.place in wanted:
            way = "still" if self.off == "rotation" else "silent"
            named = {"layer": call.layer, "kind": call.kind, "side": call.side}
            self._held[call.place] = [
                changed_outputs(call, Change(**named, bands=BandControl(**{way: band}))).to(call.heads.dtype)
                for band in self.bands[wanted[call.place]]
            ]
