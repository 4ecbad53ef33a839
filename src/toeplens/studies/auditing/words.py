"""Sentences about an audit: names of heads (counted from 1), what was proved, and what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from toeplens.ground.files import read_yaml
from toeplens.ground.words import fixed, listed, power, significant, spans
from toeplens.studies.auditing.record import AuditRecord, BandRecord, HeadRecord, LayerRecord, Number

_TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("words.yaml"))
PATTERN = 0.5  # a head has a pattern if more than this share of its attention follows it
PATTERNS: dict[str, tuple[str, str]] = {name: tuple(each) for name, each in _TEXTS["patterns"].items()}
UNIFORM = 0.95  # entropy from which on attention counts as nearly uniform
_LISTED = 8  # heads named in a sentence
_TAIL = 0.025  # either tail of a 95 % interval
Place = tuple[str, str]  # side and kind
Row = TypeVar("Row")


def largest(rows: Iterable[Row], name: str) -> tuple[Row, float] | None:
    """The row with the largest known value of a field and the value (the first of a tie); None if none is known."""
    known = [(row, value) for row in rows if (value := getattr(row, name)) is not None]
    return max(known, key=lambda pair: pair[1], default=None)


@dataclass(frozen=True)
class Names:
    """Names of layers and heads, with side and kind where a model has more than one."""

    places: tuple[Place, ...]  # sides and kinds, in the order of the forward pass

    @classmethod
    def of(cls, *audits: AuditRecord) -> Names:
        """Names that are unique over all layers of these audits."""
        return cls(tuple(dict.fromkeys((one.side, one.kind) for audit in audits for one in audit.layers)))

    def place(self, one: HeadRecord | LayerRecord) -> str:
        """Side and kind followed by a space; empty if the model has only one."""
        return "" if len(self.places) == 1 else f"{one.side} " if one.kind == "self" else f"{one.side} {one.kind} "

    def layer(self, one: HeadRecord | LayerRecord) -> str:
        """For sentences: layer 2, decoder cross layer 2."""
        return f"{self.place(one)}layer {one.layer + 1}"

    def head(self, head: HeadRecord) -> str:
        """For sentences: layer 2 head 5."""
        return f"{self.layer(head)} head {head.head + 1}"

    def short_layer(self, one: HeadRecord | LayerRecord) -> str:
        """For plots: L2."""
        return f"{self.place(one)}L{one.layer + 1}"

    def short(self, head: HeadRecord) -> str:
        """For plots: L2 H5."""
        return f"{self.short_layer(head)} H{head.head + 1}"


def place_title(place: Place) -> str:
    """A side and a kind as a heading."""
    return f"{place[0].capitalize()}, {place[1]}-attention"


def told(value: Number, digits: int = 3) -> str:
    """A number with the given decimals and a true minus sign; a dash if it is unknown."""
    return fixed(value, digits)


def layer_spans(names: Names, layers: Iterable[LayerRecord]) -> str:
    """A list of layers with ranges, such as layers 1–4, 6; with side and kind where there are several."""
    found: dict[str, list[int]] = {}
    for one in layers:
        found.setdefault(names.layer(one).removesuffix(f" {one.layer + 1}"), []).append(one.layer + 1)
    return listed(f"{word}{'s' if len(which) > 1 else ''} {spans(which)}" for word, which in found.items())


def audited(audit: AuditRecord) -> str:
    """The audited input: sequences, tokens, and where they came from."""
    known = ("sequences", "tokens", "lengths", "text", "changes")
    sequences, tokens, lengths, text, changes = map(audit.about.get, known)
    long = f"{min(lengths)} to {tokens}" if lengths else f"{tokens}"
    size = "size not recorded" if None in (sequences, tokens) else f"{sequences} × {long} tokens"
    changed = f"; changed: {'; '.join(changes)}" if changes else ""
    return f"{size} ({text or 'source not recorded'}){changed}"


def count(value: Any) -> str:
    """A number of parameters, such as 22.7 M; a dash if unknown."""
    if not isinstance(value, int | float):
        return "–"
    size, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.3g} {unit}".strip()


def within(layer: LayerRecord) -> bool:
    """Whether the differences of an attention call are within the tolerance."""
    return layer.used <= 1 if layer.used is not None else max(layer.weights or 0.0, layer.outputs) <= layer.tolerance


def proved(audit: AuditRecord) -> bool:
    """Whether those of every attention call are."""
    return all(map(within, audit.layers))


def worst(audit: AuditRecord) -> Number:
    """The largest difference of weights and outputs over all attention calls; None without calls."""
    found = [value for layer in audit.layers for value in (layer.weights, layer.outputs) if value is not None]
    return max(found, default=None)


def proof(audit: AuditRecord) -> str:
    """The largest differences over all attention calls, the tolerance, and the logits it follows from."""
    formed = [layer.weights for layer in audit.layers if layer.weights is not None]
    measured = [layer for layer in audit.layers if layer.used is not None and layer.logit is not None]
    calls, limits = len(audit.layers), sorted({layer.tolerance for layer in audit.layers})
    weights = "The model does not expose attention weights."
    if formed:
        some = "" if len(formed) == calls else f", in the {len(formed)} calls that expose them"
        weights = f"Recomputed attention weights differ from the model’s own by at most {power(max(formed))}{some}."
    allowed = power(limits[0]) if len(limits) == 1 else f"{power(limits[0])} to {power(limits[-1])}"
    rounding = f"Tolerance: {allowed}."
    if measured:
        most = max(measured, key=lambda layer: layer.logit or 0.0)
        rounding = (
            f"The largest attention logit is {size(most.logit)} (layer {most.layer + 1}); there, rounding explains "
            f"weight differences up to {power(most.tolerance)}. All differences are at most "
            f"{100 * max(layer.used or 0.0 for layer in measured):.0f}% of what rounding explains."
        )
    if coarse := [layer for layer in measured if layer.undecided]:
        worst = max(coarse, key=lambda layer: layer.undecided or 0.0)
        rounding += (
            f" In {len(coarse)} layers, this precision cannot resolve some weights (layer {worst.layer + 1}: "
            f"{100 * (worst.undecided or 0.0):.0f}% of the queries). Use --dtype float32 for them."
        )
    return (
        f"{weights} Head outputs differ by at most {power(max(layer.outputs for layer in audit.layers))}, relative to "
        f"the largest of a layer ({calls} attention call{'s' if calls > 1 else ''}). {rounding} The captured forward "
        f"pass differs from a plain one by {power(audit.whole)} of the largest output."
    )


def size(value: Number) -> str:
    """A logit, such as 12,860 or 4.31; a dash if unknown."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def done(audit: AuditRecord) -> str:
    """The intervention on a head, as in: ablating it adds to the loss."""
    return _TEXTS["doing"].get(audit.method or "", "ablating")


