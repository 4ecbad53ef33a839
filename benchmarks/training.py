"""Training speed, in thousand tokens per second: eager and compiled, fused and explicit, by scale and encoding.

    python benchmarks/training.py [--scale laptop|paper] [--threads 2] [--rounds 5]

All variants are timed in turn, round by round, in one process, so their ratios are reliable on a noisy machine. The
median over the rounds is printed, and its ratio to eager fused.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from toeplens.model import Decoder
from toeplens.training import RunSpec, run_spec
from toeplens.training.presets import DISTANCE, starting_spec


def step_of(spec: RunSpec, *, compiled: bool, fused: bool, batch: int) -> Callable[[], None]:
    """One training step of the spec's model on random tokens."""
    torch.manual_seed(0)
    model = Decoder(spec.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, fused=True)
    length = spec.task_options["length"]
    tokens = torch.randint(1, spec.model.vocab_size, (batch, length))
    labels = torch.randint(1, spec.model.num_classes, (batch,))

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens, fused=fused), labels)

    run = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step() -> None:
        optimizer.zero_grad()
        run(tokens, labels).backward()
        optimizer.step()

    return step


def main() -> None:
    """Time every variant and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="laptop")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=0, help="sequences per step (default: that of the scale)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table("encoding", "variant", "k tokens/s", "ratio", title=f"{args.scale} scale, {args.threads} threads")
    for encoding in ("nope", "rope", "alibi", "mla"):
        spec = run_spec(**starting_spec(args.scale, "paper", DISTANCE, encoding, 0))
        batch = args.batch or spec.batch_size
        variants = {
            "eager, fused": step_of(spec, compiled=False, fused=True, batch=batch),
            "eager, explicit": step_of(spec, compiled=False, fused=False, batch=batch),
            "compiled, fused": step_of(spec, compiled=True, fused=True, batch=batch),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for step in variants.values():
            step()
        for _ in range(args.rounds):
            for name, step in variants.items():
                begun = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - begun)
        speed = {
            name: batch * spec.task_options["length"] / statistics.median(times) / 1e3
            for name, times in seconds.items()
        }
        for name, value in speed.items():
            table.add_row(encoding, name, f"{value:.1f}", f"{value / speed['eager, fused']:.2f}")
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
