"""The mathematics as a study: run each experiment with each seed, keep the records, judge the claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toeplens.engine import ExecutionOptions, Job, Workers, cluster_of, must_have, run_jobs, spread
from toeplens.engine.jobs import OnEvent
from toeplens.ground import InputError, choose, read_json, write_json
from toeplens.ground.files import make_directory
from toeplens.ground.machine import MOST_SEEDS, within
from toeplens.ground.records import Record
from toeplens.papers.mathematics.expressiveness import expressiveness
from toeplens.papers.mathematics.logits import distance, latent, normalising, related
from toeplens.papers.mathematics.position import estimators, manifold
from toeplens.papers.mathematics.spectra import contraction, filling, phases
from toeplens.papers.mathematics.statements import Records, claims_on
from toeplens.papers.mathematics.trained import LABELS, heads, measure_heads, small_norm
from toeplens.studies.kit.claims import judge_all
from toeplens.studies.kit.results import Seeds
from toeplens.studies.kit.study import RUNS, Kept, State, of_study
from toeplens.studies.kit.verdicts import ENOUGH
from toeplens.training import Run, plan_execution, run_spec
from toeplens.training.presets import DISTANCE, PRESETS, starting_spec

RECORDS = "records"
_BY_SEED = (
    *(contraction, phases, expressiveness, estimators, manifold, normalising),
    *(filling, distance, latent, related, small_norm),
)
EXPERIMENTS: dict[str, Callable[..., dict[str, Any]]] = {each.name: each.run for each in _BY_SEED}  # by name
CLAIMS = claims_on((*_BY_SEED, heads))  # the claims on the mathematics
_FIRST = 42  # as in the papers

Place = tuple[str, int]  # experiment and seed


@dataclass(frozen=True, kw_only=True)
class Asked(Record):
    """The request in study.json."""

    scale: str
    seeds: Seeds


def _judged(head: dict[str, Any], plan: tuple[str, int], found: Mapping[str, Mapping[Path | str, Any]]) -> Theory:
    """The state, from each experiment's records by location.

    Raises `InputError` if their fields or sizes differ from the first; only heads of diverged models may be missing.
    """
    for name, records in found.items():
        shapes = {place: _shape(record) for place, record in records.items()}
        for place, shape in shapes.items():
            if not isinstance(shape, dict) or (name != heads.name and shape != next(iter(shapes.values()))):
                raise InputError(f"{place} is damaged: its fields and sizes differ from {next(iter(shapes))}.")
    records = {name: list(each.values()) for name, each in found.items()}
    try:
        entries = judge_all(CLAIMS, records)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InputError(f"study: a record in {head['directory']} is damaged ({error!r}).") from None
    return Theory(**head, entries=entries, scale=plan[0], seeds=plan[1], records=records)


def _shape(content: Any) -> Any:
    """Field names and list lengths."""
    if isinstance(content, dict):
        return {name: _shape(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_shape(each) for each in content] if content and isinstance(content[0], (dict, list)) else len(content)
    return isinstance(content, str)


@dataclass(frozen=True, kw_only=True)
class Theory(State):
    """The state of the study.

    records  by experiment, one per finished seed
    """

    NAME, COMMAND, REQUEST = "theory", "theory", Asked
    PAGE = "toeplens.papers.mathematics.page:theory_page"

    scale: str
    seeds: int
    records: Records

    @classmethod
    def planned(cls, request: Asked) -> tuple[str, int]:
        return choose("scale", request.scale, PRESETS), request.seeds

    @classmethod
    def read(cls, directory: Path, plan: tuple[str, int], environment: dict[str, Any]) -> Theory:
        found: dict[str, dict[Path | str, Any]] = {}
        for name in (*EXPERIMENTS, heads.name):
            paths = [_path(directory, name, seed) for seed in _numbers(plan[1])]
            found[name] = {path: read_json(path) for path in paths if path.exists()}
        counted = {"finished": sum(map(len, found.values())), "total": plan[1] * len(found)}
        return _judged({"directory": directory, **counted, "environment": environment}, plan, found)

    @classmethod
    def reread(cls, kept: Kept, plan: tuple[str, int]) -> Theory:
        found = kept.content.get("records")
        if not isinstance(found, dict) or not all(isinstance(each, list) for each in found.values()):
            raise InputError(f"study: {kept.path} is damaged: records must be lists by experiment.")
        places: dict[str, dict[Path | str, Any]] = {
            name: {f"{kept.path}: {name}.{at}": each for at, each in enumerate(found.get(name, []))}
            for name in (*EXPERIMENTS, heads.name)
        }
        return _judged(kept.head, plan, places)

    def asked(self) -> dict[str, Any]:
        return {"scale": self.scale, "seeds": self.seeds}

    def found(self) -> dict[str, Any]:
        return {"records": self.records}


gather, is_theory = Theory.gather, Theory.tells


def check_theory(
    out: Path | str,
    *,
    scale: str = "laptop",
    seeds: int = ENOUGH,
    limits: ExecutionOptions | None = None,
    workers: Workers = None,
    on_event: OnEvent | None = None,
    on_record: Callable[[str, int], None] = lambda name, seed: None,
) -> Theory:
    """Run the experiments on the papers' mathematics in ``out``, or resume them.

    Arguments
        scale      scale of the models whose heads are measured: ``smoke``, ``laptop``, ``desk`` or ``paper``
        seeds      number of seeds of every experiment and of the models
        limits     device, deadline, compilation
        workers    number of processes (default: one per core), or a `toeplens.engine.ClusterOptions`
        on_event   called at the models' training steps, with the index in `jobs`
        on_record  called with every finished experiment and its seed
    """
    choose("scale", scale, PRESETS)
    within("seeds", seeds, 1, MOST_SEEDS)
    directory = Path(out)
    limits = of_study(limits, directory)
    if not cluster_of(workers).on_ray:  # each machine of a cluster checks its own devices
        plan_execution(limits.device, limits.compile, "auto")
    must_have(workers, 1, limits)
    with Theory.opened(directory, {"scale": scale, "seeds": seeds}) as gathered:
        make_directory(directory / RECORDS)
        places = [(name, seed) for seed in _numbers(seeds) for name in EXPERIMENTS]
        _make_records(places, directory, scale, limits, workers, on_record)
        if not limits.over():
            run_jobs(jobs(scale, seeds), directory / RUNS, limits, workers=workers, on_event=on_event)
        here = None if cluster_of(workers).on_ray else workers  # a record needs all runs of a seed
        _make_records([(heads.name, seed) for seed in _numbers(seeds)], directory, scale, limits, here, on_record)
    return gathered[0]


def jobs(scale: str, seeds: int) -> list[Job]:
    """The models whose heads are measured: paper protocol, distance task."""
    within("seeds", seeds, 1, MOST_SEEDS)
    return [_job(scale, label, seed) for seed in _numbers(seeds) for label in LABELS]


def _job(scale: str, label: str, seed: int) -> Job:
    start = starting_spec(scale, "paper", DISTANCE, LABELS[label], seed)
    return Job(run_spec(**start), f"{label} · seed {seed}")


def _numbers(seeds: int) -> range:
    return range(_FIRST, _FIRST + seeds)


def _path(directory: Path, name: str, seed: int) -> Path:
    return directory / RECORDS / f"{name}-{seed}.json"


def _make_records(
    places: Sequence[Place],
    directory: Path,
    scale: str,
    limits: ExecutionOptions,
    workers: Workers,
    on_record: Callable[[str, int], None],
) -> None:
    """Run the missing records in parallel until the deadline; reports each finished one."""
    missing = [place for place in places if not _path(directory, *place).exists()]
    pieces = [(place, directory, scale) for place in missing]

    def done(index: int, made: Any) -> bool:
        if made:
            write_json(_path(directory, *missing[index]), made)
            on_record(*missing[index])
        return made is not None

    spread(_make, pieces, replace(limits, device="cpu"), workers, on_done=done)


def _make(piece: tuple[Place, Path, str], limits: ExecutionOptions, tell: Callable[..., None]) -> Any:
    """One record's content; False if its models are not finished, None if the deadline passed before it started."""
    (name, seed), directory, scale = piece
    if limits.late():
        return None
    if name != heads.name:
        return EXPERIMENTS[name](seed)
    runs: dict[str, Run] = {}
    for label in LABELS:
        path = directory / RUNS / _job(scale, label, seed).spec.name
        if not (path / "spec.json").exists() or (run := Run.open(path)).status == "stopped":
            return False
        if run.status == "complete":  # diverged models are excluded
            runs[label] = run
    return measure_heads(runs)
