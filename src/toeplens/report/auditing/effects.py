"""What silencing each head does, layer by layer, and how concentrated a layer's effects are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toeplens.report.auditing.plane import tints
from toeplens.report.kit.blocks import Block, Group, Panel, View
from toeplens.report.kit.canvas import GUESS, Canvas
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import HeadRecord
from toeplens.studies.auditing.sheets import digits_of, values_of
from toeplens.studies.auditing.words import UNITS, Names, harmful, over, place_title, significant, told, top_head

_BARS = 400  # heads up to which intervals are drawn
_WIDE = 0.36  # of a layer's heads to either side of it
_AXES = {"loss": "effect on the loss, nats a token", "states": "effect on the last states"}


@dataclass(frozen=True)
class DepositRow:
    """A layer's line in the table of deposits, as words."""

    layer: str
    helps: str
    harms: str
    top: str
    effect: str
    interval: str
    share: str
    effective: str
    gini: str
    lead: str


def layer_effects(audit: Audit) -> Block:
    """A mark a head over its layer, with its interval; none without effects."""
    names = Names.of(audit)
    measured = [head for head in audit.heads if head.effect is not None]
    groups = []
    for place in names.places:
        if heads := [head for head in measured if (head.side, head.kind) == place]:
            groups.append(Group(place_title(place) if len(names.places) > 1 else "", [_panel(audit, names, heads)]))
    bars = any(head.effect_low is not None for head in measured) and len(measured) <= _BARS
    below = len(harmful(audit))
    less = "the one head" if below == 1 else f"the {below} heads"
    caption = (
        "A mark is a head, over its layer, in the order of heads from left to right. An effect is the "
        f"{UNITS[audit.effect or 'loss']}.{f' Thin lines are intervals {over(audit)}.' if bars else ''}"
        f"{f' Without {less} whose interval is below zero the model does better here.' if below else ''}"
    )
    views = [View("", groups)] if groups and audit.effect else []
    return Block("effects", "What silencing a head does", caption, views, "full")


def _panel(audit: Audit, names: Names, heads: list[HeadRecord]) -> Panel:
    canvas = Canvas(300, left=64)
    layers = [one for one in audit.layers if (one.side, one.kind) == (heads[0].side, heads[0].kind)]
    counts = {one.layer: max(one.heads, 1) for one in layers}
    digits = digits_of("effect", values_of(audit))
    lines: dict[str, Any] = {}
    if len(audit.heads) <= _BARS and any(head.effect_low is not None for head in heads):
        up, down = ([_reach(head, way) for head in heads] for way in ("effect_high", "effect_low"))
        lines = {
            "error_y": {"array": up, "arrayminus": down, "symmetric": False, "color": GUESS, "width": 0, "thickness": 1}
        }
    canvas.add(
        "scatter",
        x=[round(head.layer + 1 + _WIDE * (2 * (head.head + 0.5) / counts[head.layer] - 1), 4) for head in heads],
        y=[float(f"{head.effect or 0:.6g}") for head in heads],
        mode="markers",
        marker={"color": tints(audit, heads), "size": 6 if len(heads) <= _BARS else 4},
        customdata=[f"{names.short(head)}: {told(head.effect, digits)}{_between(head, digits)}" for head in heads],
        hovertemplate="%{customdata}<extra></extra>",
        **lines,
    )
    canvas.line_at(0, dash="solid")
    first, last = min(counts) + 1, max(counts) + 1
    step = max(1, -(-last // 16))
    canvas.x("layer", showgrid=False, range=[first - 0.6, last + 0.6], dtick=step, tick0=1)
    canvas.y(_AXES[audit.effect or "loss"], exponentformat="power")
    top = max(heads, key=lambda head: head.effect or 0)
    counted = f"{len(heads)} heads in {len(layers)} layers"
    words = f"{counted}; the largest effect is {significant(top.effect)}, of {names.head(top)}."
    return Panel("Effect of each head, by layer", canvas.figure(), words)


def _reach(head: HeadRecord, end: str) -> float:
    other = getattr(head, end)
    return 0.0 if other is None or head.effect is None else float(f"{max(0.0, abs(other - head.effect)):.6g}")


def _between(head: HeadRecord, digits: int) -> str:
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f" ({told(head.effect_low, digits)} to {told(head.effect_high, digits)})"


def deposit_rows(audit: Audit) -> list[DepositRow]:
    """The layers with a deposit, in the order of the pass."""
    names, made = Names.of(audit), []
    digits = digits_of("effect", values_of(audit))
    for layer in audit.layers:
        if not layer.deposit:
            continue
        found = layer.deposit
        top = None if found.get("top_share") is None else top_head(audit, layer)
        share = found.get("top_share")
        title = names.layer(layer)
        made.append(
            DepositRow(
                layer=f"{title[:1].upper()}{title[1:]}",
                helps=told(found.get("helps"), digits),
                harms=told(found.get("harms"), digits),
                top="–" if top is None else f"head {top.head + 1}",
                effect="–" if top is None else told(top.effect, digits),
                interval="" if top is None else _between(top, digits).strip(" ()"),
                share="–" if share is None else f"{100 * share:.1f}%",
                effective=f"{told(found.get('effective_heads'), 1)} of {layer.heads}",
                gini=told(found.get("gini"), 2),
                lead=told(found.get("lead"), digits),
            )
        )
    return made
