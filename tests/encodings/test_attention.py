"""Attention with an encoding: chunks, gradients, groups, windows, caps; what is formed once, or not at all."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import REPRESENTATIVES
from tests.encodings.samples import SIZES, random_tensor, randomised
from tests.encodings.samples import build as samples_build
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import (
    PositionalEncoding,
    attend,
    attention_logits,
    attention_weights,
    cpu_attention,
    fixed_bias,
)
from toeplens.encodings import build as build_blocks
from toeplens.encodings.attention import PAIRS_PER_CHUNK
from toeplens.encodings.conformance import Specimen
from toeplens.encodings.cpu_attention import attend_blocked, blocked_is_faster
from toeplens.utils import InputError

# ---- chunks, gradients, widths --------------------------------------------------------------------------------------

B, N = 2, 12
KINDS = ("nope", "rope", "alibi", "t5", "mla", "fox", "shaw", "cope", "urpe", "dape-v2", "path", "carope")

build = partial(samples_build, std=1.0)


def inputs(encoding: PositionalEncoding, length: int = N) -> dict[str, Any]:
    torch.manual_seed(1)
    q, k = (torch.randn(B, 3, length, encoding.query_dim, dtype=torch.float64) for _ in range(2))
    x = torch.randn(B, length, 24, dtype=torch.float64)
    positions = torch.arange(length)
    common = {"encoding": encoding, "q_positions": positions, "k_positions": positions, "scale": 0.4}
    return {"q": q, "k": k, "key_features": encoding.key_features(x), **common}


def values(length: int = N) -> Tensor:
    return torch.randn(B, 3, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", KINDS)
def test_chunks_of_queries_have_the_same_gradients(name: str) -> None:
    """Chunks are recomputed in the backward pass, so that memory is linear there too: nothing is lost by it."""
    encoding = build(name)
    gradients = []
    for at_once in (PAIRS_PER_CHUNK, B * 3 * N * 5):
        args = inputs(encoding)
        leaves = [args["q"].requires_grad_(), args["k"].requires_grad_(), values().requires_grad_()]
        encoding.zero_grad()
        out = attend(
            v=leaves[-1], pairs_per_chunk=at_once, **{**args, "key_features": inputs(encoding)["key_features"]}
        )
        (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
        gradients.append([leaf.grad for leaf in (*leaves, *encoding.parameters()) if leaf.grad is not None])
    assert len(gradients[0]) == len(gradients[1])
    for whole, parts in zip(*gradients, strict=True):
        assert torch.allclose(whole, parts, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["rope", "alibi", "fox"])
@pytest.mark.parametrize("width", [4, 20])
def test_values_can_differ_in_width_from_queries(name: str, width: int) -> None:
    args = inputs(build(name))
    v = torch.randn(B, 3, N, width, dtype=torch.float64)
    assert torch.allclose(attend(v=v, **args), attention_weights(**args) @ v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [partial(attend, v=values()), attention_logits, attention_weights])
def test_causal_queries_must_be_among_the_keys(form: Callable[..., Tensor]) -> None:
    args = inputs(build("alibi"))
    fewer = {
        "k": args.pop("k")[:, :, :4],
        "k_positions": args.pop("k_positions")[:4],
        "key_features": args.pop("key_features"),
    }
    if "v" in getattr(form, "keywords", {}):
        fewer["v"] = values(4)
    with pytest.raises(
        InputError,
        match=r"^q must have at most as many queries as there are keys \(4\) in causal attention, .*, got 12\.$",
    ):
        form(**args, **fewer)
    assert form(**args, **fewer, rows=torch.arange(N) % 4).shape[:3] == (B, 3, N)
    assert form(**args, **fewer, causal=False).shape[:3] == (B, 3, N)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "shaw"])  # which adds to the values too
def test_dropout_is_applied_to_the_weights(name: str) -> None:
    args = inputs(build(name))
    torch.manual_seed(3)
    ones = torch.ones(B, 3, N, 8, dtype=torch.float64)
    out = attend(v=ones, dropout=0.5, **args)
    assert not torch.allclose(out, attend(v=ones, **args))
    assert torch.allclose(out, out[..., :1].expand_as(out), rtol=0, atol=1e-14)


class CountingBias(encodings.OffsetBias):
    """Counts how often its bias is formed."""

    citation = "this test"
    formed = 0

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        type(self).formed += 1
        return super().bias(q_positions, k_positions)

    def kernel(self, offsets: Tensor) -> Tensor:
        return -0.1 * offsets.abs().float().expand(self.num_heads, -1)


def test_a_shared_bias_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from toeplens.encodings import registry
    from toeplens.model import Decoder, decoder_config

    monkeypatch.setitem(registry._encodings(), "counting", CountingBias)
    sizes = {"vocab_size": 11, "d_model": 24, "num_heads": 3, "d_ff": 8, "max_len": 16, "num_layers": 5}
    tokens = torch.randint(11, (2, 9))
    for readout, times in (("mean", 1), ("last", 2)):  # the last layer asks for one row alone
        model = Decoder(decoder_config(encoding="counting", readout=readout, **sizes)).eval()
        CountingBias.formed = 0
        fused = model(tokens)
        assert CountingBias.formed == times
        assert torch.allclose(fused, model(tokens, fused=False), rtol=0, atol=1e-6)


def test_a_bias_looks_up_each_distance_once() -> None:
    lookups = []

    class Looking(CountingBias):
        """Remembers how many offsets it was asked for."""

        def kernel(self, offsets: Tensor) -> Tensor:
            lookups.append(offsets.numel())
            return super().kernel(offsets)

    near, scattered = torch.arange(100) + 7, torch.arange(4) ** 9
    bias = Looking(**SIZES)
    got = bias.bias(near, near)
    assert lookups == [199]
    assert torch.allclose(got, -0.1 * (near[:, None] - near).abs().float().expand(3, -1, -1))
    bias.bias(scattered, scattered)
    assert lookups[1] == 16


@pytest.mark.parametrize("name", ["fox", "cable"])
def test_a_low_rank_bias_is_exact_at_large_positions(name: str) -> None:
    """Running sums of thousands leave float32 three digits; relative to each chunk's start they keep five."""
    torch.manual_seed(0)
    encoding = encodings.build(name, **{**SIZES, "num_heads": 2})
    length = 3000
    q, k, v = torch.randn(3, 1, 2, length, 8).unbind(0)
    x, positions = 3 * torch.randn(1, length, 24), torch.arange(length)
    notes = encoding.key_features(x).detach()
    notes = torch.cat((notes[..., :1] * 5, notes[..., 1:]), dim=-1)
    assert float(notes[..., 0].max()) > 1e3
    common = {
        "encoding": encoding,
        "q_positions": positions,
        "k_positions": positions,
        "scale": 0.35,
        "key_features": notes,
    }
    exact = attend(q.double(), k.double(), v.double(), fused=False, **common)
    assert torch.allclose(attend(q, k, v, **common).double(), exact, rtol=0, atol=3e-4)
    half = attend(*(y.to(torch.bfloat16) for y in (q, k, v)), **common).double()
    assert torch.allclose(half, exact, rtol=0, atol=6e-2)


