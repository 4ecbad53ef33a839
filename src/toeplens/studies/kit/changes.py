"""Changes of a model's attention as people write and read them: layers, heads and pairs counted from 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from toeplens.encodings import BandControl
from toeplens.ground import InputError
from toeplens.ground.words import listed, spans
from toeplens.sources.huggingface import Change, captured
from toeplens.sources.huggingface.capture.calls import Kind, Side
from toeplens.sources.huggingface.loading import Loaded

_EXAMPLE = "'layers=3-5 heads=1,4 output=zero' or 'layers=all still=1-8'"
_MOST = 10_000
_KEYS = ("layers", "heads", "groups", "kind", "side", "still", "silent", "speed", "bias", "attention", "output", "seed")


@dataclass(frozen=True)
class Wish:
    """A change of several layers.

    layers  from 0; None for all that the model has
    change  what is done to each of them; its own layer says nothing
    """

    layers: tuple[int, ...] | None
    change: Change

    def of(self, count: int) -> list[Change]:
        """The changes of a model with so many layers."""
        return [replace(self.change, layer=layer) for layer in (range(count) if self.layers is None else self.layers)]


def changes_of(loaded: Loaded, wishes: Sequence[Wish]) -> list[Change]:
    """The changes of a model that is loaded. Its layers are counted in a short pass where some are of all of them."""
    places: list[tuple[Kind, Side]] = []
    if any(wish.layers is None for wish in wishes):
        tokens = torch.arange(1, 9, device=loaded.model.device).unsqueeze(0)
        inputs = {"input_ids": tokens}
        if loaded.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens
        captured(loaded.model, inputs, lambda call: places.append((call.kind, call.side)))
    found = []
    for wish in wishes:
        kind, side = wish.change.kind, wish.change.side
        if wish.layers is None and side is None and len({of for what, of in places if what == kind}) > 1:
            raise InputError("side: it was not given; this model has an encoder and a decoder.")
        found += wish.of(sum(what == kind and side in (None, of) for what, of in places))
    return found


def read_change(text: str) -> Wish:
    """What ``layers=3-5 heads=1,4 output=zero`` says. Raises `InputError` for what cannot be read.

    layers, heads, groups, still and silent are numbers and ranges from 1 (layers may be ``all``); speed is a number,
    bias ``off``; attention, output, kind, side and seed are as in `toeplens.sources.huggingface.Change`.
    """
    given: dict[str, str] = {}
    for word in text.split():
        key, sign, value = word.partition("=")
        if not sign or not value or key not in _KEYS or key in given:
            raise InputError(
                f"change: {word!r} in {text!r} is no setting; allowed are {', '.join(_KEYS)}, each once, as in "
                f"{_EXAMPLE}."
            )
        given[key] = value
    if "layers" not in given:
        raise InputError(f"change: {text!r} names no layers; a change is written as {_EXAMPLE}.")
    layers = None if given["layers"] == "all" else numbers("layers", given["layers"])
    bands = {name: numbers(name, given[name]) for name in ("still", "silent") if name in given}
    options: dict[str, Any] = {name: numbers(name, given[name]) for name in ("heads", "groups") if name in given}
    options |= {name: given[name] for name in ("attention", "output", "kind", "side") if name in given}
    if bands:
        options["bands"] = BandControl(**bands)
    if "bias" in given:
        if given["bias"] != "off":
            raise InputError(f"bias: {given['bias']!r} was given; only off is a change.")
        options["bias"] = False
    for name, make in (("speed", float), ("seed", int)):
        if name in given:
            try:
                options[name] = make(given[name])
            except ValueError:
                raise InputError(f"{name}: {given[name]!r} was given; it must be a number.") from None
    return Wish(layers, Change(layer=0, **options))


def numbers(field: str, text: str) -> tuple[int, ...]:
    """``1,4,9-12``, counted from 1, as numbers from 0. Raises `InputError` that names the field."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]) < _MOST:
            raise InputError(
                f"{field}: {text!r} was given; it must be numbers from 1 to {_MOST - 1} and ranges such as 1,4,9-12."
            )
        found += range(int(match[1]) - 1, int(match[2] or match[1]))
    return tuple(found)


def told(changes: Sequence[Change]) -> list[str]:
    """The changes in words, those that are alike but for their layer together."""
    alike: dict[str, list[int]] = {}
    for change in changes:
        side = f"{change.side} " if change.side else ""
        kind = "" if change.kind == "self" else f"{change.kind} "
        alike.setdefault(f"{side}{kind}layer{{}} {{}}{_which(change)}: {_what(change)}", []).append(change.layer + 1)
    return [words.format("s" if len(at) > 1 else "", spans(at)) for words, at in alike.items()]


def _which(change: Change) -> str:
    for word, chosen in (("head", change.heads), ("group", change.groups)):
        if chosen is not None:
            return f", {word}{'s' if len(chosen) > 1 else ''} {spans(each + 1 for each in chosen)}"
    return ""


def _what(change: Change) -> str:
    found = []
    if change.bands is not None:
        for pairs, verbs, state in (
            (change.bands.still, ("stands", "stand"), "still"),
            (change.bands.silent, ("is", "are"), "silent"),
        ):
            if pairs:
                several = len(pairs) > 1
                which = f"pair{'s' if several else ''} {spans(pair + 1 for pair in pairs)}"
                found.append(f"{which} {verbs[several]} {state}")
        if change.bands.order is not None:
            found.append("frequencies exchanged")
    if change.speed != 1:
        found.append("the rotation stopped" if change.speed == 0 else f"turned {change.speed:g} times as fast")
    if not change.bias:
        found.append("without bias")
    if change.attention is not None:
        found.append(f"the {change.attention} part of the logits alone")
    if change.output is not None:
        found.append({"zero": "silenced", "mean": "its mean put out"}.get(change.output, "another sequence’s output"))
    return listed(found)
