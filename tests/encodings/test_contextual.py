"""Positions that content decides, against plain loops, flex attention and x-transformers."""

from __future__ import annotations

import cmath
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.encodings.samples import SIZES, assert_close, pair_by_pair, random_tensor, sigmoid, softplus, vectors
from tests.encodings.samples import build as samples_build
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import AttentionInputs, PositionalEncoding, attend, attention_logits
from toeplens.encodings.contextual import BLOCK, CumulativeBias, PaTH, PaTHFoX, accumulate


@pytest.mark.parametrize("name", ["fox", "cable"])
def test_a_sequence_does_not_depend_on_the_masks_of_others(name: str) -> None:
    """Also if its queries do not see their own token and see tokens with a gap."""
    encoding = samples_build(name, 1.0, grad=False)
    q, k, v = (random_tensor(2, 3, 8, 8, seed=n) for n in range(3))
    past = torch.ones(8, 8, dtype=torch.bool).tril()
    masks = torch.stack((past.tril(-1), past))[:, None]
    masks[..., 5:, 2] = False
    x, places = random_tensor(2, 8, 24, seed=4), torch.arange(8)

    def run(rows: slice, **options: Any) -> Tensor:
        inputs = {"key_features": encoding.key_features(x[rows]), "mask": masks[rows], "scale": 0.3, **options}
        return attend(q[rows], k[rows], v[rows], encoding=encoding, q_positions=places, k_positions=places, **inputs)

    together = run(slice(0, 2))
    assert_close(together[:1], run(slice(0, 1)), 1e-12)
    for options in ({"fused": False}, {"pairs_per_chunk": 2 * 3 * 8 * 2}):
        assert_close(together, run(slice(0, 2), **options), 1e-12)


# ---- CoPE and the relative projection -------------------------------------------------------------------------------

B, H, D, N = 2, 3, 8, 9
SCALE = D**-0.5

build = partial(samples_build, std=1.0, grad=False)


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, **more: Any) -> Tensor:
    places = torch.arange(k.shape[-2])
    told = {"encoding": encoding, "q_positions": places[: q.shape[-2]], "k_positions": places, "scale": SCALE}
    return attention_logits(q, k, **told, **more)


# ---- CoPE -----------------------------------------------------------------------------------------------------------


def cope_by_loops(encoding: PositionalEncoding, q: Tensor, k: Tensor, *, causal: bool, hidden: set[int]) -> Tensor:
    """The gates between query and key, one at a time; ``hidden`` keys have none."""
    last = encoding.positions_max - 1
    result = torch.full((B, H, q.shape[-2], k.shape[-2]), -math.inf, dtype=torch.float64)
    for b, h, i in itertools.product(range(B), range(H), range(q.shape[-2])):
        content = [float(q[b, h, i] @ k[b, h, m]) * SCALE for m in range(k.shape[-2])]
        gates = [0.0 if m in hidden else 1 / (1 + math.exp(-content[m])) for m in range(k.shape[-2])]
        for j in range(k.shape[-2]):
            if j in hidden or (causal and j > i):
                continue
            position = min(sum(gates[j : i + 1]) if j <= i else sum(gates[i + 1 : j + 1]), last)
            low = math.floor(position)
            high = math.ceil(position)
            vector = (1 - position + low) * encoding.weight[low] + (position - low) * encoding.weight[high]
            term = float(q[b, h, i] @ vector)
            result[b, h, i, j] = content[j] + (term * SCALE if encoding.scaled else term)
    return result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("hidden", [set(), {2, 5}])
@pytest.mark.parametrize("options", [{}, {"positions_max": 3}, {"positions_max": 1}, {"scaled": True}])
def test_cope_counts_the_gates_between_query_and_key(causal: bool, hidden: set[int], options: dict[str, Any]) -> None:
    encoding = build("cope", **options)
    q, k = vectors(N)
    mask = torch.tensor([j not in hidden for j in range(N)])[None, None, None] if hidden else None
    ours = logits(encoding, q, k, causal=causal, mask=mask)
    assert_close(ours, cope_by_loops(encoding, q, k, causal=causal, hidden=hidden), 1e-10)


@pytest.mark.parametrize("positions_max", [4, 16])
def test_cope_matches_x_transformers(positions_max: int) -> None:
    ours = build("cope", positions_max=positions_max)
    theirs = x_transformers.CoPE(D, H, positions_max).double()
    with torch.no_grad():
        theirs.pos_emb.copy_(ours.weight)
    q, k = vectors(40)
    content = (q @ k.transpose(-2, -1) * SCALE).masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf)
    assert_close(logits(ours, q, k), content + theirs(q, content).detach(), 1e-12)


