"""Estimates of trained models' heads against the exact effects that the records hold, over the same tokens."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toeplens.lens.kit.intervals import spearman
from toeplens.papers.positional_symbolic.pretrained.making import Making
from toeplens.papers.positional_symbolic.pretrained.plan import Plan
from toeplens.sources.huggingface import load_model
from toeplens.sources.huggingface.effects import attribution
from toeplens.sources.huggingface.effects.head_effects import head_estimates

ROOT = Path(__file__).parents[4]
TEXTS = ("code", "documentation", "novel")
# rank correlation with exact effects, of silencing and of taking position: at least with both orders, and at most with
# the first alone
BARS = {("smollm2", "exact"): (0.9, 0.7), ("smollm2", "position"): (0.9, 0.6)}
BARS |= {("gemma3", "exact"): (0.75, 0.3), ("gemma3", "position"): (0.85, 0.0)}

pytestmark = pytest.mark.heavy


@cache
def opened(name: str) -> tuple[Any, dict[str, Any], list[tuple[str, str, str, int, int]]]:
    """The model, what its recorded effects are of, and its calls."""
    path = ROOT / "models" / name
    if not path.exists():
        pytest.skip(f"{path} is not there: make real-models fetches it")
    loaded = load_model(str(path), device="cpu")
    texts = {each: (ROOT / "models" / "texts" / f"{each}.txt").read_text() for each in TEXTS}
    making = Making(loaded, Plan(model=name, texts=texts), path, lambda what, done, total: None)
    tokens = torch.from_numpy(making.windows[:, :256])
    config = loaded.model.config
    calls = [
        (f"model.layers.{layer}.self_attn", "decoder", "self", layer, config.num_attention_heads)
        for layer in range(config.num_hidden_layers)
    ]
    return loaded.model, {"input_ids": tokens}, calls


@cache
def recorded(name: str) -> dict[str, tuple[np.ndarray, float]]:
    """[L H] exact effects of each head, of silencing it and of taking its position; and the intact loss."""
    content = json.loads(lzma.decompress((ROOT / "results" / name / "results.json.xz").read_bytes()))
    audits = {"exact": content["audits"]["silenced"], "position": content["audits"]["position"]}
    assert all((each["about"]["sequences"], each["about"]["tokens"]) == (6, 256) for each in audits.values())
    return {
        of: (np.array([head["effect"] for head in each["heads"]], dtype=float), each["baseline"])
        for of, each in audits.items()
    }


@pytest.mark.parametrize("of", ["exact", "position"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_estimates_order_heads_as_the_record_does(name: str, of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, calls = opened(name)
    exact, baseline = recorded(name)[of]
    ranks, sizes = [], []
    for draws in (attribution._DRAWS, 0):
        monkeypatch.setattr(attribution, "_DRAWS", draws)
        found = head_estimates(model, inputs, calls, of=of, seed=42)
        assert found.baseline is not None
        assert float(found.baseline.mean()) == pytest.approx(baseline, abs=1e-4), "the same tokens"
        estimates = np.concatenate([each.mean((0, 1)) for each in found.parts])
        ranks.append(float(spearman(np.stack((exact, estimates)))))
        sizes.append(float(exact @ estimates / (estimates @ estimates)))
    least, most = BARS[name, of]
    assert ranks[0] >= least
    assert ranks[1] <= most
    if (name, of) == ("smollm2", "exact"):
        assert 0.8 < sizes[0] < 1.25
