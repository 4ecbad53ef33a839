"""A grid study's page says what its models say, and its charts draw the values of its tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.charts import figure_rows
from tests.report.grid.state import (
    FACTORS,
    GUESS,
    HALF_DIVERGED,
    HEADS,
    HOSTILE_NAME,
    UNSKILLED,
    WITHOUT_WEIGHTS,
    random_grid,
    random_spec,
)

from toeplens.report import Page, write_report
from toeplens.report.grid import training_curve
from toeplens.report.grid_data import best_of, rank_encodings
from toeplens.studies import CellResult, Results
from toeplens.studies.grid import GridStudy
from toeplens.studies.kit.verdicts import LEVEL, mean_contrast


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> GridStudy:
    return random_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def page(state: GridStudy) -> Page:
    return state.page()


def table_of(page: Page, name: str) -> dict[str, list[str]]:
    """The cells of a table by the first one, with their small print."""
    result = next(each for each in page.tables if each.name == name)
    return {row[0].plain_text: [cell.full_text for cell in row[1:]] for row in result.body}


def cell_of(state: GridStudy, task: str, label: str) -> list[CellResult]:
    return [cell for cell in state.results.cells if (cell.key.task, cell.key.label) == (task, label)]


def without_weights(cell: CellResult) -> np.ndarray:
    assert cell.by_loss is not None
    return np.maximum(cell.by_loss.drops, 0)


def test_the_chart_and_the_tables_show_the_accuracies(state: GridStudy, page: Page) -> None:
    drawn_rows = {(row["task"], row["series"]): row for row in figure_rows(page, "accuracy")}
    titles = {column.label: column.title for column in state.spec.columns() if not column.scan}
    table_rows = table_of(page, "Test accuracy by task and encoding")
    for task, name in (("index", "index"), ("retrieval", "find")):
        for place, (label, title) in enumerate(titles.items()):
            actual = [cell.accuracy for cell in cell_of(state, task, label) if cell.status == "complete"]
            if not actual:
                assert (name, title) not in drawn_rows
                continue
            row = drawn_rows[name, title]
            assert (row["value"], row["seeds"]) == (pytest.approx(np.mean(actual), abs=1e-5), len(actual))
            expected = mean_contrast(actual).interval(LEVEL)[0] if len(actual) > 1 else actual[0]
            assert row["low"] == pytest.approx(max(0, expected), abs=1e-4)
            assert table_rows[name][place].startswith(f"{100 * np.mean(actual):.1f}")
        assert table_rows[name][len(titles) :] == ["12.5", "20.0", "30.0 (bag)"]
    order = list(titles)
    assert table_rows["find"][order.index(WITHOUT_WEIGHTS[1])] == "all 2 diverged"
    assert table_rows["find"][order.index("mine")] == "", "not part of it"
    assert table_rows["find"][order.index(HALF_DIVERGED[1])].endswith("(1 diverged)")
    assert table_rows[UNSKILLED[0]][order.index(UNSKILLED[1])].endswith("2/2 still learning)")
    assert any(each.startswith("3 runs diverged") for each in page.warnings)


def test_the_answer_names_the_best_of_each_task_with_its_interval(state: GridStudy, page: Page) -> None:
    best = table_of(page, "Best encoding by task")
    for task, row in best.items():
        assert f"{row[0].split(' (')[0]} on {task} ({row[1]}" in page.answer.replace("\u00a0", " ")
    assert page.question == "Which encoding is best at 2 tasks?"
    assert "verdicts are only indicative" in page.notes[1]
    assert "Of 1 claim, 1 hold (1 in part), 0 fail and 0 are open." in page.notes[1]


def test_encodings_tie_unless_their_difference_interval_excludes_0() -> None:
    values = {"a": [0.9, 0.91, 0.92], "b": [0.5, 0.51, 0.52], "c": [0.4, 0.9, 1.0], "none": [float("nan")]}
    actual = rank_encodings(values)
    assert [each.title for each in actual] == ["a", "c", "b"]
    assert best_of(actual) == ["a", "c"]
    assert [each.title for each in rank_encodings(values, lower=True)] == ["b", "c", "a"]
    assert best_of(rank_encodings({"a": [0.9], "b": [0.8]})) == ["a"]


def test_heads_and_their_means_are_those_of_models_with_skill(state: GridStudy, page: Page) -> None:
    skilled = [cell for cell in state.results.cells if cell.is_skilled and "/" not in cell.key.label]
    three = [np.array(cell.measures["behaviour"]["positional"], dtype=float).ravel() for cell in skilled]
    expected = np.concatenate(three)
    drawn = sorted(row["positional"] for row in figure_rows(page, "heads"))
    np.testing.assert_allclose(drawn, np.sort(expected[np.isfinite(expected)]), atol=1e-4)
    per_head = []
    for cell in cell_of(state, "index", "rope"):
        shares = np.array(cell.measures["behaviour"]["positional"], dtype=float)
        per_head.append(float(np.average(shares[~np.isnan(shares)], weights=without_weights(cell)[~np.isnan(shares)])))
    means = {(row["task"], row["series"]): row for row in figure_rows(page, "plane")}
    assert means["index", "RoPE"]["positional"] == pytest.approx(np.mean(per_head), abs=1e-4)
    assert means["index", "RoPE"]["positional_seeds"] == f"{min(per_head):.2f} to {max(per_head):.2f}"
    assert ("index", "nope") not in means, "its models have no skill"


def test_skill_by_length_or_the_reason_for_none(state: GridStudy, page: Page) -> None:
    rows = [row for row in figure_rows(page, "lengths") if (row["task"], row["series"]) == ("index", "RoPE")]
    assert [row["factor"] for row in rows] == list(FACTORS[:-1])
    for at, row in enumerate(rows):
        actual = [cell.measures["extrapolation"]["rows"][at]["accuracy"] for cell in cell_of(state, "index", "rope")]
        assert row["value"] == pytest.approx(np.mean([(each - GUESS) / (1 - GUESS) for each in actual]), abs=1e-4)
    missing = next(each for each in page.tables if each.name == "Missing measures")
    reasons = {row[0].plain_text: [cell.plain_text for cell in row[1:]] for row in missing.body}
    why = "labels: <b>a text so long</b> has other ones."
    assert reasons["extrapolation at 4 × the training length"] == ["all", "index and find", why]
    assert reasons["frequency"][2] == "encoding: it does not turn."
    assert "labels: &lt;b&gt;a text so long" in page.html()


def test_the_finally_most_important_head_is_followed(state: GridStudy, page: Page) -> None:
    actual = cell_of(state, "index", "rope")
    for cell in actual:
        layer, head = divmod(int(without_weights(cell).argmax()), HEADS)
        expected = [(row["step"], row["symbolic"][layer][head]) for row in cell.probe_rows]
        assert training_curve(cell, "symbolic") == expected
    drawn = [row for row in figure_rows(page, "training") if row["panel"] == "index, RoPE"]
    means = np.mean([[value for _, value in training_curve(cell, "symbolic")] for cell in actual], axis=0)
    assert [row["value"] for row in drawn if row["series"] == "symbolic share"] == pytest.approx(means, abs=1e-4)
    unskilled = cell_of(state, "index", "nope")[0]
    assert training_curve(unskilled, "symbolic") == []
    assert training_curve(unskilled, "accuracy") == [(0, 0.0), (4, 0.2), (12, 0.6)]
    by_loss = actual[0].by_loss
    assert by_loss is not None
    none_counts = replace(actual[0], by_loss=replace(by_loss, low=np.zeros_like(by_loss.drops)))
    assert training_curve(none_counts, "symbolic") == [], "a tie decides nothing"


def test_scans_and_frequencies_are_drawn_from_their_models(state: GridStudy, page: Page) -> None:
    drawn = {(row["panel"], row["series"], row["at"]): row["value"] for row in figure_rows(page, "scan")}
    for value, label in ((3.0, "turn/3"), (0.001, "turn/0.001")):
        actual = [cell.accuracy for cell in cell_of(state, "index", label)]
        assert drawn["Test accuracy", "index", value] == pytest.approx(np.mean(actual), abs=1e-4)
    bands = [row for row in figure_rows(page, "bands") if (row["encoding"], row["series"]) == ("RoPE", "index")]
    drops = [np.array(cell.measures["bands"]["drops"]).sum((0, 1)) for cell in cell_of(state, "index", "rope")]
    assert [row["value"] for row in bands] == pytest.approx(np.mean(drops, axis=0)[1::-1], abs=1e-3)
    assert {row["panel"] for row in figure_rows(page, "centre")} == {
        "Encodings with several frequencies",
        "Scans, one value per model",
    }


def test_every_chart_is_exported_and_the_page_is_deterministic(state: GridStudy, page: Page, tmp_path: Path) -> None:
    for name, chart in page.charts().items():
        chart.save(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
    assert len(page.sections) <= 6
    assert write_report(tmp_path, page).read_text() == state.page().html()


def test_partial_and_empty_studies_have_pages(state: GridStudy, tmp_path: Path) -> None:
    partial = random_grid(tmp_path, finished=3).page()
    assert partial.warnings == ["Not complete: 3 of 26 models are finished (11.5% of the steps)."]
    assert "1/2 seeds" in table_of(partial, "Test accuracy by task and encoding")["index"][0]
    empty = random_grid(tmp_path, finished=0).page()
    assert empty.answer == "No model is finished yet."
    assert empty.figures == []
    assert set(table_of(empty, "Test accuracy by task and encoding")["index"]) == {"–"}
    bare = Results(replace(cell, measures={}, probe_rows=[]) for cell in state.results.cells)
    unmeasured = replace(state, results=bare, relations=[]).page()
    assert [each.id for each in unmeasured.figures] == ["accuracy", "scan"]
    for each in (partial, empty, unmeasured):
        assert each.html()


def test_a_single_model_has_a_page_and_titles_are_escaped(tmp_path: Path) -> None:
    spec = random_spec(
        title=HOSTILE_NAME,
        about=HOSTILE_NAME,
        seeds=1,
        tasks={
            HOSTILE_NAME: {"task": "index", "title": HOSTILE_NAME, "options": {"length": 10, "words": 8}, "watch": True}
        },
        encodings={"rope": {"title": HOSTILE_NAME}, 'a"b': {"encoding": "rope-bands", "scan": {"frequencies": [1.0]}}},
    )
    page = random_grid(tmp_path, spec).page()
    assert page.question == f"How well does {HOSTILE_NAME} do on 1 task?"
    assert page.answer.endswith("With 1 seed this is only indicative.")
    assert "[" not in page.answer, "no interval"
    html = page.html()
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert") > 5
    for chart in page.charts().values():
        chart.save(tmp_path / "chart.svg")


def test_accuracy_by_group_is_drawn_during_training_and_by_length(state: GridStudy) -> None:
    """Two groups in the models of one encoding, whose means over seeds are the points of its panel."""
    groups = {"1 hop": 0.75, "2 hops": 0.25}
    cells, (task, label), lengths = list(state.results.cells), ("index", "rope"), set[int]()
    for n, cell in enumerate(cells):
        if (cell.key.task, cell.key.label) == (task, label):
            shifted = {name: value + 0.001 * cell.key.seed for name, value in groups.items()}
            extrapolation = cell.measure("extrapolation")
            rows = [replace(row, groups=shifted) for row in extrapolation.rows if row.accuracy is not None]
            lengths |= {row.length for row in rows}
            measures = cell.measures | {"extrapolation": replace(extrapolation, rows=tuple(rows)).to_dict()}
            probed = [{"step": step, "accuracy": 0.5, "groups": shifted} for step in (0, 9)]
            cells[n] = replace(cell, probe_rows=probed, measures=measures)
    page = replace(state, results=Results(cells)).page()
    seeds = [cell.key.seed for cell in cells if (cell.key.task, cell.key.label) == (task, label)]
    for name, axis, places in (("groups-step", "step", 2), ("groups-length", "length", len(lengths))):
        drawn = figure_rows(page, name)
        assert len(drawn) == places * len(groups)
        assert len({row[axis] for row in drawn}) == places
        for row in drawn:
            assert row["value"] == pytest.approx(groups[row["series"]] + 0.001 * np.mean(seeds))
    assert not {"groups-step", "groups-length"} & {each.id for each in state.page().figures}
