"""Charts of a reproduction: functions of its state that return an Altair chart, or None if there is nothing to draw.

Encodings are named by what the model has: the released code's "rope" adds a sinusoid, so it is RoPE + sinusoid here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from toeplens.engine.circuit import KEY_ROLES, QUERY_ROLES, Circuit
from toeplens.lens.ablation import PEAK_SHARE
from toeplens.lens.gradients import LEVELS, margins
from toeplens.model import Protocol
from toeplens.papers.deposit import measures as figures
from toeplens.papers.deposit.measures import PAPER_DROP, PAPER_TABLE_1, SwitchEffect, SwitchMeasure, peak_layer
from toeplens.papers.deposit.spec import (
    PARTIAL,
    SCALE_VARIANTS,
    SCALES,
    SWEEP_BASES,
    SWITCH_TITLES,
    SWITCHES,
    TITLES,
    EncodingLabel,
    title,
)
from toeplens.papers.deposit.study import Reproduction
from toeplens.report.charts import (
    alt,
    chart_data,
    color_shape,
    facet_grid,
    heatmap,
    interval_chart,
    line_chart,
    nominal,
    numeric,
    tooltip,
)
from toeplens.report.grid_data import seed_means
from toeplens.report.theme import COLOURS, Style, style
from toeplens.studies import CellResult
from toeplens.training.presets import COUNT, DISTANCE
from toeplens.utils.files import read_yaml

Chart = Any  # an Altair chart, or None if there is nothing to draw
Rows = list[dict[str, Any]]
ModelGroups = list[tuple[Protocol, str, list[CellResult]]]  # protocol, label, and models by seed

TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("page.yaml"))
TASKS: dict[str, str] = {DISTANCE: "Task 1 (distance)", COUNT: "Task 2 (count)"}
PROTOCOLS: dict[Protocol, str] = {"paper": "paper protocol", "released": "released protocol"}
_PROTOCOL_STYLES = [style("paper protocol", "rope"), style("released protocol", "mla")]
_PAPER_STYLE = Style("the paper’s number", COLOURS["red"], "diamond")
FAMILIES = ("rope", "rope-absolute", "mla", "absolute", "relative", "alibi", "random", "nope")
_ENCODING_STYLES = [style(TITLES[label], label) for label in FAMILIES]
_RELEASED_FAMILIES = {"rope": "rope-absolute", "rope-alone": "rope"}  # the released code's labels
_PERCENT_AXIS: dict[str, Any] = {"format": ".0%", "domain": [0, 1], "tickCount": 5}


def family(protocol: Protocol, label: str) -> str:
    """The encoding of a label, whatever the released code calls it."""
    return _RELEASED_FAMILIES.get(label, label) if protocol == "released" else label


def display_name(protocol: Protocol, label: str) -> str:
    """The display name of a label under a protocol."""
    parsed = EncodingLabel.parse(label)
    if parsed.is_plain:
        return TITLES[family(protocol, label)]
    sinusoid = protocol == "released" and parsed.base == "rope" and parsed.variant in {*SWITCHES, "dropout"} - {"input"}
    return title(label, protocol).replace("RoPE", TITLES["rope-absolute"] if sinusoid else "RoPE", 1)


def mark_style(protocol: Protocol, label: str) -> Style:
    """Title, colour and shape of a label; variants look like their encoding."""
    parsed = EncodingLabel.parse(label)
    heads = parsed.heads and max(count for count in (1, 2, 4, 8) if count <= parsed.heads)
    return style(display_name(protocol, label), f"{PARTIAL}-{heads}" if heads else family(protocol, parsed.base))


def sort_labels(protocol: Protocol, labels: Iterable[str]) -> list[str]:
    """Labels in the page's order; RoPE on some heads comes after the encodings, and variants after theirs."""

    def sort_key(label: str) -> tuple[int, int, str]:
        parsed, base = EncodingLabel.parse(label), family(protocol, EncodingLabel.parse(label).base)
        return FAMILIES.index(base) if base in FAMILIES else len(FAMILIES), parsed.heads or 0, label

    return sorted(set(labels), key=sort_key)


def has_ablation(cell: CellResult) -> bool:
    """Whether the heads of a finished model were ablated."""
    return cell.status == "complete" and cell.ablation is not None


def has_measure(measure: str) -> Callable[[CellResult], bool]:
    """Whether a model has a measure."""
    return lambda cell: cell.measure(measure) is not None


