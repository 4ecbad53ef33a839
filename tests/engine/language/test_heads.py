"""What heads look at, against weights that are looked up one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.language.conftest import LENGTH, model_of

from toeplens.backends import DecoderSource
from toeplens.engine.language import HeadPatterns, head_patterns
from toeplens.engine.language import context_use as module
from toeplens.engine.language.bits import cut_passages
from toeplens.lens import AttentionTrace
from toeplens.tasks.language import LanguageTask


def test_attention_weights_are_means_over_queries_and_texts(task: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_WEIGHTS", 3 * 2 * LENGTH**2)
    model = model_of(task)
    actual = head_patterns(model, task, texts=5)
    tokens = torch.from_numpy(cut_passages(task.corpus(), "test", LENGTH, 5, seed=0).tokens[:, :-1])
    for layer, trace in enumerate(AttentionTrace(DecoderSource(model), tokens)):
        weights = trace.weights().double().numpy()
        for head in range(2):
            previous = [weights[text, head, i, i - 1] for text in range(5) for i in range(1, LENGTH)]
            first = [weights[text, head, i, 0] for text in range(5) for i in range(1, LENGTH)]
            assert actual.previous[layer, head] == pytest.approx(np.mean(previous))
            assert actual.first[layer, head] == pytest.approx(np.mean(first))
    assert HeadPatterns.from_dict(actual.to_dict(), "here").to_dict() == actual.to_dict()


def test_an_induction_head_is_recognized(task: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    """Weights that are set: one head looks at what followed the earlier copy, the other at the token before."""
    half = LENGTH // 2

    class Layer:
        def weights(self, sequences: slice) -> torch.Tensor:
            count = len(range(*sequences.indices(4)))
            weights = torch.zeros(count, 2, LENGTH, LENGTH)
            for query in range(1, LENGTH):
                weights[:, 0, query, max(0, query - half + 1)] = 1
                weights[:, 1, query, query - 1] = 1
            return weights

    monkeypatch.setattr(module, "AttentionTrace", lambda source, tokens: [Layer(), Layer()])
    actual = head_patterns(model_of(task), task, texts=4)
    np.testing.assert_allclose(actual.induction, [[1, 0], [1, 0]])
    np.testing.assert_allclose(actual.previous[:, 1], 1)
