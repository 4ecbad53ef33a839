"""Relevance adds up to the model's own logit, follows the rules written out, and finds planted positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.lens.models import SMALL, decoder
from torch import Tensor

from toeplens import encodings
from toeplens.backends import relevance
from toeplens.backends.decoder import propagation as module
from toeplens.lens.logits import Relevance
from toeplens.model import Decoder
from toeplens.utils import InputError

COUNT, LENGTH, LAYERS, HEADS, CLASSES = 4, 7, 2, 2, 5
SIZES = SMALL | {"num_classes": CLASSES, "d_model": 16, "d_ff": 12, "num_heads": HEADS}
OPTIONS: dict[str, dict[str, Any]] = {
    "nope": {},
    "sinusoidal": {},
    "learned": {"init_std": 1.0},
    "alibi": {},
    "t5": {},
    "relative-table": {},
    "tupe": {},
    "rope": {},
    "rope-absolute": {},
    "partial-rope": {"rotary_pct": 0.5, "heads": [0], "layers": [1]},
    "p-rope": {"p": 0.5},
    "rope-bands": {"gains": [1.0, 0.5, 0.0, 1.0]},
    "xpos": {},
    "mla": {},
}
RELEASED = ("nope", "sinusoidal", "alibi", "t5", "rope", "partial-rope", "mla")
RELEASED_TABLE = {"phase_table": "released", "rotary_query": "shared", "rotary_dim": 4}
LINEAR_ONLY = {"pope", "complexformer"}  # turn queries and keys in ways that are not linear


def perturbed_encoding(encoding: str, seed: int = 3, **fields: Any) -> Decoder:
    return decoder(seed=seed, noise=0.3, encoding=encoding, **{**SIZES, **fields})


@cache
def model_of(encoding: str, protocol: str = "paper", **switches: Any) -> Decoder:
    return perturbed_encoding(encoding, encoding_options=OPTIONS.get(encoding, {}), protocol=protocol, **switches)


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, SIZES["vocab_size"], (COUNT, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([length, 3, length - 1, 1])
    return tokens.masked_fill(torch.arange(length) >= lengths[:, None], 0), lengths


def assert_conserved(found: Relevance, logits: Tensor) -> None:
    """float64, 1e-9 of the logit and of what it is the sum of."""
    target = logits.gather(1, torch.from_numpy(found.classes)[:, None]).squeeze(1).detach().numpy()
    np.testing.assert_allclose(found.target, target, rtol=1e-9, atol=1e-12)
    size = np.abs(found.content).sum(1) + np.abs(found.position).sum(1) + np.abs(found.biases) + np.abs(found.softmax)
    assert (np.abs(found.total - target) <= 1e-9 * np.maximum(np.abs(target), 1e-3 * size)).all()


@pytest.mark.parametrize(
    ("encoding", "switches"),
    [
        *((name, {}) for name in OPTIONS),
        *((name, {"protocol": "released"}) for name in RELEASED),
        ("rope-absolute", {"readout": "mean"}),
        ("rope-absolute", {"readout": "masked-mean", "final_norm": False}),
        (
            "rope-absolute",
            {"causal": False, "activation": "gelu", "pad_mask": False, "input_encoding": "learned", "dropout": 0.5},
        ),
        ("rope-absolute", {"key_value_source": "embeddings", "attention_scale": 0.7}),
        ("mla", {"protocol": "released", "encoding_options": RELEASED_TABLE}),
    ],
    ids=str,
)
def test_relevances_sum_to_the_models_logit(encoding: str, switches: dict[str, Any]) -> None:
    model = perturbed_encoding(encoding, **{"encoding_options": OPTIONS[encoding], **switches})
    tokens, lengths = batch()
    assert_conserved(relevance(model, tokens), model(tokens))
    actual = relevance(model, tokens, lengths)
    logits = model(tokens, lengths)
    assert_conserved(actual, logits)
    assert (actual.classes == logits.argmax(-1).numpy()).all()
    assert actual.content.shape == (COUNT, LENGTH)
    assert actual.by_offset.shape == (LAYERS, HEADS, LENGTH if model.config.causal else 2 * LENGTH - 1)
    # three views of the same pairs; float64, 1e-12
    np.testing.assert_allclose(actual.by_offset.sum(-1), actual.by_layer, rtol=0, atol=1e-12)
    np.testing.assert_allclose(actual.by_layer.sum(), actual.position_attention.sum(1).mean(), rtol=0, atol=1e-12)


def test_every_encoding_is_supported_or_refused_by_name() -> None:
    tokens = batch()[0]
    for name in (name for name in (*REPRESENTATIVES, *LINEAR_ONLY) if name not in OPTIONS):
        kind = encodings.get(name)
        model = perturbed_encoding(name, num_layers=1)
        encoding = model.encoding
        known = encoding.fusable and not encoding.data_dependent and name not in LINEAR_ONLY
        if known:
            assert_conserved(relevance(model, tokens), model(tokens))
        else:
            with pytest.raises(InputError, match=f"^encoding must be .* for relevance, got {kind.__name__}"):
                relevance(model, tokens)


def test_a_per_token_model_is_refused() -> None:
    model = decoder(seed=0, noise=0.0, encoding="rope", readout="each", **SIZES)
    with pytest.raises(InputError, match=r"^readout: relevance needs a model with one answer"):
        relevance(model, batch()[0])


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("product", torch.matmul),  # weights and values each get all
        ("apply_frozen_norm", lambda norm, x, at: norm.forward(x) - norm.bias),  # the norm's own gradient
    ],
)
def test_a_wrong_rule_is_detected(rule: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("rope-absolute", "paper", activation="gelu")
    monkeypatch.setattr(module, rule, wrong)
    with pytest.raises(
        InputError, match=r"^encoding: relevance is not exact with RoPEAbsolute: a logit of .* add up to"
    ):
        relevance(model, batch()[0])


def z_rule(matrix: np.ndarray, bias: np.ndarray, x: np.ndarray, received: np.ndarray) -> tuple[np.ndarray, float]:
    """The z-rule of one vector: each term M_ij x_j of an output has its part of that output's relevance."""
    out, to_x, to_bias = matrix @ x + bias, np.zeros_like(x), 0.0
    for i, value in enumerate(out):
        if received[i]:
            for j, given_ in enumerate(x):
                to_x[j] += matrix[i, j] * given_ / value * received[i]
            to_bias += bias[i] / value * received[i]
    return to_x, to_bias


