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
from tests.papers.deposit.synthetic_studies import (
    LENGTH,
    make_study,
    model_from_curve,
    reproduction,
    reproduction_results,
)
from tests.report.reading import PageText

from toeplens.lens import mean_over_seeds
from toeplens.papers.deposit import PAPER_TABLE_1, SCALES, Reproduction, ReproductionPlan, accuracy_table, charts
from toeplens.papers.deposit.measures import PAPER_DROP, peak_layer, switch_effects
from toeplens.papers.deposit.page import _interval_text
from toeplens.papers.deposit.spec import PARTS, TITLES, EncodingLabel
from toeplens.report import Page, write_report
from toeplens.report.tables import Table
from toeplens.studies import RULE, CellKey, Finding, Results
from toeplens.studies.kit.verdicts import verdict_text
from toeplens.training.presets import DISTANCE, PROTOCOLS
from toeplens.utils.formatting import percent

HOSTILE_NAME = "<script>alert(1)<&\"'><img src=x onerror=alert(2)>"
FIRST, SECOND, WEAK, GONE = reproduction_results()


@pytest.fixture(scope="module")
def small_study(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    """RoPE twice; NoPE once, and once diverged."""
    return reproduction(
        tmp_path_factory.mktemp("small"),
        ReproductionPlan("smoke", ("paper",), 2),
        Results(reproduction_results()),
        total=16,
    )


@pytest.fixture(scope="module")
def full_study(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    """Every part, two seeds, all measures."""
    return make_study(tmp_path_factory.mktemp("whole"), seeds=2, parts=("all",), measured=True)


@pytest.fixture(scope="module")
def page(full_study: Reproduction) -> Page:
    return full_study.page()


def chart_rows(chart: Any, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a chart with these values."""
    rows = chart.to_dict()["data"]["values"]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def rows(table: Table) -> dict[str, list[str]]:
    return {row[0].plain_text: [cell.full_text for cell in row[1:]] for row in table.body}


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
            assert f"{percent(comparison.mean.value)} of the skill (1 seed)" in page.answer
    text = PageText(html)
    assert RULE in text.text
    assert not page.warnings
    assert all(" ".join(entry.claim.rule.split()) in text.text for entry in state.entries)
    assert all(" ".join(line.split()) in text.text for entry in state.entries for line in entry.evidence)
    actual = {
        claim: verdicts
        for claim, _, *verdicts in [[c.plain_text for c in row] for row in tables(page)["Claims ledger"].body]
    }
    for entry in state.entries:
        place = state.plan.protocols.index(entry.protocol or "paper")
        assert actual[entry.claim.statement][place] == verdict_text(entry.verdict)


def test_intervals_are_shown_with_several_seeds(full_study: Reproduction, page: Page) -> None:
    for entry in full_study.entries:
        if entry.claim.id == "deposit-first-layer" and (comparison := entry.findings[0].comparison):
            low, high = comparison.mean.interval(0.05)
            assert f"(95% interval {percent(low)} to {percent(high)}, 2 seeds)" in page.answer


def test_empty_and_unfinished_studies_have_pages(tmp_path: Path) -> None:
    state = make_study(tmp_path, finished=0, parts=("all",))
    page = state.page()
    assert page.picture is None
    assert page.warnings == [f"Not complete: 0 of {state.total} cells are finished (0% of the steps)."]
    assert "By the paper protocol, not decided: no finished RoPE model can be judged." in page.answer
    assert page.html()
    some = make_study(tmp_path, finished=5).page()
    assert some.picture is not None
    assert "not finished" in {row[4] for row in [[c.plain_text for c in row] for row in tables(some)["Models"].body]}


def test_diverged_runs_are_named_and_have_no_accuracy(tmp_path: Path) -> None:
    page = make_study(tmp_path, diverged={CellKey("paper", DISTANCE, "rope", 42)}).page()
    assert page.warnings == [
        "1 run diverged (infinite or NaN loss; no accuracy): RoPE, Task 1 (distance), paper protocol, seed 42."
    ]
    assert "diverged (1 of 1)" in rows(tables(page)["Accuracy, Task 1 (distance)"])["RoPE"]
    (row,) = [row for row in tables(page)["Models"].body if row[4].plain_text == "diverged"]
    assert [cell.plain_text for cell in row[6:8]] == ["–", "–"]
    keys = {cell.key for cell in make_study(tmp_path).plan.cells()}
    assert "runs diverged" in make_study(tmp_path, diverged=keys).page().html()


def test_a_part_outside_the_plan_is_omitted(tmp_path: Path) -> None:
    page = make_study(tmp_path, scale="desk", protocols=("paper",), parts=("ladder",)).page()
    assert page.answer.startswith("This study does not judge it")
    assert {"sweep-share", "moments-nats"} <= page.charts().keys()
    core = make_study(tmp_path).page().charts().keys()
    assert {"heads-by-layer", "accuracy", "deposits", "partial"} <= core
    assert not {id for id in core if id.startswith(("switches", "mla", "sweep", "strength", "circuit", "training"))}


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    state = make_study(tmp_path / HOSTILE_NAME.replace("/", ""), finished=3)
    entries = [replace(entry, findings=(Finding("holds", HOSTILE_NAME),)) for entry in state.entries]
    environment = dict.fromkeys(state.environment, HOSTILE_NAME + "</script>") | {"seconds": 1.0}
    html = replace(state, entries=entries, environment=environment).page().html()
    assert HOSTILE_NAME not in html
    assert "<img" not in html
    assert str(escape(HOSTILE_NAME)) in html


# ---- charts ----------------------------------------------------------------------------------------------------------


def test_every_chart_is_drawn_and_described(page: Page) -> None:
    assert len(page.charts()) > 25
    for figure in page.figures:
        assert len(figure.alternative) > 20, figure.id
        svg = vl_convert.vegalite_to_svg(json.dumps(figure.chart.to_dict()))
        assert svg.startswith("<svg"), figure.id


def test_the_chart_shows_the_papers_figure_4_beside_ours(small_study: Reproduction) -> None:
    chart = charts.heads_by_layer_chart(small_study)
    (best,) = chart_rows(chart, encoding="RoPE", protocol="paper protocol", layer=1, head="most important")
    (second,) = chart_rows(chart, encoding="RoPE", protocol="paper protocol", layer=2, head="second most important")
    estimate = mean_over_seeds(np.array([0.5, 0.2]))
    assert best["value"] == pytest.approx(0.35)
    assert (best["low"], best["high"], best["seeds"]) == (
        pytest.approx(estimate.low, rel=1e-4),
        pytest.approx(estimate.high, rel=1e-4),
        2,
    )
    assert second["value"] == pytest.approx((-0.02 + 0.0) / 2)
    (paper,) = chart_rows(chart, protocol="the paper’s number")
    assert (paper["encoding"], paper["layer"], paper["value"]) == ("RoPE", 1, PAPER_DROP)


def test_accuracies_are_means_beside_the_papers_table(small_study: Reproduction) -> None:
    chart = charts.accuracy_chart(small_study)
    task = {"task": "Task 1 (distance)"}
    assert [row["value"] for row in chart_rows(chart, encoding="RoPE", protocol="paper protocol")] == [
        pytest.approx(0.8)
    ]
    (nope,) = chart_rows(chart, encoding="NoPE", protocol="paper protocol")
    assert (nope["value"], nope["low"], nope["high"], nope["seeds"]) == (0.28, 0.28, 0.28, 1), "one seed diverged"
    told = {row["encoding"]: row["value"] for row in chart_rows(chart, protocol="the paper’s number", **task)}
    theirs = {TITLES[label]: value / 100 for (of, label), value in PAPER_TABLE_1.items() if of == DISTANCE}
    assert told == pytest.approx(theirs)
    assert [row["value"] for row in chart_rows(chart, encoding="Length only", **task)] == [LENGTH]


def test_learning_curves_are_means_with_their_range(small_study: Reproduction) -> None:
    chart = charts.learning_chart(small_study, DISTANCE)
    test = chart_rows(chart, encoding="RoPE", panel="test accuracy, paper protocol")
    assert [(row["value"], row["low"], row["high"]) for row in test] == [
        (0.4, 0.3, 0.5),
        (0.7, 0.6, 0.8),
        (0.8, 0.7, 0.9),
    ]
    train = chart_rows(chart, encoding="NoPE", panel="train accuracy, paper protocol")
    assert (train[-1]["value"], train[-1]["seeds"]) == (0.33, 1), "the seed that diverged is no part of it"
    key = CellKey("paper", DISTANCE, "rope", 42)
    cells = [model_from_curve(key, (0.2, 0.4), None), model_from_curve(replace(key, seed=43), (0.1, 0.3, 0.6), None)]
    stopped = replace(small_study, results=Results(cells), table=accuracy_table(Results(cells), ["paper"]))
    values = [
        row["value"]
        for row in chart_rows(charts.learning_chart(stopped, DISTANCE), panel="test accuracy, paper protocol")
    ]
    assert values == pytest.approx([0.15, 0.35, 0.5]), "a model that stopped keeps its last value"


def test_deposits_maps_and_cumulative_ablation(small_study: Reproduction) -> None:
    (rope,) = chart_rows(charts.deposits_chart(small_study), encoding="RoPE")
    assert rope["value"] == pytest.approx((0.5 / 0.7 + 0.3 / 0.5) / 2, rel=1e-4), "as a share of the skill"
    maps = chart_rows(charts.head_map_chart(small_study, DISTANCE), panel="RoPE, paper")
    assert [row["value"] for row in maps] == [0.5, 0.1, 0.05, -0.02], "of the first seed"
    assert FIRST.ablation is not None
    assert [row["low"] for row in maps] == pytest.approx(FIRST.ablation.low.ravel().tolist())
    curve = chart_rows(charts.cumulative_chart(small_study, DISTANCE), encoding="RoPE", series="layer 1")
    assert [row["value"] for row in curve] == pytest.approx([0.8, 0.45, 0.325])


def test_charts_show_the_measures(full_study: Reproduction) -> None:
    cells = full_study.results.for_protocol("paper").cells_of(DISTANCE, "rope")
    (deposit,) = chart_rows(
        charts.deposits_chart(full_study), encoding="RoPE", protocol="paper protocol", task="Task 1 (distance)"
    )
    assert deposit["value"] == pytest.approx(np.mean([f[1].peak for c in cells if (f := peak_layer(c))]), rel=1e-4)
    mine = [r for r in switch_effects(full_study.results, PROTOCOLS) if (r.task, r.base) == (DISTANCE, "nope")]
    for end in PROTOCOLS:
        effects = [effect for row in mine if row.end == end and (effect := row.effect("accuracy"))]
        peak_rows = chart_rows(
            charts.switches_chart(full_study, DISTANCE, "accuracy"), encoding="NoPE", others=f"{end} protocol"
        )
        np.testing.assert_allclose(
            sorted(row["value"] for row in peak_rows), sorted(e.value for e in effects), rtol=1e-3
        )
    random = [
        c for c in full_study.results.for_protocol("paper").cells_of(DISTANCE, "partial-2/random") if peak_layer(c)
    ]
    expected = np.mean([[layer.peak for layer in cell.deposits()] for cell in random], axis=0)
    peak_rows = chart_rows(charts.peaks_chart(full_study), protocol="paper protocol", model="2 random heads")
    np.testing.assert_allclose([row["value"] for row in peak_rows], expected, rtol=1e-3)
    first = charts.checkpoint_values(cells[0])
    accuracy = chart_rows(charts.training_chart(full_study), panel="RoPE, paper", series="accuracy of the model")
    assert [row["step"] for row in accuracy] == sorted(first)
    means = [np.mean([charts.checkpoint_values(cell)[step][0] for cell in cells]) for step in sorted(first)]
    np.testing.assert_allclose([row["value"] for row in accuracy], means, rtol=1e-3)
    place = {"encoding": "RoPE", "seed": cells[0].key.seed, "layer": 2, "head": 3, "protocol": "paper protocol"}
    (head,) = chart_rows(charts.position_chart(full_study), **place)
    assert head["ablated"] == pytest.approx(float(charts.accuracy_drops(cells[0])[1, 2]), abs=1e-4)
    assert head["value"] == pytest.approx(cells[0].measures["position"]["drops"][1][2], abs=1e-4)


def test_partial_rope_ranges_from_nope_to_rope_without_sinusoid(tmp_path: Path) -> None:
    state = make_study(tmp_path)
    ends = {p: charts.rotated_heads(state, p, DISTANCE) for p in PROTOCOLS}
    assert ends["paper"] == [(0, "nope"), (1, "partial-1"), (4, "rope")]
    assert ends["released"] == [(0, "nope"), (1, "partial-1"), (4, "rope-alone")]
    last = chart_rows(charts.partial_chart(state), panel="Task 1 (distance), released")[-1]
    assert last["value"] == pytest.approx(
        state.results.for_protocol("released").accuracy(DISTANCE, "rope-alone")[0], rel=1e-4
    )


def test_models_of_different_sizes_and_single_heads_are_drawn(small_study: Reproduction) -> None:
    assert FIRST.ablation is not None
    one = {name: getattr(FIRST.ablation, name)[:1, :1] for name in ("drops", "low", "high")}
    ablation = replace(FIRST.ablation, **one, cumulative=FIRST.ablation.cumulative[:1, :2])
    cells = [replace(FIRST, ablation=ablation), replace(SECOND, key=replace(SECOND.key, label="mla"))]
    state = replace(small_study, results=Results(cells), table=accuracy_table(Results(cells), ["paper"]))
    assert {row["head"] for row in chart_rows(charts.heads_by_layer_chart(state), encoding="RoPE")} == {
        "most important"
    }
    assert {row["ablated"] for row in chart_rows(charts.cumulative_chart(state, DISTANCE), encoding="MLA")} == {0, 1, 2}
    assert state.page().html()


def test_every_label_has_its_own_name_and_its_encodings_style() -> None:
    for scale in SCALES.values():
        for protocol in PROTOCOLS:
            labels = {label for part in PARTS.values() for _, label in part.task_labels(scale, protocol)}
            assert len({charts.display_name(protocol, label) for label in labels}) == len(labels)
            for label in labels:
                base, own = (
                    charts.mark_style(protocol, each)
                    for each in (str(replace(EncodingLabel.parse(label), variant="")), label)
                )
                assert (own.colour, own.shape) == (base.colour, base.shape)
    assert charts.display_name("released", "rope") == charts.display_name("paper", "rope-absolute") == "RoPE + sinusoid"


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_row_of_table_1_matches_the_study(small_study: Reproduction) -> None:
    row = rows(tables(small_study.page())["Accuracy, Task 1 (distance)"])["RoPE"]
    assert row[:2] == ["92.64", "80.0"]
    assert row[2] == "70.0–90.0 (2 seeds)"
    assert row[3].startswith("40.0 (L1")
    assert small_study.table[0].kinds == ["single-head", "redundant"]
    layers = tables(small_study.page())["Deposit by layer, Task 1 (distance), paper protocol"].body
    assert layers[0][3].plain_text == "1", "the head is the same in both seeds"
    assert layers[0][4].plain_text == f"{(0.5 / 0.7 + 0.2 / 0.5) / 2:.2f}"


@pytest.mark.parametrize("scale", SCALES)
def test_the_settings_of_every_scale_are_shown_beside_the_papers(tmp_path: Path, scale: str) -> None:
    actual = rows(tables(make_study(tmp_path, scale=scale, protocols=("released",), finished=3).page())["Settings"])
    assert actual["schedule"][0] == "cosine"
    assert all(paper == ours for paper, ours, _ in actual.values()) == (scale == "paper")
    assert [differs for *_, differs in actual.values()] == ["yes" if a != b else "–" for a, b, _ in actual.values()]


def test_the_tables_show_the_factor_study(full_study: Reproduction, page: Page) -> None:
    table = tables(page)["Effects, Task 1 (distance), test accuracy, all other switches as in the released code"]
    every = switch_effects(full_study.results, full_study.plan.protocols)
    row = next(r for r in every if (r.task, r.base, r.switch, r.end) == (DISTANCE, "rope", "readout", "released"))
    actual = rows(table)["readout from the last token"][table.columns().index("RoPE") - 1]
    assert actual == _interval_text(row.effect("accuracy"))
    assert list(rows(table))[-1].startswith("remainder")
    assert _interval_text(mean_over_seeds(np.array([-0.1, 0.0, 0.04]))) == "−2.0 [−19.9, 15.9]"
    assert _interval_text(mean_over_seeds(np.array([0.123]))) == "+12.3 (one seed)"
