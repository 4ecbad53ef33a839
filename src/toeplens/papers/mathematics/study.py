"""The mathematics as a study: run each experiment with each seed, keep the records, judge the claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toeplens.engine import ExecutionOptions, Job, Workers, check_workers, cluster_of, run_jobs, run_parallel
from toeplens.engine.jobs import OnEvent
from toeplens.papers.mathematics.expressiveness import expressiveness
from toeplens.papers.mathematics.logits import distance, latent, normalising, related
from toeplens.papers.mathematics.position import estimators, manifold
from toeplens.papers.mathematics.spectra import contraction, filling, phases
from toeplens.papers.mathematics.statements import Records, load_claims
from toeplens.papers.mathematics.trained_models import LABELS, heads, measure_heads, small_norm
from toeplens.studies.kit.claims import judge_all
from toeplens.studies.kit.results import Seeds
from toeplens.studies.kit.study import RUNS, StoredResults, StudyState, with_group
from toeplens.studies.kit.verdicts import MIN_SEEDS
from toeplens.training import Run, plan_execution, run_spec
from toeplens.training.presets import DISTANCE, PRESETS, starting_spec
from toeplens.utils import InputError, choose, read_json, write_json
from toeplens.utils.files import make_directory
from toeplens.utils.machine import MAX_SEEDS
from toeplens.utils.options import check_range
from toeplens.utils.records import Record

RECORDS = "records"
_BY_SEED = (
    *(contraction, phases, expressiveness, estimators, manifold, normalising),
    *(filling, distance, latent, related, small_norm),
)
EXPERIMENTS: dict[str, Callable[..., dict[str, Any]]] = {item.name: item.run for item in _BY_SEED}  # by name
CLAIMS = load_claims((*_BY_SEED, heads))  # the claims on the mathematics
FIRST_SEED = 42  # as in the papers

RecordKey = tuple[str, int]  # experiment and seed


@dataclass(frozen=True, kw_only=True)
class TheoryRequest(Record):
    """The request in study.json."""

    scale: str
    seeds: Seeds


def _judge(head: dict[str, Any], plan: tuple[str, int], by_path: Mapping[str, Mapping[Path | str, Any]]) -> Theory:
    """The state, from each experiment's records by location.

    Raises `InputError` if their fields or sizes differ from the first; only heads of diverged models may be missing.
    """
    for name, records in by_path.items():
        shapes = {path: _shape(record) for path, record in records.items()}
        for path, shape in shapes.items():
            if not isinstance(shape, dict) or (name != heads.name and shape != next(iter(shapes.values()))):
                raise InputError(f"{path} is damaged: its fields and sizes differ from {next(iter(shapes))}.")
    records = {name: list(group.values()) for name, group in by_path.items()}
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
        return [_shape(item) for item in content] if content and isinstance(content[0], (dict, list)) else len(content)
    return isinstance(content, str)


@dataclass(frozen=True, kw_only=True)
class Theory(StudyState):
    """The state of the study.

    records  by experiment, one per finished seed
    """

    NAME, COMMAND, REQUEST = "theory", "theory", TheoryRequest
    PAGE = "toeplens.papers.mathematics.page:theory_page"

    scale: str
    seeds: int
    records: Records

    @classmethod
    def plan_from_request(cls, request: TheoryRequest) -> tuple[str, int]:
        return choose("scale", request.scale, PRESETS), request.seeds

    @classmethod
    def read(cls, directory: Path, plan: tuple[str, int], environment: dict[str, Any]) -> Theory:
        by_name: dict[str, dict[Path | str, Any]] = {}
        for name in (*EXPERIMENTS, heads.name):
            paths = [_record_path(directory, name, seed) for seed in _seeds(plan[1])]
            by_name[name] = {path: read_json(path) for path in paths if path.exists()}
        progress = {"finished": sum(map(len, by_name.values())), "total": plan[1] * len(by_name)}
        return _judge({"directory": directory, **progress, "environment": environment}, plan, by_name)

    @classmethod
    def from_record(cls, stored: StoredResults, plan: tuple[str, int]) -> Theory:
        by_name = stored.content.get("records")
        if not isinstance(by_name, dict) or not all(isinstance(record, list) for record in by_name.values()):
            raise InputError(f"study: {stored.path} is damaged: records must be lists by experiment.")
        by_location: dict[str, dict[Path | str, Any]] = {
            name: {f"{stored.path}: {name}.{index}": record for index, record in enumerate(by_name.get(name, []))}
            for name in (*EXPERIMENTS, heads.name)
        }
        return _judge(stored.head, plan, by_location)

    def request_fields(self) -> dict[str, Any]:
        return {"scale": self.scale, "seeds": self.seeds}

    def result_fields(self) -> dict[str, Any]:
        return {"records": self.records}


gather, is_theory = Theory.gather, Theory.is_study_or_record


def check_theory(
    out: Path | str,
    *,
    scale: str = "laptop",
    seeds: int = MIN_SEEDS,
    execution: ExecutionOptions | None = None,
    workers: Workers = None,
    on_event: OnEvent | None = None,
    on_record: Callable[[str, int], None] = lambda name, seed: None,
) -> Theory:
    """Run the experiments on the papers' mathematics in ``out``, or resume them.

    Arguments
        scale      scale of the models whose heads are measured: ``smoke``, ``laptop``, ``desk``, ``full`` or ``paper``
        seeds      number of seeds of every experiment and of the models
        execution  device, deadline, compilation
        workers    number of processes (default: one per core), or a `toeplens.engine.ClusterOptions`
        on_event   called at the models' training steps, with the index in `model_jobs`
        on_record  called with every finished experiment and its seed
    """
    choose("scale", scale, PRESETS)
    check_range("seeds", seeds, 1, MAX_SEEDS)
    directory = Path(out)
    execution = with_group(execution, directory)
    if not cluster_of(workers).on_ray:  # each machine of a cluster checks its own devices
        plan_execution(execution.device, execution.compile, "auto")
    check_workers(workers, 1, execution)
    with Theory.open_locked(directory, {"scale": scale, "seeds": seeds}) as gathered:
        make_directory(directory / RECORDS)
        keys = [(name, seed) for seed in _seeds(seeds) for name in EXPERIMENTS]
        _make_records(keys, directory, scale, execution, workers, on_record)
        if not execution.is_over():
            run_jobs(model_jobs(scale, seeds), directory / RUNS, execution, workers=workers, on_event=on_event)
        local_workers = None if cluster_of(workers).on_ray else workers  # a record needs all runs of a seed
        keys = [(heads.name, seed) for seed in _seeds(seeds)]
        _make_records(keys, directory, scale, execution, local_workers, on_record)
    return gathered[0]


def model_jobs(scale: str, seeds: int) -> list[Job]:
    """The models whose heads are measured: paper protocol, distance task."""
    check_range("seeds", seeds, 1, MAX_SEEDS)
    return [_model_job(scale, label, seed) for seed in _seeds(seeds) for label in LABELS]


def _model_job(scale: str, label: str, seed: int) -> Job:
    start = starting_spec(scale, "paper", DISTANCE, LABELS[label], seed)
    return Job(run_spec(**start), f"{label} · seed {seed}")


def _seeds(seeds: int) -> range:
    return range(FIRST_SEED, FIRST_SEED + seeds)


def _record_path(directory: Path, name: str, seed: int) -> Path:
    return directory / RECORDS / f"{name}-{seed}.json"


def _make_records(
    keys: Sequence[RecordKey],
    directory: Path,
    scale: str,
    execution: ExecutionOptions,
    workers: Workers,
    on_record: Callable[[str, int], None],
) -> None:
    """Run the missing records in parallel until the deadline; reports each finished one."""
    missing = [key for key in keys if not _record_path(directory, *key).exists()]
    tasks = [(key, directory, scale) for key in missing]

    def save_record(index: int, record: Any) -> bool:
        if record:
            write_json(_record_path(directory, *missing[index]), record)
            on_record(*missing[index])
        return record is not None

    run_parallel(_make_record, tasks, replace(execution, device="cpu"), workers, on_done=save_record)


def _make_record(task: tuple[RecordKey, Path, str], execution: ExecutionOptions, report: Callable[..., None]) -> Any:
    """One record's content; False if its models are not finished, None if the deadline passed before it started."""
    (name, seed), directory, scale = task
    if execution.is_late():
        return None
    if name != heads.name:
        return EXPERIMENTS[name](seed)
    runs: dict[str, Run] = {}
    for label in LABELS:
        path = directory / RUNS / _model_job(scale, label, seed).spec.name
        if not (path / "spec.json").exists() or (run := Run.open(path)).status == "stopped":
            return False
        if run.status == "complete":  # diverged models are excluded
            runs[label] = run
    return measure_heads(runs)