def norm_of(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A layer norm with its statistics held, as a matrix."""
    size = len(x)
    spread = math.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return np.diag(weight) @ (np.eye(size) - 1 / size) / spread


def test_one_layer_matches_relevance_by_hand() -> None:
    """One head, rotation and vectors at the input, relevances passed on in loops; numpy float64, 1e-10."""
    n, width = 3, 4
    sizes = {"vocab_size": 5, "num_classes": 3, "d_model": width, "d_ff": 5, "num_layers": 1, "num_heads": 1}
    model = decoder(noise=0.3, **sizes, max_len=n, encoding="rope-absolute")
    tokens = torch.tensor([[1, 3, 2]])
    actual = relevance(model, tokens, classes=torch.tensor([1]))
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    e = w["embedding.weight"][tokens[0].numpy()]
    theta = [1.0, 0.01]
    p = np.array([[f(i * t) for t in theta for f in (math.sin, math.cos)] for i in range(n)])
    x = e + p
    b = "blocks.0."
    norm = [norm_of(w[b + "norm_attention.weight"], row) for row in x]
    normed = [m @ row + w[b + "norm_attention.bias"] for m, row in zip(norm, x, strict=True)]
    maps = np.split(w[b + "attention.qkv.weight"], 3)
    shifts = np.split(w[b + "attention.qkv.bias"], 3)
    q, k, v = (np.array([m @ row + s for row in normed]) for m, s in zip(maps, shifts, strict=True))
    i = n - 1  # the one query that is read
    scale = width**-0.5

    def terms(j: int) -> Iterator[tuple[float, float, int, int]]:
        """Of logit (i, j): still products, and coupled ones, of each dimension of q with each of k."""
        for t, angle in enumerate(theta):
            cos, sin = math.cos((i - j) * angle) - 1, math.sin((i - j) * angle)
            for c, d, still, turn in ((0, 0, 1, cos), (1, 1, 1, cos), (0, 1, 0, sin), (1, 0, 0, -sin)):
                both = scale * q[i, 2 * t + c] * k[j, 2 * t + d]
                yield both * still, both * turn, 2 * t + c, 2 * t + d

    logits = np.array([sum(still + coupled for still, coupled, _, _ in terms(j)) for j in range(n)])
    weights = np.exp(logits) / np.exp(logits).sum()
    z = weights @ v
    after = w[b + "attention.out.weight"] @ z + w[b + "attention.out.bias"]
    middle = x[i] + after
    norm_ffn = norm_of(w[b + "norm_ffn.weight"], middle)
    into = norm_ffn @ middle + w[b + "norm_ffn.bias"]
    hidden = w[b + "ffn.0.weight"] @ into + w[b + "ffn.0.bias"]
    act = np.maximum(hidden, 0)
    added = w[b + "ffn.3.weight"] @ act + w[b + "ffn.3.bias"]
    last = middle + added
    norm_end = norm_of(w["final_norm.weight"], last)
    end = norm_end @ last + w["final_norm.bias"]
    logit = w["readout.weight"][1] @ end + w["readout.bias"][1]

    to_bias = 0.0

    def back(name: str, matrix: np.ndarray, bias: np.ndarray, at: np.ndarray, received: np.ndarray) -> np.ndarray:
        nonlocal to_bias
        to_at, own = z_rule(matrix, bias, at, received)
        to_bias += own
        return to_at

    r = back("readout", w["readout.weight"][1:2], w["readout.bias"][1:2], end, np.array([logit]))
    r = back("end", norm_end, w["final_norm.bias"], last, r)
    r_middle, r_added = r * middle / last, r * added / last
    r_hidden = back("ffn.3", w[b + "ffn.3.weight"], w[b + "ffn.3.bias"], act, r_added)
    r_into = back("ffn.0", w[b + "ffn.0.weight"], w[b + "ffn.0.bias"], into, r_hidden)
    r_middle = r_middle + back("norm_ffn", norm_ffn, w[b + "norm_ffn.bias"], middle, r_into)
    r_x = np.zeros((n, width))
    r_x[i] = r_middle * x[i] / middle
    r_z = back("out", w[b + "attention.out.weight"], w[b + "attention.out.bias"], z, r_middle * after / middle)
    r_v, r_weights = np.zeros((n, width)), np.zeros(n)
    for j in range(n):
        for c in range(width):
            term = weights[j] * v[j, c] / z[c] * r_z[c]
            r_weights[j] += term / 2
            r_v[j, c] += term / 2
    r_logits = logits * (r_weights - weights * r_weights.sum())
    r_q, r_k, place, offset = np.zeros((n, width)), np.zeros((n, width)), np.zeros(n), np.zeros(n)
    for j in range(n):
        for still, coupled, c, d in terms(j):
            part = r_logits[j] / logits[j]
            r_q[i, c] += part * (still / 2 + coupled / 4)
            r_k[j, d] += part * (still / 2 + coupled / 4)
            place[i] += part * coupled / 4
            place[j] += part * coupled / 4
            offset[i - j] += part * coupled / 2
    for received, matrix, shift in zip((r_q, r_k, r_v), maps, shifts, strict=True):
        for j in range(n):
            r_normed = back("qkv", matrix, shift, normed[j], received[j])
            r_x[j] += back("norm", norm[j], w[b + "norm_attention.bias"], x[j], r_normed)

    close = {"rtol": 0, "atol": 1e-10}
    np.testing.assert_allclose(actual.target, [logit], **close)
    np.testing.assert_allclose(actual.content[0], (r_x * e / x).sum(1), **close)
    np.testing.assert_allclose(actual.position_input[0], (r_x * p / x).sum(1), **close)
    np.testing.assert_allclose(actual.position_attention[0], place, **close)
    np.testing.assert_allclose(actual.by_offset[0, 0], offset, **close)
    np.testing.assert_allclose(actual.biases, [to_bias], **close)
    np.testing.assert_allclose(actual.softmax, [r_weights.sum() - r_logits.sum()], **close)


def test_batch_splitting_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("rope-absolute")
    whole = relevance(model, *batch())
    monkeypatch.setattr(module, "_MAX_PAIRS", 3 * HEADS * LENGTH**2)
    pieces = relevance(model, *batch())
    for name in ("content", "by_layer", "by_offset", "softmax", "classes"):
        np.testing.assert_allclose(getattr(pieces, name), getattr(whole, name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", ["alibi", "rope-absolute"])
@pytest.mark.parametrize("switches", [{}, {"readout": "masked-mean", "causal": False}], ids=str)
def test_masked_padding_receives_no_relevance(encoding: str, switches: dict[str, Any]) -> None:
    """And more of it changes nothing; float64, 1e-10."""
    model = model_of(encoding, **switches)
    tokens, lengths = batch()
    actual = relevance(model, tokens, lengths)
    padding = (torch.arange(LENGTH) >= lengths[:, None]).numpy()
    assert padding.any()
    assert not actual.content[padding].any()
    assert not actual.position[padding].any()
    longer = relevance(model, torch.nn.functional.pad(tokens, (0, 1), value=4), lengths)
    np.testing.assert_allclose(longer.content[:, :LENGTH], actual.content, rtol=0, atol=1e-10)
    np.testing.assert_allclose(longer.position[:, :LENGTH], actual.position, rtol=0, atol=1e-10)


def test_invalid_classes_and_empty_batches_are_refused() -> None:
    model, tokens = model_of("rope"), batch()[0]
    for classes in ([0, 1], [-1, 0, 0, 0]):
        with pytest.raises(InputError, match=r"^classes must be 4 numbers from 0 to 4, got \[.*\]\.$"):
            relevance(model, tokens, classes=torch.tensor(classes))
    with pytest.raises(InputError, match=r"^tokens must have shape .*, got shape \[0, 7\]"):
        relevance(model, tokens[:0])
