"""The plane of positional and symbolic shares: every head of an audited model."""

from __future__ import annotations

from collections.abc import Sequence

from plotly.colors import sample_colorscale

from toeplens.report.kit.blocks import Block, Group, Panel, Sign, View
from toeplens.report.kit.plane import Look, triangle
from toeplens.studies.auditing.audit import Audit
from toeplens.studies.auditing.record import HeadRecord
from toeplens.studies.auditing.sheets import digits_of, values_of
from toeplens.studies.auditing.words import PATTERN, Names, place_title, told

DEPTHS = ("#2f6fe0", "#c8479f", "#de7a00")  # from the first to the last layer; readable on white and on near-black
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
    views = [View("", [Group("", [_panel(audit, names, known, places)])])] if known else []
    return Block("plane", "Positional, symbolic, or both at once", caption, views, legend=signs[len(places) < 2 :])


def tints(audit: Audit, heads: Sequence[HeadRecord]) -> list[str]:
    """Each head's colour, by its layer among those of its side and kind."""
    last = {
        place: max(one.layer for one in audit.layers if (one.side, one.kind) == place)
        for place in Names.of(audit).places
    }
    depths = [head.layer / max(1, last[head.side, head.kind]) for head in heads]
    return [str(colour) for colour in sample_colorscale(list(DEPTHS), depths)] if depths else []


def _panel(audit: Audit, names: Names, known: list[HeadRecord], places: list[tuple[str, str]]) -> Panel:
    canvas, digits = triangle(), digits_of("effect", values_of(audit))
    largest = max((head.effect or 0 for head in audit.heads), default=0)
    for i, place in enumerate(places):
        heads = [head for head in known if (head.side, head.kind) == place]
        sizes = [max(0.0, head.effect or 0) / largest if largest > 0 else _PLAIN for head in heads]
        look = Look(f"place-{i}", place_title(place), "", *_MARKERS[i % len(_MARKERS)])
        canvas.add(
            "scatter",
            x=[_rounded(head.positional) for head in heads],
            y=[_rounded(head.symbolic) for head in heads],
            mode="markers",
            marker=look.heads(sizes) | {"color": tints(audit, heads)},
            customdata=[[names.short(head), told(head.interaction), _effect(audit, head, digits)] for head in heads],
            hovertemplate="%{customdata[0]}<br>positional %{x:.3f}, symbolic %{y:.3f}, "
            "interaction %{customdata[1]}%{customdata[2]}<extra></extra>",
            meta=look.key,
        )
    for axis, share in ((canvas.x, "positional"), (canvas.y, "symbolic")):
        found = [getattr(head, share) for head in known]
        axis(f"{share} share", range=[min(-0.1, min(found) - _ROOM), max(1.06, max(found) + _ROOM)])
    counts = ", ".join(f"{sum(getattr(head, share) > PATTERN for head in known)} {share}" for share in _SHARES)
    return Panel("Each head", canvas.figure(), f"Of {len(known)} heads with known shares, over half: {counts}.")


def _rounded(value: float | None) -> float:
    return round(float(value or 0.0), 4)


def _effect(audit: Audit, head: HeadRecord, digits: int) -> str:
    return "" if audit.effect is None else f"<br>effect {told(head.effect, digits)}"
