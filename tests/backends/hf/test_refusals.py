"""Attention that is not understood is refused by name; what holds none is passed by; other layouts are read."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tests.architectures.models import small_inputs, small_model
from tests.backends.hf.models import (
    GPT,
    INPUTS,
    SIZES,
    TOKENS,
    WIDTH,
    HandwrittenModel,
    SoftAttention,
    calls_in,
    tiny,
)
from torch import Tensor, nn

from toeplens.backends.hf import AttentionCall, capture_attention
from toeplens.backends.hf.attention import masking_limit
from toeplens.backends.hf.model import attention_modules
from toeplens.backends.hf.trace import ProductTracer
from toeplens.lens import NotSeparable
from toeplens.utils import EnvironmentFailure, InputError

ONE_LAYER = SIZES | {"num_hidden_layers": 1}


class Mixer(SoftAttention):
    """The same, under another name."""


class LatentMLA(SoftAttention):
    pass


class LinearAttention(SoftAttention):
    """No softmax: the keys' states are summed, with a decay."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decay = (-nn.functional.softplus(k[..., :1])).cumsum(2).exp()
        return (q @ (k * decay).transpose(-1, -2)).tril() @ v


class BandedAttention(SoftAttention):
    """The softmax of a table that products were written into."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table = torch.zeros(*q.shape[:3], q.shape[2])
        table[..., 1:] = (q @ k.transpose(-1, -2))[..., 1:]
        return table.softmax(-1) @ v


class BlockAttention(SoftAttention):
    """Every query sees the three keys of its own block."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, 3)) for x in (q, k, v))
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).flatten(2, 3)


class NoAttention(SoftAttention):
    """What would attend is not there."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q)


class ExponentialAttention(SoftAttention):
    """A softmax without the function of that name, of a table that products were written into."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table = torch.zeros(*q.shape[:3], q.shape[2])
        table[..., 1:] = torch.einsum("bhid,bhjd->bhij", q, k)[..., 1:]
        weights = table.mul_(0.1).exp()
        return weights @ v / weights.sum(-1, keepdim=True)


class TorchAttention(SoftAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        each = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
        names = ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v")
        made = nn.functional.multi_head_attention_forward(
            *(x.transpose(0, 1) for x in each),
            WIDTH,
            2,
            torch.eye(WIDTH).repeat(3, 1),
            **dict.fromkeys(names[1:]),  # type: ignore[arg-type]
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=torch.eye(WIDTH),
            out_proj_bias=None,  # type: ignore[arg-type]
        )[0]
        return made.transpose(0, 1).unflatten(-1, (2, -1)).transpose(1, 2)


class TimeFirstAttention(SoftAttention):
    order = (1, 0, 2)


class ChannelsFirstAttention(SoftAttention):
    order = (0, 2, 1)


class WindowedMixer(nn.Module):
    """Half of the tokens at a time, as sequences of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SoftAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.reshape(4, TOKENS // 2, WIDTH)).reshape(x.shape)


def calls_of(*parts: nn.Module) -> list[AttentionCall]:
    return calls_in(HandwrittenModel(*parts))


def test_attention_without_softmax_is_skipped() -> None:
    calls = calls_of(LinearAttention(), SoftAttention(), LinearAttention())
    assert [call.module for call in calls] == ["parts.1 (SoftAttention)"]
    with pytest.raises(
        InputError, match=r"of HandwrittenModel was understood: no softmax of queries and keys in LinearAttention\.$"
    ):
        calls_of(LinearAttention(), LinearAttention())
    words = r"queries and keys in LinearAttention, NoAttention \(NoAttention returned only zeros: its kernel"
    with pytest.raises(InputError, match=words):
        calls_of(LinearAttention(), NoAttention())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (BandedAttention, "parts.1 .BandedAttention. was not understood: its '_softmax' is not a softmax of"),
        (BlockAttention, r"its '_softmax' has shape \[2, 2, 4, 3, 3\]: bands or blocks of keys instead"),
        (ExponentialAttention, "parts.1 .ExponentialAttention. was not understood: its 'exp'"),
        (TorchAttention, "parts.1 .TorchAttention. was not understood: its '.*(attention|softmax)"),
        (Mixer, "outside the attention modules, so it was not captured"),
        (
            WindowedMixer,
            "parts.1.attention .SoftAttention. was not understood: a softmax in it is over 4 sequences of 2",
        ),
    ],
)
def test_untraceable_attention_is_never_skipped(part: type[nn.Module], words: str) -> None:
    """Beside attention that is understood, and linear attention."""
    with pytest.raises(InputError, match=words):
        calls_of(SoftAttention(), part(), LinearAttention())


def test_other_tensor_layouts_are_read() -> None:
    """The same weights, by tokens first and by channels first: the same calls."""
    (soft,), (time,), (channels,) = (calls_of(x()) for x in (SoftAttention, TimeFirstAttention, ChannelsFirstAttention))
    for call in (time, channels):
        assert call.q.shape == (2, 2, TOKENS, WIDTH // 2)
        torch.testing.assert_close(call.q, soft.q, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(call.heads, soft.heads, atol=1e-5, rtol=1e-5)
    assert [call.module for call in calls_of(LatentMLA())] == ["parts.0 (LatentMLA)"]
    assert len(attention_modules(HandwrittenModel(Mixer()))) == 0


def test_pooled_queries_have_no_position_form() -> None:
    """Funnel's first layer of a block: queries are pooled."""
    sizes = {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
    calls = calls_in(tiny("FunnelModel", vocab_size=31, **sizes))
    pooled = [call for call in calls if call.q.shape[2] != call.k.shape[2]]
    assert len(pooled) == 1
    with pytest.raises(NotSeparable, match=r"queries for 12 keys"):
        pooled[0].behaviour_arguments()


def test_unsupported_attention_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="MambaModel has no module"):
        capture_attention(tiny("MambaModel", vocab_size=31, hidden_size=32, num_hidden_layers=1), INPUTS, pytest.fail)

    from transformers.models.gptj import modeling_gptj
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def tilted(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **rest: Any) -> Any:
        return eager(module, query, key, value, mask + 0.01 * torch.arange(TOKENS), **rest)

    def scaled(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **rest: Any) -> Any:
        heads, weights = eager(module, query, key, value, mask, **rest)
        return 1.001 * heads, weights

    llama, gptj = tiny("LlamaForCausalLM", **ONE_LAYER), tiny("GPTJForCausalLM", **GPT | {"rotary_dim": 4})
    for planted in (tilted, scaled):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", planted)
        with pytest.raises(InputError, match=r"layers.0.self_attn \(LlamaAttention\) .* differ by"):
            capture_attention(llama, INPUTS, pytest.fail)

    def capped(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = ((query @ key.transpose(-1, -2) / self.scale_attn).tanh() + mask).softmax(-1)
        return weights @ value, weights

    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", capped)
    with pytest.raises(InputError, match=r"transformer.h.0.attn \(GPTJAttention\) .* 'tanh' between"):
        capture_attention(gptj, INPUTS, pytest.fail)


def test_invalid_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"model must be .*, got a Linear"):
        capture_attention(nn.Linear(2, 2), {}, pytest.fail)
    with pytest.raises(InputError, match="inputs must contain all tokens of a pass and not past_key_values"):
        capture_attention(HandwrittenModel(), {"past_key_values": object()}, pytest.fail)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFailure, match=r"toeplens\[hf\]"):
        capture_attention(HandwrittenModel(), {}, pytest.fail)


