"""The reproduction: a grid that is the papers', carried out once, gone on with anywhere, written down the same."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from tests.studies.local_runs import DEPOSIT, LocalRuns

from toeplens.papers.deposit import SCALES, Reproduction, claims_of, gather, grid, reproduce
from toeplens.studies import Cell, CellResult
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS
from toeplens.utils import InputError, read_json

PAPER, RELEASED = PROTOCOLS
every_scale = pytest.mark.parametrize("scale", SCALES)

# ---- the grid -------------------------------------------------------------------------------------------------------


def cells(scale: str, protocol: str, task: str, seeds: int = 1) -> dict[str, Cell]:
    result = [cell for cell in grid(scale, [protocol], seeds) if cell.key.task == task]
    assert len({cell.key for cell in result}) == len(result)
    return {cell.key.label: cell for cell in result}


def spec(scale: str, protocol: str, task: str, label: str) -> RunSpec:
    return cells(scale, protocol, task)[label].job.spec


CURVE_LABELS = ("rope", "nope", "mla", "alibi", "relative", "absolute")


@every_scale
def test_more_seeds_add_cells_and_change_none(scale: str):
    one, three = grid(scale, PROTOCOLS, 1), grid(scale, PROTOCOLS, 3)
    assert three[: len(one)] == one
    assert len(three) == 3 * len(one)
    assert [cell.key for cell in three[len(one) :]] == [
        replace(cell.key, seed=SCALES[scale].first_seed + more) for more in (1, 2) for cell in one
    ]
    for cell in three:
        assert cell.job.spec.seed == cell.job.spec.data_seed == cell.key.seed


def test_the_paper_scale_is_table_3_and_table_4():
    for protocol in PROTOCOLS:
        for (task, train, test, epochs), label in itertools.product(
            [(DISTANCE, 70_000, 30_000, 100), (COUNT, 35_000, 15_000, 150)], CURVE_LABELS
        ):
            run = spec("paper", protocol, task, label)
            latent = label == "mla"
            model = run.model
            assert (model.vocab_size, model.d_model, model.d_ff, model.num_layers) == (574, 256, 512, 6)
            assert model.num_heads == (8 if latent and protocol == PAPER else 16)
            assert model.num_classes == 574
            assert (model.max_len, model.dropout) == (128, 0.1)
            assert (run.lr, run.betas, run.weight_decay, run.warmup) == (1e-4, (0.98, 0.9), 1e-5, 0.06)
            assert run.batch_size == (1024 if latent else 512)
            assert run.epochs == (150 if latent and protocol == RELEASED else epochs)
            assert (run.train_examples, run.test_examples) == (train, test)


def test_the_full_scale_has_the_papers_sizes_and_the_recipe_of_desk():
    for protocol, labels in (
        (PAPER, [*CURVE_LABELS, "rope-absolute"]),
        (RELEASED, ["rope", "rope-alone", "mla", "nope"]),
    ):
        actual = cells("full", protocol, DISTANCE)
        assert set(actual) == set(labels)
        for label, cell in actual.items():
            full, paper = cell.job.spec, spec("paper", protocol, DISTANCE, label)
            default = {"max_between": 70} if protocol == RELEASED else {}
            assert full.task_options == paper.task_options | default
            heads = {"num_heads": 16}  # MLA's are 8 in the paper's scale, as in its table
            changes = {"dropout": 0.0, **heads}
            assert full.model.model_copy(update=heads) == paper.model.model_copy(update=changes)
            desk = spec("desk", protocol, DISTANCE, label)
            recipe = ("lr", "betas", "batch_size", "schedule", "average", "weight_decay")
            assert desk.plateau is not None
            assert full.plateau == desk.plateau.model_copy(update={"skill": 0.9})
            assert [getattr(full, name) for name in recipe] == [getattr(desk, name) for name in recipe]
            assert round(full.warmup * full.total_steps) == pytest.approx(desk.warmup * desk.total_steps, abs=2)


@every_scale
def test_run_names_match_the_recorded_digests(scale: str):
    """The digest of all cells; the name of a run is a digest of every field of its model, task and training.

    The records of desk and laptop have these runs (tests/papers/test_records.py).
    """
    jobs = [(cell.key, cell.job) for cell in grid(scale, PROTOCOLS, 1, ["all"])]
    told = [
        f"{astuple(key)} {job.spec.name} {job.split} {job.examples} {job.measures} {job.probe}" for key, job in jobs
    ]
    assert hashlib.sha256("\n".join(told).encode()).hexdigest()[:16] == RUN_DIGESTS[scale]


RUN_DIGESTS = {
    "smoke": "c81d76cc2e5e554a",
    "laptop": "313920e11c9235ae",
    "desk": "e9ec10d884c6e616",
    "full": "8fcab68d4d2ceff1",
    "paper": "a28301e25cf67aad",
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("lptop", PROTOCOLS, 1), "got 'lptop'; did you mean 'laptop'"),
        (("smoke", ["papr"], 1), "got 'papr'; did you mean 'paper'"),
        (("smoke", PROTOCOLS, 0), "seeds must be from 1 to"),
    ],
)
def test_an_impossible_grid_is_refused(given: tuple[Any, ...], message: str):
    with pytest.raises(InputError, match=message):
        grid(*given)


# ---- carried out ----------------------------------------------------------------------------------------------------

CELLS = 8


def use_micro_scale(
    monkeypatch: pytest.MonkeyPatch, labels: Sequence[str] = ("rope", "mla", "rope-absolute"), **optimiser: Any
) -> None:
    """The smoke scale made as small as can be: an epoch or two on 32 examples, 4 cells a protocol."""
    smoke = SCALES["smoke"]
    sizes = {
        name: replace(size, train_examples=32, test_examples=16, epochs=2 if name == DISTANCE else 1)
        for name, size in smoke.tasks.items()
    }
    small = replace(
        smoke,
        model=smoke.model | {"d_model": 16, "d_ff": 16, "num_heads": 2},
        optimiser=smoke.optimiser | {"batch_size": 16} | optimiser,
        tasks=sizes,
        labels={DISTANCE: tuple(labels), COUNT: ("nope",)},
        partial_heads={DISTANCE: (), COUNT: ()},
        ablation_examples=12,
    )
    monkeypatch.setitem(SCALES, "smoke", small)


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study; not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "study"
    with pytest.MonkeyPatch.context() as patch:
        use_micro_scale(patch)
        patch.setattr(DEPOSIT, "run_jobs", LocalRuns())
        assert reproduce(out, scale="smoke").is_complete
    return out


@pytest.fixture
def micro_runs(monkeypatch: pytest.MonkeyPatch) -> LocalRuns:
    """The micro scale, in this process."""
    runner = LocalRuns()
    monkeypatch.setattr(DEPOSIT, "run_jobs", runner)
    use_micro_scale(monkeypatch)
    return runner


@pytest.fixture
def study_copy(finished_study: Path, micro_runs: LocalRuns, tmp_path: Path) -> Path:
    """The finished study as one's own."""
    return shutil.copytree(finished_study, tmp_path / "copy")


