"""Interventions on a model's attention as text, with layers, heads and pairs counted from 1; failures of its passes."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from toeplens.encodings import BandControl
from toeplens.encodings.rotary import swapped
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, invalid, shown
from toeplens.ground.machine import out_of_memory
from toeplens.ground.words import listed, spans
from toeplens.sources.huggingface import AttentionCall, Change, captured
from toeplens.sources.huggingface.calls import Place
from toeplens.sources.huggingface.interventions import NotThere, pairs_of
from toeplens.sources.huggingface.load import Loaded
from toeplens.sources.huggingface.model import of_libraries, words

_EXAMPLE = "'layers=3-5 heads=1,4 output=zero' or 'layers=all still=1-8'"
_MOST = 10_000
_BANDS = ("still", "silent", "exchange")
_KEYS = ("layers", "heads", "groups", "kind", "side", *_BANDS, "speed", "bias", "attention", "output", "seed")
_DONE = {*_BANDS, "speed", "bias", "attention", "output"}
_RUNS = 8  # maximum number of exchanged ranges in a text
VERSIONS = {"torch": torch.__version__, "python": platform.python_version()}  # recorded with audits and probes


@dataclass(frozen=True)
class Wish:
    """An intervention on several layers."""

    layers: tuple[int, ...] | None  # from 0; None for all layers
    change: Change  # its ``layer`` is ignored
    exchanged: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # bands of pairs that swap their frequencies in order

    def at(self, layer: int, pairs: int = 0) -> Change:
        """The change of a layer; ``pairs`` is its number of RoPE pairs, only needed for exchanges."""
        change = replace(self.change, layer=layer)
        if change.bands is None or not self.exchanged[0]:
            return change
        return replace(change, bands=replace(change.bands, order=swapped(pairs, *self.exchanged)))


@contextmanager
def _of_change() -> Iterator[None]:
    """Name the change in errors about its settings: ``change: layers must be ...``."""
    try:
        yield
    except InputError as error:
        if error.name == "change":
            raise
        raise InputError(f"change: {error}") from None


def changes_of(loaded: Loaded, changes: Sequence[Wish | Change]) -> list[Change]:
    """The changes of a loaded model; those of a `Wish` are checked in a short forward pass.

    Raises `InputError`, counting from 1, for layers, heads or pairs that do not exist and for a head that is changed
    twice.
    """
    found = [each for each in changes if isinstance(each, Change)]
    wishes = [each for each in changes if isinstance(each, Wish)]
    if not wishes:
        return found
    calls: list[AttentionCall] = []
    tokens = torch.tensor([[*range(1, 9)], [*range(8, 0, -1)]], device=loaded.model.device)
    sides = ("", "decoder_") if loaded.model.config.is_encoder_decoder else ("",)
    try:
        captured(loaded.model, {f"{side}input_ids": tokens for side in sides}, calls.append)
    except Exception as error:  # so few tokens may fail in some models; errors are then reported in the real pass
        if out_of_memory(error) or any(wish.layers is None or wish.exchanged[0] for wish in wishes):
            raise
        return [*found, *(wish.at(layer) for wish in wishes for layer in wish.layers or ())]
    taken: set[tuple[Place, int]] = set()
    with _of_change():
        try:
            return [*found, *(change for wish in wishes for change in _tried(wish, calls, taken))]
        except NotThere as error:
            raise error.for_people() from None


def _tried(wish: Wish, calls: Sequence[AttentionCall], taken: set[tuple[Place, int]]) -> Iterator[Change]:
    """The changes of a wish; checks that layers, heads and pairs exist and that heads are not ``taken``."""
    calls = [call for call in calls if wish.change.of_side(call.kind, call.side)]
    if wish.layers is None and len({call.side for call in calls}) > 1:
        raise InputError("side must be set for a model with an encoder and a decoder.")
    if wish.layers is None and not calls:
        raise wish.change.no_layer(0).for_people("layers")
    for layer in range(len(calls)) if wish.layers is None else wish.layers:
        meant = [call for call in calls if call.layer == layer]
        if not meant:
            raise replace(wish.change, layer=layer).no_layer(len(calls)).for_people("layers")
        pairs = 0
        for call in meant if wish.exchanged[0] else ():
            count = pairs_of(call, "exchange")
            if over := [pair for band in wish.exchanged for pair in band if pair >= count]:
                raise NotThere("exchange", over, count, call.module)
            pairs = min(pairs or count, count)
        change = wish.at(layer, pairs)
        for call in meant:
            heads = {(call.place, head) for head in change.heads_of(call)}
            if call.unknown is None:  # more tokens may reveal it
                change.check(call)
            if taken & heads:
                head = 1 + min(head for _, head in taken & heads)
                raise InputError(f"change must not change head {head} of {call.module} twice.")
            taken |= heads
        yield change


@_of_change()
def read_change(text: str) -> Wish:
    """Parse a change such as ``layers=3-5 heads=1,4 output=zero``. Raises `InputError` for invalid text.

    layers, heads, groups, still and silent are numbers and ranges from 1 (layers may be ``all``); exchange is two of
    them separated by a colon, ``1-4:29-32``; speed is a number, bias ``off``; attention, output, kind, side and seed
    are as in `toeplens.sources.huggingface.Change`.
    """
    given: dict[str, str] = {}
    for word in text.split():
        key, sign, value = word.partition("=")
        if not sign or not value or key not in _KEYS or key in given:
            raise InputError(
                f"change must have settings of the form name=value, each name once, from {', '.join(_KEYS)}, "
                f"as in {_EXAMPLE}, got {shown(word)}."
            )
        given[key] = value
    if "layers" not in given:
        raise invalid("change", f"name layers, as in {_EXAMPLE}", text)
    if not given.keys() & _DONE:
        raise invalid("change", f"have one of {listed(sorted(_DONE))}, as in {_EXAMPLE}", text)
    options: dict[str, Any] = {}
    exchanged: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    for name, value in given.items():
        if name in ("layers", "heads", "groups", "still", "silent"):
            options[name] = None if (name, value) == ("layers", "all") else numbers(name, value)
        elif name == "exchange":
            first, *rest = [numbers(name, part) for part in value.split(":")]
            named = [pair for band in (first, *rest) for pair in band]
            if [len(band) for band in rest] != [len(first)] or len(set(named)) != len(named):
                must = "be two bands with the same number of pairs, all different, such as 1-4:29-32"
                raise invalid(name, must, value)
            exchanged = first, rest[0]
        elif name in ("speed", "seed"):
            try:
                options[name] = float(value) if name == "speed" else int(value)
            except ValueError:
                raise invalid(name, "be a number", value) from None
        elif name == "bias" and value != "off":
            raise invalid(name, "be off", value)
        else:
            options[name] = False if name == "bias" else value
    bands = {name: options.pop(name) for name in ("still", "silent") if name in options}
    if bands or exchanged[0]:
        options["bands"] = BandControl(**bands)
    return Wish(options.pop("layers"), Change(layer=0, **options), exchanged)


def numbers(field: str, text: str) -> tuple[int, ...]:
    """Parse ``1,4,9-12``, counted from 1, to numbers from 0. Raises `InputError` that names the field."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]) < _MOST:
            raise invalid(field, f"be numbers from 1 to {_MOST - 1} and ranges such as 1,4,9-12", text)
        found += range(int(match[1]) - 1, int(match[2] or match[1]))
    return tuple(found)


