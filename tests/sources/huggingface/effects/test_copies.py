"""Where copies of a batch lie in what a layer hands over is seen in two, and any number lies there."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from toeplens.sources.huggingface.effects.replays import axes_of, layout, repeated


def handed(batch: int, copies: int, tokens: int = 3) -> tuple[Tensor, dict[str, Tensor], Tensor, None, int]:
    """Sequences first, tokens first, heads of all sequences as one dimension, and what all copies share."""
    sequences = torch.arange(batch).repeat(copies).double()
    first = sequences.view(-1, 1, 1) + torch.arange(tokens).view(1, -1, 1) / 10 + torch.arange(4) / 100
    merged = torch.stack((sequences, sequences + 0.5), -1).flatten().view(-1, 1) * torch.ones(5)
    return first, {"turned": first.transpose(0, 1).contiguous(), "merged": merged}, torch.ones(1, tokens, 2), None, 7


@given(batch=st.integers(1, 4), copies=st.integers(1, 5), tokens=st.integers(2, 4))
def test_any_number_of_copies_is_what_that_many_would_be(batch: int, copies: int, tokens: int) -> None:
    one = handed(batch, 1, tokens)
    made = repeated(one, axes_of(one, handed(batch, 2, tokens)), copies)
    wanted = handed(batch, copies, tokens)
    assert layout(made) == layout(wanted)
    for ours, theirs in ((made[0], wanted[0]), (made[2], wanted[2])):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for name, theirs in wanted[1].items():
        torch.testing.assert_close(made[1][name], theirs, rtol=0, atol=0)
    assert made[3:] == (None, 7)


def test_what_is_put_together_otherwise_is_not_repeated() -> None:
    one = torch.ones(1, 2)
    with pytest.raises(ValueError, match="otherwise than one"):
        axes_of(one, (one, one))
    assert layout((one,)) != layout([one]) != layout([one, one])
