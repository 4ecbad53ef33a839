"""An index of some dimensions takes what the list of them takes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from toeplens.lens.kit.rotation import index_of


@given(st.lists(st.integers(0, 11), max_size=8))
def test_it_takes_the_same_in_the_same_order(places: list[int]) -> None:
    x, dimensions = torch.arange(24.0).view(2, 12), torch.tensor(places, dtype=torch.long)
    assert torch.equal(x[..., index_of(dimensions)], x[..., dimensions])


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
def test_even_steps_are_a_view(start: int, step: int, count: int) -> None:
    dimensions = start + step * torch.arange(count)
    assert isinstance(index_of(dimensions), slice)
    x = torch.zeros(40)
    x[index_of(dimensions)] = 1
    assert torch.equal(x.nonzero().flatten(), dimensions)
