"""The mathematics as a study: carried out once at toy size, gone on with, judged, shown; and verdicts that can fall."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from toeplens.engine import Job, Limits, run_job
from toeplens.ground import InputError
from toeplens.papers.mathematics import (
    CLAIMS,
    Theory,
    check_theory,
    contraction,
    expressiveness,
    filling,
    gather,
    heads,
    is_theory,
    latent,
    normalising,
    phases,
    related,
    small_norm,
    study,
    universal,
)
from toeplens.papers.mathematics.c4 import estimators, manifold
from toeplens.papers.mathematics.page import render_theory
from toeplens.studies import judge_all

pytestmark = pytest.mark.heavy  # every experiment, and two small models

SMALL: dict[Any, dict[str, Any]] = {
    contraction: {"SEARCHED": (2, 3, 4), "LENGTHS": (16, 32)},
    phases: {"SIZES": (2, 3, 4), "FEJER": (2, 3), "ROWS": (8, 32)},
    expressiveness: {"FIXED": (100,), "DRAWS": 1000},
    estimators: {"WIDTHS": (64,), "VOCABULARIES": (8, 64), "DRAWS": 2, "TEXTS": 8},
    filling: {"SIZES": (32, 64)},
    manifold: {"WIDTHS": (16,), "LENGTHS": (24,)},
    related: {"DEPTHS": (1,)},
}


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Few tries, few sizes, small models, all in this process."""
    patch = pytest.MonkeyPatch()
    for module, sizes in SMALL.items():
        for name, value in sizes.items():
            patch.setattr(module, name, value)
    for module in (normalising, latent, contraction, phases, related):
        name = module.__name__.rsplit(".", 1)[-1]
        patch.setitem(study.EXPERIMENTS, name, partial(getattr(module, name), tries=20))
    patch.setitem(study.EXPERIMENTS, "small_norm", partial(small_norm.small_norm, steps=3))
    options = {"instances": 1, "restarts": 1, "steps": 5}
    patch.setitem(study.EXPERIMENTS, "expressiveness", partial(expressiveness.expressiveness, **options))

    def small(scale: str, label: str, seed: int) -> Job:
        job = made(scale, label, seed)
        content = job.spec.model_copy(update={"epochs": 1, "train_examples": 64, "test_examples": 64})
        return Job(content, job.label)

    def here(jobs: Sequence[Job], out: Path, limits: Limits, **_: Any) -> None:
        for job in jobs:
            run_job(job, out, limits)

    made = study._job
    patch.setattr(study, "_job", small)
    patch.setattr(study, "run_jobs", here)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def theory(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Theory:
    out = tmp_path_factory.mktemp("theory") / "out"
    return check_theory(out, scale="smoke", seeds=1, workers=1, limits=Limits(device="cpu", compile="off"))


def test_everything_is_carried_out_and_written_down(theory: Theory) -> None:
    assert theory.complete
    assert {path.name for path in theory.directory.iterdir()} == {
        ".lock", "study.json", "results.json", "claims.json", "records", "runs",
    }  # fmt: skip
    assert [entry.claim.id for entry in theory.entries] == [claim.id for claim in CLAIMS]
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert all(entry.evidence for entry in theory.entries)


def test_verdicts_follow_from_the_records(theory: Theory) -> None:
    assert is_theory(theory.directory)
    assert [e.to_dict() for e in gather(theory.directory).entries] == [e.to_dict() for e in theory.entries]
    nothing = judge_all(CLAIMS, {name: [] for name in theory.records})
    assert {entry.verdict for entry in nothing} == {"undecided"}


def doctored(theory: Theory, change: dict[str, float]) -> dict[str, str]:
    """Verdicts on the heads' claims with some of their tables set to a number, in five seeds that differ a little."""
    records = []
    for nudge in (0.0, 1e-4, 2e-4, 3e-4, 4e-4):
        record: dict[str, Any] = copy.deepcopy(dict(theory.records["heads"][0]))
        for model, tables in record.items():
            for path, value in change.items():
                where, name = path.split("/")
                if model.startswith(where):
                    if name == "overlap":
                        tables["spans"]["overlap"] = (value + nudge) * tables["spans"]["chance"]
                    elif name in tables:
                        tables[name] = [[value + nudge] * len(row) for row in tables[name]]
        records.append(record)
    return {entry.claim.id: entry.verdict for entry in judge_all(heads.CLAIMS, {"heads": records})}


def test_the_heads_claims_can_be_decided_either_way(theory: Theory) -> None:
    yes = {"rope/width": 0.5, "rope/gram": 0.5, "alibi/width": 2.0, "rope/bound": 0.9, "rope/phase_error": 0.01}
    yes |= {"absolute/position_toeplitz": 0.995, "absolute/overlap": 0.9, "learned/overlap": 0.9}
    no = {"rope/width": 1.5, "rope/gram": 1.5, "alibi/width": 0.5, "rope/bound": 1.1, "rope/phase_error": 0.5}
    no |= {"absolute/position_toeplitz": 0.5, "absolute/overlap": 0.1, "learned/overlap": 0.9}
    assert set(doctored(theory, yes).values()) == {"holds"}
    assert set(doctored(theory, no).values()) == {"fails"}


def test_a_statement_about_all_instances() -> None:
    assert universal("it", tried=0, violations=0, worst="").verdict == "undecided"
    assert universal("it", tried=9, violations=0, worst="near").verdict == "holds"
    finding = universal("it", tried=9, violations=1, worst="by 3")
    assert finding.verdict == "fails"
    assert finding.evidence == "it: contradicted by 1 of 9 instances; by 3"


def test_the_page_shows_every_statement_and_plot(theory: Theory) -> None:
    page = render_theory(theory)
    assert page == render_theory(theory)
    assert all(f'id="claim-{claim.id}"' in page for claim in CLAIMS)
    assert "src=" not in page.split("<script", 1)[0]
    assert page.count('class="plot"') >= 12


def test_bad_input_is_one_sentence(theory: Theory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scale must be .*, got 'tiny'"):
        check_theory(tmp_path / "new", scale="tiny")
    with pytest.raises(InputError, match=r"device must be .*, got 'x'"):
        check_theory(tmp_path / "new", scale="smoke", seeds=1, limits=Limits(device="x", deadline=0.0))
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match="belongs to neither a study nor runs"):
        check_theory(tmp_path, seeds=1)
    (theory.directory / "study.json").write_text('{"study": "theory"}')
    with pytest.raises(InputError, match="is damaged"):
        gather(theory.directory)
