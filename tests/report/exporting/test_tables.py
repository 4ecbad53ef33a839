"""Tables of pages: read as they stand, and given back by CSV and LaTeX to the letter."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.auditing.test_page import made_up
from tests.report.grid.state import NASTY, made_up_grid

from toeplens.ground import InputError
from toeplens.report.auditing.comparison import render_comparison
from toeplens.report.auditing.page import render_audit
from toeplens.report.exporting.figures import read_figures
from toeplens.report.exporting.latex import escaped, latex_of
from toeplens.report.exporting.tables import Table, csv_of, read_tables
from toeplens.report.grid.page import render_grid
from toeplens.studies.grid import Grid
from toeplens.studies.grid.measured import matrix

GROUPED = """<section><h2>Accuracy &amp; more</h2>
<div class="scroll" role="region" aria-label="What it 'costs'"><table>
<thead><tr><th rowspan="2">Task</th><th colspan="2">Encoding</th></tr>
<tr><th class="right"><span class="glyph" aria-hidden="true">●</span> RoPE<sup>a</sup></th>
<th class="right">A&lt;B</th></tr></thead>
<tbody><tr><th><details><summary>index</summary><p>not this</p></details></th>
<td class="right">−1.5 <small class="under">−2 to −1</small><small class="under">3 models</small></td>
<td class="right">–</td></tr>
<tr><td>all<br>of it</td><td colspan="2">not part</td></tr></tbody></table></div>
<h3>Rows</h3><table><tr><td>Seeds</td><td>5</td></tr></table><table></table></section>"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return made_up_grid(tmp_path_factory.mktemp("grid"))


def rows_of(table: Table) -> list[list[str]]:
    return list(csv.reader(io.StringIO(csv_of(table))))


def test_a_table_is_read_with_its_groups_notes_and_name():
    first, second = read_tables(GROUPED)
    assert (first.name, first.section, first.file) == ("What it 'costs'", "Accuracy & more", "what-it-costs")
    assert rows_of(first) == [
        ["Task", "Encoding: RoPE", "Encoding: A<B"],
        ["index", "-1.5 (-2 to -1; 3 models)", ""],
        ["all of it", "not part", "not part"],
    ]
    assert (second.name, rows_of(second)) == ("Rows", [["1", "2"], ["Seeds", "5"]])


def test_a_group_of_columns_has_a_rule_of_its_own():
    made = latex_of(read_tables(GROUPED)[0])
    assert r"\multicolumn{2}{c}{Encoding} \\ \cmidrule(lr){2-3}" in made
    assert r"Task & RoPE & A\textless{}B \\" in made
    assert r"index & $-$1.5 {\scriptsize $-$2 to $-$1; 3 models} & -- \\" in made
    assert r"\label{tab:what-it-costs}" in made
    assert made.count(r"\begin{") == made.count(r"\end{")


def test_a_caption_says_what_numbers_are():
    region = '<div role="region" aria-label="Cost" data-note="Nats a token. Small print: 95% interval.">'
    first, second = read_tables(f"{region}<table><tr><td>1</table></div><table><tr><td>1</table>")
    assert r"\caption{Cost. Nats a token. Small print: 95\% interval.}\label{tab:cost}" in latex_of(first)
    assert r"\caption{table.}" in latex_of(second)


def test_tables_of_the_same_name_are_told_apart():
    again = read_tables(GROUPED + GROUPED)
    assert [table.file for table in again] == ["what-it-costs", "rows", "what-it-costs-2", "rows-2"]


def test_the_tables_of_a_study_say_what_it_found(state: Grid):
    found = {table.name: table for table in read_tables(render_grid(state))}
    heads, *rows = rows_of(found["Test accuracy by task and encoding"])
    at = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    wanted = next(row for row in matrix(state.spec, state.results) if (row.task, row.label) == ("index", "rope"))
    assert wanted.accuracy is not None
    assert at["index"]["Encoding: RoPE"].split()[0] == f"{100 * wanted.accuracy:.1f}"
    statements = [row[0] for row in rows_of(found["Claims ledger"])[1:]]
    assert [each for each in statements if NASTY in each]
    assert len(rows_of(found["Models"])) == 1 + state.total


def test_an_audits_heads_are_a_table_though_its_script_makes_it():
    audit = made_up()
    (table,) = (each for each in read_tables(render_audit(audit)) if each.name == "All heads")
    heads, *rows = rows_of(table)
    assert len(rows) == len(audit.heads)
    row = dict(zip(heads, rows[13], strict=True))
    assert (int(row["layer"]), int(row["head of it"])) == (audit.heads[13].layer + 1, audit.heads[13].head + 1)
    assert audit.heads[13].positional is not None
    assert float(row["positional"]) == pytest.approx(audit.heads[13].positional, abs=6e-4)


