"""A study's numbers from its cells to its page: what tables, traces and their hover texts say is what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.papers.deposit.numbers import made, reproduced
from tests.papers.deposit.page.conftest import ENVIRONMENT
from tests.papers.deposit.test_numbers import GRID, SPEC, grid_cell
from tests.report.reading import Text, hovers, without_plotly

from toeplens.papers.deposit import Plan, Reproduction, accuracy_table, claims_of
from toeplens.papers.deposit.page import render
from toeplens.papers.deposit.page.accuracy import accuracies, convergence
from toeplens.papers.deposit.page.deposits import peaks_by_layer, violins
from toeplens.papers.deposit.page.heads import accuracy_and_drop, drops_by_layer, heatmap, silencing_curves
from toeplens.papers.deposit.page.look import drop_limit
from toeplens.papers.deposit.page.page import blocks
from toeplens.report.grid.lengths import lengths
from toeplens.report.grid.lengths import relations as relations_block
from toeplens.report.grid.matrix import costs
from toeplens.report.grid.matrix import matrix as matrix_rows
from toeplens.report.grid.page import render_grid
from toeplens.report.grid.plane import plane
from toeplens.report.kit.blocks import Block
from toeplens.studies import Key, Results, judge
from toeplens.studies.grid import Grid
from toeplens.studies.grid.relations import relations
from toeplens.training.presets import DISTANCE

FIRST, SECOND, WEAK, GONE = reproduced()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    plan, results = Plan("smoke", ("paper",), 2), Results(reproduced())
    entries, table = judge(claims_of(plan.parts), results, plan.protocols), accuracy_table(results, plan.protocols)
    out = tmp_path_factory.mktemp("study")
    ledger = {"plan": plan, "results": results, "entries": entries, "table": table}
    return Reproduction(directory=out, finished=4, total=16, share=0.25, environment=dict(ENVIRONMENT), **ledger)


@pytest.fixture(scope="module")
def page(state: Reproduction) -> Text:
    return Text(without_plotly(render(state)))


def traces(figure: go.Figure, key: str | None) -> list[Any]:
    return [trace for trace in figure.data if trace.meta == key]


def only(block: Block, place: str) -> go.Figure:
    return dict(block.places)[place].figure


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_table_1(page: Text) -> None:
    rows = {row[0][2:]: [cell.strip() for cell in row[1:]] for row in page.tables["Accuracy, Task 1 (distance)"][2:-2]}
    assert rows["RoPE"] == ["92.64", "80.0", "70.0–90.0 2 seeds", "40.0 L1\u00a0H1, L2\u00a0H2"]
    assert rows["NoPE"] == ["3.51", "28.0", "1 seed, 1 diverged", "4.0 L1\u00a0H1"]
    guesses = [[cell for cell in row if cell] for row in page.tables["Accuracy, Task 1 (distance)"][-2:]]
    assert [row[-1] for row in guesses] == ["10.0", "20.0"]


def test_the_deposits_of_each_model_stand_by_its_own_seed(page: Text) -> None:
    printed = page.tables["Deposit figures, Task 1 (distance), paper protocol"][1:]
    assert printed[:4] == [
        ["RoPEseed 42", "1", "single-head", "1", "0.71", "0.14", "0.83", "1.4", "0.33", "1"],
        ["2", "redundant", "1", "0.07", "0.00", "1.00", "1.0", "0.50", "never"],
        ["RoPEseed 43", "1", "few-head", "1", "0.40", "0.20", "0.67", "1.8", "0.17", "2"],
        ["2", "single-head", "2", "0.60", "0.00", "1.00", "1.0", "0.50", "1"],
    ]
    assert [row[:-6] for row in printed[4:]] == [["NoPEseed 42", "1", "few-head", "1"], ["2", "redundant", "1"]]
    kinds = page.tables["Kinds of layers, Task 1 (distance), paper protocol"][1]
    assert " ".join(" ".join(kinds).split()) == "● RoPE single-head 1/2 few-head 1/2 redundant 1/2 single-head 1/2"


def test_every_model_has_its_line(page: Text) -> None:
    lines = {(row[0], row[3]): row for row in page.tables["Models"] if row[1] == "Task 1 (distance)"}
    assert lines["RoPE", "43"][4:9] == ["complete", "1,000", "75.0", "70.0", "2"]
    assert lines["NoPE", "43"][4:9] == ["diverged", "1,000", "–", "–", "2"], "no accuracy is claimed for it"


def test_a_study_of_several_set_ups_says_so(state: Reproduction, grid: Grid, page: Text) -> None:
    words = "The 3 runs were carried out on 2 set-ups: <one>; another."
    for shown in (
        render(replace(state, environment=ENVIRONMENT | {"setups": words})),
        render_grid(replace(grid, environment=ENVIRONMENT | {"setups": words})),
    ):
        assert words in Text(without_plotly(shown)).text
    assert "set-ups" not in page.text


# ---- figures --------------------------------------------------------------------------------------------------------


def test_a_heat_map_says_what_a_head_costs() -> None:
    figure = heatmap(FIRST, 0.5)
    (trace,) = figure.data
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-0.5, 0.5)
    assert [list(row) for row in trace.z] == [[0.5, 0.1], [0.05, -0.02]]
    assert [list(row) for row in trace.text] == [["50", "10"], ["5", "−2"]]
    assert hovers(trace) == [
        "layer 1, head 1 | 50.0 points lost [47.0, 55.0] | accuracy 90.0% → 40.0%",
        "layer 1, head 2 | 10.0 points lost [7.0, 15.0] | accuracy 90.0% → 80.0%",
        "layer 2, head 1 | 5.0 points lost [2.0, 10.0] | accuracy 90.0% → 85.0%",
        "layer 2, head 2 | −2.0 points lost [−5.0, 3.0] | accuracy 90.0% → 92.0%",
    ]


def test_the_scale_of_all_heat_maps_ends_at_the_largest_drop(state: Reproduction) -> None:
    assert drop_limit(state) == 0.5


def test_learning_curves_are_means_with_their_range(state: Reproduction) -> None:
    low, high, mean = traces(convergence(state.results, "paper", DISTANCE, "test"), "rope")
    assert (list(low.y), list(high.y)) == ([0.3, 0.6, 0.7], [0.5, 0.8, 0.9])
    assert hovers(mean) == [
        "RoPE | epoch 1: 40.0% | 30.0% to 50.0%, 2 seeds",
        "RoPE | epoch 2: 70.0% | 60.0% to 80.0%, 2 seeds",
        "RoPE | epoch 3: 80.0% | 70.0% to 90.0%, 2 seeds",
    ]
    (weak,) = traces(convergence(state.results, "paper", DISTANCE, "train"), "nope")
    assert hovers(weak)[-1] == "NoPE | epoch 3: 33.0% | one seed", "the seed that diverged is no part of it"
    canvas = convergence(state.results, "paper", DISTANCE, "test")
    assert [(line.y0, line.line.dash) for line in canvas.layout.shapes] == [(0.1, "dot"), (0.2, "dash")]
    assert [note.text for note in canvas.layout.annotations] == ["chance", "length<br>only"]


def test_accuracies_are_the_mean_the_seeds_and_the_papers(state: Reproduction) -> None:
    figure = accuracies(state.table, state.results)
    seeds, rope, nope, paper = figure.data
    assert hovers(seeds) == ["RoPE | seed 42: 90.0%", "RoPE | seed 43: 70.0%"]
    assert hovers(rope) == ["RoPE | 80.0%, 70.0% to 90.0% over 2 seeds"]
    assert hovers(nope) == ["NoPE | 28.0%, one seed"]
    assert hovers(paper) == ["RoPE | the paper's Table 1: 92.64%", "NoPE | the paper's Table 1: 3.51%"]
    assert [note.text for note in figure.layout.annotations] == ["80.0", "28.0", "chance", "length only"]
    assert [line.x0 for line in figure.layout.shapes] == [0.1, 0.2]


def test_silencing_curves_and_where_half_of_the_skill_is_gone() -> None:
    figure = silencing_curves([FIRST, SECOND])
    assert [(line.y0, line.line.dash) for line in figure.layout.shapes] == [
        (pytest.approx((0.8 + 0.1) / 2), "dash"),
        (0.1, "dot"),
    ], "half way from the accuracy down to chance"
    assert [trace.y for trace in figure.data] == [
        pytest.approx((0.8, 0.45, 0.325)),
        pytest.approx((0.8, 0.625, 0.6)),
    ]
    assert hovers(figure.data[0])[1] == "layer 1, 1 heads silenced: 45.0%"


def test_violins_have_every_head_of_every_seed() -> None:
    first, second = drops_by_layer([FIRST, SECOND], -0.1, 0.6).data
    assert list(first.y) == pytest.approx([50, 10, 20, 10])
    assert hovers(second) == [
        "layer 2, head 1, seed 42 | 5.0 points lost",
        "layer 2, head 2, seed 42 | −2.0 points lost",
        "layer 2, head 1, seed 43 | 0.0 points lost",
        "layer 2, head 2, seed 43 | 30.0 points lost",
    ]


def test_accuracy_against_the_largest_drop(state: Reproduction) -> None:
    line, *marks = accuracy_and_drop(state.results, "paper", DISTANCE).data
    assert (list(line.x), list(line.y)) == ([0.1, 1.0], [0, pytest.approx(90)]), "all that is over chance"
    assert sorted((mark.x[0], mark.y[0]) for mark in marks) == [(0.28, 4.0), (0.7, 30.0), (0.9, 50.0)]
    assert sorted(text for mark in marks for text in hovers(mark)) == [
        "NoPE, seed 42 | accuracy 28.0% | largest drop 4.0 points",
        "RoPE, seed 42 | accuracy 90.0% | largest drop 50.0 points",
        "RoPE, seed 43 | accuracy 70.0% | largest drop 30.0 points",
    ]


def test_a_deposit_by_encoding_and_by_layer() -> None:
    encodings = [("rope", [FIRST, SECOND]), ("nope", [WEAK])]
    violin, mean, *_ = violins(encodings, lambda layer: layer.peak, "peak", top=1.0).data
    assert list(violin.y) == pytest.approx([0.5 / 0.7, 0.3 / 0.5])
    assert list(mean.y) == pytest.approx([(0.5 / 0.7 + 0.3 / 0.5) / 2])
    assert hovers(violin) == [
        "RoPE, seed 42, layer 1 | head 1: 71% of the skill, 50.0 points | single-head; effective heads 1.4",
        "RoPE, seed 43, layer 2 | head 2: 60% of the skill, 30.0 points | single-head; effective heads 1.0",
    ]
    (heat,) = peaks_by_layer(encodings).data
    assert list(heat.z[1]) == pytest.approx([0.2 / 0.5, 0.3 / 0.5])
    assert set(heat.z[2]) == {None}, "a gap before the next encoding"
    assert hovers(heat)[2].startswith("RoPE, seed 43, layer 1 | head 1: 40% of the skill, 20.0 points | few-head")


def test_the_words_of_the_panels_have_the_same_numbers(state: Reproduction) -> None:
    found = {id: [panel.words for _, panel in block.places] for id, block in blocks(state).items()}
    (accuracy,) = found["accuracy"]
    assert accuracy == "Test accuracy: RoPE 80.0%, NoPE 28.0%."
    test = found[f"convergence-{DISTANCE}"][1]
    assert "RoPE 80.0%" in test
    assert "Largest: 50.0 points [47.0, 55.0], by silencing head 1 of layer 1 in RoPE" in found["heads"][0]
    assert found["skill"] == [
        "Accuracy, and the largest loss by one head in points, mean over seeds: "
        "RoPE 80.0% and 40.0; NoPE 28.0% and 4.0."
    ]
    assert "by layer: 1, never." in found["cumulative"][0]


# ---- a grid study ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    results = Results([*GRID, grid_cell("t5", 42, 0.6, 0.5, 0.4, 0.3)])
    related, out = relations(SPEC, results), tmp_path_factory.mktemp("grid")
    found = {"spec": SPEC, "results": results, "relations": related}
    return Grid(directory=out, finished=5, total=8, share=0.6, environment=dict(ENVIRONMENT), **found)


def test_the_matrix_and_its_colours(grid: Grid) -> None:
    (row,) = matrix_rows(grid)
    assert (row.chance, row.length) == ("10.0", "20.0")
    at = dict(zip(("rope", "t5", "alibi", "nope"), row.cells, strict=True))
    assert (at["rope"].mean, at["rope"].range, at["rope"].skill) == ("80.0", "70.0–90.0", pytest.approx(0.75))
    assert (at["nope"].mean, at["nope"].note, at["nope"].depth) == ("25.0", "1 diverged, 1/1 still learning", "3%")
    assert (row.simple.mean, row.simple.note) == ("30.0", "bag")
    assert row.simple.skill == pytest.approx(0.1 / 0.8), "over a guess from the length, as a model's"


def test_every_model_of_a_grid_has_its_skill(grid: Grid) -> None:
    rows = Text(without_plotly(render_grid(grid))).tables["Models"]
    told = {(row[0], row[2]): row[3:-1] for row in rows[1:]}
    assert told["rope", "42"] == ["complete", "90.0", "87.5", "32.0", "50.0"]
    assert told["nope", "42"] == ["complete", "25.0", "6.2", "–", "–"]
    assert told["nope", "43"] == ["diverged", "–", "–", "–", "–"]
    assert told["alibi", "43"] == ["not finished", "–", "–", "–", "–"]
    (rope, *_) = costs(grid)
    assert (rope.models, rope.parameters, rope.seconds, rope.relative) == (2, "1,000", "2.0", "1.00")
    assert rope.toeplitz == "90.0%"


def test_skill_by_length_and_what_is_kept(grid: Grid) -> None:
    figure = only(lengths(grid), "lengths-0-0-0")
    (rope,) = traces(figure, "rope")
    assert hovers(rope) == [
        "1 times the length | skill 75.0% (62.5 to 87.5)",
        "1.25 times the length | skill 58.3% (50.0 to 66.7)",
        "1.5 times the length | skill 37.5% (25.0 to 50.0)",
        "2 times the length | skill 0.0%",
    ]
    assert list(rope.y) == pytest.approx([0.75, 0.5833, 0.375, 0.0])
    scatter = only(relations_block(grid), "relations-0-0-1")
    (rope,) = traces(scatter, "rope")
    assert list(rope.x) == pytest.approx([0.4 / 0.7, 0.3 / 0.5], abs=1e-4)
    assert list(rope.y) == pytest.approx([0.5714, 0.4]), "of the skill, not of the accuracy"
    assert hovers(rope) == ["index, seed 42 | 0.57: 57% left", "index, seed 43 | 0.60: 40% left"]


def test_heads_on_the_plane(grid: Grid) -> None:
    figure = only(plane(grid), "plane-0-0-0")
    (rope,) = traces(figure, "rope")
    assert hovers(rope)[:2] == [
        f"index, seed 42, layer 1, head {head} | {shares} points lost without it"
        for head, shares in (
            (1, "positional 0.80, symbolic 0.10, interaction 0.10 | 10.0"),
            (2, "positional 0.20, symbolic 0.60, interaction 0.20 | 40.0"),
        )
    ]
    (mean,) = [trace for trace in traces(only(plane(grid), "plane-0-0-1"), "rope") if trace.customdata is not None]
    assert list(mean.x) == [pytest.approx((0.32 + 0.35) / 2, abs=1e-4)]


def test_a_grids_page_is_of_these_numbers(grid: Grid) -> None:
    text = Text(without_plotly(render_grid(grid))).text
    assert "80.0 70.0–90.0" in text
    assert re.search(r"5 of 8 models are finished \(60", text)


def test_a_model_that_stopped_learning_keeps_its_last_value_in_the_mean() -> None:
    key = Key("paper", DISTANCE, "rope", 42)
    short, long = made(key, (0.2, 0.4), None), made(replace(key, seed=43), (0.1, 0.3, 0.6), None)
    epochs = [[{**row, "epoch": row["epoch"] / 2} for row in cell.epochs] for cell in (short, long)]
    cells = [replace(cell, epochs=rows) for cell, rows in zip((short, long), epochs, strict=True)]
    figure = convergence(Results(cells), "paper", DISTANCE, "test")
    (line,) = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert list(line.x) == [0.5, 1.0, 1.5]
    assert list(line.y) == pytest.approx([0.15, 0.35, 0.5])