def test_the_fused_alibi_is_exact_at_large_positions() -> None:
    """Its factors are places relative to the first query: a million times a slope leaves float32 no hundredth."""
    encoding, p = encodings.build("alibi", **SIZES), torch.arange(20) + 1_048_000
    q, k, v = torch.randn(3, B, 3, 20, 8, generator=torch.Generator().manual_seed(4)).unbind(0)
    common = {"encoding": encoding, "q_positions": p, "k_positions": p, "scale": 0.35}
    exact = attend(q.double(), k.double(), v.double(), fused=False, **common)
    assert torch.allclose(attend(q, k, v, **common).double(), exact, rtol=0, atol=1e-5)


def test_the_fused_alibi_uses_absolute_distances() -> None:
    """A key that comes before the query and stands behind it is as far as |i - j|, which no product of places is."""
    encoding, p = encodings.build("alibi", **SIZES), torch.tensor([5, 0, 9, 2, 7, 1])
    q, k, v = torch.randn(3, B, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).unbind(0)
    common = {"encoding": encoding, "q_positions": p, "k_positions": p, "scale": 0.35}
    assert torch.allclose(attend(q, k, v, **common), attend(q, k, v, fused=False, **common), rtol=0, atol=1e-12)


# ---- groups, windows, caps, sinks -----------------------------------------------------------------------------------

