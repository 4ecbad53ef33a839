"""Model types of the installed transformers, built small and audited: what is recorded is understood.

A sample of them by default; TOEPLENS_ALL_ARCHITECTURES=1 goes through all. `tools/architectures.py` makes the record.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.architectures import check as checking
from tests.architectures.check import FIELDS, check, checked
from tests.architectures.models import model_types, small_inputs, small_model
from tests.builders import load_script

from toeplens.utils import InputError

pytest.importorskip("transformers")
pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "results" / "survey" / "survey.json").read_text())
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in RECORD["found"]}
# one per family that docs/reference/architectures.md names, as transformers calls their types
FAMILIES = (
    *("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gptj", "stablelm", "olmo2"),
    *("falcon", "falcon+alibi", "cohere", "glm", "gpt_oss", "bloom", "mpt", "t5", "gpt2", "opt", "bert", "deberta"),
    *("deberta-v2", "deepseek_v3", "llama+yarn", "llama+dynamic", "llama+llama3", "llama+linear", "deepseek_v2"),
)
# boxes beside tokens, patches of bytes, several products of the same weights, sinks per query, noise in the pass, cross
# attention, logits that are returned as weights; no understood attention, no attention, no text
OTHERS = (
    *("bros", "blt", "diffllama", "inkling2_text", "lilt", "vits", "gpt_neo", "bart", "squeezebert"),
    *("longformer", "mamba", "vit", "dia", "qwen3_5"),
)
SAMPLE = (*FAMILIES, *OTHERS)


@pytest.mark.parametrize("name", model_types() if os.environ.get("TOEPLENS_ALL_ARCHITECTURES") == "1" else SAMPLE)
def test_a_model_type_matches_its_record(name: str) -> None:
    actual, had = checked(name), ROWS[name]
    same = ("outcome", "model", "parameters", "calls", "heads", "effect", "returned")
    assert {key: actual[key] for key in same} == {key: had[key] for key in same}, actual["why"]
    assert (actual["placed"] or 0) >= (had["placed"] or 0), "calls whose shares were known"
    assert actual["unplaced"] == had["unplaced"] or actual["placed"] > had["placed"]
    assert set(FIELDS) < set(actual)
    for key in ("weights", "outputs", "whole") if actual["outcome"] == "proved" else ():
        assert actual[key] is None or actual[key] < 1e-4, key
    if name not in ("dia", "higgs_audio_v2_tokenizer") and actual["outcome"] in ("refused", "none"):
        assert actual["why"] == had["why"]


def test_a_tampered_pass_is_never_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the proof of each call cannot see: a captured pass that is not the model's own, attention that is missed."""
    model = small_model("gpt2")
    inputs, captured = small_inputs(model), checking.capture_attention

    def other(model: Any, inputs: Any, look: Any) -> Any:
        return [1.01 * captured(model, inputs, look)[0]]

    def fewer(model: Any, inputs: Any, look: Any) -> Any:
        return captured(model, inputs, lambda call: look(call) if call.layer else None)

    for planted, words in ((other, "differs by 1.0e-02"), (fewer, "of 2 softmaxes .* 1 were captured")):
        monkeypatch.setattr(checking, "capture_attention", planted)
        with pytest.raises(InputError, match=words):
            check(model, inputs)


@pytest.fixture(scope="module")
def architectures_tool() -> ModuleType:
    return load_script(ROOT / "tools" / "architectures.py")


def test_the_record_is_complete_and_the_page_has_its_tables(architectures_tool: ModuleType) -> None:
    page, rows = (ROOT / "docs" / "reference" / "architectures.md").read_text(), RECORD["found"]
    assert architectures_tool.fill_page(page, rows) == page
    assert RECORD["missing"] == []
    assert list(ROWS) == model_types()
    proved = architectures_tool.rows_with(rows, "proved")
    assert {*FAMILIES} <= {row["name"] for row in proved}
    assert all(row["calls"] and row["heads"] and row["placed"] is not None for row in proved)
    assert all(row[key] < 1e-4 for row in proved for key in ("outputs", "whole"))
    assert architectures_tool.rows_with(rows, "failed") == []
    others = architectures_tool.rows_with(rows, "other")
    assert f"{len(proved)} of the {len(rows) - len(others)} text architectures" in page
    reasons = page.partition("## Not proved, and why")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`([^`]+)`", reasons)) == [
        row["name"] for row in architectures_tool.rows_with(rows, "refused", "none")
    ]