# ---- attention written out in other ways is followed -----------------------------------------------------------------


def additive_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[N, B, H, d], as XLNet has it."""
    logits = torch.einsum("ibnd,jbnd->bnij", q, k) * 0.5 - 1e30 * torch.einsum("ij->ij", mask)
    return torch.einsum("bnij,jbnd->ibnd", logits.softmax(3), v).permute(1, 2, 0, 3)


def zeroed_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Weights of hidden keys set to 0 after the softmax too, as CPM-Ant has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = (q @ k.transpose(-1, -2) * 0.5).masked_fill(mask > 0, -torch.inf)
    return logits.softmax(-1).masked_fill(mask > 0, value) @ v


def multiplicative_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Logits of hidden keys multiplied by 0 and put low, as GPT-1 has it."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    logits = torch.matmul(q, k.transpose(-1, -2)) * 0.5
    return (logits * (1 - mask) + -1e4 * mask).softmax(-1) @ v


@pytest.mark.parametrize("form", [additive_mask, zeroed_weights, multiplicative_mask])
def test_other_attention_implementations_are_traced(form: Any) -> None:
    """float64, loops: what is handed over says which keys were hidden, and gives the outputs."""
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(5, 5, dtype=torch.float64).triu(1)
    actual: list[tuple[Any, Tensor, Tensor]] = []
    with ProductTracer(lambda: True, lambda *formed: actual.append(formed)):
        expected = form(q, k, v, mask)
    ((formed, values, out),) = actual
    assert formed.scale == 0.5
    hidden = [table for table, _ in formed.masks] + [table <= masking_limit(table.dtype) for table, _ in formed.terms]
    covered = torch.stack([torch.broadcast_to(table, (5, 5)) for table in hidden]).any(0)
    assert torch.equal(covered, mask > 0)
    for batch in range(2):
        for head in range(3):
            for row in range(5):
                logits = [0.5 * float(q[row, batch, head] @ k[key, batch, head]) for key in range(row + 1)]
                weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
                torch.testing.assert_close(formed.weights[batch, head, row, : row + 1], weights, atol=1e-12, rtol=0)
                mean = sum(weights[key] * v[key, batch, head] for key in range(row + 1))
                torch.testing.assert_close(out[batch, head, row], mean, atol=1e-12, rtol=0)
    assert torch.equal(out, expected)
    torch.testing.assert_close(values, v.permute(1, 2, 0, 3), atol=0, rtol=0)


def test_other_weight_sums_and_masks_are_not_traced() -> None:
    q, k, v = torch.randn(3, 5, 2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual: list[Any] = []
    with ProductTracer(lambda: True, lambda *made: actual.append(made)):
        zeroed_weights(q, k, v, torch.ones(5, 5).triu(1), value=0.1)
        for form in ("ibnd,jbnd->nij", "ibnd,jbnd->bnji", "ibnd,jbnd->bnidj", "...d,...d->..."):
            torch.einsum(form, q, k).softmax(-1)
        half = (torch.einsum("ibnd,jbnd->bnij", q, k) * torch.full((5, 5), 0.5)).softmax(-1) @ v.permute(1, 2, 0, 3)
    assert half.shape == (2, 3, 5, 4)
    assert actual == []


class PiecesAttention(SoftAttention):
    """Half of each head's values at a time: with the same weights, or others for a half that may be next to nothing."""

    def __init__(self, scale: float = 0.5, size: float = 1.0) -> None:
        super().__init__()
        self.scale, self.size = scale, size

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (one, two), logits = v.chunk(2, -1), q @ k.transpose(-1, -2)
        return torch.cat([(logits * 0.5).softmax(-1) @ one, (logits * self.scale).softmax(-1) @ (self.size * two)], -1)


