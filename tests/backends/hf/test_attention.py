"""Masks and biases are distinguished by their effect, in every dtype; reading queries in parts gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.backends.hf.models import GPT, NARROW, PADDED, SIZES, TOKENS, calls_in, padded_inputs, tiny
from torch import Tensor

from toeplens.backends.hf import attention as masks
from toeplens.backends.hf import calls as calls_module
from toeplens.backends.hf.attention import AttentionFunction, bias_and_mask, mask_threshold, masking_limit
from toeplens.backends.hf.calls import Proof, prove
from toeplens.utils import InputError

PLACES = torch.arange(TOKENS)
CAUSAL, IN_WINDOW = PLACES[:, None] >= PLACES, (PLACES[:, None] - PLACES).abs() < 4
GPTJ = GPT | {"n_layer": 1, "rotary_dim": 4}
NEO = {"vocab_size": 31, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
MODELS: dict[str, tuple[dict[str, Any], list[int | None]]] = {  # sizes, windows
    "GPTJForCausalLM": (GPTJ, [None]),
    "CodeGenForCausalLM": (GPTJ, [None]),
    "GPTNeoForCausalLM": (NEO, [None, 4]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_half_precision_mask_added_in_float32_is_a_mask(name: str, dtype: torch.dtype) -> None:
    """These form their logits in float32 and add a mask that was made in the model's dtype."""
    sizes, windows = MODELS[name]
    calls = calls_in(tiny(name, **sizes).to(dtype), padded_inputs())
    assert [call.window for call in calls] == windows
    for call in calls:
        assert call.q.dtype == torch.float32
        assert (call.side, call.causal, call.bias, call.unknown) == ("decoder", True, None, None)
        lengths = call.lengths
        assert lengths is not None
        assert lengths.tolist() == [TOKENS, PADDED]


def test_large_biases_are_not_masks() -> None:
    """ALiBi's reach -16384 step by step; a mask is far below what is nearer to 0, in whatever dtype it was made."""
    away = torch.arange(0.0, 32768.0)
    alibi = -0.5 * away.view(1, 1, 1, -1) * torch.tensor([1.0, 0.25]).view(1, 2, 1, 1)
    assert mask_threshold(alibi) == masking_limit(torch.float32)
    for value in (-1e4, -65504.0, -131008.0):
        term = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(PLACES[:, None] < PLACES, value)
        assert torch.equal(term <= mask_threshold(term), term == value)
    both = alibi[..., :2048] + torch.where(away[:2048] > 2000, -65504.0, 0.0)
    assert torch.equal(both <= mask_threshold(both), (away[:2048] > 2000).expand_as(both))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        term = torch.zeros(1, 1, 4, 4, dtype=dtype).masked_fill(torch.ones(4, 4).triu(1) > 0, torch.finfo(dtype).min)
        assert torch.equal(term <= mask_threshold(term), term < 0)


def test_a_term_that_leaves_weight_is_not_a_mask() -> None:
    """The same term, beside logits that it outweighs and beside logits that outweigh it."""
    term = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(PLACES[:, None] < PLACES, -2000.0)
    logits = PLACES.expand(1, 1, TOKENS, -1)

    def weights(scale: float) -> Tensor:
        return (scale * logits + term).softmax(-1)

    bias, visible = bias_and_mask([term], [], TOKENS, PLACES, lambda bias, visible: weights(1.0))
    assert bias is None
    assert visible is not None
    assert torch.equal(visible[0, 0], PLACES[:, None] >= PLACES)
    bias, visible = bias_and_mask([term], [], TOKENS, PLACES, lambda bias, visible: weights(1000.0))
    assert visible is None
    assert bias is not None
    assert torch.equal(bias, term)
    hides = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    hides[..., 3:, :] = True  # these queries see no key, so that their weights are whatever comes of it
    scaled = weights(1.0)
    scaled[..., 3:, :] = 1 / TOKENS
    bias, visible = bias_and_mask([term], [hides], TOKENS, PLACES, lambda bias, visible: scaled)
    assert bias is None


