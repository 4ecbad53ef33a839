"""The card's figures are what they say: against kernels known in closed form and counts made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from tests.report.charts import rows_of
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import OffsetBias, registry
from toeplens.encodings.conformance import CHECKS
from toeplens.report import write_cards
from toeplens.studies import card as cards
from toeplens.studies.card import Card, make_card

LENGTH = 128


class WindowEncoding(OffsetBias):
    """Keys within three tokens, and no others."""

    citation = "this test"

    def kernel(self, offsets: Tensor) -> Tensor:
        return torch.where(offsets.abs() < 4, 0.0, -math.inf).expand(self.num_heads, -1)


@pytest.fixture
def external_encodings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The encodings of this file, as another package would bring them."""
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [EntryPoint("window", f"{__name__}:WindowEncoding", group)]
    )
    registry._load_encodings.cache_clear()
    yield
    monkeypatch.undo()
    registry._load_encodings.cache_clear()


@pytest.fixture(scope="module")
def made_card() -> dict[str, Card]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "MAX_DISTANCE", 4096)  # the resolution has tests of its own
        patch.delitem(CHECKS, "compile")  # it takes most of the time
        return {
            name: make_card(name, length=LENGTH, rounds=1) for name in ("alibi", "rope", "fox", "nope", "sinusoidal")
        }


def test_the_kernel_and_symbol_match_closed_forms(made_card: dict[str, Card]) -> None:
    alibi, rope = made_card["alibi"], made_card["rope"]
    assert np.array_equal(alibi.offsets, np.arange(-LENGTH + 1, LENGTH))
    slopes = 2.0 ** -np.arange(1, 9)
    np.testing.assert_allclose(alibi.kernel, -slopes[:, None] * np.abs(alibi.offsets), rtol=1e-6)
    assert rope.kernel.shape == (1, 16, 2 * LENGTH - 1)
    flat = cards.real_curves(rope.kernel)[0]
    theta = 10000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(flat, np.cos(rope.offsets[:, None] * theta).mean(1), atol=1e-12)
    for card in (alibi, rope):
        row = cards.real_curves(card.kernel)[0].astype(float)
        matrix = toeplitz(row[LENGTH - 1 :])
        wave = np.exp(1j * card.angles[77] * np.arange(LENGTH)) / LENGTH**0.5
        np.testing.assert_allclose(card.symbol[0, 77], (wave.conj() @ matrix @ wave).real, rtol=1e-6)
    assert made_card["fox"].kernel is made_card["fox"].symbol is None


def test_the_symbol_of_an_odd_kernel_has_no_rounding_noise() -> None:
    offsets = np.arange(-LENGTH + 1, LENGTH)
    angles, values = cards.symbol_of(offsets, np.stack((np.tanh(offsets / 7), np.tanh(offsets / 7) + (offsets == 0))))
    assert len(angles) == values.shape[1]
    assert not values[0].any()
    np.testing.assert_allclose(values[1], 1.0, atol=1e-12)


def test_attention_by_distance_matches_the_closed_form(made_card: dict[str, Card]) -> None:
    flat, falling = made_card["nope"].profile, made_card["alibi"].profile
    assert flat.shape == (8, LENGTH - 64 + 1)
    assert np.abs(flat.mean() - 1) < 0.05  # every key gets its share
    steep = falling[0]  # slope 1/2: a key's share falls by e^(-1/2) a token
    np.testing.assert_allclose(np.log(steep[1:20] / steep[:19]).mean(), -0.5, atol=0.1)
    turned = made_card["rope"].profile.mean(0)
    assert turned[:3].mean() > 1.5 * turned[-30:].mean()  # contents that resemble one another are drawn to the near


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("alibi", {}, {"float32": None, "float16": 2048, "bfloat16": 256}),
        ("t5", {}, {"float32": 16, "float16": 16, "bfloat16": 16}),  # two distances share the first wide bucket
        ("rope", {}, {"float32": None, "float16": None, "bfloat16": None}),
        ("rope", {"base": 1e300}, None),
    ],
)
def test_the_resolution_is_the_first_pair_that_rounds_equal(name: str, options: dict, expected: dict | None) -> None:
    sizes = {"d_model": 16, "num_heads": 2, "head_dim": 8, "max_len": LENGTH}
    torch.manual_seed(0)
    encoding = encodings.build(name, **sizes, **options)
    actual = cards._resolution(encoding)
    if expected is not None:
        assert actual == expected
    for dtype, first in actual.items():
        kernel = encoding.double().kernel(torch.arange(3000))
        parts = (torch.view_as_real(kernel).movedim(-1, 0) if kernel.is_complex() else kernel).flatten(0, -2)
        rounded = parts.to(cards.DTYPES[dtype])
        same = [d for d in range(2999) if torch.equal(rounded[:, d], rounded[:, d + 1])]
        assert (same[0] if same else None) == (first if first is not None and first < 2999 else None)


