"""Bits a byte, by position and by length, against sums that are written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.engine.language.conftest import BYTES, LENGTH, UNEVEN_LENGTH, losses_of, model_of

from toeplens.engine.language import BitsPerByte, bits_per_byte
from toeplens.engine.language.bits import compute_losses, cut_passages
from toeplens.model import Decoder
from toeplens.tasks.language import LanguageTask


@pytest.fixture(scope="module")
def measured_bits(task: LanguageTask) -> BitsPerByte:
    return bits_per_byte(model_of(task), task, texts=64)


def expected_bits_per_byte(task: LanguageTask) -> float:
    corpus = task.corpus()
    return (np.diff(corpus.splits["test"].starts) - 1).sum() / corpus.splits["test"].bytes.sum() / math.log(2)


def test_bits_per_byte_are_the_mean_loss_of_the_texts(task: LanguageTask, measured_bits: BitsPerByte):
    texts = cut_passages(task.corpus(), "test", LENGTH, 64, seed=0)
    losses, hits = compute_losses(model_of(task), texts.tokens)
    assert measured_bits.bits.value == pytest.approx(losses.mean() * expected_bits_per_byte(task), rel=1e-9)
    assert measured_bits.accuracy == pytest.approx(hits.mean())
    assert (measured_bits.texts, measured_bits.documents) == (len(texts), len(set(texts.documents)))
    assert BitsPerByte.from_dict(measured_bits.to_dict(), "here").to_dict() == measured_bits.to_dict()


def test_all_lengths_end_in_the_same_tokens(task: LanguageTask, measured_bits: BitsPerByte):
    model, scale = model_of(task), expected_bits_per_byte(task)
    texts = cut_passages(task.corpus(), "test", 16 * LENGTH, 4, seed=0)
    short = None
    for row in measured_bits.lengths:
        losses, _ = compute_losses(model, texts.tokens[:, -row.length - 1 :])
        end = losses[:, -LENGTH // 2 :].mean()
        short = end if short is None else short
        assert row.length == LENGTH * row.factor
        assert row.whole is not None
        assert row.whole.value == pytest.approx(losses.mean() * scale)
        assert row.end is not None
        assert row.end.value == pytest.approx(end * scale)
        assert row.gain is not None
        assert row.gain.value == pytest.approx((end - short) * scale, abs=1e-12)


def test_a_model_with_a_position_table_gives_the_reason_for_its_length_limit(task: LanguageTask):
    result = bits_per_byte(model_of(task, "learned"), task, texts=16)
    assert [bool(row.texts) for row in result.lengths] == [True, False, False, False, False]
    assert "max_len" in result.lengths[1].reason or "table" in result.lengths[1].reason
    assert result.edges[-1] == LENGTH


# ---- documents of unequal length, of two, three and five bytes a token ----------------------------------------------


@pytest.fixture(scope="module")
def reader(uneven: LanguageTask) -> Decoder:
    return model_of(uneven)


@pytest.fixture(scope="module")
def uneven_bits(uneven: LanguageTask, reader: Decoder) -> BitsPerByte:
    return bits_per_byte(reader, uneven, texts=128)


def document_bits(losses: list[float] | np.ndarray, document: int) -> float:
    """Of one text, whose losses are nats a token."""
    return float(np.mean(losses)) / math.log(2) / BYTES["test"][document]


def test_texts_are_weighted_by_the_bytes_of_their_documents(
    uneven: LanguageTask, reader: Decoder, uneven_bits: BitsPerByte
):
    texts = cut_passages(uneven.corpus(), "test", UNEVEN_LENGTH, 128, seed=0)
    each = zip(losses_of(reader, texts.tokens), texts.documents, strict=True)
    assert uneven_bits.bits.value == pytest.approx(np.mean([document_bits(*one) for one in each]), rel=1e-6)
    corpus = uneven.corpus()
    shares = np.full(corpus.vocab_size, 1 / corpus.vocab_size)
    kinds = np.count_nonzero(corpus.counts)
    shares = (corpus.counts + kinds * shares) / (corpus.counts.sum() + kinds)  # of a model that counts tokens alone
    a_byte = np.mean([1 / BYTES["test"][document] for document in texts.documents])
    assert uneven_bits.ngrams["0"] == pytest.approx(-np.log2(shares[texts.tokens[:, 1:]]).mean() * a_byte, rel=1e-6)


def test_a_sliding_window_moves_by_half_a_training_length(
    uneven: LanguageTask, reader: Decoder, uneven_bits: BitsPerByte
):
    texts = cut_passages(uneven.corpus(), "test", 16 * UNEVEN_LENGTH, 8, seed=0)
    assert len({BYTES["test"][document] for document in texts.documents}) == 3
    half = UNEVEN_LENGTH // 2
    for row in uneven_bits.lengths:
        part = texts.tokens[:, -row.length - 1 :]
        losses: list[list[float]] = [[] for _ in part]
        for begin in range(0, row.length - UNEVEN_LENGTH + 1, half):
            for text, window in zip(losses, losses_of(reader, part[:, begin : begin + UNEVEN_LENGTH + 1]), strict=True):
                text += list(window if begin == 0 else window[half:])
        assert {len(text) for text in losses} == {row.length}
        expected = np.mean([document_bits(*one) for one in zip(losses, texts.documents, strict=True)])
        assert row.sliding is not None
        assert row.whole is not None
        assert row.sliding.value == pytest.approx(expected, rel=1e-6)
        assert (abs(row.sliding.value - row.whole.value) > 1e-4) == (row.factor > 1)


def test_position_bins_double_in_width(uneven: LanguageTask, reader: Decoder, uneven_bits: BitsPerByte):
    """Bits a token, whatever its bytes; the last bin ends where the text does, before it is full."""
    losses = losses_of(reader, cut_passages(uneven.corpus(), "test", 16 * UNEVEN_LENGTH, 8, seed=0).tokens)
    bins: dict[int, list[float]] = {}
    for text in losses:
        for position, loss in enumerate(text):
            bins.setdefault(position.bit_length(), []).append(loss / math.log(2))
    assert uneven_bits.edges.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert [each.value for each in uneven_bits.positions] == pytest.approx([np.mean(bins[key]) for key in sorted(bins)])
