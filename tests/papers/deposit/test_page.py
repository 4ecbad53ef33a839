"""The page of a reproduction: it answers from the record, draws what was measured, and takes any state of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert
from markupsafe import escape
from tests.papers.deposit.worlds import LENGTH, made, make_study, reproduced, reproduction
from tests.report.reading import Text

from toeplens.ground.words import percent
from toeplens.lens import over_seeds
from toeplens.papers.deposit import PAPER_TABLE_1, SCALES, Plan, Reproduction, accuracy_table, charts
from toeplens.papers.deposit.measured import PAPER_DROP, concentrated, factor_table
from toeplens.papers.deposit.page import _interval
from toeplens.papers.deposit.spec import PARTS, TITLES, Label
from toeplens.report import Page, write_report
from toeplens.report.tables import Table
from toeplens.studies import RULE, Finding, Key, Results
from toeplens.studies.kit.verdicts import verdict_text
from toeplens.training.presets import DISTANCE, PROTOCOLS

HOSTILE = "<script>alert(1)<&\"'><img src=x onerror=alert(2)>"
FIRST, SECOND, WEAK, GONE = reproduced()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    """RoPE twice; NoPE once, and once diverged."""
    return reproduction(tmp_path_factory.mktemp("small"), Plan("smoke", ("paper",), 2), Results(reproduced()), total=16)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    """Every part, two seeds, all measures."""
    return make_study(tmp_path_factory.mktemp("whole"), seeds=2, parts=("all",), measured=True)


@pytest.fixture(scope="module")
def page(whole: Reproduction) -> Page:
    return whole.page()


def drawn(chart: Any, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a chart with these values."""
    rows = chart.to_dict()["data"]["values"]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def rows(table: Table) -> dict[str, list[str]]:
    return {row[0].plain: [cell.whole for cell in row[1:]] for row in table.body}


def tables(page: Page) -> Mapping[str, Table]:
    return {table.name: table for table in page.tables}


# ---- states of a study -----------------------------------------------------------------------------------------------


def test_a_complete_study_answers_with_its_numbers(tmp_path: Path) -> None:
    state = make_study(tmp_path)
    page = state.page()
    html = write_report(state.directory, page).read_text()
    assert html == state.page().html(), "the same state gives the same page"
    assert "default-src 'none'" in html
    assert len(html) < 1_500_000
    assert page.question == "Does RoPE deposit positional information in a single attention head?"
    assert 4 <= len(page.sections) <= 6
    assert "With 1 seed this is only indicative: a verdict needs 5." in page.answer
    for entry in state.entries:
        comparison = entry.findings[0].comparison
        if entry.claim.id == "deposit-first-layer" and comparison is not None:
            assert f"{percent(comparison.seen.value)} of the skill (1 seed)" in page.answer
    text = Text(html)
    assert RULE in text.text
    assert not page.warnings
    assert all(" ".join(entry.claim.rule.split()) in text.text for entry in state.entries)
    assert all(" ".join(line.split()) in text.text for entry in state.entries for line in entry.evidence)
    found = {
        claim: verdicts
        for claim, _, *verdicts in [[c.plain for c in row] for row in tables(page)["Claims ledger"].body]
    }
    for entry in state.entries:
        place = state.plan.protocols.index(entry.protocol or "paper")
        assert found[entry.claim.statement][place] == verdict_text(entry.verdict)


def test_an_interval_is_told_with_several_seeds(whole: Reproduction, page: Page) -> None:
    for entry in whole.entries:
        if entry.claim.id == "deposit-first-layer" and (comparison := entry.findings[0].comparison):
            low, high = comparison.seen.interval(0.05)
            assert f"(95% interval {percent(low)} to {percent(high)}, 2 seeds)" in page.answer


def test_an_empty_and_an_unfinished_study(tmp_path: Path) -> None:
    state = make_study(tmp_path, finished=0, parts=("all",))
    page = state.page()
    assert page.picture is None
    assert page.warnings == [f"Not complete: 0 of {state.total} cells are finished (0% of the steps)."]
    assert "By the paper protocol, not decided: no finished RoPE model can be judged." in page.answer
    assert page.html()
    some = make_study(tmp_path, finished=5).page()
    assert some.picture is not None
    assert "not finished" in {row[4] for row in [[c.plain for c in row] for row in tables(some)["Models"].body]}


