"""Needles and repeated spans: what is asked, and that who reads the context answers all of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.language.conftest import LENGTH, model_of

from toeplens.engine.language import Copying, Needles, context_use, copying, needles
from toeplens.engine.language.context_use import DEPTHS, KEY, SPAN, UNSCORED, VALUE
from toeplens.tasks.language import LanguageTask
from toeplens.tasks.synthetic import MarkovLanguage


@pytest.fixture(scope="module")
def wide() -> LanguageTask:
    return MarkovLanguage(words=40, documents=60, document=17 * 2 * LENGTH, length=2 * LENGTH)


class CopyingModel:
    """Reads a text as `read` does: foretells what followed the last copy of the tokens before, as many as it needs."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.texts: list[np.ndarray] = []

    def __call__(self, model: Any, tokens: np.ndarray, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        self.texts.append(tokens)
        hits = np.zeros((len(tokens), tokens.shape[1] - 1 - first), dtype=bool)
        for row, text in enumerate(tokens):
            for position in range(first + 1, len(text)):
                suffix = text[position - self.order : position]
                starts = [s for s in range(position - self.order) if np.array_equal(text[s : s + self.order], suffix)]
                hits[row, position - 1 - first] = bool(starts) and text[starts[-1] + self.order] == text[position]
        return np.where(hits, 0.0, 1.0), hits


def test_a_key_lookup_model_finds_every_needle(wide: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    reader = CopyingModel(order=KEY)
    monkeypatch.setattr(context_use, "compute_losses", reader)
    result = needles(model_of(wide), wide, trials=3)
    assert [row.needles for row in result.rows] == [3] * len(result.rows)
    assert all(row.accuracy is not None and row.accuracy.value == 1.0 for row in result.rows)
    assert all(
        row.accuracy is not None and row.accuracy.low is not None and row.accuracy.low < 1 for row in result.rows
    )
    assert result.guess == pytest.approx(1 / 26)
    for row, texts in zip(result.rows, reader.texts, strict=True):
        assert texts.shape[1] == row.length + 1
        for text in texts:
            end = wide.corpus().separator
            key, value = text[-KEY - VALUE : -VALUE], text[-VALUE:]
            needle = np.concatenate(([end], key, value, [end]))
            places = [s for s in range(len(text)) if np.array_equal(text[s : s + len(needle)], needle)]
            assert len(places) == 1
            room = row.length + 1 - len(needle) - (1 + KEY + VALUE)
            assert abs(places[0] - row.depth * room) <= 0.5
    assert {row.depth for row in result.rows} == set(DEPTHS)


def test_a_copying_model_copies_every_span(wide: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    reader = CopyingModel(order=UNSCORED)
    monkeypatch.setattr(context_use, "compute_losses", reader)
    actual = copying(model_of(wide), wide, trials=4)
    queried = [row for row in actual.rows if row.spans]
    assert len(queried) >= 4
    for row, texts, control in zip(queried, reader.texts[::2], reader.texts[1::2], strict=True):
        assert row.accuracy is not None
        assert row.gain is not None
        assert row.accuracy.value >= 0.95  # eight tokens may stand elsewhere by chance
        assert row.gain.value == pytest.approx(1 / np.log(2), rel=0.1)  # the copier's loss is 0, or 1 nat
        for text, without in zip(texts, control, strict=True):
            assert len(text) == row.distance + SPAN
            np.testing.assert_array_equal(text[:SPAN], text[row.distance :])
            np.testing.assert_array_equal(text[SPAN:], without[SPAN:])
            assert not np.array_equal(text[:SPAN], without[:SPAN])
    assert all("cannot be" in row.reason for row in actual.rows if not row.spans)


def test_bits_are_per_token_and_not_per_byte(uneven: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    """Of a reader whose losses are known: so many nats as a token's number, and more by the text's first token."""
    read: list[tuple[np.ndarray, int]] = []

    def reader(model: Any, tokens: np.ndarray, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        read.append((tokens, first))
        losses = 0.1 * tokens[:, 1 + first :] + 0.01 * tokens[:, :1]
        return losses, tokens[:, 1 + first :] % 2 == 0

    def nats(text: np.ndarray, answers: int) -> float:
        return sum(0.1 * float(token) + 0.01 * float(text[0]) for token in text[-answers:]) / answers

    monkeypatch.setattr(context_use, "compute_losses", reader)
    actual = [row for row in needles(model_of(uneven), uneven, trials=6).rows if row.needles]
    assert {row.factor for row in actual} == {2, 4, 8}
    for row, (texts, first) in zip(actual, read, strict=True):
        assert first == row.length - VALUE
        assert row.bits is not None
        assert row.accuracy is not None
        assert row.bits.value == pytest.approx(np.mean([nats(text, VALUE) / np.log(2) for text in texts]))
        assert row.accuracy.value == np.mean([token % 2 == 0 for text in texts for token in text[-VALUE:]])
    read.clear()
    spans = [row for row in copying(model_of(uneven), uneven, trials=6).rows if row.spans]
    assert {row.factor for row in spans} == {4, 8}
    for row, (texts, first), (others, _) in zip(spans, read[::2], read[1::2], strict=True):
        answers = SPAN - UNSCORED
        assert first == row.distance + SPAN - 1 - answers
        assert row.bits is not None
        assert row.gain is not None
        assert row.bits.value == pytest.approx(np.mean([nats(text, answers) / np.log(2) for text in texts]))
        saved = [nats(without, answers) - nats(text, answers) for text, without in zip(texts, others, strict=True)]
        assert row.gain.value == pytest.approx(np.mean(saved) / np.log(2))


def test_a_random_model_finds_no_needle(wide: LanguageTask):
    model = model_of(wide)
    actual = needles(model, wide, trials=8)
    accuracies = [row.accuracy.value for row in actual.rows if row.accuracy is not None]
    assert np.mean(accuracies) < 0.2
    assert Needles.from_dict(actual.to_dict(), "here").to_dict() == actual.to_dict()
    assert needles(model, wide, trials=8).to_dict() == actual.to_dict()
    assert Copying.from_dict((copied := copying(model, wide, trials=8)).to_dict(), "here").to_dict() == copied.to_dict()


def test_a_position_table_limits_the_length(wide: LanguageTask):
    actual = needles(model_of(wide, "learned"), wide, trials=4)
    assert {row.factor for row in actual.rows if row.needles} == {0.5, 1.0}
    assert all(row.reason for row in actual.rows if not row.needles)
