"""Where a worker makes a run that a store will keep."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toeplens.ground import EnvironmentFailure
from toeplens.training.run import CHECKPOINT, RESULT


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is gone afterwards.

    But where an `EnvironmentFailure` keeps what was made there from its store, it stays, and the error says where.
    """
    directory = Path(tempfile.mkdtemp(prefix="toeplens-"))
    try:
        yield directory
    except EnvironmentFailure as error:
        if not any(any(directory.glob(f"*/{name}")) for name in (CHECKPOINT, RESULT)):
            shutil.rmtree(directory, ignore_errors=True)
            raise
        said = str(error).rstrip(".")
        raise EnvironmentFailure(f"{said}; what was made lies in {directory} on {socket.gethostname()}.") from None
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
