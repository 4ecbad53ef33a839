"""Followers that talk to a network: what they do, they do behind training's back, and it never waits long for them."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from toeplens.training.followers.protocol import RunEnd, RunFacts

PATIENCE = {"complete": 10.0, "diverged": 10.0, "stopped": 1.5}  # seconds to wait for the last to be sent

_silent: set[type] = set()  # those that did not answer in this process: the runs after do not wait for them again


class Behind(ABC):
    """A follower with a thread of its own, in which ``opened``, ``sent`` and ``closed`` are called in turn.

    What they raise is raised at the next call from training. Raises `TimeoutError` where the last of a finished run is
    not sent in time; runs that this process trains later then do without.
    """

    def __init__(self, label: str | None = None, group: str | None = None) -> None:
        """``label`` is what people call the run, ``group`` the study that it is of."""
        self.label, self.group = label, group
        self._given: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._over, self._error = threading.Event(), None

    @abstractmethod
    def opened(self, run: RunFacts) -> None:
        """Open the tracker's run, or go on with it."""

    @abstractmethod
    def sent(self, row: Mapping[str, float]) -> None:
        """Send an evaluation."""

    @abstractmethod
    def closed(self, end: RunEnd) -> None:
        """Close the tracker's run."""

    def begin(self, run: RunFacts) -> None:
        if type(self) in _silent:
            raise TimeoutError("it did not answer in time")
        threading.Thread(target=self._work, name=type(self).__name__, daemon=True).start()
        self._give(self.opened, run)

    def look(self, row: Mapping[str, float]) -> None:
        self._give(self.sent, row)

    def end(self, end: RunEnd) -> None:
        self._give(self.closed, end)
        if not self._over.wait(PATIENCE[end.status]) and end.status != "stopped":
            _silent.add(type(self))
            raise TimeoutError("it did not answer in time")
        self._raise()

    def _give(self, call: Callable[[Any], None], what: Any) -> None:
        self._raise()
        self._given.put((call, what))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while not self._over.is_set():
            call, what = self._given.get()
            try:
                call(what)
                if call == self.closed:
                    self._over.set()
            except (Exception, SystemExit) as error:
                self._error = error
                self._over.set()


def in_time(work: Callable[[], None], seconds: float) -> None:
    """Do ``work`` in a thread, for so many seconds at most; raises what it raises, or `TimeoutError`."""
    raised: list[BaseException] = []

    def done() -> None:
        try:
            work()
        except (Exception, SystemExit) as error:
            raised.append(error)

    thread = threading.Thread(target=done, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError("it did not answer in time")
    if raised:
        raise raised[0]
