"""A grid study's page says what its language models say, and leaves out what makes no sense of language alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser
from tests.report.browsing import Visit
from tests.report.grid.language_state import (
    BITS,
    FINDS,
    GUESS,
    KEEPS,
    LOST,
    NO_ROOM,
    SECONDS,
    TOO_LONG,
    language_grid,
    language_spec,
)
from tests.report.grid.state import NASTY, made_up_grid
from tests.report.reading import Text, figures, stands_alone, without_plotly

from toeplens.report.grid.language.bargains import Bargain, Figures, apart, bargains, by_chance
from toeplens.report.grid.language.page import parts
from toeplens.report.grid.language.reasons import reasons
from toeplens.report.grid.look import Spread
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


def _rows(text: Text, label: str) -> dict[str, list[str]]:
    """The cells of a table by the row's name, each with single spaces."""
    rows = [[" ".join(cell.split()) for cell in row] for row in text.tables[label]]
    return {re.sub(r"^\W+ (?=\w)", "", row[0]): row[1:] for row in rows if row}


def _traces(page: str, place: str) -> dict[str, dict[str, Any]]:
    """The last trace of each legend entry: bands come before what they belong to."""
    return {trace["meta"]: trace for trace in figures(page)[place]["data"] if "meta" in trace}


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


# ---- what is bought and paid ----------------------------------------------------------------------------------------


def test_the_table_is_the_figures_best_first(text: Text) -> None:
    rows = _rows(text, "What encodings buy and cost")
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
    assert rows["Counting tokens"][0] == "4.600"
    assert rows["Counting, 3 before"][0] == "2.600"


def test_sentences_follow_from_the_numbers(text: Text) -> None:
    assert (
        "RoPE Buys as few bits a byte as any (no difference that the seeds tell apart from p-RoPE); needles at the "
        "training length (80%). Pays 0.420 bits a byte at the end of 4 times the length; needles lost at 4 times the "
        "length (8%)."
    ) in text.text
    assert (
        "T5 Buys 4 times the length without loss; needles at the training length (60%) and at 4 times the length "
        "(48%). Pays 0.020 bits a byte over RoPE; 0.60 bits a token less from an earlier copy than RoPE; 4% more "
        "parameters; 3.0 times the training time of RoPE."
    ) in text.text
    assert "Ranges of 3 seeds each lie apart by chance alone in 10% of comparisons" in text.text


_NOTHING = Spread.of([])


def _encoding(title: str, bits: tuple[float, ...], **more: Any) -> Figures:
    given = {"lost": (0.0,), "needle": (), "needle_long": (), "copied": (), "deposit": (), "seconds": (1.0, 1.0)} | more
    parameters = given.pop("parameters", 100)
    return Figures(title, Spread.of(bits), parameters=parameters, **{n: Spread.of(v) for n, v in given.items()})


def test_a_difference_is_told_where_ranges_lie_apart() -> None:
    best, alike, worse = _encoding("A", (2.0, 2.02)), _encoding("B", (2.01, 2.04)), _encoding("C", (2.024, 2.026))
    first, second, third = bargains([best, alike, worse])
    assert first.buys.startswith("as few bits a byte as any (no difference that the seeds tell apart from B)")
    assert second.buys.startswith("as few bits a byte as any (no difference that the seeds tell apart from A)")
    assert third.pays == "0.015 bits a byte over A"
    first, last = bargains([best, worse])
    assert first.buys.startswith("the fewest bits a byte (0.015 under C)")
    little = bargains([_encoding("A", (2.0, 2.0)), _encoding("B", (2.001, 2.001))])[1]
    assert little.pays == "0.001 bits a byte over A, little"
    assert last.pays == third.pays


def test_one_seed_tells_no_difference() -> None:
    fast, slow = _encoding("A", (2.0,), seconds=(1.0,)), _encoding("B", (3.0,), seconds=(9.0,))
    assert [one.pays for one in bargains([fast, slow])] == ["nothing that shows here"] * 2
    assert not apart(fast.bits, slow.bits)
    assert bargains([fast]) == [Bargain("4 times the length without loss", "nothing that shows here")]