def test_the_cost_is_relative_and_counts_parameters(made_card: dict[str, Card]) -> None:
    for card in made_card.values():
        assert all(math.isfinite(x) and x > 0 for x in (card.cost.forward, card.cost.step, card.cost.peak))
    assert made_card["nope"].cost.peak == 1.0
    assert 1.0 < made_card["alibi"].cost.peak < 3.0  # a dimension more of queries and keys, and no bias of H x N x N
    assert made_card["fox"].cost.parameters == 8 * 256 + 8
    assert made_card["alibi"].cost.parameters == 0


def test_peak_memory_counts_live_tensors() -> None:
    size = 4 * 300**2  # bytes of one matrix
    matrix = torch.randn(300, 300, requires_grad=True)

    def chain() -> torch.Tensor:
        with torch.no_grad():
            for _ in range(5):
                last = matrix @ matrix  # while one is made, the one before still lives
        return (last * matrix).sum()

    assert 2 * size <= cards._peak_memory(chain) <= 2 * size + 100


def test_a_card_is_a_page(made_card: dict[str, Card], tmp_path) -> None:
    rope = made_card["rope"]
    page, charts = rope.page(), rope.charts()
    assert page.question == "What does rope do?"
    assert f"A training step takes {rope.cost.step:.2f} times as long" in page.answer
    assert list(charts) == ["kernel", "attention", "symbol"]
    assert list(made_card["fox"].charts()) == ["attention"]
    rows = {row["x"]: row["value"] for row in rows_of(charts["kernel"])}
    for at in (0, 5, 100):
        assert rows[at] == pytest.approx(cards.real_curves(rope.kernel)[0][LENGTH - 1 + at], rel=1e-4)
    assert rows_of(charts["attention"])[0]["value"] == pytest.approx(float(rope.profile[:, 0].mean()), rel=1e-4)
    properties = {row[0].plain_text: row[1].plain_text for row in page.tables[0].body}
    assert properties["Source"].startswith("Su et al. 2021")
    assert properties["Resolution"] == "float32: no limit; float16: no limit; bfloat16: no limit"
    text = page.html()
    assert "<math" in text
    assert text == rope.page().html()
    assert len(text) < 1_500_000
    for chart in charts.values():
        chart.save(tmp_path / "chart.svg")


def test_all_cards_share_one_drawing_script(made_card: dict[str, Card], tmp_path) -> None:
    index = write_cards(list(made_card.values()), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "vega.js", *(f"{n}.html" for n in made_card)}
    text = index.read_text()
    assert all(f'href="{name}.html"' in text for name in made_card)
    assert "4 depend only on distance (Toeplitz), 1 depend on content" in text
    card = (tmp_path / "rope.html").read_text()
    assert '<a href="index.html">' in card
    assert '<script src="vega.js">' in card
    assert len(card) < 200_000, "without the drawing program"


def test_a_masking_kernel_has_no_symbol_and_no_noise(
    external_encodings: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(CHECKS, "compile")
    monkeypatch.setattr(cards, "MAX_DISTANCE", 256)
    card = make_card("window", length=LENGTH, rounds=1)
    assert np.isneginf(card.kernel).any()
    assert card.symbol is None
    assert any("it has no symbol" in note for note in card.page().notes)
    assert "symbol" not in card.charts()
    assert all(row["value"] is None for row in rows_of(card.charts()["kernel"]) if abs(row["x"]) >= 4)
    assert capfd.readouterr() == ("", "")
