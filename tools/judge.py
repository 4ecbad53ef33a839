"""Judge the records again, or the ledger of desk in simulated studies.

    python tools/judge.py                  writes results/*/claims.json by the current rules
    python tools/judge.py --simulate 200   writes results/false-verdicts.json: how often a verdict is wrong

Then run tools/tables.py.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from recorded import RESULTS, record
from simulated import EFFECTS, Shape, simulate

from toeplens.cli.studies import load_study
from toeplens.papers.deposit import claims_of
from toeplens.studies import Results, judge
from toeplens.studies.kit.claims import LedgerEntry
from toeplens.utils import read_json, write_json

D, C, PROTOCOLS = "trigger-distance", "trigger-count", ("paper", "released")
NUM_SEEDS = 10  # models of a cell that the desk record was judged by, but for these (docs/decisions/06)
_FIRST = {(each, C, name): 5 for each in PROTOCOLS for name in ("absolute", "mla", "nope", "rope")} | {
    (each, D, name): 5 for each in PROTOCOLS for name in ("partial-1", "partial-2")
}
# looked at before, as they were made: of five models each, of ten, with Task 2, with RoPE on one and on two heads
_NO_HEADS = _FIRST | {(each, D, name): 0 for each in PROTOCOLS for name in ("partial-1", "partial-2")}
_NO_COUNT = _NO_HEADS | {(each, C, name): 0 for each in PROTOCOLS for name in ("absolute", "mla", "nope", "rope")}
_FIVE = _NO_COUNT | {
    (each, D, name): 5
    for each in PROTOCOLS
    for name in ("absolute", "alibi", "mla", "nope", "relative", "rope", "rope-absolute", "rope-alone")
}
_SECOND = _FIRST | {
    ("paper", D, "mla"): 20,
    ("released", D, "mla"): 20,
    ("released", D, "absolute"): 20,
    ("paper", D, "relative"): 20,
    ("released", D, "partial-1"): 10,
    ("released", D, "partial-2"): 10,
    ("released", C, "rope"): 15,
}
_THIRD = _SECOND | {
    ("paper", D, "mla"): 30,
    ("released", D, "absolute"): 30,
    ("paper", D, "relative"): 30,
    ("paper", D, "rope"): 20,
}
_FOURTH = _THIRD | {("paper", D, "mla"): 50, ("paper", D, "absolute"): 20, ("paper", D, "alibi"): 30}
EARLIER_LOOKS = (_FIVE, _NO_COUNT, _NO_HEADS, _FIRST, _SECOND, _THIRD, _FOURTH)  # its looks before the last


def ledger_at_look(content: Mapping[str, Any], results: Results) -> list[list[LedgerEntry]]:
    """The ledger of desk at each look before the last, by the models that it had then and the rules as they are now."""
    result, cells = [], results.cells
    for look in EARLIER_LOOKS:
        count: Counter[tuple[str, str, str]] = Counter()
        had = []
        for cell in cells:
            cell_key = cell.key.protocol, cell.key.task, cell.key.label
            count[cell_key] += 1
            if count[cell_key] <= look.get(cell_key, NUM_SEEDS):
                had.append(cell)
        if len(had) < len(cells):
            result.append(judge(claims_of(content["parts"]), Results(had), content["protocols"]))
    return result


def simulate_errors(worlds: int) -> dict[str, Any]:
    """What results/false-verdicts.json holds."""
    content, results = record("desk").content, record("desk").results
    entries = judge(claims_of(content["parts"]), results, content["protocols"])
    earlier = ledger_at_look(content, results)
    options: Any = {"worlds": worlds, "earlier": earlier}
    ledgers = [
        {"shape": shape, "effect": effect} | simulate(entries, effect=effect, shape=shape, **options)
        for shape in get_args(Shape)
        for effect in EFFECTS
    ]
    return {"record": "desk", "worlds": worlds, "looks": 1 + len(earlier), "effects": list(EFFECTS), "ledgers": ledgers}


def rejudge_records() -> None:
    """Write each record's claims.json."""
    for path in sorted(RESULTS.glob("*/claims.json")):
        study = load_study(path.parent)
        write_json(path, {**read_json(path), "claims": [entry.to_dict() for entry in study.entries]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, metavar="WORLDS", help="number of simulated studies")
    worlds = parser.parse_args().simulate
    if worlds:
        (RESULTS / "false-verdicts.json").write_text(json.dumps(simulate_errors(worlds), indent=1) + "\n")
    else:
        rejudge_records()