def model_groups(
    state: Reproduction,
    task: str = DISTANCE,
    keep: Callable[[CellResult], object] = lambda cell: cell.status == "complete",
    *,
    partial: bool = False,
) -> ModelGroups:
    """The models of a task by protocol and encoding, in the page's order: those to ``keep``, without variants.

    partial  whether RoPE on some heads is among them
    """
    groups: ModelGroups = []
    for protocol in state.plan.protocols:
        cells = [c for c in state.results.for_protocol(protocol).cells if c.key.task == task and keep(c)]
        for label in sort_labels(protocol, (cell.key.label for cell in cells)):
            if EncodingLabel.parse(label).is_plain or (partial and not EncodingLabel.parse(label).variant):
                groups.append((protocol, label, [cell for cell in cells if cell.key.label == label]))
    return groups


def groups_by_label(
    state: Reproduction, protocol: Protocol, labels: Iterable[str], task: str = DISTANCE
) -> ModelGroups:
    """The models of these labels."""
    results = state.results.for_protocol(protocol)
    return [(protocol, label, cells) for label in labels if (cells := results.cells_of(task, label))]


def filter_groups(groups: ModelGroups, keep: Callable[[CellResult], object]) -> ModelGroups:
    """The models to ``keep``."""
    return [(protocol, label, [cell for cell in cells if keep(cell)]) for protocol, label, cells in groups]


def mean_rows(
    groups: ModelGroups, value_of: Callable[[CellResult], float], *, full_range: bool = False, **columns: Any
) -> Rows:
    """A row per encoding: mean over seeds and its 95% interval (with one seed: the value); without undefined values.

    Arguments
        full_range  the range over seeds in place of the interval
        columns     further columns
    """
    rows = (
        {"protocol": PROTOCOLS[protocol], "encoding": display_name(protocol, label)}
        | columns
        | {"value": value_of(cell)}
        for protocol, label, cells in groups
        for cell in cells
    )
    return seed_means(rows, grain=None if full_range else 0.0)


def curve_rows(
    groups: ModelGroups,
    values_of: Callable[[CellResult], Any],
    axis: str = "layer",
    axis_values: Sequence[Any] = (),
    *,
    full_range: bool = False,
    **columns: Any,
) -> Rows:
    """`mean_rows` of each entry of a list that a model has, such as a number per layer.

    Arguments
        axis, axis_values  column of the entry's place, and its values (default: 1, 2, 3, ...)
    """
    lists = {cell.key: list(values_of(cell)) for _, _, cells in groups for cell in cells}
    rows: Rows = []
    for index in range(max(map(len, lists.values()), default=0)):
        entry = {key: float(values[index]) if index < len(values) else nan for key, values in lists.items()}
        row = {axis: axis_values[index] if axis_values else index + 1} | columns
        rows += mean_rows(groups, lambda cell, entry=entry: entry[cell.key], full_range=full_range, **row)
    return rows


def _interval_columns(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value} | ({"low": low, "high": high} if isfinite(low) else {"low": value, "high": value})


def _series_styles(rows: Rows) -> list[Style]:
    return [style(text, index=index) for index, text in enumerate(sorted({row["series"] for row in rows}))]


def _tooltips(rows: Rows, value: Mapping[str, Any]) -> list[Any]:
    form = ".1%" if "%" in str(value.get("axis", {}).get("format")) else ".3f"
    first = rows[0]
    labels = {key: key for key in first if isinstance(first[key], str | int) and key not in ("low", "high", "value")}
    return tooltip(**labels, value=f"{value['title']}|{form}", low=f"low|{form}", high=f"high|{form}")


def _facets(chart: Chart, rows: Rows, panel: str, columns: int) -> Chart:
    order = list(dict.fromkeys(row[panel] for row in rows))
    return facet_grid(chart, panel, order, columns=min(columns, len(order)))


def _dot_chart(
    rows: Rows,
    value: Mapping[str, Any],
    row: str,
    series: str,
    styles: Iterable[Style],
    panel: str = "",
    levels: Mapping[str, float] | None = None,
) -> Chart:
    """Means with their intervals: a row per value of ``row``, a mark per ``series``, small multiples by ``panel``."""
    if not rows:
        return None
    titles, axis = {item[series] for item in rows}, nominal(row, (item[row] for item in rows))
    used = [item for item in styles if item.title in titles]
    chart = interval_chart(rows, value, axis, used, series=series, tips=_tooltips(rows, value), levels=levels)
    chart = chart.properties(height=len({item[row] for item in rows}) * max(18, 8 * len(used)))
    return _facets(chart, rows, panel, 2) if panel else chart


def _line_chart(
    rows: Rows,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    series: str,
    styles: Iterable[Style],
    *,
    height: int = 120,
    columns: int = 4,
    panel: str = "panel",
    **options: Any,
) -> Chart:
    """Lines with bands, one per ``series``, in small multiples."""
    if not rows:
        return None
    titles = {item[series] for item in rows}
    bands = {"low": "low", "high": "high"} if "low" in rows[0] else {}
    options = {"points": False, "tips": _tooltips(rows, y)} | bands | options
    chart = line_chart(rows, x, y, [item for item in styles if item.title in titles], series=series, **options)
    return _facets(chart.properties(height=height), rows, panel, columns)


