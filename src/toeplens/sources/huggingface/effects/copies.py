"""What a layer hands over of a batch, as it is of several copies of that batch, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_ALONE = -1  # the axis of what is the same for all copies


def layout(content: Any) -> str:
    """What two contents of equal layout have in common: how they are put together, and their tensors' shapes."""
    return str(tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, content))


def axes_of(one: Any, two: Any) -> list[int]:
    """Along which dimension the copies lie in each leaf, from the same of one copy and of two.

    Raises `ValueError` where the two are put together otherwise.
    """
    (own, spec), (others, other) = tree_flatten(one), tree_flatten(two)
    if spec != other:
        raise ValueError("two copies of a batch are handed over otherwise than one")
    return [_axis(x, y) for x, y in zip(own, others, strict=True)]


def repeated(one: Any, axes: list[int], copies: int) -> Any:
    """The content of so many copies."""
    leaves, spec = tree_flatten(one)
    made = [x if axis == _ALONE else torch.cat([x] * copies, dim=axis) for x, axis in zip(leaves, axes, strict=True)]
    return tree_unflatten(made, spec)


def _axis(one: Any, two: Any) -> int:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.ndim != two.ndim:
        return _ALONE
    longer = [axis for axis, (x, y) in enumerate(zip(one.shape, two.shape, strict=True)) if y == 2 * x != x]
    return longer[0] if longer else _ALONE