def unit(audit: AuditRecord) -> str:
    """The definition of an effect."""
    return _TEXTS["units"][audit.effect or "loss"].format(done(audit), "layer" if audit.method == "bands" else "head")


def effects(audit: AuditRecord) -> str:
    """The definition of the effects, how they were measured, and the intact model's loss."""
    if audit.effect is None:
        why = audit.about.get("no_effects")
        return "Ablation effects were not measured." if why is None else f"Ablation effects are not available. {why}"
    how = _TEXTS["done"].get(audit.method or "", "Heads were ablated")
    base = "" if audit.baseline is None else f" The loss of the intact model is {told(audit.baseline)} nats per token."
    checked = "" if audit.check is None else f" {audit.check.words}"
    race = f" {audit.about['race']}" if "race" in audit.about else ""
    return f"{how}. An effect is the {unit(audit)}.{base}{checked}{race}"


def unknown(audit: AuditRecord) -> list[tuple[str, str]]:
    """Layers with unknown shares, grouped by the reason."""
    names, reasons = Names.of(audit), {}
    for layer in audit.layers:
        if layer.unknown:
            reasons.setdefault(layer.unknown.removeprefix(f"{layer.module}: "), []).append(layer)
    return [(layer_spans(names, layers), why) for why, layers in reasons.items()]


def findings(audit: AuditRecord) -> list[str]:
    """The main findings in a few sentences; unknown values are left out."""
    names = Names.of(audit)
    patterns = [said for column in PATTERNS if (said := _pattern(audit, names, column))]
    return [*_on_effects(audit, names), *patterns, *_on_logits(audit, names), *_on_deposit(audit, names)]


def over(audit: AuditRecord) -> str:
    """What the intervals of effects are taken over."""
    return str(audit.about.get("intervals") or "over sequences")


def interval(audit: AuditRecord, head: HeadRecord | BandRecord) -> str:
    """The interval of an effect, in brackets; empty if there is none."""
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f" ({significant(head.effect_low)} to {significant(head.effect_high)} {over(audit)})"


def harmful(audit: AuditRecord) -> list[HeadRecord]:
    """Heads whose effect on the loss is significantly negative, the most negative first."""
    found = [head for head in audit.heads if head.effect_high is not None and head.effect_high < 0]
    return sorted(found, key=lambda head: head.effect or 0.0) if audit.effect == "loss" else []


