"""Looking at a model while it is trained: what a watcher is, when it looks, and what is kept of what it saw."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from toeplens.ground import InputError, invalid, plain
from toeplens.ground.files import finite
from toeplens.model import Decoder

_SHARES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)  # of 32; closer together early, where heads take their parts


@runtime_checkable
class Watcher(Protocol):
    """What looks at a model at some moments of its training.

    name     says what is looked at and on what; a run is watched by one name from beginning to end
    """

    name: str

    def moments(self, total_steps: int) -> Sequence[int]:
        """The steps after which to look: 0 is the initialisation, ``total_steps`` the trained model."""
        ...

    def look(self, model: Decoder, step: int) -> dict[str, Any]:
        """What is seen of ``model`` after ``step`` steps, as plain lists and numbers.

        The model is a copy in evaluation mode. A look depends on nothing but the model and the step, and changes no
        random state: then a run that was killed and resumed has the rows of one that was not.
        """
        ...


@runtime_checkable
class EventWatcher(Watcher, Protocol):
    """A watcher that also looks where training has got to something: these moments follow from the metrics so far."""

    def events(self, metrics: Sequence[dict[str, Any]]) -> Sequence[str]:
        """The names of the moments that the last of these evaluations is; it is then looked at."""
        ...

    def look_at(self, model: Decoder, events: Sequence[str], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What is seen there beside what `look` sees."""
        ...


def moments(total_steps: int) -> list[int]:
    """Ten moments (fewer in a run of under 32 steps): the initialisation, the end, and more of them early than late."""
    return sorted({round(total_steps * share / _SHARES[-1]) for share in _SHARES})


class Watch:
    """The watching of one run: its watcher, if any, and the rows so far."""

    def __init__(self, watcher: Watcher | None, total_steps: int) -> None:
        self.watcher = watcher
        self.by = None if watcher is None else watcher.name
        self.rows: list[dict[str, Any]] = []
        self.total_steps = total_steps
        self.moments = frozenset(() if watcher is None else watcher.moments(total_steps))
        if wrong := sorted(step for step in self.moments if step not in range(total_steps + 1)):
            raise invalid("moments", f"be steps from 0 to {total_steps}", wrong[0])

    def owed(self, step: int, metrics: Sequence[dict[str, Any]], *, ended: bool) -> bool:
        """Whether the model after ``step`` steps, with these metrics so far, is to be looked at and was not yet.

        Where training ended before its most steps, a watcher that wants the last of them wants this one.
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
        """Look at a copy of ``model`` and keep the row; returns the seconds it took.

        Neither the model nor torch's random states can be changed by it.
        """
        assert self.watcher is not None
        device = model.readout.weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # steps still under way are not the look's cost
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
        """What was seen as JSON gives it back, None for what is no finite number."""
        if taken := [name for name in ("step", "seconds") if name in seen]:
            raise InputError(f"watcher: {self.by!r} must not return the name {taken[0]!r}, which is reserved.")
        try:
            return plain(finite(seen))
        except InputError:
            raise InputError(f"watcher: {self.by!r} must return lists and numbers that JSON can hold.") from None

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"by": self.by, "rows": self.rows}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; rows of two watchers are not mixed."""
        if state["rows"] and self.by not in (None, state["by"]):
            raise invalid("watcher", f"be {state['by']!r}, as before, or None", self.by)
        self.by, self.rows = self.by or state["by"], state["rows"]
