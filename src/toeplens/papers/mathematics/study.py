"""The mathematics as a study: run each experiment under each seed, keep its record, judge the claims on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toeplens.engine import Job, Limits, plan_workers, run_local
from toeplens.engine.local import OnEvent
from toeplens.engine.pool import in_processes
from toeplens.ground import InputError, choose, write_json
from toeplens.ground.files import make_directory
from toeplens.ground.machine import MOST_SEEDS, within
from toeplens.ground.stops import Interrupted, interruptible
from toeplens.papers.mathematics import contraction, estimators, expressiveness, heads, phases
from toeplens.papers.mathematics.records import Record, Records
from toeplens.papers.mathematics.statements import read_records
from toeplens.studies.kit.claims import Claim, Entry, judge_all
from toeplens.studies.kit.store import CLAIMS_FILE, RESULTS, RUNS, STUDY, held, read_study, written
from toeplens.training import Run, environment, plan_execution, run_spec
from toeplens.training.presets import DISTANCE, PRESETS, starting_spec

RECORDS = "records"
KIND = "theory"
EXPERIMENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "contraction": contraction.contraction,
    "phases": phases.phases,
    "expressiveness": expressiveness.expressiveness,
    "estimators": estimators.estimators,
}
CLAIMS: tuple[Claim[Records], ...] = (
    *contraction.CLAIMS,
    *phases.CLAIMS,
    *heads.CLAIMS,
    *expressiveness.CLAIMS,
    *estimators.CLAIMS,
)
_FIRST = 42  # as in the papers

Place = tuple[str, int]


@dataclass(frozen=True)
class Theory:
    """The study's state on disk.

    records   by experiment, one a finished seed
    finished  records there are, of ``total``
    """

    directory: Path
    scale: str
    seeds: int
    records: Records
    entries: list[Entry]
    finished: int
    total: int
    environment: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every experiment is finished under every seed."""
        return self.finished == self.total


def check_theory(
    out: Path | str,
    *,
    scale: str = "laptop",
    seeds: int = 3,
    limits: Limits | None = None,
    workers: int | None = None,
    on_event: OnEvent | None = None,
    on_record: Callable[[str, int], None] = lambda name, seed: None,
) -> Theory:
    """Carry out the experiments on the papers' mathematics in ``out``, or go on with them.

    Arguments
        scale      of the models whose heads are measured: ``smoke``, ``laptop`` or ``paper``
        seeds      of every experiment, and of the models
        limits     device, deadline, compilation
        workers    processes; one a core unless given
        on_event   told of the models' training steps, by their place in `jobs`
        on_record  told of every finished experiment and its seed
    """
    choose("scale", scale, PRESETS)
    within("seeds", seeds, 1, MOST_SEEDS)
    limits = limits or Limits()
    plan_workers(1, limits.device, workers)  # refuses what cannot be before anything is written
    plan_execution(limits.device, limits.compile, "auto")
    directory = Path(out)
    with held(directory):
        _claim(directory, scale, seeds)
        numbers = range(_FIRST, _FIRST + seeds)
        _carry_out(
            [(name, seed) for seed in numbers for name in EXPERIMENTS], directory, scale, limits, workers, on_record
        )
        if not limits.over():
            run_local(jobs(scale, seeds), directory / RUNS, limits, workers=workers, on_event=on_event)
        _carry_out([(heads.NAME, seed) for seed in numbers], directory, scale, limits, workers, on_record)
        return gather(directory)


def jobs(scale: str, seeds: int) -> list[Job]:
    """The models whose heads are measured: the paper protocol's, on the distance task."""
    within("seeds", seeds, 1, MOST_SEEDS)
    return [_job(scale, label, seed) for seed in range(_FIRST, _FIRST + seeds) for label in heads.LABELS]


def gather(directory: Path | str) -> Theory:
    """Read what the study has finished, judge the claims on it, and write both down (results.json, claims.json).

    While another process carries the study out it is read only.
    """
    directory = Path(directory)
    with written(directory) as ours:
        theory = _read(directory)
        if ours:
            _write(theory)
    return theory