def _on_effects(audit: AuditRecord, names: Names) -> Iterator[str]:
    """The most important head and frequency band, and harmful heads."""
    doing, states = done(audit), audit.effect == "states"
    top, top_band, heads = largest(audit.heads, "effect"), largest(audit.bands, "effect"), harmful(audit)
    if top is not None and audit.effect is not None:
        name, size, ends = names.head(top[0]), significant(top[1]), interval(audit, top[0])
        does = f"adds {size} nats per token to the loss"
        if states:
            does = f"moves the last hidden states by {size} of their variance over tokens"
        if states or top[1] > 0:
            yield f"The most important head is {name}: {doing} it {does}{ends}."
        else:
            yield f"No head has a positive effect on the loss; the largest effect is {size}, for {name}{ends}."
    if top_band is not None and top_band[1] <= 0:
        yield "Freezing a frequency band makes the model worse in no layer."
    elif top_band is not None:
        band, size = top_band[0], significant(top_band[1])
        does = f"moves the last hidden states by {size} of their variance"
        yield (
            f"The most important frequency band is pairs {band.first + 1} to {band.last + 1} of "
            f"{names.layer(audit.layer_of(band))} ({significant(band.slowest)} to {significant(band.fastest)} rad per "
            f"position): freezing it in all heads {does if states else f'adds {size} nats per token to the loss'}"
            f"{interval(audit, band)}."
        )
    if heads:
        known = sum(head.effect_high is not None for head in audit.heads)
        yield (
            f"Heads with a significantly negative effect ({doing} the head lowers the loss): {_named(names, heads)}; "
            f"largest for {names.head(heads[0])} ({significant(heads[0].effect)} nats per token). "
            f"By chance alone we would expect about {_TAIL * known:.0f} of {known} such heads."
        )


def _named(names: Names, heads: list[HeadRecord]) -> str:
    """The heads by their short names; of many, the first ones and the number of all."""
    shown = ", ".join(names.short(head) for head in heads[:_LISTED])
    return shown if len(heads) <= _LISTED else f"{shown}, … ({len(heads)} heads)"


def _pattern(audit: AuditRecord, names: Names, column: str) -> str:
    """The heads of one attention pattern, the strongest first; if there is none, the one that is closest to it."""
    closest = largest(audit.heads, column)
    if closest is None:
        return ""
    title, on = PATTERNS[column]
    heads = [head for head in audit.heads if (getattr(head, column) or 0.0) > PATTERN]
    found = _named(names, sorted(heads, key=lambda head: -getattr(head, column)))
    none = f"none. The highest share is {told(closest[1], 2)} ({names.short(closest[0])})"
    return f"{title} (over {PATTERN:g} of the attention {on}): {found if heads else none}."


def _on_logits(audit: AuditRecord, names: Names) -> Iterator[str]:
    """What the heads' logits depend on: position, distance, and an offset bias."""
    found, symbolic = largest(audit.heads, "positional"), largest(audit.heads, "symbolic")
    decays = [head.decay for head in audit.heads if head.decay is not None]
    fitted = [decay for decay in decays if decay.explains]
    ends = [head.kernel for head in audit.heads if head.kernel is not None]
    if found is not None:
        rest = ""
        if symbolic is not None:
            rest = f" The most symbolic head is {names.head(symbolic[0])} ({told(symbolic[1], 2)})."
        share = f"{told(found[1], 2)} of the variance of its logits"
        yield f"The most positional head is {names.head(found[0])} ({share}).{rest}"
    if fitted:
        forms = listed(f"{form} ({count})" for form, count in Counter(decay.form for decay in fitted).most_common())
        halves = [decay.half_distance for decay in fitted if decay.half_distance is not None]
        half = f" Median half distance: {told(median(halves), 1)} tokens." if halves else ""
        yield (
            f"For {len(fitted)} of {len(decays)} heads, a fitted decay or growth curve explains at least half of the "
            f"variation of the mean logit with distance: {forms}.{half}"
        )
    if ends:
        low, high = significant(min(one.lowest for one in ends)), significant(max(one.highest for one in ends))
        symbols = significant(min(one.symbol_low for one in ends)), significant(max(one.symbol_high for one in ends))
        yield (
            f"The offset biases, as Toeplitz matrices of {max(one.size for one in ends)} tokens, have eigenvalues from "
            f"{low} to {high}; their symbols range from {symbols[0]} to {symbols[1]}."
        )


def _on_deposit(audit: AuditRecord, names: Names) -> Iterator[str]:
    """The layer whose effects are most concentrated."""
    known = [layer for layer in audit.layers if layer.deposit.get("top_share")]
    if known:
        layer = max(known, key=lambda one: one.deposit["top_share"] or 0.0)
        top = top_head(audit, layer)
        yield (
            f"The most concentrated deposit is in {names.layer(layer)}: "
            f"{f'head {top.head + 1}' if top else 'one head'} holds "
            f"{100 * (layer.deposit['top_share'] or 0):.0f}% of the sum of positive effects "
            f"({told(layer.deposit.get('effective_heads'), 1)} effective heads of {layer.heads})."
        )


def top_head(audit: AuditRecord, layer: LayerRecord) -> HeadRecord | None:
    """The head of a layer with the largest effect."""
    found = largest(audit.of(layer), "effect")
    return None if found is None else found[0]


def model(audit: AuditRecord) -> str:
    """The model's name."""
    return str(audit.about.get("model") or "unnamed model")