def _with_panels(rows: Rows) -> Rows:
    """The rows with a panel for each encoding and protocol."""
    return [{"panel": f"{row['encoding']}, {row['protocol'].removesuffix(' protocol')}", **row} for row in rows]


def accuracy_chart(state: Reproduction) -> Chart:
    """Test accuracy by encoding and task under each protocol, with the paper's Table 1 and the two baselines."""
    rows: Rows = []
    for task, text in TASKS.items():
        groups = model_groups(state, task)
        rows += mean_rows(groups, lambda cell: cell.accuracy, task=text)
        paper_values = {label: value / 100 for (key, label), value in PAPER_TABLE_1.items() if key == task and groups}
        columns = {"protocol": _PAPER_STYLE.title, "task": text}
        rows += [
            columns | {"encoding": TITLES[label]} | _interval_columns(share, share, share)
            for label, share in paper_values.items()
        ]
    rows.sort(key=_encoding_order)
    for text, key in (("Chance", "chance"), ("Length only", "length_chance")):
        for task, protocol in product(TASKS, state.plan.protocols):
            columns = {"protocol": PROTOCOLS[protocol], "encoding": text, "task": TASKS[task]}
            guess = baseline(state, task, protocol, key)
            rows += [] if guess is None else [columns | _interval_columns(guess, guess, guess)]
    value = numeric("value", "test accuracy", clamp=True, **_PERCENT_AXIS)
    return _dot_chart(rows, value, "encoding", "protocol", [*_PROTOCOL_STYLES, _PAPER_STYLE], "task")


def baseline(state: Reproduction, task: str, protocol: Protocol, which: str) -> float | None:
    """The ``chance`` or ``length_chance`` of most encodings; the released MLA code counts one more label."""
    rows = [row for row in state.table if (row.task, row.protocol) == (task, protocol)]
    return Counter(getattr(row, which) for row in rows).most_common(1)[0][0] if rows else None


def _encoding_order(row: Mapping[str, Any]) -> int:
    return [TITLES[label] for label in FAMILIES].index(row["encoding"])


def learning_chart(state: Reproduction, task: str) -> Chart:
    """Accuracy by epoch, mean over seeds with the range as a band; a model that stopped early keeps its last value."""
    rows: Rows = []
    for protocol, label, cells in model_groups(state, task, lambda cell: bool(cell.epochs)):
        shown = [cell for cell in cells if cell.status == "complete"] or cells
        epochs = max(([round(row["epoch"], 2) for row in cell.epochs] for cell in shown), key=len)
        for split in ("train", "test"):

            def curve(cell: CellResult, split: str = split, length: int = len(epochs)) -> list[float]:
                accuracies = [row.get(f"{split}_accuracy") for row in cell.epochs]
                values = [nan if value is None else float(value) for value in accuracies]
                return values + values[-1:] * (length - len(values)) if cell.status == "complete" else values

            panel = f"{split} accuracy, {PROTOCOLS[protocol]}"
            rows += curve_rows([(protocol, label, shown)], curve, "epoch", epochs, full_range=True, panel=panel)
    y = numeric("value", "accuracy", **_PERCENT_AXIS)
    return _line_chart(rows, numeric("epoch", "epoch"), y, "encoding", _ENCODING_STYLES, height=240, columns=2)


def accuracy_drops(cell: CellResult) -> np.ndarray:
    """[layers, heads] accuracy drops by ablating single heads."""
    assert cell.ablation is not None
    return cell.ablation.drops


