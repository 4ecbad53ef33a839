"""The page of language models says what their record says, and leaves out what makes no sense of language alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.charts import figure_rows
from tests.report.grid.language_state import language_grid
from tests.report.grid.test_page import table_of

from toeplens.lens import mean_over_seeds
from toeplens.report import Page
from toeplens.studies import CellResult, Results
from toeplens.studies.grid import GridStudy
from toeplens.studies.grid.language import bits_per_byte


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> GridStudy:
    return language_grid(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def page(state: GridStudy) -> Page:
    return state.page()


def cell_of(state: GridStudy, label: str) -> list[CellResult]:
    return state.results.cells_of("language", label)


def test_the_answer_is_the_lowest_loss_with_its_interval(state: GridStudy, page: Page) -> None:
    losses = {
        column.title: [bits_per_byte(cell) for cell in cell_of(state, column.label)] for column in state.spec.columns()
    }
    best = min(losses, key=lambda title: np.mean(losses[title]))
    result = mean_over_seeds(np.array(losses[best]))
    told = (
        f"{best} has the lowest loss at the training length, {result.value:.3f} [{result.low:.3f}, {result.high:.3f}]"
    )
    assert page.answer.replace("\u00a0", " ").startswith(told)
    near = [row for row in figure_rows(page, "loss") if row["panel"] == "At the training length"]
    row = next(row for row in near if row["encoding"] == best)
    assert [row[name] for name in ("value", "low", "high")] == pytest.approx(
        [result.value, result.low, result.high], 1e-3
    )
    ends = losses["RoPE"]
    table_rows = table_of(page, "Benefits and costs of encodings")
    assert table_rows["RoPE"][0] == f"{np.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
    assert next(iter(table_rows)) == best
    assert "verdicts are only indicative" in page.notes[1]


def test_losses_by_length_and_position_are_means_over_seeds(state: GridStudy, page: Page) -> None:
    for part, panel in (("end", "End of the text"), ("whole", "Whole text"), ("sliding", "Sliding window")):
        rows = [cell.measures["bits"]["lengths"] for cell in cell_of(state, "rope")]
        known = [at for at, row in enumerate(rows[0]) if row[part]["value"] is not None]
        values = [row for row in figure_rows(page, "bits") if (row["series"], row["panel"]) == ("RoPE", panel)]
        assert [row["factor"] for row in values] == [rows[0][at]["factor"] for at in known]
        expected = [np.mean([row[at][part]["value"] for row in rows]) for at in known]
        assert [row["value"] for row in values] == pytest.approx(expected, 1e-4)
    last = [cell.measures["bits"]["positions"][-1]["value"] for cell in cell_of(state, "rope")]
    values = [row["value"] for row in figure_rows(page, "positions") if row["series"] == "RoPE"]
    assert values[-1] == pytest.approx(np.mean(last), 1e-4)


def test_needles_and_position_effects_are_heatmaps(state: GridStudy, page: Page) -> None:
    first = cell_of(state, "rope")[0].measures["needles"]["rows"][0]
    actual = [cell.measures["needles"]["rows"][0]["accuracy"]["value"] for cell in cell_of(state, "rope")]
    drawn_values = {(row["panel"], row["factor"], row["depth"]): row["value"] for row in figure_rows(page, "needles")}
    assert drawn_values["RoPE", first["factor"], first["depth"]] == pytest.approx(np.mean(actual), abs=1e-4)
    lost = [cell.measures["position-loss"] for cell in cell_of(state, "rope")]
    drops = [np.where(np.array(each["low"]) > 0, each["drops"], 0) for each in lost]
    shares = np.mean([-np.sort(-each / each.sum(), axis=1) for each in drops], axis=0)
    drawn_values = [row["value"] for row in figure_rows(page, "position-share") if row["panel"] == "RoPE"]
    np.testing.assert_allclose(drawn_values, shares.ravel(), atol=1e-4)
    assert "NoPE" not in {row["panel"] for row in figure_rows(page, "position-share")}, "without an effect"


def test_extensions_show_their_gains(state: GridStudy, page: Page) -> None:
    (shown,) = [each for each in page.tables if each.name == "Context extension"]
    rows = {
        (row[0].plain_text, row[1].plain_text, row[2].plain_text): [cell.full_text for cell in row[3:]]
        for row in shown.body
    }
    for measure, method, title, steps in (
        ("extension", "yarn", "YaRN", "0"),
        ("extension-tuned", "interpolation", "Position interpolation", "92"),
    ):
        actual = [
            (row["bits"]["value"], row["gain"]["value"])
            for cell in cell_of(state, "rope")
            for row in cell.measures[measure]["rows"]
            if (row["method"], row["factor"]) == (method, 4.0)
        ]
        value, gain = np.mean(actual, axis=0)
        assert rows["RoPE", title, steps][2] == f"{value:.3f} ({gain:+.3f}; helps)".replace("-", "−")


def test_a_language_only_study_omits_accuracies(page: Page, tmp_path: Path) -> None:
    expected = ["loss", "bits", "positions", "needles", "copies", "plane", "kinds", "heads", "position-share", "centre"]
    assert [each.id for each in page.figures] == expected
    assert "Test accuracy by task and encoding" not in {each.name for each in page.tables}
    assert len(page.sections) <= 6
    for name, chart in page.charts().items():
        chart.save(tmp_path / f"{name}.svg")


def test_partial_and_empty_studies_have_pages(tmp_path: Path) -> None:
    partial_state = language_grid(tmp_path, finished=8)
    assert partial_state.page().warnings[0].startswith("Not complete: 8 of 24 models are finished")
    assert language_grid(tmp_path, finished=0).page().figures == []
    bare = [
        replace(cell, measures={"bits": cell.measures["bits"]}, by_loss=None) for cell in partial_state.results.cells
    ]
    page = replace(partial_state, results=Results(bare)).page()
    assert [each.id for each in page.figures] == ["loss", "bits", "positions"]
    assert page.html()
