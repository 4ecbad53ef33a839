"""What an audit will need is said before it starts: more for more heads, tokens and kinds of effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.architectures.models import small_model
from tests.backends.hf.test_load import LLAMA, random_model, save_checkpoint
from tests.backends.hf.test_offload import bound

from toeplens.backends.hf.load import LoadedModel, open_model
from toeplens.studies.auditing import estimate, study
from toeplens.studies.auditing.estimate import AuditEstimate, estimate_audit
from toeplens.studies.auditing.inputs import AuditContext, given_tokens
from toeplens.studies.auditing.record import AuditCache
from toeplens.studies.auditing.study import audit_in
from toeplens.studies.kit.options import AuditOptions

MODEL = LLAMA | {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}


def estimated(tokens: tuple[int, int], loaded: LoadedModel | None = None, **options: Any) -> AuditEstimate:
    loaded = loaded or LoadedModel(random_model("LlamaForCausalLM", **MODEL))
    sequences = given_tokens(torch.zeros(tokens, dtype=torch.long), tokens[0], None)
    context = AuditContext(
        loaded, AuditOptions(**options), sequences, {}, None, (), AuditCache(None, {}), lambda *_: None
    )
    actual = estimate_audit(context)
    assert actual is not None
    return actual


def test_more_work_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_measure_speed", lambda device, dtype: 1e9)
    seconds = [
        estimated((1, 128), None, **options).seconds
        for options in (
            {"effects": "none", "layers": (1,)},
            {"effects": "none"},
            {"effects": "exact", "heads": (0,)},
            {"effects": "exact"},
        )
    ]
    assert sorted(set(seconds)) == seconds
    wide = LoadedModel(random_model("LlamaForCausalLM", **MODEL | {"hidden_size": 256, "num_attention_heads": 32}))
    bands, exact = (estimated((1, 128), wide, effects=name).seconds for name in ("bands", "exact"))
    assert bands < exact, "8 bands of a layer, and 32 heads"
    none, more, longer = (estimated(size, effects="none") for size in ((1, 128), (3, 128), (1, 384)))
    assert none.seconds < more.seconds < longer.seconds, "attention grows with the square of the length"
    assert none.memory < more.memory == longer.memory


def test_a_products_speed_is_measured() -> None:
    assert 1e8 < estimate._measure_speed(torch.device("cpu"), torch.float32) < 1e13


def test_unequal_layers_and_an_encoder_decoder_have_no_estimate() -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    different = LoadedModel(small_model("dots3_note_text"))  # layers of two kinds
    loaded = LoadedModel(random_model("T5ForConditionalGeneration", **sizes))
    tokens = given_tokens([[1, 2]], 1, None)
    for each in (loaded, different):
        work = AuditContext(each, AuditOptions(), tokens, {}, None, (), AuditCache(None, {}), lambda *_: None)
        assert estimate_audit(work) is None


def test_a_long_audit_and_one_from_disk_say_it_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = save_checkpoint(random_model("LlamaForCausalLM", **MODEL), tmp_path / "model")
    tokens = torch.randint(40, (1, 64))
    (tmp_path / "tokens.json").write_text(str(tokens.tolist()))
    lines: list[str] = []

    def run(out: str, **options: Any) -> None:
        audit_in(
            tmp_path / out,
            str(place),
            tmp_path / "tokens.json",
            AuditOptions(effects="none", device="cpu", **options),
            on_progress=lambda what, *_: lines.append(what),
            on_estimate=lines.append,
        )

    run("short")
    assert set(lines) == {"layers"}
    monkeypatch.setattr(study, "LONG", 0.0)
    lines.clear()
    run("long")
    assert "/model: about 6" in lines[0]
    assert lines[0].endswith("second") or lines[0].endswith("seconds")
    monkeypatch.setattr(study, "LONG", 1e9)
    lines.clear()
    run("disk", memory=bound(place, weights=20_000, tokens=64))
    assert "are read from disk in each pass" in lines[0]


def test_the_weights_that_stay_on_disk_do_not_count_as_memory(tmp_path: Path) -> None:
    place = save_checkpoint(random_model("LlamaForCausalLM", **MODEL), tmp_path / "model")
    loaded = open_model(str(place), device="cpu", memory=bound(place, weights=20_000))
    assert loaded.plan is not None
    in_memory, from_disk = estimated((1, 64)), estimated((1, 64), loaded)
    weights = 4 * sum(weight.numel() for weight in loaded.model.parameters())
    assert from_disk.on_disk == loaded.plan.on_disk > 0
    assert in_memory.memory - from_disk.memory == weights - loaded.plan.peak > 0
