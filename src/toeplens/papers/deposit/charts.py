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

from toeplens.engine.circuit import KEYS, PLACES, Circuit
from toeplens.ground.files import read_yaml
from toeplens.lens.ablation import PEAK
from toeplens.lens.gradients import LEVELS, margins
from toeplens.model import Protocol
from toeplens.papers.deposit import measured as figures
from toeplens.papers.deposit.measured import PAPER_DROP, PAPER_TABLE_1, FactorMeasure, FactorRow, concentrated
from toeplens.papers.deposit.spec import BASES, PARTIAL, RUNGS, SCALES, SWITCH_TITLES, SWITCHES, TITLES, Label, title
from toeplens.papers.deposit.study import Reproduction
from toeplens.report.charts import alt, curves, data, grid, heat, intervals, looks, names, number, tooltip
from toeplens.report.theme import COLOURS, Style, style
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import COUNT, DISTANCE

Chart = Any  # an Altair chart, or None if there is nothing to draw
Rows = list[dict[str, Any]]
Models = list[tuple[Protocol, str, list[CellResult]]]  # protocol, label, and models by seed

TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("page.yaml"))
TASKS: dict[str, str] = {DISTANCE: "Task 1 (distance)", COUNT: "Task 2 (count)"}
PROTOCOLS: dict[Protocol, str] = {"paper": "paper protocol", "released": "released protocol"}
_PROTOCOLS = [style("paper protocol", "rope"), style("released protocol", "mla")]
_PAPER = Style("the paper’s number", COLOURS["red"], "diamond")
FAMILIES = ("rope", "rope-absolute", "mla", "absolute", "relative", "alibi", "random", "nope")
_ENCODINGS = [style(TITLES[each], each) for each in FAMILIES]
_ALONE = {"rope": "rope-absolute", "rope-alone": "rope"}  # the released code's labels
_SHARE: dict[str, Any] = {"format": ".0%", "domain": [0, 1], "tickCount": 5}


def family(protocol: Protocol, label: str) -> str:
    """The encoding of a label, whatever the released code calls it."""
    return _ALONE.get(label, label) if protocol == "released" else label


def name(protocol: Protocol, label: str) -> str:
    """The display name of a label under a protocol."""
    at = Label.parse(label)
    if at.plain:
        return TITLES[family(protocol, label)]
    sinusoid = protocol == "released" and at.base == "rope" and at.variant in {*SWITCHES, "dropout"} - {"input"}
    return title(label, protocol).replace("RoPE", TITLES["rope-absolute"] if sinusoid else "RoPE", 1)


def look(protocol: Protocol, label: str) -> Style:
    """Title, colour and shape of a label; variants look like their encoding."""
    at = Label.parse(label)
    heads = at.heads and max(count for count in (1, 2, 4, 8) if count <= at.heads)
    return style(name(protocol, label), f"{PARTIAL}-{heads}" if heads else family(protocol, at.base))


def ordered(protocol: Protocol, labels: Iterable[str]) -> list[str]:
    """Labels in the page's order; RoPE on some heads comes after the encodings, and variants after theirs."""

    def place(label: str) -> tuple[int, int, str]:
        at, base = Label.parse(label), family(protocol, Label.parse(label).base)
        return FAMILIES.index(base) if base in FAMILIES else len(FAMILIES), at.heads or 0, label

    return sorted(set(labels), key=place)


def ablated(cell: CellResult) -> bool:
    """Whether the heads of a finished model were ablated."""
    return cell.status == "complete" and cell.ablation is not None


def has(measure: str) -> Callable[[CellResult], bool]:
    """Whether a model has a measure."""
    return lambda cell: cell.measure(measure) is not None


def models(
    state: Reproduction,
    task: str = DISTANCE,
    kept: Callable[[CellResult], object] = lambda cell: cell.status == "complete",
    *,
    partial: bool = False,
) -> Models:
    """The models of a task by protocol and encoding, in the page's order: those that are ``kept``, without variants.

    partial  whether RoPE on some heads is among them
    """
    found: Models = []
    for protocol in state.plan.protocols:
        cells = [each for each in state.results.under(protocol).cells if each.key.task == task and kept(each)]
        for label in ordered(protocol, (each.key.label for each in cells)):
            if Label.parse(label).plain or (partial and not Label.parse(label).variant):
                found.append((protocol, label, [each for each in cells if each.key.label == label]))
    return found


