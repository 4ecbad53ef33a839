"""Telling those who follow a run, so that none of them can stop it or change it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from toeplens.ground.errors import first_line
from toeplens.training.followers.protocol import Follower, RunEnd, RunFacts

LOG = logging.getLogger("toeplens.followers")


class Followed:
    """A run with its followers; one that raises is told no more."""

    def __init__(self, followers: Sequence[Follower], run: RunFacts, device: torch.device, rows: int = 0) -> None:
        """``rows`` are those that earlier sessions have told."""
        self.run, self.device, self.told = run, device, rows
        self.left, self.ended = list(followers), False

    def begin(self) -> None:
        """Training begins, or goes on."""
        self._tell(lambda follower: follower.begin(self.run))

    def look(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Tell those of the run's rows that are new; whether there were any."""
        new, self.told = rows[self.told :], len(rows)
        for row in new:
            self._tell(lambda follower, row=row: follower.look(_finite(row)))
        return bool(new)

    def end(self, end: RunEnd) -> None:
        """The session is over; what is said of an end after the first one is not told."""
        if not self.ended:
            self.ended = True
            self._tell(lambda follower: follower.end(end))

    def _tell(self, call: Callable[[Follower], None]) -> None:
        """Call each that is left; torch's random states are afterwards what they were."""
        if not self.left:
            return
        devices = [self.device] if self.device.type == "cuda" else []
        for follower in list(self.left):
            try:
                with torch.random.fork_rng(devices=devices):
                    call(follower)
            except (Exception, SystemExit) as error:
                self.left.remove(follower)
                reason = first_line(error)
                reason = reason.replace(self.run.name, "the run")  # it may happen to many, and is said once
                LOG.warning("%s follows no more: %s; training goes on.", type(follower).__name__, reason)


def _finite(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}


class _Hearing(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())


@contextmanager
def heard(say: Callable[[str], None]) -> Iterator[None]:
    """While it lasts, ``say`` hears what followers failed by, each sentence once, and nobody else does."""
    said: set[str] = set()

    def once(text: str) -> None:
        if text not in said:
            said.add(text)
            say(text)

    handler, before = _Hearing(once), LOG.propagate
    LOG.addHandler(handler)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.propagate = before