def heads_by_layer_chart(state: Reproduction) -> Chart:
    """Accuracy drop of the two most important heads of each layer (the paper's Fig. 4), by encoding on Task 1."""
    groups = model_groups(state, DISTANCE, has_ablation)
    rows: Rows = []
    for rank, head in enumerate(("most important", "second most important"), start=1):
        rows += curve_rows(groups, lambda cell, n=rank: np.sort(accuracy_drops(cell))[:, -n:][:, :1].T[0], head=head)
        groups = filter_groups(groups, lambda cell: accuracy_drops(cell).shape[1] > 1)
    if not rows:
        return None
    if any(row["encoding"] == TITLES["rope"] for row in rows):
        columns = {"protocol": _PAPER_STYLE.title, "encoding": TITLES["rope"], "layer": 1, "head": "most important"}
        rows.append(columns | _interval_columns(PAPER_DROP, PAPER_DROP, PAPER_DROP))
    rows.sort(key=_encoding_order)
    series = [
        protocol_style
        for protocol_style in (*_PROTOCOL_STYLES, _PAPER_STYLE)
        if protocol_style.title in {row["protocol"] for row in rows}
    ]
    layer = nominal("layer", sorted({row["layer"] for row in rows}), "layer")
    base = alt.Chart().encode(x=alt.X(**layer), xOffset=alt.XOffset(**nominal("protocol", [s.title for s in series])))
    span = [min(0.0, *(row["value"] for row in rows)), 1.1 * max(0.1, *(row["value"] for row in rows))]
    value = numeric("value", "accuracy drop", format=".0%", tickCount=5, domain=span, clamp=True)
    ends = {"y": alt.Y(field="low", type="quantitative"), "y2": alt.Y2(field="high")}
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(**ends, **color_shape("protocol", series, shape=False))
    marks = [
        base.mark_point(size=size)
        .transform_filter(f"datum.head == '{head}'")
        .encode(y=alt.Y(**value), tooltip=_tooltips(rows, value), **color_shape("protocol", series))
        for head, size in (("second most important", 14), ("most important", 60))
    ]
    return _facets(alt.layer(bars, *marks, data=chart_data(rows)).properties(height=110), rows, "encoding", 4)


def deposits_chart(state: Reproduction) -> Chart:
    """Share of the skill lost by ablating the most important head, by encoding; the threshold of a deposit."""
    rows: Rows = []
    for task, text in TASKS.items():
        rows += mean_rows(model_groups(state, task, has_ablation), _peak, task=text)
    value = numeric("value", "share of the skill", clamp=True, **_PERCENT_AXIS)
    rows.sort(key=_encoding_order)
    return _dot_chart(rows, value, "encoding", "protocol", _PROTOCOL_STYLES, "task", {"single-head": PEAK_SHARE})


_peak = figures.MEASURES["peak"]


def head_map_chart(state: Reproduction, task: str) -> Chart:
    """Ablation effect of every head, layer by head, of the first seed of each encoding (the paper's Figs. 4, 7, 8)."""
    rows: Rows = []
    for protocol, label, (cell, *_) in model_groups(state, task, has_ablation, partial=True):
        ablation = cell.ablation
        assert ablation is not None
        for (layer, head), drop in np.ndenumerate(ablation.drops):
            panel = {"panel": f"{display_name(protocol, label)}, {protocol}", "seed": cell.key.seed}
            ends = {"low": float(ablation.low[layer, head]), "high": float(ablation.high[layer, head])}
            rows.append(panel | {"layer": layer + 1, "head": head + 1, "value": float(drop), **ends})
    if not rows:
        return None
    limit = max(0.05, *(abs(row["value"]) for row in rows))
    x, y = (nominal(column, sorted({row[column] for row in rows}), column) for column in ("head", "layer"))
    tips = _tooltips(rows, numeric("value", "accuracy drop", format=".0%"))
    chart = heatmap(rows, x, y, "value", title="accuracy drop", domain=(-limit, limit), tips=tips, form=".0%")
    return _facets(chart, rows, "panel", 3)


def cumulative_chart(state: Reproduction, task: str) -> Chart:
    """Accuracy as the heads of a layer are ablated, most important first: a line per layer, mean over seeds."""
    groups = model_groups(state, task, has_ablation, partial=True)
    rows: Rows = []
    for layer in range(max((len(accuracy_drops(cell)) for *_, cells in groups for cell in cells), default=0)):

        def curve(cell: CellResult, layer: int = layer) -> Any:
            return cell.ablation.cumulative[layer] if cell.ablation and layer < len(accuracy_drops(cell)) else []

        rows += curve_rows(groups, curve, "ablated", range(1000), series=f"layer {layer + 1}")
    x, y = numeric("ablated", "heads ablated", tickCount=4), numeric("value", "test accuracy", **_PERCENT_AXIS)
    return _line_chart(_with_panels(rows), x, y, "series", _series_styles(rows))


def position_chart(state: Reproduction) -> Chart:
    """Accuracy drop of each head when only its positional part is removed, against ablating the head."""
    rows: Rows = []
    for protocol, label, cells in model_groups(
        state, DISTANCE, lambda cell: has_ablation(cell) and has_measure("position")(cell)
    ):
        for cell in cells:
            for (layer, head), drop in np.ndenumerate(accuracy_drops(cell)):
                columns = {"protocol": PROTOCOLS[protocol], "encoding": display_name(protocol, label)}
                columns |= {"seed": cell.key.seed, "layer": layer + 1, "head": head + 1}
                both = {"ablated": float(drop), "value": float(cell.measure("position").drops[layer, head])}
                rows.append({**columns, **both})
    if not rows:
        return None
    values = [row[key] for row in rows for key in ("ablated", "value")]
    span: dict[str, Any] = {"domain": [min(-0.02, *values), max(0.1, *values)], "format": ".0%"}
    x = numeric("ablated", "accuracy drop, head ablated", **span)
    y = numeric("value", "accuracy drop, position removed", **span)
    line = alt.Chart(alt.Data(values=[{"at": item} for item in span["domain"]])).mark_line(strokeDash=[4, 3])
    line = line.encode(x=alt.X(field="at", type="quantitative"), y=alt.Y(field="at", type="quantitative"))
    used = [item for item in _ENCODING_STYLES if item.title in {row["encoding"] for row in rows}]
    marks = alt.Chart().mark_point(opacity=0.7, size=35)
    marks = marks.encode(x=alt.X(**x), y=alt.Y(**y), tooltip=_tooltips(rows, y), **color_shape("encoding", used))
    return _facets(alt.layer(line, marks, data=chart_data(rows)).properties(height=300), rows, "protocol", 2)


