"""Attention block by block: the same numbers and gradients as weights formed whole, whatever the shape and the bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toeplens.encodings import attend, build, cpu_attention
from toeplens.encodings.cpu_attention import attend_blocked, is_faster


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor where blocks are the faster ones, whatever this one is."""
    monkeypatch.setattr(cpu_attention, "_WIDE", False)


def whole(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Line by line as it is written."""
    logits = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return logits.softmax(-1) @ v


def with_gradients(found: Tensor, *given: Tensor | None) -> list[Tensor]:
    weights = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)
    return [found, *torch.autograd.grad((found * weights).sum(), [each for each in given if each is not None])]


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
def test_it_is_attention_formed_whole(
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
    each = [x if x is None else x.requires_grad_() for x in (q, k, v, added)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_attention, "_BLOCK", block)
        patched.setattr(cpu_attention, "_ROWS", rows)
        found = with_gradients(attend_blocked(q, k, v, added, 0.0, 0.3, causal=causal), *each)
    for one, other in zip(found, with_gradients(whole(q, k, v, added, 0.3, causal), *each), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_dropout_drops_weights_at_its_rate_and_its_gradient_is_that_of_what_was_kept():
    q, k, v = torch.randn(3, 2, 4, 30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eye = torch.eye(30, dtype=torch.float64).expand(2, 4, 30, 30)
    torch.manual_seed(1)
    dropped = attend_blocked(q, k, eye, None, 0.25, 0.3, causal=True)  # the weights themselves
    weights = whole(q, k, eye, None, 0.3, causal=True)
    seen = weights > 0
    kept = dropped[seen] != 0
    assert kept.double().mean() == pytest.approx(0.75, abs=0.03)
    torch.testing.assert_close(dropped[seen][kept], weights[seen][kept] / 0.75)
    mask = (dropped != 0) / 0.75
    each = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)
    found = with_gradients(attend_blocked(q, k, v, None, 0.25, 0.3, causal=True), *each)
    wanted = with_gradients((whole(q, k, eye, None, 0.3, causal=True) * mask) @ v, *each)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "kerple-log", "fire"])
@pytest.mark.parametrize("length", [7, 24, 120])
@pytest.mark.parametrize("causal", [True, False])
def test_encodings_train_alike_by_blocks_and_with_weights_formed(name: str, length: int, causal: bool):
    encoding = build(name, head_dim=8, num_heads=2, d_model=16, max_len=128)
    q, k, v = (torch.randn(3, 2, length, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    each = [x.requires_grad_() for x in (q, k, v)]
    places = torch.arange(length)
    told = {"encoding": encoding, "scale": 0.3, "q_positions": places, "k_positions": places, "causal": causal}
    assert is_faster(q, k)
    learned = [*each, *encoding.parameters()]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("torch's"))
        found = with_gradients(attend(q, k, v, **told), *learned)
    for one, other in zip(found, with_gradients(attend(q, k, v, fused=False, **told), *learned), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@given(
    texts=st.integers(1, 4),
    length=st.integers(1, 90),
    name=st.sampled_from(["nope", "rope", "mla"]),
    alike=st.booleans(),
    seed=st.integers(0, 100),
)
def test_padding_is_hidden_by_blocks_as_where_weights_are_formed(
    texts: int, length: int, name: str, alike: bool, seed: int
):
    """Of keys alone; texts that are nothing but padding give 0, and no gradient."""
    make = torch.Generator().manual_seed(seed)
    encoding = build(name, head_dim=8, num_heads=2, d_model=16, max_len=128)
    width = encoding.rotary_dim if name == "mla" else 8
    q, k = torch.randn(2, texts, 2, length, width, generator=make)
    v = torch.randn(texts, 2, length, 8, generator=make)
    mask = torch.rand(1 if alike else texts, 1, 1, length, generator=make) < torch.rand(1, generator=make)
    mask[-1] = mask[-1] & (seed % 3 > 0)
    places = torch.arange(length)
    told = {"encoding": encoding, "scale": 0.3, "q_positions": places, "k_positions": places, "causal": False}
    each = [x.requires_grad_() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *_, **__: pytest.fail("torch's"))
        found = with_gradients(attend(q, k, v, mask=mask, **told), *each)
    for one, other in zip(found, with_gradients(attend(q, k, v, mask=mask, fused=False, **told), *each), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    none = ~mask.any(-1)[:, 0, 0].expand(texts)
    assert all(not x[none].any() for x in found)


def test_where_it_is_not_faster_it_is_left_to_torch():
    short, long = torch.randn(1, 1, 65, 4), torch.randn(1, 1, 513, 4)
    assert not is_faster(short, short)
    assert is_faster(short.requires_grad_(), short)
    assert not is_faster(long.requires_grad_(), long)
    assert not is_faster(short.bfloat16(), short.bfloat16())
    assert not is_faster(short[:, :, :8], short)
    assert not is_faster(short.expand(40_000, 1, 65, 4), short.expand(40_000, 1, 65, 4))  # too many weights to keep
    with torch.no_grad():
        assert not is_faster(short, short)
        assert is_faster(short[:, :, :64], short[:, :, :64])
    torch.func.vmap(lambda x: x if not is_faster(x, x) else pytest.fail("a transform cannot look into it"))(short[None])


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "fire"])
def test_with_avx_512_torchs_own_kernel_gives_the_same(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(cpu_attention, "_WIDE", True)
    q, k, v = (torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3))
    learned = torch.zeros(1, 2, 40, 40, requires_grad=True)
    assert not is_faster(q, k)
    assert not is_faster(q, k, learned.detach())
    assert is_faster(q, k, learned)
    assert is_faster(q, k, dropout=0.1)
    encoding = build(name, head_dim=8, num_heads=2, d_model=16, max_len=64)
    told = {"encoding": encoding, "scale": 0.3, "q_positions": torch.arange(40), "k_positions": torch.arange(40)}
    each = [q, k, v, *encoding.parameters()]
    found = with_gradients(attend(q, k, v, **told), *each)
    for one, other in zip(found, with_gradients(attend(q, k, v, fused=False, **told), *each), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def test_second_derivatives_are_those_of_attention_formed_whole():
    q, k, v = (torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def blockwise(*given: Tensor) -> Tensor:
        return attend_blocked(*given, 0.0, 0.7, causal=True)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(blockwise, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(blockwise, (q, k, v, bias))
    out = attend_blocked(q, k, v, None, 0.5, 0.7, causal=True)
    with pytest.raises(RuntimeError, match="attention with dropout has no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
