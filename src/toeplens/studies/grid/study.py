"""A grid study: run its cells, gather the results, judge its claims, and write the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from toeplens import tasks
from toeplens.engine import ExecutionOptions, Job, Workers, run_jobs
from toeplens.engine.jobs import OnEvent
from toeplens.engine.language.bits import cut_passages
from toeplens.model import decoder_config
from toeplens.studies.grid.language import language_rows
from toeplens.studies.grid.measures import GridRow, RankRelation, matrix, relations
from toeplens.studies.grid.spec import EncodingColumn, GridSpec, grid_spec, spec_from_yaml
from toeplens.studies.kit.claims import Claim, LedgerEntry, Tests, findings_of, judge_all
from toeplens.studies.kit.results import CellKey, CellResult, Results
from toeplens.studies.kit.study import RUNS, Cell, GridState, jobs_of, prepare_runs
from toeplens.studies.kit.verdicts import Finding, unknown_finding
from toeplens.tasks.language import Language, LanguageTask
from toeplens.training import run_spec
from toeplens.utils import InputError, choose
from toeplens.utils.errors import first_line, with_location
from toeplens.utils.records import Record

_MAX_MODELS = 10_000  # maximum number of models; listing and reading more would take minutes


def grid_cells(spec: GridSpec) -> list[Cell]:
    """All cells by seed, task and encoding. Raises `InputError` if there are too many."""
    pairs = [(task, column) for task in spec.tasks for column in spec.columns() if task in column.tasks]
    if (models := spec.seeds * len(pairs)) > _MAX_MODELS:
        raise InputError(f"tasks and encodings must give at most {_MAX_MODELS:,} models, got {models:,}.")
    seeds = range(spec.first_seed, spec.first_seed + spec.seeds)
    return [_cell(spec, *pair, seed) for seed in seeds for pair in pairs]


def _cell(spec: GridSpec, label: str, column: EncodingColumn, seed: int) -> Cell:
    part = spec.tasks[label]
    try:
        task = tasks.build(part.task or label, **part.options)
    except InputError as error:
        raise InputError(with_location(("tasks", label), str(error))) from None
    try:
        common = {
            "vocab_size": task.vocab_size,
            "num_classes": task.labels[-1] + 1,
            "max_len": task.length,
            "attention_scale": None,  # the same for all encodings, see docs/decisions/07
            **({"readout": "each"} if task.per_token else {}),
        }
        fields = {**common, **spec.model, **part.model, **column.model}
        model = decoder_config(**fields, encoding=column.encoding, encoding_options=column.options)
        training = {"seed": seed, "data_seed": seed, **spec.training, **part.training}
        run = run_spec(task=part.task or label, task_options=part.options, model=model, **training)
    except InputError as error:
        raise InputError(f"{column.label} on {label}: {error}") from None
    name = f"{spec.title_of(label)} · {column.title} · seed {seed}"
    job = Job(run, name, spec.examples, "test", spec.measures, part.watch)
    return Cell(CellKey(model.protocol, label, column.label, seed), job)


@dataclass(frozen=True)
class ClaimData:
    """The data for judging claims on a grid study, the argument of each `Claim.check`."""

    spec: GridSpec  # tasks, encodings (``spec.columns()``), measures
    results: Results  # finished models: ``results.cells_of(task, label)``, ``results.difference(task, first, second)``
    relations: Sequence[RankRelation]  # correlations of head properties with the skill that remains on longer sequences

    def title(self, label: str) -> str:
        """An encoding's display name, or its label if the study does not contain it."""
        return next((column.title for column in self.spec.columns() if column.label == label), label)

    def skilled_cells(self, task: str, label: str) -> list[CellResult]:
        """The cells of a task and encoding with skill."""
        return [cell for cell in self.results.cells_of(task, label) if cell.is_skilled]


def judge_grid(data: ClaimData) -> list[LedgerEntry]:
    """The study's claims with their verdicts; empty without claims.

    Claims of other packages that cannot be loaded or that raise are undecided, with the error as evidence.
    """
    if not data.spec.claims:
        return []
    sets = entry_points(group="toeplens.claims")
    entry = sets[choose("claims", data.spec.claims, sets.names)]
    package = "?" if entry.dist is None else entry.dist.name
    if package == "toeplens":
        return judge_all(entry.load(), data)
    try:
        claims = list(entry.load())
        if not all(isinstance(claim, Claim) for claim in claims):
            raise TypeError(f"{entry.value} must be a sequence of toeplens.studies.Claim")
    except Exception as error:
        failure = _error_finding(package, entry.name, error)
        claims = [Claim(entry.name, f"package {package}", f"The claims of {entry.value}.", "", lambda _: [failure])]
    return judge_all([_catch_errors(claim, package) for claim in claims], data)