class DepthAttention(nn.Module):
    """Every token asks by the same query what it takes of its own states, as of layers before."""

    def __init__(self, softmax: bool = False) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(WIDTH))
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        states = torch.stack((x, x.sin(), x.cos()), -2)
        query = self.query.view(1, WIDTH).expand(*x.shape[:2], -1, -1)
        output = nn.functional.scaled_dot_product_attention(query, states, states).squeeze(-2)
        return output.cumsum(1).softmax(1) * output if self.softmax else output


def test_split_value_products_are_one_call() -> None:
    """With the values of all, as if they had been multiplied at once."""
    soft, twice = (calls_in(HandwrittenModel(kind(), kind())) for kind in (SoftAttention, PiecesAttention))
    assert [(call.layer, call.products) for call in soft] == [(0, 1), (1, 1)]
    assert [(call.layer, call.products) for call in twice] == [(0, 2), (1, 2)]
    for one, other in zip(soft, twice, strict=True):
        assert other.weights is not None
        for name in ("q", "k", "v", "heads", "weights"):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), atol=1e-5, rtol=1e-5)
        assert other.proof.weights is not None
        assert max(other.proof.weights, other.proof.outputs) < 1e-5


@pytest.mark.parametrize("size", [1.0, 1e-9, 0.0])
def test_split_values_with_different_weights_are_refused(size: float) -> None:
    with pytest.raises(
        InputError, match=r"parts.0 \(PiecesAttention\) was not understood: it has several pieces, each"
    ):
        calls_in(HandwrittenModel(PiecesAttention(0.4, size)))


def test_a_per_query_sink_is_read() -> None:
    """Loops, float64: a logit of each query's own takes weight and gives no value, also where queries go in blocks."""
    model = small_model("inkling2_text")
    inputs = small_inputs(model, padded=False)
    calls = calls_in(model, inputs)
    for call in calls:
        assert call.sinks is not None
        assert call.weights is not None
        assert call.sinks.shape == (4, 2, TOKENS)
        assert float((call.sinks - call.sinks[..., :1]).abs().max()) > 0.1
        logits = call.logits()
        for batch in range(2):
            for head in range(4):
                for row in range(TOKENS):
                    each = logits[batch, head, row].exp()
                    weights = each / (each.sum() + call.sinks[head, batch, row].double().exp())
                    torch.testing.assert_close(weights, call.weights[batch, head, row].double(), atol=1e-6, rtol=0)
        with pytest.raises(InputError, match="each of 12 queries has its own, so the weights of 3"):
            call.softmax(logits[:, :, :3])
        some = torch.tensor([2, 5])
        torch.testing.assert_close(call.softmax(logits[:, :, some], some), call.softmax(logits)[:, :, some])


def test_a_per_token_softmax_is_not_attention() -> None:
    calls = calls_in(HandwrittenModel(DepthAttention(), SoftAttention()))
    assert [(call.module, call.layer) for call in calls] == [("parts.1 (SoftAttention)", 0)]
    with pytest.raises(InputError, match=r"parts.0 \(DepthAttention\) was not understood: its '_softmax'"):
        calls_in(HandwrittenModel(DepthAttention(softmax=True), SoftAttention()))
