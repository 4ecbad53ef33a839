"""Texts cut from documents, and their losses, against what can be written in three lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.language.conftest import LENGTH, model_of

from toeplens.engine.language.bits import cut, read
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
