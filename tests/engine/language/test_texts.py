"""Texts cut from documents, and their losses, against what can be written in three lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.language.conftest import LENGTH, model_of

from toeplens.engine.language.bits import compute_losses, cut_passages
from toeplens.tasks.language import LanguageTask
from toeplens.utils import InputError


def test_passages_are_disjoint_pieces_of_documents(task: LanguageTask):
    corpus = task.corpus()
    stream, starts = np.asarray(corpus.stream("test")), corpus.splits["test"].starts
    texts = cut_passages(corpus, "test", LENGTH, 10_000, seed=3)
    sizes = np.diff(starts) - 1
    assert len(texts) == (sizes // (LENGTH + 1)).sum()
    used = np.zeros(len(stream), dtype=bool)
    for tokens, document in zip(texts.tokens, texts.documents, strict=True):
        document_tokens = stream[starts[document] : starts[document + 1] - 1]
        places = [
            at
            for at in range(0, len(document_tokens), LENGTH + 1)
            if np.array_equal(document_tokens[at : at + LENGTH + 1], tokens)
        ]
        fresh = [at for at in places if not used[starts[document] + at]]
        assert fresh
        used[starts[document] + fresh[0] : starts[document] + fresh[0] + LENGTH + 1] = True
    assert corpus.separator not in texts.tokens


def test_passages_cover_all_documents_and_fewer_are_a_prefix_of_more(task: LanguageTask):
    corpus = task.corpus()
    many = len(corpus.splits["test"].starts) - 1
    texts = cut_passages(corpus, "test", LENGTH, 10 * many, seed=0)
    counts = np.bincount(texts.documents, minlength=many)
    assert (counts > 0).all()  # ten a document on average, of equally long ones
    assert counts.max() < 25
    np.testing.assert_array_equal(cut_passages(corpus, "test", LENGTH, 5, seed=0).tokens, texts.tokens[:5])
    assert not np.array_equal(cut_passages(corpus, "test", LENGTH, 5, seed=1).tokens, texts.tokens[:5])


def test_too_short_documents_are_reported(task: LanguageTask):
    with pytest.raises(
        InputError, match=r"length must be reached by at least .* documents of the test split, got 100000, reached by 0"
    ):
        cut_passages(task.corpus(), "test", 100_000, 4, seed=0)


def test_losses_match_the_model(task: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    model = model_of(task)
    tokens = cut_passages(task.corpus(), "test", LENGTH, 7, seed=0).tokens
    with torch.no_grad():
        chances = model(torch.from_numpy(tokens[:, :-1])).double().log_softmax(-1).numpy()
    expected = -np.take_along_axis(chances, tokens[:, 1:, None], axis=-1)[..., 0]
    losses, hits = compute_losses(model, tokens)
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(hits, chances.argmax(-1) == tokens[:, 1:])
    monkeypatch.setitem(cut_passages.__globals__, "_TOKENS", {"cpu": 2 * LENGTH})
    monkeypatch.setitem(cut_passages.__globals__, "_LOGITS", {"cpu": 500})
    again, _ = compute_losses(model, tokens, first=5)
    np.testing.assert_allclose(again, expected[:, 5:], rtol=1e-5, atol=1e-6)
