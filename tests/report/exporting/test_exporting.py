"""Figures and tables for a paper, made of the objects that a page shows."""

from __future__ import annotations

import csv
import importlib
import io
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.grid.state import made_up_grid

from toeplens.ground import EnvironmentFailure
from toeplens.report.exporting import (
    INCHES,
    PIXELS,
    csv_of,
    draw,
    escaped,
    latex_of,
    printed_caption,
    printed_panels,
    told_apart,
)
from toeplens.report.grid.page import grid_page
from toeplens.report.kit.blocks import Block, Panel, Ramp, Sign, View
from toeplens.report.kit.colours import HEAT
from toeplens.report.kit.page import Page
from toeplens.report.kit.tables import Cell, Table, make_table, slug
from toeplens.studies.grid import Grid

GROUPED = make_table(
    "What it 'costs'",
    [Cell("RoPE", right=True), Cell("A<B", right=True)],
    [
        ["index", Cell("−1.5", ("−2 to −1", "3 models"), right=True), Cell("–", right=True)],
        ["all\nof it", Cell("not part", across=2)],
    ],
    groups=[Cell("Task", down=2), Cell("Encoding", across=2)],
    note="Nats a token, 95% interval.",
)
PLAIN = make_table("Rows", [], [["Seeds", "5"]])


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return made_up_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def page(state: Grid) -> Page:
    return grid_page(state)


def rows_of(table: Table) -> list[list[str]]:
    return list(csv.reader(io.StringIO(csv_of(table))))


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_every_panel_of_a_page_has_a_file_and_its_caption_no_button(page: Page):
    for block in page.blocks.values():
        names = list(printed_panels(block))
        assert len(names) == len(block.places)
        assert all(re.fullmatch(rf"{block.id}[a-z0-9-]*", name) for name in names)
        assert not re.search(r"\bpress\b|hover|point at", printed_caption(block), re.IGNORECASE)
        assert printed_caption(block).endswith((".", ")"))
    assert slug("Task 1 (distance), 50 %: “ok”/../x") == "task-1-distance-50-ok-x"
    twins = Block("a", "", "", [View.of([Panel("Σ", go.Figure()), Panel("ω", go.Figure())])])
    assert list(printed_panels(twins)) == ["a", "a-2"]


