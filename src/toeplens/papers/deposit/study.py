"""The reproduction study: its grid, runs, results and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from toeplens.engine import ExecutionOptions, Job, Workers, run_jobs
from toeplens.engine.jobs import OnEvent
from toeplens.model import Protocol, decoder_config
from toeplens.papers.deposit.claims import claims_of
from toeplens.papers.deposit.measures import AccuracyRow, accuracy_table
from toeplens.papers.deposit.spec import (
    CORE,
    SCALE_VARIANTS,
    SCALES,
    TITLES,
    EncodingLabel,
    ReproductionScale,
    labels_by_part,
    measures_of,
    model_fields,
    other_protocol,
    select_parts,
    title,
)
from toeplens.studies.kit.claims import judge
from toeplens.studies.kit.results import CellKey, Seeds
from toeplens.studies.kit.study import RUNS, Cell, GridState, jobs_of, prepare_runs
from toeplens.training import RunSpec, run_spec
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS, starting_spec
from toeplens.utils import InputError, choose
from toeplens.utils.machine import MAX_SEEDS
from toeplens.utils.options import check_range
from toeplens.utils.records import Record


def make_cell(
    scale: ReproductionScale, protocol: Protocol, task: str, label: str, seed: int, measures: tuple[str, ...] = ()
) -> Cell:
    """The run and measures of one place in the grid; plain encodings on Task 1 may be probed during training."""
    parsed = EncodingLabel.parse(label)
    if parsed.variant in SCALE_VARIANTS:
        scale = SCALE_VARIANTS[parsed.variant].apply_to(scale)
    data = other_protocol(protocol) if parsed.variant == "data" else protocol
    start = starting_spec(scale, data, task, parsed.base, seed)
    if epochs := scale.longer.get((protocol, task, label)):
        start |= {"epochs": epochs, "warmup": start["warmup"] * start["epochs"] / epochs}
    sizes = dict(scale.model)
    if (
        scale.name == "paper" and parsed.base == "mla"
    ):  # Table 4 says "16 heads (8 in fact)"; the released code uses 16 heads and 150 epochs
        start["batch_size"] = 1024
        if protocol == "released":
            start["epochs"] = 150
        else:
            sizes["num_heads"] //= 2
    model = decoder_config(**model_fields(protocol, label, sizes, seed))
    skips_zero = data == "released" and task == COUNT and parsed.base != "mla"
    spec: RunSpec = run_spec(**start | {"model": model, "ignore_label": 0 if skips_zero else None})
    split = "test" if protocol == "paper" else "train+test"
    task_name = "distance" if task == DISTANCE else "count"
    name = f"{protocol} · {task_name} · {title(label, protocol)} · seed {seed}"
    probe_heads = scale.watched and task == DISTANCE and (label in TITLES or parsed.variant in SCALE_VARIANTS)
    job = Job(spec, name, scale.ablation_examples, split, measures, probe_heads)
    return Cell(CellKey(protocol, task, label, seed), job)


def grid(scale_name: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str] = (CORE,)) -> list[Cell]:
    """All cells, most informative first: by part, by seed, Table 1's before the rest."""
    check_range("seeds", seeds, 1, MAX_SEEDS)
    scale = SCALES[choose("scale", scale_name, SCALES)]
    for protocol in protocols:
        choose("protocol", protocol, PROTOCOLS)
    by_protocol = {protocol: labels_by_part(scale, protocol, parts) for protocol in protocols}
    cells = []
    for part in next(iter(by_protocol.values()), {}):
        groups: list[tuple[Protocol, str, str]] = [
            (protocol, task, label)
            for protocol in protocols
            for wanted in (DISTANCE, COUNT)
            for task, label in by_protocol[protocol][part]
            if task == wanted
        ]
        groups.sort(key=lambda group: group[2] not in ("rope", "mla", "nope"))
        measures = [measures_of(scale, protocol, parts, (task, label)) for protocol, task, label in groups]
        cells += [
            make_cell(scale, *group, scale.first_seed + index, cell_measures)
            for index in range(seeds)
            for group, cell_measures in zip(groups, measures, strict=True)
            if index < scale.num_seeds(group, seeds)
        ]
    return cells


