"""How time grows with cells, workers and length, and a simulation of a cluster.

    python benchmarks/scaling.py [--scale smoke] [--cells 8] [--seconds 1] [--minutes 1 8] [--record PATH]

Measured: requests to the local disk and to a local S3 server (if moto is installed); the driver's time for an empty
cell (if ray is installed); cells with one worker, two workers, and two workers through Ray; a training step by sequence
length; an audit by number of tokens.

The simulation uses these times to estimate how long 1,000 cells take on 4 to 64 nodes, one cell per node at a time.
``--minutes`` does the same for assumed times: this many minutes on a GPU and up to a fifth more; four cells at once on
a GPU take twice as long as one. Neither is a measurement.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import math
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaModel

from toeplens.engine import ClusterOptions, Event, ExecutionOptions, Job, run_jobs, run_parallel
from toeplens.engine.remote import Remote
from toeplens.model import Decoder
from toeplens.model.config import decoder_config
from toeplens.studies import audit
from toeplens.training import environment, run_spec
from toeplens.training.presets import DISTANCE, PRESETS, starting_spec
from toeplens.utils import InputError, write_json
from toeplens.utils.options import check_range

THROUGH_RAY = "2 through Ray"
UNKNOWN = 0.05  # seconds of a driver that could not be measured
NUM_CELLS = 1000  # cells
NODES = (4, 8, 16, 32, 64)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
PUBLISHED = 30.0  # seconds after which a checkpoint is published


def simulate(times: Sequence[float], cells: int, places: int, driver: float) -> float:
    """Seconds until all cells are done; they take these times, one after another and again from the first.

    The driver is one process: it gives out and takes back one cell at a time.
    """
    free = [0.0] * places
    heapq.heapify(free)
    busy = 0.0
    for cell in range(cells):
        begun = max(heapq.heappop(free), busy)
        busy = begun + driver
        heapq.heappush(free, busy + times[cell % len(times)])
    return max(free) + driver


def store_overhead(seconds: float, requests: dict[str, float]) -> float:
    """What a URL's file system adds to a cell of so many seconds: its checkpoints, and the first read back."""
    writes = 1 + seconds // PUBLISHED
    return writes * requests["write 10 MB"] + requests["read 10 MB"]