H, N_OPTIONS, D = 6, 21, 8


def attention_inputs(
    name: str, length: int = N_OPTIONS, start: int = 0
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v of six heads and the arguments of attention, of an encoding with random parameters."""
    specimen = Specimen(lambda: encodings.build(name, **{**SIZES, "num_heads": H}))
    positions = specimen.positions(length, start)
    x = specimen.encoding.embed(specimen.random_content(B, length), positions)
    return *specimen.project(x), specimen.attention_arguments(x, positions)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9) -> None:
    scale = max(1.0, float(theirs.detach().abs().max()))
    assert float((ours - theirs).detach().abs().max()) <= tolerance * scale


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", [*REPRESENTATIVES, "alibi+fox+rope"])
def test_grouped_keys_match_repeated_keys(name: str, groups: int) -> None:
    q, k, v, options = attention_inputs(name)
    k, v = k[:, :groups], v[:, :groups]
    repeated = [x.repeat_interleave(H // groups, dim=1) for x in (k, v)]
    for fused in (True, False):
        assert_close(attend(q, k, v, fused=fused, **options), attend(q, *repeated, fused=fused, **options))
    assert_close(attend(q, k, v, pairs_per_chunk=1, **options), attend(q, *repeated, **options))
    assert_close(attention_weights(q, k, **options), attention_weights(q, repeated[0], **options))


@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("name", [*REPRESENTATIVES, "alibi+fox+rope"])
def test_a_window_is_a_mask(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toeplens.encodings.attention.MIN_CHUNK", 4)  # several blocks, each with its own keys
    q, k, v, options = attention_inputs(name)
    offset = torch.arange(N_OPTIONS)[:, None] - torch.arange(N_OPTIONS)
    mask = (offset >= 0) & (offset < window)
    expected = attend(q, k, v, mask=mask, fused=False, **options)
    ways: list[dict[str, Any]] = [{}, {"fused": False}, {"pairs_per_chunk": B * H * N_OPTIONS * 4}]
    for more in ways:
        assert_close(attend(q, k, v, window=window, **more, **options), expected)
    padded = torch.arange(N_OPTIONS) >= torch.tensor([0, 5])[:, None]
    wanted_padded = attend(q, k, v, mask=mask, padding=~padded, fused=False, **options)
    for more in ({"padding": ~padded}, {"mask": padded[:, None, None]}):
        assert_close(attend(q, k, v, window=window, **more, **options), wanted_padded)
    last = {**options, "q_positions": options["q_positions"][-3:]}  # with a key cache
    assert_close(attend(q[:, :, -3:], k, v, window=window, **last), expected[:, :, -3:])


def test_keys_outside_a_window_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 tokens that see 100 each: no product of more keys than a window's and a block's."""
    sizes: list[tuple[int, int]] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, *args: Any, **more: Any) -> Tensor:
        sizes.append((q.shape[-2], k.shape[-2]))
        return fused(q, k, *args, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for name in ("rope", "alibi", "t5"):
        encoding = encodings.build(name, **{**SIZES, "num_heads": 1})
        q, k, v = random_tensor(3, 1, 1, 4000, 8, dtype=torch.float32)
        p = torch.arange(4000)
        attend(q, k, v, encoding=encoding, scale=0.3, q_positions=p, k_positions=p, window=100)
    assert max(n * m for n, m in sizes) <= 512 * 612
    assert sum(n * m for n, m in sizes) < 3 * 4000 * 700


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "fox"])
def test_soft_caps_and_sinks_match_their_formulas(name: str) -> None:
    """By loops over heads and queries, in float64, to 1e-12."""
    q, k, v, options = attention_inputs(name)
    cap, sinks = 0.7, random_tensor(H, seed=3)
    plain = attention_logits(q, k, **options)
    encoding, p = options["encoding"], options["q_positions"]
    bias = torch.zeros_like(plain)
    if name == "alibi":
        bias = encoding.bias(p, p).expand_as(plain)
    out = attend(q, k, v, sinks=sinks, **options)
    for b, h, i in itertools.product(range(B), range(H), range(N_OPTIONS)):
        row = plain[b, h, i, : i + 1].exp()
        assert_close(out[b, h, i], (row @ v[b, h, : i + 1]) / (row.sum() + sinks[h].exp()), 1e-12)
    if name != "fox":
        capped = attention_logits(q, k, softcap=cap, **options)
        visible = torch.ones(N_OPTIONS, N_OPTIONS, dtype=torch.bool).tril()
        expected = cap * ((plain - bias) / cap).tanh() + bias
        assert_close(capped[..., visible], expected[..., visible], 1e-12)
        assert_close(attend(q, k, v, softcap=cap, **options), capped.softmax(-1) @ v, 1e-12)
    assert_close(
        attend(q, k, v, softcap=1e9, sinks=torch.full((H,), -math.inf), **options), attend(q, k, v, **options), 1e-6
    )


