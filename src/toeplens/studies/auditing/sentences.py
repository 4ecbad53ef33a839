"""Sentences about an audit: names of heads (counted from 1), what was proved, and what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from toeplens.studies.auditing.record import Audit, BandRecord, HeadRecord, LayerRecord, Number
from toeplens.utils.files import read_yaml
from toeplens.utils.formatting import fmt, format_ranges, join_list, plural, sig_figs, to_sci

_TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("sentences.yaml"))
PATTERN_SHARE = 0.5  # a head has a pattern if more than this share of its attention follows it
PATTERNS: dict[str, tuple[str, str]] = {name: tuple(texts) for name, texts in _TEXTS["patterns"].items()}
UNIFORM_ENTROPY = 0.95  # entropy from which on attention counts as nearly uniform
_MAX_NAMED = 8  # heads named in a sentence
_TAIL = 0.025  # either tail of a 95 % interval
SideKind = tuple[str, str]  # side and kind
Row = TypeVar("Row")


def top_row(rows: Iterable[Row], name: str) -> tuple[Row, float] | None:
    """The row with the largest known value of a field and the value (the first of a tie); None if none is known."""
    known = [(row, value) for row in rows if (value := getattr(row, name)) is not None]
    return max(known, key=lambda pair: pair[1], default=None)


@dataclass(frozen=True)
class HeadNames:
    """Names of layers and heads, with side and kind where a model has more than one."""

    side_kinds: tuple[SideKind, ...]  # sides and kinds, in the order of the forward pass

    @classmethod
    def of_audits(cls, *audits: Audit) -> HeadNames:
        """Names that are unique over all layers of these audits."""
        return cls(tuple(dict.fromkeys((layer.side, layer.kind) for audit in audits for layer in audit.layers)))

    def prefix(self, row: HeadRecord | LayerRecord) -> str:
        """Side and kind followed by a space; empty if the model has only one."""
        return "" if len(self.side_kinds) == 1 else f"{row.side} " if row.kind == "self" else f"{row.side} {row.kind} "

    def layer(self, row: HeadRecord | LayerRecord) -> str:
        """For sentences: layer 2, decoder cross layer 2."""
        return f"{self.prefix(row)}layer {row.layer + 1}"

    def head(self, head: HeadRecord) -> str:
        """For sentences: layer 2 head 5."""
        return f"{self.layer(head)} head {head.head + 1}"

    def short_layer(self, row: HeadRecord | LayerRecord) -> str:
        """For plots: L2."""
        return f"{self.prefix(row)}L{row.layer + 1}"

    def short(self, head: HeadRecord) -> str:
        """For plots: L2 H5."""
        return f"{self.short_layer(head)} H{head.head + 1}"


def side_kind_title(side_kind: SideKind) -> str:
    """A side and a kind as a heading."""
    return f"{side_kind[0].capitalize()}, {side_kind[1]}-attention"


def layer_spans(names: HeadNames, layers: Iterable[LayerRecord]) -> str:
    """A list of layers with ranges, such as layers 1–4, 6; with side and kind where there are several."""
    by_name: dict[str, list[int]] = {}
    for layer in layers:
        by_name.setdefault(names.layer(layer).removesuffix(f" {layer.layer + 1}"), []).append(layer.layer + 1)
    return join_list(
        f"{word}{'s' if len(indices) > 1 else ''} {format_ranges(indices)}" for word, indices in by_name.items()
    )


def input_text(audit: Audit) -> str:
    """The audited input: sequences, tokens, and where they came from."""
    keys = ("sequences", "tokens", "lengths", "text", "changes")
    sequences, tokens, lengths, text, changes = map(audit.about.get, keys)
    length_text = f"{min(lengths)} to {tokens}" if lengths else f"{tokens}"
    size = "size not recorded" if None in (sequences, tokens) else f"{sequences} × {length_text} tokens"
    changed = f"; changed: {'; '.join(changes)}" if changes else ""
    return f"{size} ({text or 'source not recorded'}){changed}"


def is_within_tolerance(layer: LayerRecord) -> bool:
    """Whether the differences of an attention call are within the tolerance."""
    return layer.used <= 1 if layer.used is not None else max(layer.weights or 0.0, layer.outputs) <= layer.tolerance


def is_proved(audit: Audit) -> bool:
    """Whether those of every attention call are."""
    return all(map(is_within_tolerance, audit.layers))


def largest_difference(audit: Audit) -> Number:
    """The largest difference of weights and outputs over all attention calls; None without calls."""
    differences = [value for layer in audit.layers for value in (layer.weights, layer.outputs) if value is not None]
    return max(differences, default=None)


def proof_text(audit: Audit) -> str:
    """The largest differences over all attention calls, the tolerance, and the logits it follows from."""
    errors = [layer.weights for layer in audit.layers if layer.weights is not None]
    measured = [layer for layer in audit.layers if layer.used is not None and layer.logit is not None]
    calls, limits = len(audit.layers), sorted({layer.tolerance for layer in audit.layers})
    weights = "The model does not expose attention weights."
    if errors:
        note = "" if len(errors) == calls else f", in the {len(errors)} calls that expose them"
        weights = f"Recomputed attention weights differ from the model’s own by at most {to_sci(max(errors))}{note}."
    allowed = to_sci(limits[0]) if len(limits) == 1 else f"{to_sci(limits[0])} to {to_sci(limits[-1])}"
    rounding = f"Tolerance: {allowed}."
    if measured:
        top = max(measured, key=lambda layer: layer.logit or 0.0)
        rounding = (
            f"The largest attention logit is {fmt_logit(top.logit)} (layer {top.layer + 1}); there, rounding explains "
            f"weight differences up to {to_sci(top.tolerance)}. All differences are at most "
            f"{100 * max(layer.used or 0.0 for layer in measured):.0f}% of what rounding explains."
        )
    if coarse := [layer for layer in measured if layer.undecided]:
        coarsest = max(coarse, key=lambda layer: layer.undecided or 0.0)
        rounding += (
            f" In {len(coarse)} layers, this precision cannot resolve some weights (layer {coarsest.layer + 1}: "
            f"{100 * (coarsest.undecided or 0.0):.0f}% of the queries). Use float32 (--dtype float32) for them."
        )
    return (
        f"{weights} Head outputs differ by at most {to_sci(max(layer.outputs for layer in audit.layers))}, relative to "
        f"the largest of a layer ({plural(calls, 'attention call')}). {rounding} The captured forward "
        f"pass differs from a plain one by {to_sci(audit.max_difference)} of the largest output."
    )


def fmt_logit(value: Number) -> str:
    """A logit, such as 12,860 or 4.31; a dash if unknown."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def action(audit: Audit) -> str:
    """The intervention on a head, as in: ablating it adds to the loss."""
    return _TEXTS["doing"].get(audit.method or "", "ablating")


