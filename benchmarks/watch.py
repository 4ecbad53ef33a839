"""The cost of probing heads during training: the same run with and without probes.

    python benchmarks/watch.py [--encoding rope] [--protocol released] [--rounds 2] [--pieces 12]

The two runs alternate in one process, so a noisy machine slows both. Each is a complete run at the laptop scale. The
step time includes the evaluation after each epoch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from toeplens.engine.head_watch import HeadWatch
from toeplens.training import Run, RunSpec, run_spec, train
from toeplens.training.loop import Watcher
from toeplens.training.presets import DISTANCE, starting_spec


class After:
    """Says stop after ``units`` steps, batches of evaluation and looks."""

    def __init__(self, units: int) -> None:
        self.left = units

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def in_turn(spec: RunSpec, watchers: list[Watcher | None], pieces: int, out: Path) -> list[Run]:
    """The run of ``spec`` once a watcher, a piece of each in turn until all are complete."""
    runs: list[Run] = []
    while not runs or any(run.status == "stopped" for run in runs):
        runs = [
            train(
                spec,
                out / str(index),
                device="cpu",
                checkpoint_seconds=float("inf"),
                should_stop=After(-(-spec.total_steps // pieces)),
                watcher=watcher,
            )
            for index, watcher in enumerate(watchers)
        ]
    return runs


def main() -> None:
    """Time both, round by round, and print step times, their ratio and the share of the time that went into looks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="laptop")
    parser.add_argument("--encoding", default="rope")
    parser.add_argument("--protocol", default="released")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pieces", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    spec = run_spec(**starting_spec(given.scale, given.protocol, DISTANCE, given.encoding, 0))
    watcher = HeadWatch(spec)
    table = Table("round", "step, ms", "watched, ms", "ratio", "a look, ms", "share of the time")
    measured = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as out:
            plain, watched = in_turn(spec, [None, watcher], given.pieces, Path(out))
            looks = [row["seconds"] for row in watched.watched]
            without, training = plain.result["seconds"], watched.result["seconds"]
        steps, whole = spec.total_steps, training + sum(looks)
        measured.append((without / steps, whole / steps, whole / without, statistics.mean(looks), sum(looks) / whole))
    medians = [statistics.median(column) for column in zip(*measured, strict=True)]
    for name, row in zip((*range(1, given.rounds + 1), "median"), (*measured, medians), strict=True):
        step, with_looks, ratio, look, share = row
        times = (f"{1e3 * step:.1f}", f"{1e3 * with_looks:.1f}", f"{ratio:.3f}", f"{1e3 * look:.0f}")
        table.add_row(str(name), *times, f"{100 * share:.1f} %")
    about = f"{given.scale} scale, {spec.total_steps} steps, {len(watcher.moments(spec.total_steps))} looks"
    Console().print(f"{watcher.name}; {about}, {given.threads} thread(s)")
    Console().print(table)


if __name__ == "__main__":
    main()
