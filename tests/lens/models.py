"""Small decoders with random weights everywhere, texts for them, and the plain programs that run them with a change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.stats import entropy
from torch import Tensor

from toeplens.lens import Batch
from toeplens.model import Decoder, decoder_config

FREQUENCIES = (0.0, math.pi, 2 * math.pi, -math.pi, 1e-9, 1e-4, 0.01, 0.3, 1.0, 1.0, 2.5, -0.7)
SMALL = {"vocab_size": 9, "num_classes": 5, "d_model": 24, "d_ff": 20, "num_layers": 2, "num_heads": 3, "max_len": 8}


def decoder(*, seed: int = 0, noise: float = 0.2, **fields: Any) -> Decoder:
    """In float64 and evaluation, every weight moved by noise, so that every term is something."""
    torch.manual_seed(seed)
    model = Decoder(decoder_config(**fields)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def loud_decoder(*, seed: int = 0, **fields: Any) -> Decoder:
    """The same with large matrices, so that every head does something."""
    model = decoder(seed=seed, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embedding" not in name and "encoding" not in name:
                parameter.copy_(1.5 * torch.randn(parameter.shape) / parameter.shape[1] ** 0.5)
    return model


def examples(
    count: int, length: int, *, vocabulary: int = 9, classes: int = 5, padded: bool = True, ignored: int = 0
) -> Batch:
    """Random texts, padded with 0 to at least 2 tokens, and random labels; the first ``ignored`` do not count."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, vocabulary, (count, length), generator=draw)
    lengths = torch.randint(2, length + 1, (count,), generator=draw) if padded else None
    if lengths is not None:
        tokens = tokens.masked_fill(torch.arange(length) >= lengths[:, None], 0)
    labels = torch.randint(0, classes, (count,), generator=draw)
    labels[:ignored] = -100
    return tokens, labels, lengths


def split(batch: Batch, size: int) -> list[Batch]:
    """The batch in pieces."""
    tokens, labels, lengths = batch
    cuts = [slice(i, i + size) for i in range(0, len(tokens), size)]
    return [(tokens[cut], labels[cut], None if lengths is None else lengths[cut]) for cut in cuts]


@torch.no_grad()
def with_model_labels(model: Decoder, batch: Batch, *, ignored: int) -> Batch:
    """The same texts, two labels in three being what the model answers; of some the labels do not count."""
    tokens, labels, lengths = batch
    answers = model(tokens, lengths).argmax(-1)
    answers[::3] = labels[::3]
    answers[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))[:ignored]] = -100
    return tokens, answers, lengths


def metric_per_example(metric: str, logits: Tensor, intact: Tensor, labels: Tensor) -> np.ndarray:
    """The metric of each example that counts, from its definition."""
    rows = [b for b in range(len(labels)) if labels[b] >= 0]
    p, q = (np.exp(x.log_softmax(-1).numpy()) for x in (intact, logits))
    if metric == "accuracy":
        return np.array([float(q[b].argmax() == labels[b]) for b in rows])
    return np.array([-np.log(q[b][labels[b]]) if metric == "loss" else entropy(p[b], q[b]) for b in rows])


@torch.no_grad()
def logits_with_heads(model: Decoder, batch: Batch, given: dict[tuple[int, int], Tensor | int]) -> Tensor:
    """The whole model run anew; hooks put outputs [b, N, d] into heads' slices of the INPUT of each projection."""
    tokens, _, lengths = batch
    handles = []
    for (layer, head), outputs in given.items():

        def put(_: Any, args: tuple[Tensor], head: int = int(head), outputs: Any = outputs) -> tuple[Tensor]:
            z = args[0].clone()
            if isinstance(outputs, Tensor) and z.shape[1] == 1:  # one position is read
                last = torch.full((len(tokens),), tokens.shape[1]) if lengths is None else lengths
                outputs = outputs[torch.arange(len(tokens)), last - 1][:, None]
            z.unflatten(-1, (model.config.num_heads, -1))[..., head, :] = outputs
            return (z,)

        handles.append(model.block(int(layer)).attention.out.register_forward_pre_hook(put))
    try:
        return model(tokens, lengths)
    finally:
        for handle in handles:
            handle.remove()


def logits_without_heads(model: Decoder, batch: Batch, silent: Iterable[tuple[int, int]]) -> Tensor:
    """The whole model run anew with these heads at zero."""
    return logits_with_heads(model, batch, dict.fromkeys(silent, 0))


def reference_share(part: Tensor, total: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance over variance, of [B, H, N, N] over the pairs seen [B, N, N]; and with each row's mean taken out."""
    shares = []
    for rows in (False, True):
        x, y = (z.masked_fill(~seen.unsqueeze(1), 0) for z in (part, total))
        if rows:
            x, y = (z - (z.sum(-1) / seen.sum(-1).clamp(min=1).unsqueeze(1)).unsqueeze(-1) for z in (x, y))
        x, y = (z.transpose(0, 1)[:, seen] for z in (x, y))
        x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
        shares.append((x * y).sum(-1) / y.square().sum(-1))
    return shares[0], shares[1]


@st.composite
def attention_cases(draw: st.DrawFn, least: int = 2) -> dict[str, Any]:
    """Any input that `behaviour` and `frequency_use` take of tensors; a query may see at least ``least - 1`` keys."""
    heads, groups, count = draw(st.sampled_from([(1, 1, 2), (2, 1, 1), (4, 2, 1), (2, 2, 2)]))
    length, width = draw(st.integers(least, 8)), draw(st.integers(1, 6))
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    causal, pairs = draw(st.booleans()), draw(st.integers(0, width // 2))
    rows = draw(st.sampled_from([1, heads]))
    picked = draw(st.lists(st.sampled_from(FREQUENCIES), min_size=rows * pairs, max_size=rows * pairs))
    places = draw(st.sampled_from([None, (length, width), (groups, length, width), (count, groups, length, width)]))
    bias = draw(st.sampled_from([(), (1,), (heads,), (count, heads), (1, 1)]))
    ends = (length, length) if len(bias) == 2 else (length if causal else 2 * length - 1,)
    return {
        "q": normal(count, heads, length, width),
        "k": normal(count, groups, length, width) + 2 * normal(groups, 1, width),
        "rotation": torch.tensor(picked, dtype=torch.float64).reshape(rows, pairs) if pairs else None,
        "pairing": draw(st.sampled_from(["interleaved", "half"])),
        "layout": "bhnd",
        "bias": normal(*bias, *ends) + 3 if bias else None,  # by offset, or by query and position
        "k_position": None if places is None else normal(*places),
        "causal": causal,
        "window": draw(st.sampled_from([None, None, *range(least - 1, 6), 9])),
        "chunk": draw(st.sampled_from([None, None, *range(least - 1, 4), 5, 9])),
        "scale": draw(st.sampled_from([1.0, 0.5])),
        "lengths": torch.tensor([length, *draw(st.lists(st.integers(0, length), min_size=1, max_size=1))][:count]),
    }