def test_diverged_runs_are_named_and_have_no_accuracy(tmp_path: Path) -> None:
    page = make_study(tmp_path, diverged={Key("paper", DISTANCE, "rope", 42)}).page()
    assert page.warnings == [
        "1 run diverged (infinite or NaN loss; no accuracy): RoPE, Task 1 (distance), paper protocol, seed 42."
    ]
    assert "diverged (1 of 1)" in rows(tables(page)["Accuracy, Task 1 (distance)"])["RoPE"]
    (row,) = [row for row in tables(page)["Models"].body if row[4].plain == "diverged"]
    assert [cell.plain for cell in row[6:8]] == ["–", "–"]
    keys = {cell.key for cell in make_study(tmp_path).plan.cells()}
    assert "runs diverged" in make_study(tmp_path, diverged=keys).page().html()


def test_a_part_that_is_not_in_the_plan_is_left_out(tmp_path: Path) -> None:
    page = make_study(tmp_path, scale="desk", protocols=("paper",), parts=("ladder",)).page()
    assert page.answer.startswith("This study does not judge it")
    assert {"sweep-share", "moments-nats"} <= page.charts().keys()
    core = make_study(tmp_path).page().charts().keys()
    assert {"heads-by-layer", "accuracy", "deposits", "partial"} <= core
    assert not {id for id in core if id.startswith(("switches", "mla", "sweep", "strength", "circuit", "training"))}


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    state = make_study(tmp_path / HOSTILE.replace("/", ""), finished=3)
    entries = [replace(entry, findings=(Finding("holds", HOSTILE),)) for entry in state.entries]
    environment = dict.fromkeys(state.environment, HOSTILE + "</script>") | {"seconds": 1.0}
    html = replace(state, entries=entries, environment=environment).page().html()
    assert HOSTILE not in html
    assert "<img" not in html
    assert str(escape(HOSTILE)) in html


# ---- charts ----------------------------------------------------------------------------------------------------------


def test_every_chart_is_drawn_and_described(page: Page) -> None:
    assert len(page.charts()) > 25
    for figure in page.figures:
        assert len(figure.alternative) > 20, figure.id
        svg = vl_convert.vegalite_to_svg(json.dumps(figure.chart.to_dict()))
        assert svg.startswith("<svg"), figure.id


def test_the_picture_is_the_papers_figure_4_beside_ours(small: Reproduction) -> None:
    chart = charts.heads_by_layer(small)
    (best,) = drawn(chart, encoding="RoPE", protocol="paper protocol", layer=1, head="most important")
    (second,) = drawn(chart, encoding="RoPE", protocol="paper protocol", layer=2, head="second most important")
    estimate = over_seeds(np.array([0.5, 0.2]))
    assert best["value"] == pytest.approx(0.35)
    assert (best["low"], best["high"], best["seeds"]) == (
        pytest.approx(estimate.low, rel=1e-4),
        pytest.approx(estimate.high, rel=1e-4),
        2,
    )
    assert second["value"] == pytest.approx((-0.02 + 0.0) / 2)
    (paper,) = drawn(chart, protocol="the paper’s number")
    assert (paper["encoding"], paper["layer"], paper["value"]) == ("RoPE", 1, PAPER_DROP)


def test_accuracies_are_means_beside_the_papers_table(small: Reproduction) -> None:
    chart = charts.accuracy(small)
    task = {"task": "Task 1 (distance)"}
    assert [row["value"] for row in drawn(chart, encoding="RoPE", protocol="paper protocol")] == [pytest.approx(0.8)]
    (nope,) = drawn(chart, encoding="NoPE", protocol="paper protocol")
    assert (nope["value"], nope["low"], nope["high"], nope["seeds"]) == (0.28, 0.28, 0.28, 1), "one seed diverged"
    told = {row["encoding"]: row["value"] for row in drawn(chart, protocol="the paper’s number", **task)}
    theirs = {TITLES[label]: value / 100 for (of, label), value in PAPER_TABLE_1.items() if of == DISTANCE}
    assert told == pytest.approx(theirs)
    assert [row["value"] for row in drawn(chart, encoding="Length only", **task)] == [LENGTH]


