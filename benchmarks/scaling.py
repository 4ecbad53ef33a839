"""How cost grows: a store's requests, a driver's work for each cell, training by length; and a cluster, simulated.

    python benchmarks/scaling.py [--seconds 3]

Measured: the requests of a store on this machine's disk and on an S3 server of this machine (if moto is installed), and
what a driver needs for a cell that does nothing (if ray is). The simulation takes these as they are, and asks how long
1,000 cells take on 1 to 64 GPUs: the driver gives out one cell at a time, each takes its time (and up to a fifth more)
and the store's requests. Four cells on a GPU are taken to need twice the time of one: an assumption, not a measurement.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from toeplens.engine import Cluster, Limits
from toeplens.engine.cluster import in_cluster
from toeplens.engine.leases import take
from toeplens.engine.store import Store
from toeplens.model import Decoder
from toeplens.model.config import decoder_config

UNKNOWN = 0.05  # seconds for what could not be measured


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
                num_layers=3,
                num_heads=8,
                d_model=128,
                d_ff=256,
                vocab_size=64,
                num_classes=24,
                max_len=length,
                dropout=0.0,
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


def nothing(piece: int, limits: Limits, tell: Callable[[Any], None]) -> int:
    """A cell that does nothing."""
    return piece


def driver_seconds(cells: int = 300) -> float | None:
    """What a cell costs that does nothing, on a cluster of this machine: an upper bound of the driver's own work."""
    try:
        import ray
    except ImportError:
        return None
    done: list[int] = []
    for count in (20, cells):  # the first start the workers
        begun = time.perf_counter()
        in_cluster(nothing, range(count), Limits(), Cluster(), on_done=lambda index, _: done.append(index))
    ray.shutdown()
    return (time.perf_counter() - begun) / cells


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each length")
    given = parser.parse_args()
    console = Console()
    slowest = 0.0
    table = Table("store", "lease taken and given back", "write 10 MB", "read 10 MB", title="Milliseconds")
    with places() as urls:
        for name, url in urls.items():
            took = requests(url)
            slowest = max(slowest, sum(took.values()))
            table.add_row(name, *(f"{1e3 * each:.1f}" for each in took.values()))
    console.print(table)
    driver = driver_seconds()
    console.print(f"a cell that does nothing: {'not measured' if driver is None else f'{1e3 * driver:.1f} ms'}")
    table = Table("tokens in a text", "k tokens/s", title="Training by length: 3 layers of 8 heads of 16")
    for length, speed in by_length(given.seconds):
        table.add_row(f"{length:,}", f"{speed:.1f}")
    console.print(table)
    table = Table("minutes a cell", "GPUs", "cells each", "hours", "of the ideal", title="1,000 cells, simulated")
    for minutes in (1, 8):
        for gpus in (1, 4, 16, 64):
            for each in (1, 4):
                seconds = 60.0 * minutes * (1 if each == 1 else 2)
                took = simulate(1000, gpus * each, seconds, 0.2, driver or UNKNOWN, slowest)
                ideal = 1000 * seconds * 1.1 / (gpus * each)
                table.add_row(str(minutes), str(gpus), str(each), f"{took / 3600:.2f}", f"{ideal / took:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