@dataclass(frozen=True)
class ReproductionPlan(Record):
    """The options of a study, as in study.json; earlier versions had no parts."""

    ADDED_LATER = ("parts",)

    scale: str
    protocols: Annotated[tuple[Protocol, ...], Field(min_length=1)]
    seeds: Seeds
    parts: tuple[str, ...] = (CORE,)

    def cells(self) -> list[Cell]:
        """The grid."""
        return grid(self.scale, self.protocols, self.seeds, self.parts)

    def jobs(self) -> list[Job]:
        """The grid's runs, without duplicates."""
        return jobs_of(self.cells())


@dataclass(frozen=True, kw_only=True)
class Reproduction(GridState):
    """The state of a reproduction."""

    NAME, COMMAND, REQUEST = "reproduce", "reproduce", ReproductionPlan
    PAGE = "toeplens.papers.deposit.page:reproduction_page"

    plan: ReproductionPlan
    table: list[AccuracyRow]

    @classmethod
    def plan_from_request(cls, request: ReproductionPlan) -> ReproductionPlan:
        choose("scale", request.scale, SCALES)
        return replace(request, parts=select_parts(request.parts))

    @classmethod
    def cells(cls, plan: ReproductionPlan) -> list[Cell]:
        return plan.cells()

    @classmethod
    def with_verdicts(cls, plan: ReproductionPlan, **fields: Any) -> Self:
        results = fields["results"]
        entries = judge(claims_of(plan.parts), results, plan.protocols)
        return cls(**fields, plan=plan, entries=entries, table=accuracy_table(results, plan.protocols))

    def request_fields(self) -> dict[str, Any]:
        return asdict(self.plan)

    def tables(self) -> dict[str, Any]:
        return {"table": [row.to_dict() for row in self.table]}


gather = Reproduction.gather


def reproduce(
    out: Path | str,
    *,
    scale: str = "laptop",
    protocols: Sequence[Protocol] = PROTOCOLS,
    seeds: int = 1,
    parts: Sequence[str] = (CORE,),
    execution: ExecutionOptions | None = None,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> Reproduction:
    """Run the papers' central experiment in ``out``, or resume it; returns the results so far.

    Arguments
        scale      ``smoke``, ``laptop``, ``desk``, ``full`` or ``paper``
        protocols  ``paper``, ``released``, or both
        seeds      seeds per cell
        parts      parts of the study, see `PARTS`
        execution  device, deadline, compilation
        workers    number of processes (default: one per core), or a `toeplens.engine.ClusterOptions`
        on_event   called at every step and finished run, with the run's index in `ReproductionPlan.jobs`

    Protocols, seeds and parts of an existing study in ``out`` are kept.
    """
    choose("scale", scale, SCALES)
    plan = merged_plan(out, scale, protocols, seeds, parts)
    jobs, out = plan.jobs(), Path(out)
    execution = prepare_runs(execution, out, jobs, workers)
    with Reproduction.open_locked(out, asdict(plan)) as gathered:
        run_jobs(jobs, out / RUNS, execution, workers=workers, on_event=on_event)
    return gathered[0]


def merged_plan(
    out: Path | str, scale: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str]
) -> ReproductionPlan:
    """The plan that `reproduce` would run in ``out``: the given options merged with those of an existing study.

    Raises `InputError` if there is nothing to train.
    """
    check_range("seeds", seeds, 1, MAX_SEEDS)
    plan = ReproductionPlan(scale=scale, protocols=tuple(protocols), seeds=seeds, parts=select_parts(parts))
    if Reproduction.is_study_directory(out):
        existing = Reproduction.read_plan(out)[0]
        all_protocols = tuple(protocol for protocol in PROTOCOLS if protocol in (*existing.protocols, *protocols))
        all_parts = select_parts((*existing.parts, *plan.parts))
        plan = replace(plan, protocols=all_protocols, seeds=max(seeds, existing.seeds), parts=all_parts)
    if not any(any(labels_by_part(SCALES[scale], protocol, plan.parts).values()) for protocol in plan.protocols):
        raise InputError(
            f"part: {' and '.join(plan.parts)} has no models at scale {scale} under the "
            f"{' and '.join(plan.protocols)} protocol. See 'toeplens reproduce --help' for the parts."
        )
    return plan
