"""Scatter plots of an audit, one mark per head: positional and symbolic shares, and effects by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly.colors import sample_colorscale

from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, Look, triangle
from toeplens.report.kit.colours import DEPTHS, GUESS
from toeplens.studies.auditing.record import HeadRecord
from toeplens.studies.auditing.result import Audit
from toeplens.studies.auditing.sheets import digits_of, values_of
from toeplens.studies.auditing.words import (
    PATTERN,
    UNIFORM,
    Names,
    done,
    harmful,
    over,
    place_title,
    significant,
    told,
    unit,
)

_MARKERS = (("circle", "●"), ("square", "■"), ("diamond", "◆"), ("triangle-up", "▲"))
_SHARES = ("positional", "symbolic", "interaction")
_ROOM = 0.06  # margin beyond shares outside the triangle
_PLAIN = 0.04  # size of marks without effects, relative to the largest


def plane(audit: Audit) -> Block:
    """One mark per head, by its shares; empty if none are known."""
    names = Names.of(audit)
    known = [head for head in audit.heads if None not in (head.positional, head.symbolic, head.interaction)]
    places = [place for place in names.places if any((one.side, one.kind) == place for one in known)]
    signs = [
        Sign(f"place-{i}", place_title(place), "", _MARKERS[i % len(_MARKERS)][1]) for i, place in enumerate(places)
    ]
    sized = " Larger marks have larger effects." if audit.effect else ""
    caption = (
        "Shares of the variance of a head’s logits that are explained by the position of keys (positional), by their "
        "content (symbolic), and only by both together (interaction). The three add up to 1; the distance from the "
        "slanted side is the interaction. The shares describe logits, not function: heads of an untrained model "
        f"often look symbolic, too.{sized} Colour: first layer (blue) to last layer (orange)."
        f"{' Click a legend entry to hide or show it.' if len(places) > 1 else ''}"
    )
    views = [View.of([_plane_panel(audit, names, known, places)])] if known else []
    return Block(
        "plane", "Positional and symbolic shares of each head", caption, views, legend=signs[len(places) < 2 :]
    )


def tints(audit: Audit, heads: Sequence[HeadRecord]) -> list[str]:
    """Each head's colour, by its layer among the layers of its side and kind."""
    last = {
        place: max(one.layer for one in audit.layers if (one.side, one.kind) == place)
        for place in Names.of(audit).places
    }
    depths = [head.layer / max(1, last[head.side, head.kind]) for head in heads]
    return [str(colour) for colour in sample_colorscale(list(DEPTHS), depths)] if depths else []


def _plane_panel(audit: Audit, names: Names, known: list[HeadRecord], places: list[tuple[str, str]]) -> Panel:
    canvas, digits = triangle(), digits_of("effect", values_of(audit))
    largest = max((head.effect or 0 for head in audit.heads), default=0)
    for i, place in enumerate(places):
        heads = [head for head in known if (head.side, head.kind) == place]
        sizes = [max(0.0, head.effect or 0) / largest if largest > 0 else _PLAIN for head in heads]
        look = Look(f"place-{i}", place_title(place), "", *_MARKERS[i % len(_MARKERS)])
        canvas.marks(
            [round(head.positional or 0.0, 4) for head in heads],
            [round(head.symbolic or 0.0, 4) for head in heads],
            look.heads(sizes) | {"color": tints(audit, heads)},
            "%{customdata[0]}<br>positional %{x:.3f}, symbolic %{y:.3f}, "
            "interaction %{customdata[1]}%{customdata[2]}<extra></extra>",
            customdata=[
                [
                    names.short(head),
                    told(head.interaction),
                    f"<br>effect {told(head.effect, digits)}" * bool(audit.effect),
                ]
                for head in heads
            ],
            meta=look.key,
        )
    for axis, share in ((canvas.x, "positional"), (canvas.y, "symbolic")):
        found = [getattr(head, share) for head in known]
        axis(f"{share} share", range=[min(-0.1, min(found) - _ROOM), max(1.06, max(found) + _ROOM)])
    telling = [head for head in known if head.entropy is None or head.entropy < UNIFORM]
    counts = ", ".join(f"{sum(getattr(head, share) > PATTERN for head in telling)} {share}" for share in _SHARES)
    text = f"Heads with a share over {PATTERN:g}: {counts} (of {len(telling)})."
    if len(telling) < len(known):
        text += (
            f" Not counted: {len(known) - len(telling)} heads with nearly uniform attention (entropy {UNIFORM:g} or "
            "more), whose logits hardly vary."
        )
    return Panel("Each head", canvas.figure(), text)


# ---- effects ---------------------------------------------------------------------------------------------------------

_BARS = 400  # up to this many heads, intervals are drawn
_WIDE = 0.36  # half the width over which a layer's heads are spread
_AXES = {"loss": "effect on the loss (nats per token)", "states": "effect on the last hidden states"}


def layer_effects(audit: Audit) -> Block:
    """One mark per head above its layer, with its interval; empty without effects."""
    names = Names.of(audit)
    measured = [head for head in audit.heads if head.effect is not None]
    by_place = [(place, [head for head in measured if (head.side, head.kind) == place]) for place in names.places]
    groups = [
        Group(place_title(place) if len(names.places) > 1 else "", [_effects_panel(audit, names, heads)])
        for place, heads in by_place
        if heads
    ]
    bars = any(head.effect_low is not None for head in measured) and len(measured) <= _BARS
    below = len(harmful(audit))
    caption = (
        f"One mark per head, above its layer, heads from left to right. An effect is the {unit(audit)}."
        f"{f' Thin lines: 95% intervals {over(audit)}.' if bars else ''}"
        f"{f' Heads whose interval lies below zero: {below}.' if below else ''}"
    )
    views = [View("", groups)] if groups and audit.effect else []
    return Block("effects", f"Effect of {done(audit)} each head", caption, views, "full")


def _effects_panel(audit: Audit, names: Names, heads: list[HeadRecord]) -> Panel:
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
    between = [f" ({interval})" if (interval := interval_told(head, digits)) else "" for head in heads]
    canvas.marks(
        [round(head.layer + 1 + _WIDE * (2 * (head.head + 0.5) / counts[head.layer] - 1), 4) for head in heads],
        [float(f"{head.effect or 0:.6g}") for head in heads],
        {"color": tints(audit, heads), "size": 6 if len(heads) <= _BARS else 4},
        [f"{names.short(h)}: {told(h.effect, digits)}{ends}" for h, ends in zip(heads, between, strict=True)],
        **lines,
    )
    canvas.line_at(0, dash="solid")
    first, last = min(counts) + 1, max(counts) + 1
    step = max(1, -(-last // 16))
    canvas.x("layer", showgrid=False, range=[first - 0.6, last + 0.6], dtick=step, tick0=1)
    canvas.y(_AXES[audit.effect or "loss"], exponentformat="power")
    top = max(heads, key=lambda head: head.effect or 0)
    words = f"Largest effect: {significant(top.effect)}, for {names.head(top)}."
    return Panel("Effect of each head, by layer", canvas.figure(), words)


def _reach(head: HeadRecord, end: str) -> float:
    other = getattr(head, end)
    return 0.0 if other is None or head.effect is None else float(f"{max(0.0, abs(other - head.effect)):.6g}")


def interval_told(head: HeadRecord, digits: int) -> str:
    """The interval of a head's effect; empty if there is none."""
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f"{told(head.effect_low, digits)} to {told(head.effect_high, digits)}"