def test_learning_curves_are_means_with_their_range(small: Reproduction) -> None:
    chart = charts.learning(small, DISTANCE)
    test = drawn(chart, encoding="RoPE", panel="test accuracy, paper protocol")
    assert [(row["value"], row["low"], row["high"]) for row in test] == [
        (0.4, 0.3, 0.5),
        (0.7, 0.6, 0.8),
        (0.8, 0.7, 0.9),
    ]
    train = drawn(chart, encoding="NoPE", panel="train accuracy, paper protocol")
    assert (train[-1]["value"], train[-1]["seeds"]) == (0.33, 1), "the seed that diverged is no part of it"
    key = Key("paper", DISTANCE, "rope", 42)
    cells = [made(key, (0.2, 0.4), None), made(replace(key, seed=43), (0.1, 0.3, 0.6), None)]
    stopped = replace(small, results=Results(cells), table=accuracy_table(Results(cells), ["paper"]))
    values = [row["value"] for row in drawn(charts.learning(stopped, DISTANCE), panel="test accuracy, paper protocol")]
    assert values == pytest.approx([0.15, 0.35, 0.5]), "a model that stopped keeps its last value"


def test_deposits_maps_and_cumulative_ablation(small: Reproduction) -> None:
    (rope,) = drawn(charts.deposits(small), encoding="RoPE")
    assert rope["value"] == pytest.approx((0.5 / 0.7 + 0.3 / 0.5) / 2, rel=1e-4), "as a share of the skill"
    maps = drawn(charts.head_maps(small, DISTANCE), panel="RoPE, paper")
    assert [row["value"] for row in maps] == [0.5, 0.1, 0.05, -0.02], "of the first seed"
    assert FIRST.ablation is not None
    assert [row["low"] for row in maps] == pytest.approx(FIRST.ablation.low.ravel().tolist())
    curve = drawn(charts.cumulative(small, DISTANCE), encoding="RoPE", series="layer 1")
    assert [row["value"] for row in curve] == pytest.approx([0.8, 0.45, 0.325])


def test_charts_show_the_measures(whole: Reproduction) -> None:
    cells = whole.results.under("paper").of(DISTANCE, "rope")
    (deposit,) = drawn(charts.deposits(whole), encoding="RoPE", protocol="paper protocol", task="Task 1 (distance)")
    assert deposit["value"] == pytest.approx(np.mean([f[1].peak for c in cells if (f := concentrated(c))]), rel=1e-4)
    mine = [r for r in factor_table(whole.results, PROTOCOLS) if (r.task, r.base) == (DISTANCE, "nope")]
    for end in PROTOCOLS:
        effects = [effect for row in mine if row.end == end and (effect := row.effect("accuracy"))]
        shown = drawn(charts.switches(whole, DISTANCE, "accuracy"), encoding="NoPE", others=f"{end} protocol")
        np.testing.assert_allclose(sorted(row["value"] for row in shown), sorted(e.value for e in effects), rtol=1e-3)
    random = [c for c in whole.results.under("paper").of(DISTANCE, "partial-2/random") if concentrated(c)]
    expected = np.mean([[layer.peak for layer in cell.deposits()] for cell in random], axis=0)
    shown = drawn(charts.peaks(whole), protocol="paper protocol", model="2 random heads")
    np.testing.assert_allclose([row["value"] for row in shown], expected, rtol=1e-3)
    first = charts.checkpoints(cells[0])
    accuracy = drawn(charts.training(whole), panel="RoPE, paper", series="accuracy of the model")
    assert [row["step"] for row in accuracy] == sorted(first)
    means = [np.mean([charts.checkpoints(cell)[step][0] for cell in cells]) for step in sorted(first)]
    np.testing.assert_allclose([row["value"] for row in accuracy], means, rtol=1e-3)
    place = {"encoding": "RoPE", "seed": cells[0].key.seed, "layer": 2, "head": 3, "protocol": "paper protocol"}
    (head,) = drawn(charts.position(whole), **place)
    assert head["ablated"] == pytest.approx(float(charts.drops(cells[0])[1, 2]), abs=1e-4)
    assert head["value"] == pytest.approx(cells[0].measures["position"]["drops"][1][2], abs=1e-4)


