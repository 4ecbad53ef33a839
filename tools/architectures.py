"""Build every model type of the installed transformers small and audit it: results/survey, docs/reference/architectures.md.

    python tools/architectures.py                      # all (5 minutes on 2 cores); rewrites the record and the page
    python tools/architectures.py --only llama gemma2  # some; prints what became of them
    python tools/architectures.py --tables             # rewrites the page's tables from the record

Each type has a process of its own. Which types there are, how they are built and what is checked is in
tests/architectures, whose tests go through a sample of them (all with TOEPLENS_ALL_ARCHITECTURES=1).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from toeplens.ground import write_json

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "results" / "survey" / "survey.json", ROOT / "docs" / "reference" / "architectures.md"
Row = dict[str, Any]


def of(rows: list[Row], *outcomes: str) -> list[Row]:
    """Rows with one of these outcomes."""
    return [row for row in rows if row["outcome"] in outcomes]


def row_of(name: str) -> Row:
    """A type's row, made in a process of its own: one thread, no network, nothing on the terminal."""
    import transformers
    from huggingface_hub import constants
    from tests.architectures.check import checked

    torch.set_num_threads(1)
    constants.HF_HUB_OFFLINE = True
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)  # some print
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    began = time.perf_counter()
    found = checked(name)
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def count_of(count: int | None, calls: int) -> str:
    return "–" if count is None else "all" if count == calls else f"{count} of {calls}"


def text_of(text: str) -> str:
    return text.replace("|", "/").replace("_", "\\_")


def table(*lines: tuple[str, ...]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], ("---",) * len(lines[0]), *lines[1:]))


def proved(rows: list[Row]) -> str:
    """What was found of proved types."""
    heading = ("type", "class", "calls", "shares known", "effects", "returned", "weights", "outputs", "whole pass")
    lines: list[tuple[str, ...]] = [heading]
    for row in of(rows, "proved"):
        numbers = ("–" if row[key] is None else f"{row[key]:.0e}" for key in ("weights", "outputs", "whole"))
        shares, returned = (count_of(row[key], row["calls"]) for key in ("placed", "returned"))
        calls, effect = str(row["calls"]), row["effect"] or "–"
        lines.append((f"`{row['name']}`", row["model"], calls, shares, effect, returned, *numbers))
    return table(*lines)


def without_shares(rows: list[Row]) -> str:
    """Why calls of proved types have no shares, and which calls of which types."""
    found: dict[str, list[str]] = {}
    for row in of(rows, "proved"):
        for why, calls in row["unplaced"].items():
            each = (f"{where} {', '.join(str(layer + 1) for layer in layers)}" for where, layers in calls.items())
            found.setdefault(why, []).append(f"`{row['name']}` ({'; '.join(each)})")
    lines = [(text_of(why.rstrip(".")), ", ".join(types)) for why, types in sorted(found.items())]
    return table(("why", "types (their calls, counted from 1)"), *lines)


def filled(page: str, rows: list[Row]) -> str:
    """The page with the record's tables after their marks."""
    tables = {"proved": proved(rows), "without-shares": without_shares(rows)}
    for outcome in ("refused", "none"):
        lines = [(f"`{row['name']}`", row["model"], text_of(row["why"])) for row in of(rows, outcome)]
        tables[outcome] = table(("type", "class", "why"), *lines)
    for name, text in tables.items():
        mark = f"<!-- table: {name} -->\n\n"
        assert mark in page, name
        page = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + text: new, page)
    return page


def main() -> None:
    """Audit, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, which are printed and not recorded")
    parser.add_argument("--tables", action="store_true", help="only rewrite the page, from the record as it is")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="types at a time (default: one per core)")
    given = parser.parse_args()
    if not given.tables:
        import transformers
        from tests.architectures.models import model_types

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "toeplens.studies"])
        rows = []
        with ProcessPoolExecutor(given.workers, context, max_tasks_per_child=1) as pool:
            for row in pool.map(row_of, given.only or model_types()):
                print(row["name"], row["outcome"], row["why"] or "")
                rows.append(row)
        if given.only:
            return
        totals = {name: len(of(rows, name)) for name in ("proved", "refused", "none", "failed", "other")}
        about = {"transformers": transformers.__version__, "torch": torch.__version__}
        about["python"] = ".".join(map(str, sys.version_info[:3]))
        write_json(RECORD, {"about": about, "format": 1, "missing": [], "totals": totals, "found": rows}, rows="found")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), json.loads(RECORD.read_text())["found"]), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
