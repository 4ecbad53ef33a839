"""The reproduction study: its grid, runs, results and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from toeplens.engine import ExecutionOptions, Job, Workers, run_jobs
from toeplens.engine.jobs import OnEvent
from toeplens.ground import InputError, choose
from toeplens.ground.machine import MOST_SEEDS
from toeplens.ground.options import within
from toeplens.ground.records import Record
from toeplens.model import Protocol, decoder_config
from toeplens.papers.deposit.claims import claims_of
from toeplens.papers.deposit.measured import Row, accuracy_table
from toeplens.papers.deposit.spec import (
    CORE,
    RUNGS,
    SCALES,
    TITLES,
    Label,
    Scale,
    chosen_parts,
    measures_of,
    model_fields,
    other_protocol,
    places_of,
    title,
)
from toeplens.studies.kit.claims import judge
from toeplens.studies.kit.results import Key, Seeds
from toeplens.studies.kit.study import RUNS, Cell, Gathered, jobs_of, of_runs
from toeplens.training import RunSpec, run_spec
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS, starting_spec


def cell(scale: Scale, protocol: Protocol, task: str, label: str, seed: int, measures: tuple[str, ...] = ()) -> Cell:
    """The run and measures of one place in the grid; plain encodings on Task 1 may be probed during training."""
    at = Label.parse(label)
    if at.variant in RUNGS:
        scale = RUNGS[at.variant].applied(scale)
    data = other_protocol(protocol) if at.variant == "data" else protocol
    start = starting_spec(scale, data, task, at.base, seed)
    if epochs := scale.longer.get((protocol, task, label)):
        start |= {"epochs": epochs, "warmup": start["warmup"] * start["epochs"] / epochs}
    sizes = dict(scale.model)
    if (
        scale.name == "paper" and at.base == "mla"
    ):  # Table 4 says "16 heads (8 in fact)"; the released code uses 16 heads and 150 epochs
        start["batch_size"] = 1024
        if protocol == "released":
            start["epochs"] = 150
        else:
            sizes["num_heads"] //= 2
    model = decoder_config(**model_fields(protocol, label, sizes, seed))
    skips_zero = data == "released" and task == COUNT and at.base != "mla"
    spec: RunSpec = run_spec(**start | {"model": model, "ignore_label": 0 if skips_zero else None})
    split = "test" if protocol == "paper" else "train+test"
    what = "distance" if task == DISTANCE else "count"
    name = f"{protocol} · {what} · {title(label, protocol)} · seed {seed}"
    watch = scale.watched and task == DISTANCE and (label in TITLES or at.variant in RUNGS)
    return Cell(Key(protocol, task, label, seed), Job(spec, name, scale.ablation_examples, split, measures, watch))


def grid(scale_name: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str] = (CORE,)) -> list[Cell]:
    """All cells, most informative first: by part, by seed, Table 1's before the rest."""
    within("seeds", seeds, 1, MOST_SEEDS)
    scale = SCALES[choose("scale", scale_name, SCALES)]
    for protocol in protocols:
        choose("protocol", protocol, PROTOCOLS)
    by_protocol = {protocol: places_of(scale, protocol, parts) for protocol in protocols}
    cells = []
    for part in next(iter(by_protocol.values()), {}):
        places: list[tuple[Protocol, str, str]] = [
            (protocol, task, label)
            for protocol in protocols
            for wanted in (DISTANCE, COUNT)
            for task, label in by_protocol[protocol][part]
            if task == wanted
        ]
        places.sort(key=lambda place: place[2] not in ("rope", "mla", "nope"))
        measures = [measures_of(scale, protocol, parts, (task, label)) for protocol, task, label in places]
        cells += [
            cell(scale, *place, scale.first_seed + number, measured)
            for number in range(seeds)
            for place, measured in zip(places, measures, strict=True)
            if number < scale.seeds_at(place, seeds)
        ]
    return cells


@dataclass(frozen=True)
class Plan(Record):
    """The options of a study, as in study.json; earlier versions had no parts."""

    LATER = ("parts",)

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
class Reproduction(Gathered):
    """The state of a reproduction."""

    NAME, COMMAND, REQUEST = "reproduce", "reproduce", Plan
    PAGE = "toeplens.papers.deposit.page:reproduction_page"

    plan: Plan
    table: list[Row]

    @classmethod
    def planned(cls, request: Plan) -> Plan:
        choose("scale", request.scale, SCALES)
        return replace(request, parts=chosen_parts(request.parts))

    @classmethod
    def cells(cls, plan: Plan) -> list[Cell]:
        return plan.cells()

    @classmethod
    def judged(cls, plan: Plan, **gathered: Any) -> Self:
        results = gathered["results"]
        entries = judge(claims_of(plan.parts), results, plan.protocols)
        return cls(**gathered, plan=plan, entries=entries, table=accuracy_table(results, plan.protocols))

    def asked(self) -> dict[str, Any]:
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
    limits: ExecutionOptions | None = None,
    workers: Workers = None,
    on_event: OnEvent | None = None,
) -> Reproduction:
    """Run the papers' central experiment in ``out``, or resume it; returns the results so far.

    Arguments
        scale      ``smoke``, ``laptop``, ``desk`` or ``paper``
        protocols  ``paper``, ``released``, or both
        seeds      seeds per cell
        parts      parts of the study, see `PARTS`
        limits     device, deadline, compilation
        workers    number of processes (default: one per core), or a `toeplens.engine.ClusterOptions`
        on_event   called at every step and finished run, with the run's index in `Plan.jobs`

    Protocols, seeds and parts of an existing study in ``out`` are kept.
    """
    choose("scale", scale, SCALES)
    plan = planned(out, scale, protocols, seeds, parts)
    jobs, out = plan.jobs(), Path(out)
    limits = of_runs(limits, out, jobs, workers)
    with Reproduction.opened(out, asdict(plan)) as gathered:
        run_jobs(jobs, out / RUNS, limits, workers=workers, on_event=on_event)
    return gathered[0]


def planned(out: Path | str, scale: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str]) -> Plan:
    """The plan that `reproduce` would run in ``out``: the given options merged with those of an existing study.

    Raises `InputError` if there is nothing to train.
    """
    within("seeds", seeds, 1, MOST_SEEDS)
    plan = Plan(scale=scale, protocols=tuple(protocols), seeds=seeds, parts=chosen_parts(parts))
    if Reproduction.holds(out):
        had = Reproduction.plan_of(out)[0]
        both = tuple(each for each in PROTOCOLS if each in (*had.protocols, *protocols))
        more = chosen_parts((*had.parts, *plan.parts))
        plan = replace(plan, protocols=both, seeds=max(seeds, had.seeds), parts=more)
    if not any(any(places_of(SCALES[scale], each, plan.parts).values()) for each in plan.protocols):
        raise InputError(
            f"part: {' and '.join(plan.parts)} has no models at scale {scale} under the "
            f"{' and '.join(plan.protocols)} protocol. See 'toeplens reproduce --help' for the parts."
        )
    return plan
