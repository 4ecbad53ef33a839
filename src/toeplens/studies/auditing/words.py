"""What an audit says in words: what heads are called (from 1, for people), what was proved, and what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any

from toeplens.ground.words import fixed, listed, power, significant, spans
from toeplens.studies.auditing.record import AuditRecord, BandRecord, HeadRecord, LayerRecord, Number

PATTERN = 0.5  # attention from which on a head counts as one of a pattern
PATTERNS = {
    "previous": "on the token before",
    "first": "on the first token",
    "induction": "on tokens after a copy of their own (induction)",
    "duplicate": "on copies of their own token",
}
UNIFORM = 0.95  # entropy of the attention from which on a head looks at all keys nearly alike
DONE = {"position": "taking position from", "bands": "stopping a band of"}  # to a head, by the method; else silencing
_UNITS = {
    "loss": "loss, in nats a token, that {} the {} adds",
    "states": "squared distance of the last states from the intact ones, relative to their variance over tokens",
}
_TAIL = 0.025  # of an interval of 95 %, at either end
Place = tuple[str, str]  # side and kind


@dataclass(frozen=True)
class Names:
    """What layers and heads are called: with side and kind where a model has more than one.

    places  sides and kinds, in the order of the pass
    """

    places: tuple[Place, ...]

    @classmethod
    def of(cls, *audits: AuditRecord) -> Names:
        """The names that tell all layers of these audits apart."""
        return cls(tuple(dict.fromkeys((one.side, one.kind) for audit in audits for one in audit.layers)))

    def place(self, one: HeadRecord | LayerRecord) -> str:
        """Its side and kind, and a blank, where a model has more than one."""
        return "" if len(self.places) == 1 else f"{one.side} " if one.kind == "self" else f"{one.side} {one.kind} "

    def layer(self, one: HeadRecord | LayerRecord) -> str:
        """As in a sentence: layer 2, decoder cross layer 2."""
        return f"{self.place(one)}layer {one.layer + 1}"

    def head(self, head: HeadRecord) -> str:
        """As in a sentence: layer 2 head 5."""
        return f"{self.layer(head)} head {head.head + 1}"

    def short_layer(self, one: HeadRecord | LayerRecord) -> str:
        """As in a plot: L2."""
        return f"{self.place(one)}L{one.layer + 1}"

    def short(self, head: HeadRecord) -> str:
        """As in a plot: L2 H5."""
        return f"{self.short_layer(head)} H{head.head + 1}"


def place_title(place: Place) -> str:
    """A side and a kind as a heading."""
    return f"{place[0].capitalize()}, {place[1]}-attention"


def told(value: Number, digits: int = 3) -> str:
    """A number with so many decimals and a true minus sign; a dash where it is not known."""
    return fixed(value, digits)


def layer_spans(names: Names, layers: Iterable[LayerRecord]) -> str:
    """Layers in a sentence, runs drawn together: layers 1–4, 6; with side and kind where there are several."""
    found: dict[str, list[int]] = {}
    for one in layers:
        found.setdefault(names.layer(one).removesuffix(f" {one.layer + 1}"), []).append(one.layer + 1)
    return listed(f"{word}{'s' if len(which) > 1 else ''} {spans(which)}" for word, which in found.items())


def audited(audit: AuditRecord) -> str:
    """What was looked at: sequences, tokens, and where they came from."""
    about = audit.about
    sequences, tokens = about.get("sequences"), about.get("tokens")
    lengths = about.get("lengths")
    long = f"{min(lengths)} to {tokens}" if lengths else f"{tokens}"
    size = "tokens whose number was not recorded" if None in (sequences, tokens) else f"{sequences} × {long} tokens"
    changes = about.get("changes") or ()
    return (
        f"{size} ({about.get('text') or 'source not recorded'}){'; changed: ' if changes else ''}{'; '.join(changes)}"
    )


def count(value: Any) -> str:
    """A number of parameters: 22.7 M; a dash where there is none."""
    if not isinstance(value, int | float):
        return "–"
    size, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if value >= s), (1, ""))
    return f"{value / size:.3g} {unit}".strip()


def proved(audit: AuditRecord) -> bool:
    """Whether every call's differences are within what is allowed."""
    return all(
        layer.used <= 1 if layer.used is not None else max(layer.weights or 0.0, layer.outputs) <= layer.tolerance
        for layer in audit.layers
    )