def test_two_audits_heads_are_a_table_with_their_change():
    first = made_up()
    moved = [replace(head, positional=None if head.positional is None else head.positional / 2) for head in first.heads]
    second = replace(first, heads=tuple(moved))
    page = render_comparison(first, second, ("before", "after"))
    (table,) = (each for each in read_tables(page) if each.name == "All heads")
    heads, *rows = rows_of(table)
    assert heads[:3] == ["head", "layer", "head of it"]
    assert len(rows) == len(first.heads)
    row = dict(zip(heads, rows[13], strict=True))
    assert (int(row["layer"]), int(row["head of it"])) == (first.heads[13].layer + 1, first.heads[13].head + 1)
    share = first.heads[13].positional
    assert share is not None
    told = [float(row[f"positional: {name}"]) for name in ("before", "after", "after less before")]
    assert told == pytest.approx([share, share / 2, -share / 2], abs=6e-4)


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)


@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(TEXTS, min_size=width, max_size=width), min_size=1)))
def test_any_cells_come_back_from_csv(cells: list[list[str]]):
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in cells)
    (table,) = read_tables(f"<table>{body}</table>")
    _, *rows = rows_of(table)
    said = [[" ".join(text.split()) for text in row] for row in cells]
    bare = [[re.sub(r"^'(?=[=+@＝＋－＠-])", "", text) for text in row] for row in rows]
    assert bare == [[re.sub(r"−(?=[\d.])", "-", text) if text != "–" else "" for text in row] for row in said]


def test_what_a_spreadsheet_would_run_is_text_and_numbers_stay_numbers():
    formulas = ["=HYPERLINK(A1)", "+1+cmd|x!A0", "-2+3", "@SUM(A1)", "-1 -A2", "+A1", "＝1", "+ 1"]
    numbers = ["-1.5", "+0.2", "-1e-05", "+5 %", "-1.5 (-2 to -1; 3 models)", "+8.9 [-7.7, 10.1]", "-3 to +4", "1=1"]
    pairs = list(zip(formulas, numbers, strict=True))
    html = "".join(f"<tr><th>{formula}</th><td>{number}</td></tr>" for formula, number in pairs)
    (table,) = read_tables(f"<table><thead><tr><th>=1</th><th>-1</th></tr></thead>{html}</table>")
    assert rows_of(table) == [["'=1", "-1"], *([f"'{formula}", number] for formula, number in pairs)]


def test_a_cell_goes_over_a_thousand_columns_at_most_and_a_table_has_an_end():
    wide = "<table><tr><td colspan=999999999>a<tr><td rowspan=999999999>b<td colspan=0>c</table>"
    (table,) = read_tables(wide)
    assert {len(row) for row in table.grid()} == {1000}
    for html in (
        "<td colspan=1000>" * 2000,
        "<td colspan=1000>" + "<tr>" * 2000,
        f"{'<td rowspan=2000>' * 2000}" + "<tr>" * 2000,
    ):
        with pytest.raises(InputError, match=r"^tables: 'table' has more than 1,048,576 cells"):
            csv_of(read_tables(f"<table><tr>{html}</table>")[0])


def test_elements_that_never_end_are_not_walked_through_for_each_that_begins():
    count = 30_000
    assert read_tables("<div>" * count) == read_figures("<figure><div class=legend>" * count, {}) == []
    with pytest.raises(InputError, match=r"^tables: the page has 5,000; at most 1,000 are read\.$"):
        read_tables("<table><tr><td>" * 5000)


@given(st.text(st.characters(codec="ascii", exclude_categories=("Cc",))))
def test_what_latex_would_take_for_its_own_is_escaped(text: str):
    made = escaped(text)
    bare = re.sub(r"\\text[a-z]+\{\}|\\[{}$&#%_]|\{[\[\]]\}", "", made)
    assert not set(bare) & set("\\{}$&#%_~^[]")
    words = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "less": "<", "greater": ">", "bar": "|"}
    words |= {"quotedbl": '"', "asciigrave": "`", "quotesingle": "'"}
    again = re.sub(r"\\text([a-z]+)\{\}", lambda found: words[found[1]], re.sub(r"\{([\[\]])\}", r"\1", made))
    assert re.sub(r"\\([{}$&#%_])", r"\1", again) == text or "\\" in text


def test_signs_of_pages_have_their_commands():
    assert escaped("−1 ± 2, λ ≤ 10⁻³ – “x”") == r"$-$1 $\pm$ 2, $\lambda$ $\le$ 10$^{-}$$^{3}$ -- ``x''"


def test_long_tables_may_break_and_wide_ones_are_made_to_fit():
    many = "".join(f"<tr><td>{number}</td></tr>" for number in range(60))
    assert r"\begin{longtable}{l}" in latex_of(read_tables(f"<table>{many}</table>")[0])
    wide = "".join(f"<td>{'word ' * 3}</td>" for _ in range(6))
    made = latex_of(read_tables(f"<table><tr>{wide}</tr></table>")[0])
    assert r"\begin{table*}" in made
    assert r"\resizebox" in made


@pytest.mark.parametrize("name", ["latex", "tables"])
def test_nothing_is_read_but_pages(name: str):
    """What takes pages apart knows of no study."""
    import toeplens.report.exporting as room

    code = (Path(room.__file__).parent / f"{name}.py").read_text("utf-8")
    assert "toeplens.studies" not in code
