"""The command line as tests use it: called in this process or in one of its own, and what it answered."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TOEPLENS = [sys.executable, "-m", "toeplens"]


@dataclass(frozen=True)
class CommandResult:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What it printed for a machine."""
        assert self.code == 0, self.err
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))

    def refusal(self, code: int = 2, *, begun: bool = False) -> str:
        """The one line of an error; nothing else was printed but, if the work had ``begun``, what it is."""
        assert self.code == code, (self.code, self.err)
        assert self.out == ""
        *before, line = self.err.splitlines()
        assert len(before) == begun
        assert line.startswith("error: ")
        return line


Toeplens = Callable[..., CommandResult]


def command_in_process(*arguments: str | Path, prefix: str | None = None, timeout: float = 120) -> CommandResult:
    """The command as people run it; ``prefix`` is Python that runs before."""
    command = (
        TOEPLENS if prefix is None else [sys.executable, "-c", f"{prefix}\nfrom toeplens.__main__ import main\nmain()"]
    )
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    return CommandResult(done.returncode, done.stdout, done.stderr)


def set_options(**fields: Any) -> list[str]:
    """Options that change fields of a spec."""
    return [part for name, value in fields.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]


TINY = [
    "--scale",
    "smoke",
    *set_options(train_examples=32, test_examples=16, batch_size=16, epochs=2, model__d_model=16, model__num_heads=2),
]
