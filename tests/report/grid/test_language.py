"""The page of language models says what their record says, and leaves out what makes no sense of language alone.

All of the page of the whole record is in docs/gallery, with which tests/docs/test_gallery.py compares it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.grid.language_state import language_grid
from tests.report.reading import Text, figures, rows_of, stands_alone, traces, without_plotly

from toeplens.report.grid.page import render_grid, write_grid
from toeplens.studies import CellResult, Results
from toeplens.studies.grid import Grid
from toeplens.studies.grid.language import bits


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return language_grid(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def page(state: Grid) -> str:
    return render_grid(state)


def _of(state: Grid, label: str) -> list[CellResult]:
    return state.results.of("language", label)


def test_bits_by_length_are_means_over_seeds(state: Grid, page: str) -> None:
    for view, part in enumerate(("end", "gain", "whole", "sliding")):
        rows = [cell.measures["bits"]["lengths"] for cell in _of(state, "rope")]
        known = [at for at, row in enumerate(rows[0]) if row[part]["value"] is not None]
        trace = traces(page, f"bits-{view}-0-0")["rope"]
        assert trace["x"] == [rows[0][at]["factor"] for at in known]
        wanted = [np.mean([row[at][part]["value"] for row in rows]) for at in known]
        assert trace["y"] == pytest.approx(wanted, abs=6e-6)
    ends = [bits(cell) for cell in _of(state, "rope")]
    told = f"{np.mean(ends):.3f} {min(ends):.3f} to {max(ends):.3f}"
    assert rows_of(page, "Benefits and costs of encodings")["RoPE"][0] == told
    low, high = figures(page)["bits-0-0-1"]["layout"]["yaxis"]["range"]
    assert low < min(ends) < high < max(traces(page, "bits-0-0-0")["rope"]["y"]), "what rises high leaves the close-up"


def test_needle_maps_are_coloured_from_a_guess_on(state: Grid, page: str) -> None:
    (trace,) = figures(page)["needles-0-0-0"]["data"]
    found = [cell.measures["needles"] for cell in _of(state, "rope")]
    first = np.mean([each["rows"][0]["accuracy"]["value"] for each in found])
    assert trace["z"][0][0] == pytest.approx(first - found[0]["guess"], abs=1e-5)
    assert figures(page)["needles-0-0-0"]["layout"]["coloraxis"]["cmax"] == pytest.approx(1 - found[0]["guess"])
    (trace,) = figures(page)["needles-1-0-0"]["data"]
    spent = np.mean([each["rows"][0]["bits"]["value"] for each in found])
    assert trace["z"][0][0] == pytest.approx(-np.log2(found[0]["guess"]) - spent, abs=1e-4)


def test_deposits_are_shares_with_each_seeds_heads_in_order(state: Grid, page: str) -> None:
    assert "Not shown, without any effect: Absolute (sinusoid) and NoPE." in page
    found = [cell.measures["position-loss"] for cell in _of(state, "rope")]
    drops = [np.where(np.array(each["low"]) > 0, each["drops"], 0) for each in found]
    shares = [each / each.sum() for each in drops]
    (mean,) = figures(page)["position-share-0-0-0"]["data"]
    np.testing.assert_allclose(mean["z"], np.mean([-np.sort(-each, axis=1) for each in shares], axis=0), atol=1e-5)
    (first,) = figures(page)["position-share-1-0-0"]["data"]
    np.testing.assert_allclose(first["z"], shares[0], atol=1e-5)
    (lost,) = figures(page)["without-1-0-0"]["data"]
    np.testing.assert_allclose(lost["z"], _of(state, "rope")[0].by_loss.drops, atol=1e-5)


def test_extensions_stand_side_by_side_with_their_gains(state: Grid, page: str) -> None:
    rows = rows_of(page, "Context extension, RoPE")
    for measure, method, title, column in (
        ("extension", "yarn", "YaRN", 2),
        ("extension-tuned", "interpolation", "Position interpolation", 6),
    ):
        found = [
            (row["bits"]["value"], row["gain"]["value"])
            for cell in _of(state, "rope")
            for row in cell.measures[measure]["rows"]
            if (row["method"], row["factor"]) == (method, 4.0)
        ]
        value, gain = np.mean(found, axis=0)
        assert rows[title][column] == f"{value:.3f} {gain:+.3f} helps".replace("-", "−")
    assert rows["LongRoPE"][4:] == ["–"] * 4, "not among those that are tuned"


def test_a_study_of_language_alone_leaves_out_what_makes_no_sense_there(page: str) -> None:
    text = Text(without_plotly(page))
    ids = {value for _, name, value in text.attributes if name == "id"}
    assert {"language", "longer", "context", "extensions", "kinds", "plane", "cost", "run"} <= ids
    assert not {"accuracy", "lengths", "relations", "training"} & ids
    links = [str(value) for _, name, value in text.attributes if name == "href"]
    assert {link[1:] for link in links} <= ids
    assert stands_alone(page)


def test_a_part_of_a_study_and_none_of_it(tmp_path: Path) -> None:
    one = language_grid(tmp_path, finished=8)
    path = write_grid(one)
    partial = render_grid(one)
    assert path.read_text() == partial, "the same state gives the same page"
    assert "With one seed, differences cannot be distinguished from chance" in partial
    assert "<b>Not complete.</b> 8 of 24 models are finished" in partial
    empty = render_grid(language_grid(tmp_path, finished=0))
    assert figures(empty) == {}
    assert "No language model is finished and evaluated yet." in empty
    assert "needs finished language models with the measure needles" in empty
    bare = [replace(cell, measures={"bits": cell.measures["bits"]}, by_loss=None) for cell in one.results.cells]
    places = {place.split("-")[0] for place in figures(render_grid(replace(one, results=Results(bare))))}
    assert places == {"bits", "positions"}
