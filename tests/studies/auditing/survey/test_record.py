"""The recorded survey is what the documentation says of it; a part of it is gone through again."""

from __future__ import annotations

import json
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
    for outcome in ("proved", "refused", "failed"):
        assert recorded.markdown(outcome) in page
    totals = recorded.totals()
    assert f"{totals['proved']} of {len(recorded.found) - totals['other']}" in page


@pytest.mark.heavy
def test_the_families_are_proved_again(recorded: Survey, tmp_path: Path) -> None:
    """The named families, and every twelfth of the others, with a process each."""
    others = [row.name for row in recorded.of("proved", "refused") if row.name not in FAMILIES][::12]
    found = survey(tmp_path, only=[*FAMILIES, *others], workers=2)
    had = {row.name: row for row in recorded.found}
    assert {row.name: row.outcome for row in found.found} == {row.name: had[row.name].outcome for row in found.found}
    for row in found.of("proved"):
        assert (row.calls, row.heads, row.placed) == (had[row.name].calls, had[row.name].heads, had[row.name].placed)
