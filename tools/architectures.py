"""Build a small model of every type of the installed transformers and audit it.

    python tools/architectures.py                      # all (5 minutes on 2 cores); rewrites the record and the page
    python tools/architectures.py --only llama gemma2  # some types; prints the results and records nothing
    python tools/architectures.py --tables             # rewrites the page's tables from the record

The record is in results/survey, the page is docs/reference/architectures.md. Each type runs in its own process.
tests/architectures lists and builds the types, and tests a sample (all of them with TOEPLENS_ALL_ARCHITECTURES=1).
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

from toeplens.utils import write_json

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "results" / "survey" / "survey.json", ROOT / "docs" / "reference" / "architectures.md"
Row = dict[str, Any]


def rows_with(rows: list[Row], *outcomes: str) -> list[Row]:
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
    result = checked(name)
    return result | {"seconds": round(time.perf_counter() - began, 2)}


def markdown_table(*lines: tuple[str, ...]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], ("---",) * len(lines[0]), *lines[1:]))


def name_list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def summary(rows: list[Row]) -> str:
    """How many types were proved, and how exactly."""
    good = rows_with(rows, "proved")
    known = sum(row["placed"] == row["calls"] for row in good)
    largest = {key: max(row[key] or 0 for row in good) for key in ("weights", "outputs", "whole")}
    return markdown_table(
        ("result", "value"),
        ("proved (types)", str(len(good))),
        ("- with shares for all attention calls", str(known)),
        ("- with shares for some calls", str(sum(0 < row["placed"] < row["calls"] for row in good))),
        ("- without shares", str(sum(not row["placed"] for row in good))),
        ("refused", str(len(rows_with(rows, "refused")))),
        ("no attention", str(len(rows_with(rows, "none")))),
        ("failed to build or run", str(len(rows_with(rows, "failed")))),
        ("largest difference of an attention weight", f"{largest['weights']:.0e}"),
        ("largest difference of an attention output, relative to the layer's largest", f"{largest['outputs']:.0e}"),
        ("largest difference of a whole pass, relative to the largest output", f"{largest['whole']:.0e}"),
    )


def proved(rows: list[Row]) -> str:
    """The proved types, by what ablation effects are measured on."""
    names = {"loss": "loss", "states": "last hidden states", None: "not measured"}
    result = {effect: [row["name"] for row in rows_with(rows, "proved") if row["effect"] == effect] for effect in names}
    lines = [(names[effect], str(len(types)), name_list(types)) for effect, types in result.items()]
    return markdown_table(("ablation effects on", "number", "types"), *lines)


REASONS = {  # what the record says begins with or contains, and what the page says
    " queries for ": "queries or keys are pooled, so their numbers differ",
    "its bias is not a function": "the bias depends on more than the offset (content, absolute positions, boxes)",
    "from different sequences": "cross attention: queries and keys come from different sequences",
    "in an unknown way": "queries or keys depend on position in an unknown way (convolved keys, layouts)",
    "see some of the keys": "the mask is something other than causal, a window or chunks (an indexer chooses keys)",
    "are changed before their product": "a norm with weights follows the rotation",
}


def without_shares(rows: list[Row]) -> str:
    """Why attention calls of proved types have no shares, and of which types."""
    result: dict[str, dict[str, None]] = {}
    for row in rows_with(rows, "proved"):
        for why in row["unplaced"]:
            reason = next(plain for part, plain in REASONS.items() if part in why)
            result.setdefault(reason, {})[row["name"]] = None
    lines = [(reason, name_list(list(result[reason]))) for reason in REASONS.values() if reason in result]
    return markdown_table(("reason", "types"), *lines)


def fill_page(page: str, rows: list[Row]) -> str:
    """The page with its tables filled from the record."""
    tables = {"summary": summary(rows), "without-shares": without_shares(rows), "proved": proved(rows)}
    for name, text in tables.items():
        mark = f"<!-- table: {name} -->\n\n"
        assert mark in page, name
        page = re.sub(re.escape(mark) + r"(\|.*\n)*", lambda _, new=mark + text: new, page)
    return page


def main() -> None:
    """Audit, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="TYPE", help="audit only these model types; print the results and record nothing"
    )
    parser.add_argument("--tables", action="store_true", help="only rewrite the page, from the existing record")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="types audited in parallel (default: one per core)"
    )
    args = parser.parse_args()
    if not args.tables:
        import transformers
        from tests.architectures.models import model_types

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.models.llama.modeling_llama", "toeplens.studies"])
        rows = []
        with ProcessPoolExecutor(args.workers, context, max_tasks_per_child=1) as pool:
            for row in pool.map(row_of, args.only or model_types()):
                print(row["name"], row["outcome"], row["why"] or "")
                rows.append(row)
        if args.only:
            return
        totals = {name: len(rows_with(rows, name)) for name in ("proved", "refused", "none", "failed", "other")}
        about = {"transformers": transformers.__version__, "torch": torch.__version__}
        about["python"] = ".".join(map(str, sys.version_info[:3]))
        write_json(RECORD, {"about": about, "format": 1, "missing": [], "totals": totals, "found": rows}, rows="found")
    PAGE.write_text(
        fill_page(PAGE.read_text(encoding="utf-8"), json.loads(RECORD.read_text())["found"]), encoding="utf-8"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
