"""Time and memory of the Toeplitz profile of one head's causal logits, by length, and of the explicit N x N matrix.

python benchmarks/toeplitz.py [--lengths 4096,16384,65536,262144,1048576] [--dense 4096,8192] [--head-dim 64]
                              [--threads 2] [--rounds 3]

Each length and form runs in its own process on float32 queries and keys, computed in float64. Times are minimums over
rounds in seconds (wall clock and processor), with the time of the first call; short calls run more rounds. Memory is
peak resident memory, in total and without libraries. The explicit form averages the diagonals of torch's Q K^T in
float64.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from toeplens.lens import toeplitz_profile

LARGE_LENGTH = 65_536  # tokens from which on the second exponent is fitted
MIN_SECONDS = 3.0  # seconds, at least, that a form is run for, so that short runs are seen at their best, too


@dataclass(frozen=True)
class Run:
    """Seconds by the clock, of the processor, and of the first call; megabytes; the means and the share found."""

    wall: float
    cpu: float
    first: float
    resident: float
    grown: float
    means: Tensor
    share: float


def profile_means(q: Tensor, k: Tensor) -> tuple[Tensor, float]:
    """Diagonal means and share as `toeplitz_profile` finds them."""
    profile = toeplitz_profile(q, k)
    return profile.diagonal_means, float(profile.share)


def dense_means(q: Tensor, k: Tensor) -> tuple[Tensor, float]:
    """The same from all logits at once."""
    logits = (q.double() @ k.double().T).tril()
    sums = torch.stack([logits.diagonal(-offset).sum() for offset in range(len(q))])
    counts = torch.arange(len(q), 0, -1)
    return sums / counts, float((sums**2 / counts).sum() / logits.square().sum())


def resident() -> float:
    """The most megabytes this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(form: Callable[[Tensor, Tensor], tuple[Tensor, float]], length: int, given: argparse.Namespace) -> Run:
    """Run one form at one length; to be called in a fresh process."""
    torch.set_num_threads(given.threads)
    before = resident()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(length, given.head_dim, generator=generator) for _ in range(2))
    walls, cpus = [], []
    means, share = torch.empty(0), math.nan
    while len(walls) < given.rounds or sum(walls) < MIN_SECONDS:
        wall, cpu = time.perf_counter(), time.process_time()
        means, share = form(q, k)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    peak = resident()
    return Run(min(walls), min(cpus), walls[0], peak, peak - before, means, share)


def exponent(lengths: list[int], values: list[float]) -> float:
    """The slope of log value against log length, by least squares."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(v) for v in values]).slope


def main() -> None:
    """Print the table and the exponents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,16384,65536,262144,1048576")
    parser.add_argument("--dense", default="4096,8192", help="lengths for the explicit matrix; memory grows as N^2")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lengths, written = ([int(n) for n in text.split(",") if n] for text in (args.lengths, args.dense))
    fresh = multiprocessing.get_context("spawn")
    runs: dict[tuple[str, int], Run] = {}
    for name, form, sizes in (
        ("profile", profile_means, sorted({*lengths, *written})),
        ("N x N", dense_means, written),
    ):
        for length in sizes:
            with fresh.Pool(1) as pool:
                runs[name, length] = pool.apply(measure, (form, length, args))
    title = f"one causal head of {args.head_dim}, float32 input, {args.threads} thread(s)"
    columns = (
        "form",
        "tokens",
        "seconds",
        "of processor",
        "first call",
        "MB resident",
        "above the start",
        "share x (N + 1) / 2",
    )
    table = Table(*columns, title=title)
    for (name, length), run in runs.items():
        times = (f"{seconds:.3f}" for seconds in (run.wall, run.cpu, run.first))
        memory = (f"{size:.0f}" for size in (run.resident, run.grown))
        table.add_row(name, f"{length:,}", *times, *memory, f"{run.share * (length + 1) / 2:.4f}")
    console = Console(width=120)
    console.print(table)
    for length in written:
        ours, theirs = runs["profile", length], runs["N x N", length]
        away = (ours.means - theirs.means).abs().max() / theirs.means.square().mean().sqrt()
        share = abs(ours.share / theirs.share - 1)
        console.print(
            f"{length:,} tokens, largest difference to N x N: {away:.1e} of the root mean square diagonal mean; "
            f"share {share:.1e} of itself; N x N takes {theirs.wall / ours.wall:.1f} times as long"
        )
    for words, sizes in (
        ("all lengths", lengths),
        (f"{LARGE_LENGTH:,} tokens and more", [n for n in lengths if n >= LARGE_LENGTH]),
    ):
        if len(sizes) > 1:
            wall = exponent(sizes, [runs["profile", n].wall for n in sizes])
            cpu = exponent(sizes, [runs["profile", n].cpu for n in sizes])
            console.print(f"{words}: time grows as N^{wall:.2f} by the clock, N^{cpu:.2f} of the processor")


if __name__ == "__main__":
    main()