def _read(directory: Path) -> Theory:
    content = read_study(directory)
    if content is None or content.get("study") != KIND:
        raise InputError(f"study: {directory} is not the directory of a study of the mathematics.")
    try:
        scale, seeds = choose("scale", content["scale"], PRESETS), content["seeds"]
    except InputError as error:
        raise InputError(f"study: {directory / STUDY} is damaged: {error}") from None
    about = dict(content["environment"])
    records: dict[str, Sequence[Record]] = {}
    for name in (*EXPERIMENTS, heads.NAME):
        paths = [_path(directory, name, seed) for seed in range(_FIRST, _FIRST + seeds)]
        records[name] = read_records(name, [path for path in paths if path.exists()])
    finished = sum(len(found) for found in records.values())
    total = seeds * (len(EXPERIMENTS) + 1)
    return Theory(directory, scale, seeds, records, judge_all(CLAIMS, records), finished, total, about)


def _write(theory: Theory) -> None:
    head = {
        "study": KIND,
        "scale": theory.scale,
        "seeds": theory.seeds,
        "finished": theory.finished,
        "total": theory.total,
        "environment": theory.environment,
    }
    write_json(theory.directory / RESULTS, {**head, "records": theory.records})
    write_json(theory.directory / CLAIMS_FILE, {**head, "claims": [entry.to_dict() for entry in theory.entries]})


def is_theory(directory: Path | str) -> bool:
    """Whether a directory is this study's."""
    content = read_study(Path(directory))
    return content is not None and content.get("study") == KIND


def _claim(directory: Path, scale: str, seeds: int) -> None:
    had = read_study(directory)
    if had is not None:
        if had.get("study") != KIND:
            raise InputError(f"out: {directory} holds another study; give another directory.")
        if had.get("scale") != scale:
            raise InputError(f"out: {directory} holds a study at scale {had.get('scale')!r}; give another directory.")
    about = {**environment(), "began": time.strftime("%Y-%m-%d")}
    write_json(directory / STUDY, {"study": KIND, "scale": scale, "seeds": seeds, "environment": about})
    make_directory(directory / RECORDS)
    make_directory(directory / RUNS)


def _path(directory: Path, name: str, seed: int) -> Path:
    return directory / RECORDS / f"{name}-{seed}.json"


def _carry_out(
    places: Sequence[Place],
    directory: Path,
    scale: str,
    limits: Limits,
    workers: int | None,
    on_record: Callable[[str, int], None],
) -> None:
    """Make the records that are not there yet, several at a time, until time is up; tells each as it is done."""
    missing = [place for place in places if not _path(directory, *place).exists()]
    count, _ = plan_workers(max(1, len(missing)), "cpu", workers)
    pieces = [(place, directory, scale) for place in missing]

    def done(index: int, made: bool | None) -> None:
        if made:
            on_record(*missing[index])

    if count > 1:
        in_processes(_make, pieces, limits, count=count, threads=1, on_done=done)
        return
    for index, piece in enumerate(pieces):
        if limits.over():
            return
        try:
            with interruptible(limits.late, grace=0.0):
                done(index, _make(piece, limits))
        except Interrupted:
            if not limits.over():
                raise
            return


def _make(
    piece: tuple[Place, Path, str], limits: Limits, tell: Callable[[Any], None] = lambda what: None
) -> bool | None:
    """One record; False where it cannot be made yet, None where its time was up before it was begun."""
    (name, seed), directory, scale = piece
    if limits.late():
        return None
    if name == heads.NAME:
        return _measure_heads(directory, scale, seed)
    write_json(_path(directory, name, seed), EXPERIMENTS[name](seed))
    return True


def _job(scale: str, label: str, seed: int) -> Job:
    start = starting_spec(scale, "paper", DISTANCE, heads.LABELS[label], seed)
    return Job(run_spec(**start), f"{label} · seed {seed}")


def _measure_heads(directory: Path, scale: str, seed: int) -> bool:
    """Write the heads' record if all of a seed's models are there; a model that diverged is left out."""
    runs: dict[str, Run] = {}
    for label in heads.LABELS:
        path = directory / RUNS / _job(scale, label, seed).spec.name
        if not (path / "spec.json").exists():
            return False
        run = Run.open(path)
        if run.status == "stopped":
            return False
        if run.status == "complete":
            runs[label] = run
    write_json(_path(directory, heads.NAME, seed), heads.heads(runs))
    return True
