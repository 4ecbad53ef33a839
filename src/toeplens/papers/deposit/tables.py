"""The paper's numbers compared with ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from toeplens.ground.records import Record
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import Label, title
from toeplens.studies import Verdict
from toeplens.studies.kit.results import Results
from toeplens.training.presets import COUNT, DISTANCE

# arXiv 2505.13027 v1, Table 1: test accuracy, per cent
PAPER_TABLE_1 = {(DISTANCE, "mla"): 88.34, (DISTANCE, "rope"): 92.64, (DISTANCE, "nope"): 3.51} | {
    (COUNT, "mla"): 97.41,
    (COUNT, "rope"): 69.43,
    (COUNT, "nope"): 77.69,
}


@dataclass(frozen=True)
class Row(Record):
    """One encoding's row: test accuracy (mean and range over seeds), the paper's accuracy, and its heads."""

    protocol: Protocol
    task: str
    label: str
    title: str
    paper: float | None
    accuracy: float | None
    lowest: float | None
    highest: float | None
    seeds: int
    diverged: int
    chance: float
    length_chance: float
    parameters: int
    largest_drop: float | None
    where: str | None
    kinds: list[str]


def accuracy_table(results: Results, protocols: Sequence[Protocol]) -> list[Row]:
    """Every plain encoding's accuracy and deposit, by protocol and task, best first."""
    rows = []
    for protocol in protocols:
        under = results.under(protocol)
        for task in (DISTANCE, COUNT):
            lines = [
                _row(under, protocol, task, label) for label in under.labels(task) if not Label.parse(label).variant
            ]
            rows += sorted(lines, key=lambda row: 1.0 if row.accuracy is None else -row.accuracy)
    return rows


def _row(results: Results, protocol: Protocol, task: str, label: str) -> Row:
    cells = results.of(task, label)
    finished = [cell for cell in cells if cell.status == "complete"]
    accuracy = np.array([cell.accuracy for cell in finished])
    ablated = [cell.ablation for cell in finished if cell.ablation]
    largest = where = None
    if ablated:
        drops = np.mean([ablation.drops.max() for ablation in ablated])
        largest = float(drops)
        places = [np.unravel_index(ablation.drops.argmax(), ablation.drops.shape) for ablation in ablated]
        where = ", ".join(f"layer {layer + 1} head {head + 1}" for layer, head in places[:3]) + (
            " …" if len(places) > 3 else ""
        )
    kinds = [layer.kind for layer in finished[0].deposits()] if finished else []
    return Row(
        protocol=protocol,
        task=task,
        label=label,
        title=title(label),
        paper=PAPER_TABLE_1.get((task, label)),
        accuracy=float(accuracy.mean()) if len(accuracy) else None,
        lowest=float(accuracy.min()) if len(accuracy) else None,
        highest=float(accuracy.max()) if len(accuracy) else None,
        seeds=len(cells),
        diverged=sum(cell.status == "diverged" for cell in cells),
        chance=cells[0].chance,
        length_chance=cells[0].length_chance,
        parameters=cells[0].parameters,
        largest_drop=largest,
        where=where,
        kinds=kinds,
    )


Found = tuple[str, str, Verdict]  # the record's scale, its seeds in words, its verdict


@cache
def recorded() -> dict[tuple[str, str], tuple[Found, ...]]:
    """Verdicts of the published records by claim and protocol, the largest record first."""
    text = resources.files("toeplens.papers.deposit").joinpath("recorded.json").read_text(encoding="utf-8")
    found: dict[tuple[str, str], tuple[Found, ...]] = {}
    for scale, record in json.loads(text).items():
        for claim, protocol, verdict in record["verdicts"]:
            found[claim, protocol] = (*found.get((claim, protocol), ()), (scale, record["seeds"], verdict))
    return found