@pytest.mark.parametrize("columns", [1, 2])
def test_a_panel_is_as_wide_as_its_columns_in_eight_points_with_a_legend_of_its_own(page: Page, columns: int):
    block = page.blocks["lengths"]
    panel = block.places[0][1].figure.to_plotly_json()
    made = next(iter(printed_panels(block, columns).values()))
    layout = made.plot["layout"]
    assert made.inches[0] == pytest.approx(INCHES[columns], abs=0.01)
    assert layout["font"]["size"] * 72 / PIXELS == 8
    assert made.height > panel["layout"]["height"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "white"
    assert block.places[0][1].title in layout["title"]["text"]
    there = {trace.get("meta") for trace in panel["data"]}
    entries = [trace for trace in made.plot["data"] if trace["showlegend"]]
    assert [trace["name"] for trace in entries] == [sign.title for sign in block.legend if sign.key in there]
    assert all(trace["x"] == [None] for trace in entries)


def test_heat_has_the_light_colours_and_their_scale():
    heat = go.Figure(data=[{"type": "heatmap", "z": [[1]], "coloraxis": "coloraxis"}])
    heat.update_layout(height=100, coloraxis={"cmin": -1, "cmax": 1})
    block = Block("heat", "", "", [View.of([Panel("", heat)])], ramp=Ramp("gains", "loses", half=True))
    axis = printed_panels(block)["heat"].plot["layout"]["coloraxis"]
    assert axis["colorscale"] == [[0, HEAT["light"][1]], [1, HEAT["light"][2]]]
    assert (axis["cmin"], axis["showscale"]) == (0, True)
    assert (axis["colorbar"]["tickvals"], axis["colorbar"]["ticktext"]) == ([0, 1], ["gains", "loses"])


def test_every_kind_of_sign_is_an_entry():
    signs = [Sign("", "line", "#111111", dash="dot"), Sign("", "mark", "var(--ink)", "▲"), Sign("", "box", "#222222")]
    block = Block("a", "", "", [View.of([Panel("", go.Figure(), legend=signs)])])
    line, mark, box = printed_panels(block)["a"].plot["data"]
    assert line["line"]["dash"] == "dot"
    assert (mark["marker"]["symbol"], box["marker"]["symbol"]) == ("triangle-up", "square")
    assert "var" not in mark["marker"]["color"]


def test_without_kaleido_or_a_browser_one_sentence_says_how_to_get_it(
    page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    panels = {tmp_path / "a.pdf": next(iter(printed_panels(page.blocks["lengths"]).values()))}
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    with pytest.raises(EnvironmentFailure, match=r"^figures: Chrome or Chromium is not installed"):
        draw(panels, "pdf")
    true = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "kaleido":
            raise ImportError(name)
        return true(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(EnvironmentFailure, match=r"pip install 'toeplens\[figures\]'\.$"):
        draw(panels, "pdf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_a_browser_draws_each_format_in_the_size_that_was_asked_for(page: Page, tmp_path: Path):
    block = page.blocks["lengths"]
    panel = next(iter(printed_panels(block).values()))
    done: list[Path] = []
    for form in ("pdf", "svg", "png"):
        draw({tmp_path / f"a.{form}": panel}, form, on_done=done.append)
    pdf, svg, png = (path.read_bytes() for path in done)
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    assert pdf.startswith(b"%PDF")
    assert [float(size) for size in box.groups()] == pytest.approx([72 * size for size in panel.inches], abs=1)
    assert re.search(r'<svg[^>]* width="312"', svg.decode())
    assert block.legend[0].title in svg.decode()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == pytest.approx(300 * INCHES[1], abs=1)


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_has_its_groups_and_small_print():
    assert rows_of(GROUPED) == [
        ["Task", "Encoding: RoPE", "Encoding: A<B"],
        ["index", "-1.5 (-2 to -1; 3 models)", ""],
        ["all of it", "not part", "not part"],
    ]
    assert rows_of(PLAIN) == [["1", "2"], ["Seeds", "5"]]
    made = latex_of(GROUPED)
    assert r"\multicolumn{2}{c}{Encoding} \\ \cmidrule(lr){2-3}" in made
    assert r"Task & RoPE & A\textless{}B \\" in made
    assert r"index & $-$1.5 {\scriptsize $-$2 to $-$1; 3 models} & -- \\" in made
    assert r"costs\textquotesingle{}. Nats a token, 95\% interval.}\label{tab:what-it-costs}" in made
    assert made.count(r"\begin{") == made.count(r"\end{")
    assert [table.file for table in told_apart([GROUPED, PLAIN, GROUPED])] == [
        "what-it-costs",
        "rows",
        "what-it-costs-2",
    ]


def test_what_a_spreadsheet_would_run_is_text_and_numbers_stay_numbers():
    formulas = ["=HYPERLINK(A1)", "+1+cmd|x!A0", "-2+3", "@SUM(A1)", "-1 -A2", "+A1", "＝1", "+ 1"]
    numbers = ["-1.5", "+0.2", "-1e-05", "+5 %", "-1.5 (-2 to -1; 3 models)", "+8.9 [-7.7, 10.1]", "-3 to +4", "1=1"]
    pairs = list(zip(formulas, numbers, strict=True))
    assert rows_of(make_table("a", ["=1", "-1"], pairs)) == [
        ["'=1", "-1"],
        *([f"'{formula}", number] for formula, number in pairs),
    ]


@given(st.text(st.characters(codec="ascii", exclude_categories=("Cc",))))
def test_what_latex_would_take_for_its_own_is_escaped(text: str):
    made = escaped(text)
    bare = re.sub(r"\\text[a-z]+\{\}|\\[{}$&#%_]|\{[\[\]]\}", "", made)
    assert not set(bare) & set("\\{}$&#%_~^[]")
    assert escaped("−1 ± 2, λ ≤ 10⁻³ – “x”") == r"$-$1 $\pm$ 2, $\lambda$ $\le$ 10$^{-}$$^{3}$ -- ``x''"


def test_long_tables_may_break_and_wide_ones_are_made_to_fit():
    assert r"\begin{longtable}{l}" in latex_of(make_table("a", [], [[str(number)] for number in range(60)]))
    made = latex_of(make_table("a", [], [["word " * 3] * 6]))
    assert r"\begin{table*}" in made
    assert r"\resizebox" in made
