"""Sums of squares of logits over the positions and the contents that a query sees, for `two_way`'s interaction.

A content c_m at a position j gives A_jm = Re sum_t w_t e_jt conj(c_mt). With S = sum_j e_j e_j^H over the positions,
S' = sum_j e_j e_j^T, and Z, Z' likewise of the contents,

    sum_jm A_jm^2 = 1/2 Re [ w^T (S * conj Z) conj w + w^T (S' * conj Z') w ],    * entry by entry.

What all queries of a step see goes in by that form, n^2 a query. A row that only some of them see is taken by itself:
with u = w e_j, the sum over the contents is the quadratic form of u in the contents' products, and the same the other
way round; where both are such rows, A_jm is formed. So nothing is kept for each query, and all of it is products of
matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor
from torch.nn import functional as F

STEP = 8  # queries: so many meet each other's rows one by one


@dataclass(frozen=True)
class Rows:
    """Contents, or positions, that a chunk of queries sees: what all see, and what query r sees from or up to row r.

    Numbers are real parts and after them imaginary parts, as they are given; next to each other, as they are stepped.

    products  [*B, 2n, 2n] sums over what all see, of the products of real and imaginary parts
    own       [*B, C, 2n] row r is seen by query r and those after it
    far       [*B, F, 2n] row r is seen by query r and those before it; None if there are none
    """

    products: Float[Tensor, "*B two_n two_n"]
    own: Float[Tensor, "*B C two_n"]
    far: Float[Tensor, "*B F two_n"] | None = None

    def stepped(self) -> tuple[Float[Tensor, "*B U two_n two_n"], Float[Tensor, "*B U P two_n"]]:
        """Of each step of queries, the products of what all of it sees, and the rows that only some of it do."""
        own = _steps(_paired(self.own))
        steps = own.shape[-3]
        known = _paired(_paired(self.products).mT).unsqueeze(-3) + _before(own.mT @ own)
        if self.far is None:
            return known, own
        far = _paired(self.far)
        far, others = far[..., : steps * STEP, :], far[..., steps * STEP :, :]
        far = _steps(F.pad(far, (0, 0, 0, max(0, steps * STEP - far.shape[-2]))))
        after = _before((far.mT @ far).flip(-3)).flip(-3)
        return known + after + (others.mT @ others).unsqueeze(-3), torch.cat((own, far), dim=-2)


def summed_squares(w: Complex[Tensor, "b k g C n"], contents: Rows, positions: Rows) -> Float[Tensor, "b k g C"]:
    """The sum over j and m of A_jm^2, of each query over what it sees.

    Arguments
        w         of each query, of the g heads that share contents and positions
        contents  [b, k, ..]
        positions [1, k or 1, ..]
    """
    seen, near_contents = contents.stepped()
    placed, near_positions = positions.stepped()
    count, group = w.shape[-2], w.shape[-3]
    queries = _steps(w).transpose(-4, -3).flatten(-3, -2)  # [b, k, U, g STEP, n]
    total = _formed(queries, placed, seen)
    allowed = _allowed(near_contents.shape[-2], w.device).repeat(group, 1)
    query, row = allowed.nonzero().unbind(-1)
    chosen = queries[..., query, :]
    put = _real(_complex(near_positions)[..., row, :] * chosen)
    taken = _real(_complex(near_contents)[..., row, :] * chosen.conj())
    each = ((put @ seen) * put).sum(-1) + ((taken @ placed) * taken).sum(-1)
    each = each + ((put @ near_contents.mT).square() * allowed[query]).sum(-1)
    total = total.index_add_(-1, query, each).unflatten(-1, (group, -1))
    return total.transpose(-3, -2).flatten(-2)[..., :count]


def squares_of_all(
    w: Complex[Tensor, "b k g C n"],
    contents: Float[Tensor, "b k two_n two_n"],
    positions: Float[Tensor, "_b _k two_n _m"],
) -> Float[Tensor, "b k g C"]:
    """`summed_squares` where every query sees all: given the products of contents and of positions."""
    total = _formed(w.flatten(-3, -2), *(_paired(_paired(x).mT) for x in (positions, contents)))
    return total.unflatten(-1, w.shape[-3:-1])


def _formed(
    w: Complex[Tensor, "*B C n"], positions: Float[Tensor, "*_B two_n two_n"], contents: Float[Tensor, "*B two_n two_n"]
) -> Float[Tensor, "*B C"]:
    """Of queries that see the same."""
    both = zip(_products(positions), _products(contents), strict=True)
    plain, turned = (w @ (a * b.conj()) for a, b in both)
    return ((plain * w.conj()).real + (turned * w).real).sum(-1) / 2


def _products(x: Float[Tensor, "*B two_n two_n"]) -> tuple[Complex[Tensor, "*B n n"], Complex[Tensor, "*B n n"]]:
    """sum of x x^H, and of x x^T, from the products of real and imaginary parts."""
    real, imaginary = _complex(x[..., 0::2, :]), _complex(x[..., 1::2, :])  # [t, s] of Re x_t, Im x_t and x_s
    return real.conj() + 1j * imaginary.conj(), real + 1j * imaginary


def _paired(x: Float[Tensor, "*B two_n"]) -> Float[Tensor, "*B two_n"]:
    """Real and imaginary parts next to each other, where they came one after the other."""
    return x.unflatten(-1, (2, -1)).mT.flatten(-2).contiguous()


def _complex(x: Float[Tensor, "*B two_n"]) -> Complex[Tensor, "*B n"]:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _real(x: Complex[Tensor, "*B n"]) -> Float[Tensor, "*B two_n"]:
    return torch.view_as_real(x).flatten(-2)


def _steps(x: Tensor) -> Tensor:
    """[*B, U, STEP, F] of [*B, C, F], zeros after the last."""
    more = -x.shape[-2] % STEP
    return F.pad(x, (0, 0, 0, more)).unflatten(-2, (-1, STEP))


def _before(x: Float[Tensor, "*B U n n"]) -> Float[Tensor, "*B U n n"]:
    """The sums over the steps before each."""
    return F.pad(x[..., :-1, :, :].cumsum(-3), (0, 0, 0, 0, 1, 0))


def _allowed(rows: int, device: torch.device) -> Bool[Tensor, "S P"]:
    """Which of a step's rows, its own and then the far ones, its queries see."""
    own = torch.ones(STEP, STEP, dtype=torch.bool, device=device)
    return torch.cat((own.tril(), own.triu()), dim=-1)[:, :rows]