@pytest.fixture(params=[2 * TOKENS, masks.AT_ONCE])
def query_block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two queries at a time, or all."""
    monkeypatch.setattr(masks, "AT_ONCE", request.param)
    return request.param


@pytest.mark.parametrize(
    ("mask", "causal", "reach"),
    [
        (CAUSAL, True, (None, None)),
        (CAUSAL & IN_WINDOW, True, (4, None)),
        (IN_WINDOW, False, (4, None)),
        (CAUSAL & (PLACES[:, None] // 5 == PLACES // 5), True, (None, 5)),
    ],
)
def test_masks_are_read_in_query_blocks(
    mask: Tensor, causal: bool, reach: tuple[int | None, int | None], query_block_size: int
) -> None:
    """Queries after the end of their sequence see whatever comes of it: nothing, or everything that is there."""
    visible = mask.expand(2, 1, TOKENS, TOKENS)
    assert masks.no_later_keys(visible) == causal
    assert masks.is_causal_mask(visible) == (reach == (None, None))
    assert masks.reach_of(visible, causal) == reach
    assert masks.padded_lengths(visible, causal, *reach) is None
    padded = visible & (torch.tensor([TOKENS, 9])[:, None, None, None] > PLACES)
    assert masks.reach_of(padded, causal) == reach
    for seen in (padded[1, 0, 8], torch.zeros(TOKENS, dtype=torch.bool), (PLACES > 2) & (PLACES < 9)):
        padded[1, 0, 9:] = seen
        ends = masks.padded_lengths(padded, causal, *reach)
        assert isinstance(ends, Tensor)
        assert ends.tolist() == [TOKENS, 9]
    for whole in (visible, padded):
        hidden = whole.clone()
        hidden[..., 8, 7] = False
        assert masks.padded_lengths(hidden, causal, *reach) == "some of the keys"
    for row in (1, 4, 9):  # one key after its query, in each block of queries
        later = visible.clone()
        later[..., row, row + 1] = True
        assert not causal or not masks.no_later_keys(later)
        assert not masks.is_causal_mask(later)


def test_offset_tables_have_the_precision_of_their_largest_value(query_block_size: int) -> None:
    """An error of 1e-4 of the largest is let pass, and of the smallest bias no more than that."""
    table = torch.randn(2 * TOKENS - 1, generator=torch.Generator().manual_seed(3))
    table = table / table.abs().max()
    bias = table[PLACES[:, None] - PLACES + TOKENS - 1][None]
    for size in (1e-3, 1.0, 1e3):
        for error, passes in ((0.5e-4, True), (4e-4, False)):
            planted = size * bias
            planted[0, 9, 2] += error * size
            actual = masks.by_offset(planted, None, False, False, 1e-4)
            assert (actual is not None) == passes
            if actual is not None:
                torch.testing.assert_close(actual, size * table.double(), atol=1e-4 * size, rtol=0)


@pytest.mark.parametrize("kind", ["Gemma3TextModel", "LlamaModel", "BertModel"])
def test_blocks_of_a_call_match_its_logits_and_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of windows, of all keys before without a mask that says so, and both ways: in their own places."""
    model = tiny(kind, **SIZES if kind == "BertModel" else NARROW)
    full_calls = calls_in(model)
    monkeypatch.setattr(masks, "AT_ONCE", 3 * 2 * 4 * TOKENS)
    monkeypatch.setattr(calls_module, "_BLOCK", 3 * 2 * 4 * TOKENS)
    calls = calls_in(model)
    assert len(calls) == len(full_calls) == 2
    for call, full_call in zip(calls, full_calls, strict=True):
        assert call.weights is None
        assert full_call.weights is not None
        logits, weights = torch.full(full_call.weights.shape, -torch.inf), torch.zeros(full_call.weights.shape)
        blocks = list(call.blocks())
        assert len(blocks) == 4
        for rows, first, some, shares in blocks:
            keys = slice(first, first + some.shape[-1])
            logits[:, :, rows, keys], weights[:, :, rows, keys] = some.float(), shares.float()
            assert torch.equal(call.is_visible(rows, keys).expand_as(some), some.isfinite())
        torch.testing.assert_close(logits.double(), full_call.logits(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights, full_call.weights, atol=1e-6, rtol=0)


BATCH, HEADS, LENGTH, WIDTH = 2, 4, 96, 64
EARLIER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
LARGEST = (1.0, 100.0, 1e4)
FLOAT32, HALF, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def random_qkv(size: float, dtype: torch.dtype, *, offset: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose largest logits are about ``size``.

    Queries have norms of all sizes, as in trained layers. With ``offset`` the keys have a large bias in common, as
    those of Qwen2, so that all logits of a query are large, and near each other.
    """
    draw = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, WIDTH, generator=draw, dtype=torch.float64)
    if offset:
        direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=draw, dtype=torch.float64), dim=0)
        k, q = k + size * direction, q + WIDTH**0.5 * direction
    else:
        q = q * size ** torch.rand(BATCH, HEADS, LENGTH, 1, generator=draw, dtype=torch.float64) / 3
    return q.to(dtype), k.to(dtype), v.to(dtype)


def model(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = WIDTH**-0.5,
    cap: Any = None,
    sink: Any = None,
    mask: Any = EARLIER,
) -> tuple[Tensor, Tensor]:
    """Weights [B, H, N, N] and outputs [B, N, H, d], as transformers' models make them in the dtype of the queries."""
    logits = (q @ k.transpose(-1, -2)) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    logits = logits.masked_fill(~mask, torch.finfo(q.dtype).min)
    if sink is not None:
        logits = torch.cat((logits, sink.view(1, -1, 1, 1).expand(BATCH, -1, LENGTH, 1)), -1)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :LENGTH]
    return weights, (weights @ v).transpose(1, 2)


def wrong_results(q: Tensor, k: Tensor, v: Tensor, cap: Any, sink: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """What models make that do something else, or see other keys."""
    fewer, more = EARLIER.clone(), EARLIER.clone()
    fewer[50, 50], more[50, 51] = False, True
    parts: list[dict[str, Any]] = [{"cap": cap}, {"sink": sink}, {"mask": fewer}, {"mask": more}]
    for part in parts:
        yield model(q, k, v, **part)


def is_proved(
    q: Tensor, k: Tensor, v: Tensor, made: tuple[Tensor, Tensor], *, weights: bool = True, **parts: Any
) -> Proof:
    result = AttentionFunction(q=q, k=k, v=v, scale=WIDTH**-0.5, causal=True, **parts)
    return prove("x", result, torch.arange(LENGTH), made[0] if weights else None, made[1])


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "outputs"])
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("size", LARGEST)
def test_in_float32_correct_models_are_proved_and_wrong_ones_refused(size: float, offset: bool, weights: bool) -> None:
    q, k, v = random_qkv(size, FLOAT32, offset=offset)
    actual = is_proved(q, k, v, model(q, k, v), weights=weights)
    assert actual.used < 0.5, "rounding is well within what is allowed"
    assert actual.logit > size / 4
    assert actual.undecided == 0
    cap, sink = max(2.0, size / 3), torch.linspace(-1, 1, HEADS) + (size if offset else 0)
    is_proved(q, k, v, model(q, k, v, cap=cap), weights=weights, softcap=cap)
    is_proved(q, k, v, model(q, k, v, sink=sink), weights=weights, sinks=sink)
    for made in (*wrong_results(q, k, v, cap, sink), model(q, k, v, scale=WIDTH**-0.5 * 1.001)):
        with pytest.raises(InputError, match="the attention of x was not understood"):
            is_proved(q, k, v, made, weights=weights)


