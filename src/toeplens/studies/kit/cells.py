"""The cells of a study's grid: their runs, their results, and the hardware they ran on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from toeplens.engine import Asked, Job, Watched, read_ablation, read_measures
from toeplens.ground import read_json, rounded
from toeplens.model import Decoder
from toeplens.studies.kit.results import FRAMES, CellResult, Key, Results
from toeplens.studies.kit.study import RUNS, Kept, State
from toeplens.training import Run, Segment
from toeplens.training.run import ENVIRONMENT, WATCHED


@dataclass(frozen=True)
class Cell:
    """One run of a study's grid, and its place."""

    key: Key
    job: Job


def jobs_of(cells: Sequence[Cell]) -> list[Job]:
    """The grid's runs without duplicates; cells with the same run are merged, with the measures of all."""
    jobs: dict[str, Job] = {}
    for cell in cells:
        job = cell.job
        had = jobs.get(job.spec.name, job)
        measures = tuple(dict.fromkeys((*had.measures, *job.measures)))
        jobs[job.spec.name] = replace(had, measures=measures, watch=had.watch or job.watch)
    return list(jobs.values())


@dataclass(frozen=True, kw_only=True)
class Gathered(State):
    """The state of a grid."""

    results: Results  # cells that are trained and ablated, or have diverged; finished cells also have all measures
    share: float  # of the maximum number of training steps, done; a run that ended early counts as complete

    @classmethod
    def cells(cls, plan: Any) -> list[Cell]:
        """The grid of a plan."""
        raise NotImplementedError

    @classmethod
    def judged(cls, plan: Any, **gathered: Any) -> Self:
        """The state with the verdicts on its claims, from the fields of `Gathered`."""
        raise NotImplementedError

    @classmethod
    def read(cls, directory: Path, plan: Any, environment: dict[str, Any]) -> Self:
        return cls.judged(plan, **gather_cells(directory, cls.cells(plan), environment))

    @classmethod
    def reread(cls, kept: Kept, plan: Any) -> Self:
        results = Results(CellResult.from_list(kept.content.get("cells"), f"{kept.path}: cells"))
        share = kept.head["finished"] / max(1, kept.head["total"])  # the record does not know unfinished runs
        return cls.judged(plan, **kept.head, results=results, share=share)

    @property
    def begun(self) -> bool:
        return len(self.results.cells) > 0

    @property
    def progress(self) -> str:
        done = f"{self.finished} of {self.total} cells finished"
        return f"{done} ({100 * self.share:.3g}% of the maximum number of steps)"

    @property
    def trained_seconds(self) -> float:
        """Total training time of its models in seconds."""
        return sum(float(cell.result.get("seconds") or 0.0) for cell in self.models.values())

    @property
    def models(self) -> dict[str, CellResult]:
        """Its models by run, without duplicates."""
        return {cell.run: cell for cell in self.results.cells}

    def summary(self) -> dict[str, Any]:
        """The share of the training steps that is done, and the tables."""
        return {"share": self.share, **self.tables()}

    def tables(self) -> dict[str, Any]:
        """The tables, as in results.json."""
        raise NotImplementedError

    def frames(self) -> dict[str, Callable[[], pa.Table]]:
        return {rows: partial(self.results.frame, rows) for rows in FRAMES} | super().frames()

    def found(self) -> dict[str, Any]:
        return {**self.tables(), "cells": [cell.to_dict() for cell in self.results.cells]}


def gather_cells(directory: Path, cells: Sequence[Cell], environment: dict[str, Any]) -> dict[str, Any]:
    """The finished cells of a grid in a study's directory, as the fields of `Gathered`.

    Adds the ``execution`` of the last run and the result of `carried_out` to the environment.
    """
    found: list[CellResult] = []
    runs: dict[str, Any] = {}
    histories: list[list[Segment]] = []
    done = finished = 0
    for cell in cells:
        run_directory = directory / RUNS / cell.job.spec.name
        if not (run_directory / "spec.json").exists():
            continue
        run = Run.open(run_directory)
        done += run.step if run.status == "stopped" else cell.job.spec.total_steps
        result = _result(cell, run)
        if result is not None:
            finished += run.status == "diverged" or len(result.measures) == len(cell.job.measures)
            histories.append(run.history)
            if (path := run_directory / ENVIRONMENT).exists():
                runs["execution"] = read_json(path).get("execution")
            found.append(result)
    return {
        "directory": directory,
        "finished": finished,
        "total": len(cells),
        "environment": {**environment, **runs, **carried_out(histories, environment)},
        "results": Results(found),
        "share": done / max(1, sum(cell.job.spec.total_steps for cell in cells)),
    }


def _result(cell: Cell, run: Run) -> CellResult | None:
    """The result of a run that has diverged, or is complete and ablated."""
    spec, asked, watched = cell.job.spec, Asked(cell.job.examples, cell.job.split), run.watched
    ablation, by_loss = (read_ablation(run.directory, asked, metric) for metric in ("accuracy", "loss"))
    if run.status != "diverged" and (run.status != "complete" or ablation is None):
        return None
    guesses = (run.result["chance"], run.result["guess"]) if "chance" in run.result else (spec.chance, spec.guess)
    Watched.from_list(watched, run.directory / WATCHED)  # raises if it is damaged
    return CellResult(
        key=cell.key,
        run=spec.name,
        status="diverged" if run.status == "diverged" else "complete",
        chance=guesses[0],
        length_chance=guesses[1],
        parameters=sum(parameter.numel() for parameter in Decoder(spec.model).parameters()),
        epochs=run.metrics,
        result=run.result,
        ablation=ablation,
        measures=rounded(read_measures(run.directory, cell.job.measures, asked)),
        watched=rounded(watched),
        by_loss=by_loss,
    )


def carried_out(histories: Iterable[Sequence[Segment]], here: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from the histories of a study's runs; empty without histories, as in earlier versions.

    Returns ``threads`` of the training processes (None if they differ) and, if the runs used several set-ups or one
    that differs from the study's last environment (``here``), a sentence ``setups`` that names them.
    """
    known = [list(dict.fromkeys(segment.setup for segment in history)) for history in histories if history]
    if not known:
        return {}
    counted = Counter(str(setup) for setups in known for setup in setups)
    threads = {setup.threads for setups in known for setup in setups}
    found: dict[str, Any] = {"threads": threads.pop() if len(threads) == 1 else None}
    only = known[0][0]
    differs = any(here.get(name) != getattr(only, name) for name in ("processor", "torch"))
    if len(counted) == 1 and (differs or only.gpu not in (None, here.get("gpu"))):
        found["setups"] = f"The {len(known)} runs were trained on {only}, not on the machine that gathered the study."
    if len(counted) > 1:
        named = "; ".join(f"{words}: {count} run{'s' if count > 1 else ''}" for words, count in counted.most_common())
        moved = sum(len(setups) > 1 for setups in known)
        begun = f" ({moved} of them moved between set-ups)" if moved else ""
        found["setups"] = (
            f"The {len(known)} runs were trained on {len(counted)} set-ups{begun}, so the results may not be "
            f"bit-identical to those of a single one: {named}."
        )
    return found
