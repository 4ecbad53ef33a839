"""The mathematics as a study: carried out once at toy size, gone on with, judged, shown; and verdicts that can fall."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from toeplens.engine import ExecutionOptions, Job, run_job
from toeplens.papers.mathematics import (
    CLAIMS,
    EXPERIMENTS,
    Theory,
    check_theory,
    gather,
    is_theory,
    study,
    universal_finding,
)
from toeplens.papers.mathematics.statements import DATA, Records, tally
from toeplens.studies import Claim, combine, judge_all
from toeplens.studies.kit.claims import findings_of
from toeplens.utils import InputError, read_json

RECORDED = Path(__file__).parents[3] / "results" / "theory"
SMALL: dict[str, dict[str, Any]] = {
    "distance": {"tries": 20},
    "normalising": {"tries": 20},
    "filling": {"sizes": (32, 64)},
    "latent": {"tries": 20},
    "contraction": {"tries": 20, "searched": (2, 3, 4), "lengths": (16, 32)},
    "phases": {"tries": 20, "sizes": (2, 3, 4), "fejer": (2, 3), "rows": (8, 32)},
    "expressiveness": {"instances": 1, "restarts": 1, "steps": 5, "fixed": (100,), "draws": 1000},
    "estimators": {"widths": (64,), "vocabularies": (8, 64), "draws": 2, "texts": 8},
    "manifold": {"widths": (16,), "lengths": (24,)},
    "related": {"tries": 20, "depths": (1,)},
    "small_norm": {"steps": 3},
}
SEARCHES = ["distance", "normalising", "filling", "latent", "contraction", "phases", "related"]


def claims_on(name: str) -> list[Claim[Records]]:
    ids = [claim["id"] for claim in DATA["experiments"][name]["claims"]]
    return [claim for claim in CLAIMS if claim.id in ids]


def run_search(name: str) -> dict[str, Any]:
    """A search's record with few tries, at all sizes: its verdicts are those of many."""
    return EXPERIMENTS[name](0, tries=20)


cached_search = cache(run_search)
every_search = pytest.mark.parametrize("name", SEARCHES)


# ---- searches for counterexamples -----------------------------------------------------------------------------------


@every_search
@pytest.mark.heavy
def test_the_record_is_repeatable(name: str) -> None:
    assert cached_search(name) == run_search(name)


@every_search
def test_the_record_is_plain_json(name: str) -> None:
    assert json.loads(json.dumps(cached_search(name), allow_nan=False)) == cached_search(name)
    with pytest.raises(InputError, match="tries must be at least 20, got 19"):
        EXPERIMENTS[name](0, tries=19)


@every_search
def test_verdicts_match_the_record(name: str) -> None:
    ledger = {each["id"]: each["verdict"] for each in read_json(RECORDED / "claims.json")["claims"]}
    for claim in claims_on(name):
        assert combine(findings_of(claim.check, {name: [cached_search(name)]})) == ledger[claim.id]
        assert combine(findings_of(claim.check, {name: []})) == "undecided"


@every_search
def test_every_verdict_follows_the_tallies(name: str) -> None:
    """With every tally turned round, what held fails and what failed holds, part by part; one bad seed is enough."""
    doctored = copy.deepcopy(cached_search(name))
    for each in doctored["tallies"].values():
        each["violations"] = 0 if each["violations"] else 1
    swap = {"holds": "fails", "fails": "holds"}
    for claim in claims_on(name):
        before, after = (findings_of(claim.check, {name: [each]}) for each in (cached_search(name), doctored))
        assert [part.verdict for part in after] == [swap[part.verdict] for part in before], claim.id
        for part in findings_of(claim.check, {name: [cached_search(name), doctored]}):
            assert part.verdict == ("holds" if part.evidence.startswith("not: ") else "fails"), claim.id


def test_a_nan_margin_counts_against_the_statement() -> None:
    assert tally([0.0, float("nan")])["violations"] == 1
    assert tally([-1e-12], -1e-9)["violations"] == 1
    assert tally([-1e-3, 1e-12]) == {"tried": 2, "violations": 0, "worst": 1e-12}


def test_a_universal_statement_needs_all_instances() -> None:
    assert universal_finding("it", tried=0, violations=0, worst="").verdict == "undecided"
    assert universal_finding("it", tried=9, violations=0, worst="near").verdict == "holds"
    finding = universal_finding("it", tried=9, violations=1, worst="by 3")
    assert finding.verdict == "fails"
    assert finding.evidence == "it: contradicted by 1 of 9 instances; by 3"


# ---- the study ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theory]:
    """Few tries, few sizes, small models, all in this process."""

    def small(scale: str, label: str, seed: int) -> Job:
        job = whole(scale, label, seed)
        content = job.spec.model_copy(update={"epochs": 1, "train_examples": 64, "test_examples": 64})
        return Job(content, job.label)

    def here(jobs: Sequence[Job], out: Path, limits: ExecutionOptions, **_: Any) -> None:
        for job in jobs:
            run_job(job, out, limits)

    whole = study._model_job
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in SMALL.items():
            patch.setitem(EXPERIMENTS, name, partial(EXPERIMENTS[name], **sizes))
        patch.setattr(study, "_model_job", small)
        patch.setattr(study, "run_jobs", here)
        out = tmp_path_factory.mktemp("theory") / "out"
        yield check_theory(
            out, scale="smoke", seeds=1, workers=1, execution=ExecutionOptions(device="cpu", compile="off")
        )


@pytest.mark.heavy
def test_all_searches_run_and_are_saved_and_shown(theory: Theory) -> None:
    assert theory.is_complete
    assert {path.name for path in theory.directory.iterdir()} == {
        ".lock", "study.json", "results.json", "claims.json", "records", "runs",
    }  # fmt: skip
    assert [entry.claim.id for entry in theory.entries] == [claim.id for claim in CLAIMS]
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert all(entry.evidence for entry in theory.entries)
    assert is_theory(theory.directory)
    assert [e.to_dict() for e in gather(theory.directory).entries] == [e.to_dict() for e in theory.entries]
    nothing = judge_all(CLAIMS, {name: [] for name in theory.records})
    assert {entry.verdict for entry in nothing} == {"undecided"}
    page = theory.page().html()
    assert page == theory.page().html()
    assert all(f'id="claim-{claim.id}"' in page for claim in CLAIMS)
    assert "src=" not in page.split("<script", 1)[0]
    assert len(theory.charts()) >= 8
    assert "1 seed: statements about trained heads need 5 seeds" in page


@pytest.mark.heavy
def test_bad_input_is_one_sentence(theory: Theory, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scale must be .*, got 'tiny'"):
        check_theory(tmp_path / "new", scale="tiny")
    with pytest.raises(InputError, match=r"device must be .*, got 'x'"):
        check_theory(tmp_path / "new", scale="smoke", seeds=1, execution=ExecutionOptions(device="x", deadline=0.0))
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match="belongs to neither a study nor runs"):
        check_theory(tmp_path, seeds=1)
    (theory.directory / "study.json").write_text('{"study": "theory"}')
    with pytest.raises(InputError, match="is damaged"):
        gather(theory.directory)
