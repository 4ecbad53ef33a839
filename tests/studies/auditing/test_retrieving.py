"""An audit's retrieval scores are those of needles in its own text, measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sources.huggingface.models import GROUPED, SIZES, T5, tiny
from tests.studies.probing.models import TEXT, saved, tokenizer

from toeplens.ground import InputError
from toeplens.sources.huggingface.load import load_model
from toeplens.studies.auditing import audit, study
from toeplens.studies.kit.questions import Writer, retrieval_of

OPTIONS: dict[str, Any] = {"sequences": 2, "max_tokens": 72, "effects": "none", "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "tiny")


def test_scores_are_those_of_each_needle_alone(model: Path) -> None:
    found = audit(str(model), TEXT, needles=3, **OPTIONS)
    assert found.about["needles"] == 3
    own, writer = load_model(str(model), device="cpu"), Writer(tokenizer(), TEXT, 0)
    wanted = retrieval_of(own, [writer.needle(72, depth) for depth in (0.0, 0.5, 1.0)], lambda *_: None)
    assert [head.retrieval for head in found.heads] == [head.score for head in wanted]
    with pytest.raises(InputError, match=r"^max_tokens must be larger than the .* tokens of a needle .*, got 24"):
        audit(str(model), TEXT, needles=2, **OPTIONS | {"max_tokens": 24})
    assert all(head.retrieval is None for head in audit(str(model), TEXT, **OPTIONS).heads)


def test_they_are_measured_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew where other needles are asked for."""
    counts: list[int] = []
    own = study.retrieval_of
    monkeypatch.setattr(study, "retrieval_of", lambda *given: (counts.append(len(given[1])), own(*given))[1])
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
def test_what_has_no_needles_is_refused(kind: str, sizes: dict[str, Any], data: Any, said: str) -> None:
    made = tiny(kind, **sizes | {"vocab_size": 700, "max_position_embeddings": 80})
    with pytest.raises(InputError, match=f"^needles {said}"):
        audit(made, data, tokenizer=tokenizer(), needles=2, **OPTIONS)