def test_partial_rope_ends_in_nope_and_in_rope_without_sinusoid(tmp_path: Path) -> None:
    state = make_study(tmp_path)
    ends = {p: charts.rotated_heads(state, p, DISTANCE) for p in PROTOCOLS}
    assert ends["paper"] == [(0, "nope"), (1, "partial-1"), (4, "rope")]
    assert ends["released"] == [(0, "nope"), (1, "partial-1"), (4, "rope-alone")]
    last = drawn(charts.partial(state), panel="Task 1 (distance), released")[-1]
    assert last["value"] == pytest.approx(state.results.under("released").accuracy(DISTANCE, "rope-alone")[0], rel=1e-4)


def test_models_of_different_sizes_and_of_one_head_are_drawn(small: Reproduction) -> None:
    assert FIRST.ablation is not None
    one = {name: getattr(FIRST.ablation, name)[:1, :1] for name in ("drops", "low", "high")}
    ablation = replace(FIRST.ablation, **one, cumulative=FIRST.ablation.cumulative[:1, :2])
    cells = [replace(FIRST, ablation=ablation), replace(SECOND, key=replace(SECOND.key, label="mla"))]
    state = replace(small, results=Results(cells), table=accuracy_table(Results(cells), ["paper"]))
    assert {row["head"] for row in drawn(charts.heads_by_layer(state), encoding="RoPE")} == {"most important"}
    assert {row["ablated"] for row in drawn(charts.cumulative(state, DISTANCE), encoding="MLA")} == {0, 1, 2}
    assert state.page().html()


def test_every_label_has_a_name_of_its_own_and_the_look_of_its_encoding() -> None:
    for scale in SCALES.values():
        for protocol in PROTOCOLS:
            labels = {label for part in PARTS.values() for _, label in part.places(scale, protocol)}
            assert len({charts.name(protocol, label) for label in labels}) == len(labels)
            for label in labels:
                base, own = (
                    charts.look(protocol, each) for each in (str(replace(Label.parse(label), variant="")), label)
                )
                assert (own.colour, own.shape) == (base.colour, base.shape)
    assert charts.name("released", "rope") == charts.name("paper", "rope-absolute") == "RoPE + sinusoid"


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_row_of_table_1(small: Reproduction) -> None:
    row = rows(tables(small.page())["Accuracy, Task 1 (distance)"])["RoPE"]
    assert row[:2] == ["92.64", "80.0"]
    assert row[2] == "70.0–90.0 (2 seeds)"
    assert row[3].startswith("40.0 (L1")
    assert small.table[0].kinds == ["single-head", "redundant"]
    layers = tables(small.page())["Deposit by layer, Task 1 (distance), paper protocol"].body
    assert layers[0][3].plain == "1", "the head is the same in both seeds"
    assert layers[0][4].plain == f"{(0.5 / 0.7 + 0.2 / 0.5) / 2:.2f}"


@pytest.mark.parametrize("scale", SCALES)
def test_the_settings_of_every_scale_are_told_beside_the_papers(tmp_path: Path, scale: str) -> None:
    found = rows(tables(make_study(tmp_path, scale=scale, protocols=("released",), finished=3).page())["Settings"])
    assert found["schedule"][0] == "cosine"
    assert all(paper == ours for paper, ours, _ in found.values()) == (scale == "paper")
    assert [differs for *_, differs in found.values()] == ["yes" if a != b else "–" for a, b, _ in found.values()]


def test_the_tables_cells_are_the_factor_studys(whole: Reproduction, page: Page) -> None:
    table = tables(page)["Effects, Task 1 (distance), test accuracy, all other switches as in the released code"]
    every = factor_table(whole.results, whole.plan.protocols)
    row = next(r for r in every if (r.task, r.base, r.switch, r.end) == (DISTANCE, "rope", "readout", "released"))
    found = rows(table)["readout from the last token"][table.columns().index("RoPE") - 1]
    assert found == _interval(row.effect("accuracy"))
    assert list(rows(table))[-1].startswith("remainder")
    assert _interval(over_seeds(np.array([-0.1, 0.0, 0.04]))) == "−2.0 [−19.9, 15.9]"
    assert _interval(over_seeds(np.array([0.123]))) == "+12.3 (one seed)"
