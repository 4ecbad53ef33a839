"""The reproduction: a grid that is the papers', carried out once, gone on with anywhere, written down the same."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jaxtyping import config

from toeplens.engine import Job, Limits, carry_out
from toeplens.ground import InputError, read_json
from toeplens.studies import CellResult
from toeplens.studies.reproduce import (
    CLAIMS,
    COUNT,
    DISTANCE,
    PAPER_TABLE_1,
    PROTOCOLS,
    SCALES,
    Cell,
    Reproduction,
    accuracy_table,
    gather,
    grid,
    limits_for,
    reproduce,
    study,
    title,
)
from toeplens.studies.reproduce.cells import starting_spec
from toeplens.training import Run, RunSpec

PAPER, RELEASED = PROTOCOLS
every_scale = pytest.mark.parametrize("scale", SCALES)

# ---- the grid -------------------------------------------------------------------------------------------------------


def cells(scale: str, protocol: str, task: str, seeds: int = 1) -> dict[str, Cell]:
    found = [cell for cell in grid(scale, [protocol], seeds) if cell.key.task == task]
    assert len({cell.key for cell in found}) == len(found)
    return {cell.key.label: cell for cell in found}


def spec(scale: str, protocol: str, task: str, label: str) -> RunSpec:
    return cells(scale, protocol, task)[label].job.spec


TABLE_1 = {"rope", "nope", "mla"}
CURVES = TABLE_1 | {"alibi", "relative", "absolute"}


@every_scale
def test_every_cell_is_a_run_of_its_own(scale: str):
    found = grid(scale, PROTOCOLS, 3)
    assert len({cell.job.spec.name for cell in found}) == len({cell.key for cell in found}) == len(found)
    assert len({cell.job.label for cell in found}) == len(found)


def test_the_laptop_scale_runs_the_curves_of_task_1_and_table_1_of_task_2():
    assert cells("laptop", PAPER, DISTANCE).keys() == CURVES | {"rope-absolute", "partial-1", "partial-2"}
    assert cells("laptop", RELEASED, DISTANCE).keys() == CURVES | {"rope-alone", "partial-1", "partial-2"}
    for protocol in PROTOCOLS:
        assert cells("laptop", protocol, COUNT).keys() == TABLE_1


def test_the_paper_scale_runs_every_encoding_on_both_tasks():
    partial = {f"partial-{heads}" for heads in (1, 2, 4, 8)}
    for task in (DISTANCE, COUNT):
        assert cells("paper", PAPER, task).keys() == CURVES | partial | {"random", "rope-absolute"}
        assert cells("paper", RELEASED, task).keys() == CURVES | partial | {"random", "rope-alone"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_smoke_scale_does_everything_once(protocol: str):
    assert TABLE_1 <= cells("smoke", protocol, DISTANCE).keys()
    assert TABLE_1 <= cells("smoke", protocol, COUNT).keys()
    assert any(label.startswith("partial-") for label in cells("smoke", protocol, DISTANCE))


@every_scale
def test_table_1_comes_first_and_all_of_a_seed_before_the_next(scale: str):
    found = grid(scale, PROTOCOLS, 2)
    assert [cell.key.seed for cell in found] == sorted(cell.key.seed for cell in found)
    first = [cell for cell in found if cell.key.seed == 42]
    telling = [cell.key.label in TABLE_1 for cell in first]
    assert telling == sorted(telling, reverse=True)
    assert {(c.key.protocol, c.key.task, c.key.label) for c in first if c.key.label in TABLE_1} == set(
        itertools.product(PROTOCOLS, (DISTANCE, COUNT), TABLE_1)
    )


@every_scale
def test_more_seeds_add_cells_and_change_none(scale: str):
    one, three = grid(scale, PROTOCOLS, 1), grid(scale, PROTOCOLS, 3)
    assert three[: len(one)] == one
    assert len(three) == 3 * len(one)
    assert [cell.key for cell in three[len(one) :]] == [
        replace(cell.key, seed=seed) for seed in (43, 44) for cell in one
    ]
    for cell in three:
        assert cell.job.spec.seed == cell.job.spec.data_seed == cell.key.seed


@every_scale
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_encodings_of_a_seed_are_trained_on_the_same_examples(scale: str, protocol: str):
    for task in (DISTANCE, COUNT):
        specs = [cell.job.spec for cell in cells(scale, protocol, task).values()]
        assert len({json.dumps([s.task, s.task_options, s.train_examples, s.test_examples]) for s in specs}) == 1


@every_scale
def test_heads_are_counted_on_the_test_set_or_as_the_program_on_both(scale: str):
    for cell in grid(scale, PROTOCOLS, 1):
        assert cell.job.split == ("test" if cell.key.protocol == PAPER else "train+test")
        assert cell.job.examples == SCALES[scale].ablation_examples


def test_the_paper_scale_is_table_3_and_table_4():
    for protocol in PROTOCOLS:
        for (task, train, test, epochs), label in itertools.product(
            [(DISTANCE, 70_000, 30_000, 100), (COUNT, 35_000, 15_000, 150)], CURVES
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


def test_the_papers_tasks_are_as_they_are_described():
    distance = spec("paper", PAPER, DISTANCE, "rope").build_task()
    assert (distance.form, distance.num_triggers, distance.labels) == ("paper", 2, range(1, 72))
    counting = spec("paper", PAPER, COUNT, "rope").build_task()
    assert counting.form == "paper"
    assert 10 <= counting.num_triggers <= 30
    assert counting.labels == range(101)


def test_the_programs_tasks_are_as_it_makes_them():
    distance = spec("paper", RELEASED, DISTANCE, "rope").build_task()
    assert (distance.form, distance.max_between, distance.max_side, distance.cut) == ("released", 70, 25, 120)
    assert (distance.length, distance.labels) == (128, range(2, 72))
    counting = spec("paper", RELEASED, COUNT, "rope").build_task()
    assert (counting.num_triggers, counting.words, counting.length) == (30, 120, 128)
    assert counting.labels == range(101)


PAPERS_SWITCHES = {
    "causal": True,
    "pad_mask": True,
    "key_value_source": "layer",
    "input_encoding": None,
    "readout": "last",
}


@every_scale
def test_in_the_papers_protocol_every_model_is_the_same_causal_decoder(scale: str):
    for task in (DISTANCE, COUNT):
        for label, cell in cells(scale, PAPER, task).items():
            model = cell.job.spec.model
            assert {name: getattr(model, name) for name in PAPERS_SWITCHES} == PAPERS_SWITCHES, label
            assert cell.job.spec.ignore_label is None


@every_scale
def test_in_the_released_protocol_the_switches_are_the_programs(scale: str):
    for task in (DISTANCE, COUNT):
        for label, cell in cells(scale, RELEASED, task).items():
            model = cell.job.spec.model
            assert not model.causal
            assert model.activation == ("gelu" if label == "mla" else "relu")
            if label == "mla":
                continue
            assert (model.pad_mask, model.key_value_source) == (False, "embeddings")
            assert (model.readout, model.final_norm) == ("mean", False)
            assert model.dropout_on == ("weights", "attention", "ffn")
            assert cell.job.spec.ignore_label == (0 if task == COUNT else None)


@every_scale
def test_the_programs_rope_has_a_sinusoid_and_the_one_on_few_heads_has_none(scale: str):
    found = cells(scale, RELEASED, DISTANCE)
    rope = found["rope"].job.spec.model
    assert (rope.encoding, rope.input_encoding) == ("rope", "sinusoidal")
    assert rope.input_encoding_options == {"layout": "halves"}
    alone = found["rope-alone"].job.spec.model
    assert alone == rope.model_copy(update={"input_encoding": None, "input_encoding_options": {}})
    partial = found["partial-1"].job.spec.model
    assert (partial.encoding, partial.encoding_options) == ("partial-rope", {"heads": 1})
    assert partial.input_encoding is None


@every_scale
def test_the_programs_mla_is_another_program(scale: str):
    run = spec(scale, RELEASED, COUNT, "mla")
    model, encoding = run.model, run.model.build_encoding()
    assert (model.pad_mask, model.key_value_source, model.readout, model.final_norm) == (
        True,
        "layer",
        "masked-mean",
        True,
    )
    assert model.input_encoding == "learned"
    assert model.dropout_on == ("ffn-hidden", "ffn")
    assert (encoding.rotary_query, encoding.latent_norm, encoding.phase_table) == ("shared", False, "released")
    assert encoding.rotary_dim == model.head_dim
    assert run.ignore_label is None
    if scale == "paper":
        assert encoding.d_compress == 128


@pytest.mark.parametrize(
    ("protocol", "label", "encoding", "options"),
    [
        (PAPER, "rope", "rope", {}),
        (PAPER, "rope-absolute", "rope-absolute", {}),
        (PAPER, "mla", "mla", {}),
        (PAPER, "relative", "t5", {}),
        (PAPER, "random", "random-fixed", {}),
        (PAPER, "alibi", "alibi", {}),
        (PAPER, "nope", "nope", {}),
        (PAPER, "absolute", "sinusoidal", {}),
        (PAPER, "partial-4", "partial-rope", {"heads": 4}),
        (RELEASED, "relative", "relative-table", {}),
        (RELEASED, "random", "random-fixed", {"trainable": True}),
        (RELEASED, "alibi", "alibi", {"slopes": "exponential"}),
        (RELEASED, "nope", "nope", {}),
        (RELEASED, "absolute", "sinusoidal", {}),
    ],
)
def test_the_two_protocols_mean_different_things_by_the_same_word(
    protocol: str, label: str, encoding: str, options: dict[str, Any]
):
    for task in (DISTANCE, COUNT):
        model = spec("paper", protocol, task, label).model
        assert (model.encoding, model.encoding_options) == (encoding, options)


@every_scale
def test_every_encoding_has_a_name_for_people(scale: str):
    for cell in grid(scale, PROTOCOLS, 1):
        assert title(cell.key.label) in cell.job.label
        assert cell.key.protocol in cell.job.label
    assert title("partial-1") == "RoPE on 1 head"
    assert title("partial-8") == "RoPE on 8 heads"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("lptop", PROTOCOLS, 1), "scale: there is no 'lptop'; did you mean 'laptop'"),
        (("smoke", ["papr"], 1), "protocol: there is no 'papr'; did you mean 'paper'"),
        (("smoke", PROTOCOLS, 0), "seeds: 0 was given"),
        (("smoke", PROTOCOLS, -1), "seeds: -1 was given"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(given: tuple[Any, ...], message: str):
    with pytest.raises(InputError, match=message):
        grid(*given)


def test_a_starting_spec_follows_scale_protocol_task_and_encoding():
    content = starting_spec("laptop", RELEASED, COUNT, "alibi", 7)
    run = RunSpec(**content)
    assert (run.task, run.model.encoding, run.model.protocol) == (COUNT, "alibi", RELEASED)
    assert run.seed == run.data_seed == 7
    for wrong in [("lap", PAPER, COUNT), ("laptop", "pap", COUNT), ("laptop", PAPER, "count")]:
        with pytest.raises(InputError, match="there is no"):
            starting_spec(*wrong, "rope", 1)


# ---- carried out ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    """No shape checks: what a study is made of runs checked in its own tests."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def micro(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smoke scale made as small as can be: 1 epoch on 32 examples, 4 cells a protocol."""
    smoke = SCALES["smoke"]
    tasks = {
        name: replace(size, train_examples=32, test_examples=16, epochs=1 if name == COUNT else 2)
        for name, size in smoke.tasks.items()
    }
    monkeypatch.setitem(
        SCALES,
        "smoke",
        replace(
            smoke,
            model=smoke.model | {"d_model": 16, "d_ff": 16, "num_heads": 2},
            optimiser=smoke.optimiser | {"batch_size": 16},
            tasks=tasks,
            labels={DISTANCE: ("rope", "mla", "rope-absolute"), COUNT: ("nope",)},
            partial_heads={DISTANCE: (), COUNT: ()},
            ablation_examples=12,
        ),
    )


