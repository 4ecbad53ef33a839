"""Interventions on a model's attention as text, with layers, heads and pairs counted from 1; failures of its passes."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from toeplens.backends.hf import AttentionCall, Change, capture_attention
from toeplens.backends.hf.calls import CallKey
from toeplens.backends.hf.interventions import InvalidTarget, pairs_of
from toeplens.backends.hf.load import LoadedModel
from toeplens.backends.hf.model import library_errors
from toeplens.encodings import FrequencyMask
from toeplens.encodings.rotary import swap_bands
from toeplens.utils import EnvironmentFailure, InputError, ToeplensError, invalid, repr_of
from toeplens.utils.formatting import format_ranges, join_list
from toeplens.utils.machine import is_out_of_memory
from toeplens.utils.renamed import CHANGE_KEYS

_EXAMPLE = "'layers=3-5 heads=1,4 output=zero' or 'layers=all freeze=1-8'"
_MAX_NUMBER = 10_000
_BAND_KEYS = ("freeze", "drop", "exchange")
_KEYS = ("layers", "heads", "groups", "kind", "side", *_BAND_KEYS, "speed", "bias", "attention", "output", "seed")
_EFFECT_KEYS = {*_BAND_KEYS, "speed", "bias", "attention", "output"}
_MAX_RANGES = 8  # maximum number of exchanged ranges in a text
VERSIONS = {"torch": torch.__version__, "python": platform.python_version()}  # recorded with audits and probes


@dataclass(frozen=True)
class ChangeSpec:
    """An intervention on several layers."""

    layers: tuple[int, ...] | None  # from 0; None for all layers
    change: Change  # its ``layer`` is ignored
    exchanged: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # bands of pairs that swap their frequencies in order

    def for_layer(self, layer: int, pairs: int = 0) -> Change:
        """The change of a layer; ``pairs`` is its number of RoPE pairs, only needed for exchanges."""
        change = replace(self.change, layer=layer)
        if change.bands is None or not self.exchanged[0]:
            return change
        return replace(change, bands=replace(change.bands, permute=swap_bands(pairs, *self.exchanged)))


@contextmanager
def _change_errors() -> Iterator[None]:
    """Name the change in errors about its settings: ``change: layers must be ...``."""
    try:
        yield
    except InputError as error:
        if error.name == "change":
            raise
        raise InputError(f"change: {error}") from None


def resolve_changes(loaded: LoadedModel, changes: Sequence[ChangeSpec | Change]) -> list[Change]:
    """The changes of a loaded model; those of a `ChangeSpec` are checked in a short forward pass.

    Raises `InputError`, counting from 1, for layers, heads or pairs that do not exist and for a head that is changed
    twice.
    """
    resolved = [each for each in changes if isinstance(each, Change)]
    specs = [each for each in changes if isinstance(each, ChangeSpec)]
    if not specs:
        return resolved
    calls: list[AttentionCall] = []
    tokens = torch.tensor([[*range(1, 9)], [*range(8, 0, -1)]], device=loaded.device)
    sides = ("", "decoder_") if loaded.model.config.is_encoder_decoder else ("",)
    try:
        capture_attention(loaded.model, {f"{side}input_ids": tokens for side in sides}, calls.append)
    except Exception as error:  # so few tokens may fail in some models; errors are then reported in the real pass
        if is_out_of_memory(error) or any(spec.layers is None or spec.exchanged[0] for spec in specs):
            raise
        return [*resolved, *(spec.for_layer(layer) for spec in specs for layer in spec.layers or ())]
    taken: set[tuple[CallKey, int]] = set()
    with _change_errors():
        try:
            return [*resolved, *(change for spec in specs for change in _resolve_spec(spec, calls, taken))]
        except InvalidTarget as error:
            raise error.counted_from_one() from None


def _resolve_spec(spec: ChangeSpec, calls: list[AttentionCall], taken: set[tuple[CallKey, int]]) -> Iterator[Change]:
    """The changes of a spec; checks that layers, heads and pairs exist and that heads are not ``taken``."""
    calls = [call for call in calls if spec.change.applies_to_side(call.kind, call.side)]
    if spec.layers is None and len({call.side for call in calls}) > 1:
        raise InputError("side must be set for a model with an encoder and a decoder.")
    if spec.layers is None and not calls:
        raise spec.change.layer_error(0).counted_from_one("layers")
    for layer in range(len(calls)) if spec.layers is None else spec.layers:
        matching = [call for call in calls if call.layer == layer]
        if not matching:
            raise replace(spec.change, layer=layer).layer_error(len(calls)).counted_from_one("layers")
        pairs = 0
        for call in matching if spec.exchanged[0] else ():
            count = pairs_of(call, "exchange")
            if too_large := [pair for band in spec.exchanged for pair in band if pair >= count]:
                raise InvalidTarget("exchange", too_large, count, call.module)
            pairs = min(pairs or count, count)
        change = spec.for_layer(layer, pairs)
        for call in matching:
            heads = {(call.key, head) for head in change.heads_of(call)}
            if call.unknown is None:  # more tokens may reveal it
                change.check(call)
            if taken & heads:
                head = 1 + min(head for _, head in taken & heads)
                raise InputError(f"change must not change head {head} of {call.module} twice.")
            taken |= heads
        yield change


def parse_changes(changes: Any) -> tuple[ChangeSpec | Change, ...]:
    """One or several changes, parsed where they are texts. Raises `InputError` for anything else."""
    changes = (changes,) if isinstance(changes, str | Change | ChangeSpec) else tuple(changes or ())
    if others := [change for change in changes if not isinstance(change, str | Change | ChangeSpec)]:
        raise invalid("changes", "be Change objects or texts", others[0])
    return tuple(parse_change(change) if isinstance(change, str) else change for change in changes)


@_change_errors()
def parse_change(text: str) -> ChangeSpec:
    """Parse a change such as ``layers=3-5 heads=1,4 output=zero``. Raises `InputError` for invalid text.

    layers, heads, groups, freeze and drop are numbers and ranges from 1 (layers may be ``all``); exchange is two of
    them separated by a colon, ``1-4:29-32``; speed is a number, bias ``off``; attention, output, kind, side and seed
    are as in `toeplens.backends.hf.Change`.
    """
    settings: dict[str, str] = {}
    for setting in text.split():
        key, sign, value = setting.partition("=")
        key = CHANGE_KEYS.get(key, key)
        if not sign or not value or key not in _KEYS or key in settings:
            raise InputError(
                f"change must have settings of the form name=value, each name once, from {', '.join(_KEYS)}, "
                f"as in {_EXAMPLE}, got {repr_of(setting)}."
            )
        settings[key] = value
    if "layers" not in settings:
        raise invalid("change", f"name layers, as in {_EXAMPLE}", text)
    if not settings.keys() & _EFFECT_KEYS:
        raise invalid("change", f"have one of {join_list(sorted(_EFFECT_KEYS))}, as in {_EXAMPLE}", text)
    options: dict[str, Any] = {}
    exchanged: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    for name, value in settings.items():
        if name in ("layers", "heads", "groups", "freeze", "drop"):
            options[name] = None if (name, value) == ("layers", "all") else parse_numbers(name, value)
        elif name == "exchange":
            first, *others = [parse_numbers(name, part) for part in value.split(":")]
            pairs = [pair for band in (first, *others) for pair in band]
            if [len(band) for band in others] != [len(first)] or len(set(pairs)) != len(pairs):
                must = "be two bands with the same number of pairs, all different, such as 1-4:29-32"
                raise invalid(name, must, value)
            exchanged = first, others[0]
        elif name in ("speed", "seed"):
            try:
                options[name] = float(value) if name == "speed" else int(value)
            except ValueError:
                raise invalid(name, "be a number", value) from None
        elif name == "bias" and value != "off":
            raise invalid(name, "be off", value)
        else:
            options[name] = False if name == "bias" else value
    bands = {name: options.pop(name) for name in ("freeze", "drop") if name in options}
    if bands or exchanged[0]:
        options["bands"] = FrequencyMask(**bands)
    return ChangeSpec(options.pop("layers"), Change(layer=0, **options), exchanged)


def parse_numbers(field: str, text: str) -> tuple[int, ...]:
    """Parse ``1,4,9-12``, counted from 1, to numbers from 0. Raises `InputError` that names the field."""
    result: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]) < _MAX_NUMBER:
            raise invalid(field, f"be numbers from 1 to {_MAX_NUMBER - 1} and ranges such as 1,4,9-12", text)
        result += range(int(match[1]) - 1, int(match[2] or match[1]))
    return tuple(result)


def changes_text(changes: Sequence[Change]) -> list[str]:
    """The changes as text; changes that only differ in their layer are merged."""
    groups: dict[str, list[int]] = {}
    for change in changes:
        side = f"{change.side} " if change.side else ""
        kind = "" if change.kind == "self" else f"{change.kind} "
        word, indices = ("head", change.heads) if change.heads is not None else ("group", change.groups)
        heads = "" if indices is None else f", {_count_text(word, indices)}"
        groups.setdefault(f"{side}{kind}layer{{}} {{}}{heads}: {_change_text(change)}", []).append(change.layer + 1)
    return [text.format("s" if len(layers) > 1 else "", format_ranges(layers)) for text, layers in groups.items()]


def _count_text(word: str, indices: Sequence[int]) -> str:
    return f"{word}{'s' if len(indices) > 1 else ''} {format_ranges(index + 1 for index in indices)}"


def _change_text(change: Change) -> str:
    parts = []
    if change.bands is not None:
        states = (change.bands.freeze, "frozen"), (change.bands.drop, "dropped")
        parts += [f"{_count_text('pair', pairs)} {state}" for pairs, state in states if pairs]
        if change.bands.permute is not None:
            parts.append(_order_text(change.bands.permute))
    if change.speed != 1:
        parts.append("rotation frozen" if change.speed == 0 else f"rotation speed × {change.speed:g}")
    if not change.bias:
        parts.append("bias dropped")
    if change.attention is not None:
        parts.append(f"only the {change.attention} part of the logits")
    if change.output is not None:
        parts.append({"zero": "zero-ablated", "mean": "mean-ablated"}.get(change.output, "resample-ablated"))
    return join_list(parts)


def _order_text(order: Sequence[int]) -> str:
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
    texts = [f"{format_ranges(a + 1 for a, _ in run)} {word} {format_ranges(b + 1 for _, b in run)}" for run in runs]
    more = [f"… ({len(texts)} in all)"] if len(texts) > _MAX_RANGES else []
    return f"pairs {verb}, {', '.join(texts[:_MAX_RANGES] + more) or 'none'}"


@contextmanager
def report_failures(loaded: LoadedModel, task: str, advice: str) -> Iterator[None]:
    """Report a full memory, with advice, and errors of the model's libraries in one sentence."""
    try:
        with library_errors(f"model: the {task} of {type(loaded.model).__name__} failed: {{}}."):
            yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, ToeplensError):
            raise EnvironmentFailure(f"Out of memory on {loaded.device}{advice}") from error
        raise
