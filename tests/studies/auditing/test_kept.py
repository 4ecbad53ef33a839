"""An audit that was stopped goes on where it was, with the numbers of one that was not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import tiny

from toeplens.ground import InputError
from toeplens.sources.huggingface.replay import Passes
from toeplens.studies import auditing
from toeplens.studies.auditing import Audit, audit, measuring
from toeplens.studies.auditing.record import PARTS

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = torch.randint(3, 40, (9, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **SIZES, num_key_value_heads=1)


@pytest.fixture(scope="module")
def whole(model: Any) -> Audit:
    return audit(model, TOKENS)


class Stop:
    """Ends an audit once so much of something is done, as a signal does."""

    def __init__(self, what: str, done: int) -> None:
        self.at = what, done

    def __call__(self, what: str, done: int, total: int) -> None:
        if (what, done) == self.at:
            raise KeyboardInterrupt


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a call was measured and heads' outputs were replaced."""
    counts = {"measured": 0, "passes": 0}

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return counting

    monkeypatch.setattr(measuring, "measure_call", count("measured", measuring.measure_call))
    monkeypatch.setattr(Passes, "effects", count("passes", Passes.effects))
    return counts


def same(one: Audit, other: Audit) -> bool:
    about = {"seconds": 0}
    return replace(one, about=one.about | about) == replace(other, about=other.about | about)


def test_an_audit_goes_on_layer_by_layer(model: Any, whole: Audit, tmp_path: Path, counted: dict[str, int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        audit(model, TOKENS, keep=tmp_path, on_progress=Stop("layers", 2))
    assert counted["measured"] == 2
    with pytest.raises(KeyboardInterrupt):
        audit(model, TOKENS, keep=tmp_path, on_progress=Stop("heads", 4))
    assert counted["measured"] == 3
    passes = counted["passes"]
    found = audit(model, TOKENS, keep=tmp_path)
    assert counted["measured"] == 3
    assert same(found, whole)
    again, counted["passes"] = counted["passes"] - passes, 0
    audit(model, TOKENS)
    assert again < counted["passes"]  # the first layer's heads were not silenced again
    auditing.save(found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"audit.json", "heads.csv", "heads.parquet"}


def test_parts_of_another_audit_and_damaged_ones_are_not_used(
    model: Any, whole: Audit, tmp_path: Path, counted: dict[str, int]
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
    assert same(audit(model, TOKENS, keep=tmp_path), whole)
    others: tuple[dict[str, Any], ...] = ({"seed": 1}, {"layers": [0, 2]}, {"sequences": 8})
    for options in others:
        counted["measured"] = 0
        found = audit(model, TOKENS, keep=tmp_path, effects="none", **options)
        assert counted["measured"] == len(found.layers)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight[0, 0] += 0.5
    counted["measured"] = 0
    audit(other, TOKENS, keep=tmp_path, effects="none")
    assert counted["measured"] == 3


def test_a_refused_audit_leaves_nothing(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layers must be from .*, got 7"):
        audit(model, TOKENS, layers=[0, 7], keep=tmp_path)
    assert list(tmp_path.iterdir()) == []