def effect_definition(audit: Audit) -> str:
    """The definition of an effect."""
    return _TEXTS["units"][audit.effect or "loss"].format(action(audit), "layer" if audit.method == "bands" else "head")


def effects_text(audit: Audit) -> str:
    """The definition of the effects, how they were measured, and the intact model's loss."""
    if audit.effect is None:
        note = audit.about.get("no_effects")
        return "Ablation effects were not measured." if note is None else f"Ablation effects are not available. {note}"
    method = _TEXTS["done"].get(audit.method or "", "Heads were ablated")
    base = (
        "" if audit.baseline is None else f" The loss of the intact model is {fmt(audit.baseline, 3)} nats per token."
    )
    check = "" if audit.check is None else f" {audit.check.summary}"
    race = f" {audit.about['race']}" if "race" in audit.about else ""
    return f"{method}. An effect is the {effect_definition(audit)}.{base}{check}{race}"


def unknown_layers(audit: Audit) -> list[tuple[str, str]]:
    """Layers with unknown shares, grouped by the reason."""
    names, reasons = HeadNames.of_audits(audit), {}
    for layer in audit.layers:
        if layer.unknown:
            reasons.setdefault(layer.unknown.removeprefix(f"{layer.module}: "), []).append(layer)
    return [(layer_spans(names, layers), reason) for reason, layers in reasons.items()]


def finding_sentences(audit: Audit) -> list[str]:
    """The main findings in a few sentences; unknown values are left out."""
    names = HeadNames.of_audits(audit)
    patterns = [text for column in PATTERNS if (text := _pattern_line(audit, names, column))]
    return [*_effect_lines(audit, names), *patterns, *_logit_lines(audit, names), *_deposit_lines(audit, names)]


def intervals_over(audit: Audit) -> str:
    """What the intervals of effects are taken over."""
    return str(audit.about.get("intervals") or "over sequences")


def interval_text(audit: Audit, head: HeadRecord | BandRecord) -> str:
    """The interval of an effect, in brackets; empty if there is none."""
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f" ({sig_figs(head.effect_low)} to {sig_figs(head.effect_high)} {intervals_over(audit)})"


def harmful_heads(audit: Audit) -> list[HeadRecord]:
    """Heads whose effect on the loss is significantly negative, the most negative first."""
    heads = [head for head in audit.heads if head.effect_high is not None and head.effect_high < 0]
    return sorted(heads, key=lambda head: head.effect or 0.0) if audit.effect == "loss" else []