def told(changes: Sequence[Change]) -> list[str]:
    """The changes as text; changes that only differ in their layer are merged."""
    alike: dict[str, list[int]] = {}
    for change in changes:
        side = f"{change.side} " if change.side else ""
        kind = "" if change.kind == "self" else f"{change.kind} "
        word, chosen = ("head", change.heads) if change.heads is not None else ("group", change.groups)
        which = "" if chosen is None else f", {_counted(word, chosen)}"
        alike.setdefault(f"{side}{kind}layer{{}} {{}}{which}: {_what(change)}", []).append(change.layer + 1)
    return [words.format("s" if len(at) > 1 else "", spans(at)) for words, at in alike.items()]


def _counted(word: str, numbers: Sequence[int]) -> str:
    return f"{word}{'s' if len(numbers) > 1 else ''} {spans(each + 1 for each in numbers)}"


def _what(change: Change) -> str:
    found = []
    if change.bands is not None:
        states = (change.bands.still, "frozen"), (change.bands.silent, "dropped")
        found += [f"{_counted('pair', pairs)} {state}" for pairs, state in states if pairs]
        if change.bands.order is not None:
            found.append(_order(change.bands.order))
    if change.speed != 1:
        found.append("rotation frozen" if change.speed == 0 else f"rotation speed × {change.speed:g}")
    if not change.bias:
        found.append("bias dropped")
    if change.attention is not None:
        found.append(f"only the {change.attention} part of the logits")
    if change.output is not None:
        found.append({"zero": "zero-ablated", "mean": "mean-ablated"}.get(change.output, "resample-ablated"))
    return listed(found)


def _order(order: Sequence[int]) -> str:
    """The pairs that swapped frequencies, or for another permutation the new and old pairs."""
    moved = [(pair, other) for pair, other in enumerate(order) if pair != other]
    mutual = all(order[other] == pair for pair, other in moved)
    runs: list[list[tuple[int, int]]] = []
    for pair, other in moved:
        if runs and runs[-1][-1] == (pair - 1, other - 1):
            runs[-1].append((pair, other))
        elif not mutual or pair < other:
            runs.append([(pair, other)])
    verb, word = ("exchanged", "with") if mutual else ("permuted", "as")
    said = [f"{spans(a + 1 for a, _ in run)} {word} {spans(b + 1 for _, b in run)}" for run in runs]
    rest = [f"… ({len(said)} in all)"] if len(said) > _RUNS else []
    return f"pairs {verb}, {', '.join(said[:_RUNS] + rest) or 'none'}"


@contextmanager
def failures_of(loaded: Loaded, what: str, advice: str) -> Iterator[None]:
    """Report a full memory, with advice, and errors of the model's libraries in one sentence."""
    try:
        yield
    except ToeplensError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise EnvironmentFailure(f"Out of memory on {loaded.model.device}{advice}") from error
        if of_libraries(error):
            raise InputError(f"model: the {what} of {type(loaded.model).__name__} failed: {words(error)}.") from error
        raise
