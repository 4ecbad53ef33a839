"""One run on several processes, each with its part of every batch: what `torchrun` starts (data-parallel training)."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from toeplens.ground import EnvironmentFailure

_PATIENCE = timedelta(hours=2)  # of those who wait while the leader evaluates or looks
Found = TypeVar("Found")


class LeaderFailed(EnvironmentFailure):
    """The first of the processes raised an error, and the others end."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train one run.

    rank, size  from 0; alone it is 0 of 1
    device      that this process is to use
    """

    rank: int
    size: int
    device: str

    @property
    def leads(self) -> bool:
        """Whether this process reads and writes the run's files and decides when to stop."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch."""
        return rows[self.rank :: self.size]

    def agreed(self, answer: bool) -> bool:
        """The leader's answer, in all processes."""
        if self.size == 1:
            return answer
        told = torch.tensor([answer], dtype=torch.uint8, device=self.device)
        distributed.broadcast(told, 0)
        return bool(told.item())

    def told(self, find: Callable[[], Found]) -> Found:
        """What the leader finds, in all processes; where it raises, the others raise `LeaderFailed`."""
        if self.size == 1:
            return find()
        said: list[Any] = [False, None]
        try:
            if self.leads:
                said = [True, find()]
        finally:
            distributed.broadcast_object_list(said, 0, device=torch.device(self.device))
        if not said[0]:
            raise LeaderFailed("torchrun: the first process ended with an error, which it tells.")
        return said[1]

    def added(self, numbers: Tensor) -> Tensor:
        """The sum of all processes' numbers, in place."""
        if self.size > 1:
            distributed.all_reduce(numbers)
        return numbers

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model, its gradients those of all processes' batches (torch's mean of them)."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device] if self.device != "cpu" else None)

    def gathering(self, network: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Of the parts that a batch is worked in, gradients are exchanged with the last one."""
        return nullcontext() if last or self.size == 1 else network.no_sync()  # type: ignore[operator]


ALONE = Ranks(0, 1, "cpu")


def is_one_of_many() -> bool:
    """Whether `torchrun` started this process and others with it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1


def follows() -> bool:
    """Whether another of these processes leads."""
    return is_one_of_many() and int(os.environ["RANK"]) > 0


@contextmanager
def ranks(device: str) -> Iterator[Ranks]:
    """The processes that `torchrun` started, connected while it lasts; `ALONE` in any other.

    Each takes a GPU of its machine, by its local rank, if ``device`` is ``cuda``, or ``auto`` and there are GPUs.
    Raises `EnvironmentFailure` if the machine has fewer GPUs than processes, or they do not find each other.
    """
    if not is_one_of_many():
        yield ALONE
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    place = int(os.environ["LOCAL_RANK"])
    if on_gpu and place >= torch.cuda.device_count():
        raise EnvironmentFailure(
            f"device: {device!r} was given to {os.environ['LOCAL_WORLD_SIZE']} processes of this machine, which has "
            f"{torch.cuda.device_count()} GPU."
        )
    importlib.import_module("torch.distributed.nn")  # imported later, it keeps the connection for good
    try:
        distributed.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFailure(f"torchrun: the processes do not find each other: {error}.") from None
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), f"cuda:{place}" if on_gpu else "cpu")
        gc.collect()  # a network that was shared is a cycle and keeps the connection, whose threads abort the exit
        distributed.barrier()  # whoever leaves while another still talks to it may take both down
    finally:
        distributed.destroy_process_group()