def results_of(state: Reproduction) -> dict[str, Any]:
    """What a study found, without the time it took."""
    result = [cell.to_dict() for cell in state.results.cells]
    for cell in result:
        cell["epochs"] = [{name: row[name] for name in row if name != "seconds"} for row in cell["epochs"]]
        cell["probe_rows"] = [{name: row[name] for name in row if name != "seconds"} for row in cell["probe_rows"]]
        cell["result"] = {n: x for n, x in cell["result"].items() if n not in ("seconds", "tokens_per_second")}
    return {"cells": result, "claims": [entry.to_dict() for entry in state.entries]}


def test_every_cell_is_run_and_saved(study_copy: Path):
    state = gather(study_copy)
    assert (state.finished, state.total, state.share, state.is_complete) == (CELLS, CELLS, 1.0, True)
    assert [cell.key for cell in state.results.cells] == sorted(cell.key for cell in state.plan.cells())
    actual, claims = read_json(study_copy / "results.json"), read_json(study_copy / "claims.json")
    for written in (actual, claims):
        assert written["study"] == "reproduce"
        assert written["scale"] == "smoke"
        assert written["protocols"] == list(PROTOCOLS)
        assert (written["seeds"], written["finished"], written["total"]) == (1, CELLS, CELLS)
        assert {"torch", "seconds", "execution"} <= written["environment"].keys()
    assert len(actual["cells"]) == len(actual["table"]) == CELLS
    assert [(c["id"], c["protocol"]) for c in claims["claims"]] == [
        (c.id, p) for c in claims_of(["core"]) for p in PROTOCOLS
    ]


