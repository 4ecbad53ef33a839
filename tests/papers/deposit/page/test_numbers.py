"""A study's numbers from its cells to its figures: what traces and their hover texts say is what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.papers.deposit.worlds import made, reproduced, reproduction
from tests.report.reading import hovers

from toeplens.papers.deposit import Plan, Reproduction, accuracy_table
from toeplens.papers.deposit.page.accuracy import accuracies, convergence
from toeplens.papers.deposit.page.heads import heatmap, peaks_by_layer, silencing_curves, violins
from toeplens.report.kit.blocks import Block
from toeplens.studies import Key, Results
from toeplens.training.presets import DISTANCE

FIRST, SECOND, WEAK, GONE = reproduced()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return reproduction(tmp_path_factory.mktemp("study"), Plan("smoke", ("paper",), 2), Results(reproduced()), total=16)


def traces(figure: go.Figure, key: str | None) -> list[Any]:
    return [trace for trace in figure.data if trace.meta == key]


def only(block: Block, place: str) -> go.Figure:
    return dict(block.places)[place].figure


def test_a_row_of_table_1() -> None:
    first, second, _, gone = reproduced()
    assert [first.peak, second.peak] == pytest.approx([0.5 / 0.7, 0.3 / 0.5]), "of what is over the guess"
    assert gone.deposits() == []
    rope, nope = accuracy_table(Results(reproduced()), ["paper"])
    assert (rope.label, rope.paper, rope.seeds, rope.diverged) == ("rope", 92.64, 2, 0)
    assert (rope.accuracy, rope.lowest, rope.highest) == (pytest.approx(0.8), 0.7, 0.9)
    assert (rope.largest_drop, rope.where) == (pytest.approx(0.4), "layer 1 head 1, layer 2 head 2")
    assert rope.kinds == ["single-head", "redundant"], "of the first seed"
    assert (rope.chance, rope.length_chance, rope.parameters) == (0.1, 0.2, 1000)
    assert (nope.label, nope.accuracy, nope.seeds, nope.diverged) == ("nope", 0.28, 2, 1)


def test_a_heat_map_says_what_a_head_costs() -> None:
    figure = heatmap(FIRST, 0.5).figure
    (trace,) = figure.data
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (-0.5, 0.5)
    assert [list(row) for row in trace.z] == [[0.5, 0.1], [0.05, -0.02]]
    assert [list(row) for row in trace.text] == [["50", "10"], ["5", "−2"]]
    assert hovers(trace) == [
        "layer 1, head 1 | accuracy drop 50.0 percentage points [47.0, 55.0] | accuracy 90.0% → 40.0%",
        "layer 1, head 2 | accuracy drop 10.0 percentage points [7.0, 15.0] | accuracy 90.0% → 80.0%",
        "layer 2, head 1 | accuracy drop 5.0 percentage points [2.0, 10.0] | accuracy 90.0% → 85.0%",
        "layer 2, head 2 | accuracy drop −2.0 percentage points [−5.0, 3.0] | accuracy 90.0% → 92.0%",
    ]


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
    assert [trace.y for trace in figure.data] == [pytest.approx((0.8, 0.45, 0.325)), pytest.approx((0.8, 0.625, 0.6))]
    assert hovers(figure.data[0])[1] == "layer 1, 1 heads ablated: 45.0%"


def test_a_deposit_by_encoding_and_by_layer() -> None:
    encodings = [("rope", [FIRST, SECOND]), ("nope", [WEAK])]
    violin, mean, *_ = violins(encodings, lambda layer: layer.peak, "peak", top=1.0).data
    assert list(violin.y) == pytest.approx([0.5 / 0.7, 0.3 / 0.5])
    assert list(mean.y) == pytest.approx([(0.5 / 0.7 + 0.3 / 0.5) / 2])
    assert hovers(violin) == [
        "RoPE, seed 42, layer 1 | head 1: 71% of the skill, 50.0 percentage points | single-head; effective heads 1.4",
        "RoPE, seed 43, layer 2 | head 2: 60% of the skill, 30.0 percentage points | single-head; effective heads 1.0",
    ]
    (heat,) = peaks_by_layer(encodings).data
    assert list(heat.z[1]) == pytest.approx([0.2 / 0.5, 0.3 / 0.5])
    assert set(heat.z[2]) == {None}, "a gap before the next encoding"
    assert hovers(heat)[2].startswith(
        "RoPE, seed 43, layer 1 | head 1: 40% of the skill, 20.0 percentage points | few-head"
    )


def test_a_model_that_stopped_learning_keeps_its_last_value_in_the_mean() -> None:
    key = Key("paper", DISTANCE, "rope", 42)
    short, long = made(key, (0.2, 0.4), None), made(replace(key, seed=43), (0.1, 0.3, 0.6), None)
    epochs = [[{**row, "epoch": row["epoch"] / 2} for row in cell.epochs] for cell in (short, long)]
    cells = [replace(cell, epochs=rows) for cell, rows in zip((short, long), epochs, strict=True)]
    figure = convergence(Results(cells), "paper", DISTANCE, "test")
    (line,) = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert list(line.x) == [0.5, 1.0, 1.5]
    assert list(line.y) == pytest.approx([0.15, 0.35, 0.5])
