"""A grid study's page says what its models say, and its charts draw the values of its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.grid.state import (
    FACTORS,
    GUESS,
    HALF_DIVERGED,
    HEADS,
    LOST,
    NASTY,
    UNSKILLED,
    made_up_grid,
    made_up_spec,
)

from toeplens.report import Page, write_report
from toeplens.report.grid import followed
from toeplens.report.models import best_of, ranked
from toeplens.studies import CellResult, Results
from toeplens.studies.grid import Grid
from toeplens.studies.kit.verdicts import LEVEL, of_one


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return made_up_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def page(state: Grid) -> Page:
    return state.page()


def rows_of(page: Page, id: str) -> list[dict[str, Any]]:
    """The rows of a chart."""
    spec = next(each.spec for each in page.figures if each.id == id)
    while "data" not in spec:
        spec = spec["layer"][-1]
    return spec["data"]["values"]


def table(page: Page, name: str) -> dict[str, list[str]]:
    """The cells of a table by the first one, with their small print."""
    found = next(each for each in page.tables if each.name == name)
    return {row[0].plain: [cell.whole for cell in row[1:]] for row in found.body}


def _of(state: Grid, task: str, label: str) -> list[CellResult]:
    return [cell for cell in state.results.cells if (cell.key.task, cell.key.label) == (task, label)]


def _lost(cell: CellResult) -> np.ndarray:
    assert cell.by_loss is not None
    return np.maximum(cell.by_loss.drops, 0)


def test_the_picture_and_the_tables_are_the_accuracies(state: Grid, page: Page) -> None:
    drawn = {(row["task"], row["series"]): row for row in rows_of(page, "accuracy")}
    titles = {column.label: column.title for column in state.spec.columns() if not column.scan}
    shown = table(page, "Test accuracy by task and encoding")
    for task, name in (("index", "index"), ("retrieval", "find")):
        for place, (label, title) in enumerate(titles.items()):
            found = [cell.accuracy for cell in _of(state, task, label) if cell.status == "complete"]
            if not found:
                assert (name, title) not in drawn
                continue
            row = drawn[name, title]
            assert (row["value"], row["seeds"]) == (pytest.approx(np.mean(found), abs=1e-5), len(found))
            wanted = of_one(found).interval(LEVEL)[0] if len(found) > 1 else found[0]
            assert row["low"] == pytest.approx(max(0, wanted), abs=1e-4)
            assert shown[name][place].startswith(f"{100 * np.mean(found):.1f}")
        assert shown[name][len(titles) :] == ["12.5", "20.0", "30.0 (bag)"]
    order = list(titles)
    assert shown["find"][order.index(LOST[1])] == "all 2 diverged"
    assert shown["find"][order.index("mine")] == "", "not part of it"
    assert shown["find"][order.index(HALF_DIVERGED[1])].endswith("(1 diverged)")
    assert shown[UNSKILLED[0]][order.index(UNSKILLED[1])].endswith("2/2 still learning)")
    assert any(each.startswith("3 runs diverged") for each in page.warnings)


def test_the_answer_names_the_best_of_each_task_with_its_interval(state: Grid, page: Page) -> None:
    best = table(page, "Best encoding by task")
    for task, row in best.items():
        assert f"{row[0].split(' (')[0]} on {task} ({row[1]}" in page.answer.replace("\u00a0", " ")
    assert page.question == "Which encoding is best at 2 tasks?"
    assert "verdicts are only indicative" in page.notes[1]
    assert "Of 1 claim, 1 hold (1 in part), 0 fail and 0 are open." in page.notes[1]


def test_encodings_tie_unless_the_interval_of_their_difference_leaves_out_0() -> None:
    values = {"a": [0.9, 0.91, 0.92], "b": [0.5, 0.51, 0.52], "c": [0.4, 0.9, 1.0], "none": [float("nan")]}
    found = ranked(values)
    assert [each.title for each in found] == ["a", "c", "b"]
    assert best_of(found) == ["a", "c"]
    assert [each.title for each in ranked(values, lower=True)] == ["b", "c", "a"]
    assert best_of(ranked({"a": [0.9], "b": [0.8]})) == ["a"]


def test_heads_and_their_means_are_those_of_models_with_skill(state: Grid, page: Page) -> None:
    skilled = [cell for cell in state.results.cells if cell.skilled and "/" not in cell.key.label]
    three = [np.array(cell.measures["behaviour"]["positional"], dtype=float).ravel() for cell in skilled]
    wanted = np.concatenate(three)
    drawn = sorted(row["positional"] for row in rows_of(page, "heads"))
    np.testing.assert_allclose(drawn, np.sort(wanted[np.isfinite(wanted)]), atol=1e-4)
    each = []
    for cell in _of(state, "index", "rope"):
        shares = np.array(cell.measures["behaviour"]["positional"], dtype=float)
        each.append(float(np.average(shares[~np.isnan(shares)], weights=_lost(cell)[~np.isnan(shares)])))
    means = {(row["task"], row["series"]): row for row in rows_of(page, "plane")}
    assert means["index", "RoPE"]["positional"] == pytest.approx(np.mean(each), abs=1e-4)
    assert means["index", "RoPE"]["positional_seeds"] == f"{min(each):.2f} to {max(each):.2f}"
    assert ("index", "nope") not in means, "its models have no skill"


def test_skill_by_length_and_why_there_is_none(state: Grid, page: Page) -> None:
    rows = [row for row in rows_of(page, "lengths") if (row["task"], row["series"]) == ("index", "RoPE")]
    assert [row["factor"] for row in rows] == list(FACTORS[:-1])
    for at, row in enumerate(rows):
        found = [cell.measures["extrapolation"]["rows"][at]["accuracy"] for cell in _of(state, "index", "rope")]
        assert row["value"] == pytest.approx(np.mean([(each - GUESS) / (1 - GUESS) for each in found]), abs=1e-4)
    missing = next(each for each in page.tables if each.name == "Missing measures")
    told = {row[0].plain: [cell.plain for cell in row[1:]] for row in missing.body}
    why = "labels: <b>a text so long</b> has other ones."
    assert told["extrapolation at 4 × the training length"] == ["all", "index and find", why]
    assert told["frequency"][2] == "encoding: it does not turn."
    assert "labels: &lt;b&gt;a text so long" in page.html()


def test_the_head_that_matters_in_the_end_is_followed(state: Grid, page: Page) -> None:
    found = _of(state, "index", "rope")
    for cell in found:
        layer, head = divmod(int(_lost(cell).argmax()), HEADS)
        wanted = [(row["step"], row["symbolic"][layer][head]) for row in cell.watched]
        assert followed(cell, "symbolic") == wanted
    drawn = [row for row in rows_of(page, "training") if row["panel"] == "index, RoPE"]
    means = np.mean([[value for _, value in followed(cell, "symbolic")] for cell in found], axis=0)
    assert [row["value"] for row in drawn if row["series"] == "symbolic share"] == pytest.approx(means, abs=1e-4)
    unskilled = _of(state, "index", "nope")[0]
    assert followed(unskilled, "symbolic") == []
    assert followed(unskilled, "accuracy") == [(0, 0.0), (4, 0.2), (12, 0.6)]
    by_loss = found[0].by_loss
    assert by_loss is not None
    none_counts = replace(found[0], by_loss=replace(by_loss, low=np.zeros_like(by_loss.drops)))
    assert followed(none_counts, "symbolic") == [], "a tie decides nothing"


def test_scans_and_frequencies_are_drawn_from_their_models(state: Grid, page: Page) -> None:
    drawn = {(row["panel"], row["series"], row["at"]): row["value"] for row in rows_of(page, "scan")}
    for value, label in ((3.0, "turn/3"), (0.001, "turn/0.001")):
        found = [cell.accuracy for cell in _of(state, "index", label)]
        assert drawn["Test accuracy", "index", value] == pytest.approx(np.mean(found), abs=1e-4)
    bands = [row for row in rows_of(page, "bands") if (row["encoding"], row["series"]) == ("RoPE", "index")]
    drops = [np.array(cell.measures["bands"]["drops"]).sum((0, 1)) for cell in _of(state, "index", "rope")]
    assert [row["value"] for row in bands] == pytest.approx(np.mean(drops, axis=0)[1::-1], abs=1e-3)
    assert {row["panel"] for row in rows_of(page, "centre")} == {
        "Encodings with several frequencies",
        "Scans, one value per model",
    }


def test_every_chart_is_saved_and_the_page_stays_the_same(state: Grid, page: Page, tmp_path: Path) -> None:
    for name, chart in page.charts().items():
        chart.save(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
    assert len(page.sections) <= 6
    assert write_report(tmp_path, page).read_text() == state.page().html()


def test_a_part_of_a_study_and_none_of_it(state: Grid, tmp_path: Path) -> None:
    partial = made_up_grid(tmp_path, finished=3).page()
    assert partial.warnings == ["Not complete: 3 of 26 models are finished (11.5% of the steps)."]
    assert "1/2 seeds" in table(partial, "Test accuracy by task and encoding")["index"][0]
    empty = made_up_grid(tmp_path, finished=0).page()
    assert empty.answer == "No model is finished yet."
    assert empty.figures == []
    assert set(table(empty, "Test accuracy by task and encoding")["index"]) == {"–"}
    bare = Results(replace(cell, measures={}, watched=[]) for cell in state.results.cells)
    unmeasured = replace(state, results=bare, relations=[]).page()
    assert [each.id for each in unmeasured.figures] == ["accuracy", "scan"]
    for each in (partial, empty, unmeasured):
        assert each.html()


def test_one_seed_of_one_encoding_is_a_page_and_titles_are_escaped(tmp_path: Path) -> None:
    spec = made_up_spec(
        title=NASTY,
        about=NASTY,
        seeds=1,
        tasks={NASTY: {"task": "index", "title": NASTY, "options": {"length": 10, "words": 8}, "watch": True}},
        encodings={"rope": {"title": NASTY}, 'a"b': {"encoding": "rope-bands", "scan": {"frequencies": [1.0]}}},
    )
    page = made_up_grid(tmp_path, spec).page()
    assert page.question == f"How well does {NASTY} do on 1 task?"
    assert page.answer.endswith("With 1 seed this is only indicative.")
    assert "[" not in page.answer, "no interval"
    html = page.html()
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert") > 5
    for chart in page.charts().values():
        chart.save(tmp_path / "chart.svg")