@contextmanager
def limit_cores(count: int) -> Iterator[None]:
    """Processes that are begun meanwhile have so many cores, where this system can say so and has as many."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cells_by_workers(
    scale: str, cells: int, workers: int, cluster: ClusterOptions | None = None
) -> tuple[float, list[float]]:
    """Seconds of so many cells in all, and from the end of one to the end of the next, by workers with a core each.

    A cell is a model trained, and every head knocked out. The first includes the start of the workers' processes; a
    ``cluster`` of this machine does the same cells on as many cores.
    """
    specs = [run_spec(**starting_spec(scale, "paper", DISTANCE, "rope", seed)) for seed in range(cells)]
    ends: list[float] = []

    def heard(event: Event) -> None:
        if event.status is not None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        jobs = [Job(spec, str(seed), examples=128) for seed, spec in enumerate(specs)]
        with limit_cores(workers):
            run_jobs(jobs, Path(folder), ExecutionOptions(device="cpu"), workers=cluster or workers, on_event=heard)
        whole = time.perf_counter() - begun
    return whole, [end - before for before, end in zip([begun, *ends], ends, strict=False)]


def audits_by_tokens(tokens: Sequence[int]) -> list[tuple[int, float]]:
    """Seconds of an audit without effects of one text, by its tokens: a random Llama of 2 layers of 8 heads of 32."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": max(tokens)}
    model = LlamaModel(LlamaConfig(**sizes)).eval()
    result = []
    for length in tokens:
        half = torch.randint(1, model.config.vocab_size, (1, length // 2))
        text = torch.cat((half, half), 1)
        begun = time.perf_counter()
        audit(model, text, effects="none")
        result.append((length, time.perf_counter() - begun))
    return result


@contextmanager
def stores_to_measure() -> Iterator[dict[str, str]]:
    """Stores to measure: a disk, and an S3 server of this machine if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        result = {"disk": f"file://{folder}"}
        try:
            import boto3
            from moto.server import ThreadedMotoServer
        except ImportError:
            yield result
            return
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="runs")
        yield {**result, "S3 (moto, on this machine)": "s3://runs/study"}
        server.stop()


def requests(url: str, times: int = 20) -> dict[str, float]:
    """Median seconds of a checkpoint of 10 MB written, and read."""
    store, content, result = Remote(url), os.urandom(10_000_000), {}
    asks = {"write 10 MB": lambda name: store.write(name, content), "read 10 MB": store.read}
    for what, ask in asks.items():
        took = [timeit.timeit(partial(ask, f"run-{number}/checkpoint"), number=1) for number in range(times)]
        result[what] = statistics.median(took)
    return result


def by_length(seconds: float, lengths: Sequence[int]) -> list[tuple[int, float]]:
    """Tokens a second of a training step, by the length of texts; 8,192 tokens a step."""
    result = []
    for length in lengths:
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
        result.append((length, 8192 / statistics.median(took[1:])))
    return result


def empty_job(item: int, execution: ExecutionOptions, report: Callable[..., None]) -> int:
    """A cell that does nothing."""
    return item


def driver_seconds(cells: int = 300) -> float | None:
    """What a cell costs that does nothing, on a cluster of this machine: an upper bound of the driver's own work."""
    try:
        import ray
    except ImportError:
        return None
    done, on_ray = list[int](), ClusterOptions(engine="ray")
    for count in (20, cells):  # the first start the workers
        begun = time.perf_counter()
        run_parallel(empty_job, range(count), ExecutionOptions(), on_ray, on_done=lambda index, _: done.append(index))
    ray.shutdown()
    return (time.perf_counter() - begun) / cells


def simulated_hours(times: Sequence[float], stores: dict[str, dict[str, float]], driver: float) -> list[dict[str, Any]]:
    """Hours of 1,000 cells that take the measured times, by store and nodes; and of the hours that nodes alone need."""
    rows = []
    for store, took in stores.items():
        whole = [seconds + store_overhead(seconds, took) for seconds in times]
        for nodes in NODES:
            hours = simulate(whole, NUM_CELLS, nodes, driver) / 3600
            ideal = NUM_CELLS * statistics.mean(times) / nodes / 3600
            rows.append({"store": store, "nodes": nodes, "hours": hours, "of_the_ideal": ideal / hours})
    return rows


def assumed_hours(minutes: float, stores: dict[str, dict[str, float]], driver: float) -> list[dict[str, Any]]:
    """Hours of 1,000 cells of so many minutes and up to a fifth more on GPUs, one or four at once on each."""
    rows = []
    slowest = max(stores.values(), key=lambda took: store_overhead(60 * minutes, took))
    for gpus in (1, 4, 16, 64):
        for per_gpu in (1, 4):
            seconds = 60 * minutes * (1 if per_gpu == 1 else 2)
            times = [seconds * (1 + 0.2 * (cell * 0.6180339887 % 1)) for cell in range(NUM_CELLS)]
            whole = [took + store_overhead(took, slowest) for took in times]
            hours = simulate(whole, NUM_CELLS, gpus * per_gpu, driver) / 3600
            ideal = sum(times) / (gpus * per_gpu) / 3600
            rows.append(
                {"minutes": minutes, "gpus": gpus, "each": per_gpu, "hours": hours, "of_the_ideal": ideal / hours}
            )
    return rows


def measure_all(
    scale: str, cells: int, seconds: float, lengths: Sequence[int], tokens: Sequence[int]
) -> dict[str, Any]:
    """All measurements and the simulation from them, as they are recorded."""
    with stores_to_measure() as urls:
        stores = {name: requests(url) for name, url in urls.items()}
    driver = driver_seconds()
    by_workers = {str(workers): cells_by_workers(scale, cells, workers) for workers in (1, 2)}
    if driver is not None:
        by_workers[THROUGH_RAY] = cells_by_workers(scale, cells, 2, ClusterOptions(engine="ray"))
    times = by_workers["1"][1][1:]  # the first is also the start of its process
    return {
        "environment": environment(),
        "stores": stores,
        "driver": driver,
        "scale": scale,
        "cells": cells,
        "by_workers": {workers: whole for workers, (whole, _) in by_workers.items()},
        "cell_seconds": times,
        "training": [{"length": length, "tokens_per_second": speed} for length, speed in by_length(seconds, lengths)],
        "audits": [{"tokens": length, "seconds": took} for length, took in audits_by_tokens(tokens)],
        "simulated": simulated_hours(times, stores, driver or UNKNOWN),
    }


def print_record(record: dict[str, Any], console: Console) -> None:
    """Print a record."""
    table = Table("store", "write 10 MB", "read 10 MB", title="Milliseconds")
    for name, took in record["stores"].items():
        table.add_row(name, *(f"{1e3 * took[what]:.1f}" for what in ("write 10 MB", "read 10 MB")))
    console.print(table)
    driver = record["driver"]
    console.print(f"a cell that does nothing: {'not measured' if driver is None else f'{1e3 * driver:.1f} ms'}")
    table = Table("workers", "seconds", "over one", title=f"{record['cells']} cells of scale {record['scale']}")
    for workers, took in record["by_workers"].items():
        table.add_row(workers, f"{took:.1f}", f"{took / record['by_workers']['1']:.2f}")
    console.print(table)
    table = Table("tokens in a text", "tokens/s", title="Training by length: 3 layers of 8 heads of 16")
    for row in record["training"]:
        table.add_row(f"{row['length']:,}", f"{row['tokens_per_second']:,.0f}")
    console.print(table)
    table = Table("tokens", "seconds", "µs a token", title="Audit without effects: 2 layers of 8 heads of 32, one text")
    for row in record["audits"]:
        table.add_row(f"{row['tokens']:,}", f"{row['seconds']:.2f}", f"{1e6 * row['seconds'] / row['tokens']:,.0f}")
    console.print(table)
    mean = statistics.mean(record["cell_seconds"])
    title = f"{NUM_CELLS:,} cells of {mean:.1f} s each, as measured; nodes simulated"
    table = Table("store", "nodes", "hours", "of the ideal", title=title)
    for row in record["simulated"]:
        table.add_row(row["store"], str(row["nodes"]), f"{row['hours']:.3f}", f"{row['of_the_ideal']:.0%}")
    console.print(table)
    if record.get("assumed"):
        title = f"{NUM_CELLS:,} cells of assumed minutes, GPUs simulated"
        table = Table("minutes a cell", "GPUs", "cells each", "hours", "of the ideal", title=title)
        for row in record["assumed"]:
            names = (f"{row['minutes']:g}", str(row["gpus"]), str(row["each"]))
            table.add_row(*names, f"{row['hours']:.2f}", f"{row['of_the_ideal']:.0%}")
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="smoke", choices=[*PRESETS], help="scale of the cells")
    parser.add_argument("--cells", type=int, default=8, help="number of cells, for one worker and for two")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths in training")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=(256, 512, 1024, 2048, 4096), help="numbers of tokens of an audit"
    )
    parser.add_argument("--minutes", type=float, nargs="*", default=(), help="assumed minutes per cell")
    parser.add_argument("--record", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    check_range("cells", args.cells, 2, 1000)
    check_range("lengths", args.lengths, 2, 8192)
    check_range("tokens", args.tokens, 4, 65_536)
    for field, number in (("seconds", args.seconds), *(("minutes", each) for each in args.minutes)):
        if not 0 <= number < math.inf:
            raise InputError(f"{field} must be a finite number, 0 or more, got {number:g}.")
    result = measure_all(args.scale, args.cells, args.seconds, args.lengths, args.tokens)
    driver, stores = result["driver"] or UNKNOWN, result["stores"]
    result["assumed"] = [row for each in args.minutes for row in assumed_hours(each, stores, driver)]
    print_record(result, Console())
    if args.record is not None:
        write_json(args.record, result)


if __name__ == "__main__":
    main()
