"""Programs timed in turn, round by round, in one process: what else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

_WARM = 2  # rounds that are not counted
_LARGE = {"cpu": 2048, "cuda": 8192}  # of the square matrices whose product is the peak
Programs = Mapping[str, Callable[[], object]]


def race(
    programs: Programs, device: torch.device, *, rounds: int, seconds: float, again: int = 0
) -> dict[str, list[float]]:
    """Seconds of each program in each round: so many rounds, or as many as fit in the time, three at least.

    What is done again and again, as a step of training is, finds in the caches what it left there. For such programs
    ``again`` is how often each is run in its turn after a run that is not counted; the seconds are their mean.
    """
    found: dict[str, list[float]] = {name: [] for name in programs}
    begun = time.perf_counter()
    for number in range(-_WARM, rounds):
        if number >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, program in programs.items():
            took = timed(program, device)
            if again:
                took = sum(timed(program, device) for _ in range(again)) / again
            if number >= 0:
                found[name].append(took)
    return found


def timed(program: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, with all that it left to do on the device."""
    _wait(device)
    begun = time.perf_counter()
    program()
    _wait(device)
    return time.perf_counter() - begun


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square product, the best of ten."""
    size = _LARGE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(timed(lambda: a @ b, device) for _ in range(10))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