def head_sets_chart(state: Reproduction) -> Chart:
    """Accuracy as heads of the whole model are ablated, in three orders: mean over the seeds that all went so far."""
    groups = model_groups(state, DISTANCE, has_measure("sets"))
    seeds = {(PROTOCOLS[protocol], display_name(protocol, label)): len(cells) for protocol, label, cells in groups}
    rows: Rows = []
    for curve, text in TEXTS["curves"].items():
        mean_curve = lambda cell, curve=curve: np.atleast_2d(getattr(cell.measure("sets"), curve)).mean(0)  # noqa: E731
        rows += curve_rows(groups, mean_curve, "ablated", range(1000), order=text)
    rows = [row for row in rows if row["seeds"] == seeds[row["protocol"], row["encoding"]]]
    x, y = numeric("ablated", "heads ablated", tickCount=5), numeric("value", "test accuracy", **_PERCENT_AXIS)
    styles = [style(text, index=index) for index, text in enumerate(TEXTS["curves"].values())]
    return _line_chart(_with_panels(rows), x, y, "order", styles)


def set_sizes_chart(state: Reproduction) -> Chart:
    """Size of a set of heads that is sufficient on its own."""
    groups = model_groups(state, DISTANCE, has_measure("sets"))
    rows = sorted(mean_rows(groups, lambda cell: len(cell.measure("sets").sufficient)), key=_encoding_order)
    return _dot_chart(rows, numeric("value", "sufficient heads", zero=True), "encoding", "protocol", _PROTOCOL_STYLES)


def planned_switch_effects(state: Reproduction) -> list[SwitchEffect]:
    """The effects of the protocols' switches, for the parts that are in the plan."""
    part: dict[Protocol, str] = {"released": "factors", "paper": "factors-back"}
    rows = figures.switch_effects(state.results, state.plan.protocols)
    return [row for row in rows if part[row.end] in state.plan.parts]


def switches_chart(state: Reproduction, task: str, measure: SwitchMeasure) -> Chart:
    """The effect of each switch on an encoding: the paper's setting minus the released code's, paired by seed."""
    rows: Rows = []
    for switch, row in product(SWITCHES, planned_switch_effects(state)):
        if (row.task, row.switch) == (task, switch) and (mean := row.effect(measure)):
            columns = {"switch": SWITCH_TITLES[switch][0], "instead": SWITCH_TITLES[switch][1]}
            columns |= {"encoding": title(row.base), "others": PROTOCOLS[row.end]}
            rows.append({**columns, "seeds": mean.count} | _interval_columns(mean.value, mean.low, mean.high))
    value = numeric("value", f"change in {TEXTS['measures'][measure]}", format="+.0%", tickCount=5)
    return _dot_chart(rows, value, "switch", "encoding", _ENCODING_STYLES, "others", {"": 0.0})


def rotated_heads(
    state: Reproduction, protocol: Protocol, task: str, *, at_random: bool = False
) -> list[tuple[int, str]]:
    """Number of rotated heads and label of the models of Fig. 5: none is NoPE, all is RoPE without a sinusoid.

    at_random  the models whose heads are chosen at random, without the two ends
    """
    labels = state.results.for_protocol(protocol).labels(task)
    parsed = [(EncodingLabel.parse(label), label) for label in labels]
    parsed = [(parts, label) for parts, label in parsed if parts.variant == "random" * at_random]
    counts = {parts.heads: label for parts, label in parsed if parts.heads is not None}
    ends = {0: "nope", SCALES[state.plan.scale].model["num_heads"]: _full_rope(protocol)}
    return sorted((counts if at_random else counts | {n: end for n, end in ends.items() if end in labels}).items())


def _full_rope(protocol: Protocol) -> str:
    return "rope-alone" if protocol == "released" else "rope"