def worst(audit: AuditRecord) -> Number:
    """The largest difference of weights and outputs over all calls; None without calls."""
    found = [value for layer in audit.layers for value in (layer.weights, layer.outputs) if value is not None]
    return max(found, default=None)


def proof(audit: AuditRecord) -> str:
    """The largest differences over all calls, and what is allowed."""
    formed = [layer.weights for layer in audit.layers if layer.weights is not None]
    calls = len(audit.layers)
    counted = "" if len(formed) == calls else f" (in the {len(formed)} calls that form any)"
    weights = (
        f"Attention weights formed again from the parts differ from the model’s own by at most {power(max(formed))}"
        f"{counted}"
        if formed
        else "The model forms no attention weights"
    )
    outputs = power(max(layer.outputs for layer in audit.layers))
    return (
        f"{weights}; heads’ outputs differ by at most {outputs} of a layer’s largest, over {calls} attention "
        f"call{'s' if calls > 1 else ''}. {_rounding(audit)} The captured pass differs from a plain pass by "
        f"{power(audit.whole)} of the largest output."
    )


def size(value: Number) -> str:
    """A logit, as in 12,860 or 4.31; a dash where it is not known."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounding(audit: AuditRecord) -> str:
    """What rounding explains, and of which logits."""
    limits = sorted({layer.tolerance for layer in audit.layers})
    measured = [layer for layer in audit.layers if layer.used is not None and layer.logit is not None]
    if not measured:
        allowed = power(limits[0]) if len(limits) == 1 else f"{power(limits[0])} to {power(limits[-1])}"
        return f"{allowed} is allowed."
    largest = max(measured, key=lambda layer: layer.logit or 0.0)
    coarse = [layer for layer in measured if layer.undecided]
    said = (
        f"The largest attention logit is {size(largest.logit)}, in layer {largest.layer + 1}, where rounding explains "
        f"differences of a weight up to {power(largest.tolerance)}; no difference takes more than "
        f"{100 * max(layer.used or 0.0 for layer in measured):.0f} % of what rounding explains."
    )
    if coarse:
        worst = max(coarse, key=lambda layer: layer.undecided or 0.0)
        said += (
            f" In {len(coarse)} layers some weights cannot be told in this precision (layer {worst.layer + 1}: "
            f"{100 * (worst.undecided or 0.0):.0f} % of the queries); use --dtype float32 for these."
        )
    return said


def done(audit: AuditRecord) -> str:
    """What is done to a head, as in: silencing it adds to the loss."""
    return DONE.get(audit.method or "", "silencing")


def unit(audit: AuditRecord) -> str:
    """What an effect is."""
    return _UNITS[audit.effect or "loss"].format(done(audit), "layer" if audit.method == "bands" else "head")


def effects(audit: AuditRecord) -> str:
    """What the effects of heads are of, how they were found, and the intact model's loss."""
    if audit.effect is None:
        why = audit.about.get("no_effects")
        return "Heads were not silenced: there are no effects." if why is None else f"There are none. {why}"
    how = {
        "exact": "Each head was silenced by itself",
        "position": "Position was taken from each head by itself, its rotation stopped and its bias left out",
        "bands": "Each band of each layer’s frequencies was stopped by itself, in all of its heads",
        "attribution": "Effects are estimates of silencing each head, from gradients",
    }.get(audit.method or "", "Heads were silenced")
    base = "" if audit.baseline is None else f" The intact model’s loss is {told(audit.baseline)} nats a token."
    checked = "" if audit.check is None else f" {audit.check.words}"
    race = f" {audit.about['race']}" if "race" in audit.about else ""
    return f"{how}; an effect is the {unit(audit)}.{base}{checked}{race}"