@pytest.mark.parametrize(("dtype", "size"), [(HALF, 1.0), (HALF, 100.0), (BFLOAT16, 1.0), (BFLOAT16, 30.0)], ids=str)
def test_in_16_bits_correct_models_are_proved_and_wrong_terms_refused(dtype: torch.dtype, size: float) -> None:
    q, k, v = random_qkv(size, dtype)
    assert is_proved(q, k, v, model(q, k, v)).used < 0.8
    for made in wrong_results(q, k, v, size / 4, torch.ones(HEADS, dtype=dtype) * 4):
        with pytest.raises(InputError, match=r"was not understood.*--dtype float32"):
            is_proved(q, k, v, made)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_a_too_coarse_dtype_is_reported(dtype: torch.dtype) -> None:
    """Logits of ten thousand near each other: rounding alone makes any weights of them."""
    q, k, v = random_qkv(1e4 if dtype == BFLOAT16 else 3e3, dtype, offset=True)
    with pytest.raises(InputError, match=rf"{str(dtype)[6:]} is too coarse for the attention of x.*--dtype float32"):
        is_proved(q, k, v, model(q, k, v))


@pytest.mark.parametrize("size", LARGEST)
def test_the_proof_is_the_same_some_queries_at_a_time(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block leaves out the keys that none of its queries sees; weights on these are refused nevertheless."""
    q, k, v = random_qkv(size, FLOAT32)
    made = model(q, k, v)
    whole = is_proved(q, k, v, made)
    monkeypatch.setattr(calls_module, "_IN_CACHE", 1)
    apart = is_proved(q, k, v, made)
    for name in ("weights", "outputs", "tolerance", "used", "logit"):
        assert getattr(apart, name) == pytest.approx(getattr(whole, name), rel=1e-5, abs=1e-12), name
    assert (apart.queries, apart.undecided) == (whole.queries, whole.undecided)
    weights = made[0].clone()
    weights[0, 1, 3, -1] = 1e-30
    with pytest.raises(InputError, match="the attention of x was not understood"):
        is_proved(q, k, v, (weights, made[1]))


@pytest.mark.parametrize("size", [1.0, 1e4], ids=["flat", "peaked"])
@pytest.mark.parametrize("largest", [1e-6, 1e-3, 1.0])
def test_the_bound_of_weights_in_float32_is_that_in_float64(size: float, largest: float) -> None:
    """4096 keys, with and without a sink. The sums' errors are a few units of a weight, of which the proof allows 32
    more (`rounding`); here 2, and 16 units of the bound itself."""
    draw, keys, unit = torch.Generator().manual_seed(3), 4096, 2.0**-24
    logits = size * torch.randn(1, 2, 8, keys + 1, generator=draw, dtype=torch.float64)
    weights = logits.softmax(-1)[..., :keys]
    delta = largest * torch.rand(1, 2, 8, keys, generator=draw, dtype=torch.float64)
    sink = (1 - weights.sum(-1, keepdim=True)).clamp(min=0), torch.full((1, 2, 8, 1), largest, dtype=torch.float64)
    for w, extra in ((weights, sink), (weights / weights.sum(-1, keepdim=True), None)):
        expected = calls_module._weight_rounding(w, delta, extra)
        narrow = None if extra is None else (extra[0].float(), extra[1].float())
        actual = calls_module._weight_rounding(w.float(), delta.float(), narrow).double()
        assert bool(((actual - expected).abs() <= 2 * unit * w + 16 * unit * expected + 1e-37).all())
