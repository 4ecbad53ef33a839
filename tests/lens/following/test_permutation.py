"""Permutation scores tend to what all permutations of the keys give, and find planted heads."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from toeplens.backends import DecoderSource
from toeplens.ground import InputError
from toeplens.lens import AttentionTrace
from toeplens.lens.following.behaviour import PermutationScores, _scores, permutation_scores
from toeplens.model import Decoder, decoder_config

THETA = torch.tensor([1.3, 0.4], dtype=torch.float64)


def case_of(length: int = 5, **others: Any) -> dict[str, Any]:
    made = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 2, length, 4, generator=made, dtype=torch.float64).unbind(0)
    return {"q": q, "k": k + 0.7, "rotation": THETA, "pairing": "interleaved", **others}


def logits_of(case: dict[str, Any], head: int, i: int, order: tuple[int, ...]) -> np.ndarray:
    """The logits of one causal query with the key of order[j] at position j, turned pair by pair."""
    q = torch.view_as_complex(case["q"][head, i].reshape(2, 2)).numpy()
    k = torch.view_as_complex(case["k"][head].reshape(-1, 2, 2)).numpy()
    theta = case["rotation"].numpy()
    made = [(q * k[m].conj() * np.exp(1j * (i - j) * theta)).sum().real for j, m in enumerate(order)]
    return np.array(made) + case["bias"].numpy()[i - np.arange(i + 1)]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def test_scores_tend_to_those_of_all_permutations() -> None:
    """Every query drawn, 20000 permutations each; the mean over all n! by enumeration, to 0.02."""
    bias = torch.linspace(0, -1, 5, dtype=torch.float64)
    case = case_of(bias=bias)
    found = permutation_scores(**case, queries=100, permutations=20000)
    assert found.queries == 4
    for scores, of in ((found.logits, lambda x: x), (found.weights, softmax)):
        for head in range(2):
            top, bottom = np.zeros(2), 0.0
            for i in range(1, 5):
                base = of(logits_of(case, head, i, tuple(range(i + 1))))
                terms = []
                for order in itertools.permutations(range(i + 1)):
                    changed = of(logits_of(case, head, i, order))
                    covariances = [np.cov(changed, y, bias=True)[0, 1] for y in (base, base[list(order)])]
                    terms.append([*covariances, changed.var() + base.var()])
                mean = np.mean(terms, axis=0)
                top, bottom = top + 2 * mean[:2], bottom + mean[2]
            ours = [scores.positional[head], scores.symbolic[head]]
            np.testing.assert_allclose(ours, top / bottom, rtol=0, atol=0.02)


def test_planted_heads_have_a_score_of_one() -> None:
    """float64, 1e-12: one content under a rotation, a bias alone; and no position at all."""
    case = case_of(9)
    same = case["k"][:, :1].expand_as(case["k"])
    bias = torch.arange(9.0) / 3
    planted: list[dict[str, Any]] = [{"k": same}, {"q": 0 * case["q"], "bias": bias}]
    for changed in planted:
        found = permutation_scores(**{**case, **changed, "permutations": 4})
        for scores in (found.logits, found.weights):
            np.testing.assert_allclose(scores.positional, 1, rtol=0, atol=1e-12)
            np.testing.assert_allclose(scores.positional_error, 0, rtol=0, atol=1e-12)
            assert (scores.symbolic < 0.9).all()
    still: dict[str, Any] = {**case, "rotation": None}
    found = permutation_scores(**still, permutations=4)
    for scores in (found.logits, found.weights):
        np.testing.assert_allclose(scores.symbolic, 1, rtol=0, atol=1e-12)
        assert (scores.positional < 0.9).all()


def test_the_error_of_a_ratio_by_hand() -> None:
    """Two queries: covariances 1 and 3 over variances 2 and 2 are 1 on the whole, residuals -1 and 1."""
    found = _scores(np.array([[1.0, 0.0, 2.0, 9.0], [3.0, 0.0, 2.0, 9.0]])[..., None])
    assert found.positional == 1
    assert found.positional_error == pytest.approx(math.sqrt(2 * 2 / (2 - 1)) / 4)


def test_one_query_has_no_error_and_a_flat_head_no_score() -> None:
    case = case_of(9)
    single = permutation_scores(**case, queries=1).logits
    assert np.isfinite(single.positional).all()
    assert np.isnan(single.positional_error).all()
    same = case["k"][:, :1].expand_as(case["k"])
    flat = permutation_scores(**case | {"k": same, "rotation": None})
    for scores in (flat.logits, flat.weights):
        assert np.isnan(scores.positional).all()
        assert np.isnan(scores.symbolic_error).all()


def test_a_trace_has_a_score_for_every_head_and_its_record_comes_back() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "d_model": 8, "d_ff": 8, "num_layers": 2, "num_heads": 2, "max_len": 8}
    model = Decoder(decoder_config(**sizes, encoding="alibi"))
    trace = AttentionTrace(DecoderSource(model), torch.arange(14).reshape(2, 7) % 9, torch.tensor([7, 4]))
    found = permutation_scores(trace, queries=6, permutations=3)
    assert found.logits.positional.shape == found.weights.symbolic_error.shape == (2, 2)
    assert (found.queries, found.permutations, found.layers) == ((6, 6), 3, (0, 1))
    assert permutation_scores(trace, queries=6, permutations=3, counted="used").queries == (6, 2)
    assert found.splits == ("none", "none")
    for scores in (
        found,
        permutation_scores(case_of()["q"][0], case_of()["k"][0], queries=1),
        permutation_scores(trace[0], queries=2),
    ):
        again = PermutationScores.from_dict(scores.to_dict())
        assert again.to_dict() == scores.to_dict()
        assert again.logits.positional.shape == scores.logits.positional.shape


def test_wrong_input_is_one_sentence() -> None:
    for name in ("queries", "permutations"):
        with pytest.raises(InputError, match=f"^{name}(:| must) "):
            permutation_scores(**{**case_of(), name: 0})
    with pytest.raises(InputError, match=r"^q(:| must) "):
        permutation_scores(**case_of(1), layout="bhnd")
