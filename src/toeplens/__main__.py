"""The command ``toeplens``, and ``python -m toeplens``."""

from __future__ import annotations

import io
import os
import signal
import sys


def main() -> None:
    """Run the command line; what it sets of its process, and worker processes inherit, a library leaves alone."""
    if "OMP_WAIT_POLICY" not in os.environ:  # waiting threads give their cores back sooner (docs/how-to/speed.md)
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))  # workers keep what a training step frees
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**25))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show are escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        from toeplens.cli import app, report_error
        from toeplens.utils.execution import INTERRUPTED_EXIT_CODE
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        try:
            code = app(standalone_mode=False)
        except SystemExit as error:  # click's, if nobody reads standard output
            raise error.__context__ if isinstance(error.__context__, BrokenPipeError) else error from None
        print(end="", flush=True)
        if code == INTERRUPTED_EXIT_CODE:  # Typer's way to report Ctrl-C
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        code = report_error(error)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
