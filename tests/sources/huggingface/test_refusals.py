"""Attention that is not understood is refused by name; what holds none is passed by; other layouts are read."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GPT, INPUTS, SIZES, TOKENS, WIDTH, Hand, SoftAttention, calls_in, tiny
from torch import Tensor, nn

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.lens import NoForm
from toeplens.sources.huggingface import AttentionCall, captured
from toeplens.sources.huggingface.model import attention_modules

ONE = SIZES | {"num_hidden_layers": 1}


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


class Windows(nn.Module):
    """Half of the tokens at a time, as sequences of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SoftAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.reshape(4, TOKENS // 2, WIDTH)).reshape(x.shape)


def calls_of(*parts: nn.Module) -> list[AttentionCall]:
    return calls_in(Hand(*parts))


def test_attention_without_a_softmax_is_passed_by() -> None:
    calls = calls_of(LinearAttention(), SoftAttention(), LinearAttention())
    assert [call.module for call in calls] == ["parts.1 (SoftAttention)"]
    with pytest.raises(
        InputError, match=r"of Hand was understood: no softmax of queries and keys in LinearAttention\.$"
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
        (Windows, "parts.1.attention .SoftAttention. was not understood: a softmax in it is over 4 sequences of 2"),
    ],
)
def test_attention_that_was_not_followed_is_never_passed_by(part: type[nn.Module], words: str) -> None:
    """Beside attention that is understood, and linear attention."""
    with pytest.raises(InputError, match=words):
        calls_of(SoftAttention(), part(), LinearAttention())


def test_layouts_of_other_orders_are_read() -> None:
    """The same weights, by tokens first and by channels first: the same calls."""
    (own,), (time,), (channels,) = (calls_of(x()) for x in (SoftAttention, TimeFirstAttention, ChannelsFirstAttention))
    for call in (time, channels):
        assert call.q.shape == (2, 2, TOKENS, WIDTH // 2)
        torch.testing.assert_close(call.q, own.q, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(call.heads, own.heads, atol=1e-5, rtol=1e-5)
    assert [call.module for call in calls_of(LatentMLA())] == ["parts.0 (LatentMLA)"]
    assert len(attention_modules(Hand(Mixer()))) == 0


def test_fewer_queries_than_keys_have_no_form() -> None:
    """Funnel's first layer of a block: queries are pooled."""
    sizes = {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
    calls = calls_in(tiny("FunnelModel", vocab_size=31, **sizes))
    pooled = [call for call in calls if call.q.shape[2] != call.k.shape[2]]
    assert len(pooled) == 1
    with pytest.raises(NoForm, match=r"queries for 12 keys"):
        pooled[0].placed()


def test_what_is_not_understood_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="MambaModel has no module"):
        captured(tiny("MambaModel", vocab_size=31, hidden_size=32, num_hidden_layers=1), INPUTS, pytest.fail)

    from transformers.models.gptj import modeling_gptj
    from transformers.models.llama import modeling_llama

    eager = modeling_llama.eager_attention_forward

    def tilted(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **rest: Any) -> Any:
        return eager(module, query, key, value, mask + 0.01 * torch.arange(TOKENS), **rest)

    def scaled(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **rest: Any) -> Any:
        heads, weights = eager(module, query, key, value, mask, **rest)
        return 1.001 * heads, weights

    llama, gptj = tiny("LlamaForCausalLM", **ONE), tiny("GPTJForCausalLM", **GPT | {"rotary_dim": 4})
    for planted in (tilted, scaled):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", planted)
        with pytest.raises(InputError, match=r"layers.0.self_attn \(LlamaAttention\) .* differ by"):
            captured(llama, INPUTS, pytest.fail)

    def capped(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = ((query @ key.transpose(-1, -2) / self.scale_attn).tanh() + mask).softmax(-1)
        return weights @ value, weights

    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", capped)
    with pytest.raises(InputError, match=r"transformer.h.0.attn \(GPTJAttention\) .* 'tanh' between"):
        captured(gptj, INPUTS, pytest.fail)


def test_wrong_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"model must be .*, got a Linear"):
        captured(nn.Linear(2, 2), {}, pytest.fail)
    with pytest.raises(InputError, match="inputs must contain all tokens of a pass and not past_key_values"):
        captured(Hand(), {"past_key_values": object()}, pytest.fail)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EnvironmentFailure, match=r"toeplens\[hf\]"):
        captured(Hand(), {}, pytest.fail)
