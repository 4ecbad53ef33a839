"""Queries, keys and values of one projection: the same views and gradients as torch's own split."""

from __future__ import annotations

import torch
from torch import Tensor

from toeplens.model.parts import in_parts


def by_split(x: Tensor, heads: int) -> list[Tensor]:
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.chunk(3, dim=-1)]


def test_parts_are_those_of_a_split_and_take_no_memory():
    x = torch.randn(2, 5, 3 * 4 * 6)
    for part, other in zip(in_parts(x, 4), by_split(x, 4), strict=True):
        assert torch.equal(part, other)
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_gradients_come_back_to_where_they_belong_however_often():
    x = torch.randn(2, 3, 3 * 2 * 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: in_parts(x, 2), x)
    assert torch.autograd.gradgradcheck(lambda x: in_parts(x, 2), x)
    q, _, v = in_parts(x, 2)
    (found,) = torch.autograd.grad((q**2).sum() + v.sum(), x)  # none of the keys
    q, _, v = by_split(x, 2)
    (wanted,) = torch.autograd.grad((q**2).sum() + v.sum(), x)
    assert torch.equal(found, wanted)


def test_transforms_look_through_them():
    x = torch.randn(3, 2, 5, 3 * 2 * 2)
    found = torch.func.vmap(lambda each: in_parts(each, 2)[1])(x)
    assert torch.equal(found, torch.stack([by_split(each, 2)[1] for each in x]))
    gradient = torch.func.grad(lambda each: (in_parts(each, 2)[0] ** 2).sum())(x[0])
    assert torch.equal(gradient[..., :4], 2 * x[0][..., :4])
