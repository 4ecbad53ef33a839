"""A grid study's page says what its models say, needs nothing but itself, and draws in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

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
from tests.report.reading import figures, rows_of, stands_alone, traces, without_plotly

from toeplens.report.grid.figures import followed
from toeplens.report.grid.look import encoding_looks
from toeplens.report.grid.page import render_grid, write_grid
from toeplens.studies import CellResult, Results
from toeplens.studies.grid import Grid


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return made_up_grid(tmp_path_factory.mktemp("grid"))


@pytest.fixture(scope="module")
def page(state: Grid) -> str:
    return render_grid(state)


def _of(state: Grid, task: str, label: str) -> list[CellResult]:
    return [cell for cell in state.results.cells if (cell.key.task, cell.key.label) == (task, label)]


def _skilled(cell: CellResult) -> bool:
    return cell.status == "complete" and (cell.accuracy - GUESS) / (1 - GUESS) >= 0.25


def _lost(cell: CellResult) -> np.ndarray:
    return np.maximum(cell.by_loss.drops, 0)


def test_the_matrix_is_the_accuracies(state: Grid, page: str) -> None:
    table = rows_of(page, "Test accuracy by task and encoding")
    order = ["rope", "t5", "alibi", "nope", "mine"]
    assert list(encoding_looks(state.spec)) == order, "those of the other pages in their order, then the others"
    assert list(table)[2:] == ["index", "find"], "below two rows of heads"
    for task, row in (("index", table["index"]), ("retrieval", table["find"])):
        for label, told in zip(order, row, strict=False):
            if (task, label) in (LOST, HALF_DIVERGED, ("retrieval", "mine")):
                continue
            first, second = sorted(100 * cell.accuracy for cell in _of(state, task, label))
            note = " 2/2 still learning" if (task, label) == UNSKILLED else ""
            assert told == f"{(first + second) / 2:.1f} {first:.1f}–{second:.1f}{note}"
        assert row[5:] == ["12.5", "20.0", "30.0 bag"]
    row = table["find"]
    assert row[order.index("alibi")] == "all 2 diverged"
    assert row[order.index("mine")] == "", "not part of it"
    kept = 100 * _of(state, "retrieval", "t5")[1].accuracy
    assert row[order.index("t5")] == f"{kept:.1f} 1 diverged"
    assert "3 runs diverged" in page


def test_every_head_of_a_skilled_model_is_on_the_plane(state: Grid, page: str) -> None:
    for view, tasks in enumerate((("index", "retrieval"), ("index",), ("retrieval",))):
        by_label = traces(page, f"plane-{view}-0-0")
        for label in encoding_looks(state.spec):
            wanted = []
            for cell in state.results.cells:
                if cell.key.label == label and cell.key.task in tasks and _skilled(cell):
                    three = [cell.measures["behaviour"][name] for name in ("positional", "symbolic", "interaction")]
                    heads = np.array(three, dtype=float).reshape(3, -1).T
                    wanted += heads[~np.isnan(heads[:, 0])].tolist()
            drawn = by_label.get(label, {"x": [], "y": [], "customdata": []})
            got = [[x, y, more[1]] for x, y, more in zip(drawn["x"], drawn["y"], drawn["customdata"], strict=True)]
            np.testing.assert_allclose(np.array(sorted(got)), np.array(sorted(wanted)), atol=6e-5)
    assert "nope" not in traces(page, "plane-1-0-0"), "its models on index have no skill"


def test_an_encoding_without_a_mark_says_why(state: Grid, page: str) -> None:
    assert "Encodings without a mark" not in page
    why = {"why": "encoding: FoX & others have no table."}
    cells = [
        replace(cell, measures={"behaviour": why}) if cell.key.label == "t5" else cell
        for cell in state.results.cells
        if cell.key.label != "alibi" and (cell.key.label != "nope" or cell.key.task == "index")
    ]
    made = render_grid(replace(state, results=Results(cells)))
    told = dict(re.findall(r"<li>(\w+): (.*?)\.</li>", made))
    assert told == {
        "ALiBi": "no model is finished",
        "t5": "encoding: FoX &amp; others have no table",
        "nope": "no model has at least 25% skill",
    }
    drawn = traces(made, "plane-0-0-0")
    assert drawn.keys().isdisjoint({"alibi", "t5", "nope"})
    legend = re.search(r'id="figure-plane".*?</figure>', made, re.DOTALL)
    assert "RoPE" in legend[0]
    assert ">t5<" not in legend[0]


def test_what_the_skill_rests_on_is_weighed_by_what_is_lost(state: Grid, page: str) -> None:
    each = []
    for cell in _of(state, "index", "rope"):
        shares = np.array(cell.measures["behaviour"]["positional"], dtype=float)
        each.append(float(np.average(shares[~np.isnan(shares)], weights=_lost(cell)[~np.isnan(shares)])))
    mark = traces(page, "plane-1-0-1")["rope"]
    assert mark["x"] == [pytest.approx(np.mean(each), abs=6e-5)]
    low, high = sorted(each)
    assert mark["customdata"][0][1] == f"{np.mean(each):.2f} ({low:.2f} to {high:.2f})"


def test_skill_by_length_and_why_there_is_none(state: Grid, page: str) -> None:
    trace = traces(page, "lengths-0-0-0")["rope"]
    assert trace["x"] == list(FACTORS[:-1])
    for at, mean in enumerate(trace["y"]):
        rows = [cell.measures["extrapolation"]["rows"][at] for cell in _of(state, "index", "rope")]
        assert mean == pytest.approx(np.mean([(row["accuracy"] - GUESS) / (1 - GUESS) for row in rows]), abs=6e-5)
    assert (
        "index: not evaluated at 4 × the training length: labels: &lt;b&gt;a text so long&lt;/b&gt; has other ones."
        in page
    )


def test_the_head_that_matters_in_the_end_is_followed(state: Grid, page: str) -> None:
    found = _of(state, "index", "rope")
    for cell in found:
        layer, head = divmod(int(_lost(cell).argmax()), HEADS)
        wanted = [(row["step"], row["symbolic"][layer][head]) for row in cell.watched]
        assert followed(cell, "symbolic") == wanted
    trace = traces(page, "training-0-0-0")["symbolic"]
    means = np.mean([[value for _, value in followed(cell, "symbolic")] for cell in found], axis=0)
    assert (trace["x"], trace["y"]) == ([0, 4, 12], pytest.approx(means, abs=6e-6))
    unskilled = _of(state, "index", "nope")[0]
    assert followed(unskilled, "symbolic") == []
    assert followed(unskilled, "accuracy") == [(0, 0.0), (4, 0.2), (12, 0.6)]
    by_loss = found[0].by_loss
    none_counts = replace(found[0], by_loss=replace(by_loss, low=np.zeros_like(by_loss.drops)))
    assert followed(none_counts, "symbolic") == [], "a tie decides nothing"


def test_a_part_of_a_study_and_none_of_it(state: Grid, tmp_path: Path) -> None:
    path = write_grid(made_up_grid(tmp_path, finished=3))
    partial = render_grid(made_up_grid(tmp_path, finished=3))
    assert (path.name, path.read_text()) == ("report.html", partial), "the same state gives the same page"
    assert "<b>Not complete.</b> 3 of 26 models are finished (11.5% of the steps)." in partial
    assert "1/2 seeds" in partial
    assert "this figure needs finished models of a scan" in partial
    empty = render_grid(made_up_grid(tmp_path, finished=0))
    assert figures(empty) == {}
    assert "0 of 26 models" in empty
    assert "this figure needs tasks with `watch: true`" in empty
    assert set(rows_of(empty, "Test accuracy by task and encoding")["index"]) == {"–"}
    bare = Results(replace(cell, measures={}, watched=[]) for cell in state.results.cells)
    unmeasured = render_grid(replace(state, results=bare, relations=[]))
    assert {place.split("-")[0] for place in figures(unmeasured)} == {"scan"}
    assert "this figure needs the measure extrapolation" in unmeasured


def test_titles_are_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    spec = made_up_spec(
        title=NASTY,
        about=NASTY,
        tasks={NASTY: {"task": "index", "title": NASTY, "options": {"length": 10, "words": 8}, "watch": True}},
        encodings={
            "rope": {"title": NASTY},
            'a"b': {"title": "%{x}", "encoding": "rope-bands", "scan": {"frequencies": [1.0]}},
        },
    )
    page = render_grid(made_up_grid(tmp_path, spec))
    own = without_plotly(page)
    assert "<script>alert" not in own
    assert own.count("&lt;script&gt;alert") > 10
    names = {trace.get("name", "") for figure in figures(own).values() for trace in figure["data"]}
    assert not any("<" in name for name in names), "nor as plotly's own marks"
    assert stands_alone(page)
