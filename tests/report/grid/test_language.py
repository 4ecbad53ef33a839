"""A grid study's page says what its language models say, and leaves out what makes no sense of language alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.grid.language_state import BITS, FINDS, GUESS, KEEPS, LOST, NO_ROOM, SECONDS, TOO_LONG, language_grid
from tests.report.reading import Text, figures, rows_of, stands_alone, traces, without_plotly

from toeplens.report.grid.page import render_grid, write_grid
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return language_grid(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def page(state: Grid) -> str:
    return render_grid(state)


@pytest.fixture(scope="module")
def text(page: str) -> Text:
    return Text(without_plotly(page))


def _of(state: Grid, label: str) -> list[CellResult]:
    return state.results.of("language", label)


def _titles(page: str, block: str) -> list[str]:
    """What the panels of a figure's first view are called."""
    (figure,) = re.findall(rf'<figure id="figure-{block}".*?</figure>', page, re.DOTALL)
    first = re.split(r'id="[\w-]+-view-1"', figure)[0]
    return [
        re.sub(r"^\W+ ", "", re.sub(r"<[^>]+>", "", title)).strip()
        for title in re.findall(r"<h5[^>]*>(.*?)</h5>", first, re.DOTALL)
    ]


# ---- benefits and costs ----------------------------------------------------------------------------------------------


def test_the_table_is_the_figures_best_first(text: Text) -> None:
    rows = rows_of(text, "Benefits and costs of encodings")
    assert list(rows)[2:8] == ["RoPE", "p-RoPE", "T5", "ALiBi", "Sinusoid", "NoPE"]
    assert rows["ALiBi"] == [
        "2.080 2.076 to 2.084",
        "−0.020 −0.020 to −0.020",
        "50.0%",
        f"{100 * FINDS['alibi'] * KEEPS['alibi']:.1f}%",
        f"{3 * FINDS['alibi']:.2f}",
        "50.2%",
        "1,000",
        f"{(SECONDS['alibi'] + 0.1) / 10.1:.2f}",
    ]
    assert rows["NoPE"][5] == "–", "there is no head from which position could be taken"
    assert rows["1-gram model"][0] == "4.600"
    assert rows["4-gram model"][0] == "2.600"


# ---- figures --------------------------------------------------------------------------------------------------------


def test_bits_by_length_are_means_over_seeds(state: Grid, page: str) -> None:
    for view, part in enumerate(("end", "gain", "whole", "sliding")):
        trace = traces(page, f"bits-{view}-0-0")["rope"]
        wanted = [
            np.mean([cell.measures["bits"]["lengths"][at][part]["value"] for cell in _of(state, "rope")])
            for at in range(4)
        ]
        assert trace["x"] == [1, 2, 4, 8], "without the length that there is no text of"
        assert trace["y"] == pytest.approx(wanted, abs=6e-6)
    assert trace["customdata"][1][1] == "2 × the training length"
    low = figures(page)["bits-0-0-1"]["layout"]["yaxis"]["range"]
    assert low[0] < min(BITS.values()) < low[1] < BITS["rope"] + LOST["rope"], "what rises high leaves the close-up"
    assert "24 texts from 12 documents" in page


def test_needle_maps_are_coloured_from_a_guess_on(page: str) -> None:
    assert _titles(page, "needles") == ["RoPE", "p-RoPE", "Sinusoid", "T5", "ALiBi", "NoPE"]
    (trace,) = figures(page)["needles-0-0-0"]["data"]
    assert trace["y"] == ["0%", "50%", "100%"]
    assert trace["x"] == ["½ ×", "1 ×", "2 ×", "4 ×"]
    assert trace["text"][0][:2] == ["75", "75"]
    assert trace["z"][0][0] == pytest.approx(0.75 - GUESS, abs=1e-5)
    assert figures(page)["needles-0-0-0"]["layout"]["coloraxis"]["cmax"] == pytest.approx(1 - GUESS)
    assert (
        trace["customdata"][2][3]
        == "RoPE<br>4 × the training length, depth 100%<br>accuracy 13.0% (13.0 to 13.0)<br>32 needles per model"
    )
    (bits,) = figures(page)["needles-1-0-0"]["data"]
    assert bits["z"][0][0] == pytest.approx(np.log2(26) - (4.7 - 4 * 0.75), abs=1e-4)


