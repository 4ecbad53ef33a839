"""The page that compares two audits: two checkpoints, a base model and a variant, or two encodings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from toeplens.ground.outputs import write_page
from toeplens.report.auditing.page import TEXTS, alike, bands_of_both, chosen, sees, tints
from toeplens.report.kit.blocks import Block, Panel, Sign, View, numbered
from toeplens.report.kit.canvas import Canvas, plain, untagged
from toeplens.report.kit.colours import BLUE, ORANGE
from toeplens.report.kit.page import PAGE, render_page
from toeplens.studies.auditing import words
from toeplens.studies.auditing.record import COLUMNS, LayerRecord
from toeplens.studies.auditing.result import (
    NUMBERS,
    Audit,
    Scale,
    Values,
    changes,
    columns,
    content,
    digits_of,
    least_of,
    scales_of,
    sheet,
    title,
    values_of,
)

COMMAND = "compare"
_TINTS = (BLUE, ORANGE)
_BINS = 20
_INPUT = ("text", "sequences", "tokens", "seed")
_FREQUENCIES = "fastest and slowest frequency"
_PASSING = ("seconds", "command", "input", "request")  # settings that are not compared


@dataclass(frozen=True)
class Difference:
    """A setting that differs; ``where`` names the layers, and is empty for a setting of the whole audit."""

    name: str
    where: str
    first: str
    second: str


def write_comparison(first: Audit, second: Audit, names: tuple[str, str], directory: Path) -> Path:
    """Write the page to ``report.html`` in ``directory``, replacing only an earlier one; returns its path."""
    return write_page(Path(directory) / PAGE, render_comparison(first, second, names), COMMAND)


def render_comparison(first: Audit, second: Audit, names: tuple[str, str]) -> str:
    """Two audits as one self-contained HTML document, named ``names[0]`` and ``names[1]``."""
    pair, same = (first, second), aligned(first, second)
    if not comparable(first, second):  # effects of different kinds have no common scale
        pair = (_without_effects(first), _without_effects(second))
    one, other = (values_of(audit) for audit in pair)
    digits = {name: digits_of(name, one, other) for name in NUMBERS}
    scales, shown = scales_of(one, other), columns(one, other)
    sheets = [
        sheet(name, audit, found, scales, digits) for name, audit, found in zip(names, pair, (one, other), strict=True)
    ]
    if same:
        change = changes(one, other)
        signed = {name: Scale.of(found, signed=True, least=least_of(name)) for name, found in change.items()}
        sheets.append(sheet(f"{names[1]} − {names[0]}", first, change, signed, digits))
    drawn = _scatter(pair, (one, other), names) if same else _distributions(pair, (one, other), names)
    return render_page(
        "report/auditing/comparison.html.j2",
        numbered([drawn, bands_of_both(*pair, names)], 2),  # the maps are the first figure
        command=COMMAND,
        pair=(first, second),
        names=names,
        words=words,
        same=same,
        comparable=comparable(first, second),
        inputs=[name for name in _INPUT if first.about.get(name) != second.about.get(name)],
        findings=_findings(pair, (one, other), names) if same else [],
        columns=shown,
        chosen=chosen(shown),
        sheets=sheets,
        differences=[*_settings(first, second), *(_layers(first, second) if same else [])],
        content=content(shown, sheets),
    )


def aligned(first: Audit, second: Audit) -> bool:
    """Whether both audits have the same heads in the same order."""
    one, other = ([(h.side, h.kind, h.layer, h.head) for h in audit.heads] for audit in (first, second))
    return one == other


def comparable(first: Audit, second: Audit) -> bool:
    """Whether both audits measured the same kind of effect by the same method, or only one measured effects."""
    ways = {(audit.effect, audit.method) for audit in (first, second) if audit.effect}
    return len(ways) < 2


def _without_effects(audit: Audit) -> Audit:
    heads = tuple(replace(head, effect=None, effect_low=None, effect_high=None) for head in audit.heads)
    return replace(audit, heads=heads, bands=())


def _both(one: Values, other: Values) -> list[str]:
    return [name for name in NUMBERS if name in one and name in other]


def _scatter(pair: tuple[Audit, Audit], values: tuple[Values, Values], names: tuple[str, str]) -> Block:
    """Each head in the first audit (x) and the second (y): one view per column."""
    titles = [words.Names.of(pair[0]).short(head) for head in pair[0].heads]
    (one, other), colours, views = values, tints(pair[0], pair[0].heads), []
    for name in _both(*values):
        digits = digits_of(name, *values)
        pairs = enumerate(zip(one[name], other[name], strict=True))
        known = [(a, b, i) for i, (a, b) in pairs if a is not None and b is not None]
        if not known:
            continue
        xs, ys, which = zip(*known, strict=True)
        ends = _ends([*xs, *ys])
        canvas = Canvas(420, left=62)
        canvas.straight(ends, ends)
        canvas.marks(
            plain(xs, 5),
            plain(ys, 5),
            {"color": [colours[i] for i in which], "size": 7, "opacity": 0.7},
            "%{customdata[0]}<br>%{customdata[1]} → %{customdata[2]}<extra></extra>",
            customdata=[[titles[i], words.told(a, digits), words.told(b, digits)] for a, b, i in known],
        )
        for axis, called in zip((canvas.x, canvas.y), names, strict=True):
            axis(_plain(called), range=ends, exponentformat="power")
        higher = sum(b > a for a, b, _ in known)
        text = f"Heads above the diagonal: {higher} of {len(known)}, below: {sum(b < a for a, b, _ in known)}."
        x, y = (np.asarray(found) - np.mean(found) for found in (xs, ys))
        if (size := sqrt(float(x @ x) * float(y @ y))) > 0:  # otherwise one of them is constant
            text += f" Correlation: {words.told(float(x @ y) / size, 2)}."
        views.append(View.of([Panel(COLUMNS[name], canvas.figure(), text)], title(name)))
    return TEXTS.block("pairs", views, words={"first": names[0], "second": names[1]})


def _distributions(pair: tuple[Audit, Audit], values: tuple[Values, Values], names: tuple[str, str]) -> Block:
    """Histograms of the heads' values: one view per column."""
    views = []
    for name in _both(*values):
        known = [np.array([v for v in found[name] if v is not None]) for found in values]
        low, high = _ends(np.concatenate(known).tolist())
        edges = np.linspace(low, high, _BINS + 1)
        canvas, told = Canvas(300, left=52), []
        for i, found in enumerate(known):
            shares = np.histogram(found, edges)[0] / len(found)
            canvas.add(
                "bar",
                x=plain((edges[:-1] + edges[1:]) / 2, 5),
                y=[round(float(share), 4) for share in shares],
                marker={"color": _TINTS[i], "line": {"width": 0}},
                hovertemplate=f"{_plain(names[i])}, near %{{x:.3g}}: %{{y:.1%}} of heads<extra></extra>",
                meta=f"side-{i}",
            )
            digits = digits_of(name, *values)
            told.append(f"{names[i]}: median {words.told(float(np.median(found)), digits)} ({len(found)} heads)")
        canvas.x(title(name), exponentformat="power")
        canvas.y("share of heads", tickformat=".0%")
        panel = Panel(COLUMNS[name], canvas.figure(barmode="group", bargap=0.15), f"{'; '.join(told)}.")
        views.append(View.of([panel], title(name)))
    signs = [Sign(f"side-{i}", name, _TINTS[i], "■") for i, name in enumerate(names)]
    return TEXTS.block("pairs", views, "full", text="distributions", legend=signs)


