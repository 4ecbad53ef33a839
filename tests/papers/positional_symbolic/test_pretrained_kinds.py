"""Models whose position is a bias, or in what their heads read; an encoder's claims are those of results/minilm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.studies.probing.models import TEXT, tokenizer

from toeplens.backends.hf import load_model
from toeplens.papers.positional_symbolic.pretrained import PretrainedStudy, examine, gather
from toeplens.papers.positional_symbolic.pretrained.parts import GROUP_SIZE
from toeplens.studies.auditing import audit

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

TEXTS = {"one": f"{TEXT} {TEXT} {TEXT}", "other": TEXT[::-1]}
SIZES: dict[str, Any] = {"sequences": 3, "tokens": 20, "effect_tokens": 20, "probe_tokens": 96}
MODEL_KINDS = {
    "alibi": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=700, hidden_size=32, n_layer=2, n_head=4)
    ),
    "encoder": lambda: transformers.BertModel(
        transformers.BertConfig(
            vocab_size=700,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=32,
        )
    ),
}

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, build in MODEL_KINDS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            build().save_pretrained(folders[name])
        tokenizer().save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def alibi(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> PretrainedStudy:
    return examine(str(models["alibi"]), TEXTS, tmp_path_factory.mktemp("study"), device="cpu", **SIZES)


@pytest.fixture(scope="module")
def encoder(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> PretrainedStudy:
    return examine(str(models["encoder"]), TEXTS, tmp_path_factory.mktemp("study"), device="cpu", **SIZES)


def test_position_is_removed_from_heads_with_a_bias(alibi: PretrainedStudy) -> None:
    """As `toeplens audit --effects position` does; there are no bands of frequencies to be stopped."""
    assert alibi.is_complete
    assert (alibi.plan.turns, alibi.plan.biased, alibi.plan.together) == (False, True, 1)
    assert {"position", "silenced", "intact", "no-retrieval"} <= {*alibi.audits, *alibi.probes}
    assert not {"bands", "still-0", "slow-silent", "retrieval-still"} & {*alibi.audits, *alibi.probes}
    assert all(head.effect is not None for head in alibi.audits["position"].heads)
    actual = {entry.claim.id: (entry.verdict, "; ".join(entry.evidence)) for entry in alibi.entries}
    assert "from removing position from the most positional head" in actual["position-worth"][1]
    for claim in ("positional-frequency", "correspondence-learned", "previous-token-fast", "retrieval-slow"):
        assert actual[claim][0] == "undecided"
        assert actual[claim][1].endswith("the model has no rotation")


def test_models_with_position_in_the_keys_measure_several_sequences(encoder: PretrainedStudy) -> None:
    assert encoder.is_complete
    assert (encoder.plan.turns, encoder.plan.biased, encoder.plan.together) == (False, False, 32)
    assert set(encoder.audits) == {f"{kind}-{at}" for kind in ("text", "random", "shuffled") for at in range(6)} | {
        "silenced"
    }
    assert encoder.probes == {}
    for each in encoder.audits.values():
        assert each.about["sequences"] == (192 if each is encoder.audits["silenced"] else 32)
        for head in each.heads:
            assert head.positional is not None
            assert abs(head.positional + (head.symbolic or 0) + (head.interaction or 0) - 1) < 1e-6


def test_heads_without_position_can_be_purely_symbolic(models: dict[str, Path]) -> None:
    """The mean over a group keeps 1/32 of what keys hold, which the pure heads' tenth has room for; 1/8 it had not."""
    loaded = load_model(str(models["encoder"]), device="cpu")
    loaded.model.embeddings.position_embeddings.weight.data.zero_()
    tokens = np.random.default_rng(0).integers(0, 700, (GROUP_SIZE, 30))
    shares = [head.symbolic or 0 for head in audit(loaded, tokens, sequences=GROUP_SIZE, effects="none").heads]
    assert 0.95 < min(shares) < max(shares) < 0.98
    few = [head.symbolic or 0 for head in audit(loaded, tokens[:8], effects="none").heads]
    assert max(few) < 0.9


def test_pages_are_made_for_all_model_kinds(alibi: PretrainedStudy, encoder: PretrainedStudy) -> None:
    assert "groups of 32 sequences of 20 tokens per text" in encoder.page().html()
    assert "sequences of 20 tokens per text" in alibi.page().html()
    for study in (alibi, encoder):
        assert np.isfinite(study.heads("text").columns["positional"]).all()  # type: ignore[union-attr]
        assert gather(study.directory).entries == study.entries
        header = json.loads((study.directory / "study.json").read_text())
        assert (header["biased"], header["together"]) == (study.plan.biased, study.plan.together)
