"""Attention that is written out, in forms of their own: what is followed, by loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from toeplens.sources.huggingface.capture.attention import low
from toeplens.sources.huggingface.capture.products import Products


def summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[N, B, H, d], as XLNet has it."""
    logits = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.5 - 1e30 * torch.einsum("ij->ij", mask)
    return torch.einsum("bnij,jbnd->ibnd", logits.softmax(3), v).permute(1, 2, 0, 3)


def emptied(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Weights of hidden keys set to 0 after the softmax too, as CPM-Ant has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = (q @ k.transpose(-1, -2) * 0.5).masked_fill(mask > 0, -torch.inf)
    return logits.softmax(-1).masked_fill(mask > 0, value) @ v


def zeroed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Logits of hidden keys multiplied by 0 and put low, as GPT-1 has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = torch.matmul(q, k.transpose(-1, -2)) * 0.5
    return (logits * (1 - mask) + -1e4 * mask).softmax(-1) @ v


@pytest.mark.parametrize("form", [summed, emptied, zeroed])
def test_other_ways_to_write_attention_are_followed(form: Any) -> None:
    """float64, loops: what is handed over says which keys were hidden, and gives the outputs."""
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.float64).triu(1)
    found: list[tuple[Any, Tensor, Tensor]] = []
    with Products(lambda: True, lambda *made: found.append(made)):
        wanted = form(q, k, v, mask)
    ((made, values, out),) = found
    assert made.scale == 0.5
    hidden = [table for table, _ in made.hidden] + [table <= low(table.dtype) for table, _ in made.terms]
    covered = torch.stack([torch.broadcast_to(table, (5, 5)) for table in hidden]).any(0)
    assert torch.equal(covered, mask > 0)
    for batch in range(2):
        for head in range(3):
            for row in range(5):
                logits = [0.5 * float(q[row, batch, head] @ k[key, batch, head]) for key in range(row + 1)]
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                torch.testing.assert_close(made.weights[batch, head, row, : row + 1], weights, atol=1e-12, rtol=0)
                mean = sum(weights[key] * v[key, batch, head] for key in range(row + 1))
                torch.testing.assert_close(out[batch, head, row], mean, atol=1e-12, rtol=0)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(values, v.permute(1, 2, 0, 3), atol=0, rtol=0)


def test_other_sums_and_other_masks_of_weights_are_not_followed() -> None:
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: list[Any] = []
    with Products(lambda: True, lambda *made: found.append(made)):
        emptied(q, k, v, torch.ones(5, 5).triu(1), value=0.1)
        for form in ("ibnd,jbnd->nij", "ibnd,jbnd->bnji", "ibnd,jbnd->bnidj", "...d,...d->..."):
            torch.einsum(form, q, k).softmax(-1)
        half = (torch.einsum("ibnd,jbnd->bnij", q, k) * torch.full((5, 5), 0.5)).softmax(-1) @ v.permute(1, 2, 0, 3)
    assert half.shape == (2, 3, 5, 4)
    assert found == []
