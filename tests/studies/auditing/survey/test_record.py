"""The recorded survey is what the documentation says of it; a part of it is gone through again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toeplens.studies.auditing.survey import Survey, survey

ROOT = Path(__file__).parents[4]
# what docs/architectures.md names, as transformers calls their types
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gptj", "stablelm"),
    *("olmo2", "falcon", "falcon+alibi", "cohere", "glm", "gpt_oss", "bloom", "mpt", "t5", "gpt2", "opt", "bert"),
    *("deberta", "deberta-v2", "deepseek_v2", "deepseek_v3", "llama+yarn", "llama+llama3", "llama+dynamic"),
    "llama+linear",
)


@pytest.fixture(scope="module")
def recorded() -> Survey:
    return Survey.from_dict(json.loads((ROOT / "results" / "survey" / "survey.json").read_text()))


def test_the_record_is_whole_and_has_the_families(recorded: Survey) -> None:
    proved = {row.name for row in recorded.of("proved")}
    assert recorded.missing == ()
    assert len(proved) >= 200
    assert set(FAMILIES) <= proved
    for name, most in recorded.largest().items():
        assert most is not None
        assert most < 1e-4, name
    assert all(row.calls and row.heads and row.placed is not None for row in recorded.of("proved"))
    assert all(row.why for row in recorded.of("refused", "failed", "none"))


def test_the_documentation_has_its_tables(recorded: Survey) -> None:
    page = (ROOT / "docs" / "architectures.md").read_text()
    for outcome in ("proved", "refused", "none"):
        assert recorded.markdown(outcome) in page
    assert recorded.without_shares() in page
    assert recorded.of("failed") == []
    totals = recorded.totals()
    assert f"{totals['proved']} of {len(recorded.found) - totals['other']}" in page


def test_the_documentation_says_why_what_is_not_proved_is_not(recorded: Survey) -> None:
    """Each type once, in the table of reasons; and which types count no longer."""
    page = (ROOT / "docs" / "architectures.md").read_text()
    reasons = page.partition("## Not proved, and why")[2].partition("What is said of each")[0]
    named = re.findall(r"`([^`]+)`", reasons)
    assert sorted(named) == [row.name for row in recorded.of("refused", "none")]
    apart = {"dia", "gemma4_assistant", "gemma4_unified_assistant", "higgs_audio_v2_tokenizer", "voxtral_realtime_text"}
    assert apart <= {row.name for row in recorded.of("other")}
    assert all(f"`{name}`" in page for name in apart)
    whole = sum(row.placed == row.calls for row in recorded.of("proved"))
    assert f"known for {whole} types" in page
    unplaced = {
        row.name: sum(len(x) for calls in row.unplaced.values() for x in calls.values()) for row in recorded.found
    }
    assert all((row.calls or 0) - (row.placed or 0) == unplaced[row.name] for row in recorded.of("proved"))


@pytest.mark.heavy
def test_the_families_are_proved_again(recorded: Survey, tmp_path: Path) -> None:
    """The named families, and every twelfth of the others, with a process each."""
    others = [row.name for row in recorded.of("proved", "refused") if row.name not in FAMILIES][::12]
    found = survey(tmp_path, only=[*FAMILIES, *others], workers=2)
    had = {row.name: row for row in recorded.found}
    assert {row.name: row.outcome for row in found.found} == {row.name: had[row.name].outcome for row in found.found}
    for row in found.of("proved"):
        assert (row.calls, row.heads, row.placed) == (had[row.name].calls, had[row.name].heads, had[row.name].placed)
