"""What audits and probes of models share: the versions that they record, and how failures are reported."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toeplens.ground import EnvironmentFailure, InputError, ToeplensError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.load import Loaded
from toeplens.sources.huggingface.model import of_libraries, words

VERSIONS = {"torch": torch.__version__, "python": platform.python_version()}


@contextmanager
def failures_of(loaded: Loaded, what: str, advice: str) -> Iterator[None]:
    """Report a full memory, with advice, and errors of the model's libraries in one sentence."""
    try:
        yield
    except ToeplensError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise EnvironmentFailure(f"Out of memory on {loaded.model.device}{advice}") from error
        if of_libraries(error):
            name = type(loaded.model).__name__
            raise InputError(f"model: the {what} of {name} failed: {words(error)}.") from error
        raise