# ---- relative projection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_distance", [4, 1024])
def test_the_relative_projection_matches_x_transformers(max_distance: int) -> None:
    ours = build("relative-projection", max_distance=max_distance, basis=5)
    theirs = x_transformers.RelativeProjPositionalBias(24, H, num_distance_basis=5, max_dist=max_distance).double()
    theirs.to_distance_weights[0].load_state_dict(ours.mix.state_dict())
    with torch.no_grad():
        theirs.distance_bank.copy_(ours.bank)
    x, p = torch.randn(B, N, 24, dtype=torch.float64), torch.arange(N)
    keys = torch.zeros(B, H, N, D, dtype=torch.float64)
    seen = AttentionInputs(keys, keys, p, ours.key_features(x))
    assert_close(ours.bias(p, p, seen), theirs(x).detach(), 1e-12)
    last = AttentionInputs(keys[:, :, -2:], keys, p[-2:], ours.key_features(x))
    assert_close(ours.bias(p[-2:], p, last), theirs(x[:, -2:], N).detach(), 1e-12)


def test_the_relative_projection_is_a_product_with_the_bank() -> None:
    encoding = build("relative-projection")
    assert encoding.bank.shape == (16, 64)  # 1024 distances, but at most max_len
    x = torch.randn(B, 5, 24, dtype=torch.float64)
    queries, keys = torch.tensor([3, 70, 100, 5, 66]), torch.tensor([0, 3, 6, 40, 2])
    zeros = torch.zeros(B, H, 5, D, dtype=torch.float64)
    bias = encoding.bias(queries, keys, AttentionInputs(zeros, zeros, torch.arange(5), encoding.key_features(x)))
    for b, h, (n, i) in itertools.product(range(B), range(H), enumerate(queries.tolist())):
        mixed = encoding.mix.weight[16 * h : 16 * h + 16] @ x[b, n] + encoding.mix.bias[16 * h : 16 * h + 16]
        for m, j in enumerate(keys.tolist()):
            expected = float(mixed @ encoding.bank[:, i - j]) if 0 <= i - j < 64 else 0.0
            assert abs(float(bias[b, h, n, m]) - expected) < 1e-10


# ---- biases that add up along the sequence --------------------------------------------------------------------------

N_SUMS = 11
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fox", {}),
    ("cable", {}),
    ("cable", {"weighted": False}),
    ("cable", {"kernelised": True}),
    ("cable", {"step": "softplus", "weighted": False}),
]
every_case = pytest.mark.parametrize(("name", "options"), CASES)

build_sums = partial(samples_build, std=0.5)


