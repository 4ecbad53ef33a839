"""CLEX: the published equation solved by scipy, what it starts as, and what sets its scale: lengths, training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import attention_logits
from toeplens.encodings.scaled import CLEX

B, H, D, TRAINED_ON = 2, 2, 16, 32


def build(*, down_std: float = 0.0, head_dim: int = D, max_len: int = TRAINED_ON, **options: Any) -> CLEX:
    torch.manual_seed(0)
    made = encodings.build("clex", d_model=H * head_dim, num_heads=H, head_dim=head_dim, max_len=max_len, **options)
    assert isinstance(made, CLEX)
    torch.nn.init.normal_(made.down, std=down_std)
    return made.eval()


def other(name: str, **options: Any) -> Tensor:
    options = {"pairing": "half", **options}
    made = encodings.build(name, d_model=H * D, num_heads=H, head_dim=D, max_len=TRAINED_ON, **options)
    return made.frequencies[0]


def at_length(encoding: CLEX, length: int) -> Tensor:
    return encoding.frequencies_at(torch.arange(length))[0]


def apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.detach() - b.detach()).abs().max())


# ---- the equation ---------------------------------------------------------------------------------------------------


def published_slope(t: float, z: np.ndarray, up: np.ndarray, down: np.ndarray, act: str, base: float) -> np.ndarray:
    """dz/dt of the log-frequencies z, with the NTK-aware part and its derivative written out."""
    d = 2 * len(z)
    alpha, index = 2 * t - 1, np.arange(0, d, 2)
    theta = (base * alpha ** (d / (d - 2))) ** (-index / d)
    theta_slope = -2 * index / (d - 2) * base ** (-index / d) * alpha ** (-index / (d - 2) - 1)
    x = (z + np.log(theta)) @ up
    return (np.tanh(x) if act == "tanh" else x / (1 + np.exp(-x))) @ down + theta_slope / theta


def solved(encoding: CLEX, act: str, base: float, largest: int) -> np.ndarray:
    up, down = (w.detach().double().numpy() for w in (encoding.up, encoding.down))
    d = 2 * up.shape[0]
    solution = solve_ivp(
        published_slope,
        (1, largest),
        -np.arange(0, d, 2) / d * math.log(base),
        t_eval=range(1, largest + 1),
        args=(up, down, act, base),
        method="DOP853",
        rtol=1e-12,
        atol=1e-13,
    )
    return solution.y.T


@pytest.mark.parametrize(
    ("act", "base", "param_factor", "head_dim"),
    [("tanh", 10000.0, 1, 16), ("silu", 10000.0, 1, 16), ("tanh", 500000.0, 2, 64), ("silu", 100.0, 3, 8)],
)
def test_frequencies_solve_the_published_equation(act: str, base: float, param_factor: int, head_dim: int) -> None:
    options = {"act": act, "base": base, "param_factor": param_factor, "head_dim": head_dim}
    std = 0.01 / param_factor
    truth = solved(build(down_std=std, **options), act, base, 16)
    moved = np.abs(truth - solved(build(**options), act, base, 16)).max()
    assert moved > 0.2
    worst = {}
    for steps in (2, 4, 32):
        ours = build(down_std=std, steps=steps, **options).by_scale(16).log().detach().numpy()
        worst[steps] = np.abs(ours - truth).max()
    assert worst[2] <= 1e-5
    assert worst[4] <= 1e-6
    assert worst[32] <= 1e-9


def test_it_starts_as_rope_and_goes_on_as_ntk_aware_scaling() -> None:
    encoding = build()
    assert torch.equal(at_length(encoding, 1), other("rope"))
    assert torch.equal(at_length(encoding, TRAINED_ON), other("rope"))
    for t in range(2, 17):
        ntk = other("rope-ntk", factor=float(2 * t - 1))
        assert torch.allclose(at_length(encoding, TRAINED_ON * t), ntk, rtol=1e-13, atol=0)
    assert torch.equal(at_length(build(down_std=0.1), TRAINED_ON), other("rope"))
    assert apart(at_length(build(down_std=0.1), 2 * TRAINED_ON), at_length(encoding, 2 * TRAINED_ON)) > 1e-3
    fresh = encodings.build("clex", d_model=H * D, num_heads=H, head_dim=D, max_len=TRAINED_ON)
    assert not fresh.down.any()
    assert fresh.up.abs().max() <= 1 / math.sqrt(D)


def test_a_head_of_two_dimensions_has_one_frequency() -> None:
    assert torch.allclose(build(head_dim=2).by_scale(16), torch.ones(16, 1, dtype=torch.float64), rtol=1e-15, atol=0)


# ---- lengths --------------------------------------------------------------------------------------------------------


@given(length=st.integers(1, 1000), trained_on=st.integers(1, 100), max_factor=st.integers(1, 20))
def test_the_scale_is_the_length_in_trained_lengths_rounded_up(length: int, trained_on: int, max_factor: int) -> None:
    encoding = build(max_position_embeddings=trained_on, max_factor=max_factor)
    t = min(math.ceil(length / trained_on), max_factor)
    assert torch.equal(at_length(encoding, length), encoding.by_scale(max_factor)[t - 1])


def test_frequencies_beyond_a_turn_keep_their_phases_exact() -> None:
    """A map that nothing bounds may turn by thousands of radians a position; far positions still agree to rounding."""
    encoding = build(down_std=0.4)
    exact = encoding.by_scale(16)[-1].detach()
    assert float(exact.max()) > 1e4
    q, k = torch.randn(2, B, H, 6, D, dtype=torch.float64)
    here, there = (
        attention_logits(q, k, encoding=encoding, q_positions=p, k_positions=p, scale=1.0, causal=False)
        for p in (torch.arange(6) + 10**4, torch.arange(6) + 10**6)
    )
    assert apart(here, there) <= 1e-8
    known = exact < 1e7  # of a larger one float64 holds no angle to 1e-9
    assert torch.allclose(at_length(encoding, 10**4).cos()[known], exact.cos()[known], rtol=0, atol=1e-8)


def test_the_kernel_is_that_of_the_longest_text() -> None:
    offsets = torch.arange(-5, 6)
    for encoding in (
        build(down_std=0.1),
        build(down_std=0.1, max_len=4 * TRAINED_ON, max_position_embeddings=TRAINED_ON),
    ):
        phases = at_length(encoding, encoding.max_len).unsqueeze(-1) * offsets
        assert apart(encoding.kernel(offsets)[0], torch.polar(torch.ones_like(phases), phases)) <= 1e-14


# ---- training -------------------------------------------------------------------------------------------------------


def test_running_numbers_are_left_alone_but_in_training() -> None:
    encoding, numbers = build(), torch.arange(20)
    assert encoding.place(numbers) is numbers
    encoding.train()
    assert not all(torch.equal(encoding.place(numbers), numbers) for _ in range(8))
    for short in (torch.arange(0), torch.arange(1)):
        assert torch.equal(encoding.place(short), short)


@pytest.mark.parametrize("length", [2, 3, 20, TRAINED_ON])
def test_training_positions_are_those_of_a_text_whole_times_as_long(length: int) -> None:
    encoding = build(max_factor=5).train()
    drawn = torch.stack([encoding.place(torch.arange(length)) for _ in range(400)])
    assert bool((drawn[:, 0] == 0).all())
    assert bool((drawn.diff(dim=-1) > 0).all())
    times, rest = (drawn[:, -1] + 1).div(length, rounding_mode="floor"), (drawn[:, -1] + 1) % length
    assert not rest.any()
    counts = times.bincount(minlength=6)[1:]
    assert counts.sum() == 400
    assert bool((counts > 40).all())  # 80 each; five standard deviations are 40
    if length > 10:  # numbers between are drawn evenly: their mean is the middle
        middle = drawn[:, 1:-1].double().mean(-1) / drawn[:, -1]
        assert float(middle.mean()) == pytest.approx(0.5, abs=0.02)
    if length == TRAINED_ON:
        for row, t in zip(drawn[:10], times[:10].tolist(), strict=True):
            assert torch.equal(encoding.frequencies_at(row)[0], encoding.by_scale(5)[t - 1])


def test_training_texts_over_the_trained_length_end_at_whole_trained_lengths() -> None:
    encoding = build(max_factor=4).train()
    ends = {int(encoding.place(torch.arange(50))[-1]) for _ in range(100)}
    assert ends == {49, 2 * TRAINED_ON - 1, 3 * TRAINED_ON - 1, 4 * TRAINED_ON - 1}
