"""Sinusoids of a learned size, at positions that are drawn in training; TUPE's untied positions: by plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, agree, build, randomised
from torch import Tensor
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import PositionalEncoding
from toeplens.encodings.additive import TUPE
from toeplens.ground import InputError

H, D = 3, 8
QUERIES, KEYS = [3, 0, 63], [0, 3, 40, 63, 2]


def added(encoding: PositionalEncoding, positions: Tensor, batch: int = 1) -> Tensor:
    x = torch.zeros(batch, positions.shape[-1], 24, dtype=torch.float64)
    return encoding.embed(x, positions).detach()


def where(rows: Tensor, limit: int) -> Tensor:
    """The positions whose sinusoids these rows are."""
    table = added(build("sinusoidal"), torch.arange(limit))[0]
    difference = (rows.unsqueeze(-2) - table).abs().amax(-1)
    assert float(difference.min(-1).values.max()) < 1e-12
    return difference.argmin(-1)


# ---- scaled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "start"), [("halves", None), ("interleaved", 1.0)])
def test_the_scaled_sinusoid_is_a_number_times_the_sinusoid(layout: str, start: float | None) -> None:
    encoding = build("scaled-sinusoidal", layout=layout, start=start)
    size = 24**-0.5 if start is None else start
    p = torch.tensor([0, 5, 1000, -3])
    for n, i in enumerate(p.tolist()):
        row = added(encoding, p)[0, n]
        for t in range(12):
            phase = i / 10000 ** (2 * t / 24)
            sine, cosine = (t, 12 + t) if layout == "halves" else (2 * t, 2 * t + 1)
            assert abs(float(row[sine]) - size * math.sin(phase)) < 1e-7  # the number is a float32
            assert abs(float(row[cosine]) - size * math.cos(phase)) < 1e-7
    offsets = torch.tensor([0, 3])
    agree(encoding.kernel(offsets), size**2 * build("sinusoidal").kernel(offsets), 1e-6)


def test_the_scaled_sinusoid_is_x_transformers() -> None:
    ours, theirs = build("scaled-sinusoidal"), x_transformers.ScaledSinusoidalEmbedding(24)
    agree(ours.number, theirs.scale[0], 1e-9)
    with torch.no_grad():
        ours.number.fill_(0.7)
        theirs.scale.fill_(0.7)
    agree(ours.embed(torch.zeros(1, 100, 24), torch.arange(100))[0], theirs(torch.empty(1, 100)), 1e-5)


# ---- shifted --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 20), most=st.integers(0, 9))
def test_shape_moves_each_sequence_by_one_number(seed: int, most: int) -> None:
    encoding = build("shape", max_shift=most).train()
    torch.manual_seed(seed)
    positions = torch.tensor([[0, 1, 2, 3, 7], [5, 4, 9, 9, 0]]).repeat(20, 1)
    shifts = where(added(encoding, positions, 40), 32) - positions
    assert bool((shifts == shifts[:, :1]).all())
    assert int(shifts.min()) >= 0
    assert int(shifts.max()) <= most
    assert most < 2 or len(shifts[:, 0].unique()) > 1


def test_shape_draws_every_shift_and_none_in_evaluation() -> None:
    encoding = build("shape", max_shift=4).train()
    p = torch.arange(3)
    shifts = where(added(encoding, p, 200), 16)[:, 0]
    assert shifts.unique().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(added(encoding.eval(), p), added(build("sinusoidal"), p))
    assert build("shape").max_shift == 64
    torch.manual_seed(3)
    one = added(encoding.train(), p, 5)
    torch.manual_seed(3)
    assert torch.equal(one, added(encoding, p, 5))


# ---- randomized -----------------------------------------------------------------------------------------------------


@given(
    positions=st.lists(st.integers(-50, 50), min_size=1, max_size=12),
    seed=st.integers(0, 100),
)
def test_randomized_positions_keep_the_order_of_positions(positions: list[int], seed: int) -> None:
    encoding = build("randomized-sinusoidal", max_position=64).train()
    torch.manual_seed(seed)
    p = torch.tensor(positions)
    places = where(added(encoding, p), 64)[0]
    assert bool(((p.unsqueeze(-1) - p).sign() == (places.unsqueeze(-1) - places).sign()).all())
    rows = torch.stack((p, p.flip(0)))
    both = where(added(encoding, rows, 2), 64)
    assert torch.equal(both[0], both[1].flip(0))  # one draw for the batch


def test_randomized_positions_are_drawn_from_all_places_alike() -> None:
    encoding = build("randomized-sinusoidal", max_position=64).train()
    p = torch.arange(16)
    counts = torch.zeros(64)
    for _ in range(400):
        counts[encoding.draw(p)] += 1
    # each place is taken with probability 1/4: 100 +- 8.7; no more than 5 deviations away
    assert float((counts - 100).abs().max()) < 44
    assert torch.equal(encoding.draw(torch.arange(64)), torch.arange(64))
    assert build("randomized-sinusoidal").max_position == 256


def test_in_evaluation_randomized_positions_are_what_they_are() -> None:
    encoding = build("randomized-sinusoidal").eval()
    p = torch.tensor([3, 1, 900])
    assert torch.equal(added(encoding, p), added(build("sinusoidal"), p))


def test_more_tokens_than_places_are_refused() -> None:
    encoding = build("randomized-sinusoidal", max_position=64).train()
    with pytest.raises(InputError, match=r"^max_position must be at least the number of tokens, 65, got 64\.$"):
        added(encoding, torch.arange(65))


def test_weights_saved_before_still_fit_the_scaled_sinusoid() -> None:
    """Its number is called ``scale`` in a state dict, whatever the attribute of that name is."""
    encoding = build("scaled-sinusoidal")
    assert list(encoding.state_dict()) == ["scale"]
    encoding.load_state_dict({"scale": torch.tensor(0.25)})
    assert (encoding.number.item(), encoding.scale) == (0.25, SIZES["head_dim"] ** -0.5)


# ---- TUPE -----------------------------------------------------------------------------------------------------------


def tupe(**options: Any) -> TUPE:
    torch.manual_seed(0)
    encoding = encodings.build("tupe", **SIZES, **options).double().requires_grad_(False)
    assert isinstance(encoding, TUPE)
    return randomised(encoding)


def place(encoding: TUPE, layer: torch.nn.Linear, position: int, head: int) -> Tensor:
    p = encoding.weight[position]
    p = (p - p.mean()) / torch.sqrt(p.var(correction=0) + 1e-5) * encoding.norm.weight + encoding.norm.bias
    rows = slice(head * D, head * D + D)
    return layer.weight[rows] @ p + layer.bias[rows]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("untied_first", [False, True])
def test_tupe_is_a_product_of_positions_of_its_own(relative: bool, untied_first: bool) -> None:
    encoding = tupe(relative=relative, untied_first=untied_first)
    for queries in (torch.tensor(QUERIES), torch.tensor([QUERIES, [1, 2, 0]])):
        bias = encoding.bias(queries, torch.tensor(KEYS))
        by_sequence = bias if queries.ndim == 2 else bias.unsqueeze(0)
        for b, row in enumerate(queries.reshape(-1, 3).tolist()):
            for h in range(H):
                for n, i in enumerate(row):
                    for m, j in enumerate(KEYS):
                        if untied_first and 0 in (i, j):
                            value = 0 if i == 0 else 1
                            wanted = float(encoding.first[value, h])
                            wanted += float(encoding.relative_first[value, h]) if relative else 0.0
                        else:
                            q, k = place(encoding, encoding.to_q, i, h), place(encoding, encoding.to_k, j, h)
                            wanted = float(q @ k) / math.sqrt(2 * D)
                            wanted += float(encoding.relative.kernel(torch.tensor([i - j]))[h, 0]) if relative else 0.0
                        assert abs(float(by_sequence[b, h, n, m]) - wanted) < 1e-10


@pytest.mark.parametrize("relative", [False, True])
def test_what_stands_for_no_place_is_as_near_to_all(relative: bool) -> None:
    """The row and the column of position 0 are constant: nothing in them says where the other token stands."""
    places = torch.arange(40)
    bias = tupe(relative=relative, untied_first=True).bias(places, places)
    assert torch.equal(bias[:, 0, :], bias[:, 0, :1].expand(-1, 40))
    assert torch.equal(bias[:, 1:, 0], bias[:, 1:2, 0].expand(-1, 39))
    assert (bias[:, 0, 0] - bias[:, 1, 0]).abs().min() > 1e-6
