"""Why attention was not understood, in words: what stands in place of a softmax of queries and keys, or a rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_LOOKED_AT = 256  # places whose logits are formed, to see what the offset explains of them
_ALL = 0.995  # of what varies: less is said in whole percents


class Shared(NamedTuple):
    """An operation that may share weight out among keys, and the shape of what it was given."""

    name: str
    shape: tuple[int, ...]

    def why(self, tokens: int) -> str:
        """Why it is no attention that was followed, in a module of so many tokens."""
        *_, rows, columns = (0, 0, *self.shape)
        if (rows == tokens and columns >= tokens) or not self.shape:
            return f"its {self.name!r} is no softmax of a product that was followed"
        return (
            f"its {self.name!r} is of numbers of shape {list(self.shape)}, bands or blocks of keys in place of one "
            f"product of all its {tokens} queries and their keys"
        )


def without_softmax(kind: str, passed: Mapping[str, bool]) -> str:
    """What to say of a model whose pass had no call of attention.

    Arguments
        kind    its class
        passed  classes of modules that are named after attention and were called, and whether they gave but 0
    """
    if not passed:
        return f"no attention was called in the pass of {kind}"
    zeros = [name for name, nothing in passed.items() if nothing]
    said = f"no attention of {kind} was understood: its {', '.join(passed)} took no softmax of queries and keys"
    more = ", as where it is left to a kernel that is not there" if zeros else ""
    return f"{said}{f', and {zeros[0]} gave nothing but 0{more}' if zeros else ''}"


def same_numbers(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape are the same numbers in memory."""
    return x.shape == y.shape and x.stride() == y.stride() and x.data_ptr() == y.data_ptr()


def turned_before(equal: tuple[Float[Tensor, "1 H N d"], Float[Tensor, "1 G N d"]] | None) -> str:
    """What to say of a rotation R of the states x, from which queries and keys are projected then.

    The product x_i^T R_i^T W_q^T W_k R_j x_j is a function of i - j for all x where W_q^T W_k and R can change places,
    as they cannot in general: what W_q^T W_k has between pairs that are turned by other angles, or mirrored, stands at
    both positions.

    Arguments
        equal  queries and keys of one token in every place; None where they are not known
    """
    said = "its rotation is of the states, before their projection to queries and keys"
    share = 1.0 if equal is None else offset_share(*equal)
    if not share < _ALL:
        return f"{said}."
    return (
        f"{said}: with the last token in every place, the offset explains at most {100 * share:.0f} % of what varies "
        "in a head's logits."
    )


def offset_share(q: Float[Tensor, "1 H N d"], k: Float[Tensor, "1 G N d"]) -> float:
    """Share of the variance of q . k over all pairs of places that their offset explains: the largest of a head's."""
    q, k = (x[0, :, :_LOOKED_AT].double() for x in (q, k))
    logits = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(-2, -1)
    logits = logits - logits.mean((-2, -1), keepdim=True)
    there = torch.arange(logits.shape[-1], device=logits.device)
    offset = (there.unsqueeze(-1) - there + len(there) - 1).flatten()
    sums = logits.new_zeros(len(q), 2 * len(there) - 1).index_add_(1, offset, logits.flatten(1))
    explained = (sums.square() / offset.bincount()).sum(-1)
    whole = logits.square().sum((-2, -1))
    return float(torch.where(whole > 0, explained / whole, torch.ones_like(whole)).max())
