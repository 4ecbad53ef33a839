"""Kill a study at random times and resume it: is any work lost, repeated or different?

    python benchmarks/endurance.py --kills 200 [--seed 0] [--reach 12] [--out DIR] [--record results/endurance]

Each session is a process with two workers. It is killed with SIGKILL after 0 to --reach seconds: the whole process
group (like a power cut), only the process (its workers must notice), or one worker. A study that finishes before all
kills are done gets another seed. Finally, it is resumed until complete and compared, file by file, with the same study
run without kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from toeplens.engine import ExecutionOptions
from toeplens.studies import grid
from toeplens.training import environment
from toeplens.utils import write_json

MEASURES = ("behaviour", "extrapolation")
RECORDS = ("model.safetensors", "result.json", "ablation.json", *(f"{name}.json" for name in MEASURES))
TIMES = {"seconds", "tokens_per_second"}
SESSION = (
    "import sys; sys.path.insert(0, sys.argv[1]); import endurance; endurance.session(sys.argv[2], int(sys.argv[3]))"
)


def spec(seeds: int) -> grid.GridSpec:
    """A study of cells that take a second or two, most of them spent in training with dropout."""
    model = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout": 0.1}
    sizes = {"lr": 0.003, "batch_size": 64, "train_examples": 2048, "test_examples": 256, "epochs": 3}
    return grid.grid_spec(
        {
            "title": "Endurance",
            "seeds": seeds,
            "examples": 64,
            "measures": list(MEASURES),
            "model": model,
            "training": sizes,
            "tasks": {
                "index": {"options": {"length": 10, "words": 8, "from_end": True}},
                "retrieval": {"options": {"length": 10, "keys": 4, "values": 4, "pairs": 3, "distractors": 4}},
            },
            "encodings": {"nope": {}, "alibi": {}, "rope": {}},
        }
    )


def session(out: str, seeds: int) -> None:
    """Carry the study out, or go on with it; checkpoints are written often, so that most kills find one under way."""
    grid.run_study(
        spec(seeds), out, execution=ExecutionOptions(device="cpu", compile="off", checkpoint_seconds=0.05), workers=2
    )


Stamp = tuple[int, int]


class FileTracker:
    """What of a study was seen finished, and each file's identity then: a file that is written again has another."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.seen: dict[str, dict[str, Stamp]] = {}
        self.cut: set[str] = set()

    def scan(self) -> None:
        for run in self.runs.iterdir() if self.runs.exists() else ():
            stamps = {name: _stamp(run / name) for name in RECORDS if (run / name).exists()}
            if "result.json" not in stamps:
                self.cut.add(run.name)
                continue
            if len(stamps) < len(RECORDS):
                self.cut.add(run.name)
            self.seen[run.name] = stamps | self.seen.get(run.name, {})

    def lost_cells(self) -> list[str]:
        return [name for name, had in self.seen.items() if any(not (self.runs / name / each).exists() for each in had)]

    def repeated_cells(self) -> list[str]:
        return [
            name
            for name, had in self.seen.items()
            if any(_stamp(self.runs / name / each) != stamp for each, stamp in had.items())
        ]


def _stamp(path: Path) -> Stamp:
    try:
        result = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return result.st_ino, result.st_mtime_ns


def run_endurance(out: Path, kills: int, seed: int, reach: float, say: Any) -> dict[str, Any]:
    """Kill, go on, complete, compare. ``lost``, ``twice`` and ``different`` count cells; all three should be 0.

    kills      sessions that were killed, of ``sessions``; ``by`` what was killed how often
    cells      of the study in the end; ``cut`` how many of them were killed at work at least once
    lost       finished, and later missing, unfinished or unreadable
    twice      whose weights, result, ablation or measures were written again after they were finished
    different  whose files differ from those of a study that was never killed (times left out)
    """
    rng, began = random.Random(seed), time.monotonic()
    by = dict.fromkeys(("group", "parent", "worker"), 0)
    killed, alone = out / "killed", out / "alone"
    tracker = FileTracker(killed / "runs")
    seeds = sessions = 0
    finished = True
    while sum(by.values()) < kills:
        seeds += finished
        sessions += 1
        kind, moment = rng.choice(list(by)), rng.uniform(0, reach)
        finished, hit = _killed_session(killed, seeds, kind, moment)
        by[kind] += hit
        tracker.scan()
        say(f"{sum(by.values())} of {kills} kills, {len(tracker.seen)} cells trained, {seeds} seeds")
    for directory in (killed, alone):
        subprocess.run(_command(directory, seeds), check=True, env=_environment())
    tracker.scan()
    different = [
        run.name for run in (alone / "runs").iterdir() if _content(run) != _content(killed / "runs" / run.name)
    ]
    return {
        "kills": sum(by.values()),
        "sessions": sessions,
        "by": by,
        "cells": len(list((alone / "runs").iterdir())),
        "cut": len(tracker.cut),
        "lost": len(tracker.lost_cells()),
        "twice": len(tracker.repeated_cells()),
        "different": len(different),
        "seconds": round(time.monotonic() - began, 1),
    }


def _command(directory: Path, seeds: int) -> list[str]:
    return [sys.executable, "-c", SESSION, str(Path(__file__).parent), str(directory), str(seeds)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _killed_session(directory: Path, seeds: int, what: str, moment: float) -> tuple[bool, bool]:
    """Whether the study was finished before the moment, and whether a kill hit something."""
    nothing = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(_command(directory, seeds), start_new_session=True, env=_environment(), **nothing) as parent:
        try:
            return parent.wait(moment) == 0, False
        except subprocess.TimeoutExpired:
            pass
        victims = _workers(parent.pid) if what == "worker" else [parent.pid]
        if what == "group" or not victims:
            os.killpg(parent.pid, signal.SIGKILL)
        else:
            os.kill(random.Random(moment).choice(victims), signal.SIGKILL)
        code = parent.wait(60)
    if what == "worker" and victims and code == 0:  # it had no work any more
        return True, True
    return False, True


def _workers(parent: int) -> list[int]:
    """The study's worker processes."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            of = int(stat.read_text().rpartition(")")[2].split()[1])
            if of == parent and b"spawn_main" in (stat.parent / "cmdline").read_bytes():
                result.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return result


def _content(run: Path) -> dict[str, Any]:
    """A run's files as far as they do not tell the time."""
    result: dict[str, Any] = {}
    for name in RECORDS:
        content = (run / name).read_bytes() if (run / name).exists() else b""
        result[name] = content
        if name == "result.json":
            result[name] = {key: value for key, value in json.loads(content or b"{}").items() if key not in TIMES}
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if (run / "metrics.jsonl").exists() else []
    rows = [json.loads(line) for line in lines]
    result["metrics"] = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
    return result


def main() -> None:
    """Print what came out; exit code 1 if a cell was lost, done twice, or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reach", type=float, default=12.0)
    parser.add_argument("--out", type=Path, help="output directory, kept (default: a temporary directory)")
    parser.add_argument("--record", type=Path, help="directory for endurance.json")
    args = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary, console.status("killing") as status:
        result = run_endurance(args.out or Path(temporary), args.kills, args.seed, args.reach, status.update)
    table = Table(title="A study killed at random moments and gone on with")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)
    if args.record is not None:
        args.record.mkdir(parents=True, exist_ok=True)
        write_json(args.record / "endurance.json", {**result, "environment": environment()})
    sys.exit(1 if result["lost"] or result["twice"] or result["different"] else 0)


if __name__ == "__main__":
    main()
