"""A frozen norm is linear, and its parts sum to the norm less its shift."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from toeplens.model.decoder import frozen

NORMS = {
    "LayerNorm": lambda width: nn.LayerNorm(width),
    "LayerNorm without scale": lambda width: nn.LayerNorm(width, elementwise_affine=False),
    "RMSNorm": lambda width: nn.RMSNorm(width),
    "RMSNorm with eps": lambda width: nn.RMSNorm(width, eps=1e-3),
    "none": lambda width: nn.Identity(),
}


@given(name=st.sampled_from(sorted(NORMS)), width=st.integers(2, 9), seed=st.integers(0, 999))
def test_parts_sum_to_the_norm(name: str, width: int, seed: int) -> None:
    """float64, 1e-12."""
    torch.manual_seed(seed)
    norm = NORMS[name](width).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x, part = torch.randn(2, 3, 5, width, dtype=torch.float64)
    shift = getattr(norm, "bias", None)
    with torch.no_grad():
        summed = frozen(norm, part, x) + frozen(norm, x - part, x)
        expected = norm(x) - (0 if shift is None else shift)
        torch.testing.assert_close(summed, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(frozen(norm, 3 * part, x), 3 * frozen(norm, part, x), rtol=0, atol=1e-12)


def test_what_is_no_norm_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear"):
        frozen(nn.Linear(2, 2), torch.ones(1, 2), torch.ones(1, 2))
