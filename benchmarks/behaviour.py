"""Time and memory of the scores of one causal head (`toeplens.lens.behaviour`), by length, and of explicit tables.

python benchmarks/behaviour.py [--lengths 8192,32768,131072] [--written 512,1024] [--head-dim 64] [--threads 2]
                               [--rounds 2]

Float32 queries and keys with a mean, RoPE's frequencies on all dimensions, computed in float64. Times are the minimum
over rounds (wall clock and processor). The explicit form computes each query's table of contents by positions (N^3
logits), so it runs at short lengths, and its time at the longest is extrapolated. Memory is peak resident memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from toeplens.encodings.kit import rotary_frequencies
from toeplens.lens import behaviour

Shares = tuple[float, float, float]


def closed_form_shares(q: Tensor, k: Tensor) -> Shares:
    """The shares in closed form."""
    result = behaviour(q, k, rotation=rotary_frequencies(q.shape[-1], 10_000.0), pairing="interleaved")
    return float(result.positional), float(result.symbolic), float(result.interaction)


def table_shares(q: Tensor, k: Tensor) -> Shares:
    """The same from every query's table."""
    length, frequencies = len(q), rotary_frequencies(q.shape[-1], 10_000.0)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), torch.arange(length).double()[:, None] * frequencies)
    a, b = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    sums = torch.zeros(3, dtype=torch.float64)
    for i in range(1, length):
        keys = b[: i + 1]
        table = torch.einsum("jt,mt->jm", (a[i] * turns[i]) * turns[: i + 1].conj(), keys.conj()).real
        rest = table - table.mean()
        p, s = rest.mean(1), rest.mean(0)
        sums += torch.stack((p.square().mean(), s.square().mean(), (rest - p[:, None] - s).square().mean()))
    positional, symbolic, interaction = (sums / sums.sum()).tolist()
    return positional, symbolic, interaction


def measure(
    form: Callable[[Tensor, Tensor], Shares], length: int, given: argparse.Namespace
) -> tuple[float, float, Shares]:
    """Least seconds by the clock and of the processor, and the shares."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(length, given.head_dim, generator=generator) + 0.3 for _ in range(2))
    walls, cpus = [], []
    shares: Shares = (0.0, 0.0, 0.0)
    for _ in range(given.rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        shares = form(q, k)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus), shares


def lengths(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lengths, default=[8192, 32_768, 131_072])
    parser.add_argument("--written", type=lengths, default=[512, 1024])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    closed_form_shares(*torch.randn(2, 256, args.head_dim))  # what the first call alone pays
    table = Table(title=f"Scores of one head, {args.head_dim} dimensions, {args.threads} threads")
    for column in ("form", "tokens", "seconds", "of the processor", "positional, symbolic, interaction"):
        table.add_column(column)
    for name, form, sizes in (
        ("closed", closed_form_shares, args.lengths),
        ("written out", table_shares, args.written),
    ):
        for length in sizes:
            wall, cpu, shares = measure(form, length, args)
            table.add_row(name, f"{length:,}", f"{wall:.2f}", f"{cpu:.2f}", ", ".join(f"{x:.6f}" for x in shares))
    worst = 0.0
    for length in args.written:
        pairs = zip(measure(closed_form_shares, length, args)[2], measure(table_shares, length, args)[2], strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    console = Console()
    console.print(table)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"largest difference of the two forms {worst:.1e}; most memory {resident:,.0f} MB", highlight=False)


if __name__ == "__main__":
    main()
