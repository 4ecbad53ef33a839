"""Positions with several coordinates, against plain loops, a tree of linked nodes and public implementations."""

from __future__ import annotations

import cmath
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from tests.encodings.samples import (
    SIZES,
    assert_close,
    pair_by_pair,
    random_tensor,
    randomised,
    rotated_logits,
    vectors,
)
from tests.encodings.samples import build as samples_build
from torch import Tensor
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig, Swinv2Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.swin import modeling_swin as swin
from transformers.models.swinv2 import modeling_swinv2 as swinv2

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend
from toeplens.encodings.coordinates import SyntacticBias, tree_distances
from toeplens.utils import InputError

# ---- rotations by axes ----------------------------------------------------------------------------------------------

H, D = 2, 12
build = partial(samples_build, num_heads=H, head_dim=D)
PAIRINGS = pytest.mark.parametrize("pairing", ["interleaved", "half"])


def reference_logits(q: Tensor, k: Tensor, places: Tensor, turns: list, pairing: str) -> Tensor:
    """``turns[h][t]``: the frequency of each axis."""

    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        offset = (places[row] - places[column]).tolist()
        return cmath.exp(1j * sum(o * w for o, w in zip(offset, turns[h][t], strict=True)))

    return pair_by_pair(q, k, factor, pairing).real


@PAIRINGS
@pytest.mark.parametrize("shares", [None, [1, 2, 3]])
def test_axial_logits_match_the_formula(shares: list[int] | None, pairing: str) -> None:
    encoding = build("axial-rope", axes=3, axes_dims=shares, base=100.0, pairing=pairing)
    places = torch.tensor([[0, 0, 0], [1, 5, -3], [70, 2, 9], [4, 4, 100_000]])
    turns = []
    for axis, pairs in enumerate(shares or [2, 2, 2]):
        for j in range(pairs):
            turns.append([100.0 ** (-2 * j / (2 * pairs)) if a == axis else 0.0 for a in range(3)])
    q, k = vectors(4, H, D)
    expected = reference_logits(q, k, places, [turns] * H, pairing)
    assert float((rotated_logits(encoding, q, k, places) - expected).abs().max()) < 1e-10


@PAIRINGS
def test_mixed_logits_match_the_formula(pairing: str) -> None:
    encoding = build("rope-mixed", pairing=pairing)
    with torch.no_grad():
        encoding.omega.normal_()
    places = torch.tensor([[0, 0], [1, -3], [70, 9], [4, 1000]])
    q, k = vectors(4, H, D)
    expected = reference_logits(q, k, places, encoding.omega.tolist(), pairing)
    assert float((rotated_logits(encoding, q, k, places) - expected).abs().max()) < 1e-10