@pytest.mark.parametrize(
    ("lost", "buys", "pays"),
    [
        ((-0.03, -0.02), "longer contexts that help (0.025 bits a byte fewer at the end of 4 times the length)", ""),
        ((-0.03, 0.0), "4 times the length without loss", ""),
        ((0.0, 0.03), "", "0.000 to 0.030 bits a byte at the end of 4 times the length, as the seed has it"),
        ((0.02, 0.04), "", "0.030 bits a byte at the end of 4 times the length, little"),
        ((0.06, 0.08), "", "0.070 bits a byte at the end of 4 times the length"),
        ((), "", "no reading of 4 times the length"),
    ],
)
def test_longer_texts_are_bought_or_paid(lost: tuple[float, ...], buys: str, pays: str) -> None:
    (one,) = bargains([_encoding("A", (2.0, 2.0), lost=lost)])
    assert one == Bargain(buys or "nothing that shows here", pays or "nothing that shows here")


def test_needles_count_only_where_some_encoding_finds_them() -> None:
    blind = _encoding("A", (2.0,), needle=(0.05,), needle_long=(0.05,))
    assert "needles" not in bargains([blind])[0].pays
    both = bargains([blind, _encoding("B", (2.0,), needle=(0.5, 0.3), needle_long=(0.6, 0.1))])
    assert both[0].pays == "needles not found at the training length (5%)"
    assert both[1].pays == "needles lost at 4 times the length (35%)", "one seed loses them"


def test_how_often_ranges_lie_apart_by_chance() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    for seeds in (2, 3, 5):
        one, other = rng.normal(size=(2, 20_000, seeds))
        share = ((one.min(1) > other.max(1)) | (other.min(1) > one.max(1))).mean()
        assert by_chance(seeds) == pytest.approx(share, abs=0.01)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_bits_by_length_are_means_over_seeds(state: Grid, page: str) -> None:
    for view, part in enumerate(("end", "gain", "whole", "sliding")):
        trace = _traces(page, f"bits-{view}-0-0")["rope"]
        wanted = [
            np.mean([cell.measures["bits"]["lengths"][at][part]["value"] for cell in _of(state, "rope")])
            for at in range(4)
        ]
        assert trace["x"] == [1, 2, 4, 8], "without the length that there is no text of"
        assert trace["y"] == pytest.approx(wanted, abs=6e-6)
    assert trace["customdata"][1][1] == "2 × the length"
    low = figures(page)["bits-0-0-1"]["layout"]["yaxis"]["range"]
    assert low[0] < min(BITS.values()) < low[1] < BITS["rope"] + LOST["rope"], "what rises high leaves the close-up"
    assert "24 texts of 12 documents" in page


def test_loss_by_position_is_drawn_at_the_bins(state: Grid, page: str) -> None:
    trace = _traces(page, "positions-0-0-0")["t5"]
    assert trace["x"] == [1, 2, 3.5, 6.5, 12.5, 24.5, 48.5, 96.5, 192.5, 384.5]
    assert trace["y"][4] == pytest.approx(BITS["t5"] + 3 / 5, abs=6e-6)
    assert [trace["customdata"][at][1] for at in (0, 2, 9)] == ["position 1", "positions 3–4", "positions 257–512"]
    later = _traces(page, "positions-0-0-1")["t5"]
    assert later["x"] == trace["x"][4:]


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
        == "RoPE<br>4 × the length, depth 100%<br>13.0% (13.0 to 13.0) found<br>32 needles a model"
    )
    (bits,) = figures(page)["needles-1-0-0"]["data"]
    assert bits["z"][0][0] == pytest.approx(np.log2(26) - (4.7 - 4 * 0.75), abs=1e-4)


