"""Attention with each encoding: time relative to no encoding, and how time and memory grow with the length.

python benchmarks/encodings.py [--lengths 1024,2048,4096] [--names rope,alibi] [--heads 4] [--head-dim 32]
                               [--threads 1] [--rounds 3]

A pass is one layer's attention on one sequence, forward only and with gradients. Times are medians, measured in turn
with those of no encoding. Memory is the peak above the inputs, from torch's record of allocations.
"""

from __future__ import annotations

import argparse
import math
import statistics
import timeit
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend


def layer(encoding: PositionalEncoding, length: int) -> Callable[[bool], None]:
    """One attention on random content, as a call; with gradients if asked."""
    torch.manual_seed(0)
    width, heads = encoding.head_dim, encoding.num_heads
    q, k = (torch.randn(1, heads, length, encoding.query_dim, requires_grad=True) for _ in range(2))
    v = torch.randn(1, heads, length, width, requires_grad=True)
    x, positions = torch.randn(1, length, encoding.d_model), encoding.to_positions(torch.arange(length))

    def run(gradients: bool) -> None:
        with torch.set_grad_enabled(gradients):
            out = attend(
                q,
                k,
                v,
                encoding=encoding,
                q_positions=positions,
                k_positions=positions,
                scale=width**-0.5,
                key_features=encoding.key_features(x),
            )
        if gradients:
            out.sum().backward()

    return run


def peak_memory(run: Callable[[bool], None], gradients: bool) -> int:
    """Bytes that live at once, at most, on top of what lived before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(gradients)
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def exponent(lengths: list[int], values: list[float]) -> float:
    """The slope of log value against log length, by least squares."""
    xs, ys = [math.log(n) for n in lengths], [math.log(max(v, 1e-12)) for v in values]
    return statistics.linear_regression(xs, ys).slope


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096")
    parser.add_argument("--names", default="")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = [int(length) for length in args.lengths.split(",")]
    sizes = {
        "d_model": args.heads * args.head_dim,
        "num_heads": args.heads,
        "head_dim": args.head_dim,
        "max_len": max(lengths),
    }
    plain = encodings.build("nope", **sizes)
    longest = lengths[-1]
    title = f"{args.heads} heads of {args.head_dim}, float32, {args.threads} thread(s); ratios at {longest} tokens"
    columns = (
        "encoding",
        "forward",
        "with gradients",
        "time grows as N^",
        "peak MB, forward",
        "with gradients",
        "grows as N^",
    )
    table = Table(*columns, title=title)
    for name in args.names.split(",") if args.names else encodings.names():
        encoding = encodings.build(name, **sizes)
        times: dict[bool, list[float]] = {False: [], True: []}
        ratios: dict[bool, float] = {}
        memory: dict[bool, list[float]] = {False: [], True: []}
        for length in lengths:
            run, nothing = layer(encoding, length), layer(plain, length)
            for gradients in (False, True):
                memory[gradients].append(peak_memory(run, gradients))
                calls = [partial(each, gradients) for each in (run, nothing)]
                pairs = [[timeit.timeit(call, number=1) for call in calls] for _ in range(args.rounds)]
                ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
                times[gradients].append(ours)
                ratios[gradients] = ours / theirs
        table.add_row(
            name,
            f"{ratios[False]:.2f}",
            f"{ratios[True]:.2f}",
            f"{exponent(lengths, times[False]):.2f}",
            f"{memory[False][-1] / 2**20:.1f}",
            f"{memory[True][-1] / 2**20:.1f}",
            f"{exponent(lengths, memory[False]):.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
