"""The parts are what a plain program finds that forms every matrix, and they sum to the model's own logits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.builders import wrong_types
from tests.lens.models import decoder, reference_share
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.lens import AttentionTrace, LayerTrace, LogitParts, NotSeparable, TermShares, decompose
from toeplens.lens.frequency import frequency_use
from toeplens.lens.kit.terms import dense_profile, shares_of
from toeplens.model import Decoder
from toeplens.utils import InputError

SIZES = {"vocab_size": 20, "d_model": 32, "d_ff": 24, "num_layers": 2, "num_heads": 4, "max_len": 16}
LENGTHS = torch.tensor([12, 7, 1, 12, 9])
# by content, by several products, after it
NOT_SEPARABLE = ("fox", "carope", "stick-breaking", "rerope", "urpe", "path")
NONLINEAR = ("pope", "grape-additive")
CASES = ("nope", "rope", "alibi", "t5", "fire", "shaw", "transformer-xl", "deberta", "sinusoidal", "mla")
BOTH = [*((name, "paper") for name in CASES), ("rope", "released"), ("mla", "released")]
PRODUCTS = ("content-content", "content-position", "position-content", "position-position")


@cache
def model_of(encoding: str, protocol: str = "paper", seed: int = 1, **fields: Any) -> Decoder:
    return decoder(seed=seed, encoding=encoding, protocol=protocol, **SIZES, **fields)


def trace_of(model: Decoder, lengths: Tensor | None = LENGTHS, **options: Any) -> AttentionTrace:
    tokens = torch.randint(0, 20, (5, 12), generator=torch.Generator().manual_seed(2))
    return AttentionTrace(DecoderSource(model), tokens, lengths, **options)


def visible(layer: LayerTrace) -> Tensor:
    """[B, N, N]: both tokens count, and the key is not after the query."""
    mask = layer.present.unsqueeze(2) & layer.present.unsqueeze(1)
    return mask.tril() if layer.causal else mask


def dense(parts: LogitParts, name: str, layer: LayerTrace) -> Tensor:
    return torch.stack([parts.matrix(name, sequence) for sequence in range(len(layer.q))])


@pytest.mark.parametrize(("encoding", "protocol"), BOTH)
def test_terms_sum_to_the_logits_and_shares_are_covariances(encoding: str, protocol: str) -> None:
    """float64, 1e-9 (of the largest logit); every split that the layer allows."""
    trace = trace_of(model_of(encoding, protocol))
    one = torch.ones(4, dtype=torch.float64)
    for layer, split in ((0, "input"), (0, "mean"), (1, "mean"), (1, "ablate")):
        actual = trace[layer]
        parts = decompose(trace, layer, split=split)  # type: ignore[arg-type]
        total, pairs = dense(parts, "total", actual), visible(actual)
        for sequence, true in enumerate(actual.logits()):
            expected = true.masked_fill(~pairs[sequence], 0)
            limit = 1e-9 * float(expected.abs().max()) + 1e-12
            torch.testing.assert_close(total[sequence], expected, rtol=0, atol=limit)
        assert parts.error < 1e-9
        with_bias = "bias" in parts.names
        for shares in (parts.shares, parts.kinds, None if with_bias else parts.frequency_shares):
            for share in () if shares is None else (shares.logits, shares.softmax):
                if share.isfinite().all():
                    torch.testing.assert_close(share.sum(-1), one, rtol=0, atol=1e-9)
        if split != "mean" or layer == 0:
            continue
        for index, name in enumerate(parts.names):
            plain, softmax = reference_share(dense(parts, name, actual), total, pairs)
            torch.testing.assert_close(parts.shares.logits[:, index], plain, rtol=0, atol=1e-9)
            torch.testing.assert_close(parts.shares.softmax[:, index], softmax, rtol=0, atol=1e-9)
        variance = torch.stack([total[:, head][pairs].var(unbiased=False) for head in range(4)])
        torch.testing.assert_close(parts.variance, variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("encoding", [*NOT_SEPARABLE, *NONLINEAR])
def test_a_non_separable_encoding_is_refused(encoding: str) -> None:
    said = r"^encoding: .*(content of other tokens|after the softmax|several products|not linear in queries and keys)"
    with pytest.raises(NotSeparable, match=said):
        decompose(trace_of(model_of(encoding)), 0)


@pytest.mark.parametrize("encoding", ["rope", "mla", "sinusoidal"])
def test_content_and_position_parts_by_hand(encoding: str) -> None:
    """The split through the frozen norm, biases and shift in the content part, written out (float64, 1e-9)."""
    model = model_of(encoding)
    trace = trace_of(model, None)
    parts, layer, block = decompose(trace, 1), trace[1], model.block(1)
    x = layer.inputs
    p = (x.mean(0) - x.mean((0, 1))).expand_as(x)
    norm, parameters = block.norm_attention, dict(block.attention.named_parameters())
    spread = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def held(value: Tensor, shift: bool) -> Tensor:
        normed = (value - value.mean(-1, keepdim=True)) / spread * norm.weight
        return normed + norm.bias if shift else normed

    def heads(value: Tensor) -> Tensor:
        return value.unflatten(-1, (4, -1)).transpose(1, 2)

    def projected(value: Tensor, content: bool, side: int) -> Tensor:
        """Queries (side 0) or keys (1) of a part of the input; biases and shift are of the content."""
        inside, rows = held(value, content), slice(32 * side, 32 * side + 32)
        if encoding != "mla":
            return heads(inside @ parameters["qkv.weight"][rows].T + (parameters["qkv.bias"][rows] if content else 0))
        name = ("q", "kv")[side]
        true = held(x, True) @ parameters[f"down_{name}.weight"].T
        latent = inside @ parameters[f"down_{name}.weight"].T
        latent = latent * (true.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * parameters[f"norm_{name}.weight"]
        still = heads(latent @ parameters[f"up_{name}.weight"][:32].T)
        rotated = heads(latent @ parameters["rotary_q.weight"].T) if side == 0 else None
        shared = (inside @ parameters["rotary_k.weight"].T).unsqueeze(1).expand(-1, 4, -1, -1)
        return torch.cat((still, shared if rotated is None else rotated), -1)

    for name, (a, b) in zip(PRODUCTS, itertools.product((True, False), repeat=2), strict=True):
        q, k = projected(x - p if a else p, a, 0), projected(x - p if b else p, b, 1)
        turned_q, turned_k = (
            layer.encoding.call_hook("rotate", q, k, layer.positions, layer.positions, inputs=None)
            if layer.encoding._inputs_argument
            else layer.encoding.rotate(q, k, layer.positions, layer.positions)
        )
        expected = (turned_q @ turned_k.transpose(-2, -1) * layer.scale).tril()
        torch.testing.assert_close(dense(parts, name, layer), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("encoding", ["rope", "mla", "partial-rope", "xpos", "rope-yarn", "rope-absolute", "p-rope"])
def test_frequency_shares_match_frequency_use(encoding: str) -> None:
    """float64, 1e-8."""
    trace = trace_of(model_of(encoding), None)
    parts, use = decompose(trace, 1), frequency_use(trace[1])
    assert parts.frequency_shares is not None
    count = use.frequencies.shape[-1]
    by_frequency = parts.frequency_shares.logits.unflatten(-1, (4, count + 1)).sum(1)
    torch.testing.assert_close(by_frequency, use.shares.logits[:, : count + 1], rtol=0, atol=1e-8)
    branches = parts.branches()
    assert branches is not None
    torch.testing.assert_close(branches.logits.sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(branches.logits[:, 0], by_frequency[:, 0])
    by_part = parts.frequency_shares.softmax.unflatten(-1, (4, count + 1)).sum(-1)
    torch.testing.assert_close(by_part, parts.shares.softmax[:, :4], rtol=0, atol=1e-9)


@pytest.mark.parametrize("encoding", ["rope", "alibi", "sinusoidal", "mla", "nope", "transformer-xl"])
@pytest.mark.parametrize("protocol", ["paper", "released"])
@pytest.mark.parametrize("lengths", [None, LENGTHS, torch.tensor([12, 7, 3, 10, 9])], ids=["whole", "two", "one"])
def test_query_key_kinds_by_hand(encoding: str, protocol: str, lengths: Tensor | None) -> None:
    """Position: the logits of the others' mean queries and keys. Content: at the mean rotation. (float64, 1e-9).

    Of unequal lengths the positions count that two sequences reach, and means are of the sequences that are there.
    """
    trace = trace_of(model_of(encoding, protocol, pad_mask=lengths is not None), lengths)
    parts, layer = decompose(trace, 1), trace[1]
    if lengths is not None:
        assert layer.lengths is not None
        layer = replace(layer, lengths=lengths.clamp(max=int(lengths.sort().values[-2])))
    there, mask = layer.present[:, None, :, None], visible(layer)
    total = dense(parts, "total", layer)
    mean_q, mean_k = torch.zeros_like(layer.q), torch.zeros_like(layer.k)
    own_q, own_k = torch.zeros_like(layer.q), torch.zeros_like(layer.k)
    for x, mean, own in ((layer.q, mean_q, own_q), (layer.k, mean_k, own_k)):
        for b in range(5):
            others = [a for a in range(5) if a != b]
            tokens = torch.cat([x[a][:, layer.present[a]] for a in others], 1)
            for i in range(int(layer.present[b].sum())):
                mean[b, :, i] = torch.stack([x[a, :, i] for a in others if layer.present[a, i]]).mean(0)
                own[b, :, i] = x[b, :, i] - mean[b, :, i] + tokens.mean(1)
    position = layer.logits(mean_q, mean_k).masked_fill(~mask.unsqueeze(1), 0)
    plain, softmax = reference_share(position, total, mask)
    torch.testing.assert_close(parts.kinds.logits[:, 0], plain, rtol=0, atol=1e-9)
    torch.testing.assert_close(parts.kinds.softmax[:, 0], softmax, rtol=0, atol=1e-9)
    pairs = mask.nonzero()[:, 1:].tolist() if encoding in ("rope", "mla") else [(0, 0)]
    content = torch.zeros_like(total)
    for i, j in set(map(tuple, pairs)):
        rotated = (own_q, own_k)
        if encoding in ("rope", "mla"):
            rotated = layer.encoding.rotate(own_q, own_k, torch.full((12,), i), torch.full((12,), j))
        content += rotated[0] @ rotated[1].transpose(-2, -1) * layer.scale * pairs.count([i, j] if i + j else pairs[0])
    content = content * there / len(pairs)
    plain, softmax = reference_share(content, total, mask)
    torch.testing.assert_close(parts.kinds.logits[:, 1], plain, rtol=0, atol=1e-9)
    torch.testing.assert_close(parts.kinds.softmax[:, 1], softmax, rtol=0, atol=1e-9)


def test_profiles_pool_the_visible_pairs_of_all_sequences() -> None:
    """Offset by offset, with padding in none; of parts, and of logits written out (float64, 1e-9)."""
    for encoding in ("t5", "fox"):
        trace = trace_of(model_of(encoding))
        actual = decompose(trace, 0).profile if encoding == "t5" else dense_profile(trace[0])
        logits, seen = trace[0].logits(), visible(trace[0])
        for delta in range(12):
            is_pair, values = seen.diagonal(-delta, 1, 2), logits.diagonal(-delta, 2, 3)
            assert int(actual.counts[delta]) == int(is_pair.sum())
            expected = torch.stack([values[:, head][is_pair].mean() for head in range(4)])
            torch.testing.assert_close(actual.diagonal_means[:, delta], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        ((0.95, 0.05, 0.0), "position"),
        ((0.05, 0.95, 0.0), "content"),
        ((0.05, 0.0, 0.95), "product"),
        ((0.5, 0.45, 0.05), "sum"),
        ((0.5, 0.3, 0.2), "mixed"),
        ((math.nan,) * 3, "unknown"),
    ],
)
def test_a_head_is_named_after_its_shares(shares: tuple[float, ...], name: str) -> None:
    parts = decompose(trace_of(model_of("rope")), 1)
    kinds = TermShares(*[torch.tensor([shares] * 4, dtype=torch.float64)] * 2)
    assert replace(parts, kinds=kinds).head_kinds() == [name] * 4
    assert replace(parts, kinds=kinds, sequences=3).head_kinds() == ["unknown"] * 4
    flat = TermShares(*[parts.shares.logits * math.nan] * 2)
    assert replace(parts, kinds=kinds, shares=flat).head_kinds() == ["flat"] * 4


def test_shares_of_rounding_noise_are_undefined() -> None:
    """Terms that cancel but for their rounding: as small as the variance, and both nothing beside the energy."""
    energy = torch.tensor([1e6], dtype=torch.float64)
    noise = torch.tensor([3e-9], dtype=torch.float64)
    shares = shares_of([(noise, noise), (-0.5 * noise, noise)], (0.46 * noise, noise), energy)
    assert shares.logits.isnan().all()
    assert shares.softmax.isnan().all()
    real = shares_of([(noise, noise)], (noise, noise), torch.ones_like(energy))
    assert real.logits.tolist() == [[1.0]]


def test_the_input_split_matches_the_added_vector() -> None:
    model = model_of("sinusoidal")
    trace = trace_of(model, None)
    parts, layer = decompose(trace, 0, split="input"), trace[0]
    vectors = model.encoding.embed(torch.zeros(1, 12, 32, dtype=torch.float64), torch.arange(12))[0]
    q, k = layer.project_part(vectors.expand(5, -1, -1), vectors.expand(5, -1, -1))
    expected = (q @ k.transpose(-2, -1) * layer.scale).tril()
    torch.testing.assert_close(dense(parts, "position-position", layer), expected, rtol=0, atol=1e-12)


def test_the_mean_split_needs_several_sequences() -> None:
    trace = AttentionTrace(DecoderSource(model_of("rope")), torch.arange(5).unsqueeze(0))
    with pytest.raises(InputError, match=r"^split must not be 'mean' with fewer than 2 sequences"):
        decompose(trace, 0)
    alone = decompose(trace, 0, split="ablate")
    assert alone.sequences == 1
    assert alone.kinds.logits.isnan().all()
    assert alone.head_kinds() == ["unknown"] * 4
    torch.testing.assert_close(alone.shares.logits.sum(-1), torch.ones(4, dtype=torch.float64))


@wrong_types
def test_invalid_input_is_refused_in_one_sentence() -> None:
    trace = trace_of(model_of("rope"))
    with pytest.raises(InputError, match=r"^split must be 'mean' or 'ablate' for layer 1, got 'input'"):
        decompose(trace, 1, split="input")
    with pytest.raises(InputError, match=r"name must be one of content-content.*, got 'bias'"):
        decompose(trace, 1).matrix("bias")