def partial_chart(state: Reproduction) -> Chart:
    """Test accuracy by number of heads with RoPE (the paper's Fig. 5)."""
    rows: Rows = []
    for (task, text), protocol, at_random in product(TASKS.items(), state.plan.protocols, (False, True)):
        for count, label in rotated_heads(state, protocol, task, at_random=at_random):
            columns = {"panel": f"{text}, {protocol}", "count": count, "which": _HEAD_CHOICE_STYLES[at_random].title}
            rows += mean_rows(groups_by_label(state, protocol, [label], task), lambda cell: cell.accuracy, **columns)
    counts = sorted({row["count"] for row in rows})
    x, y = (
        numeric("count", "heads with RoPE, per layer", kind="sqrt", values=counts),
        numeric("value", "test accuracy", **_PERCENT_AXIS),
    )
    return _line_chart(rows, x, y, "which", _HEAD_CHOICE_STYLES, height=170, points=True) if len(counts) > 2 else None


_HEAD_CHOICE_STYLES = [style("the first heads", index=0), style("random heads", index=3)]


def _single_layer_labels(state: Reproduction, protocol: Protocol) -> list[str]:
    labels = state.results.for_protocol(protocol).labels(DISTANCE)
    return [label for label in sort_labels(protocol, labels) if EncodingLabel.parse(label).layer]


def layers_chart(state: Reproduction) -> Chart:
    """Test accuracy of NoPE, with RoPE in one layer only, and in all, on Task 1."""
    rows: Rows = []
    for protocol in state.plan.protocols:
        if labels := _single_layer_labels(state, protocol):
            groups = groups_by_label(state, protocol, ["nope", *labels, _full_rope(protocol)])
            rows += mean_rows(groups, lambda cell: cell.accuracy)
    return _dot_chart(
        rows, numeric("value", "test accuracy", clamp=True, **_PERCENT_AXIS), "encoding", "protocol", _PROTOCOL_STYLES
    )


def peaks_chart(state: Reproduction) -> Chart:
    """Share of the skill lost by ablating each layer's most important head, by which heads and layers rotate."""
    rows: Rows = []
    for protocol in state.plan.protocols:
        first, at_random = (rotated_heads(state, protocol, DISTANCE, at_random=flag) for flag in (False, True))
        entries = [(label, f"{count} heads") for count, label in first]
        entries += [(label, f"{count} random heads") for count, label in at_random]
        entries += [(label, display_name(protocol, label)) for label in _single_layer_labels(state, protocol)]
        for label, text in entries:
            groups = filter_groups(groups_by_label(state, protocol, [label]), peak_layer)
            rows += curve_rows(groups, lambda cell: [layer.peak for layer in cell.deposits()], model=text)
    if len({row["model"] for row in rows}) < 3:
        return None
    x = nominal("layer", sorted({row["layer"] for row in rows}), "layer")
    y = nominal("model", [row["model"] for row in rows])
    tips = _tooltips(rows, numeric("value", "share of the skill", format=".0%"))
    chart = heatmap(rows, x, y, "value", title="share of the skill", domain=(0, 1), tips=tips, form=".0%")
    return _facets(chart, rows, "protocol", 2)


def representation_chart(state: Reproduction) -> Chart:
    """The positional part of the residual stream before each layer of Task 1, by quantity."""
    rows: Rows = []
    for (quantity, text), protocol in product(TEXTS["stream"].items(), state.plan.protocols):
        groups = groups_by_label(state, protocol, TEXTS["compared"][protocol])
        groups = filter_groups(groups, has_measure("representation"))
        value_of = lambda cell, quantity=quantity: getattr(cell.measure("representation"), quantity)  # noqa: E731
        rows += curve_rows(groups, value_of, panel=f"{text}, {PROTOCOLS[protocol]}")
    x = numeric("layer", "before layer", format="d", values=sorted({row["layer"] for row in rows}))
    y = numeric("value", "mean over seeds")
    return _line_chart(rows, x, y, "encoding", _ENCODING_STYLES, height=170, columns=2, points=True)


def mla_models(state: Reproduction, protocol: Protocol) -> list[tuple[str, ModelGroups]]:
    """MLA, its variants, and RoPE for comparison, by name; empty if there is no variant."""
    titles = TEXTS["variants"][protocol].items()
    variants = [(text, groups) for label, text in titles if (groups := groups_by_label(state, protocol, [label]))]
    return variants if any(EncodingLabel.parse(label).variant for _, [(_, label, _)] in variants) else []


def mla_chart(state: Reproduction) -> Chart:
    """Share of the skill lost by ablating one head, of MLA, its variants and RoPE."""
    variants = [variant for protocol in state.plan.protocols for variant in mla_models(state, protocol)]
    rows = [row for text, groups in variants for row in mean_rows(groups, _peak, model=text)]
    value = numeric("value", "share of the skill", clamp=True, **_PERCENT_AXIS)
    return _dot_chart(rows, value, "model", "protocol", _PROTOCOL_STYLES, levels={"single-head": PEAK_SHARE})


