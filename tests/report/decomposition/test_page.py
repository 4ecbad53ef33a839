"""The page of a run taken apart says what the numbers say, needs nothing but itself, and draws in a real browser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.report.reading import figures, rows_of, stands_alone, without_plotly

from toeplens.lens import KINDS
from toeplens.report.decomposition import diagonals_only
from toeplens.studies.decomposition import ORIGINS, LayerStructure, Origins, Parts, RunStructure

HEADS, LENGTH, FREQUENCIES = 16, 12, 4
NAMES = ("content-content", "content-position", "position-content", "position-position", "bias")
FLAT, UNKNOWN = 3, 5  # heads of the first layer: without shares, and with that of position alone
NASTY = "<script>alert('x')</script>&"


def _shares(rng: np.random.Generator, heads: int, parts: int) -> np.ndarray:
    """Rows that sum to 1; the first share is often negative."""
    made = rng.dirichlet(np.full(parts, 0.5), heads) * 1.3
    made[:, 0] -= 0.3
    return made


def _parts(rng: np.random.Generator, offsets: int) -> Parts:
    looks = ("logits", "softmax")
    shares = {look: np.insert(_shares(rng, HEADS, 4), 3, 0.001, axis=1) for look in looks}  # hardly any p-p
    kinds = {look: _shares(rng, HEADS, 3) for look in looks}
    branches = {look: _shares(rng, HEADS, FREQUENCIES + 1) for look in looks}
    for look in looks:
        shares[look][FLAT] = kinds[look][FLAT] = branches[look][FLAT] = np.nan
        kinds[look][UNKNOWN, 1:] = np.nan
    named = ["sum"] * 9 + ["content"] * 7
    named[FLAT], named[UNKNOWN] = "flat", "unknown"
    fixed = np.where(np.arange(HEADS) == FLAT, np.nan, np.linspace(0.3, 0.9, HEADS))
    return Parts(NAMES, shares, kinds, named, branches, rng.normal(size=(HEADS, offsets)), fixed, 2.34e-7)


def _layer(rng: np.random.Generator, layer: int, *, parts: bool, causal: bool = True) -> LayerStructure:
    offsets = np.arange(0 if causal else 1 - LENGTH, LENGTH)
    example = rng.normal(size=(2, LENGTH, LENGTH)).astype(np.float32)
    if causal:
        example[:, ~np.tri(LENGTH, dtype=bool)] = np.nan
    means = rng.normal(size=(HEADS, len(offsets)))
    means[:, -1] = np.nan  # an offset that no pair has
    angles = 2 * np.pi * np.arange(-32, 32) / 64
    return LayerStructure(
        layer=layer,
        parts=_parts(rng, len(offsets)) if parts else None,
        why="" if parts else f"the position part of {NASTY} is not known.",
        offsets=offsets,
        means=means,
        toeplitz=np.linspace(0, 1, HEADS),
        explained=np.where(np.arange(HEADS) == FLAT, np.nan, np.linspace(0.1, 0.8, HEADS)),
        chance=0.0123,
        angles=angles,
        symbol=rng.normal(size=(HEADS, len(angles))),
        example=example,
        heads=[2, 15],
    )


def made_up() -> RunStructure:
    rng = np.random.default_rng(np.random.Philox(7))
    layers = [_layer(rng, 0, parts=True), _layer(rng, 1, parts=True, causal=False), _layer(rng, 2, parts=False)]
    return RunStructure(NASTY, NASTY, "paper", NASTY, "mean", 1234, 0.5, layers)


@pytest.fixture(scope="module")
def planted() -> RunStructure:
    return made_up()


@pytest.fixture(scope="module")
def page(planted: RunStructure) -> str:
    return render_structure(planted)


@pytest.mark.parametrize(("view", "look"), [(0, "softmax"), (1, "logits")])
def test_the_bars_are_the_shares(planted: RunStructure, page: str, view: int, look: str) -> None:
    plots = figures(page)
    for panel, layer in enumerate(planted.layers[:2]):
        figure = plots[f"kinds-{view}-0-{panel}"]
        assert figure["layout"]["barmode"] == "relative"
        bars = {trace["meta"]: trace["y"] for trace in figure["data"]}
        assert list(bars) == [*KINDS, "untold"]
        for head in range(HEADS):
            for column, kind in enumerate(KINDS):
                true = layer.parts.kinds[look][head, column]
                drawn = bars[kind][head]
                assert drawn is None if np.isnan(true) else abs(drawn - true) <= 1e-3 * abs(true) + 1e-12
        assert bars["untold"][UNKNOWN] == pytest.approx(1 - bars["position"][UNKNOWN], rel=1e-3)
        assert [head for head, value in enumerate(bars["untold"]) if value is not None] == [UNKNOWN]
        assert [note["x"] for note in figure["layout"]["annotations"]] == [FLAT + 1]
        low, high = figure["layout"]["yaxis"]["range"]
        heights = [[row[head] or 0 for row in bars.values()] for head in range(HEADS)]
        assert min(sum(min(x, 0) for x in bar) for bar in heights) > low
        assert max(sum(max(x, 0) for x in bar) for bar in heights) < high
    assert "kinds-0-0-2" not in plots, "the third layer has no parts"


def test_curves_have_a_point_an_offset_and_none_where_no_pair_is(planted: RunStructure, page: str) -> None:
    plots = figures(page)
    for group, layer in enumerate(planted.layers):
        curves = plots[f"distance-0-{group}-{0 if layer.parts is None else 1}"]["data"]
        assert [curve["meta"] for curve in curves] == [f"head-{head}" for head in range(1, HEADS + 1)]
        assert len({(curve["line"]["color"], curve["marker"]["symbol"]) for curve in curves}) == HEADS
        assert curves[4]["x"] == layer.offsets.tolist()
        assert curves[4]["y"][-1] is None
        np.testing.assert_allclose(curves[4]["y"][:-1], layer.means[4, :-1], rtol=1e-3)
    assert "Expected for contents without structure: 1.2%" in page
    assert "Variance of the logits explained by distance: 10.0% (head 1) to 80.0% (head 16)" in page


def test_the_symbol_is_dotted_where_it_is_negative() -> None:
    angles = np.array([-1.0, 0.0, 1.0, 2.0, 3.0])
    figure = symbol(angles, np.array([[9.0, 9.0, 2.0, -4.0, 1e-9]])).to_plotly_json()
    drawn = {trace["line"]["dash"]: (list(trace["x"]), list(trace["y"])) for trace in figure["data"]}
    assert drawn == {"solid": ([1, 2, 3], [2, None, None]), "dot": ([1, 2, 3], [None, 4, None])}
    assert not symbol(angles, np.zeros((1, 5))).to_plotly_json()["data"]


def test_a_diagonal_is_replaced_by_the_mean_of_what_is_seen() -> None:
    rng = np.random.default_rng(np.random.Philox(3))
    example = rng.normal(size=(7, 7))
    example[~np.tri(7, dtype=bool)] = np.nan
    example[4, 2] = np.nan
    expected = np.full((7, 7), np.nan)
    for i in range(7):
        for j in range(7):
            if not np.isnan(example[i, j]):
                same = [example[a, b] for a in range(7) for b in range(7) if a - b == i - j]
                expected[i, j] = np.nanmean(same)
    found = diagonals_only(example)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    figure = pair(example, found).to_plotly_json()
    assert {trace["coloraxis"] for trace in figure["data"]} == {"coloraxis"}, "one scale of colours"
    assert figure["data"][0]["z"][0][1] is None
    assert figure["layout"]["coloraxis"]["cmin"] == -figure["layout"]["coloraxis"]["cmax"]


def test_the_table_has_every_head_counted_from_1(planted: RunStructure, page: str) -> None:
    rows = rows_of(page, "All heads")
    assert list(rows)[2:] == [f"L{layer} H{head}" for layer in (1, 2, 3) for head in range(1, HEADS + 1)]
    kinds = [
        f"{100 * value:.1f}%".replace("-", "−")
        for look in ("softmax", "logits")
        for value in planted.layers[1].parts.kinds[look][6]
    ]
    assert rows["L2 H7"][:8] == [*kinds, "sum", f"{100 * planted.layers[1].parts.fixed[6]:.1f}%"]
    assert rows["L1 H4"] == ["–"] * 6 + ["flat", "–", "20.0%", "–", "–"]
    assert rows["L3 H1"] == ["no decomposition", "0.0%", "10.0%", "–"]


def test_without_parts_it_says_why_and_shows_what_it_can(planted: RunStructure) -> None:
    bare = replace(planted, accuracy=None, layers=planted.layers[2:])
    page = render_structure(bare)
    assert {place.rsplit("-", 3)[0] for place in figures(page)} == {"distance", "symbol", "logits"}
    assert "Reason: the position part of &lt;script&gt;" in page
    assert "no test accuracy recorded" in page
    assert "Distance explains most in layer 3, head 16: 80.0% of the variance." in page
    assert rows_of(page, "All heads")["L3 H4"] == ["20.0%", "–"]
    assert "Strongest" not in page


def test_what_logits_go_back_to_is_drawn_or_it_is_said_why_not(planted: RunStructure, page: str) -> None:
    assert "Not computed for this record." in page
    parts = dict(zip(ORIGINS, (1.25, 0.0, -0.5, 0.25, 3.0), strict=True))
    found = Origins(77, 4.0, parts, 0.125, np.zeros((3, HEADS)), 3e-16)
    drawn = render_structure(replace(planted, origins=found))
    (bars,) = figures(drawn)["origins-0-0-0"]["data"]
    assert bars["x"] == list(parts.values())
    assert bars["y"][:3] == ["content", "position at the input", "position in the attention"]
    for words in ("Mean logit: 4 over 77 sequences", "Position makes up 12.5%", "within 3e-16 of this sum"):
        assert words in drawn
    refused = render_structure(replace(planted, no_origins=f"{NASTY} was given."))
    assert "<b>Not available.</b> &lt;script&gt;" in refused


def test_names_are_escaped_and_nothing_is_loaded(page: str) -> None:
    own = without_plotly(page)
    assert "<script>alert" not in own
    assert own.count("&lt;script&gt;alert") >= 4, "the run, the encoding, the task and the reason"
    assert stands_alone(page)