def test_runs_without_weights_are_kept_but_not_measured(finished_study: Path, micro_runs: LocalRuns, tmp_path: Path):
    """What other parts ask of trained weights is missing; what was found without it stays."""
    out = tmp_path / "study"
    shutil.copytree(finished_study / "runs", out / "runs", ignore=shutil.ignore_patterns("*.safetensors"))
    before = reproduce(out, scale="smoke")
    with pytest.raises(InputError, match=r"^out: \d+ finished runs in .* have no weights to measure"):
        reproduce(out, scale="smoke", parts=["mechanism"])
    assert results_of(gather(out)) == results_of(before)
    content = read_json(out / "study.json")
    (out / "study.json").write_text(json.dumps(content | {"parts": ["core", "mechanism"]}))
    state = gather(out)
    assert state.finished < len(state.results.cells) == CELLS
    assert not state.is_complete
    kept = {(entry.claim.id, entry.protocol): entry.verdict for entry in state.entries}
    assert all(kept[entry.claim.id, entry.protocol] == entry.verdict for entry in before.entries)
    assert len(state.results.cells) > state.finished


@pytest.mark.parametrize(
    ("scale", "protocols", "part"), [("laptop", PROTOCOLS, "ladder"), ("laptop", [PAPER], "factors")]
)
def test_a_part_without_models_is_refused(tmp_path: Path, scale: str, protocols: list, part: str):
    with pytest.raises(InputError, match=rf"^part: {part} has no models at scale {scale} under the "):
        reproduce(tmp_path / "study", scale=scale, protocols=protocols, parts=[part])
    assert not (tmp_path / "study").exists()


def test_seeds_can_be_raised_later(study_copy: Path, micro_runs: LocalRuns):
    before = results_of(gather(study_copy))["cells"]
    state = reproduce(study_copy, scale="smoke", seeds=2)
    assert (state.finished, state.total) == (2 * CELLS, 2 * CELLS)
    assert len(micro_runs.done) == CELLS
    assert [cell for cell in results_of(state)["cells"] if cell["key"]["seed"] == 42] == before
    assert {row.seeds for row in state.table} == {2}
    assert gather(study_copy).total == 2 * CELLS


def test_a_single_protocol_can_be_requested(finished_study: Path, micro_runs: LocalRuns, tmp_path: Path):
    out = tmp_path / "study"
    shutil.copytree(finished_study / "runs", out / "runs")
    state = reproduce(out, scale="smoke", protocols=[RELEASED])
    assert (state.finished, state.total) == (CELLS // 2, CELLS // 2)
    assert {entry.protocol for entry in state.entries} == {RELEASED}
    assert reproduce(out, scale="smoke", protocols=[PAPER]).finished == CELLS
    assert micro_runs.done == []


def test_diverged_runs_count_as_finished_and_are_reported(
    micro_runs: LocalRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    use_micro_scale(monkeypatch, lr=1e30)
    state = reproduce(tmp_path / "study", scale="smoke")
    assert state.is_complete
    assert {entry.verdict for entry in state.entries} == {"undecided"}
    for row in state.table:
        assert (row.accuracy, row.lowest, row.highest, row.largest_drop, row.kinds) == (None, None, None, None, [])
        assert row.diverged == row.seeds == 1
    for cell in read_json(tmp_path / "study" / "results.json")["cells"]:
        assert CellResult.from_dict(cell).status == "diverged"
    assert results_of(reproduce(tmp_path / "study", scale="smoke")) == results_of(state)
