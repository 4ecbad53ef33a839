"""The positional main effect is what loops over queries and keys find, with content taken out of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lens.models import decoder
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.lens import AttentionTrace, LayerTrace
from toeplens.lens.kit import position as module
from toeplens.lens.kit.position import effect_variance, known_key_part, position_means
from toeplens.model import Decoder
from toeplens.utils import InputError

HEADS, LENGTH, COUNT = 2, 6, 7
SIZES = {"vocab_size": 9, "d_model": 16, "d_ff": 12, "num_layers": 2, "num_heads": HEADS, "max_len": 8}
LENGTHS = torch.tensor([6, 4, 6, 2, 5, 6, 1])


@cache
def model_of(encoding: str = "rope", protocol: str = "paper") -> Decoder:
    return decoder(seed=3, noise=0.3, encoding=encoding, protocol=protocol, **SIZES)


def tokens(count: int = COUNT, length: int = LENGTH) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (count, length), generator=torch.Generator().manual_seed(1))


def trace_of(encoding: str = "rope", protocol: str = "paper", lengths: Tensor | None = LENGTHS) -> AttentionTrace:
    return AttentionTrace(DecoderSource(model_of(encoding, protocol)), tokens(), lengths)


def mean_keys(layer: LayerTrace, part: Tensor | None, fold: int) -> tuple[dict[int, Tensor], Tensor | float]:
    """The mean key [H, d] at each position that the fold reaches; and the mean content, where it is known."""
    present = layer.present.tolist()
    pairs = [(b, j) for b, j in itertools.product(range(fold, COUNT, 3), range(LENGTH)) if present[b][j]]
    result, content = {}, 0.0
    for position in {j for _, j in pairs}:
        here = [b for b, j in pairs if j == position]
        if part is None:
            result[position] = sum(layer.k[b, :, position] for b in here) / len(here)
        else:
            content = sum((layer.k - part)[b, :, j] for b, j in pairs) / len(pairs)
            result[position] = content + sum(part[b, :, position] for b in here) / len(here)
    return result, content


def reference_variance(layer: LayerTrace, part: Tensor | None, rows: Tensor | None) -> list[float]:
    """Var(P) of each head by loops; the logit of a key at a position is the layer's own, asked for one by one."""
    result, present = [], layer.present.tolist()
    tables, whole = [], []
    for fold in range(3):
        table, content = mean_keys(layer, part, fold)
        tables.append(table)
        keys = torch.zeros_like(layer.k)
        keys += content if isinstance(content, float) else content.unsqueeze(1)  # where nobody is: CoPE counts it
        for j, mean in table.items():
            keys[:, :, j] = mean
        whole.append(layer.logits(k=keys).tolist())
    for head in range(HEADS):
        values = []
        for b in range(COUNT):
            one, two = (b + 1) % 3, (b + 2) % 3
            for i in range(LENGTH) if rows is None else rows[b].tolist():
                if not present[b][i]:
                    continue
                keys = [
                    j
                    for j in range(i + 1 if layer.causal else LENGTH)
                    if present[b][j] and j in tables[one] and j in tables[two]
                ]
                if len(keys) > 1:
                    effects = [[whole[fold][b][head][i][j] for j in keys] for fold in (one, two)]
                    values.append(np.cov(effects, bias=True)[0, 1])
        result.append(sum(values) / len(values))
    return result


def effect_variance_of(layer: LayerTrace, rows: Tensor | None = None) -> np.ndarray:
    with torch.no_grad():
        return effect_variance(layer, layer.q, layer.k, known_key_part(layer), rows).numpy()


PAPER = ("nope", "sinusoidal", "alibi", "rope", "rope-absolute", "mla", "shaw", "fox", "cope")
RELEASED = ("nope", "rope", "mla")


