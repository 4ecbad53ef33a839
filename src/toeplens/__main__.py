"""The command ``toeplens``, and ``python -m toeplens``."""

import os
import sys
from contextlib import suppress

from toeplens.start import give_cores_back, leave_on_signals, uncollected


def main() -> None:
    """Run the command line; a signal that comes while it is imported is one sentence too.

    What was stopped ends at once: to take down what it had built can take longer than a person waits.
    """
    leave_on_signals()
    give_cores_back()
    with uncollected():
        from toeplens.cli import main as command_line
        from toeplens.ground.stops import EXIT_CODE

    try:
        command_line()
    except SystemExit as end:
        if end.code != EXIT_CODE:
            raise
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, full or not there
                stream.flush()
        os._exit(EXIT_CODE)


if __name__ == "__main__":
    main()
