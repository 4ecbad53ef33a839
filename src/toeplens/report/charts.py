"""Charts as functions of tidy tables: one row per mark, one column per fact. They are Altair charts.

A page, a notebook and a paper show the same chart: `fit_to_width` fits its width, and `describe` puts it into words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair

from toeplens.report.theme import Style, vega_config

Rows = Iterable[Mapping[str, Any]]
alt: Any = altair  # its stubs refuse channels from dictionaries
Chart = Any  # of Altair: a chart, layers, or several charts
PERCENT, SHARE = ".1%", ".2f"  # d3 formats of accuracies and of shares
_MAX_LABELLED = 16  # rows and columns up to which cells show their numbers


def chart_data(rows: Rows) -> Any:
    """The rows of a chart; values that are not finite are left out (drawn as gaps)."""
    return alt.Data(values=[{key: _json_number(value) for key, value in row.items()} for row in rows])


def _json_number(value: Any) -> Any:
    if hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    return (float(f"{value:.5g}") if math.isfinite(value) else None) if isinstance(value, float) else value


def nominal(field: str, values: Iterable[Any], title: str | None = None) -> dict[str, Any]:
    """Options of a categorical channel that keeps the order of ``values``."""
    return {"field": field, "type": "nominal", "title": title, "sort": list(dict.fromkeys(values))}


def numeric(field: str, title: str, **options: Any) -> dict[str, Any]:
    """Options of a channel of numbers; ``format`` is the d3 format of its axis."""
    scale = {name: options.pop(name) for name in ("domain", "zero", "clamp") if name in options}
    scale |= {"type": kind} if (kind := options.pop("kind", None)) else {}
    axis = {name: options.pop(name) for name in ("format", "values", "tickCount", "labels", "grid") if name in options}
    channel = {"field": field, "type": "quantitative", "title": title, **options}
    return channel | ({"scale": scale} if scale else {}) | ({"axis": axis} if axis else {})


def tooltip(**fields: str) -> list[Any]:
    """What a mark says when pointed at: title by field, with a d3 format after ``|`` (``"Accuracy|.1%"``)."""
    tips = []
    for field, text in fields.items():
        title, _, form = text.partition("|")
        kind = "quantitative" if form else "nominal"
        tips.append(alt.Tooltip(field=field, type=kind, title=title, **({"format": form} if form else {})))
    return tips


def color_shape(field: str, styles: Iterable[Style], *, shape: bool = True, title: str | None = None) -> dict[str, Any]:
    """The channels ``color`` and ``shape`` of a series named by its title, with one legend for both."""
    unique = list({style.title: style for style in styles}.values())
    order = [style.title for style in unique]
    legend = alt.Legend(title=title, **({} if shape else {"symbolType": "circle"})) if len(unique) > 1 else None
    common = {"field": field, "type": "nominal", "legend": legend}
    channels = {"color": alt.Color(**common, scale=alt.Scale(domain=order, range=[style.colour for style in unique]))}
    if shape:
        channels["shape"] = alt.Shape(**common, scale=alt.Scale(domain=order, range=[style.shape for style in unique]))
    return channels


def line_chart(
    rows: Rows,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    styles: Iterable[Style],
    *,
    points: bool = True,
    low: str = "",
    high: str = "",
    series: str = "series",
    tips: Sequence[Any] = (),
    levels: Mapping[str, float] | None = None,
) -> Chart:
    """Lines over a numeric axis, one per series, with a band from ``low`` to ``high`` if these columns are named.

    levels  horizontal reference lines: value by label
    """
    base = alt.Chart().encode(x=alt.X(**x), **color_shape(series, styles, shape=False))
    layers: list[Any] = [ref_lines(levels)] if levels else []
    if low:
        edges = {"y": alt.Y(field=low, type="quantitative"), "y2": alt.Y2(field=high)}
        layers.append(base.mark_area(opacity=0.15, point=False, clip=True).encode(**edges))
    tooltips = list(tips) or [
        alt.Tooltip(field=series, type="nominal"),
        *(alt.Tooltip(**_tooltip(axis)) for axis in (x, y)),
    ]
    line = base.mark_line(clip=True, point=points).encode(y=alt.Y(**y), tooltip=tooltips)
    return alt.layer(*layers, line.encode(**color_shape(series, styles)) if points else line, data=chart_data(rows))


def _tooltip(channel: Mapping[str, Any]) -> dict[str, Any]:
    return {"field": channel["field"], "type": channel["type"], "title": channel["title"]}


def interval_chart(
    rows: Rows,
    value: Mapping[str, Any],
    row: Mapping[str, Any],
    styles: Iterable[Style],
    *,
    series: str = "series",
    tips: Sequence[Any] = (),
    levels: Mapping[str, float] | None = None,
    pitch: int = 11,
) -> Chart:
    """Points with their intervals: a row per category (``row``: `nominal`), a mark per series (``value``: `numeric`).

    Arguments
        levels  vertical reference lines: value by label
        pitch   pixels per series
    """
    unique, values = list({style.title: style for style in styles}.values()), list(rows)
    offset = {"yOffset": alt.YOffset(**nominal(series, [item.title for item in unique]))} if len(unique) > 1 else {}
    base = alt.Chart().encode(y=alt.Y(**row), **color_shape(series, unique, shape=False), **offset)
    tooltips = list(tips) or [alt.Tooltip(**_tooltip(item)) for item in (row, value)]
    ends = {"x": alt.X(field="low", type="quantitative"), "x2": alt.X2(field="high")}
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(**ends)
    point = base.mark_point(**({"size": pitch**2} if pitch < 8 else {}))
    marks = point.encode(x=alt.X(**value), tooltip=tooltips, **color_shape(series, unique))
    chart = alt.layer(*([ref_lines(levels, vertical=True)] if levels else []), bars, marks, data=chart_data(values))
    return chart.properties(height=len({item[row["field"]] for item in values}) * max(22, pitch * len(unique)))


def ref_lines(levels: Mapping[str, float], *, vertical: bool = False) -> Chart:
    """Thin dashed lines at values, with their labels."""
    rows = alt.Chart(alt.Data(values=[{"level": value, "label": label} for label, value in levels.items()]))
    position = {("x" if vertical else "y"): alt.X("level:Q") if vertical else alt.Y("level:Q")}
    text = {"y": alt.value(0), "dy": -6} if vertical else {"x": alt.value("width"), "dy": -5, "align": "right"}
    anchor = {name: text.pop(name) for name in ("x", "y") if name in text}
    line = rows.mark_rule(strokeDash=[4, 3]).encode(**position)
    return alt.layer(line, rows.mark_text(fontSize=10, **text).encode(text="label:N", **position, **anchor))


def heatmap(
    rows: Rows,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    value: str,
    *,
    title: str,
    domain: tuple[float, float],
    tips: Sequence[Any],
    form: str = SHARE,
    size: int = 0,
    marks: str = "",
) -> Chart:
    """A map of numbers by row and column, such as heads by layer; unknown values stay empty.

    Arguments
        domain  ends of the colour scale: from 0 a scale of one colour, from below 0 one of two with 0 in the middle
        size    pixels per row (default: 22, less for many rows)
        marks   column of short texts in the cells (default: the values, if there are at most 16 rows and columns)
    """
    values = list(rows)
    count = len({row[y["field"]] for row in values})
    show_values = max(count, len({row[x["field"]] for row in values})) <= _MAX_LABELLED
    diverging = domain[0] < 0
    scale = alt.Scale(
        domain=list(domain), clamp=True, interpolate="rgb", range=alt.RangeEnum("diverging" if diverging else "ramp")
    )
    if diverging:
        scale.domainMid = 0
    legend = alt.Legend(title=title, format=form, gradientLength=180, gradientThickness=9, titleOrient="left")
    base = alt.Chart(chart_data(values)).encode(x=alt.X(**x), y=alt.Y(**y), tooltip=list(tips))
    colour = alt.Color(field=value, type="quantitative", title=title, scale=scale, legend=legend)
    layers: list[Any] = [base.mark_rect(stroke="transparent").encode(color=colour)]
    if marks:
        layers.append(base.mark_text(fontSize=10).encode(text=alt.Text(field=marks, type="nominal")))
    elif show_values:
        layers.append(base.mark_text(fontSize=10).encode(text=alt.Text(field=value, type="quantitative", format=form)))
    return alt.layer(*layers).properties(height=count * (size or max(6, min(22, 720 // max(1, count)))))


def share_plane(
    rows: Rows, styles: Iterable[Style], *, tips: Sequence[Any], series: str = "series", size: str = ""
) -> Chart:
    """Heads by positional and symbolic share (columns ``positional``, ``symbolic``); the rest is interaction.

    size  column with the effect of ablating the head
    """
    corners = [{"positional": a, "symbolic": b, "n": n} for n, (a, b) in enumerate([(0, 0), (1, 0), (0, 1), (0, 0)])]
    axes = {
        name: numeric(name, f"{name} share", domain=[0, 1.02], format=SHARE, tickCount=5)
        for name in ("positional", "symbolic")
    }
    x, y = alt.X(**axes["positional"]), alt.Y(**axes["symbolic"])
    frame = alt.Chart(alt.Data(values=corners)).mark_line(strokeWidth=1, color="#858b95")
    heads = alt.Chart().mark_point(opacity=0.6).encode(x=x, y=y, tooltip=list(tips), **color_shape(series, styles))
    if size:
        sizes = alt.Scale(type="sqrt", range=[12, 320], domainMin=0)
        heads = heads.encode(size=alt.Size(field=size, type="quantitative", scale=sizes, legend=None))
    return alt.layer(frame.encode(x=x, y=y, order="n:Q"), heads, data=chart_data(rows)).properties(height=360)


def facet_grid(chart: Chart, field: str, order: Iterable[str], *, columns: int = 3, free: Sequence[str] = ()) -> Chart:
    """Small multiples: one panel for each value of ``field``, with common axes except those in ``free``."""
    facet = alt.Facet(field=field, type="nominal", title=None, sort=list(dict.fromkeys(order)))
    panels = chart.facet(facet=facet, columns=columns).properties(
        usermeta={"axes": _y_axis_width(chart.to_dict(validate=False))}
    )
    return panels.resolve_scale(**dict.fromkeys(free, "independent")) if free else panels


CONCAT_KEYS = ("vconcat", "hconcat", "concat")  # keys of a specification of several charts
_AXIS_WIDTH, _MIN_PANEL = 62, 190  # pixels: an axis with its labels; smallest panel


def _y_axis_width(spec: Mapping[str, Any]) -> int:
    """Pixels for the vertical axis of small multiples, by the longest name on it."""
    unit, rows = _top_chart(spec, None)
    y = unit["encoding"].get("y", {}) if unit else {}
    longest = max((len(str(row[y["field"]])) for row in rows), default=0) if y.get("type") == "nominal" else 0
    return max(_AXIS_WIDTH, min(260, 30 + 6 * longest))


def fit_to_width(spec: Mapping[str, Any], width: float) -> dict[str, Any]:
    """A chart's specification for a total width in pixels. Panels go to as many columns as fit (also in page.js)."""
    result = dict(spec)
    if "spec" in result and "columns" in result:
        columns = max(1, min(result["columns"], int(width // (_MIN_PANEL + _AXIS_WIDTH / 2))))
        axes = result.get("usermeta", {}).get("axes", _AXIS_WIDTH)
        panel = max(_MIN_PANEL / 2, (width - axes) / columns - _AXIS_WIDTH / 2)
        return result | {"columns": columns, "spec": {**result["spec"], "width": round(panel)}}
    for key in CONCAT_KEYS:
        if key in result:
            share = width / len(result[key]) if key == "hconcat" else width
            return result | {key: [fit_to_width(part, share) for part in result[key]]}
    return result | {"width": round(width), "autosize": {"type": "fit-x", "contains": "padding"}}


def with_light_theme(chart: Any) -> Any:
    """A chart with the light theme on white, for notebooks and files."""
    return chart.configure(**vega_config() | {"background": "white"})


def describe(spec: Mapping[str, Any]) -> str:
    """A chart in words: for each of its series, where the smallest and the largest value are."""
    unit, rows = _top_chart(spec, None)
    if unit is None or not rows:
        return ""
    channels = {name: item for name, item in unit["encoding"].items() if isinstance(item, dict) and "field" in item}
    quantitative = [name for name, item in channels.items() if item.get("type") == "quantitative"]
    measure = next((name for name in ("color", "y", "x", "size") if name in quantitative), "")
    if not measure:
        return ""
    value = channels[measure]["field"]
    axes = [item["field"] for name, item in channels.items() if name in ("x", "y") and item["field"] != value]
    group = next((channels[name]["field"] for name in ("color", "shape") if name in channels and name != measure), None)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if isinstance(row.get(value), int | float) and not (group and row.get(group) is None):  # not a reference line
            groups.setdefault(str(row.get(group, "")) if group else "", []).append(row)
    texts = []
    for name, item in list(groups.items())[:12]:
        low, high = (pick(item, key=lambda row: row[value]) for pick in (min, max))
        ends = [f"{row[value]:.3g} ({', '.join(_text(row.get(field)) for field in axes)})" for row in (low, high)]
        texts.append((f"{name}: " if name else "") + (ends[0] if low is high else f"from {ends[0]} to {ends[1]}"))
    title = str(channels[measure].get("title") or value)
    more = f"; and {len(groups) - 12} more" if len(groups) > 12 else ""
    return f"{title}: {'; '.join(texts)}{more}."


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _top_chart(spec: Mapping[str, Any], rows: Any) -> tuple[Mapping[str, Any] | None, Any]:
    """The last single chart of a specification, which is on top, and its rows."""
    rows = spec.get("data", {}).get("values", rows)
    for key in ("layer", *CONCAT_KEYS):
        if key in spec:
            parts = spec[key] if key == "layer" else spec[key][:1]
            return next((chart for part in reversed(parts) if (chart := _top_chart(part, rows))[0]), (None, None))
    if "spec" in spec:
        return _top_chart(spec["spec"], rows)
    mark = spec.get("mark", {})
    kind = mark.get("type") if isinstance(mark, dict) else mark
    return (None, None) if kind in ("text", "rule") or "encoding" not in spec else (spec, rows)
