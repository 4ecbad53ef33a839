"""Tokens per second of models trained singly and batched: `python benchmarks/batched_training.py [--device cuda]`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toeplens.training import plan_execution, run_spec, starting_spec
from toeplens.training.batched import BatchedSessions
from toeplens.training.loop import Session

_SHAPES = {"laptop": {}, "desk": {}, "paper": {"batch_size": 512}}


def _timed(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Median seconds of a step, after a warm-up."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(5):
        step()
    took: list[float] = []
    begun = now()
    while len(took) < 5 or (now() - begun < seconds and len(took) < 300):
        start = now()
        step()
        took.append(now() - start)
    return statistics.median(took)


def _sessions(shape: str, many: int, device: str, compile: Any, precision: str, out: Path) -> list[Session]:
    sessions = []
    for seed in range(many):
        fields = starting_spec(shape, "paper", "trigger-distance", "rope", seed)
        fields |= _SHAPES[shape] | {"train_examples": 4096, "test_examples": 512, "precision": precision}
        fields["model"] = {**fields["model"], "dropout": 0.0}
        spec = run_spec(**fields)
        execution = plan_execution(device, compile, precision)
        if many > 1:
            execution = replace(execution, compiled=False)
        directory = out / f"{shape}-{many}-{compile}-{precision}-{seed}"
        directory.mkdir()
        sessions.append(Session(spec, directory, execution, None, (), batched=many > 1))
    return sessions


def main() -> None:
    """Print a line a measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["laptop"])
    parser.add_argument("--many", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    device = torch.device(args.device)
    print("shape precision models how ms tokens/s")
    with tempfile.TemporaryDirectory() as out:
        for shape in args.shapes:
            for precision in args.precision:
                ways = ["eager", *(["compiled"] if device.type == "cuda" else [])]
                for many, way in [(1, way) for way in ways] + [(many, "stack") for many in args.many]:
                    try:
                        mode = "on" if way == "compiled" else "off"
                        beside = Path(tempfile.mkdtemp(dir=out))
                        sessions = _sessions(shape, many, args.device, mode, precision, beside)
                        step = sessions[0].take_step if way != "stack" else BatchedSessions(sessions).take_step
                        seconds = _timed(step, device, args.seconds)
                    except RuntimeError as error:
                        print(shape, precision, many, way, "failed:", str(error).splitlines()[0][:200], flush=True)
                        continue
                    spec = sessions[0].spec
                    tokens = many * spec.batch_size * spec.build_task().length
                    print(shape, precision, many, way, f"{seconds * 1e3:.2f} {tokens / seconds:,.0f}", flush=True)


if __name__ == "__main__":
    main()