@pytest.mark.parametrize(
    ("encoding", "protocol"), [*((name, "paper") for name in PAPER), *((name, "released") for name in RELEASED)]
)
def test_the_position_effect_matches_loops(encoding: str, protocol: str) -> None:
    """float64, 1e-12; with and without chosen queries, with padding; what is added at the input is known exactly."""
    trace = trace_of(encoding, protocol)
    rows = LENGTHS.unsqueeze(1) - 1
    vectors = trace[0].input_position_part
    for layer in trace:
        part = None
        if layer.layer == 0 or layer.key_inputs is not layer.inputs:
            part = layer.project_part(*[vectors.expand_as(layer.inputs)] * 2)[1]
        every, read = effect_variance_of(layer), effect_variance_of(layer, rows)
        np.testing.assert_allclose(every, reference_variance(layer, part, None), rtol=0, atol=1e-12)
        np.testing.assert_allclose(read, reference_variance(layer, part, rows), rtol=0, atol=1e-12)
    if encoding != "nope" or protocol != "released":  # where there is none
        assert not np.allclose(every, read)


@pytest.mark.parametrize("encoding", ["rope", "t5", "cope", "fox", "shaw"])
@pytest.mark.parametrize("read", [False, True])
def test_logits_are_computed_in_chunks(encoding: str, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than is asked for, down to one query of one sequence; the numbers are the same (1e-12)."""
    layer = trace_of(encoding)[1]
    rows = LENGTHS.unsqueeze(1) - 1 if read else None
    sizes, form = [], module.attention_logits

    def counted(*given: Any, **options: Any) -> Tensor:
        sizes.append((made := form(*given, **options)).numel())
        return made

    monkeypatch.setattr(module, "attention_logits", counted)
    monkeypatch.setattr(LayerTrace, "logits", None)  # all of them at once
    whole = effect_variance_of(layer, rows)
    heads, length = layer.q.shape[1:3]
    for most in (heads * length * length, 3 * heads * length, heads * length):
        sizes.clear()
        monkeypatch.setattr(module, "MAX_LOGITS", most)
        np.testing.assert_allclose(effect_variance_of(layer, rows), whole, rtol=0, atol=1e-12)
        assert max(sizes) <= most


def test_grouped_queries_share_a_mean_key() -> None:
    layer = trace_of("nope")[1]
    shared = replace(layer, k=layer.k[:, :1], v=layer.v[:, :1])
    twice = replace(layer, k=layer.k[:, :1].repeat(1, HEADS, 1, 1))
    np.testing.assert_array_equal(effect_variance_of(shared), effect_variance_of(twice))


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(InputError, match=r"batches must have at least 3 sequences of one length .*, got 2"):
        effect_variance_of(AttentionTrace(DecoderSource(model_of()), tokens(2), None)[1])


@given(seed=st.integers(0, 99), batch=st.integers(1, 4), size=st.integers(1, 6), padded=st.booleans())
def test_means_match_loops(seed: int, batch: int, size: int, padded: bool) -> None:
    x = np.random.Generator(np.random.Philox(seed)).normal(size=(batch, size, 3))
    lengths = np.random.Generator(np.random.Philox(seed)).integers(1, size + 1, batch) if padded else [size] * batch
    counted = [(b, i) for b in range(batch) for i in range(lengths[b])]
    expected = np.full((size, 3), np.nan)
    for i in range(size):
        rows = [x[b, i] for b, j in counted if j == i]
        if rows:
            expected[i] = sum(rows) / len(rows) - sum(x[b, j] for b, j in counted) / len(counted)
    lengths_or_none = torch.tensor(lengths) if padded else None
    c, p = position_means(torch.from_numpy(x), lengths_or_none)
    np.testing.assert_allclose(p.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(c.numpy(), x - expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_keep_the_dtype_and_padding_is_not_counted(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    lengths = torch.tensor([3, 2, 3])
    beyond = x.clone()
    beyond[:, 3:] = torch.nan
    c, p = position_means(x, lengths)
    assert c.dtype == p.dtype == dtype
    assert p[3:].isnan().all()
    assert torch.equal(c[:, :3], x[:, :3] - p[:3])
    assert torch.equal(position_means(beyond, lengths)[1][:3], p[:3])


def test_a_length_beyond_the_input_positions_is_refused() -> None:
    with pytest.raises(InputError, match=r"lengths must be from 0 to 5, got \[3, 6\]"):
        position_means(torch.zeros(2, 5, 1), torch.tensor([3, 6]))