PLANE = {
    "encoding": encodings.build("axial-rope", **{**SIZES, "num_heads": H}),
    "q_positions": torch.zeros(N_OPTIONS, 3).long(),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (PLANE, r"^q_positions must have shape \[21, 2\] .*, got shape \[21, 3\]"),
    ({**PLANE, "q_positions": torch.zeros(1, N_OPTIONS).long()}, r"^q_positions must .*, got shape \[1, 21\]"),
    ({**PLANE, "q_positions": torch.zeros(B, N_OPTIONS).long()}, r"^q_positions must .*, got shape \[2, 21\]"),
    ({"q_positions": torch.zeros(N_OPTIONS).byte()}, r"^q_positions must be int32, int64 or floating point, got uint8"),
    (
        {"q": random_tensor(B, H, N_OPTIONS)},
        r"^q must be a float tensor of shape \[B, 6, Nq, d\], got torch.float64 of shape \[2, 6, 21\]",
    ),
    ({"k": random_tensor(B, 4, N_OPTIONS, D)}, r"^k must have a number of heads that divides the 6 heads of q, got 4"),
    ({"k": random_tensor(B, H, N_OPTIONS, 4)}, r"^k must be .* shape \[2, G, Nk, 8\]"),
    ({"v": random_tensor(B, 3, N_OPTIONS, D)}, r"^v must be .* shape \[2, 6, 21, dv\]"),
    ({"q_positions": torch.arange(5)}, r"^q_positions must have shape \[21\] or \[2, 21\], got shape \[5\]"),
    ({"rows": torch.arange(3)}, r"^rows must be an integer tensor of shape \[21\]"),
    ({"rows": [0, 1]}, r"^rows must be an integer tensor of shape \[21\], got list"),
    (
        {"mask": torch.ones(3, 1, 1, N_OPTIONS, dtype=torch.bool)},
        r"^mask must broadcast to .*, got shape \[3, 1, 1, 21\]",
    ),
    (
        {"mask": torch.ones(B, 1, N_OPTIONS, 1, dtype=torch.bool)},
        r"^mask must broadcast to .* with all keys, got shape \[2, 1, 21, 1\]",
    ),
    ({"padding": torch.zeros(B, N_OPTIONS)}, r"^padding must be a bool tensor of shape \[2, 21\], got torch.float32"),
    ({"window": "3"}, r"^window must be a whole number or None, got '3'"),
    ({"window": 2.5}, r"^window must be a whole number or None, got 2.5"),
    ({"window": 3, "causal": False}, r"^window must be at least 1, and attention causal, got 3"),
    ({"softcap": 0.0}, r"^softcap must be finite and over 0, got 0.0"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_incompatible_shapes_are_refused(change: dict[str, Any], sentence: str) -> None:
    q, k, v, told = attention_inputs("rope")
    with pytest.raises(InputError, match=sentence):
        attend(**{"q": q, "k": k, "v": v, **told, **change})


# ---- 16 bits and autocast -------------------------------------------------------------------------------------------

SIZES_BITS = {"d_model": 64, "num_heads": 4, "head_dim": 16, "max_len": 512}
N_BITS = 400  # positions over 256 are not whole in bfloat16
NAMES = [
    *("rope", "t5", "alibi", "sandwich", "fire", "dynamic-bias", "fox", "cable", "path", "path-fox"),
    *("grape-path", "carope", "repo", "shaw", "urpe", "liere", "rope+fox", "alibi+path"),
]
Run = Callable[[PositionalEncoding, list[Tensor]], Tensor]


def build_bits(name: str) -> PositionalEncoding:
    torch.manual_seed(0)
    parts = name.split("+")
    return randomised(encodings.build(parts if len(parts) > 1 else name, **SIZES_BITS), std=0.1)


def run_unchanged(encoding: PositionalEncoding, inputs: list[Tensor]) -> Tensor:
    q, k, v, x = inputs
    places = torch.arange(N_BITS)
    told = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": 0.25}
    return attend(q, k, v, key_features=encoding.key_features(x), **told)


def under_autocast(encoding: PositionalEncoding, inputs: list[Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return run_unchanged(encoding, inputs)


def in_bfloat16(encoding: PositionalEncoding, inputs: list[Tensor]) -> Tensor:
    return run_unchanged(copy.deepcopy(encoding).bfloat16(), [x.bfloat16() for x in inputs])


def error(name: str, run: Run) -> Tensor:
    """Relative errors of the output, and of the gradients to queries, keys and values."""
    encoding = build_bits(name)
    if run is in_bfloat16:  # whose rounded parameters are not what is measured
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter.copy_(parameter.bfloat16())
    torch.manual_seed(1)
    inputs = [torch.randn(1, 4, N_BITS, 16) for _ in range(3)] + [torch.randn(1, N_BITS, 64)]
    weights = torch.randn(1, 4, N_BITS, 16).double()
    result = []
    for way, dtype in ((run, torch.float32), (run_unchanged, torch.float64)):
        module = copy.deepcopy(encoding).to(dtype)
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = way(module, leaves)
        (out.double() * weights).sum().backward()
        grads = [x.grad for x in leaves[:3] if x.grad is not None]
        result.append([x.detach().double() for x in (out, *grads)])
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(*result, strict=True)])


@pytest.mark.parametrize(
    ("name", "wide"), [*((name, True) for name in NAMES), *((name, False) for name in ("rope", "alibi", "fox"))]
)
def test_under_autocast_queries_of_float32_are_rounded_once(
    name: str, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either path of a CPU. Products of q and k carry errors of eps |q| |k|; a bias b below a row's largest carries
    one of eps |b| at a weight of about e^b: at most eps / e. Some encodings form another product or two. Positions
    folded into q and k would be off by one part in 2^8: 100 times as much."""
    monkeypatch.setattr(cpu_attention, "_INTEL_AVX512", wide)
    plain = error("nope", under_autocast)
    scale = 4 if name == "t5" else 1  # of the logits, which it publishes
    assert (error(name, under_autocast) <= 3 * scale * plain).all()


@pytest.mark.parametrize("name", ["alibi", "sandwich", "urpe", "fox", "dynamic-bias"])
def test_bfloat16_biases_are_rounded_relative_to_their_largest_value(name: str) -> None:
    """A number added to a whole row, which a softmax does not see, costs no precision: Sandwich has 32 at 0."""
    plain = error("nope", in_bfloat16)
    assert (error(name, in_bfloat16) <= 2 * plain).all()


def test_a_fixed_bias_is_not_rounded_to_bfloat16_before_use() -> None:
    encoding, places = build_bits("sandwich"), torch.arange(N_BITS)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 4, N_BITS, 16).bfloat16() for _ in range(3))
    options = {"encoding": encoding, "q_positions": places, "k_positions": places, "scale": 0.25}
    added = fixed_bias(encoding, places, dtype=q.dtype, mask=None, causal=True)
    assert attend(q, k, v, shared_bias=added, **options).equal(attend(q, k, v, **options))


def test_xpos_checks_the_range_of_the_product_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, as autocast has on a GPU, its factors fit shorter texts than in float32."""
    encoding = encodings.build("xpos", **SIZES_BITS, scale_base=16.0)
    q = k = torch.ones(1, 4, 100, 16)
    places = torch.arange(100)
    encoding.rotate(q, k, places, places)
    monkeypatch.setattr("toeplens.encodings.kit.product_dtype", lambda x: torch.float16)
    with pytest.raises(InputError, match=r"for torch.float16"):
        encoding.rotate(q, k, places, places)


# ---- blocks on the CPU ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def prefer_blockwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor where blocks are the faster ones, whatever this one is."""
    monkeypatch.setattr(cpu_attention, "_INTEL_AVX512", False)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Line by line as it is written."""
    logits = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return logits.softmax(-1) @ v


def with_gradients(found: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)
    return [found, *torch.autograd.grad((found * weights).sum(), [x for x in leaves if x is not None])]


@given(
    texts=st.integers(1, 4),
    heads=st.integers(1, 3),
    length=st.integers(1, 40),
    width=st.integers(1, 5),
    bias=st.sampled_from([None, (1, 1), (1, 0), (0, 0)]),
    causal=st.booleans(),
    block=st.sampled_from([1, 300, 1 << 20]),
    rows=st.sampled_from([4, 13, 64]),
)
def test_blockwise_attention_matches_the_reference(
    texts: int,
    heads: int,
    length: int,
    width: int,
    bias: tuple[int, int] | None,
    causal: bool,
    block: int,
    rows: int,
):
    make = torch.Generator().manual_seed(length)
    options = {"generator": make, "dtype": torch.float64}
    q, k = torch.randn(2, texts, heads, length, width, **options)  # type: ignore[call-overload]
    v = torch.randn(texts, heads, length, width + 1, **options)  # type: ignore[call-overload]
    added = None
    if bias is not None:
        added = torch.randn(bias[0] or texts, bias[1] or heads, length, length, **options)  # type: ignore[call-overload]
    leaves = [x if x is None else x.requires_grad_() for x in (q, k, v, added)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_attention, "_BLOCK_WEIGHTS", block)
        patched.setattr(cpu_attention, "_BLOCK_QUERIES", rows)
        actual = with_gradients(attend_blocked(q, k, v, added, 0.0, 0.3, causal=causal), *leaves)
    for one, other in zip(
        actual, with_gradients(reference_attention(q, k, v, added, 0.3, causal), *leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_blockwise_dropout_has_its_rate_and_matching_gradients():
    q, k, v = torch.randn(3, 2, 4, 30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eye = torch.eye(30, dtype=torch.float64).expand(2, 4, 30, 30)
    torch.manual_seed(1)
    dropped = attend_blocked(q, k, eye, None, 0.25, 0.3, causal=True)  # the weights themselves
    weights = reference_attention(q, k, eye, None, 0.3, causal=True)
    visible = weights > 0
    remaining = dropped[visible] != 0
    assert remaining.double().mean() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(dropped[visible][remaining], weights[visible][remaining] / 0.75)
    mask = (dropped != 0) / 0.75
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)
    actual = with_gradients(attend_blocked(q, k, v, None, 0.25, 0.3, causal=True), *leaves)
    expected = with_gradients((reference_attention(q, k, eye, None, 0.3, causal=True) * mask) @ v, *leaves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "kerple-log", "fire"])
@pytest.mark.parametrize("length", [7, 24, 120])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_fused_and_explicit_attention_have_equal_gradients(
    name: str, length: int, causal: bool, wide: bool, monkeypatch: pytest.MonkeyPatch
):
    """By blocks, or by torch's own kernel on a processor with AVX-512."""
    monkeypatch.setattr(cpu_attention, "_INTEL_AVX512", wide)
    encoding = build_blocks(name, head_dim=8, num_heads=2, d_model=16, max_len=128)
    q, k, v = (torch.randn(3, 2, length, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    each = [x.requires_grad_() for x in (q, k, v)]
    places = torch.arange(length)
    options = {"encoding": encoding, "scale": 0.3, "q_positions": places, "k_positions": places, "causal": causal}
    assert blocked_is_faster(q, k) == (not wide)
    learned = [*each, *encoding.parameters()]
    with pytest.MonkeyPatch.context() as patched:
        if not wide:
            patched.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("torch"))
        actual = with_gradients(attend(q, k, v, **options), *learned)
    for one, other in zip(actual, with_gradients(attend(q, k, v, fused=False, **options), *learned), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@given(
    texts=st.integers(1, 4),
    length=st.integers(1, 90),
    name=st.sampled_from(["nope", "rope", "mla"]),
    alike=st.booleans(),
    seed=st.integers(0, 100),
)
def test_blockwise_attention_masks_padding_like_explicit_attention(
    texts: int, length: int, name: str, alike: bool, seed: int
):
    """Of keys alone; texts that are nothing but padding give 0, and no gradient."""
    make = torch.Generator().manual_seed(seed)
    encoding = build_blocks(name, head_dim=8, num_heads=2, d_model=16, max_len=128)
    width = encoding.rotary_dim if name == "mla" else 8
    q, k = torch.randn(2, texts, 2, length, width, generator=make)
    v = torch.randn(texts, 2, length, 8, generator=make)
    mask = torch.rand(1 if alike else texts, 1, 1, length, generator=make) < torch.rand(1, generator=make)
    mask[-1] = mask[-1] & (seed % 3 > 0)
    places = torch.arange(length)
    options = {"encoding": encoding, "scale": 0.3, "q_positions": places, "k_positions": places, "causal": False}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("torch's"))
        actual = with_gradients(attend(q, k, v, mask=mask, **options), *leaves)
    for one, other in zip(
        actual, with_gradients(attend(q, k, v, mask=mask, fused=False, **options), *leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    none = ~mask.any(-1)[:, 0, 0].expand(texts)
    assert all(not x[none].any() for x in actual)


def test_torch_attention_is_used_where_it_is_faster(monkeypatch: pytest.MonkeyPatch):
    short, long = torch.randn(1, 1, 65, 4), torch.randn(1, 1, 513, 4)
    assert not blocked_is_faster(short, short)
    assert blocked_is_faster(short.requires_grad_(), short)
    assert not blocked_is_faster(long.requires_grad_(), long)
    assert not blocked_is_faster(short.bfloat16(), short.bfloat16())
    assert not blocked_is_faster(short[:, :, :8], short)
    assert not blocked_is_faster(
        short.expand(40_000, 1, 65, 4), short.expand(40_000, 1, 65, 4)
    )  # too many weights to keep
    with torch.no_grad():
        assert not blocked_is_faster(short, short)
        assert blocked_is_faster(short[:, :, :64], short[:, :, :64])
    torch.func.vmap(lambda x: x if not blocked_is_faster(x, x) else pytest.fail("a transform cannot look into it"))(
        short[None]
    )
    monkeypatch.setattr(cpu_attention, "_INTEL_AVX512", True)
    learned = torch.zeros(1, 1, 65, 65, requires_grad=True)
    assert not blocked_is_faster(short, short, learned.detach())
    assert blocked_is_faster(short, short, learned)
    assert blocked_is_faster(short, short, dropout=0.1)
