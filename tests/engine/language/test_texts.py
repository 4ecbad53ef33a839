"""Texts cut from documents, and their losses, against what can be written in three lines."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from jaxtyping import Float
from tests.engine.language.conftest import BYTES, LENGTH, SIZES, UNEVEN, model_of

from toeplens.engine.language.bits import bits_a_byte, cut, read, sliding
from toeplens.ground import InputError
from toeplens.tasks.language import LanguageTask


def test_texts_are_pieces_of_documents_that_share_no_token(task: LanguageTask):
    corpus = task.corpus()
    stream, starts = np.asarray(corpus.stream("test")), corpus.starts("test")
    texts = cut(corpus, "test", LENGTH, 10_000, seed=3)
    sizes = np.diff(starts) - 1
    assert len(texts) == (sizes // (LENGTH + 1)).sum()
    seen = np.zeros(len(stream), dtype=bool)
    for tokens, document in zip(texts.tokens, texts.documents, strict=True):
        own = stream[starts[document] : starts[document + 1] - 1]
        places = [at for at in range(0, len(own), LENGTH + 1) if np.array_equal(own[at : at + LENGTH + 1], tokens)]
        fresh = [at for at in places if not seen[starts[document] + at]]
        assert fresh
        seen[starts[document] + fresh[0] : starts[document] + fresh[0] + LENGTH + 1] = True
    assert corpus.separator not in texts.tokens


def test_texts_are_drawn_from_all_documents_and_fewer_are_the_first_of_more(task: LanguageTask):
    corpus = task.corpus()
    many = len(corpus.starts("test")) - 1
    texts = cut(corpus, "test", LENGTH, 10 * many, seed=0)
    counts = np.bincount(texts.documents, minlength=many)
    assert (counts > 0).all()  # ten a document on average, of equally long ones
    assert counts.max() < 25
    np.testing.assert_array_equal(cut(corpus, "test", LENGTH, 5, seed=0).tokens, texts.tokens[:5])
    assert not np.array_equal(cut(corpus, "test", LENGTH, 5, seed=1).tokens, texts.tokens[:5])


def test_documents_that_are_too_short_are_told(task: LanguageTask):
    with pytest.raises(
        InputError, match=r"length must be reached by at least .* documents of the test split, got 100000, reached by 0"
    ):
        cut(task.corpus(), "test", 100_000, 4, seed=0)


def test_nats_a_token_become_bits_a_byte_by_the_texts_own_document(uneven: LanguageTask):
    corpus = uneven.corpus()
    documents = cut(corpus, "test", UNEVEN, 60, seed=0).documents
    assert set(documents) == set(range(len(SIZES["test"])))
    found = bits_a_byte(corpus, "test", documents)
    for document, scale in zip(documents, found, strict=True):
        assert scale == pytest.approx(1 / BYTES["test"][document] / math.log(2), rel=1e-12)


def test_losses_are_those_of_the_model_whatever_is_asked_for(task: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    model = model_of(task)
    tokens = cut(task.corpus(), "test", LENGTH, 7, seed=0).tokens
    with torch.no_grad():
        chances = model(torch.from_numpy(tokens[:, :-1])).double().log_softmax(-1).numpy()
    wanted = -np.take_along_axis(chances, tokens[:, 1:, None], axis=-1)[..., 0]
    losses, hits = read(model, tokens)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(hits, chances.argmax(-1) == tokens[:, 1:])
    monkeypatch.setitem(cut.__globals__, "_TOKENS", {"cpu": 2 * LENGTH})
    monkeypatch.setitem(cut.__globals__, "_LOGITS", {"cpu": 500})
    again, _ = read(model, tokens, first=5)
    np.testing.assert_allclose(again, wanted[:, 5:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [8, 16, 17, 23, 40, 64])
def test_a_sliding_window_answers_for_each_token_once_with_half_a_window_before_it(length: int):
    window, asked = 16, []
    tokens = np.arange(length + 1)[None]

    def reader(part: np.ndarray, first: int) -> Float[np.ndarray, "K m"]:
        asked.append((int(part[0, 0]), part.shape[1] - 1, first))
        return part[:, 1 + first :].astype(float)

    np.testing.assert_array_equal(sliding(tokens, window, reader)[0], tokens[0, 1:])
    assert all(size <= window for _, size, _ in asked)
    assert all(first >= window // 2 for _, _, first in asked[1:])