def _effect_lines(audit: Audit, names: HeadNames) -> Iterator[str]:
    """The most important head and frequency band, and harmful heads."""
    verb, states = action(audit), audit.effect == "states"
    top, top_band, heads = top_row(audit.heads, "effect"), top_row(audit.bands, "effect"), harmful_heads(audit)
    if top is not None and audit.effect is not None:
        name, size, ends = names.head(top[0]), sig_figs(top[1]), interval_text(audit, top[0])
        change = f"adds {size} nats per token to the loss"
        if states:
            change = f"moves the last hidden states by {size} of their variance over tokens"
        if states or top[1] > 0:
            yield f"The most important head is {name}: {verb} it {change}{ends}."
        else:
            yield f"No head has a positive effect on the loss; the largest effect is {size}, for {name}{ends}."
    if top_band is not None and top_band[1] <= 0:
        yield "Freezing a frequency band makes the model worse in no layer."
    elif top_band is not None:
        band, size = top_band[0], sig_figs(top_band[1])
        change = f"moves the last hidden states by {size} of their variance"
        yield (
            f"The most important frequency band is pairs {band.first + 1} to {band.last + 1} of "
            f"{names.layer(audit.layer_of(band))} ({sig_figs(band.slowest)} to {sig_figs(band.fastest)} rad per "
            f"position): freezing it in all heads {change if states else f'adds {size} nats per token to the loss'}"
            f"{interval_text(audit, band)}."
        )
    if heads:
        known = sum(head.effect_high is not None for head in audit.heads)
        yield (
            f"Heads with a significantly negative effect ({verb} the head lowers the loss): {_head_str(names, heads)}; "
            f"largest for {names.head(heads[0])} ({sig_figs(heads[0].effect)} nats per token). "
            f"By chance alone we would expect about {_TAIL * known:.0f} of {known} such heads."
        )


def _head_str(names: HeadNames, heads: list[HeadRecord]) -> str:
    """The heads by their short names; of many, the first ones and the number of all."""
    shown = ", ".join(names.short(head) for head in heads[:_MAX_NAMED])
    return shown if len(heads) <= _MAX_NAMED else f"{shown}, … ({len(heads)} heads)"


def _pattern_line(audit: Audit, names: HeadNames, column: str) -> str:
    """The heads of one attention pattern, the strongest first; if there is none, the one that is closest to it."""
    closest = top_row(audit.heads, column)
    if closest is None:
        return ""
    title, target = PATTERNS[column]
    heads = [head for head in audit.heads if (getattr(head, column) or 0.0) > PATTERN_SHARE]
    named = _head_str(names, sorted(heads, key=lambda head: -getattr(head, column)))
    none = f"none. The highest share is {fmt(closest[1], 2)} ({names.short(closest[0])})"
    return f"{title} (over {PATTERN_SHARE:g} of the attention {target}): {named if heads else none}."


def _logit_lines(audit: Audit, names: HeadNames) -> Iterator[str]:
    """What the heads' logits depend on: position, distance, and an offset bias."""
    positional, symbolic = top_row(audit.heads, "positional"), top_row(audit.heads, "symbolic")
    decays = [head.decay for head in audit.heads if head.decay is not None]
    fitted = [decay for decay in decays if decay.is_good_fit]
    kernels = [head.kernel for head in audit.heads if head.kernel is not None]
    if positional is not None:
        symbolic_text = ""
        if symbolic is not None:
            symbolic_text = f" The most symbolic head is {names.head(symbolic[0])} ({fmt(symbolic[1], 2)})."
        share = f"{fmt(positional[1], 2)} of the variance of its logits"
        yield f"The most positional head is {names.head(positional[0])} ({share}).{symbolic_text}"
    if fitted:
        forms = join_list(f"{form} ({count})" for form, count in Counter(decay.form for decay in fitted).most_common())
        halves = [decay.half_distance for decay in fitted if decay.half_distance is not None]
        half = f" Median half distance: {fmt(median(halves), 1)} tokens." if halves else ""
        yield (
            f"For {len(fitted)} of {len(decays)} heads, a fitted decay or growth curve explains at least half of the "
            f"variation of the mean logit with distance: {forms}.{half}"
        )
    if kernels:
        low, high = sig_figs(min(k.lowest for k in kernels)), sig_figs(max(k.highest for k in kernels))
        symbols = sig_figs(min(k.symbol_low for k in kernels)), sig_figs(max(k.symbol_high for k in kernels))
        yield (
            f"The offset biases, as Toeplitz matrices of {max(k.size for k in kernels)} tokens, have eigenvalues from "
            f"{low} to {high}; their symbols range from {symbols[0]} to {symbols[1]}."
        )


def _deposit_lines(audit: Audit, names: HeadNames) -> Iterator[str]:
    """The layer whose effects are most concentrated."""
    known = [layer for layer in audit.layers if layer.deposit.get("top_share")]
    if known:
        layer = max(known, key=lambda candidate: candidate.deposit["top_share"] or 0.0)
        top = top_head(audit, layer)
        yield (
            f"The most concentrated deposit is in {names.layer(layer)}: "
            f"{f'head {top.head + 1}' if top else 'one head'} holds "
            f"{100 * (layer.deposit['top_share'] or 0):.0f}% of the sum of positive effects "
            f"({fmt(layer.deposit.get('effective_heads'), 1)} effective heads of {layer.heads})."
        )


def top_head(audit: Audit, layer: LayerRecord) -> HeadRecord | None:
    """The head of a layer with the largest effect."""
    top = top_row(audit.heads_of(layer), "effect")
    return None if top is None else top[0]


def model_name(audit: Audit) -> str:
    """The model's name."""
    return str(audit.about.get("model") or "unnamed model")
