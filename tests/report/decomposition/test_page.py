"""The page of a decomposed run says what the numbers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.charts import rows_of

from toeplens.lens import KINDS
from toeplens.report.decomposition import UNSPLIT, diagonals_only, example_chart
from toeplens.studies.decomposition import LOGIT_PARTS, LayerShares, LayerStructure, LogitAttribution, RunStructure
from toeplens.utils.formatting import percent

HEADS, LENGTH, FREQUENCIES = 16, 12, 4
NAMES = ("content-content", "content-position", "position-content", "position-position", "bias")
FLAT_HEAD, UNKNOWN_HEAD = 3, 5  # heads of the first layer: without shares, and with that of position alone
HOSTILE_NAME = "<script>alert('x')</script>&"


def _shares(rng: np.random.Generator, heads: int, parts: int) -> np.ndarray:
    """Rows that sum to 1; the first share is often negative."""
    shares = rng.dirichlet(np.full(parts, 0.5), heads) * 1.3
    shares[:, 0] -= 0.3
    return shares


def _parts(rng: np.random.Generator, offsets: int) -> LayerShares:
    looks = ("logits", "softmax")
    shares = {look: np.insert(_shares(rng, HEADS, 4), 3, 0.001, axis=1) for look in looks}  # hardly any p-p
    kinds = {look: _shares(rng, HEADS, 3) for look in looks}
    branches = {look: _shares(rng, HEADS, FREQUENCIES + 1) for look in looks}
    for look in looks:
        shares[look][FLAT_HEAD] = kinds[look][FLAT_HEAD] = branches[look][FLAT_HEAD] = np.nan
        kinds[look][UNKNOWN_HEAD, 1:] = np.nan
    named = ["sum"] * 9 + ["content"] * 7
    named[FLAT_HEAD], named[UNKNOWN_HEAD] = "flat", "unknown"
    fixed = np.where(np.arange(HEADS) == FLAT_HEAD, np.nan, np.linspace(0.3, 0.9, HEADS))
    return LayerShares(NAMES, shares, kinds, named, branches, rng.normal(size=(HEADS, offsets)), fixed, 2.34e-7)


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
        reason="" if parts else f"the position part of {HOSTILE_NAME} is not known.",
        offsets=offsets,
        means=means,
        toeplitz=np.linspace(0, 1, HEADS),
        explained=np.where(np.arange(HEADS) == FLAT_HEAD, np.nan, np.linspace(0.1, 0.8, HEADS)),
        chance=0.0123,
        angles=angles,
        symbol=rng.normal(size=(HEADS, len(angles))),
        example=example,
        heads=[2, 15],
    )


def random_decomposition() -> RunStructure:
    rng = np.random.default_rng(np.random.Philox(7))
    layers = [_layer(rng, 0, parts=True), _layer(rng, 1, parts=True, causal=False), _layer(rng, 2, parts=False)]
    return RunStructure(HOSTILE_NAME, HOSTILE_NAME, "paper", HOSTILE_NAME, "mean", 1234, 0.5, layers)


@pytest.fixture(scope="module")
def planted_page() -> RunStructure:
    return random_decomposition()


def test_the_first_screen_states_the_position_share(planted_page: RunStructure) -> None:
    page = planted_page.page()
    shares = np.concatenate([layer.parts.kinds["softmax"][:, 0] for layer in planted_page.layers[:2]])
    assert page.answer.startswith(f"Position makes up {percent(float(np.nanmean(shares)))} of the row-centred logits")
    assert percent(float(np.nanmax(shares))) in page.answer
    assert "The position part is 61.2% Toeplitz on average (30.0% to 90.0% over heads)" in page.answer
    assert page.picture.id == "kinds"
    assert page.warnings == [
        f"Layer 3: no decomposition. Reason: {planted_page.layers[2].reason} Only the logits by distance are shown."
    ]
    assert "one model" in page.notes[0]


def test_the_bars_are_the_shares(planted_page: RunStructure) -> None:
    drawn_shares = {
        (row["layer"], row["head"], row["series"]): row["share"] for row in rows_of(planted_page.charts()["kinds"])
    }
    for at, layer in enumerate(planted_page.layers[:2], 1):
        for head, row in enumerate(layer.parts.kinds["softmax"]):
            for kind, true in zip(KINDS, row, strict=True):
                share = drawn_shares.get((f"Layer {at}", head + 1, kind))
                assert share is None if np.isnan(true) else share == pytest.approx(true, rel=1e-4)
        position = layer.parts.kinds["softmax"][UNKNOWN_HEAD, 0]
        assert drawn_shares[f"Layer {at}", UNKNOWN_HEAD + 1, UNSPLIT] == pytest.approx(1 - position, rel=1e-4)
    assert not any(layer == "Layer 3" for layer, _, _ in drawn_shares), "the third layer has no parts"


def test_curves_have_one_point_per_visible_offset(planted_page: RunStructure) -> None:
    drawn = rows_of(planted_page.charts()["means"])
    for at, layer in enumerate(planted_page.layers, 1):
        values = [row["value"] for row in drawn if (row["layer"], row["series"]) == (f"Layer {at}", "head 5")]
        assert values[-1] is None
        np.testing.assert_allclose(values[:-1], layer.means[4, :-1], rtol=1e-4)
    page = planted_page.page().html()
    assert "expected for contents without structure: 1.2%" in page
    assert "distance explains 10.0% (head 1) to 80.0% (head 16)" in page


def test_diagonals_are_replaced_by_visible_means() -> None:
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
    actual = diagonals_only(example)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    drawn_logits = {
        (row["map"], row["query"], row["key"]): row["logit"] for row in rows_of(example_chart(example, actual))
    }
    assert ("logits", 1, 2) not in drawn_logits
    assert drawn_logits["Toeplitz part", 7, 3] == pytest.approx(actual[6, 2], rel=1e-2)


def test_the_tables_have_every_head_counted_from_1(planted_page: RunStructure) -> None:
    tables = {
        table.name: {row[0].plain_text: [cell.plain_text for cell in row[1:]] for row in table.body}
        for table in planted_page.page().tables
    }
    rows = tables["All heads"]
    assert list(rows) == [f"L{layer} H{head}" for layer in (1, 2, 3) for head in range(1, HEADS + 1)]
    parts = planted_page.layers[1].parts
    kinds = [percent(value) for look in ("softmax", "logits") for value in parts.kinds[look][6]]
    assert rows["L2 H7"][:8] == [*kinds, "sum", percent(parts.fixed[6])]
    assert rows["L1 H4"] == ["–"] * 6 + ["flat", "–", "20.0%", "–", "–"]
    assert rows["L3 H1"] == ["no decomposition", *["–"] * 7, "0.0%", "10.0%", "–"]
    assert tables["Kernels"]["L1 H1"] == ["–"] * 5


def test_without_terms_the_page_gives_the_reason_and_the_rest(planted_page: RunStructure) -> None:
    page = replace(planted_page, accuracy=None, layers=planted_page.layers[2:]).page()
    assert [figure.id for figure in page.figures] == ["means", "symbol", "logits"]
    assert "Reason: the position part of <script>" in page.warnings[0]
    assert "no test accuracy recorded" in page.notes[0]
    assert "most in layer 3, head 16 (80.0%)" in page.answer
    assert [cell.plain_text for cell in page.tables[-2].body[3]] == ["L3 H4", "20.0%", "–"]


def test_logit_attribution_is_drawn_or_the_reason_is_given(planted_page: RunStructure) -> None:
    assert "Not computed for this record." in planted_page.page().html()
    parts = dict(zip(LOGIT_PARTS, (1.25, 0.0, -0.5, 0.25, 3.0), strict=True))
    actual = replace(planted_page, origins=LogitAttribution(77, 4.0, parts, 0.125, np.zeros((3, HEADS)), 3e-16))
    bars = rows_of(actual.charts()["origins"])
    assert [row["value"] for row in bars] == list(parts.values())
    assert [row["part"] for row in bars[:3]] == ["content", "position at the input", "position in the attention"]
    for words in ("Mean logit: 4 over 77 sequences", "Position makes up 12.5%", "within 3e-16 of this sum"):
        assert words in actual.page().html()
    assert (
        "Not available. &lt;script&gt;" in replace(planted_page, no_origins=f"{HOSTILE_NAME} was given.").page().html()
    )


def test_the_page_is_deterministic_small_and_escaped(planted_page: RunStructure, tmp_path: Path) -> None:
    page = planted_page.page().html()
    assert page == planted_page.page().html()
    assert len(page) < 1_500_000
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert") >= 4, "the run, the encoding, the task and the reason"
    for chart in planted_page.charts().values():
        chart.save(tmp_path / "chart.svg")


def test_one_layer_with_one_head_is_drawn(planted_page: RunStructure) -> None:
    layer = planted_page.layers[2]
    rows = {name: getattr(layer, name)[:1] for name in ("means", "toeplitz", "explained", "symbol", "example")}
    page = replace(planted_page, layers=[replace(layer, **rows, heads=[0])]).page()
    assert page.html()
    assert len(page.figures) == 3
