"""RoPE at remapped offsets: against plain loops, where it is RoPE, how far offsets go, and what moves with the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, agree, build, draw, pair_by_pair, rope

from toeplens import encodings
from toeplens.encodings import attend
from toeplens.encodings.rotary import RoPE

H, D = SIZES["num_heads"], SIZES["head_dim"]
PLACES = torch.tensor([0, 1, 2, 5, 7, 8, 9, 20, 21, 63, 64, 1000, 100_003])
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])
CASES: list[tuple[str, dict[str, Any]]] = [
    ("rerope", {}),
    ("rerope", {"window": 6, "leak": 0.25}),
    ("self-extend", {"window": 8, "group": 4}),
    ("self-extend", {"window": 7, "group": 3}),
    ("dual-chunk", {"chunk": 6, "window": 3}),
    ("dual-chunk", {"chunk": 6, "window": 3, "largest": "released"}),
]


def remapped(name: str, i: int, j: int, options: dict[str, Any]) -> float:
    """The papers' offsets of keys that are not after the query."""
    if name == "rerope":
        w, leak = options.get("window", 8), options.get("leak", 0.0)
        return i - j if i - j < w else w + (i - j - w) * leak
    if name == "self-extend":
        w, group = options["window"], options["group"]
        return i - j if i - j < w else i // group - j // group + w - w // group
    s, w = options["chunk"], options["window"]
    last = s + w - 1 if options.get("largest", "paper") == "paper" else s + w
    if i // s == j // s:
        return i % s - j % s
    return (min(s + i % s, last) if i // s == j // s + 1 else last) - j % s


@PAIRINGS
@pytest.mark.parametrize(("name", "options"), CASES)
def test_logits_are_the_formulas(name: str, options: dict[str, Any], pairing: str) -> None:
    encoding = build(name, pairing=pairing, base=500.0, **options)
    q, k = draw(2, H, len(PLACES), D), draw(2, H, len(PLACES), D, seed=2)

    def offset(row: int, column: int) -> float:
        return remapped(name, int(PLACES[row]), int(PLACES[column]), options) if column <= row else 0.0

    wanted = pair_by_pair(q, k, lambda b, h, i, j, t: rope(offset(i, j), t, base=500.0), pairing).real.tril()
    agree(encoding.score(q, k, PLACES, PLACES).tril(), wanted, 1e-9)
    each = torch.stack((PLACES, PLACES))
    agree(encoding.score(q, k, each, each).tril(), wanted, 1e-9)
    for row in range(len(PLACES)):
        for column in range(row + 1):
            assert float(encoding.offsets(PLACES, PLACES)[row, column]) == pytest.approx(offset(row, column))


@PAIRINGS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rerope", {"leak": 1.0}),
        ("rerope", {"window": 10**6}),
        ("self-extend", {"group": 1}),
        ("self-extend", {"window": 10**6}),
        ("dual-chunk", {"chunk": 10**6}),
    ],
)
def test_it_is_rope_where_nothing_is_remapped(name: str, options: dict[str, Any], pairing: str) -> None:
    q, k, v = (draw(2, H, len(PLACES), D, seed=seed) for seed in range(3))
    ours, rope = build(name, pairing=pairing, **options), encodings.build("rope", **SIZES, pairing=pairing)
    for causal in (True, False):
        told = {"q_positions": PLACES, "k_positions": PLACES, "scale": 0.3, "causal": causal}
        agree(attend(q, k, v, encoding=ours, **told), attend(q, k, v, encoding=rope, **told), 1e-9)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_offsets_stay_where_training_was(one: int, two: int) -> None:
    i, j = torch.tensor([max(one, two)]), torch.tensor([min(one, two)])
    assert float(build("rerope", window=9).offsets(i, j)) <= 9
    assert -5 <= float(build("dual-chunk", chunk=6, window=3).offsets(i, j)) <= 8
    assert float(build("self-extend", window=8, group=4).offsets(i, j)) <= int(i) // 4 + 6


@pytest.mark.parametrize("moved", [1, 8, 24])
def test_groups_and_chunks_move_with_the_text_in_their_own_steps_alone(moved: int) -> None:
    groups, chunks = build("self-extend", window=4, group=8), build("dual-chunk", chunk=12, window=3)
    p = torch.arange(40)
    assert torch.equal(groups.offsets(p, p), groups.offsets(p + moved, p + moved)) == (moved % 8 == 0)
    assert torch.equal(chunks.offsets(p, p), chunks.offsets(p + moved, p + moved)) == (moved % 12 == 0)
    assert not groups.toeplitz
    assert not chunks.toeplitz
    assert groups.kernel(p) is None
    assert chunks.kernel(p) is None


def test_default_sizes_are_shares_of_the_longest_text() -> None:
    sizes = {**SIZES, "max_len": 4096}
    rerope, extend, dual = (encodings.build(name, **sizes) for name in ("rerope", "self-extend", "dual-chunk"))
    assert rerope.window == 512
    assert (extend.window, extend.group) == (1024, 8)
    assert (dual.chunk, dual.window) == (3072, 1024)
    assert not isinstance(rerope, RoPE)