def test_mixed_frequencies_start_orthogonal_with_published_magnitudes() -> None:
    omega = build("rope-mixed").omega.detach()
    first, second = omega.chunk(2, dim=1)
    lengths = torch.tensor([10.0 ** (-4 * t / D) for t in range(D // 4)])
    for half in (first, second):
        torch.testing.assert_close(half.norm(dim=-1), lengths.expand(H, -1))
        unit = half / half.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(unit, unit[:, :1].expand_as(unit))  # one direction a head
    torch.testing.assert_close((first * second).sum(-1), torch.zeros(H, D // 4), rtol=0, atol=1e-6)
    assert not torch.allclose(first[0], first[1])
    assert not torch.equal(build("rope-mixed").for_layer(1).omega, omega)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), st.data())
def test_one_dimensional_positions_are_raster_positions(grid: list[int], data: st.DataObject) -> None:
    encoding = build("axial-rope", axes=len(grid), grid=grid)
    numbers = data.draw(st.lists(st.integers(0, math.prod(grid) - 1), min_size=1, max_size=9))
    placed = encoding.to_positions(torch.tensor(numbers))
    assert np.array_equal(placed.T.numpy(), np.stack(np.unravel_index(numbers, grid)))
    beyond = encoding.to_positions(torch.tensor(numbers) - math.prod(grid))
    assert torch.equal(beyond, placed - torch.tensor([grid[0], *[0] * (len(grid) - 1)]))


def test_the_kernel_matches_the_rotation() -> None:
    offsets = torch.tensor([[0, 0], [3, -2], [7, 100]])
    axial = build("axial-rope", base=50.0)
    kernel = axial.kernel(offsets)
    assert kernel.shape == (1, D // 2, 3)
    for t in range(D // 2):
        axis, j = divmod(t, D // 4)
        for n, offset in enumerate(offsets.tolist()):
            assert abs(complex(kernel[0, t, n]) - cmath.exp(1j * offset[axis] * 50.0 ** (-j / (D // 4)))) < 1e-12
    assert torch.equal(axial.kernel(torch.tensor([4])), axial.kernel(torch.tensor([[4, 4]])))
    assert build("axial-rope", grid=[4, 4]).kernel(torch.tensor([4])) is None
    assert build("rope-mixed").kernel(offsets).shape == (H, D // 2, 3)


# ---- public implementations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lang", "pixel"])
@pytest.mark.parametrize("grid", [(5, 7), (3, 4, 5)])
def test_axial_rope_matches_rotary_embedding_torch(grid: tuple[int, ...], kind: str) -> None:
    axes, length = len(grid), math.prod(grid)
    theirs = RotaryEmbedding(D // axes, freqs_for=kind)
    freqs = theirs.get_axial_freqs(*grid)
    ours = build("axial-rope", axes=axes, grid=list(grid), frequencies=kind)
    q, k = vectors(length, H, D, torch.float32)
    places = ours.to_positions(torch.arange(length))
    turned = [apply_rotary_emb(freqs, x.unflatten(2, grid)).flatten(2, 1 + axes) for x in (q, k)]
    assert float((rotated_logits(ours, q, k, places) - turned[0] @ turned[1].mT).abs().max()) < 5e-5


def qwen_tables(kind: str) -> tuple[PositionalEncoding, Any]:
    settings = {"hidden_size": H * 128, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": 128}
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    if kind == "qwen2":
        config = Qwen2VLTextConfig(**settings, rope_parameters={**rope, "mrope_section": [16, 24, 24]})
        return build("mrope", head_dim=128), qwen2_vl.Qwen2VLRotaryEmbedding(config)
    config = Qwen3VLTextConfig(**settings, rope_parameters={**rope, "mrope_section": [24, 20, 20]})
    return build("mrope", head_dim=128, interleaved_sections=True), qwen3_vl.Qwen3VLTextRotaryEmbedding(config)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_m_rope_matches_qwen_vl(kind: str) -> None:
    ours, theirs = qwen_tables(kind)
    generator = torch.Generator().manual_seed(3)
    places = torch.randint(0, 128, (2, 10, 3), generator=generator)
    q, k = vectors(10, H, 128, torch.float32)
    cos, sin = theirs(q, places.permute(2, 0, 1))
    for a, b in zip(ours.rotate(q, k, places, places), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert float((a - b).abs().max()) < 5e-5


def test_axial_rope_matches_the_qwen2_vl_vision_tower() -> None:
    config = Qwen2VLVisionConfig(embed_dim=H * 32, num_heads=H)
    theirs = qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)
    ours = build("axial-rope", head_dim=32, pairing="half", grid=[6, 9])
    places = ours.to_positions(torch.arange(54))
    q, k = vectors(54, H, 32, torch.float32)
    cos, sin = theirs(q, places)
    their_q, their_k = qwen2_vl.apply_rotary_pos_emb_vision(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for a, b in zip(ours.rotate(q, k, places, places), (their_q, their_k), strict=True):
        assert float((a - b.transpose(1, 2)).abs().max()) < 2e-5


# ---- options --------------------------------------------------------------------------------------------------------


def test_default_pair_split_between_axes() -> None:
    assert build("axial-rope", head_dim=14).axis_of.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert build("mrope", head_dim=128).axis_of.bincount().tolist() == [16, 24, 24]
    assert build("mrope", head_dim=128, interleaved_sections=True).axis_of.bincount().tolist() == [24, 20, 20]
    for head_dim, interleaved in itertools.product(range(2, 40, 2), (False, True)):
        assert len(build("mrope", head_dim=head_dim, interleaved_sections=interleaved).axis_of) == head_dim // 2
    with pytest.raises(InputError, match=r"^head_dim must .*, got 6\.$"):
        build("rope-mixed", head_dim=6)


# ---- windows of images ----------------------------------------------------------------------------------------------

H_PLANE, D_PLANE = SIZES["num_heads"], SIZES["head_dim"]
WINDOWS = pytest.mark.parametrize("window", [(7, 7), (3, 5), (1, 4)])

build_plane = partial(samples_build, std=1.0)


def raster(window: tuple[int, int]) -> Tensor:
    return torch.cartesian_prod(torch.arange(window[0]), torch.arange(window[1]))


@WINDOWS
def test_swin_matches_transformers(window: tuple[int, int]) -> None:
    theirs = randomised(swin.SwinRelativePositionBias(H_PLANE, window)).double()
    ours = build_plane("swin", window=window)
    ours.load_state_dict({"weight": theirs.relative_position_bias_table})
    places = raster(window)
    assert_close(ours.bias(places, places), theirs()[0], 0.0)
    assert torch.equal(ours.to_positions(torch.arange(len(places))), places)
    numbers = torch.arange(len(places))
    assert_close(ours.bias(numbers, numbers), theirs()[0], 0.0)


@pytest.mark.parametrize("pretrained", [None, (12, 6)])
@pytest.mark.parametrize("window", [(8, 8), (3, 5)])
def test_swin_v2_matches_transformers(window: tuple[int, int], pretrained: tuple[int, int] | None) -> None:
    """The whole attention: cosine, factor, bias. They form the table of offsets in float32: 1e-6 is asked."""
    config = Swinv2Config(attention_probs_dropout_prob=0.0, qkv_bias=True)
    theirs = swinv2.Swinv2SelfAttention(
        config, H_PLANE * D_PLANE, H_PLANE, window, [0, 0] if pretrained is None else list(pretrained)
    )
    theirs = randomised(theirs.double(), 0.2).eval()
    with torch.no_grad():
        theirs.logit_scale.flatten().copy_(torch.tensor([0.0, 2.0, 9.0]))  # the last over the bound, log 100
    ours = build_plane("swin-v2", window=window, pretrained_window=pretrained, cosine=True)
    network = theirs.continuous_position_bias_mlp
    ours.load_state_dict(
        {
            "inward.weight": network[0].weight,
            "inward.bias": network[0].bias,
            "outward.weight": network[2].weight,
            "log_factor": theirs.logit_scale.flatten(),
        }
    )
    places = raster(window)
    x = random_tensor(2, len(places), H_PLANE * D_PLANE)
    q, k, v = (
        layer(x).unflatten(-1, (H_PLANE, D_PLANE)).transpose(1, 2) for layer in (theirs.query, theirs.key, theirs.value)
    )
    assert ours.scale == 1
    told = {"q_positions": places, "k_positions": places, "scale": ours.scale, "causal": False}
    for fused in (True, False):
        out = attend(q, k, v, encoding=ours, fused=fused, **told)
        assert_close(out.transpose(1, 2).flatten(-2), theirs(x)[0], 1e-6)


def test_the_swin_v2_bias_matches_the_formula() -> None:
    ours = build_plane("swin-v2", window=(4, 9), hidden=5)
    w = {name: value.detach() for name, value in ours.named_parameters()}
    offsets = [(0, 0), (3, -8), (-1, 2), (100, 7), (-5, -300)]
    kernel = ours.kernel(torch.tensor(offsets))
    assert kernel is not None
    for n, offset in enumerate(offsets):
        u = [
            math.copysign(math.log2(1 + 8 * abs(d) / (size - 1)) / 3, d) if d else 0.0
            for d, size in zip(offset, (4, 9), strict=True)
        ]
        hidden = [
            max(0.0, float(w["inward.weight"][m] @ torch.tensor(u, dtype=torch.float64) + w["inward.bias"][m]))
            for m in range(5)
        ]
        for h in range(H_PLANE):
            out = sum(float(w["outward.weight"][h, m]) * hidden[m] for m in range(5))
            assert float(kernel[h, n].detach()) == pytest.approx(16 / (1 + math.exp(-out)), abs=1e-12)


@pytest.mark.parametrize("name", ["swin", "swin-v2"])
@pytest.mark.parametrize("grid", [(3, 4), (40, 40)])
def test_scattered_positions_match_the_full_grid(name: str, grid: tuple[int, int]) -> None:
    """Few places far apart are worked pair by pair, many near ones by a table of offsets."""
    encoding = build_plane(name, window=(3, 4))
    places = raster(grid)
    whole = encoding.bias(places, places)
    few = torch.tensor([0, len(places) // 2 + 1, len(places) - 1])
    assert_close(encoding.bias(places[few], places[few]), whole[:, few][:, :, few], 1e-12)
    scattered = torch.stack((places[few], places[few.flip(0)]))
    by_row = encoding.bias(scattered, scattered)
    assert_close(by_row[0], encoding.bias(scattered[0], scattered[0]), 1e-12)
    assert_close(by_row[1], encoding.bias(scattered[1], scattered[1]), 1e-12)


def test_swin_clips_offsets_beyond_its_window() -> None:
    encoding = build_plane("swin", window=(3, 4))
    kernel = encoding.kernel(torch.tensor([[2, -3], [7, -3], [2, -100], [9, -9]]))
    assert kernel is not None
    assert_close(kernel, kernel[:, :1].expand(-1, 4), 0.0)


def test_swin_v2_accepts_fractions_and_swin_refuses_them() -> None:
    half = torch.tensor([[0.5, 0.0], [0.0, 2.5]])
    wide, twice = build_plane("swin-v2", window=(5, 5)), build_plane("swin-v2", window=(9, 9))
    twice.load_state_dict(wide.state_dict())
    assert_close(wide.bias_at(*(half * 2).unbind(-1)), twice.bias_at(*(half * 4).long().unbind(-1)), 1e-12)
    with pytest.raises(InputError, match=r"^positions must be integers"):
        build_plane("swin").bias(half, half)


# ---- trees ----------------------------------------------------------------------------------------------------------

DEPTH = 5
PATHS = st.lists(st.integers(1, 3), max_size=DEPTH)

build_tree = partial(samples_build, std=0.5)


def tensor(*paths: list[int], depth: int = DEPTH) -> Tensor:
    return torch.tensor([path + [0] * (depth - len(path)) for path in paths])


def tree_paths(branching: int, count: int) -> list[list[int]]:
    """The paths of the first nodes of a tree that grows level by level."""
    queue: list[list[int]] = [[]]
    for n in range(count):
        queue += [[*queue[n], branch] for branch in range(1, branching + 1)]
    return queue[:count]


def tree_distance(a: list[int], b: list[int]) -> int:
    """Steps from one node up and down to the other, counted by climbing from the deeper until they meet."""
    steps = 0
    while a != b:
        if len(a) >= len(b):
            a = a[:-1]
        else:
            b = b[:-1]
        steps += 1
    return steps


def stack_vector(path: list[int], decays: list[float], branching: int, depth: int, d_model: int) -> list[float]:
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
def test_one_dimensional_positions_are_nodes_in_level_order(branching: int) -> None:
    encoding = build_tree("syntactic-bias", branching=branching)
    placed = encoding.to_positions(torch.arange(64).view(2, 32))
    assert placed.shape == (2, 32, encoding.axes)
    assert torch.equal(placed.flatten(0, 1), tensor(*tree_paths(branching, 64), depth=encoding.axes))


# ---- the input vectors ----------------------------------------------------------------------------------------------


@given(st.lists(PATHS, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_tree_vectors_match_the_published_stacks(paths: list[list[int]]) -> None:
    encoding = build_tree("syntactic", branching=3, max_depth=DEPTH, d_model=34)
    decays = encoding.raw_decay.detach().tanh().tolist()
    assert len(decays) == 2  # 30 of the 34 dimensions
    expected = torch.tensor([stack_vector(path, decays, 3, DEPTH, 34) for path in paths], dtype=torch.float64)
    x = torch.randn(2, len(paths), 34, dtype=torch.float64)
    for positions in (tensor(*paths), tensor(*paths).expand(2, -1, -1)):
        added = encoding.embed(x, positions).detach() - x
        assert float((added - expected).abs().max()) < 1e-12


def test_vectors_stay_finite_where_a_decay_saturates() -> None:
    encoding = build_tree("syntactic").float()
    with torch.no_grad():
        encoding.raw_decay.fill_(30.0)
    out = encoding.table(torch.arange(20))
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert bool(encoding.raw_decay.grad.isfinite().all())


def test_depth_encoding_is_the_sinusoid_of_the_depth() -> None:
    encoding, sinusoid = build_tree("syntactic", by="depth"), encodings.build("sinusoidal", **SIZES)
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    depths = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    assert torch.equal(encoding.embed(x, torch.arange(7)), sinusoid.embed(x, depths))
    assert not list(encoding.parameters())


# ---- the bias -------------------------------------------------------------------------------------------------------


@given(st.lists(PATHS, min_size=1, max_size=5), st.lists(PATHS, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_distances_are_path_lengths_in_the_tree(a: list[list[int]], b: list[list[int]]) -> None:
    distances = tree_distances(tensor(*a), tensor(*b))
    assert distances.tolist() == [[tree_distance(x, y) for y in b] for x in a]
    assert torch.equal(distances, tree_distances(tensor(*b), tensor(*a)).T)


@pytest.mark.parametrize("by", ["path", "depth"])
def test_the_bias_is_one_value_per_head_and_distance(by: str) -> None:
    encoding = build_tree("syntactic-bias", branching=3, max_depth=DEPTH, max_distance=3, by=by)
    rows = tree_paths(3, 30)
    queries, keys = rows[20:25], rows
    ours = encoding.bias(tensor(*queries), tensor(*keys)).detach()
    each = encoding.bias(tensor(*queries).expand(2, -1, -1), tensor(*keys)).detach()
    assert torch.equal(each, ours.expand(2, -1, -1, -1))
    for h, (i, a), (j, b) in itertools.product(range(3), enumerate(queries), enumerate(keys)):
        row = min(tree_distance(a, b), 3) if by == "path" else max(-3, min(len(a) - len(b), 3)) + 3
        assert ours[h, i, j] == encoding.weight[row, h]


def test_without_a_cap_each_distance_has_its_value() -> None:
    by_path, by_depth = build_tree("syntactic-bias", max_depth=4), build_tree("syntactic-bias", max_depth=4, by="depth")
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
        (torch.tensor([[1, 2, 1]]), "paths of 5 branches, padded with 0, got 3"),
        (torch.tensor([[1, 2, 3, 0, 0]]), "branches from 1 to 2, .*, got 3"),
        (torch.tensor([[1, 0, 2, 0, 0]]), "only 0 after the end of a path"),
    ],
)
def test_invalid_paths_are_refused(positions: Tensor, allowed: str) -> None:
    encoding = build_tree("syntactic-bias", max_depth=DEPTH)
    with pytest.raises(InputError, match=f"^positions must (be|have) {allowed}"):
        encoding.bias(positions, positions)