def unknown(audit: AuditRecord) -> list[tuple[str, str]]:
    """Layers whose shares are not known, and why: one line a reason, which may begin with the layer's module."""
    names, reasons = Names.of(audit), {}
    for layer in audit.layers:
        if layer.unknown:
            reasons.setdefault(layer.unknown.removeprefix(f"{layer.module}: "), []).append(layer)
    return [(layer_spans(names, layers), why) for why, layers in reasons.items()]


def largest(audit: AuditRecord, value: Callable[[HeadRecord], Number]) -> HeadRecord | None:
    """The head with the largest known value; the first of several."""
    known = [head for head in audit.heads if value(head) is not None]
    return max(known, key=lambda head: value(head) or 0.0, default=None)


def findings(audit: AuditRecord) -> list[str]:
    """What the record says in a few sentences; what is not known is left out."""
    made = (_matters, _band, _harmful, _patterns, _positional, _decays, _kernels, _deposit)
    return [sentence for say in made if (sentence := say(audit))]


def over(audit: AuditRecord) -> str:
    """What the intervals of effects are over."""
    return str(audit.about.get("intervals") or "over sequences")


def interval(audit: AuditRecord, head: HeadRecord | BandRecord) -> str:
    """The effect's interval, in brackets; nothing where there is none."""
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f" ({significant(head.effect_low)} to {significant(head.effect_high)} {over(audit)})"


def _matters(audit: AuditRecord) -> str:
    head = largest(audit, lambda one: one.effect)
    if head is None or head.effect is None or audit.effect is None:
        return ""
    name, size = Names.of(audit).head(head), significant(head.effect)
    if audit.effect == "loss":
        if head.effect <= 0:
            doing = done(audit).capitalize()
            return f"{doing} no head adds to the loss; {name} has the largest effect, {size}{interval(audit, head)}."
        ends = interval(audit, head)
        return f"The head that matters most is {name}: {done(audit)} it adds {size} nats a token to the loss{ends}."
    return (
        f"The head that matters most is {name}: {done(audit)} it moves the last states by {size} of their variance "
        f"over tokens{interval(audit, head)}."
    )


def _band(audit: AuditRecord) -> str:
    known = [(each.effect, each) for each in audit.bands if each.effect is not None]
    if not known:
        return ""
    effect, band = max(known, key=lambda each: each[0])
    if effect <= 0:
        return "Stopping no band of frequencies in a layer makes the model worse."
    layer = Names.of(audit).layer(audit.layer_of(band))
    does = f"adds {significant(effect)} nats a token to the loss"
    if audit.effect == "states":
        does = f"moves the last states by {significant(effect)} of their variance"
    return (
        f"The band of frequencies that matters most is pairs {band.first + 1} to {band.last + 1} of "
        f"{layer} ({significant(band.slowest)} to {significant(band.fastest)} radians a token): "
        f"stopping it in all heads {does}{interval(audit, band)}."
    )


def harmful(audit: AuditRecord) -> list[HeadRecord]:
    """Heads without which the loss is lower, by the whole of their interval; the largest first."""
    found = [head for head in audit.heads if head.effect_high is not None and head.effect_high < 0]
    return sorted(found, key=lambda head: head.effect or 0.0) if audit.effect == "loss" else []


def _harmful(audit: AuditRecord) -> str:
    heads = harmful(audit)
    if not heads:
        return ""
    total, first = sum(head.effect or 0.0 for head in heads), heads[0]
    known = sum(head.effect_high is not None for head in audit.heads)
    chance = f"of {known} heads without any effect about {_TAIL * known:.0f} would look so"
    which = f"{Names.of(audit).head(first)} ({significant(first.effect)})"
    if len(heads) == 1:
        return f"{done(audit).capitalize()} one head lowers the loss beyond its interval, {which}; {chance}."
    return (
        f"{done(audit).capitalize()} {len(heads)} of {known} heads lowers the loss beyond their intervals, "
        f"{significant(total)} nats a token if added up, most of all {which}; {chance}."
    )


