"""docs/mechanism.md: the table of switches, and what is said beside it, are the laptop record's."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit.factors import FactorMeasure, decided, factor_table, factor_wholes, left_over
from toeplens.studies.kit.results import CellResult, Results, estimated
from toeplens.training.presets import DISTANCE

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "mechanism.md").read_text()
BASES = ("nope", "relative", "rope", "mla")
SWITCHES = {
    "data": "texts",
    "encoding": "encoding",
    "input": "nothing added at the input",
    "mask": "causal mask",
    "padding": "padding hidden",
    "keys": "keys and values from the layer",
    "readout": "last token read",
    "norm": "final norm",
    "activation": "ReLU",
}
BOTH: tuple[Protocol, ...] = ("paper", "released")


@pytest.fixture(scope="module")
def results() -> Results:
    about = json.loads(lzma.decompress((ROOT / "results" / "laptop" / "results.json.xz").read_bytes()))
    return Results(CellResult.from_dict(cell) for cell in about["cells"])


def told(estimate: Estimate | None) -> str:
    if estimate is None:
        return "no difference"
    words = f"{100 * estimate.value:+.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    return f"**{words}**" if decided(estimate) else words


def effect(results: Results, base: str, switch: str, measure: FactorMeasure) -> Estimate | None:
    (row,) = (
        row
        for row in factor_table(results, BOTH)
        if (row.task, row.end, row.base, row.switch) == (DISTANCE, "released", base, switch)
    )
    return row.effect(measure)


def test_the_table_is_the_record_s(results: Results) -> None:
    rows = [row for row in factor_table(results, BOTH) if (row.task, row.end) == (DISTANCE, "released")]
    wholes = {whole.base: whole for whole in factor_wholes(results, BOTH) if whole.task == DISTANCE}
    lines = [
        [
            told(next((row.effect("skill") for row in rows if (row.base, row.switch) == (base, switch)), None))
            for base in BASES
        ]
        for switch in SWITCHES
    ]
    lines.append([told(estimated(wholes[base].difference("skill"))) for base in BASES])
    own = {base: [row for row in rows if row.base == base] for base in BASES}
    lines.append([told(estimated(left_over(wholes[base], own[base], "skill")[1])) for base in BASES])
    titles = (*SWITCHES.values(), "all together", "left over: what switches do together")
    for title, line in zip(titles, lines, strict=True):
        assert f"| {title} | {' | '.join(line)} |" in TEXT


def test_what_texts_cost_in_accuracy(results: Results) -> None:
    """ "In accuracy the texts cost NoPE 25 points and relative 21"."""
    costs = [effect(results, base, "data", "accuracy") for base in ("nope", "relative")]
    assert [round(-100 * cost.value) for cost in costs if cost] == [25, 21]


def test_models_that_were_still_learning(results: Results) -> None:
    """ "none of five had with NoPE and with the relative bias, four with RoPE and three with MLA; with one .."."""

    def settled(protocol: Protocol, label: str) -> int:
        cells = results.under(protocol).of(DISTANCE, label)
        assert len(cells) in (0, 5)
        return sum(cell.settled for cell in cells)

    assert [settled("paper", base) for base in BASES] == [0, 0, 4, 3]
    few = {"relative": {"data", "mask", "keys"}, "mla": {"data", "mask", "readout"}}
    for base in BASES:
        assert settled("released", base) >= 4
        for switch in SWITCHES:
            if results.under("released").of(DISTANCE, f"{base}/{switch}"):
                assert settled("released", f"{base}/{switch}") in ((2, 3) if switch in few.get(base, ()) else (4, 5))
    accuracies = [cell.accuracy for cell in results.under("released").of(DISTANCE, "mla/data")]
    assert (round(100 * min(accuracies)), round(100 * max(accuracies))) == (5, 92)
    unsettled = sum(not cell.settled for cell in results.cells)
    said = f"{unsettled} of its {len(results.cells)} places hold models that do not count for final accuracies"
    assert said in (ROOT / "results" / "README.md").read_text()
