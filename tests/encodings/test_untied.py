"""TUPE's untied positions, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, randomised
from torch import Tensor

from toeplens import encodings
from toeplens.encodings.absolute import TUPE
from toeplens.ground import InputError

H, D = 3, 8
QUERIES, KEYS = [3, 0, 63], [0, 3, 40, 63, 2]


def build(**options: Any) -> TUPE:
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
    encoding = build(relative=relative, untied_first=untied_first)
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
    bias = build(relative=relative, untied_first=True).bias(places, places)
    assert torch.equal(bias[:, 0, :], bias[:, 0, :1].expand(-1, 40))
    assert torch.equal(bias[:, 1:, 0], bias[:, 1:2, 0].expand(-1, 39))
    assert (bias[:, 0, 0] - bias[:, 1, 0]).abs().min() > 1e-6


def test_tupe_is_one_bias_for_all_layers_within_its_table() -> None:
    encoding = build()
    assert encoding.fixed_bias
    assert encoding.for_layer(5) is encoding
    with pytest.raises(InputError, match=r"^max_len: position 64 was asked for"):
        encoding.bias(torch.tensor([64]), torch.tensor([0]))


def test_tupes_relative_buckets_tell_sides_apart() -> None:
    encoding = build(relative=True)
    assert encoding.relative.bidirectional
    assert not torch.equal(*encoding.relative.kernel(torch.tensor([5, -5])).T)


def test_tupe_starts_anew_when_told_to() -> None:
    encoding = encodings.build("tupe", **SIZES, untied_first=True, relative=True)
    before = {name: value.clone() for name, value in encoding.state_dict().items()}
    encoding.reset_parameters()
    changed = {name for name, value in encoding.state_dict().items() if not torch.equal(value, before[name])}
    assert changed >= {"weight", "to_q.weight", "to_k.weight"}
    assert not encoding.first.any()


def test_weights_of_the_bias_as_it_was_before_do_not_load() -> None:
    """Position 0's row used to vary with the other token; a run saved so is refused, not taken for this one."""
    encoding = build(relative=True, untied_first=True)
    before = {name: value for name, value in encoding.state_dict().items() if name != "relative_first"}
    with pytest.raises(RuntimeError, match="relative_first"):
        encoding.load_state_dict(before)