def _patterns(audit: AuditRecord) -> str:
    counts = []
    for column, name in PATTERNS.items():
        known = [value for head in audit.heads if (value := getattr(head, column)) is not None]
        if known:
            head = largest(audit, attrgetter(column))
            assert head is not None
            most = f"most {Names.of(audit).head(head)}, {told(getattr(head, column), 2)}"
            counts.append(f"{name}: {sum(value > PATTERN for value in known)} of {len(known)} ({most})")
    return f"Heads with over {PATTERN:g} of their attention {'; '.join(counts)}." if counts else ""


def _positional(audit: AuditRecord) -> str:
    head = largest(audit, lambda one: one.positional)
    if head is None or head.positional is None:
        return ""
    symbol = largest(audit, lambda one: one.symbolic)
    names = Names.of(audit)
    rest = "" if symbol is None else f"; the most symbolic is {names.head(symbol)} ({told(symbol.symbolic, 2)})"
    return f"The most positional head is {names.head(head)}: {told(head.positional, 2)} of its logits’ variance{rest}."


def _decays(audit: AuditRecord) -> str:
    found = [head.decay for head in audit.heads if head.decay is not None]
    told_by = [decay for decay in found if decay.explains]
    if not told_by:
        return ""
    counts = Counter(decay.form for decay in told_by)
    forms = listed(f"{form} in {number}" for form, number in counts.most_common())
    halves = [decay.half_distance for decay in told_by if decay.half_distance is not None]
    half = ""
    if halves:
        half = f"; those that tend to a limit are half way there after {told(median(halves), 1)} tokens (median)"
    return (
        f"In {len(told_by)} of {len(found)} heads a form of decay or growth tells at least half of how the mean logit "
        f"changes with distance: {forms}{half}."
    )


def _kernels(audit: AuditRecord) -> str:
    ends = [head.kernel for head in audit.heads if head.kernel is not None]
    if not ends:
        return ""
    low, high = min(one.lowest for one in ends), max(one.highest for one in ends)
    symbols = min(one.symbol_low for one in ends), max(one.symbol_high for one in ends)
    return (
        f"The biases by offset, as matrices of {max(one.size for one in ends)} tokens, have eigenvalues from "
        f"{significant(low)} to {significant(high)}; their symbols end at {significant(symbols[0])} and "
        f"{significant(symbols[1])}."
    )


def _deposit(audit: AuditRecord) -> str:
    known = [layer for layer in audit.layers if layer.deposit.get("top_share")]
    if not known:
        return ""
    layer = max(known, key=lambda one: one.deposit["top_share"] or 0.0)
    top = top_head(audit, layer)
    held = f"head {top.head + 1} holds" if top else "one head holds"
    harms = layer.deposit.get("harms") or 0.0
    what, taken = "what its heads’ effects add up to above 0", ""
    if audit.effect == "loss" and harms < 0:
        taken = f"; those below 0 add up to {significant(harms)}"
    return (
        f"The most concentrated deposit is that of {Names.of(audit).layer(layer)}: {held} "
        f"{100 * (layer.deposit['top_share'] or 0):.0f}% of {what}, {significant(layer.deposit.get('helps'))} "
        f"({told(layer.deposit.get('effective_heads'), 1)} effective heads of {layer.heads}){taken}."
    )


def top_head(audit: AuditRecord, layer: LayerRecord) -> HeadRecord | None:
    """The head of a layer with the largest effect."""
    return max(
        (one for one in audit.of(layer) if one.effect is not None), key=lambda one: one.effect or 0, default=None
    )


def model(audit: AuditRecord) -> str:
    """The model's name, as it was given."""
    return str(audit.about.get("model") or "a model without a name")