def chosen(state: Reproduction, protocol: Protocol, labels: Iterable[str], task: str = DISTANCE) -> Models:
    """The models of these labels."""
    under = state.results.under(protocol)
    return [(protocol, label, cells) for label in labels if (cells := under.of(task, label))]


def only(found: Models, kept: Callable[[CellResult], object]) -> Models:
    """The models that are ``kept``."""
    return [(protocol, label, [cell for cell in cells if kept(cell)]) for protocol, label, cells in found]


def means(found: Models, of: Callable[[CellResult], float], *, whole: bool = False, **more: Any) -> Rows:
    """A row per encoding: mean over seeds and its 95% interval (with one seed: the value); without undefined values.

    Arguments
        whole  the range over seeds in place of the interval
        more   further columns
    """
    rows: Rows = []
    for protocol, label, cells in found:
        values = {cell.key.seed: float(value) for cell in cells if isfinite(value := of(cell))}
        if mean := estimated(values):
            low, high = (min(values.values()), max(values.values())) if whole else (mean.low, mean.high)
            place = {"protocol": PROTOCOLS[protocol], "encoding": name(protocol, label)} | more
            rows.append(place | _ends(mean.value, low, high) | {"seeds": mean.count})
    return rows


def means_of(
    found: Models,
    of: Callable[[CellResult], Any],
    axis: str = "layer",
    at: Sequence[Any] = (),
    *,
    whole: bool = False,
    **more: Any,
) -> Rows:
    """`means` of each entry of a list that a model has, such as a number per layer.

    Arguments
        axis, at  column of the entry's place, and its values (default: 1, 2, 3, ...)
    """
    lists = {cell.key: list(of(cell)) for _, _, cells in found for cell in cells}
    rows: Rows = []
    for n in range(max(map(len, lists.values()), default=0)):
        entry = {key: float(values[n]) if n < len(values) else nan for key, values in lists.items()}
        place = {axis: at[n] if at else n + 1} | more
        rows += means(found, lambda cell, entry=entry: entry[cell.key], whole=whole, **place)
    return rows


def _ends(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value} | ({"low": low, "high": high} if isfinite(low) else {"low": value, "high": value})


def _layers(rows: Rows) -> list[Style]:
    return [style(text, index=index) for index, text in enumerate(sorted({row["series"] for row in rows}))]


def _tips(rows: Rows, value: Mapping[str, Any]) -> list[Any]:
    form = ".1%" if "%" in str(value.get("axis", {}).get("format")) else ".3f"
    words = {key: key for key in rows[0] if isinstance(rows[0][key], str | int) and key not in ("low", "high", "value")}
    return tooltip(**words, value=f"{value['title']}|{form}", low=f"low|{form}", high=f"high|{form}")


def _facets(chart: Chart, rows: Rows, panel: str, columns: int) -> Chart:
    order = list(dict.fromkeys(row[panel] for row in rows))
    return grid(chart, panel, order, columns=min(columns, len(order)))