def test_deposits_are_shares_with_each_seeds_heads_in_order(state: Grid, page: str) -> None:
    assert _titles(page, "position-share") == ["RoPE", "p-RoPE", "T5", "ALiBi"]
    assert "Not shown, without any effect: Sinusoid and NoPE." in page
    drops = [np.array(cell.measures["position-loss"]["drops"]) for cell in _of(state, "rope")]
    drops = [np.where(each > 1e-4, each, 0) for each in drops]
    shares = [each / each.sum() for each in drops]
    (mean,) = figures(page)["position-share-0-0-0"]["data"]
    np.testing.assert_allclose(mean["z"], np.mean([-np.sort(-each, axis=1) for each in shares], axis=0), atol=1e-5)
    (first,) = figures(page)["position-share-1-0-0"]["data"]
    np.testing.assert_allclose(first["z"], shares[0], atol=1e-5)
    (lost,) = figures(page)["without-1-0-0"]["data"]
    by_loss = _of(state, "rope")[0].by_loss
    np.testing.assert_allclose(lost["z"], by_loss.drops, atol=1e-5)
    assert lost["text"][0][int(by_loss.drops[0].argmax())] == "100", "thousandths of a nat"


# ---- ways to a longer context ---------------------------------------------------------------------------------------


def test_extensions_stand_side_by_side_with_their_gains(text: Text, page: str) -> None:
    rows = rows_of(text, "Context extension, RoPE")
    assert rows["Change"] == ["Without tuning", "After 7 tuning steps"]
    assert rows["Unchanged"][:4] == ["2.050", "2.050", "2.050", "2.050 0.000"]
    assert rows["Position interpolation"][2] == "2.000 −0.050 helps"
    assert rows["Position interpolation"][5] == "1.980 −0.070 helps"
    assert rows["NTK-aware"][3:] == ["–", "–", "–"], "not among those that are tuned"
    assert rows["ReRoPE"][2] == "2.052 +0.002 1 of 3 seeds"
    assert page.count('class="tint more right"') > 8
    assert "LongRoPE, seed 300, 301, 302: factors 1.0" in text.text


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_each_reason_stands_beside_what_it_is_of(text: Text) -> None:
    found = [[" ".join(cell.split()) for cell in row] for row in text.tables["Missing measures"][1:]]
    assert ["longer texts at 16 × the training length", "all encodings", TOO_LONG] in found
    assert "copies at ¼ × the training length" in [row[0] for row in found if row[2] == NO_ROOM]
    why = "encoding must be 'rope' or 'nope' to extend the length after training."
    whose = "p-RoPE, Sinusoid, T5, ALiBi and NoPE"
    assert [["context extension without tuning", whose, why], ["context extension after tuning", whose, why]] == [
        r for r in found if r[2] == why
    ]


# ---- whole pages ----------------------------------------------------------------------------------------------------


def test_a_study_of_language_alone_leaves_out_what_makes_no_sense_there(text: Text, page: str) -> None:
    ids = {value for _, name, value in text.attributes if name == "id"}
    assert {"language", "longer", "context", "extensions", "kinds", "plane", "cost", "run"} <= ids
    assert not {"accuracy", "lengths", "relations", "training"} & ids
    links = [str(value) for _, name, value in text.attributes if name == "href"]
    assert {link[1:] for link in links} <= ids
    assert "Lowest bits per byte 2.050 RoPE 4-gram model: 2.600" in text.text
    assert rows_of(text, "Models")["ALiBi"][:6] == ["Language", "302", "complete", "2.084", "−0.020", "55.0"]
    assert stands_alone(page)


def test_a_part_of_a_study_and_none_of_it(tmp_path: Path) -> None:
    one = language_grid(tmp_path, finished=6)
    path = write_grid(one)
    partial = render_grid(one)
    assert path.read_text() == partial, "the same state gives the same page"
    assert "With one seed, differences cannot be distinguished from chance" in partial
    assert "<b>Not complete.</b> 6 of 18 models are finished" in partial
    empty = render_grid(language_grid(tmp_path, finished=0))
    assert figures(empty) == {}
    assert "No language model is finished and evaluated yet." in empty
    assert "needs finished language models with the measure needles" in empty
    bare = replace(
        one,
        results=type(one.results)(
            replace(cell, measures={"bits": cell.measures["bits"]}, by_loss=None) for cell in one.results.cells
        ),
    )
    places = {place.split("-")[0] for place in figures(render_grid(bare))}
    assert places == {"bits", "positions"}