def circuit_lines(record: Circuit, which: str) -> dict[str, float]:
    """The effects of a circuit's paths or frequencies, or its attention, by name."""
    if which == "frequencies":
        return {f"frequency {rank} (1: fastest)": float(value) for rank, value in enumerate(record.bands, start=1)}
    if which == "attention":
        cells = zip(product(QUERY_ROLES, KEY_ROLES), record.attention.ravel(), strict=True)
        return {f"{query} to {key}": float(value) for (query, key), value in cells if query != key}
    lines = {}
    for layer, reader, value in zip(record.layers, record.readers, record.paths, strict=True):
        later = layer - record.head[0]
        text = f"{reader}, {later} layer{'s' if later > 1 else ''} later" if later else "FFN of the same layer"
        lines["the readout" if reader == "readout" else text] = float(value)
    return lines


def circuit_chart(state: Reproduction, which: str) -> Chart:
    """What the most important head of each model does: its paths, its attention, or its frequencies."""
    groups = model_groups(state, DISTANCE, lambda cell: cell.is_skilled and has_measure("circuit")(cell))
    lines_by_cell = {cell.key: circuit_lines(cell.measure("circuit"), which) for *_, cells in groups for cell in cells}
    rows: Rows = []
    for line in dict.fromkeys(line for lines in lines_by_cell.values() for line in lines):
        rows += mean_rows(groups, lambda cell, line=line: lines_by_cell[cell.key].get(line, nan), line=line)
    return _dot_chart(rows, numeric("value", TEXTS["circuit"][which]), "line", "encoding", _ENCODING_STYLES, "protocol")


_SWEEP: dict[str, tuple[figures.Measure, Callable[[figures.HeadCosts], float], str]] = {
    "share": ("accuracy", figures.HeadCosts.largest, ".0%"),
    "nats": ("loss", figures.HeadCosts.largest, ".2f"),
    "heads": ("accuracy", lambda costs: costs.num_significant, ".0f"),
}


def sweep_chart(state: Reproduction, which: str, *, by_checkpoint: bool = False) -> Chart:
    """The most important head with one factor of the scale changed at a time, or during longer training."""
    measure, value_of, form = _SWEEP[which]
    variants = [variant for variant in SCALES[state.plan.scale].scale_variants if variant != "longer"]
    lines = [
        ("scale unchanged", "", figures.END),
        *((SCALE_VARIANTS[variant].title, variant, figures.END) for variant in variants),
    ]
    if by_checkpoint:
        lines = [(text, "longer", checkpoint) for checkpoint, text in TEXTS["moments"].items()]
    rows: Rows = []
    for (text, variant, checkpoint), protocol in product(lines, state.plan.protocols):

        def value(cell: CellResult, checkpoint: str = checkpoint) -> float:
            costs = figures.head_costs(cell, checkpoint, measure) if figures.is_in_order(cell, checkpoint) else None
            return nan if costs is None else float(value_of(costs))

        for base in SWEEP_BASES[protocol]:
            groups = groups_by_label(state, protocol, [str(EncodingLabel(base, None, variant))])
            rows += [row | {"encoding": display_name(protocol, base)} for row in mean_rows(groups, value, change=text)]
    top = 1.15 * max([0.01, *(row["value"] for row in rows)])  # longer intervals are cut off
    value_axis = numeric("value", TEXTS["sweep"][which], format=form, clamp=True, domain=[0, top])
    return _dot_chart(rows, value_axis, "change", "encoding", _ENCODING_STYLES, "protocol")


def _gradient_rows(
    state: Reproduction, value_of: Callable[[Any], Any], axis: str = "layer", axis_values: Sequence[Any] = ()
) -> Rows:
    """Means of a list that a level of the positional gradient has, with a panel per level and protocol."""
    rows: Rows = []
    for level in LEVELS[::-1]:

        def levels(cell: CellResult) -> Mapping[str, Any]:
            result = cell.measure("seed")
            return {} if result is None else result.strength.levels

        groups = model_groups(state, DISTANCE, lambda cell, level=level: level in levels(cell))
        values = lambda cell, level=level: value_of(levels(cell)[level])  # noqa: E731
        rows += curve_rows(groups, values, axis, axis_values, level=TEXTS["levels"][level])
    rows = sorted(rows, key=_encoding_order)
    return [{"panel": f"{row['level']}, {row['protocol'].split()[0]}", **row} for row in rows]


