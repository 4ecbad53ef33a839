"""Probing a model during training: the watcher interface, the probed steps, and the stored results."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from toeplens.ground import InputError, invalid, plain
from toeplens.ground.files import finite
from toeplens.model import Decoder

_SHARES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)  # in 32nds of training; denser early, when heads specialise


@runtime_checkable
class Watcher(Protocol):
    """A probe of the model at some steps of its training.

    name     identifies the probe and its data; a run must keep the same watcher throughout
    """

    name: str

    def moments(self, total_steps: int) -> Sequence[int]:
        """The steps to probe: 0 is the initialisation, ``total_steps`` the trained model."""
        ...

    def look(self, model: Decoder, step: int) -> dict[str, Any]:
        """Results for ``model`` after ``step`` steps, as plain lists and numbers.

        The model is a copy in evaluation mode. A probe must depend only on the model and the step, and must not change
        random states. Then a resumed run has the same rows as an uninterrupted one.
        """
        ...


@runtime_checkable
class EventWatcher(Watcher, Protocol):
    """A watcher that also probes at events in training, derived from the metrics so far."""

    def events(self, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        """The names of the events at the last of these evaluations; the model is then probed."""
        ...

    def look_at(self, model: Decoder, events: Sequence[str], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Additional results at an event."""
        ...


def moments(total_steps: int) -> list[int]:
    """Ten steps (fewer in a run of under 32 steps): the initialisation, the end, and more of them early than late."""
    return sorted({round(total_steps * share / _SHARES[-1]) for share in _SHARES})


class Watch:
    """The probes of one run: its watcher, if any, and the rows so far."""

    def __init__(self, watcher: Watcher | None, total_steps: int) -> None:
        self.watcher = watcher
        self.by = None if watcher is None else watcher.name
        self.rows: list[dict[str, Any]] = []
        self.total_steps = total_steps
        self.moments = frozenset(() if watcher is None else watcher.moments(total_steps))
        if wrong := sorted(step for step in self.moments if step not in range(total_steps + 1)):
            raise invalid("moments", f"be steps from 0 to {total_steps}", wrong[0])

    def owed(self, step: int, metrics: Sequence[dict[str, Any]], *, ended: bool) -> bool:
        """Whether a probe is due after ``step`` steps, given the metrics so far.

        If training ends early, a watcher that probes the last step probes this one.
        """
        if self.rows and self.rows[-1]["step"] == step:
            return False
        last = ended and self.total_steps in self.moments
        return step in self.moments or last or bool(self._events(step, metrics))

    def _events(self, step: int, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        if not metrics or metrics[-1]["step"] != step or not isinstance(self.watcher, EventWatcher):
            return ()
        return self.watcher.events(copy.deepcopy(metrics))

    def look(self, model: Decoder, step: int, metrics: Sequence[dict[str, Any]]) -> float:
        """Probe a copy of ``model`` and store the row; returns the seconds it took.

        The model and torch's random states are not changed.
        """
        assert self.watcher is not None
        device = model.readout.weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # do not count pending steps
        begun = time.monotonic()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            mine = copy.deepcopy(model).eval()
            seen = self.watcher.look(mine, step)
            if events := self._events(step, metrics):
                assert isinstance(self.watcher, EventWatcher)
                if "events" in seen:
                    raise InputError(f"watcher: {self.by!r} must not return the name 'events', which is reserved.")
                seen = seen | {"events": list(events)} | self.watcher.look_at(mine, events, copy.deepcopy(metrics))
            seen = self._plain(seen)
        seconds = time.monotonic() - begun
        self.rows.append({"step": step, "seconds": round(seconds, 4), **seen})
        return seconds

    def _plain(self, seen: dict[str, Any]) -> dict[str, Any]:
        """The results as JSON returns them, with None for non-finite numbers."""
        if taken := [name for name in ("step", "seconds") if name in seen]:
            raise InputError(f"watcher: {self.by!r} must not return the name {taken[0]!r}, which is reserved.")
        try:
            return plain(finite(seen))
        except InputError:
            raise InputError(f"watcher: {self.by!r} must return lists and numbers that JSON can hold.") from None

    def state(self) -> dict[str, Any]:
        """The state for the checkpoint."""
        return {"by": self.by, "rows": self.rows}

    def resume(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint; rows of two watchers must not be mixed."""
        if state["rows"] and self.by not in (None, state["by"]):
            raise invalid("watcher", f"be {state['by']!r}, as before, or None", self.by)
        self.by, self.rows = self.by or state["by"], state["rows"]
