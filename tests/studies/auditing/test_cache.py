"""An audit that was stopped goes on where it was, with the numbers of one that was not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.hf.models import tiny

from toeplens.backends.hf.replay import ReplayedPasses
from toeplens.studies import auditing
from toeplens.studies.auditing import Audit, audit, measuring
from toeplens.studies.auditing.record import PARTS, model_identity
from toeplens.utils import InputError

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = torch.randint(3, 40, (9, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **SIZES, num_key_value_heads=1)


@pytest.fixture(scope="module")
def uninterrupted(model: Any) -> Audit:
    return audit(model, TOKENS)


class Stop:
    """Ends an audit once so much of something is done, as a signal does."""

    def __init__(self, what: str, done: int) -> None:
        self.at = what, done

    def __call__(self, what: str, done: int, total: int) -> None:
        if (what, done) == self.at:
            raise KeyboardInterrupt


@pytest.fixture
def work_counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a call was measured and heads' outputs were replaced."""
    counts = {"measured": 0, "passes": 0}

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return counting

    monkeypatch.setattr(measuring, "measure_call", count("measured", measuring.measure_call))
    monkeypatch.setattr(ReplayedPasses, "effects", count("passes", ReplayedPasses.effects))
    return counts


def assert_same_audit(one: Audit, other: Audit) -> bool:
    about = {"seconds": 0}
    return replace(one, about=one.about | about) == replace(other, about=other.about | about)


def test_an_interrupted_audit_is_resumed_layer_by_layer(
    model: Any, uninterrupted: Audit, tmp_path: Path, work_counts: dict[str, int]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        audit(model, TOKENS, keep=tmp_path, on_progress=Stop("layers", 2))
    assert work_counts["measured"] == 2
    with pytest.raises(KeyboardInterrupt):
        audit(model, TOKENS, keep=tmp_path, on_progress=Stop("heads", 4))
    assert work_counts["measured"] == 3
    passes = work_counts["passes"]
    actual = audit(model, TOKENS, keep=tmp_path)
    assert work_counts["measured"] == 3
    assert assert_same_audit(actual, uninterrupted)
    again, work_counts["passes"] = work_counts["passes"] - passes, 0
    audit(model, TOKENS)
    assert again < work_counts["passes"]  # the first layer's heads were not silenced again
    auditing.save_audit(actual, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"audit.json", "heads.csv", "heads.parquet"}


@pytest.mark.filterwarnings("ignore")  # of torch.ao
@pytest.mark.parametrize("kind", ["quantised", "offloaded"])
def test_a_model_with_unreadable_weights_is_not_resumed(model: Any, kind: str) -> None:
    other = copy.deepcopy(model).to("meta")
    if kind == "quantised":
        other = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    with pytest.raises(InputError, match=r"^keep must not be set for a model whose weights cannot be read"):
        model_identity(other, None)


def test_foreign_or_damaged_cache_files_are_not_used(
    model: Any, uninterrupted: Audit, tmp_path: Path, work_counts: dict[str, int]
) -> None:
    audit(model, TOKENS, keep=tmp_path)
    parts = sorted((tmp_path / PARTS).iterdir())
    names = {f"{name}-{number}.{end}" for name, end in (("layer", "json"), ("effects", "npy")) for number in range(3)}
    assert {path.name for path in parts} == names | {"pass.json"}
    for number, path in enumerate(parts):  # a bit that fell over, half a file, none
        content = path.read_bytes()
        fallen = bytearray(content)
        fallen[-2] ^= 1
        path.write_bytes((bytes(fallen), content[: len(content) // 2], b"")[number % 3])
    assert assert_same_audit(audit(model, TOKENS, keep=tmp_path), uninterrupted)
    others: tuple[dict[str, Any], ...] = ({"seed": 1}, {"layers": [0, 2]}, {"sequences": 8})
    for options in others:
        work_counts["measured"] = 0
        actual = audit(model, TOKENS, keep=tmp_path, effects="none", **options)
        assert work_counts["measured"] == len(actual.layers)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight[0, 0] += 0.5
    work_counts["measured"] = 0
    audit(other, TOKENS, keep=tmp_path, effects="none")
    assert work_counts["measured"] == 3


def test_a_refused_audit_leaves_no_files(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layers must be from .*, got 7"):
        audit(model, TOKENS, layers=[0, 7], keep=tmp_path)
    assert list(tmp_path.iterdir()) == []
