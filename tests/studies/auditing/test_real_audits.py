"""Audits of trained models whose attention logits are large: Qwen2.5-Coder, with key biases of tens."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy.stats import spearmanr
from torch import Tensor, tensor

from toeplens.backends.hf import load_model, load_tokenizer
from toeplens.studies import audit
from toeplens.utils import InputError

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]


def open_published_audit(name: str) -> str:
    path = ROOT / "models" / name
    if not (path / "config.json").exists():
        pytest.skip(f"{path} is not there: make real-models MODELS={name} fetches it")
    return str(path)


def texts(name: str, tokens: int) -> Tensor:
    """The first tokens of a novel and of Python code."""
    folder = ROOT / "models" / "texts"
    if not folder.exists():
        pytest.skip(f"{folder} is not there: make real-models MODELS=texts fetches it")
    tokenizer = load_tokenizer(name)
    read = [(folder / f"{each}.txt").read_text()[: 20 * tokens] for each in ("novel", "code")]
    return tensor([tokenizer(text).input_ids[:tokens] for text in read])


@pytest.mark.parametrize(
    ("name", "logit", "allowed", "correlation"),
    [
        ("qwen2.5-coder-0.5b", (1000, 3000), (1e-4, 1e-3), 0.98),
        ("qwen2.5-coder-1.5b", (10_000, 20_000), (2e-3, 1e-2), 0.98),
    ],
)
def test_large_logits_are_proved(
    name: str, logit: tuple[float, float], allowed: tuple[float, float], correlation: float
) -> None:
    """In float32; the tolerance follows from the logits, layer by layer. What heads do is as in other models."""
    model = load_model(open_published_audit(name), dtype="float32", device="cpu")
    actual = audit(model, texts(open_published_audit(name), 512), effects="none")
    first = actual.layers[0]
    assert logit[0] < first.logit < logit[1]
    assert allowed[0] < first.tolerance < allowed[1]
    assert all(layer.used is not None and layer.used < 0.7 and layer.undecided == 0 for layer in actual.layers)
    assert all(layer.tolerance < 1e-4 for layer in actual.layers[-10:])
    assert all(layer.unknown is None for layer in actual.layers)
    shares = [(head.positional, head.centre) for head in actual.heads]
    assert spearmanr(*zip(*shares, strict=True)).statistic == pytest.approx(correlation, abs=0.01)
    previous = sorted(actual.heads, key=lambda head: -(head.previous or 0))[:6]
    induction = sorted(actual.heads, key=lambda head: -(head.induction or 0))[:6]
    assert all((head.positional or 0) > 0.8 for head in previous)
    assert all((head.symbolic or 0) > 0.85 for head in induction)


def test_bfloat16_is_too_coarse_for_its_first_layer() -> None:
    name = open_published_audit("qwen2.5-coder-0.5b")
    model = load_model(name, dtype="bfloat16", device="cpu")
    with pytest.raises(
        InputError, match=r"bfloat16 is too coarse for the attention of model.layers.0.*--dtype float32"
    ):
        audit(model, texts(name, 128), effects="none")
