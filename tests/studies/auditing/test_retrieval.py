"""An audit's retrieval scores are those of needles in its own text, measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.hf.models import GROUPED, SIZES, T5, tiny
from tests.studies.probing.models import TEXT, save_model, tokenizer

from toeplens.backends.hf.load import load_model
from toeplens.studies.auditing import audit, study
from toeplens.studies.kit.probe_items import ItemWriter, measure_retrieval
from toeplens.utils import InputError

OPTIONS: dict[str, Any] = {"sequences": 2, "max_tokens": 72, "effects": "none", "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def test_scores_match_each_needle_measured_alone(model: Path) -> None:
    actual = audit(str(model), TEXT, needles=3, **OPTIONS)
    assert actual.about["needles"] == 3
    own, writer = load_model(str(model), device="cpu"), ItemWriter(tokenizer(), TEXT, 0)
    expected = measure_retrieval(own, [writer.needle_item(72, depth) for depth in (0.0, 0.5, 1.0)], lambda *_: None)
    assert [head.retrieval for head in actual.heads] == [head.score for head in expected]
    with pytest.raises(InputError, match=r"^max_tokens must be larger than the .* tokens of a needle .*, got 24"):
        audit(str(model), TEXT, needles=2, **OPTIONS | {"max_tokens": 24})
    assert all(head.retrieval is None for head in audit(str(model), TEXT, **OPTIONS).heads)


def test_retrieval_scores_are_measured_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew where other needles are asked for."""
    counts: list[int] = []
    own = study.measure_retrieval
    monkeypatch.setattr(study, "measure_retrieval", lambda *given: (counts.append(len(given[1])), own(*given))[1])
    for needles in (2, 2, 3):
        audit(str(model), TEXT, needles=needles, keep=tmp_path, **OPTIONS)
    assert counts == [2, 3]


@pytest.mark.parametrize(
    ("kind", "sizes", "data", "said"),
    [
        ("LlamaForCausalLM", GROUPED, torch.ones(2, 72, dtype=torch.long), "must not be set without a text"),
        ("BertModel", SIZES, TEXT, "need causal attention, .* sees later keys"),
        ("T5ForConditionalGeneration", T5, TEXT, "must not be set for a model with an encoder"),
    ],
)
def test_a_text_without_needles_is_refused(kind: str, sizes: dict[str, Any], data: Any, said: str) -> None:
    made = tiny(kind, **sizes | {"vocab_size": 700, "max_position_embeddings": 80})
    with pytest.raises(InputError, match=f"^needles {said}"):
        audit(made, data, tokenizer=tokenizer(), needles=2, **OPTIONS)
