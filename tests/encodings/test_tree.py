"""Positions in a tree, against a tree of linked nodes: its numbering, its walks, its stacks."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.encodings.samples import SIZES
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings.coordinates import Syntactic, SyntacticBias, tree_distances
from toeplens.ground import InputError

DEPTH = 5
PATHS = st.lists(st.integers(1, 3), max_size=DEPTH)

build = partial(samples_build, std=0.5)


def tensor(*paths: list[int], depth: int = DEPTH) -> Tensor:
    return torch.tensor([path + [0] * (depth - len(path)) for path in paths])


def grown(branching: int, count: int) -> list[list[int]]:
    """The paths of the first nodes of a tree that grows level by level."""
    queue: list[list[int]] = [[]]
    for n in range(count):
        queue += [[*queue[n], branch] for branch in range(1, branching + 1)]
    return queue[:count]


def walked(a: list[int], b: list[int]) -> int:
    """Steps from one node up and down to the other, counted by climbing from the deeper until they meet."""
    steps = 0
    while a != b:
        if len(a) >= len(b):
            a = a[:-1]
        else:
            b = b[:-1]
        steps += 1
    return steps


def pushed(path: list[int], decays: list[float], branching: int, depth: int, d_model: int) -> list[float]:
    """The published stack, grown from the root: a step down weighs all that is there by p and lays the branch on top.

    Entry (m, branch, p) is number (m * branching + branch) * copies + copy.
    """
    copies, out = len(decays), [0.0] * d_model
    for copy, p in enumerate(decays):
        stack = [0.0] * (branching * depth)
        for branch in path:
            top = [float(branch == b) for b in range(1, branching + 1)]
            stack = top + [p * entry for entry in stack[:-branching]]
        for place, entry in enumerate(stack):
            out[place * copies + copy] = entry * math.sqrt((1 - p * p) * d_model / 2)
    return out


# ---- places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branching", [2, 3, 5])
def test_running_numbers_are_the_nodes_of_a_tree_that_grows_level_by_level(branching: int) -> None:
    encoding = build("syntactic-bias", branching=branching)
    placed = encoding.place(torch.arange(64).view(2, 32))
    assert placed.shape == (2, 32, encoding.axes)
    assert torch.equal(placed.flatten(0, 1), tensor(*grown(branching, 64), depth=encoding.axes))


def test_by_default_the_tree_holds_max_len_nodes_and_no_level_more() -> None:
    assert [build("syntactic-bias", max_len=n).axes for n in (1, 7, 8, 63, 64, 512)] == [2, 2, 3, 5, 6, 9]
    assert build("syntactic-bias", branching=3, max_len=41).axes == 4


# ---- the input vectors ----------------------------------------------------------------------------------------------


@given(st.lists(PATHS, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_vectors_are_the_published_stacks(paths: list[list[int]]) -> None:
    encoding = build("syntactic", branching=3, max_depth=DEPTH, d_model=34)
    decays = encoding.raw_decay.detach().tanh().tolist()
    assert len(decays) == 2  # 30 of the 34 dimensions
    wanted = torch.tensor([pushed(path, decays, 3, DEPTH, 34) for path in paths], dtype=torch.float64)
    x = torch.randn(2, len(paths), 34, dtype=torch.float64)
    for positions in (tensor(*paths), tensor(*paths).expand(2, -1, -1)):
        added = encoding.embed(x, positions).detach() - x
        assert float((added - wanted).abs().max()) < 1e-12


def test_vectors_stay_finite_where_a_decay_saturates() -> None:
    encoding = build("syntactic").float()
    with torch.no_grad():
        encoding.raw_decay.fill_(30.0)
    out = encoding.table(torch.arange(20))
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert bool(encoding.raw_decay.grad.isfinite().all())


def test_by_depth_it_is_the_sinusoid_of_the_depth() -> None:
    encoding, sinusoid = build("syntactic", by="depth"), encodings.build("sinusoidal", **SIZES)
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    assert torch.equal(encoding.embed(x, torch.arange(7)), sinusoid.embed(x, depths))
    assert not list(encoding.parameters())


def test_decays_start_as_in_the_ports() -> None:
    torch.manual_seed(0)
    encoding = encodings.build("syntactic", **{**SIZES, "d_model": 480})
    assert isinstance(encoding, Syntactic)
    raw = encoding.raw_decay.detach()
    assert raw.shape == (40,)
    assert 0.7 <= float(raw.min()) < 0.75
    assert 0.95 < float(raw.max()) < 1.0


# ---- the bias -------------------------------------------------------------------------------------------------------


@given(st.lists(PATHS, min_size=1, max_size=5), st.lists(PATHS, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_distances_are_steps_through_the_lowest_common_ancestor(a: list[list[int]], b: list[list[int]]) -> None:
    distances = tree_distances(tensor(*a), tensor(*b))
    assert distances.tolist() == [[walked(x, y) for y in b] for x in a]
    assert torch.equal(distances, tree_distances(tensor(*b), tensor(*a)).T)


@pytest.mark.parametrize("by", ["path", "depth"])
def test_the_bias_is_one_value_a_head_and_distance(by: str) -> None:
    encoding = build("syntactic-bias", branching=3, max_depth=DEPTH, max_distance=3, by=by)
    rows = grown(3, 30)
    queries, keys = rows[20:25], rows
    ours = encoding.bias(tensor(*queries), tensor(*keys)).detach()
    each = encoding.bias(tensor(*queries).expand(2, -1, -1), tensor(*keys)).detach()
    assert torch.equal(each, ours.expand(2, -1, -1, -1))
    for h in range(3):
        for i, a in enumerate(queries):
            for j, b in enumerate(keys):
                row = min(walked(a, b), 3) if by == "path" else max(-3, min(len(a) - len(b), 3)) + 3
                assert ours[h, i, j] == encoding.weight[row, h]


def test_without_a_cap_each_distance_has_its_value() -> None:
    by_path, by_depth = build("syntactic-bias", max_depth=4), build("syntactic-bias", max_depth=4, by="depth")
    assert by_path.weight.shape == by_depth.weight.shape == (9, 3)
    deepest = tensor([1, 1, 1, 1], [2, 1, 1, 1], depth=4)
    assert torch.equal(by_path.bias(deepest, deepest)[:, 0, 1], by_path.weight[8])
    assert torch.equal(by_depth.bias(deepest[:1], deepest[:1] * 0)[:, 0, 0], by_depth.weight[8])
    assert isinstance(by_path.for_layer(2), SyntacticBias)
    assert by_path.for_layer(2) is by_path


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "allowed"),
    [
        (torch.tensor([0, 63]), "from 0 to 62 with branching 2 and max_depth 5, got 63"),
        (torch.tensor([-1, 0]), "from 0 to 62 with branching 2 and max_depth 5, got -1"),
        (torch.tensor([[1, 2, 1]]), "paths of 5 branches, padded with 0, got 3"),
        (torch.tensor([[1, 2, 3, 0, 0]]), "branches from 1 to 2, .*, got 3"),
        (torch.tensor([[1, -2, 0, 0, 0]]), "branches from 1 to 2, .*, got -2"),
        (torch.tensor([[1, 0, 2, 0, 0]]), "only 0 after the end of a path"),
    ],
)
def test_what_is_no_path_is_refused(positions: Tensor, allowed: str) -> None:
    encoding = build("syntactic-bias", max_depth=DEPTH)
    with pytest.raises(InputError, match=f"^positions must (be|have) {allowed}"):
        encoding.bias(positions, positions)
