"""How cost grows: cells with workers, tokens a second with length, audits with tokens; and a cluster, simulated.

    python benchmarks/scaling.py [--seconds 20] [--simulate-only]

What is measured: the time of one small cell, of a store's requests (on this machine's disk and on a local S3 server, if
moto is installed), and of what a driver does for each cell. The simulation takes these as they are and asks for the time
of 1,000 cells on 4 to 64 GPUs: a cell is given out when a place is free, takes its time, and keeps its lease and its
likeness in the store meanwhile; the driver does one thing at a time.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table

from toeplens.engine.leases import take
from toeplens.engine.store import Store
from toeplens.model import Decoder
from toeplens.model.config import decoder_config

DRIVER = 0.012  # seconds of the driver for a cell: giving it out, asking for it, telling of it (see docs/scale.md)


def simulate(cells: int, places: int, seconds: float, spread: float, driver: float, store: float) -> float:
    """Seconds until all cells are done: each takes its time times 1 to 1 + spread, and the store's requests.

    The driver is one process: it gives out and takes back one cell at a time.
    """
    free = [0.0] * places
    heapq.heapify(free)
    busy = 0.0
    for cell in range(cells):
        begun = max(heapq.heappop(free), busy)
        busy = begun + driver
        length = seconds * (1 + spread * (cell * 0.6180339887 % 1)) + store
        heapq.heappush(free, busy + length)
    return max(free) + driver


@contextmanager
def places() -> Iterator[dict[str, str]]:
    """Stores to measure: a disk, and an S3 server of this machine if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"disk": folder}
        try:
            import boto3
            from moto.server import ThreadedMotoServer
        except ImportError:
            yield found
            return
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="runs")
        yield {**found, "S3 (moto, on this machine)": "s3://runs/study"}
        server.stop()


def requests(url: str, times: int = 20) -> dict[str, float]:
    """Median seconds of a lease taken and given back, of a checkpoint of 10 MB written, and read."""
    store, content = Store(url), os.urandom(10_000_000)

    def lease(number: int) -> None:
        take(store, f"run-{number}").release()

    def write(number: int) -> None:
        store.write(f"run-{number}/checkpoint", content)

    def read(number: int) -> None:
        store.read(f"run-{number}/checkpoint")

    found = {}
    for name, ask in (("lease", lease), ("write 10 MB", write), ("read 10 MB", read)):
        took = []
        for number in range(times):
            begun = time.perf_counter()
            ask(number)
            took.append(time.perf_counter() - begun)
        found[name] = statistics.median(took)
    return found


def by_length(seconds: float) -> list[tuple[int, float]]:
    """Thousand tokens a second of a training step, by the length of texts; 8,192 tokens a step."""
    found = []
    for length in (32, 64, 128, 256, 512, 1024, 2048):
        torch.manual_seed(0)
        model = Decoder(
            decoder_config(
                num_layers=3, num_heads=8, d_model=128, d_ff=256, vocab_size=64, num_classes=24, max_len=length, dropout=0.0
            )
        )
        tokens = torch.randint(1, 64, (8192 // length, length))
        took: list[float] = []
        while len(took) < 3 or sum(took) < seconds:
            begun = time.perf_counter()
            model(tokens).logsumexp(-1).sum().backward()
            took.append(time.perf_counter() - begun)
        found.append((length, 8.192 / statistics.median(took[1:])))
    return found


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each length")
    parser.add_argument("--simulate-only", action="store_true")
    given = parser.parse_args()
    console = Console()
    slowest = 0.05
    if not given.simulate_only:
        table = Table("store", "lease taken and given back", "write 10 MB", "read 10 MB", title="Requests, milliseconds")
        with places() as urls:
            for name, url in urls.items():
                took = requests(url)
                slowest = max(slowest, sum(took.values()))
                table.add_row(name, *(f"{1e3 * each:.1f}" for each in took.values()))
        console.print(table)
        table = Table("tokens in a text", "k tokens/s", title="Training by length: 3 layers of 8 heads of 16")
        for length, speed in by_length(given.seconds):
            table.add_row(f"{length:,}", f"{speed:.1f}")
        console.print(table)
    table = Table("minutes a cell", "GPUs", "cells each", "hours", "of the ideal", title="1,000 cells, simulated")
    for minutes in (1, 8):
        for gpus in (1, 4, 16, 64):
            for each in (1, 4):
                seconds = 60.0 * minutes * each / (1 if each == 1 else 2.0)  # four on a GPU: each takes twice as long
                took = simulate(1000, gpus * each, seconds, 0.2, DRIVER, slowest)
                ideal = 1000 * seconds * 1.1 / (gpus * each)
                table.add_row(str(minutes), str(gpus), str(each), f"{took / 3600:.2f}", f"{ideal / took:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
