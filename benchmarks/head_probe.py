"""The cost of probing heads during training: the same run with and without probes.

    python benchmarks/head_probe.py [--encoding rope] [--protocol released] [--rounds 2] [--pieces 12]

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

from toeplens.engine.head_probe import HeadProbe
from toeplens.training import Run, RunSpec, run_spec, train
from toeplens.training.loop import TrainingProbe
from toeplens.training.presets import DISTANCE, starting_spec


class StopAfter:
    """Says stop after ``units`` steps, batches of evaluation and probes."""

    def __init__(self, units: int) -> None:
        self.left = units

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def run_interleaved(spec: RunSpec, probes: list[TrainingProbe | None], pieces: int, out: Path) -> list[Run]:
    """The run of ``spec`` once with each probe, a piece of each in turn until all are complete."""
    runs: list[Run] = []
    while not runs or any(run.status == "stopped" for run in runs):
        runs = [
            train(
                spec,
                out / str(index),
                device="cpu",
                checkpoint_seconds=float("inf"),
                should_stop=StopAfter(-(-spec.total_steps // pieces)),
                probe=probe,
            )
            for index, probe in enumerate(probes)
        ]
    return runs


def main() -> None:
    """Time both, round by round, and print step times, their ratio and the share of the time that went into probes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="laptop")
    parser.add_argument("--encoding", default="rope")
    parser.add_argument("--protocol", default="released")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pieces", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = run_spec(**starting_spec(args.scale, args.protocol, DISTANCE, args.encoding, 0))
    probe = HeadProbe(spec)
    table = Table("round", "step, ms", "probed, ms", "ratio", "a probe, ms", "share of the time")
    measured = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as out:
            plain, probed = run_interleaved(spec, [None, probe], args.pieces, Path(out))
            took = [row["seconds"] for row in probed.probe_rows]
            without, training = plain.result["seconds"], probed.result["seconds"]
        steps, whole = spec.total_steps, training + sum(took)
        measured.append((without / steps, whole / steps, whole / without, statistics.mean(took), sum(took) / whole))
    medians = [statistics.median(column) for column in zip(*measured, strict=True)]
    for name, row in zip((*range(1, args.rounds + 1), "median"), (*measured, medians), strict=True):
        step, with_probe, ratio, seconds, share = row
        times = (f"{1e3 * step:.1f}", f"{1e3 * with_probe:.1f}", f"{ratio:.3f}", f"{1e3 * seconds:.0f}")
        table.add_row(str(name), *times, f"{100 * share:.1f} %")
    about = f"{args.scale} scale, {spec.total_steps} steps, {len(probe.probe_steps(spec.total_steps))} probes"
    Console().print(f"{probe.name}; {about}, {args.threads} thread(s)")
    Console().print(table)


if __name__ == "__main__":
    main()
