"""Where pages go: a page names the command that made it, and replaces nothing but an older page of that command.

The name is in the page's head, ``<meta name="generator" content="toeplens card">``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from toeplens.ground.errors import InputError
from toeplens.ground.files import environment_failure, make_directory, write_text

_LOOKED_AT = 4096  # bytes of a file in which its mark is looked for


def free(path: Path, command: str) -> Path:
    """Check that a page of ``command`` can be written to ``path``, before the work that it is to show.

    Returns the file that would be written, which a link leads to; its directory is made. Raises `InputError` where
    something else lies there, `EnvironmentFailure` where nothing can be written.
    """
    path = Path(path)
    try:
        place = path.resolve()
        if place.is_dir():
            raise InputError(f"out: {path} is a directory; a file is needed, such as {path / 'page.html'}.")
        if place.exists():
            if not place.is_file():
                raise InputError(f"out: {path} is no regular file; give the name of a new one.")
            with place.open("rb") as stream:
                if f'<meta name="generator" content="toeplens {command}">'.encode() not in stream.read(_LOOKED_AT):
                    raise InputError(
                        f"out: {path} is not a page that this version's 'toeplens {command}' wrote, and would be "
                        f"replaced; delete it or give another name."
                    )
        make_directory(place.parent)
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except (OSError, RuntimeError) as error:
        raise environment_failure(error if isinstance(error, OSError) else OSError(str(error)), path) from None
    return place


def write_page(path: Path, page: str, command: str) -> Path:
    """Write a page of ``command`` to ``path`` where `free` allows it; returns the path."""
    write_text(free(path, command), page)
    return Path(path)
