"""Losses some words at a time are those of all logits together, where the head is a product and nowhere else."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.sources.huggingface import outcome
from toeplens.sources.huggingface.outcome import NONE, Readout


def head_of(words: int, width: int, bias: bool, dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(width, words, bias=bias, dtype=dtype)


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    words=st.integers(1, 40),
    at_once=st.tuples(st.integers(1, 7), st.integers(1, 50)),
    bias=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_losses_are_those_of_all_logits(
    rows: int, tokens: int, words: int, at_once: tuple[int, int], bias: bool, size: float, seed: int
) -> None:
    """float64, to 1e-12 of the largest logit."""
    torch.manual_seed(seed)
    head, states = head_of(words, 6, bias), size * torch.randn(rows, tokens, 6, dtype=torch.float64)
    labels = torch.randint(words, (rows, tokens)).masked_fill(torch.rand(rows, tokens) < 0.3, NONE)
    with torch.no_grad():
        found = Readout.of(head, states, head)
        assert found is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outcome, "_ROWS_AT_ONCE", at_once[0])
            patch.setattr(outcome, "_WORDS", at_once[1])
            ours = found.cross_entropies(states, labels)
        logits = head(states)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NONE, reduction="none")
    torch.testing.assert_close(ours, theirs.view(labels.shape), rtol=1e-12, atol=1e-12 * float(logits.abs().max() + 1))
    assert (ours[labels == NONE] == 0).all()


def capped(x: Tensor) -> Tensor:
    return 30 * (x / 30).tanh()


def test_a_head_that_does_more_is_none() -> None:
    torch.manual_seed(0)
    head, states = head_of(7, 4, False, torch.float32), torch.randn(2, 1, 4)
    with torch.no_grad():
        assert Readout.of(head, states, head) is not None
        assert Readout.of(head, states, lambda x: capped(head(x))) is None
        assert Readout.of(head, states, lambda x: 1.001 * head(x)) is None
        assert Readout.of(head, states, lambda x: head(x)[..., :6]) is None
        assert Readout.of(head, states.double(), lambda x: head(x.float()).double()) is None
        assert Readout.of(head, states[..., :3], lambda x: F.linear(x, head.weight[:, :3])) is None
        assert Readout.of(None, states, head) is None
        assert Readout.of(nn.Sequential(head), states, head) is None
        assert Readout.of(head.to("meta"), states, head) is None
