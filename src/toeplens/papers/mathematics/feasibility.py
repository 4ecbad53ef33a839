"""Expressiveness of one attention logit: tables of wanted signs over (query content, key content, offset).

An instance is a table Y of signs, Y[a, b, delta] in {+1, -1, 0}: the logit of query content a and key content b at
offset delta = i - j must be high, must be low, or is free. C1 > C2 of the paper are a threshold c and a margin: a form
of the logit satisfies an instance if Y (L + c) > 0 wherever Y is not 0, for some parameters of the form. This module
has kinds of instances, forms, a search for parameters, and exact tests of impossibility.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linprog
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from toeplens.encodings.rotary import rotary_frequencies
from toeplens.ground import invalid

BASE = 10000.0
ZERO = 1e-7  # the solver's own tolerance: a margin up to this share of the largest coefficient is taken to be none
RATE = 0.05

Signs = Int[np.ndarray, "I V V D"]  # instances, query contents, key contents, offsets 0 to D - 1


def random_signs(rng: np.random.Generator, count: int, places: int, *, vocabulary: int, offsets: int) -> Signs:
    """``count`` instances with random signs on ``places`` random places of the table."""
    shape = (count, vocabulary, vocabulary, offsets)
    order = rng.permuted(np.tile(np.arange(vocabulary**2 * offsets), (count, 1)), axis=1).reshape(shape)
    return np.where(order < places, rng.choice([-1, 1], shape), 0)


def wanted_signs(rng: np.random.Generator, count: int, pairs: int, *, vocabulary: int, offsets: int) -> Signs:
    """``pairs`` random pairs of contents are wanted, each at one random offset, and nothing else in the whole table.

    One pair is Task 1 for one head and one distance.
    """
    signs = np.full((count, vocabulary**2, offsets), -1)
    for table in signs:
        table[rng.choice(len(table), pairs, replace=False), rng.integers(0, offsets, pairs)] = 1
    return signs.reshape(count, vocabulary, vocabulary, offsets)


def additive_signs(
    rng: np.random.Generator, count: int, kind: Literal["offset", "sum", "decay"], *, vocabulary: int, offsets: int
) -> Signs:
    """The signs of an additive form, on the whole table.

    ``offset`` is beta_delta alone, ``sum`` C_ab + beta_delta, all standard normal. ``decay`` has a beta_delta that
    falls evenly from 2 to -2, as in ALiBi: each pair of contents is wanted up to a distance of its own.
    """
    contents = rng.normal(size=(count, vocabulary, vocabulary, 1)) * (kind != "offset")
    steep = np.linspace(2, -2, offsets).reshape(1, 1, 1, -1)
    beta = steep if kind == "decay" else rng.normal(size=(count, 1, 1, offsets))
    return np.where(contents + beta > 0, 1, -1)


@dataclass(frozen=True)
class Form:
    """A form of the logit: L[a, b, delta] = Re sum over t of u_at conj(v_bt) e^(i delta theta_t), + beta_delta.

    frequencies  theta_t, one a pair of dimensions (the width is twice their number); 0 for a pair that does not turn
    bias         whether there is a free beta_delta; all frequencies 0 and a bias is the additive form
    """

    frequencies: tuple[float, ...]
    bias: bool

    @property
    def width(self) -> int:
        """Dimensions of a content vector."""
        return 2 * len(self.frequencies)


def additive(width: int) -> Form:
    """<u_a, v_b> + beta_delta: the paper's relative position encoding (equation 8 with only the bias)."""
    return Form((0.0,) * _pairs(width), True)


def rotary(width: int) -> Form:
    """RoPE of this width, base 10000, without a bias (the paper's equation 9)."""
    return Form(tuple(rotary_frequencies(2 * _pairs(width), BASE).tolist()), False)


def one_angle(width: int) -> Form:
    """RoPE in which only the pair of the highest frequency (1 radian per token) rotates; the others are frozen."""
    return Form((1.0,) + (0.0,) * (_pairs(width) - 1), False)


def _pairs(width: int) -> int:
    if width < 2 or width % 2:
        raise invalid("width", "be even and at least 2", width)
    return width // 2


@dataclass(frozen=True)
class Solution:
    """Result of a search for parameters, by instance.

    met     [I] whether parameters were found that meet the instance: a witness, so True is certain, False is not
    margin  [I] the least Y (L + c) over the root mean square of L + c, both over the instance's signs; at most 1;
            0 where the instance was not met
    """

    met: Bool[np.ndarray, "I"]
    margin: Float[np.ndarray, "I"]


def logits(
    form: Form, u: Float[Tensor, "*B V d"], v: Float[Tensor, "*B V d"], offsets: int
) -> Float[Tensor, "*B V V D"]:
    """The table L of content vectors ``u`` (queries) and ``v`` (keys), at offsets 0 to ``offsets`` - 1, without bias.

    The first half of a vector's d dimensions holds the real parts of its n pairs, the second the imaginary parts.
    """
    cos, sin = _turns(form.frequencies, offsets, u.dtype)
    a, b = (half.unsqueeze(-2) for half in u.chunk(2, dim=-1))
    turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)  # [*B, V, D, d]
    table = turned.flatten(-3, -2) @ v.transpose(-1, -2)
    return table.unflatten(-2, (-1, offsets)).transpose(-1, -2)


