"""Training in a process of its own, forked from one that has imported everything and trained nothing."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from toeplens.training import RunSpec, train
from toeplens.utils import ToeplensError

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["toeplens.training", "torch._dynamo"])  # which the first step imports


def work(spec: RunSpec, out: Path, threads: int, errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(threads)
    try:
        train(spec, out, checkpoint_seconds=0)
    except ToeplensError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def start_training(spec: RunSpec, out: Path, errors: Path) -> BaseProcess:
    """A process that trains, and writes what it refuses to ``errors``."""
    process = FORKED.Process(target=work, args=(spec, out, torch.get_num_threads(), errors))
    process.start()
    return process