def test_copies_are_drawn_where_they_could_be_asked(page: str) -> None:
    trace = _traces(page, "copies-0-0-0")["t5"]
    assert trace["x"] == [0.5, 0.9, 2, 4]
    assert trace["y"] == pytest.approx([1.8, 1.8, 1.44, 1.44])
    assert _traces(page, "copies-0-0-1")["t5"]["y"] == pytest.approx([0.6, 0.6, 0.48, 0.48])
    levels = [
        shape["y0"] for shape in figures(page)["copies-0-0-0"]["layout"]["shapes"] if shape.get("xref") == "paper"
    ]
    assert levels == [0]


def test_every_head_is_among_the_kinds(state: Grid, page: str) -> None:
    for view, (weight, share) in enumerate((("previous", "positional"), ("induction", "symbolic"))):
        traces = _traces(page, f"kinds-{view}-0-0")
        assert list(traces) == ["layer-0", "layer-1", "layer-2"]
        for layer in range(3):
            wanted = {
                (
                    round(cell.measures["patterns"][weight][layer][head], 4),
                    round(cell.measures["behaviour"][share][layer][head], 4),
                )
                for cell in _of(state, "rope")
                for head in range(4)
            }
            trace = traces[f"layer-{layer}"]
            assert set(zip(trace["x"], trace["y"], strict=True)) == wanted
    sizes = [size for trace in _traces(page, "kinds-0-0-0").values() for size in trace["marker"]["size"]]
    assert sorted(sizes)[-10:] == [6] + [11] * 9, "three of each seed are large"


def test_deposits_are_shares_with_each_seeds_heads_in_order(state: Grid, page: str) -> None:
    assert _titles(page, "position-share") == ["RoPE", "p-RoPE", "T5", "ALiBi"]
    assert "No map: Sinusoid and NoPE, where nothing is lost so." in page
    drops = [np.array(cell.measures["position-loss"]["drops"]) for cell in _of(state, "rope")]
    drops = [np.where(each > 1e-4, each, 0) for each in drops]
    shares = [each / each.sum() for each in drops]
    (mean,) = figures(page)["position-share-0-0-0"]["data"]
    np.testing.assert_allclose(mean["z"], np.mean([-np.sort(-each, axis=1) for each in shares], axis=0), atol=1e-5)
    (first,) = figures(page)["position-share-1-0-0"]["data"]
    np.testing.assert_allclose(first["z"], shares[0], atol=1e-5)
    (lost,) = figures(page)["without-1-0-0"]["data"]
    by_loss = _of(state, "rope")[0].by_loss
    assert by_loss is not None
    np.testing.assert_allclose(lost["z"], by_loss.drops, atol=1e-5)
    assert lost["text"][0][int(by_loss.drops[0].argmax())] == "100", "thousandths of a nat"


# ---- ways to a longer context ---------------------------------------------------------------------------------------


def test_extensions_stand_side_by_side_with_their_gains(text: Text, page: str) -> None:
    rows = _rows(text, "Ways to a longer context, RoPE")
    assert rows["Change"] == ["Without training", "After 7 steps of tuning"]
    assert rows["As it was trained"][:4] == ["2.050", "2.050", "2.050", "2.050 0.000"]
    assert rows["Position interpolation"][2] == "2.000 −0.050 helps, told from none"
    assert rows["Position interpolation"][5] == "1.980 −0.070 helps, told from none"
    assert rows["NTK-aware"][3:] == ["–", "–", "–"], "not among those that are tuned"
    assert rows["ReRoPE"][2] == "2.052 +0.002 1 of 3 seeds"
    assert page.count('class="right tint more"') > 8
    assert (
        "Seeds 300, 301 and 302: LongRoPE’s search leaves its fastest pair as it was, its slowest 4.2 times slower; "
        "factors from the fastest to the slowest: 1.00, 1.80, 4.20."
    ) in text.text


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_each_reason_is_told_once(state: Grid) -> None:
    found = {one.why: one for one in reasons(state)}
    assert len(found) == len(reasons(state)) == 4
    assert (found[TOO_LONG].what, found[TOO_LONG].whose) == ("longer texts at 16 × the length", "all encodings")
    assert found[NO_ROOM].what == "copies at ¼ × the length"
    none = found["encoding: there are ways to extend 'rope' and 'nope', alone, after training."]
    assert none.what == "extension as trained and extension after a tuning"
    assert none.whose == "p-RoPE, Sinusoid, T5, ALiBi and NoPE", "without their names among the reasons"