@lru_cache
def _turns(
    frequencies: tuple[float, ...], offsets: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "D n"], Float[Tensor, "D n"]]:
    angles = torch.outer(torch.arange(offsets, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def search(form: Form, signs: Signs, *, restarts: int, steps: int, seed: int) -> Solution:
    """Search for parameters that satisfy each instance: Adam on the squared hinge loss, several random starts at once.

    The witness is checked in float64. The content vectors are free, and so are the threshold and, in a form with a
    bias, beta_delta.

    Arguments
        form      of the logit
        signs     [I, V, V, D] instances
        restarts  starts an instance, of which the one with the best margin counts
        steps     of the optimiser
        seed      of the starts
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.from_numpy(signs).unsqueeze(1)
    y, counted = wanted.float(), wanted != 0
    count, size, _, offsets = signs.shape
    shape = (count, restarts, size, form.width)
    u, v = (torch.randn(shape, generator=generator).div_(form.width**0.25).requires_grad_() for _ in range(2))
    threshold = torch.zeros(count, restarts, 1, 1, 1, requires_grad=True)
    beta = torch.zeros(count, restarts, 1, 1, offsets, requires_grad=form.bias)
    parameters = [u, v, threshold, *([beta] if form.bias else [])]
    optimiser = torch.optim.Adam(parameters, lr=RATE)
    for _ in range(steps):
        optimiser.zero_grad()
        short = torch.relu(1 - y * (logits(form, u, v, offsets) + beta + threshold)) * counted
        short.square().sum().backward()
        optimiser.step()
    with torch.no_grad():
        table = logits(form, u.double(), v.double(), offsets) + beta.double() + threshold.double()
        least = torch.where(counted, wanted * table, torch.inf).flatten(2).amin(-1)
        energy = (table.square() * counted).flatten(2).sum(-1) / counted.flatten(2).sum(-1)
        best = (least / energy.sqrt()).amax(1).numpy()
    met = best > ZERO
    return Solution(met, np.where(met, best, 0.0))


def additive_possible(signs: Int[np.ndarray, "V V D"]) -> bool:
    """Whether any additive form of any width satisfies the instance. Exact.

    With a content table C of full rank, C_ab + c > -beta_delta where the sign is +, and < where it is -: an order
    between the pairs (a, b) and the offsets. Numbers that keep it exist if and only if it has no cycle.
    """
    flat = signs.reshape(-1, signs.shape[-1])
    pair, offset = np.nonzero(flat)
    up = flat[pair, offset] > 0
    nodes = sum(flat.shape)
    source, target = np.where(up, len(flat) + offset, pair), np.where(up, pair, len(flat) + offset)
    graph = coo_array((np.ones(len(pair)), (source, target)), shape=(nodes, nodes))
    return connected_components(graph, directed=True, connection="strong", return_labels=False) == nodes


def rotary_possible(form: Form, signs: Int[np.ndarray, "V V D"]) -> bool:
    """Whether a form without bias could satisfy the instance if each pair (a, b) had its own free coefficients z_t.

    Re sum of z_t e^(i delta theta_t) in place of z_t = u_at conj(v_bt): the ranks are dropped, so that False is a proof
    (up to `ZERO`) that the form cannot meet the instance. True says nothing; it is also the answer where the waves are
    so nearly dependent that double precision loses their span.
    """
    flat = signs.reshape(-1, signs.shape[-1])
    angles = np.outer(np.arange(flat.shape[1]), form.frequencies)
    waves = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    if np.linalg.cond(waves) * np.finfo(float).eps > ZERO:
        return True
    waves = np.linalg.qr(waves)[0]
    pair, offset = np.nonzero(flat)
    rows = np.zeros((len(pair), len(flat), waves.shape[1]))
    rows[np.arange(len(pair)), pair] = waves[offset]
    rows = np.concatenate((rows.reshape(len(pair), -1), np.ones((len(pair), 1))), axis=1)
    return separable(rows * flat[pair, offset][:, None])


def separable(rows: Float[np.ndarray, "m p"]) -> bool:
    """Whether some w has rows @ w > 0 in every row, by a linear program: the greatest margin of the scaled rows
    with |w_k| <= 1 is over `ZERO`."""
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    count, size = rows.shape
    answer = linprog(
        np.append(np.zeros(size), -1.0),
        A_ub=np.concatenate((-rows, np.ones((count, 1))), axis=1),
        b_ub=np.zeros(count),
        bounds=[(-1, 1)] * size + [(0, 1)],
    )
    if not answer.success:
        raise ArithmeticError(f"The linear program was not solved: {answer.message}")
    return bool(answer.x[-1] > ZERO)