def _catch_errors(claim: Claim[ClaimData], package: str) -> Claim[ClaimData]:
    """A claim of another package whose errors become findings."""

    def run_safely(check: Tests[ClaimData], data: ClaimData) -> Sequence[Finding]:
        try:
            results = findings_of(check, data)
            if not results or not all(isinstance(finding, Finding) for finding in results):
                raise TypeError("check must return toeplens.studies.Finding objects, at least one")
        except Exception as error:
            return [_error_finding(package, claim.id, error)]
        return results

    alternatives = {name: partial(run_safely, check) for name, check in claim.elsewhere.items()}
    return replace(claim, check=partial(run_safely, claim.check), elsewhere=alternatives)


def _error_finding(package: str, claim: str, error: Exception) -> Finding:
    reason = f"could not be judged: {type(error).__name__}: {first_line(error)}"
    return unknown_finding(f"claim {claim} of the package {package}", reason, f"a package {package} that can judge it")


@dataclass(frozen=True, kw_only=True)
class GridRequest(Record):
    """The request in study.json."""

    spec: str


@dataclass(frozen=True, kw_only=True)
class GridStudy(GridState):
    """The state of a grid study."""

    NAME, COMMAND, REQUEST = "grid", "study", GridRequest
    PAGE = "toeplens.report.grid:grid_page"

    spec: GridSpec
    relations: list[RankRelation]  # correlates of length extrapolation

    @classmethod
    def plan_from_request(cls, request: GridRequest) -> GridSpec:
        return spec_from_yaml(request.spec)

    @classmethod
    def cells(cls, plan: GridSpec) -> list[Cell]:
        return grid_cells(plan)

    @classmethod
    def with_verdicts(cls, plan: GridSpec, **fields: Any) -> Self:
        results = fields["results"]
        related = relations(plan, results)
        return cls(**fields, spec=plan, relations=related, entries=judge_grid(ClaimData(plan, results, related)))

    @cached_property
    def _matrix(self) -> list[GridRow]:
        return matrix(self.spec, self.results)

    def matrix(self) -> list[GridRow]:
        return self._matrix

    def request_fields(self) -> dict[str, Any]:
        return {"spec": self.spec.to_yaml()}

    def tables(self) -> dict[str, Any]:
        language = [row.to_dict() for row in language_rows(self.spec, self.results)]
        return {"table": [row.to_dict() for row in self.matrix()], **({"language": language} if language else {})}

    def result_fields(self) -> dict[str, Any]:
        return {**self.tables(), "relations": [row.to_dict() for row in self.relations]} | super().result_fields()


gather, is_grid = GridStudy.gather, GridStudy.is_study_or_record


def run_study(
    spec: GridSpec,
    out: Path | str,
    *,
    execution: ExecutionOptions | None = None,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> GridStudy:
    """Run or resume a grid study in ``out``; returns the results so far.

    A study can be edited and resumed; finished runs that are still needed are not repeated. Raises `InputError` if the
    text of a task has changed since the study was started.

    Arguments
        execution  device, deadline, compilation
        workers    number of processes (default: one per core), or a `toeplens.engine.ClusterOptions`
        on_event   called for every step and every finished run, with the run's index in ``jobs_of(grid_cells(spec))``
    """
    out = Path(out)
    spec = _pin_texts(spec, out)
    jobs = jobs_of(grid_cells(spec))
    for job in jobs:  # check that the text is long enough before training
        task = job.spec.build_task()
        if isinstance(task, LanguageTask):
            task.check_size("train", job.spec.train_examples)
            task.check_size("validation", job.spec.test_examples)
            task.check_size("test", 1)
            if "bits" in job.measures:
                cut_passages(task.corpus(), "test", task.length, 2, 0)  # checks for documents that are long enough
    execution = prepare_runs(execution, out, jobs, workers)
    with GridStudy.open_locked(out, {"spec": spec.to_yaml()}) as states:
        run_jobs(jobs, out / RUNS, execution, workers=workers, on_event=on_event)
    return states[0]


def _pin_texts(spec: GridSpec, out: Path) -> GridSpec:
    """The study with the hash of its text, which must equal the hash at the start of the study."""
    existing = GridStudy.read_plan(out)[0].tasks if GridStudy.is_study_directory(out) else {}
    parts = {}
    for label, part in spec.tasks.items():
        task = tasks.build(part.task or label, **part.options)
        pinned = task.pinned_options()
        old_hash = existing[label].options.get("sha256") if label in existing else None
        if isinstance(task, Language) and old_hash is not None and old_hash != pinned["sha256"]:
            recorded = tasks.build(existing[label].task or label, **existing[label].options)
            if isinstance(recorded, Language) and recorded.source_key == task.source_key:
                raise InputError(
                    f"text: the text of {label} has changed since the study was started: its sha256 was {old_hash} and "
                    f"is {pinned['sha256']}. Restore the text or choose another directory."
                )
        parts[label] = {**part.model_dump(mode="json"), "options": {**part.options, **pinned}}
    return grid_spec({**spec.model_dump(mode="json"), "tasks": parts})