def content(length: int = N_SUMS, seed: int = 1) -> Tensor:
    return torch.randn(B, length, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def visible_inputs(
    encoding: CumulativeBias, x: Tensor, *, rows: Tensor | None = None, causal: bool = True
) -> AttentionInputs:
    keys = torch.zeros(B, H, x.shape[1], D, dtype=torch.float64)
    rows = torch.arange(x.shape[1]) if rows is None else rows
    return AttentionInputs(keys[:, :, : rows.shape[-1]], keys, rows, encoding.key_features(x), causal=causal)


def by_loops(name: str, options: dict[str, Any], encoding: CumulativeBias, x: Tensor) -> Tensor:
    """The published sums over the tokens between key and query, one at a time."""
    bias = torch.zeros(B, H, x.shape[1], x.shape[1], dtype=torch.float64)

    def linear(layer: Any, b: int, h: int, m: int) -> float:
        return float(layer.weight[h] @ x[b, m] + layer.bias[h])

    for b, h, i, j in itertools.product(range(B), range(H), range(x.shape[1]), range(x.shape[1])):
        between = range(j + 1, i + 1) if j <= i else range(i + 1, j + 1)
        if name == "fox":
            gates = (1 / (1 + math.exp(-linear(encoding.gate, b, h, m))) for m in between)
            bias[b, h, i, j] = sum(math.log(gate) for gate in gates)
            continue
        step = softplus if options.get("step") == "softplus" else lambda z: max(0.0, z)
        total = sum(step(linear(encoding.stride, b, h, m)) for m in between)
        total = math.log(total**2 + 1) if options.get("kernelised") else total
        weighted = options.get("weighted", True)
        bias[b, h, i, j] = -total * (softplus(linear(encoding.weight, b, h, i)) if weighted else 1)
    return bias


@every_case
def test_the_bias_sums_over_the_tokens_between(name: str, options: dict[str, Any]) -> None:
    encoding, x = build_sums(name, **options).requires_grad_(False), content(7)
    expected = by_loops(name, options, encoding, x)
    p = torch.arange(7)
    assert_close(encoding.bias(p, p, visible_inputs(encoding, x, causal=False)), expected, 1e-10)
    some = torch.tensor([[2, 6], [0, 3]])
    picked = encoding.bias(p[:2], p, visible_inputs(encoding, x, rows=some))
    assert_close(picked, torch.stack([expected[b, :, some[b]] for b in range(B)]), 1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "options"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.heavy) for case in CASES[2:])]
)
def test_flex_attention_matches_attention_with_the_bias(name: str, options: dict[str, Any]) -> None:
    encoding = build_sums(name, **options)
    generator = torch.Generator().manual_seed(2)
    x = content().requires_grad_()
    q, k, v = (torch.randn(B, H, N_SUMS, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    p, notes = torch.arange(N_SUMS), encoding.key_features(x)
    past = create_block_mask(lambda b, h, i, j: i >= j, None, None, N_SUMS, N_SUMS, device="cpu")
    still = AttentionInputs(q, k, p, notes.detach(), scale=0.3)
    flexed = flex_attention(q, k, v, score_mod=encoding.score_mod(p, p, still), block_mask=past, scale=0.3)
    explicit = attend(
        q,
        k,
        v,
        encoding=encoding,
        q_positions=p,
        k_positions=p,
        scale=0.3,
        key_features=still.key_features,
        fused=False,
    )
    assert_close(flexed, explicit, 1e-6)  # the function's sums are in float32
    function = encoding.score_mod(p, p, AttentionInputs(q, k, p, notes))
    pairs = torch.meshgrid(torch.arange(B), torch.arange(H), p, p, indexing="ij")
    zero = torch.zeros((), dtype=torch.float64)
    mixed = torch.randn(B, H, N_SUMS, N_SUMS, dtype=torch.float64, generator=generator)
    by_function = torch.autograd.grad((function(zero, *pairs) * mixed).sum(), x, retain_graph=True)[0]
    by_bias = torch.autograd.grad((encoding.bias(p, p, AttentionInputs(q, k, p, notes)) * mixed).sum(), x)[0]
    assert_close(by_function, by_bias, 1e-4)


def test_near_offsets_stay_exact_at_large_positions() -> None:
    """A running sum of 10^7 has steps of 1 in float32; the difference of neighbours must not."""
    encoding, x = build_sums("fox"), content()
    attention_inputs = visible_inputs(encoding, x)
    p, far = (
        torch.arange(N_SUMS),
        AttentionInputs(
            attention_inputs.q, attention_inputs.k, attention_inputs.rows, attention_inputs.key_features + 1e7
        ),
    )
    near = encoding.bias(p, p, attention_inputs)
    assert_close(encoding.bias(p, p, far), near, 1e-8)
    i, j = torch.meshgrid(p, p, indexing="ij")
    score = encoding.score_mod(p, p, far)(torch.zeros(()), torch.tensor(0), torch.tensor(0), i, j)
    assert_close(score, near[0, 0], 1e-5)


def test_the_forgetting_gate_matches_x_transformers() -> None:
    ours = build_sums("fox", bias_init=5.0)
    theirs = x_transformers.DataDependentAlibi(24, H, causal=True).double()
    fresh = encodings.build("fox", **SIZES, bias_init=5.0)
    assert torch.equal(fresh.gate.bias.double(), theirs.to_forget_gates[0].bias)
    theirs.to_forget_gates[0].load_state_dict(ours.gate.state_dict())
    x, p = content(), torch.arange(N_SUMS)
    assert_close(ours.bias(p, p, visible_inputs(ours, x)).tril(), theirs(x).tril(), 1e-12)


# ---- angles ---------------------------------------------------------------------------------------------------------

N_ANGLE, W = 6, 24
PLACES = torch.tensor([-5, 0, 1, 9, 300, 12])

build_angle = partial(samples_build, std=0.5, grad=False)


def content_angle() -> tuple[Tensor, Tensor, Tensor]:
    return *vectors(), random_tensor(B, N_ANGLE, W, seed=3)


def logits_angle(encoding: PositionalEncoding, q: Tensor, k: Tensor, x: Tensor, places: Tensor = PLACES) -> Tensor:
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": SCALE, "causal": False}
    return attention_logits(q, k, key_features=encoding.key_features(x), **told)


def by_angles(q: Tensor, k: Tensor, angles: Any, pairing: str) -> Tensor:
    """RoPE's products at the angles [sequence][head][token][pair]."""

    def factor(b: int, h: int, i: int, j: int, t: int) -> complex:
        return cmath.exp(1j * (angles[b][h][i][t] - angles[b][h][j][t]))

    return pair_by_pair(q, k, factor, pairing).real * SCALE


# ---- Selective RoPE -------------------------------------------------------------------------------------------------


def angles_by_loops(encoding: Any, x: Tensor, base: float) -> list[list[list[float]]]:
    """[head][token][pair] of one sequence [N, W], a step after the other."""
    width = W // H
    rows = []
    for token in x:
        parts = [token[h * width : (h + 1) * width] for h in range(H)]
        rows.append(torch.cat([part / math.sqrt(float(part @ part) + 1e-6) for part in parts]))
    phi = [encoding.up.weight @ (encoding.down.weight @ row) for row in rows]
    angles: list[list[list[float]]] = [[] for _ in range(H)]
    for h in range(H):
        sums = [0.0] * (D // 2)
        for n in range(N_ANGLE):
            for t in range(D // 2):
                channel = h * (D // 2) + t
                if encoding.conv is None:
                    step = float(phi[n][channel]) - (float(phi[n - 1][channel]) if n else 0.0)
                else:
                    kernel = encoding.conv[h, t]
                    last = len(kernel) - 1
                    step = sum(float(kernel[last - m] * phi[n - m][channel]) for m in range(min(n, last) + 1))
                    step = step * sigmoid(step) if encoding.activation == "silu" else step
                if encoding.constant is not None:
                    step += math.exp(float(encoding.constant[h, 0, t]))
                if encoding.gate is not None:
                    step *= sigmoid(float(encoding.gate.weight[h] @ rows[n] + encoding.gate.bias[h]))
                sums[t] += step
            angles[h].append([s * base ** (-2 * t / D) for t, s in enumerate(sums)])
    return angles


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conv_size": 1, "activation": "none", "gate": False},
        {"conv_size": 3, "bias": True, "base": 100.0, "pairing": "interleaved"},
        {"conv_size": None, "rank": 2},
        {"conv_size": None, "gate": False, "bias": True},
    ],
)
def test_selective_rope_rotates_by_the_sum_of_token_steps(options: dict[str, Any]) -> None:
    encoding = build_angle("selective-rope", **options)
    q, k, x = content_angle()
    angles = [angles_by_loops(encoding, x[b], options.get("base", 500000.0)) for b in range(B)]
    assert_close(logits_angle(encoding, q, k, x), by_angles(q, k, angles, encoding.pairing), 1e-10)


# ---- RePo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"width": 5, "base": 100.0, "pairing": "interleaved"}])
def test_repo_rotates_each_token_by_its_learned_position(options: dict[str, Any]) -> None:
    encoding = build_angle("repo", **options)
    q, k, x = content_angle()
    base, angles = options.get("base", 500000.0), []
    for b in range(B):
        angles.append([])
        for h in range(H):
            angles[b].append([])
            for token in x[b]:
                gate, told = encoding.gate.weight @ token, encoding.content.weight @ token
                hidden = [float(g) * sigmoid(float(g)) * float(c) for g, c in zip(gate, told, strict=True)]
                place = sum(float(w) * y for w, y in zip(encoding.place_of.weight[h], hidden, strict=True))
                angles[b][h].append([place * base ** (-2 * t / D) for t in range(D // 2)])
    assert_close(logits_angle(encoding, q, k, x), by_angles(q, k, angles, encoding.pairing), 1e-10)


# ---- TAPA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.5), (0.7, 0.25), (1.0, 0.75)])
@pytest.mark.parametrize("phase", ["quadratic", "linear"])
def test_tapa_logits_match_the_formula(alpha: float, share: float, phase: str) -> None:
    encoding = build_angle("tapa", alpha=alpha, share=share, phase=phase)
    q, k, x = content_angle()
    ours, first = logits_angle(encoding, q, k, x), round(share * D)
    for h, (row, i), (column, j) in itertools.product(range(H), enumerate(PLACES.tolist()), enumerate(PLACES.tolist())):
        a, b = q[1, h, row], k[1, h, column]
        angle = float(a[first:] @ b[first:]) if phase == "quadratic" else float(a[first:].sum() + b[first:].sum())
        angle *= 2 * math.pi * abs(i - j) ** alpha / math.sqrt(D - first)
        expected = float(a[:first] @ b[:first]) / math.sqrt(first) * math.cos(angle)
        assert abs(float(ours[1, h, row, column]) - expected) < 1e-10


# ---- PaTH -----------------------------------------------------------------------------------------------------------

CASES_PATH: list[tuple[str, dict[str, Any]]] = [
    ("path", {}),
    ("path", {"rank": None, "conv_size": 1, "activation": "none"}),
    ("path", {"rank": 5, "conv_size": 4}),
    ("path-fox", {}),
]
every_path = pytest.mark.parametrize(("name", "options"), CASES_PATH)

build_path = partial(samples_build, std=0.5)


def inputs(length: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, w = random_tensor(3, B, H, length, D, seed=seed)
    return q, k, w / w.norm(dim=-1, keepdim=True), 2 * random_tensor(B, H, length, seed=seed + 1).sigmoid()


def logits_by_products(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, rows: Tensor) -> Tensor:
    """q_i^T H_i ... H_{j+1} k_j with every matrix written out; for keys after the query, q . k."""
    rows = rows.expand(B, -1)
    out = q @ k.transpose(-1, -2)
    for b, h in itertools.product(range(B), range(H)):
        for a, row in enumerate(rows[b].tolist()):
            for j in range(row + 1):
                product = torch.eye(D, dtype=torch.float64)
                for m in range(j + 1, row + 1):
                    one = torch.eye(D, dtype=torch.float64) - beta[b, h, m] * torch.outer(w[b, h, m], w[b, h, m])
                    product = one @ product
                out[b, h, a, j] = q[b, h, a] @ product @ k[b, h, j]
    return out


# ---- the products ---------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_path_logits_of_any_rows_in_any_order(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 13), label="length")
    count = data.draw(st.integers(1, 4), label="queries")
    by_sequence = data.draw(st.booleans(), label="by sequence")
    shape = (B, count) if by_sequence else (count,)
    numbers = data.draw(st.lists(st.integers(0, length - 1), min_size=B * count, max_size=B * count), label="rows")
    rows = torch.tensor(numbers[: math.prod(shape)]).view(shape)
    _, k, w, beta = inputs(length, seed=5)
    q = random_tensor(B, H, count, D, seed=9)
    ours = accumulate(q, k, w, beta, rows, block=data.draw(st.integers(1, 10), label="block"))
    assert float((ours - logits_by_products(q, k, w, beta, rows)).abs().max()) < 1e-12


def test_path_matches_the_published_decoding() -> None:
    length = BLOCK + 7
    q, k, w, beta = inputs(length)
    ours = accumulate(q, k, w, beta, torch.arange(length))
    cached = k[:, :, :0]
    for t in range(length):
        step, strength = w[:, :, t, :, None], beta[:, :, t, None, None]
        cached = cached - strength * (cached @ step) @ step.transpose(-1, -2)
        cached = torch.cat((cached, k[:, :, t : t + 1]), dim=2)
        expected = (cached @ q[:, :, t, :, None]).squeeze(-1)
        assert float((ours[:, :, t, : t + 1] - expected).abs().max()) < 1e-12


def test_path_gradients_are_correct() -> None:
    q, k, w = (x.requires_grad_() for x in random_tensor(3, 1, 2, 5, 3))
    beta = random_tensor(1, 2, 5, seed=4).requires_grad_()
    rows = torch.tensor([0, 4, 2, 3, 1])
    assert torch.autograd.gradcheck(lambda *x: accumulate(*x, rows, block=2), (q, k, w, beta))
    encoding, x = build_path("path-fox", rank=1), random_tensor(1, 4, 24).requires_grad_()
    q, k = (y.requires_grad_() for y in random_tensor(2, 1, 3, 4, 8, seed=6))

    def logits(q: Tensor, k: Tensor, x: Tensor, *_: Tensor) -> Tensor:
        p = torch.arange(4)
        result = attention_logits(
            q, k, encoding=encoding, q_positions=p, k_positions=p, scale=0.3, key_features=encoding.key_features(x)
        )
        return result.masked_fill(result == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(logits, (q, k, x, *encoding.parameters()), fast_mode=True)


# ---- from content to logits -----------------------------------------------------------------------------------------


def from_content(encoding: PaTH, x: Tensor, size: int, silu: bool) -> tuple[Tensor, Tensor]:
    """w and beta of each token, as the paper and the program define them, a number at a time."""
    length = x.shape[1]
    full = encoding.up.weight if encoding.down is None else encoding.up.weight @ encoding.down.weight
    before, strength = x @ full.T, x @ encoding.strength.weight.T + encoding.strength.bias
    w = torch.zeros(B, H, length, D, dtype=torch.float64)
    for n, tap in itertools.product(range(length), range(size)):
        source = n - (size - 1) + tap
        if source >= 0:
            weight = encoding.conv.weight[:, 0, tap]
            w[:, :, n] += (before[:, source] * weight).view(B, H, D)
    if silu:
        w = w / (1 + torch.exp(-w))
    return w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt(), 2 / (1 + torch.exp(-strength.transpose(1, 2)))


@every_path
def test_path_logits_match_the_formula(name: str, options: dict[str, Any]) -> None:
    encoding, length = build_path(name, **options), 9
    x, (q, k, _, _) = random_tensor(B, length, 24, seed=3), inputs(length)
    p = torch.arange(length) + 100
    with torch.no_grad():
        w, beta = from_content(encoding, x, options.get("conv_size", 3), options.get("activation", "silu") == "silu")
        expected = logits_by_products(q, k, w, beta, torch.arange(length)) * 0.3
        if isinstance(encoding, PaTHFoX):
            gate = torch.sigmoid(x @ encoding.gate.weight.T + encoding.gate.bias)
            for i in range(length):
                for j in range(i + 1):
                    expected[:, :, i, j] += gate[:, j + 1 : i + 1].log().sum(1)
        ours = attention_logits(
            q, k, encoding=encoding, q_positions=p, k_positions=p, scale=0.3, key_features=encoding.key_features(x)
        )
    past = torch.ones(length, length, dtype=torch.bool).tril()
    assert float((ours - expected)[..., past].abs().max()) < 1e-11


@every_path
def test_decoding_with_a_cache_crosses_blocks(name: str, options: dict[str, Any]) -> None:
    encoding, length = build_path(name, **options), BLOCK + 3
    x, (q, k, _, _) = random_tensor(B, length, 24, seed=3), inputs(length)
    p = torch.arange(length)
    v = random_tensor(B, H, length, 4, seed=8)
    more: dict[str, Any] = {"encoding": encoding, "scale": 0.3}
    with torch.no_grad():
        full = attend(q, k, v, q_positions=p, k_positions=p, key_features=encoding.key_features(x), **more)
        notes = encoding.key_features(x[:, :60])
        for n in range(60, length):
            new = encoding.key_features(x[:, n : n + 1], notes)
            notes, upto = torch.cat((notes, new), dim=2), slice(0, n + 1)
            places = {"q_positions": p[n : n + 1], "k_positions": p[upto], "key_features": notes}
            out = attend(q[:, :, n : n + 1], k[:, :, upto], v[:, :, upto], **places, **more)
            assert float((out[:, :, 0] - full[:, :, n]).abs().max()) < 1e-12


def test_keys_after_the_query_are_not_transformed() -> None:
    encoding, length = build_path("path-fox"), 6
    x, (q, k, _, _) = random_tensor(B, length, 24, seed=3), inputs(length)
    p = torch.arange(length)
    attention_inputs = AttentionInputs(q, k, p, encoding.key_features(x), causal=False)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    assert torch.allclose(
        encoding.score(q, k, p, p, inputs=attention_inputs)[..., future], (q @ k.transpose(-1, -2))[..., future]
    )
    bias = encoding.bias(p, p, inputs=attention_inputs)
    assert not bias[..., future].any()
    assert bool((bias[..., ~future.T & ~torch.eye(length, dtype=torch.bool)] <= 0).all())


def test_large_gate_sums_keep_their_precision() -> None:
    """A difference of sums near 10,000 keeps float32's relative precision: the sums are float64."""
    encoding, length = build_path("path-fox").float(), 20_000
    with torch.no_grad():
        encoding.gate.weight.zero_()
        encoding.gate.bias.fill_(0.3)
    rows, keys = torch.tensor([length - 1]), torch.zeros(1, H, length, D)
    seen = AttentionInputs(keys[:, :, :1], keys, rows, encoding.key_features(torch.zeros(1, length, 24)))
    steps = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    expected = steps * torch.nn.functional.logsigmoid(torch.tensor(0.3).double())
    bias = encoding.bias(rows, torch.arange(length), inputs=seen)
    assert torch.allclose(bias[0, 0, 0].double(), expected, rtol=1e-6, atol=0)
