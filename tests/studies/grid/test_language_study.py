"""A grid study of language models: from a file to figures and verdicts; its text must stay what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.grid.language_state import language_grid

from toeplens.engine import ExecutionOptions
from toeplens.papers.language.claims import CLAIMS
from toeplens.studies import grid
from toeplens.studies.grid import language
from toeplens.tasks.language import _verified_corpus
from toeplens.utils import InputError


def content(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "tasks": {"language": {"options": {"text": [str(folder)], "length": 16}}},
        "encodings": {"nope": None, "sinusoidal": None, "alibi": None, "rope": None},
        "model": {"d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout": 0.0},
        "training": {"train_examples": 64, "test_examples": 8, "epochs": 1, "batch_size": 16, "lr": 1e-2},
        "seeds": 1,
        "examples": 16,
        "measures": ["bits", "needles", "copying", "patterns", "behaviour", "frequency", "position-loss", "extension"],
        "claims": "language",
    } | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 4)) for _ in range(50)]
    for number in range(80):
        (result / f"{number:02}.txt").write_text(" ".join(rng.choice(words, 90)))
    return result


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> grid.GridStudy:
    return language_grid(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> grid.GridStudy:
    return grid.run_study(grid.grid_spec(content(folder)), tmp_path_factory.mktemp("study") / "out", workers=1)


@pytest.mark.heavy
def test_every_model_is_measured_and_every_claim_gets_a_verdict(finished: grid.GridStudy):
    assert finished.is_complete
    assert all(language.is_language(cell) for cell in finished.results.cells)
    assert [entry.claim.id for entry in finished.entries] == [claim.id for claim in CLAIMS]
    assert {entry.verdict for entry in finished.entries} <= {"leans to hold", "leans to fail", "undecided"}  # one seed
    known = {entry.claim.id for entry in finished.entries if any(part.has_data for part in entry.findings)}
    assert known >= {"language-needs-position", "rope-over-absolute", "alibi-extrapolates", "rope-fails-beyond"}


def test_figures_match_the_records(figures: grid.GridStudy):
    rope, nope = (figures.results.cells_of("language", label)[0] for label in ("rope", "nope"))
    assert language.bits_per_byte(rope) == rope.measure("bits").bits.value
    far, near = (rope.measure("bits").at_factor(factor).end.value for factor in (language.LONG_FACTOR, 1.0))
    assert language.bits_increase(rope) == pytest.approx(far - near, abs=1e-6)
    for tuned, measure in ((False, "extension"), (True, "extension-tuned")):
        (row,) = (r for r in rope.measure(measure).rows if (r.method, r.factor) == ("none", 4.0))
        assert language.extended_bits(rope, "none", tuned=tuned) == pytest.approx(row.bits.value)
    shares = language.position_shares(rope)
    assert shares is None or shares.sum() == pytest.approx(1)
    assert np.isnan(language.deposit(nope)) or language.position_shares(nope) is None
    patterns, follows = rope.measure("patterns"), rope.measure("behaviour")
    weights, positional = patterns.previous.ravel(), follows.positional.ravel()
    top = [head for head in np.argsort(-weights, kind="stable")[:3] if weights[head] >= language.MIN_ATTENTION]
    expected = np.mean(positional[top]) if top else np.nan
    assert language.head_type_share(rope, "previous", "positional") == pytest.approx(expected, nan_ok=True)
    rest = np.delete(positional, top)
    lead = expected - rest[np.isfinite(rest)].mean()
    assert language.head_type_lead(rope, "previous", "positional") == pytest.approx(lead, nan_ok=True)
    assert np.isnan(language.deposit(rope)) or language.deposit(rope) >= language.deposit(rope, 0)


@pytest.mark.heavy
def test_resuming_requires_the_same_text(finished: grid.GridStudy, folder: Path):
    _verified_corpus.cache_clear()
    spec = grid.grid_spec(content(folder, seeds=2))
    stopped = ExecutionOptions(should_stop=lambda: True)
    assert (
        grid.run_study(spec, finished.directory, workers=1, execution=stopped).finished == 4
    )  # the second seed is not begun
    path = folder / "00.txt"
    before = path.read_text()
    try:
        path.write_text(before + " and more")
        _verified_corpus.cache_clear()
        with pytest.raises(InputError, match=r"text: .* has changed"):
            grid.run_study(spec, finished.directory, workers=1, execution=stopped)
    finally:
        path.write_text(before)
        _verified_corpus.cache_clear()


def test_another_text_is_another_study(tmp_path: Path):
    other = grid.grid_spec(content(tmp_path / "other")).with_text([str(tmp_path)])
    assert other.tasks["language"].options == {"text": [str(tmp_path)], "length": 16}