def strength_chart(state: Reproduction) -> Chart:
    """Signal to noise of the first layer's positional gradient by the number of examples in the mean."""
    record = next((cell.measure("seed") for cell in state.results.cells if has_measure("seed")(cell)), None)
    sizes = [] if record is None else [int(size) for size in record.strength.sizes]
    rows = _gradient_rows(state, lambda level: level.layers.strength[0], "examples", sizes)
    rows = [{**row, "noise": row["examples"] ** -0.5} for row in rows if row["value"] > 0]
    x = numeric("examples", "examples in the mean", kind="log", values=sizes[::3])
    axis = {"domain": [0.01, 1], "values": [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], "clamp": True}
    y = numeric("value", "signal to noise", kind="log", **axis)
    chart = _line_chart(rows, x, y, "encoding", _ENCODING_STYLES, height=150, points=True)
    if chart is not None:
        noise = alt.Chart().mark_line(strokeDash=[4, 3], strokeWidth=1).encode(x=alt.X(**x), y=alt.Y("noise:Q"))
        chart.spec.layer.insert(0, noise)
    return chart


_GRADIENT: dict[str, tuple[Callable[[Any], np.ndarray], float]] = {
    "exponent": (lambda level: level.layers.exponent, -0.5),
    "lead": (lambda level: margins(level.signal).ratio, 1.0),
    "growth": (lambda level: margins(level.signal).gamma, 1.0),
}


def gradient_chart(state: Reproduction, which: str) -> Chart:
    """The positional gradient's exponent, or its lead in one head, by encoding and layer."""
    value_of, threshold = _GRADIENT[which]
    rows = [{**row, "series": f"layer {row['layer']}"} for row in _gradient_rows(state, value_of)]
    value, styles = numeric("value", which), _series_styles(rows)
    return _dot_chart(rows, value, "encoding", "series", styles, "panel", {"": threshold})


def checkpoint_values(cell: CellResult) -> dict[int, tuple[float, ...]]:
    """By training step: accuracy, and the two largest accuracy drops of a head; undefined values are 0."""
    values = {}
    for row in cell.probe_rows:
        if row.get("drops"):
            effects = sorted((float(drop or 0) for layer in row["drops"] for drop in layer), reverse=True)
            values[int(row["step"])] = (float(row["accuracy"] or 0), *[*effects, nan][:2])
    return values


def training_chart(state: Reproduction) -> Chart:
    """Accuracy, and the drop of the two most important heads, by training step: mean over seeds and range."""
    styles = [style("accuracy of the model", "nope")]
    styles += [style("most important head", index=5), style("second head", index=0)]
    y = numeric("value", "accuracy, accuracy drop", format=".0%")
    return _by_step_chart(state, checkpoint_values, styles, y)


def exponents_chart(state: Reproduction) -> Chart:
    """Exponent of the positional gradient at the logits by training step and layer: mean over heads and seeds."""

    def by_step(cell: CellResult) -> dict[int, Sequence[float]]:
        rows = [row for row in cell.probe_rows if row.get("exponent")]
        return {int(row["step"]): np.array(row["exponent"], dtype=float).mean(axis=1).tolist() for row in rows}

    depth = max((len(values) for cell in state.results.cells for values in by_step(cell).values()), default=0)
    y = numeric("value", "exponent", domain=[-0.72, 0.05], values=[-0.5, -0.25, 0])
    styles = [style(f"layer {n + 1}", index=n) for n in range(depth)]
    return _by_step_chart(state, by_step, styles, y, levels={"": -0.5})


def _by_step_chart(
    state: Reproduction,
    values_of: Callable[[CellResult], Mapping[int, Sequence[float]]],
    styles: Sequence[Style],
    y: Mapping[str, Any],
    **options: Any,
) -> Chart:
    """Values of each model by training step, at steps that all seeds share (with fewer than two: of the first seed)."""
    rows: Rows = []
    by_cell = {cell.key: values_of(cell) for cell in state.results.cells if cell.key.task == DISTANCE}
    for protocol, label, cells in model_groups(state, DISTANCE, lambda cell: len(by_cell[cell.key]) > 1):
        shared = set.intersection(*(set(by_cell[cell.key]) for cell in cells))
        shown = cells if len(shared) > 1 else cells[:1]
        steps = sorted(shared if len(shared) > 1 else by_cell[cells[0].key])
        for index, curve_style in enumerate(styles):

            def curve(cell: CellResult, steps: Sequence[int] = steps, index: int = index) -> list[float]:
                values = [by_cell[cell.key][step] for step in steps]
                return [value[index] if index < len(value) else nan for value in values]

            group: ModelGroups = [(protocol, label, shown)]
            rows += curve_rows(group, curve, "step", steps, full_range=True, series=curve_style.title)
    x = numeric("step", "training step", tickCount=4)
    return _line_chart(_with_panels(rows), x, y, "series", styles, **options)
