"""The marks of an audit, one a head: on the plane of positional and symbolic shares, and by its effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly.colors import sample_colorscale

from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.canvas import Canvas, Look, triangle
from toeplens.report.kit.colours import DEPTHS, GUESS
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import HeadRecord
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
_ROOM = 0.06  # beyond shares outside of the triangle
_PLAIN = 0.04  # size of marks without effects, as a share of the largest's effect


def plane(audit: Audit) -> Block:
    """A mark a head, by its shares; none where no head's are known."""
    names = Names.of(audit)
    known = [head for head in audit.heads if None not in (head.positional, head.symbolic, head.interaction)]
    places = [place for place in names.places if any((one.side, one.kind) == place for one in known)]
    signs = [
        Sign(f"place-{i}", place_title(place), "", _MARKERS[i % len(_MARKERS)][1]) for i, place in enumerate(places)
    ]
    sized = "The larger the mark, the larger the head’s effect. " if audit.effect else ""
    caption = (
        "How much of the variance of a head’s logits is a matter of where the keys are (positional), of what they are "
        "(symbolic), and of the two working together (interaction); the three add up to 1, and a head’s distance "
        f"from the slanted side is its interaction. {sized}Colours go from the first layer (blue) to the last (orange)."
        f"{' Press an entry to hide or show it.' if len(places) > 1 else ''}"
    )
    views = [View.of([_plane_panel(audit, names, known, places)])] if known else []
    return Block("plane", "Positional, symbolic, or both at once", caption, views, legend=signs[len(places) < 2 :])


def tints(audit: Audit, heads: Sequence[HeadRecord]) -> list[str]:
    """Each head's colour, by its layer among those of its side and kind."""
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
    text = f"Of {len(telling)} heads with known shares, over half: {counts}."
    if len(telling) < len(known):
        text += (
            f" {len(known) - len(telling)} more attend to all keys nearly alike (entropy {UNIFORM:g} or more): their "
            "shares are of logits that hardly vary."
        )
    return Panel("Each head", canvas.figure(), text)


# ---- effects ---------------------------------------------------------------------------------------------------------

_BARS = 400  # heads up to which intervals are drawn
_WIDE = 0.36  # of a layer's heads to either side of it
_AXES = {"loss": "effect on the loss, nats a token", "states": "effect on the last states"}


def layer_effects(audit: Audit) -> Block:
    """A mark a head over its layer, with its interval; none without effects."""
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
    less = "the one head" if below == 1 else f"the {below} heads"
    better = f" Without {less} whose interval is below zero the model does better here."
    if audit.method == "position":
        better = f" Without the position of {less} whose interval is below zero the model does better here."
    caption = (
        "A mark is a head, over its layer, in the order of heads from left to right. An effect is the "
        f"{unit(audit)}.{f' Thin lines are intervals {over(audit)}.' if bars else ''}"
        f"{better if below else ''}"
    )
    views = [View("", groups)] if groups and audit.effect else []
    return Block("effects", f"What {done(audit)} a head does", caption, views, "full")


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
    counted = f"{len(heads)} heads in {len(layers)} layers"
    words = f"{counted}; the largest effect is {significant(top.effect)}, of {names.head(top)}."
    return Panel("Effect of each head, by layer", canvas.figure(), words)


def _reach(head: HeadRecord, end: str) -> float:
    other = getattr(head, end)
    return 0.0 if other is None or head.effect is None else float(f"{max(0.0, abs(other - head.effect)):.6g}")


def interval_told(head: HeadRecord, digits: int) -> str:
    """The interval of a head's effect; empty where there is none."""
    if head.effect_low is None or head.effect_high is None:
        return ""
    return f"{told(head.effect_low, digits)} to {told(head.effect_high, digits)}"
