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
from toeplens.engine.language.bits import cut
from toeplens.ground import InputError, choose
from toeplens.ground.errors import first_line, located
from toeplens.ground.records import Record
from toeplens.model import decoder_config
from toeplens.studies.grid.language import language_rows
from toeplens.studies.grid.measured import Relation, Row, matrix, relations
from toeplens.studies.grid.spec import Column, GridSpec, grid_spec, spec_from_yaml
from toeplens.studies.kit.claims import Claim, Entry, Tests, findings, judge_all
from toeplens.studies.kit.results import CellResult, Key, Results
from toeplens.studies.kit.study import RUNS, Cell, Gathered, jobs_of, of_runs
from toeplens.studies.kit.verdicts import Finding, unknown
from toeplens.tasks.language import Language, LanguageTask
from toeplens.training import run_spec

_MOST = 10_000  # maximum number of models; listing and reading more would take minutes


def cells(spec: GridSpec) -> list[Cell]:
    """All cells by seed, task and encoding. Raises `InputError` if there are too many."""
    places = [(task, column) for task in spec.tasks for column in spec.columns() if task in column.tasks]
    if (models := spec.seeds * len(places)) > _MOST:
        raise InputError(f"tasks and encodings must give at most {_MOST:,} models, got {models:,}.")
    seeds = range(spec.first_seed, spec.first_seed + spec.seeds)
    return [_cell(spec, *place, seed) for seed in seeds for place in places]


def _cell(spec: GridSpec, label: str, column: Column, seed: int) -> Cell:
    part = spec.tasks[label]
    try:
        task = tasks.build(part.task or label, **part.options)
    except InputError as error:
        raise InputError(located(("tasks", label), str(error))) from None
    try:
        common = {
            "vocab_size": task.vocab_size,
            "num_classes": task.labels[-1] + 1,
            "max_len": task.length,
            "attention_scale": None,  # the same for all encodings, see docs/decisions/07
            **({"readout": "each"} if task.each else {}),
        }
        fields = {**common, **spec.model, **part.model, **column.model}
        model = decoder_config(**fields, encoding=column.encoding, encoding_options=column.options)
        training = {"seed": seed, "data_seed": seed, **spec.training, **part.training}
        run = run_spec(task=part.task or label, task_options=part.options, model=model, **training)
    except InputError as error:
        raise InputError(f"{column.label} on {label}: {error}") from None
    name = f"{spec.title_of(label)} · {column.title} · seed {seed}"
    return Cell(
        Key(model.protocol, label, column.label, seed), Job(run, name, spec.examples, "test", spec.measures, part.watch)
    )


@dataclass(frozen=True)
class Evidence:
    """The data for judging claims on a grid study, the argument of each `Claim.check`."""

    spec: GridSpec  # tasks, encodings (``spec.columns()``), measures
    results: Results  # finished models: ``results.of(task, label)``, ``results.difference(task, first, second)``
    relations: Sequence[Relation]  # correlations of head properties with the skill that remains on longer sequences

    def title(self, label: str) -> str:
        """An encoding's display name, or its label if the study does not contain it."""
        return next((column.title for column in self.spec.columns() if column.label == label), label)

    def skilled(self, task: str, label: str) -> list[CellResult]:
        """The cells of a task and encoding with skill."""
        return [cell for cell in self.results.of(task, label) if cell.skilled]


def judged(data: Evidence) -> list[Entry]:
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
        why = _unjudged(package, entry.name, error)
        claims = [Claim(entry.name, f"package {package}", f"The claims of {entry.value}.", "", lambda _: [why])]
    return judge_all([_guarded(claim, package) for claim in claims], data)


def _guarded(claim: Claim[Evidence], package: str) -> Claim[Evidence]:
    """A claim of another package whose errors become findings."""

    def checked(check: Tests[Evidence], data: Evidence) -> Sequence[Finding]:
        try:
            found = findings(check, data)
            if not found or not all(isinstance(finding, Finding) for finding in found):
                raise TypeError("check must return toeplens.studies.Finding objects, at least one")
        except Exception as error:
            return [_unjudged(package, claim.id, error)]
        return found

    ways = {name: partial(checked, check) for name, check in claim.elsewhere.items()}
    return replace(claim, check=partial(checked, claim.check), elsewhere=ways)