# ---- whole pages ----------------------------------------------------------------------------------------------------


def test_a_study_of_language_alone_leaves_out_what_makes_no_sense_there(text: Text, page: str) -> None:
    ids = {value for _, name, value in text.attributes if name == "id"}
    assert {"language", "longer", "context", "extensions", "kinds", "plane", "cost", "run"} <= ids
    assert not {"accuracy", "lengths", "relations", "training"} & ids
    links = [str(value) for _, name, value in text.attributes if name == "href"]
    assert {link[1:] for link in links} <= ids
    assert "Fewest bits a byte 2.050 RoPE counting, with 3 before: 2.600" in text.text
    assert _rows(text, "Models")["ALiBi"][:6] == ["Language", "302", "complete", "2.084", "−0.020", "55.0"]
    assert stands_alone(page)


def test_a_study_that_asks_of_both_has_both(tmp_path: Path) -> None:
    tasks = {"language": {"options": {"length": 64}}, "index": {"options": {"length": 10, "words": 8}}}
    both = Text(without_plotly(render_grid(language_grid(tmp_path, language_spec(("rope", "alibi"), tasks=tasks)))))
    ids = {value for _, name, value in both.attributes if name == "id"}
    assert {"language", "accuracy", "longer", "lengths", "relations", "training"} <= ids
    assert list(_rows(both, "Test accuracy by task and encoding"))[2:] == ["language", "index"]


def test_a_study_of_other_tasks_says_nothing_of_language(tmp_path: Path) -> None:
    other = made_up_grid(tmp_path)
    assert parts(other) is None
    assert "What you buy" not in render_grid(other)


def test_a_part_of_a_study_and_none_of_it(tmp_path: Path) -> None:
    one = language_grid(tmp_path, finished=6)
    path = write_grid(one)
    partial = render_grid(one)
    assert path.read_text() == partial, "the same state gives the same page"
    assert "With one seed, nothing tells a difference in bits or time from chance" in partial
    assert "<b>Not complete:</b> 6 of 18 models are finished" in partial
    empty = render_grid(language_grid(tmp_path, finished=0))
    assert figures(empty) == {}
    assert "No language model is finished and measured yet." in empty
    assert "it needs the measure needles" in empty
    bare = replace(
        one,
        results=type(one.results)(
            replace(cell, measures={"bits": cell.measures["bits"]}, by_loss=None) for cell in one.results.cells
        ),
    )
    places = {place.split("-")[0] for place in figures(render_grid(bare))}
    assert places == {"bits", "positions"}


def test_titles_are_escaped(tmp_path: Path) -> None:
    spec = language_spec(encodings={"rope": {"title": NASTY}, "nope": {}}, tasks={"language": {"title": NASTY}})
    own = without_plotly(render_grid(language_grid(tmp_path, spec)))
    assert "<script>alert" not in own
    told = [str(trace.get("customdata", "")) for figure in figures(own).values() for trace in figure["data"]]
    assert not any("<script" in each for each in told), "nor as plotly's own marks"


def test_it_draws_every_plot_without_a_word_and_fits_any_window(browser: Browser, tmp_path: Path) -> None:
    visit = Visit(browser, write_grid(language_grid(tmp_path, language_spec(("rope", "alibi"), seeds=1))), 390)
    visit.read_to_the_end()
    sizes = visit.sizes()
    assert len(sizes) > 12
    assert all(100 < across <= 390 and down > 80 for _, across, down in sizes), sizes
    assert visit.fits_any_window()
    lengths = visit.page.locator("#needles-0-0-0 .xtick").all_text_contents()
    assert lengths == ["½", "1", "2", "4"], "no label is taken for a place"
    assert visit.barriers() == []
    visit.end()
