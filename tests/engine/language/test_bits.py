"""Bits a byte, by position and by length, against sums that are written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.engine.language.conftest import BYTES, LENGTH, UNEVEN, losses_of, model_of

from toeplens.engine.language import Bits, bits
from toeplens.engine.language.bits import cut, read
from toeplens.model import Decoder
from toeplens.tasks.language import LanguageTask


@pytest.fixture(scope="module")
def found(task: LanguageTask) -> Bits:
    return bits(model_of(task), task, texts=64)


def _a_byte(task: LanguageTask) -> float:
    corpus = task.corpus()
    return (np.diff(corpus.starts("test")) - 1).sum() / corpus.bytes_of("test").sum() / math.log(2)


def test_bits_a_byte_are_the_mean_loss_of_the_texts(task: LanguageTask, found: Bits):
    texts = cut(task.corpus(), "test", LENGTH, 64, seed=0)
    losses, hits = read(model_of(task), texts.tokens)
    assert found.bits.value == pytest.approx(losses.mean() * _a_byte(task), rel=1e-9)
    assert found.accuracy == pytest.approx(hits.mean())
    assert (found.texts, found.documents) == (len(texts), len(set(texts.documents)))
    assert Bits.from_dict(found.to_dict(), "here").to_dict() == found.to_dict()


def test_all_lengths_end_in_the_same_tokens(task: LanguageTask, found: Bits):
    model, scale = model_of(task), _a_byte(task)
    texts = cut(task.corpus(), "test", 16 * LENGTH, 4, seed=0)
    short = None
    for row in found.lengths:
        losses, _ = read(model, texts.tokens[:, -row.length - 1 :])
        end = losses[:, -LENGTH // 2 :].mean()
        short = end if short is None else short
        assert row.length == LENGTH * row.factor
        assert row.whole is not None
        assert row.whole.value == pytest.approx(losses.mean() * scale)
        assert row.end is not None
        assert row.end.value == pytest.approx(end * scale)
        assert row.gain is not None
        assert row.gain.value == pytest.approx((end - short) * scale, abs=1e-12)


def test_a_model_with_a_table_of_positions_says_why_it_reads_no_longer_texts(task: LanguageTask):
    seen = bits(model_of(task, "learned"), task, texts=16)
    assert [bool(row.texts) for row in seen.lengths] == [True, False, False, False, False]
    assert "max_len" in seen.lengths[1].why or "table" in seen.lengths[1].why
    assert seen.edges[-1] == LENGTH


# ---- documents of unequal length, of two, three and five bytes a token ----------------------------------------------


@pytest.fixture(scope="module")
def reader(uneven: LanguageTask) -> Decoder:
    return model_of(uneven)


@pytest.fixture(scope="module")
def seen(uneven: LanguageTask, reader: Decoder) -> Bits:
    return bits(reader, uneven, texts=128)


def _bits_a_byte(losses: list[float] | np.ndarray, document: int) -> float:
    """Of one text, whose losses are nats a token."""
    return float(np.mean(losses)) / math.log(2) / BYTES["test"][document]


def test_texts_count_by_the_bytes_of_their_documents(uneven: LanguageTask, reader: Decoder, seen: Bits):
    texts = cut(uneven.corpus(), "test", UNEVEN, 128, seed=0)
    each = zip(losses_of(reader, texts.tokens), texts.documents, strict=True)
    assert seen.bits.value == pytest.approx(np.mean([_bits_a_byte(*one) for one in each]), rel=1e-6)
    corpus = uneven.corpus()
    shares = np.full(corpus.vocab_size, 1 / corpus.vocab_size)
    kinds = np.count_nonzero(corpus.counts)
    shares = (corpus.counts + kinds * shares) / (corpus.counts.sum() + kinds)  # of a model that counts tokens alone
    a_byte = np.mean([1 / BYTES["test"][document] for document in texts.documents])
    assert seen.ngrams["0"] == pytest.approx(-np.log2(shares[texts.tokens[:, 1:]]).mean() * a_byte, rel=1e-6)


def test_a_sliding_window_reads_half_a_training_length_at_a_time(uneven: LanguageTask, reader: Decoder, seen: Bits):
    texts = cut(uneven.corpus(), "test", 16 * UNEVEN, 8, seed=0)
    assert len({BYTES["test"][document] for document in texts.documents}) == 3
    half = UNEVEN // 2
    for row in seen.lengths:
        part = texts.tokens[:, -row.length - 1 :]
        losses: list[list[float]] = [[] for _ in part]
        for begin in range(0, row.length - UNEVEN + 1, half):
            for text, window in zip(losses, losses_of(reader, part[:, begin : begin + UNEVEN + 1]), strict=True):
                text += list(window if begin == 0 else window[half:])
        assert {len(text) for text in losses} == {row.length}
        wanted = np.mean([_bits_a_byte(*one) for one in zip(losses, texts.documents, strict=True)])
        assert row.sliding is not None
        assert row.whole is not None
        assert row.sliding.value == pytest.approx(wanted, rel=1e-6)
        assert (abs(row.sliding.value - row.whole.value) > 1e-4) == (row.factor > 1)


def test_positions_are_counted_in_bins_that_double(uneven: LanguageTask, reader: Decoder, seen: Bits):
    """Bits a token, whatever its bytes; the last bin ends where the text does, before it is full."""
    losses = losses_of(reader, cut(uneven.corpus(), "test", 16 * UNEVEN, 8, seed=0).tokens)
    bins: dict[int, list[float]] = {}
    for text in losses:
        for position, loss in enumerate(text):
            bins.setdefault(position.bit_length(), []).append(loss / math.log(2))
    assert seen.edges.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert [each.value for each in seen.positions] == pytest.approx([np.mean(bins[key]) for key in sorted(bins)])