def _unjudged(package: str, claim: str, error: Exception) -> Finding:
    why = f"could not be judged: {type(error).__name__}: {first_line(error)}"
    return unknown(f"claim {claim} of the package {package}", why, f"a package {package} that can judge it")


@dataclass(frozen=True, kw_only=True)
class Asked(Record):
    """The request in study.json."""

    spec: str


@dataclass(frozen=True, kw_only=True)
class Grid(Gathered):
    """The state of a grid study."""

    NAME, COMMAND, REQUEST = "grid", "study", Asked
    PAGE = "toeplens.report.grid:grid_page"

    spec: GridSpec
    relations: list[Relation]  # correlates of length extrapolation

    @classmethod
    def planned(cls, request: Asked) -> GridSpec:
        return spec_from_yaml(request.spec)

    @classmethod
    def cells(cls, plan: GridSpec) -> list[Cell]:
        return cells(plan)

    @classmethod
    def judged(cls, plan: GridSpec, **gathered: Any) -> Self:
        results = gathered["results"]
        related = relations(plan, results)
        return cls(**gathered, spec=plan, relations=related, entries=judged(Evidence(plan, results, related)))

    @cached_property
    def _matrix(self) -> list[Row]:
        return matrix(self.spec, self.results)

    def matrix(self) -> list[Row]:
        return self._matrix

    def asked(self) -> dict[str, Any]:
        return {"spec": self.spec.to_yaml()}

    def tables(self) -> dict[str, Any]:
        spoken = [row.to_dict() for row in language_rows(self.spec, self.results)]
        return {"table": [row.to_dict() for row in self.matrix()], **({"language": spoken} if spoken else {})}

    def found(self) -> dict[str, Any]:
        return {**self.tables(), "relations": [each.to_dict() for each in self.relations]} | super().found()


gather, is_grid = Grid.gather, Grid.tells


def study(
    spec: GridSpec,
    out: Path | str,
    *,
    limits: ExecutionOptions | None = None,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> Grid:
    """Run or resume a grid study in ``out``; returns the results so far.

    A study can be edited and resumed; finished runs that are still needed are not repeated. Raises `InputError` if the
    text of a task has changed since the study was started.

    Arguments
        limits    device, deadline, compilation
        workers   number of processes (default: one per core), or a `toeplens.engine.ClusterOptions`
        on_event  called for every step and every finished run, with the run's index in ``jobs_of(cells(spec))``
    """
    out = Path(out)
    spec = _pinned(spec, out)
    jobs = jobs_of(cells(spec))
    for job in jobs:  # check that the text is long enough before training
        task = job.spec.build_task()
        if isinstance(task, LanguageTask):
            task.must_have("train", job.spec.train_examples)
            task.must_have("validation", job.spec.test_examples)
            task.must_have("test", 1)
            if "bits" in job.measures:
                cut(task.corpus(), "test", task.length, 2, 0)  # checks for documents that are long enough
    limits = of_runs(limits, out, jobs, workers)
    with Grid.opened(out, {"spec": spec.to_yaml()}) as gathered:
        run_jobs(jobs, out / RUNS, limits, workers=workers, on_event=on_event)
    return gathered[0]


def _pinned(spec: GridSpec, out: Path) -> GridSpec:
    """The study with the hash of its text, which must equal the hash at the start of the study."""
    had = Grid.plan_of(out)[0].tasks if Grid.holds(out) else {}
    parts = {}
    for label, part in spec.tasks.items():
        task = tasks.build(part.task or label, **part.options)
        pinned = task.pinned()
        before = had[label].options.get("sha256") if label in had else None
        if isinstance(task, Language) and before is not None and before != pinned["sha256"]:
            recorded = tasks.build(had[label].task or label, **had[label].options)
            if isinstance(recorded, Language) and recorded.read_from == task.read_from:
                raise InputError(
                    f"text: the text of {label} has changed since the study was started: its sha256 was {before} and "
                    f"is {pinned['sha256']}. Restore the text or choose another directory."
                )
        parts[label] = {**part.model_dump(mode="json"), "options": {**part.options, **pinned}}
    return grid_spec({**spec.model_dump(mode="json"), "tasks": parts})
