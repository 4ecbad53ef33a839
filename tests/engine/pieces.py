"""Pieces of work for processes of their own, which import them from here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toeplens.engine import ExecutionOptions


def terminated(piece: tuple[bool, Path], limits: ExecutionOptions, tell: Callable[[Any], None]) -> str | None:
    """One piece has its own process terminated and leaves its work; the other goes on beside it, and then ends."""
    stays, begun = piece
    if stays:
        begun.touch()
        time.sleep(2)
        return "whole"
    while not begun.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while not limits.over():
        time.sleep(0.01)
    return None


def endless(piece: str, limits: ExecutionOptions, tell: Callable[[Any], None]) -> None:
    """A piece that never looks at its limits."""
    tell("begun")
    time.sleep(600)
