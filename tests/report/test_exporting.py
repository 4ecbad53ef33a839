"""Figures and tables for a paper, made of the charts and tables that a page shows."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.pages import KINDS, page_of

from toeplens.report import Figure
from toeplens.report.charts import facet_grid, line_chart, numeric
from toeplens.report.exporting import FORMATS, INCHES, columns_of, csv_of, draw_figure, html_of, latex_of, number_tables
from toeplens.report.tables import Table, TableCell, make_table
from toeplens.report.theme import styles

GROUPED = make_table(
    "What it 'costs'",
    [TableCell("RoPE", right=True), TableCell("A<B", right=True)],
    [
        ["index", TableCell("−1.5", ("−2 to −1", "3 models"), right=True), TableCell("–", right=True)],
        ["all\nof it", TableCell("not part", colspan=2)],
    ],
    groups=[TableCell("Task", rowspan=2), TableCell("Encoding", colspan=2)],
    note="Nats per token, 95% interval.",
)
ROWS = [{"x": x, "y": x**0.5, "series": each, "task": task} for x in range(5) for each in "ab" for task in "cd"]
LINES = line_chart(ROWS, numeric("x", "distance"), numeric("y", "loss"), styles([("a", "a"), ("b", "b")]).values())
SINGLE, PANELS = Figure("single", "One", LINES), Figure("panels", "Two", facet_grid(LINES, "task", "cd", columns=2))


def test_a_figure_has_the_width_of_its_columns_in_every_format() -> None:
    assert (columns_of(SINGLE), columns_of(PANELS)) == (1, 2)
    for columns in (1, 2):
        text = draw_figure(SINGLE, "svg", columns).decode()
        width = re.search(r'<svg[^>]* width="([\d.]+)in"', text)
        assert width is not None
        assert float(width[1]) == pytest.approx(INCHES[columns], abs=0.02)
        box = re.search(rb"/MediaBox\s*\[0 0 ([\d.]+)", draw_figure(SINGLE, "pdf", columns))
        assert box is not None
        assert float(box[1]) / 72 == pytest.approx(INCHES[columns], abs=0.02)
        png = draw_figure(SINGLE, "png", columns)
        assert int.from_bytes(png[16:20]) / 300 == pytest.approx(INCHES[columns], abs=0.02)
        assert 'font-size="11px"' in text
        assert "distance" in text
        assert 'fill="white"' in text
    for columns in (1, 2):
        width = re.search(r'<svg[^>]* width="([\d.]+)in"', draw_figure(PANELS, "svg", columns).decode())
        assert width is not None
        assert float(width[1]) == pytest.approx(INCHES[columns], abs=0.05), "with several panels, too"
    for form in FORMATS[1:]:  # the objects of a PDF come in any order
        assert draw_figure(PANELS, form) == draw_figure(PANELS, form)


@pytest.mark.heavy
@pytest.mark.parametrize("name", KINDS)
def test_every_chart_and_table_of_a_page_is_exported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no browser is there to be found
    page = page_of(name)
    for figure in page.figures:
        assert draw_figure(figure, "pdf").startswith(b"%PDF")
        for columns in (1, 2):
            width = re.search(r'<svg[^>]* width="([\d.]+)in"', draw_figure(figure, "svg", columns).decode())
            assert width is not None
            assert 0.8 * INCHES[columns] < float(width[1]) < INCHES[columns] + 0.02, figure.id
    for ending in ("pdf", "svg"):
        for id, chart in page.charts().items():
            chart.save(str(tmp_path / f"{id}.{ending}"))
            assert (tmp_path / f"{id}.{ending}").stat().st_size > 1000
    for table in number_tables(page.tables):
        assert latex_of(table).count("\\\\") >= len(table.body)
        assert html_of(table).count("<tr") >= len(table.body)
        assert csv_of(table).count("\n") > len(table.body)


def test_a_table_has_its_groups_and_small_print_as_csv() -> None:
    rows = list(csv.reader(io.StringIO(csv_of(GROUPED))))
    assert rows == [
        ["Task", "Encoding: RoPE", "Encoding: A<B"],
        ["index", "-1.5 (-2 to -1; 3 models)", ""],
        ["all of it", "not part", "not part"],
    ]


def test_a_table_in_latex_and_html_has_its_groups_caption_and_label() -> None:
    text = latex_of(GROUPED)
    assert r"\caption{What it 'costs'. Nats per token, 95\% interval.}\label{tab:what-it-costs}" in text
    assert r"\multicolumn{2}{c}{Encoding}" in text
    assert r"\toprule" in text
    assert r"index & $-$1.5 ($-$2 to $-$1; 3 models) & –" in text
    assert r"Task & RoPE & A\textless{}B \\" in text
    page = html_of(GROUPED)
    assert "A&lt;B" in page
    assert "Encoding" in page
    assert 'id="what-it-costs"' in page
    long = make_table("Long", ["a"], [[str(i)] for i in range(60)])
    assert r"\begin{longtable}" in latex_of(long)
    assert r"\begin{longtable}" not in text
    rows = latex_of(make_table("Rows", [], [["Seeds", "5"]]))
    assert "\\toprule\nSeeds & 5" in rows, "no names of columns where there are none"


def test_nested_groups_are_stacked_and_equal_names_stay_separate() -> None:
    head = [
        [TableCell("", rowspan=3), TableCell("all", colspan=4)],
        [TableCell("a", colspan=2), TableCell("b", colspan=2)],
        [TableCell("x"), TableCell("y"), TableCell("a"), TableCell("b")],
    ]
    text = latex_of(Table("T", head, [[TableCell(letter) for letter in "pqrst"]]))
    above, below, names = (
        text.index(each) for each in ("{4}{c}{all}", "{2}{c}{a} & \\multicolumn{2}{c}{b}", "x & y & a & b")
    )
    assert above < below < names
    assert html_of(Table("T", head, [[TableCell(letter) for letter in "pqrst"]])).count("colgroup") == 3


@pytest.mark.parametrize("make", [latex_of, html_of])
def test_spanning_cells_appear_once_and_equal_cells_are_not_merged(make: Callable[[Table], str]) -> None:
    same = TableCell("twin")
    latex = make(make_table("T", ["x", "y", "z"], [[TableCell("tall", rowspan=2), same, same], [same, TableCell("b")]]))
    assert latex.count("tall") == 1
    assert latex.count("twin") == 3


def test_math_symbols_become_latex_math() -> None:
    latex = latex_of(make_table("−T", ["Δ"], [["−1 ± 2, λ ≤ 10⁻³ – Σ “x” | é"]]))
    assert r"$-$1 ± 2, $\lambda$ $\le$ 10$^{-3}$ – $\Sigma$ “x” \textbar{} é \\" in latex
    assert r"\caption{$-$T.}" in latex
    assert r"$\Delta$ \\" in latex


def test_wide_tables_fit_and_long_cells_wrap() -> None:
    wide = latex_of(make_table("T", [], [["word " * 3] * 6]))
    assert r"\begin{table*}" in wide
    assert r"\begin{adjustbox}{max width=\linewidth}" in wide
    long = latex_of(make_table("T", [], [["word " * 30, "b"]]))
    assert r"\begin{tabular}{>{\raggedright\arraybackslash}p{0.70\linewidth}l}" in long
    tall = latex_of(make_table("T", [], [["word " * 30, "b"]] * 60))
    assert r"\begin{longtable}{>{\raggedright\arraybackslash}p{0.70\linewidth}l}" in tall
    for made in (wide, long, tall):
        begun, ended = (re.findall(rf"\\{word}\{{([a-z*]+)\}}", made) for word in ("begin", "end"))
        assert begun == ended[::-1]


@given(st.text(alphabet="#$%&_{}~^\\<>ab", min_size=1, max_size=8))
def test_latex_special_characters_are_escaped(text: str) -> None:
    row = next(line for line in latex_of(make_table("T", ["a", "b"], [["x", text]])).splitlines() if line[:3] == "x &")
    assert re.search(r"(?<!\\)[#$%_]", row.replace(r"\$", "")) is None
    assert row.count("&") - row.count(r"\&") == 1


def test_spreadsheet_formulas_become_text_and_numbers_stay_numbers() -> None:
    cells = ["=1+1", "@cmd", "+a", "-2.5", "−3", "-1 (2 to 3)"]
    rows = list(csv.reader(io.StringIO(csv_of(make_table("T", ["a"], [[each] for each in cells])))))[1:]
    assert [row[0] for row in rows] == ["'=1+1", "'@cmd", "'+a", "-2.5", "-3", "-1 (2 to 3)"]


def test_tables_of_equal_name_are_numbered_and_empty_ones_omitted() -> None:
    empty = Table("T", [], [])
    names = [each.file for each in number_tables([GROUPED, empty, GROUPED])]
    assert names == ["what-it-costs", "what-it-costs-2"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no TeX on this machine")
def test_the_latex_compiles(tmp_path: Path) -> None:
    packages = "\n".join(rf"\usepackage{{{name}}}" for name in ("adjustbox", "array", "booktabs", "longtable"))
    body = latex_of(GROUPED)
    source = rf"\documentclass{{article}}{packages}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "t.tex").write_text(source)
    done = subprocess.run(["pdflatex", "-interaction=batchmode", "t.tex"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, (tmp_path / "t.log").read_text()[-2000:]
