"""The page of a pretrained model's study: claims, heads, and effects of frequency bands and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import pi, tau
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from plotly.colors import sample_colorscale

from toeplens.ground.words import duration, fixed
from toeplens.lens import Estimate
from toeplens.papers.positional_symbolic.pretrained.parts import BANDS, DRAWS, Heads, by_speed, effects_of
from toeplens.papers.positional_symbolic.pretrained.study import Pretrained, by_text
from toeplens.report.auditing.page import by_band
from toeplens.report.kit.blocks import Block, Panel, Ramp, Sign, Texts, View, numbered
from toeplens.report.kit.canvas import Canvas, heat, plain
from toeplens.report.kit.colours import BLUE, DEPTHS, GREEN, GREY, ORANGE
from toeplens.report.kit.page import Page, ledger, ledger_table, machine_rows
from toeplens.report.kit.tables import Cell, Table, code, make_table
from toeplens.report.probe import behaviours_table
from toeplens.studies.kit.verdicts import ENOUGH
from toeplens.studies.probing import Behaviour, ProbeRecord


def pretrained_page(study: Pretrained) -> Page:
    """The figures and tables of the study."""
    intact, first, claims = study.probes.get("intact"), study.audits.get("text-0"), ledger(study.entries)
    tables = {"claims": ledger_table(claims)}
    if intact is not None:
        tables["behaviours"] = behaviours_table(intact, changed=False)
    layers = () if first is None else first.layers
    return Page(
        "papers/positional_symbolic/pretrained/page.html.j2",
        numbered(make(study) for make in (maps, plane, frequencies, bands, layered, retrieval)),
        {name: table for name, table in (tables | {"run": _run_table(study)}).items() if table.body},
        {
            "study": study,
            "model": "/".join(Path(study.plan.model).parts[-2:]),
            "claims": claims,
            "tally": Counter(entry.verdict for entry in study.entries),
            "rule": study.rule,
            "clustered": list(by_text(study)),
            "enough": ENOUGH,
            "first": first,
            "dead": [(layer.layer + 1, len(layer.dead), len(layer.frequencies)) for layer in layers if layer.dead],
        },
    )


def _run_table(study: Pretrained) -> Table:
    plan, about = study.plan, study.environment
    texts = {name: digest[:12] for name, digest in plan.texts.items()}
    shown = Markup(", ").join(Markup("{} <code>{}</code>").format(*each) for each in texts.items())
    sizes = (
        f"{plan.sequences * plan.together} sequences per text, {plan.tokens} tokens; effects on the first "
        f"{plan.effect_tokens} tokens; probes of {plan.probe_tokens} tokens; seed {plan.seed}"
    )
    rows: list[list[str | Cell]] = [
        ["Command", code(about.get("command") or "not recorded")],
        ["Texts", Cell(", ".join(f"{name} {digest}" for name, digest in texts.items()), html=shown)],
        ["Sizes", sizes],
        ["Time", f"{duration(about['seconds'])} in total" if about.get("seconds") else "not recorded"],
        *machine_rows(about, without=("execution", "threads", "numpy")),
    ]
    return make_table("How it was run", [], rows, css="facts")


_TEXTS = Texts(Path(__file__).with_name("page.yaml"))
_KINDS = {"text": "The model", "random": "Random weights", "shuffled": "Tokens in random order"}


def maps(study: Pretrained) -> Block:
    heads, views = study.heads("text"), []
    if heads is not None:
        views += [_map(title, heads, heads.mean(name), 1.0) for name, title in _TEXTS["mapped"].items()]
        intact = study.probes.get("intact")
        if intact is not None and intact.heads:
            scores = {(each.layer, each.head): each.score for each in intact.heads}
            values = np.array([scores.get(place, np.nan) for place in zip(heads.layer, heads.head, strict=True)])
            views.append(_map("retrieval score", heads, values, 1.0))
        for name, title in (
            ("silenced", "ablation effect (nats)"),
            ("position", "effect of removing its position (nats)"),
        ):
            audit = study.audits.get(name)
            if audit is not None:
                effects = effects_of(audit)
                views.append(_map(title, heads, effects, max(1e-9, float(np.nanmax(np.abs(effects), initial=0.0)))))
    views = [view for view in views if view.groups]
    return _TEXTS.block("maps", views, "full", ramp=Ramp("0", "largest", half=True))


def _map(title: str, heads: Heads, values: np.ndarray, limit: float) -> View:
    if not np.isfinite(values).any():
        return View(title, [])
    layers, across = sorted(set(heads.layer.tolist())), int(heads.head.max()) + 1
    table = np.full((len(layers), across), np.nan)
    row = {layer: at for at, layer in enumerate(layers)}
    for layer, head, value in zip(heads.layer, heads.head, values, strict=True):
        table[row[int(layer)], int(head)] = value
    local = {int(layer) for layer in heads.layer[heads.local]}
    mixed = len(heads.parts) > 1
    rows = [f"L{layer + 1}{' window' if mixed and layer in local else ''}" for layer in layers]
    columns = [f"H{head + 1}" for head in range(across)]
    said = [
        [f"{row}, {column}: {fixed(value, 4)}" for column, value in zip(columns, line, strict=True)]
        for row, line in zip(rows, table, strict=True)
    ]
    figure = heat(table, rows, columns, limit, ticks=(range(across), columns), title="", hover=said)
    return View.of([Panel(title.capitalize(), figure)], title)


def plane(study: Pretrained) -> Block:
    panels = []
    for kind, title in _KINDS.items():
        heads = study.heads(kind)
        if heads is None:
            continue
        x, y = heads.mean("positional"), heads.mean("symbolic")
        canvas = Canvas(300)
        canvas.straight([0, 1], [1, 0])
        _marks(canvas, heads, x, y)
        canvas.x("positional share", range=[-0.05, 1.05])
        canvas.y("symbolic share", range=[-0.05, 1.05])
        over = [int((values > 0.5).sum()) for values in (x, y)]
        panels.append(
            Panel(
                title,
                canvas.figure(),
                f"{over[0]} of {len(x)} heads have a positional share above 0.5, {over[1]} a symbolic share.",
            )
        )
    return _TEXTS.block("plane", [View.of(panels)], "medium")


def frequencies(study: Pretrained) -> Block:
    panels = []
    known = {kind: heads for kind in _KINDS if (heads := study.heads(kind)) is not None}
    turns = {kind: _turns(heads) for kind, heads in known.items() if np.isfinite(heads.columns["centre"]).any()}
    ends = [each for turn in turns.values() for each in np.log10(turn[np.isfinite(turn)]).tolist()]
    for kind, turn in turns.items():
        heads, title, canvas = known[kind], _KINDS[kind], Canvas(300)
        _marks(canvas, heads, turn, heads.mean("positional"))
        span = {"range": [max(ends) + 0.1, min(ends) - 0.1], "dtick": 1, "exponentformat": "power"}
        canvas.x("period (tokens)", type="log", **span)
        canvas.y("positional share", range=[-0.05, 1.05])
        told = "; ".join(
            f"{part}: {fixed(float(np.mean(heads.correlations('positional', 'centre', which))))}"
            for part, which in heads.parts.items()
        )
        panels.append(
            Panel(title, canvas.figure(), f"Rank correlation with the frequency, mean over sequences, {told}.")
        )
    return _TEXTS.block("frequencies", [View.of(panels)], "medium")


def _turns(heads: Heads) -> np.ndarray:
    """Period in tokens of the frequency that each head uses."""
    with np.errstate(over="ignore"):
        return tau / 2.0 ** heads.mean("centre")


def _marks(canvas: Canvas, heads: Heads, x: np.ndarray, y: np.ndarray) -> None:
    depth = heads.layer / max(1, heads.layer.max())
    known = np.isfinite(x) & np.isfinite(y)
    names = [f"L{layer + 1} H{head + 1}" for layer, head in zip(heads.layer[known], heads.head[known], strict=True)]
    colours = [str(each) for each in sample_colorscale(list(DEPTHS), depth[known].tolist())] if known.any() else []
    mixed = len(heads.parts) > 1
    shapes = ["square" if mixed and local else "circle" for local in heads.local[known]]
    marker = {"color": colours, "size": 7, "opacity": 0.75, "symbol": shapes}
    canvas.marks(
        plain(x[known]), plain(y[known]), marker, "%{customdata}: %{x:.3g}, %{y:.3f}<extra></extra>", customdata=names
    )


_ASKED: dict[Behaviour, tuple[str, str]] = {
    "copying": ("Copying", BLUE),
    "needle": ("Needle", ORANGE),
    "loss": ("Text", GREEN),
}


def bands(study: Pretrained) -> Block:
    probes = [study.probes.get(f"still-{band}") for band in range(BANDS)]
    found = [(band, probe) for band, probe in enumerate(probes) if probe is not None and probe.changes]
    if not found:
        return _TEXTS.block("bands", [])
    canvas, told = Canvas(376, left=60, bottom=78), []
    xs = [f"{band + 1}<br>{_band_turns(study, band)}" for band, _ in found]
    for behaviour, (title, tint) in _ASKED.items():
        more = [_more(probe, behaviour) for _, probe in found]
        means = [each.value for each in more]
        canvas.lines(
            xs,
            plain(means),
            tint,
            f"{title}: loss increase %{{y:.3f}} nats<extra></extra>",
            marker={"size": 7},
            meta=behaviour,
            error_y=_bars(more),
        )
        worst = int(np.argmax(means))
        told.append(f"{title}: largest for eighth {found[worst][0] + 1}, {fixed(means[worst])} nats")
    canvas.x("frozen eighth, fastest first; periods in tokens", type="category", tickangle=0)
    canvas.y("loss increase (nats per token)")
    signs = [Sign(behaviour, title, tint, "●") for behaviour, (title, tint) in _ASKED.items()]
    panel = Panel("Loss increase", canvas.figure(), f"{'; '.join(told)}.")
    return _TEXTS.block("bands", [View.of([panel])], "full", legend=signs)


def _more(probe: ProbeRecord, behaviour: Behaviour) -> Estimate:
    more = probe.summary(behaviour).more_nats
    assert more is not None
    return more


def _bars(each: Sequence[Estimate]) -> dict[str, Any]:
    ends = [[max(0.0, e.high - e.value) for e in each], [max(0.0, e.value - e.low) for e in each]]
    up, down = map(plain, ends)
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1, "width": 3}


def _band_turns(study: Pretrained, band: int) -> str:
    """Periods in tokens of a band, from its fastest to its slowest frequency, over all layers."""
    speeds: list[float] = []
    for layer in next((audit.layers for audit in study.audits.values()), ()):
        if layer.frequencies:
            pairs = np.array_split(by_speed(layer), BANDS)[band]
            speeds += [abs(layer.frequencies[pair]) for pair in pairs if layer.frequencies[pair]]
    return f"{_short(2 * pi / max(speeds))}–<br>{_short(2 * pi / min(speeds))}" if speeds else "–"


def _short(tokens: float) -> str:
    size, unit = next(
        ((tokens / each, unit) for each, unit in ((1e6, "M"), (1e3, "k")) if tokens >= each), (tokens, "")
    )
    return f"{size:.2g}{unit}" if size < 10 else f"{size:.0f}{unit}"


def layered(study: Pretrained) -> Block:
    audit, title = study.audits.get("bands"), "Effect of freezing frequencies by layer"
    return Block("layered", title, "", []) if audit is None else replace(by_band(audit), id="layered", title=title)


def retrieval(study: Pretrained) -> Block:
    rows = [
        ("no-retrieval", "retrieval heads ablated", ORANGE),
        *((f"no-others-{n}", f"other heads ablated ({n + 1})", GREY) for n in range(DRAWS)),
        ("slow-silent", "slowest quarter removed", ORANGE),
        ("retrieval-still", "slowest quarter frozen", GREEN),
        ("fast-silent", "fastest quarter removed", BLUE),
        *((f"some-silent-{n}", f"random quarter removed ({n + 1})", GREY) for n in range(DRAWS)),
    ]
    found = [(title, tint, probe) for name, title, tint in rows if (probe := study.probes.get(name)) and probe.changes]
    if not found:
        return _TEXTS.block("retrieval", [])
    canvas = Canvas(60 + 26 * len(found), left=190)
    words = []
    for title, tint, probe in found:
        each, kept = _more(probe, "needle"), probe.summary("needle").changed_right
        assert kept is not None
        hover = f"{title}: loss increase %{{x:.3f}} nats, {kept.value:.0%} of the needles found<extra></extra>"
        canvas.marks([round(each.value, 4)], [title], {"color": tint, "size": 9}, hover, error_x=_bars([each]))
        words.append(f"{title} {kept.value:.0%}")
    canvas.x("loss increase (nats per token)")
    canvas.y("", type="category", autorange="reversed")
    panel = Panel("Needles", canvas.figure(), f"Needles found (all digits rank first): {'; '.join(words)}.")
    return _TEXTS.block("retrieval", [View.of([panel])], "full")