def _findings(pair: tuple[Audit, Audit], values: tuple[Values, Values], names: tuple[str, str]) -> Iterator[str]:
    """The largest change in each column of the summary."""
    one, other = values
    called = words.Names.of(pair[0])
    for name, words_of in TEXTS["summary"].items():
        moved = changes(one, other).get(name, [])
        known = [(abs(value), i) for i, value in enumerate(moved) if value is not None]
        if not known:
            continue
        size, i = max(known, key=lambda found: (found[0], -found[1]))
        mean = sum(value for value in moved if value is not None) / len(known)
        digits = digits_of(name, *values)
        if size == 0:
            yield f"{words_of}: no head changed."
            continue
        yield (
            f"{words_of}: largest change in {called.head(pair[0].heads[i])}, from "
            f"{words.told(one[name][i], digits)} ({names[0]}) to {words.told(other[name][i], digits)} ({names[1]}). "
            f"Mean change over all heads: {words.told(mean, digits)}."
        )


def _settings(first: Audit, second: Audit) -> list[Difference]:
    def told(value: Any) -> str:
        if isinstance(value, list | tuple):
            return "; ".join(map(str, value)) or "none"
        return "–" if value is None else str(value)

    known = [name for name in dict.fromkeys((*first.about, *second.about)) if name not in _PASSING]
    found = [(name, told(first.about.get(name)), told(second.about.get(name))) for name in known]
    found += [("effect", str(first.effect or "none"), str(second.effect or "none"))]
    found += [("method of effects", str(first.method or "–"), str(second.method or "–"))]
    found += [("loss of the intact model", words.told(first.baseline), words.told(second.baseline))]
    return [Difference(name.replace("_", " "), "", a, b) for name, a, b in found if a != b]


def _layers(first: Audit, second: Audit) -> list[Difference]:
    """Differences between layers; layers with the same difference share one row."""
    names, found = words.Names.of(first), {}
    for one, other in zip(first.layers, second.layers, strict=True):
        for (name, a), (_, b) in zip(_facts(one), _facts(other), strict=True):
            if a != b and not (name == _FREQUENCIES and alike(one.frequencies, other.frequencies)):
                found.setdefault((name, a, b), []).append(one)
    return [Difference(name, words.layer_spans(names, layers), a, b) for (name, a, b), layers in found.items()]


def _facts(layer: LayerRecord) -> Iterator[tuple[str, str]]:
    yield "module", layer.module
    yield "key heads", str(layer.key_heads)
    yield "width", str(layer.head_dim)
    yield "scale", f"{layer.scale:.4g}"
    yield "softcap", "none" if layer.softcap is None else f"{layer.softcap:g}"
    yield "visible keys", sees(layer)
    yield "position", layer.position
    turned = layer.frequencies
    yield _FREQUENCIES, f"{max(turned):.3g} and {min(turned):.3g} rad per position" if turned else "none"


def _ends(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.5
    return [float(f"{low - room:.5g}"), float(f"{high + room:.5g}")]


def _plain(name: str) -> str:
    """A name for use in a plot, with tags and placeholders escaped."""
    return untagged(name).replace("%{", "% {")