def _dots(
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
    there, lines = {each[series] for each in rows}, names(row, (each[row] for each in rows))
    kept = [each for each in styles if each.title in there]
    made = intervals(rows, value, lines, kept, series=series, tips=_tips(rows, value), levels=levels)
    made = made.properties(height=len({each[row] for each in rows}) * max(18, 8 * len(kept)))
    return _facets(made, rows, panel, 2) if panel else made


def _lines(
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
    there = {each[series] for each in rows}
    bands = {"low": "low", "high": "high"} if "low" in rows[0] else {}
    options = {"points": False, "tips": _tips(rows, y)} | bands | options
    made = curves(rows, x, y, [each for each in styles if each.title in there], series=series, **options)
    return _facets(made.properties(height=height), rows, panel, columns)


def _named(rows: Rows) -> Rows:
    """The rows with a panel for each encoding and protocol."""
    return [{"panel": f"{row['encoding']}, {row['protocol'].removesuffix(' protocol')}", **row} for row in rows]


def accuracy(state: Reproduction) -> Chart:
    """Test accuracy by encoding and task under each protocol, with the paper's Table 1 and the two baselines."""
    rows: Rows = []
    for task, text in TASKS.items():
        found = models(state, task)
        rows += means(found, lambda cell: cell.accuracy, task=text)
        told = {label: value / 100 for (of, label), value in PAPER_TABLE_1.items() if of == task and found}
        place = {"protocol": _PAPER.title, "task": text}
        rows += [place | {"encoding": TITLES[label]} | _ends(each, each, each) for label, each in told.items()]
    rows.sort(key=_place)
    for text, of in (("Chance", "chance"), ("Length only", "length_chance")):
        for task, protocol in product(TASKS, state.plan.protocols):
            place = {"protocol": PROTOCOLS[protocol], "encoding": text, "task": TASKS[task]}
            guess = baseline(state, task, protocol, of)
            rows += [] if guess is None else [place | _ends(guess, guess, guess)]
    value = number("value", "test accuracy", clamp=True, **_SHARE)
    return _dots(rows, value, "encoding", "protocol", [*_PROTOCOLS, _PAPER], "task")


def baseline(state: Reproduction, task: str, protocol: Protocol, which: str) -> float | None:
    """The ``chance`` or ``length_chance`` of most encodings; the released MLA code counts one more label."""
    rows = [row for row in state.table if (row.task, row.protocol) == (task, protocol)]
    return Counter(getattr(row, which) for row in rows).most_common(1)[0][0] if rows else None


def _place(row: Mapping[str, Any]) -> int:
    return [TITLES[each] for each in FAMILIES].index(row["encoding"])


def learning(state: Reproduction, task: str) -> Chart:
    """Accuracy by epoch, mean over seeds with the range as a band; a model that stopped early keeps its last value."""
    rows: Rows = []
    for protocol, label, cells in models(state, task, lambda cell: bool(cell.epochs)):
        kept = [cell for cell in cells if cell.status == "complete"] or cells
        epochs = max(([round(row["epoch"], 2) for row in cell.epochs] for cell in kept), key=len)
        for split in ("train", "test"):

            def curve(cell: CellResult, split: str = split, length: int = len(epochs)) -> list[float]:
                told = [row.get(f"{split}_accuracy") for row in cell.epochs]
                values = [nan if value is None else float(value) for value in told]
                return values + values[-1:] * (length - len(values)) if cell.status == "complete" else values

            panel = f"{split} accuracy, {PROTOCOLS[protocol]}"
            rows += means_of([(protocol, label, kept)], curve, "epoch", epochs, whole=True, panel=panel)
    y = number("value", "accuracy", **_SHARE)
    return _lines(rows, number("epoch", "epoch"), y, "encoding", _ENCODINGS, height=240, columns=2)


def drops(cell: CellResult) -> np.ndarray:
    """[layers, heads] accuracy drops by ablating single heads."""
    assert cell.ablation is not None
    return cell.ablation.drops


def heads_by_layer(state: Reproduction) -> Chart:
    """Accuracy drop of the two most important heads of each layer (the paper's Fig. 4), by encoding on Task 1."""
    found = models(state, DISTANCE, ablated)
    rows: Rows = []
    for rank, head in enumerate(("most important", "second most important"), start=1):
        rows += means_of(found, lambda cell, rank=rank: np.sort(drops(cell))[:, -rank:][:, :1].T[0], head=head)
        found = only(found, lambda cell: drops(cell).shape[1] > 1)
    if not rows:
        return None
    if any(row["encoding"] == TITLES["rope"] for row in rows):
        place = {"protocol": _PAPER.title, "encoding": TITLES["rope"], "layer": 1, "head": "most important"}
        rows.append(place | _ends(PAPER_DROP, PAPER_DROP, PAPER_DROP))
    rows.sort(key=_place)
    series = [each for each in (*_PROTOCOLS, _PAPER) if each.title in {row["protocol"] for row in rows}]
    layer = names("layer", sorted({row["layer"] for row in rows}), "layer")
    base = alt.Chart().encode(x=alt.X(**layer), xOffset=alt.XOffset(**names("protocol", [s.title for s in series])))
    span = [min(0.0, *(row["value"] for row in rows)), 1.1 * max(0.1, *(row["value"] for row in rows))]
    value = number("value", "accuracy drop", format=".0%", tickCount=5, domain=span, clamp=True)
    ends = {"y": alt.Y(field="low", type="quantitative"), "y2": alt.Y2(field="high")}
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(**ends, **looks("protocol", series, shape=False))
    marks = [
        base.mark_point(size=size)
        .transform_filter(f"datum.head == '{head}'")
        .encode(y=alt.Y(**value), tooltip=_tips(rows, value), **looks("protocol", series))
        for head, size in (("second most important", 14), ("most important", 60))
    ]
    return _facets(alt.layer(bars, *marks, data=data(rows)).properties(height=110), rows, "encoding", 4)


def deposits(state: Reproduction) -> Chart:
    """Share of the skill lost by ablating the most important head, by encoding; the threshold of a deposit."""
    rows = [row for task, text in TASKS.items() for row in means(models(state, task, ablated), _peak, task=text)]
    value = number("value", "share of the skill", clamp=True, **_SHARE)
    rows.sort(key=_place)
    return _dots(rows, value, "encoding", "protocol", _PROTOCOLS, "task", {"single-head": PEAK})


_peak = figures.MEASURES["peak"]


def head_maps(state: Reproduction, task: str) -> Chart:
    """Ablation effect of every head, layer by head, of the first seed of each encoding (the paper's Figs. 4, 7, 8)."""
    rows: Rows = []
    for protocol, label, (cell, *_) in models(state, task, ablated, partial=True):
        found = cell.ablation
        assert found is not None
        for (layer, head), drop in np.ndenumerate(found.drops):
            panel = {"panel": f"{name(protocol, label)}, {protocol}", "seed": cell.key.seed}
            ends = {"low": float(found.low[layer, head]), "high": float(found.high[layer, head])}
            rows.append(panel | {"layer": layer + 1, "head": head + 1, "value": float(drop), **ends})
    if not rows:
        return None
    most = max(0.05, *(abs(row["value"]) for row in rows))
    x, y = (names(each, sorted({row[each] for row in rows}), each) for each in ("head", "layer"))
    tips = _tips(rows, number("value", "accuracy drop", format=".0%"))
    made = heat(rows, x, y, "value", title="accuracy drop", domain=(-most, most), tips=tips, form=".0%")
    return _facets(made, rows, "panel", 3)


def cumulative(state: Reproduction, task: str) -> Chart:
    """Accuracy as the heads of a layer are ablated, most important first: a line per layer, mean over seeds."""
    found = models(state, task, ablated, partial=True)
    rows: Rows = []
    for layer in range(max((len(drops(cell)) for *_, cells in found for cell in cells), default=0)):

        def curve(cell: CellResult, layer: int = layer) -> Any:
            return cell.ablation.cumulative[layer] if cell.ablation and layer < len(drops(cell)) else []

        rows += means_of(found, curve, "ablated", range(1000), series=f"layer {layer + 1}")
    x, y = number("ablated", "heads ablated", tickCount=4), number("value", "test accuracy", **_SHARE)
    return _lines(_named(rows), x, y, "series", _layers(rows))


def position(state: Reproduction) -> Chart:
    """Accuracy drop of each head when only its positional part is removed, against ablating the head."""
    rows: Rows = []
    for protocol, label, cells in models(state, DISTANCE, lambda cell: ablated(cell) and has("position")(cell)):
        for cell in cells:
            for (layer, head), drop in np.ndenumerate(drops(cell)):
                place = {"protocol": PROTOCOLS[protocol], "encoding": name(protocol, label), "seed": cell.key.seed}
                both = {"ablated": float(drop), "value": float(cell.measure("position").drops[layer, head])}
                rows.append({**place, "layer": layer + 1, "head": head + 1, **both})
    if not rows:
        return None
    every = [row[of] for row in rows for of in ("ablated", "value")]
    span: dict[str, Any] = {"domain": [min(-0.02, *every), max(0.1, *every)], "format": ".0%"}
    x = number("ablated", "accuracy drop, head ablated", **span)
    y = number("value", "accuracy drop, position removed", **span)
    line = alt.Chart(alt.Data(values=[{"at": each} for each in span["domain"]])).mark_line(strokeDash=[4, 3])
    line = line.encode(x=alt.X(field="at", type="quantitative"), y=alt.Y(field="at", type="quantitative"))
    kept = [each for each in _ENCODINGS if each.title in {row["encoding"] for row in rows}]
    marks = alt.Chart().mark_point(opacity=0.7, size=35)
    marks = marks.encode(x=alt.X(**x), y=alt.Y(**y), tooltip=_tips(rows, y), **looks("encoding", kept))
    return _facets(alt.layer(line, marks, data=data(rows)).properties(height=300), rows, "protocol", 2)


def sets(state: Reproduction) -> Chart:
    """Accuracy as heads of the whole model are ablated, in three orders: mean over the seeds that all went so far."""
    found = models(state, DISTANCE, has("sets"))
    seeds = {(PROTOCOLS[protocol], name(protocol, label)): len(cells) for protocol, label, cells in found}
    rows: Rows = []
    for curve, text in TEXTS["curves"].items():
        every = lambda cell, curve=curve: np.atleast_2d(getattr(cell.measure("sets"), curve)).mean(0)  # noqa: E731
        rows += means_of(found, every, "ablated", range(1000), order=text)
    rows = [row for row in rows if row["seeds"] == seeds[row["protocol"], row["encoding"]]]
    x, y = number("ablated", "heads ablated", tickCount=5), number("value", "test accuracy", **_SHARE)
    styles = [style(text, index=index) for index, text in enumerate(TEXTS["curves"].values())]
    return _lines(_named(rows), x, y, "order", styles)


def set_sizes(state: Reproduction) -> Chart:
    """Size of a set of heads that is sufficient on its own."""
    found = models(state, DISTANCE, has("sets"))
    rows = sorted(means(found, lambda cell: len(cell.measure("sets").sufficient)), key=_place)
    return _dots(rows, number("value", "sufficient heads", zero=True), "encoding", "protocol", _PROTOCOLS)


def factor_rows(state: Reproduction) -> list[FactorRow]:
    """The effects of the protocols' switches, for the parts that are in the plan."""
    part: dict[Protocol, str] = {"released": "factors", "paper": "factors-back"}
    rows = figures.factor_table(state.results, state.plan.protocols)
    return [row for row in rows if part[row.end] in state.plan.parts]


def switches(state: Reproduction, task: str, measure: FactorMeasure) -> Chart:
    """The effect of each switch on an encoding: the paper's setting minus the released code's, paired by seed."""
    rows: Rows = []
    for switch, row in product(SWITCHES, factor_rows(state)):
        if (row.task, row.switch) == (task, switch) and (mean := row.effect(measure)):
            place = {"switch": SWITCH_TITLES[switch][0], "instead": SWITCH_TITLES[switch][1]}
            place |= {"encoding": title(row.base), "others": PROTOCOLS[row.end]}
            rows.append({**place, "seeds": mean.count} | _ends(mean.value, mean.low, mean.high))
    value = number("value", f"change in {TEXTS['measures'][measure]}", format="+.0%", tickCount=5)
    return _dots(rows, value, "switch", "encoding", _ENCODINGS, "others", {"": 0.0})


def rotated_heads(state: Reproduction, protocol: Protocol, task: str, *, drawn: bool = False) -> list[tuple[int, str]]:
    """Number of rotated heads and label of the models of Fig. 5: none is NoPE, all is RoPE without a sinusoid.

    drawn  the models whose heads are chosen at random, without the two ends
    """
    labels = state.results.under(protocol).labels(task)
    parsed = [(Label.parse(label), label) for label in labels]
    counts = {at.heads: label for at, label in parsed if at.heads is not None and at.variant == "random" * drawn}
    ends = {0: "nope", SCALES[state.plan.scale].model["num_heads"]: _whole_rope(protocol)}
    return sorted((counts if drawn else counts | {n: end for n, end in ends.items() if end in labels}).items())


def _whole_rope(protocol: Protocol) -> str:
    return "rope-alone" if protocol == "released" else "rope"


def partial(state: Reproduction) -> Chart:
    """Test accuracy by number of heads with RoPE (the paper's Fig. 5)."""
    rows: Rows = []
    for (task, text), protocol, drawn in product(TASKS.items(), state.plan.protocols, (False, True)):
        for count, label in rotated_heads(state, protocol, task, drawn=drawn):
            place = {"panel": f"{text}, {protocol}", "count": count, "which": _WHICH[drawn].title}
            rows += means(chosen(state, protocol, [label], task), lambda cell: cell.accuracy, **place)
    counts = sorted({row["count"] for row in rows})
    x, y = (
        number("count", "heads with RoPE, per layer", kind="sqrt", values=counts),
        number("value", "test accuracy", **_SHARE),
    )
    return _lines(rows, x, y, "which", _WHICH, height=170, points=True) if len(counts) > 2 else None


_WHICH = [style("the first heads", index=0), style("random heads", index=3)]


def _in_layers(state: Reproduction, protocol: Protocol) -> list[str]:
    labels = state.results.under(protocol).labels(DISTANCE)
    return [label for label in ordered(protocol, labels) if Label.parse(label).layer]


def layers(state: Reproduction) -> Chart:
    """Test accuracy of NoPE, with RoPE in one layer only, and in all, on Task 1."""
    rows: Rows = []
    for protocol in state.plan.protocols:
        if alone := _in_layers(state, protocol):
            found = chosen(state, protocol, ["nope", *alone, _whole_rope(protocol)])
            rows += means(found, lambda cell: cell.accuracy)
    return _dots(rows, number("value", "test accuracy", clamp=True, **_SHARE), "encoding", "protocol", _PROTOCOLS)


def peaks(state: Reproduction) -> Chart:
    """Share of the skill lost by ablating each layer's most important head, by which heads and layers rotate."""
    rows: Rows = []
    for protocol in state.plan.protocols:
        first, drawn = (rotated_heads(state, protocol, DISTANCE, drawn=random) for random in (False, True))
        every = [(label, f"{count} heads") for count, label in first]
        every += [(label, f"{count} random heads") for count, label in drawn]
        every += [(label, name(protocol, label)) for label in _in_layers(state, protocol)]
        for label, text in every:
            able = only(chosen(state, protocol, [label]), concentrated)
            rows += means_of(able, lambda cell: [layer.peak for layer in cell.deposits()], model=text)
    if len({row["model"] for row in rows}) < 3:
        return None
    x, y = names("layer", sorted({row["layer"] for row in rows}), "layer"), names("model", [r["model"] for r in rows])
    tips = _tips(rows, number("value", "share of the skill", format=".0%"))
    made = heat(rows, x, y, "value", title="share of the skill", domain=(0, 1), tips=tips, form=".0%")
    return _facets(made, rows, "protocol", 2)


def representation(state: Reproduction) -> Chart:
    """The positional part of the residual stream before each layer of Task 1, by quantity."""
    rows: Rows = []
    for (quantity, text), protocol in product(TEXTS["stream"].items(), state.plan.protocols):
        found = only(chosen(state, protocol, TEXTS["compared"][protocol]), has("representation"))
        of = lambda cell, quantity=quantity: getattr(cell.measure("representation"), quantity)  # noqa: E731
        rows += means_of(found, of, panel=f"{text}, {PROTOCOLS[protocol]}")
    x = number("layer", "before layer", format="d", values=sorted({row["layer"] for row in rows}))
    y = number("value", "mean over seeds")
    return _lines(rows, x, y, "encoding", _ENCODINGS, height=170, columns=2, points=True)


def mla_models(state: Reproduction, protocol: Protocol) -> list[tuple[str, Models]]:
    """MLA, its variants, and RoPE for comparison, by name; empty if there is no variant."""
    found = [(text, chosen(state, protocol, [label])) for label, text in TEXTS["variants"][protocol].items()]
    found = [(text, each) for text, each in found if each]
    return found if any(Label.parse(label).variant for _, [(_, label, _)] in found) else []


def mla(state: Reproduction) -> Chart:
    """Share of the skill lost by ablating one head, of MLA, its variants and RoPE."""
    every = [each for protocol in state.plan.protocols for each in mla_models(state, protocol)]
    rows = [row for text, found in every for row in means(found, _peak, model=text)]
    value = number("value", "share of the skill", clamp=True, **_SHARE)
    return _dots(rows, value, "model", "protocol", _PROTOCOLS, levels={"single-head": PEAK})


def circuit_lines(found: Circuit, which: str) -> dict[str, float]:
    """The effects of a circuit's paths or frequencies, or its attention, by name."""
    if which == "frequencies":
        return {f"frequency {place} (1: fastest)": float(value) for place, value in enumerate(found.bands, start=1)}
    if which == "attention":
        cells = zip(product(PLACES, KEYS), found.attention.ravel(), strict=True)
        return {f"{query} to {key}": float(value) for (query, key), value in cells if query != key}
    lines = {}
    for layer, reader, value in zip(found.layers, found.readers, found.paths, strict=True):
        later = layer - found.head[0]
        text = f"{reader}, {later} layer{'s' if later > 1 else ''} later" if later else "FFN of the same layer"
        lines["the readout" if reader == "readout" else text] = float(value)
    return lines


def circuit(state: Reproduction, which: str) -> Chart:
    """What the most important head of each model does: its paths, its attention, or its frequencies."""
    found = models(state, DISTANCE, lambda cell: cell.skilled and has("circuit")(cell))
    each = {cell.key: circuit_lines(cell.measure("circuit"), which) for *_, cells in found for cell in cells}
    rows: Rows = []
    for line in dict.fromkeys(line for lines in each.values() for line in lines):
        rows += means(found, lambda cell, line=line: each[cell.key].get(line, nan), line=line)
    return _dots(rows, number("value", TEXTS["circuit"][which]), "line", "encoding", _ENCODINGS, "protocol")


_SWEEP: dict[str, tuple[figures.Measure, Callable[[figures.Look], float], str]] = {
    "share": ("accuracy", figures.Look.largest, ".0%"),
    "nats": ("loss", figures.Look.largest, ".2f"),
    "heads": ("accuracy", lambda seen: seen.matter, ".0f"),
}


def sweep(state: Reproduction, which: str, *, moments: bool = False) -> Chart:
    """The most important head with one factor of the scale changed at a time, or during longer training."""
    measure, of, form = _SWEEP[which]
    rungs = [rung for rung in SCALES[state.plan.scale].rungs if rung != "longer"]
    lines = [("scale unchanged", "", figures.END), *((RUNGS[rung].title, rung, figures.END) for rung in rungs)]
    if moments:
        lines = [(text, "longer", moment) for moment, text in TEXTS["moments"].items()]
    rows: Rows = []
    for (text, rung, moment), protocol in product(lines, state.plan.protocols):

        def value(cell: CellResult, moment: str = moment) -> float:
            seen = figures.look_at(cell, moment, measure) if figures.in_order(cell, moment) else None
            return nan if seen is None else float(of(seen))

        for base in BASES[protocol]:
            found = chosen(state, protocol, [str(Label(base, None, rung))])
            rows += [row | {"encoding": name(protocol, base)} for row in means(found, value, change=text)]
    top = 1.15 * max([0.01, *(row["value"] for row in rows)])  # longer intervals are cut off
    value_axis = number("value", TEXTS["sweep"][which], format=form, clamp=True, domain=[0, top])
    return _dots(rows, value_axis, "change", "encoding", _ENCODINGS, "protocol")


def _gradients(state: Reproduction, of: Callable[[Any], Any], axis: str = "layer", at: Sequence[Any] = ()) -> Rows:
    """Means of a list that a level of the positional gradient has, with a panel per level and protocol."""
    rows: Rows = []
    for level in LEVELS[::-1]:

        def levels(cell: CellResult) -> Mapping[str, Any]:
            found = cell.measure("seed")
            return {} if found is None else found.strength.levels

        found = models(state, DISTANCE, lambda cell, level=level: level in levels(cell))
        rows += means_of(
            found, lambda cell, level=level: of(levels(cell)[level]), axis, at, level=TEXTS["levels"][level]
        )
    return [{"panel": f"{row['level']}, {row['protocol'].split()[0]}", **row} for row in sorted(rows, key=_place)]


def strength(state: Reproduction) -> Chart:
    """Signal to noise of the first layer's positional gradient by the number of examples in the mean."""
    measured = next((cell.measure("seed") for cell in state.results.cells if has("seed")(cell)), None)
    sizes = [] if measured is None else [int(size) for size in measured.strength.sizes]
    rows = _gradients(state, lambda level: level.layers.strength[0], "examples", sizes)
    rows = [{**row, "noise": row["examples"] ** -0.5} for row in rows if row["value"] > 0]
    x = number("examples", "examples in the mean", kind="log", values=sizes[::3])
    axis = {"domain": [0.01, 1], "values": [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], "clamp": True}
    y = number("value", "signal to noise", kind="log", **axis)
    made = _lines(rows, x, y, "encoding", _ENCODINGS, height=150, points=True)
    if made is not None:
        noise = alt.Chart().mark_line(strokeDash=[4, 3], strokeWidth=1).encode(x=alt.X(**x), y=alt.Y("noise:Q"))
        made.spec.layer.insert(0, noise)
    return made


_GRADIENT: dict[str, tuple[Callable[[Any], np.ndarray], float]] = {
    "exponent": (lambda level: level.layers.exponent, -0.5),
    "lead": (lambda level: margins(level.signal).ratio, 1.0),
    "growth": (lambda level: margins(level.signal).gamma, 1.0),
}


def gradient(state: Reproduction, which: str) -> Chart:
    """The positional gradient's exponent, or its lead in one head, by encoding and layer."""
    of, mark = _GRADIENT[which]
    rows = [{**row, "series": f"layer {row['layer']}"} for row in _gradients(state, of)]
    return _dots(rows, number("value", which), "encoding", "series", _layers(rows), "panel", {"": mark})


def checkpoints(cell: CellResult) -> dict[int, tuple[float, ...]]:
    """By training step: accuracy, and the two largest accuracy drops of a head; undefined values are 0."""
    found = {}
    for row in cell.watched:
        if row.get("drops"):
            effects = sorted((float(drop or 0) for layer in row["drops"] for drop in layer), reverse=True)
            found[int(row["step"])] = (float(row["accuracy"] or 0), *[*effects, nan][:2])
    return found


def training(state: Reproduction) -> Chart:
    """Accuracy, and the drop of the two most important heads, by training step: mean over seeds and range."""
    return _during(state, checkpoints, _TRAINED, number("value", "accuracy, accuracy drop", format=".0%"))


_TRAINED = [
    style("accuracy of the model", "nope"),
    style("most important head", index=5),
    style("second head", index=0),
]


def exponents(state: Reproduction) -> Chart:
    """Exponent of the positional gradient at the logits by training step and layer: mean over heads and seeds."""

    def of(cell: CellResult) -> dict[int, Sequence[float]]:
        rows = [row for row in cell.watched if row.get("exponent")]
        return {int(row["step"]): np.array(row["exponent"], dtype=float).mean(axis=1).tolist() for row in rows}

    depth = max((len(values) for cell in state.results.cells for values in of(cell).values()), default=0)
    y = number("value", "exponent", domain=[-0.72, 0.05], values=[-0.5, -0.25, 0])
    return _during(state, of, [style(f"layer {n + 1}", index=n) for n in range(depth)], y, levels={"": -0.5})


def _during(
    state: Reproduction,
    of: Callable[[CellResult], Mapping[int, Sequence[float]]],
    styles: Sequence[Style],
    y: Mapping[str, Any],
    **options: Any,
) -> Chart:
    """Values of each model by training step, at steps that all seeds share (with fewer than two: of the first seed)."""
    rows: Rows = []
    found = {cell.key: of(cell) for cell in state.results.cells if cell.key.task == DISTANCE}
    for protocol, label, cells in models(state, DISTANCE, lambda cell: len(found[cell.key]) > 1):
        shared = set.intersection(*(set(found[cell.key]) for cell in cells))
        kept = cells if len(shared) > 1 else cells[:1]
        steps = sorted(shared if len(shared) > 1 else found[cells[0].key])
        for at, each in enumerate(styles):

            def curve(cell: CellResult, steps: Sequence[int] = steps, at: int = at) -> list[float]:
                values = [found[cell.key][step] for step in steps]
                return [value[at] if at < len(value) else nan for value in values]

            rows += means_of([(protocol, label, kept)], curve, "step", steps, whole=True, series=each.title)
    return _lines(_named(rows), number("step", "training step", tickCount=4), y, "series", styles, **options)