CELLS = 8


class Here:
    """`run_local` in this process, one job after another; counts what it is given to do."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.carried_out: list[str] = []

    def __call__(self, jobs: Sequence[Job], out: Path, limits: Limits, **_: Any) -> list[str]:
        statuses = []
        for job in jobs:
            before = (out / job.spec.name / "ablation.json").exists()
            if self.stop_after is not None and len(self.carried_out) >= self.stop_after:
                limits = replace(limits, should_stop=lambda: True)
            statuses.append(carry_out(job, out, limits).status)
            if not before:
                self.carried_out.append(job.spec.name)
        return statuses


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    made = Here()
    monkeypatch.setattr(study, "run_local", made)
    return made


def run_files(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of the runs, with its content and time."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (directory / "runs").rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def told(state: Reproduction) -> dict[str, Any]:
    """What a study found, without the time it took."""
    found = [cell.to_dict() for cell in state.results.cells]
    for cell in found:
        for row in cell["epochs"]:
            row.pop("seconds")
        for name in ("seconds", "tokens_per_second"):
            cell["result"].pop(name)
    return {"cells": found, "claims": [entry.to_dict() for entry in state.entries]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A study that two workers carried out."""
    with pytest.MonkeyPatch.context() as patch:
        micro.__wrapped__(patch) if hasattr(micro, "__wrapped__") else None
        yield tmp_path_factory.mktemp("finished") / "study"
