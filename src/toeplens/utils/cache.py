"""A cache for the finished parts of unfinished work."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from toeplens.utils.files import make_directory, read_bytes, write_bytes


class ResultCache:
    """Finished parts in a directory, under a key of everything that determines them.

    Parts with another key, or whose content was changed, are ignored.

    Arguments
        directory  its own directory; None saves nothing
        key        what determines the parts
    """

    def __init__(self, directory: Path | None, key: Any) -> None:
        self.directory, self._key = directory, _digest(json.dumps(key, sort_keys=True).encode())

    def get(self, name: str) -> Any:
        """A part; None if there is none."""
        body = self._read(f"{name}.json")
        return None if body is None else json.loads(body)

    def put(self, name: str, content: Any) -> None:
        """Save a part atomically."""
        self._write(f"{name}.json", json.dumps(content).encode())

    def get_array(self, name: str) -> np.ndarray | None:
        """An array; None if there is none."""
        body = self._read(f"{name}.npy")
        return None if body is None else np.load(io.BytesIO(body), allow_pickle=False)

    def put_array(self, name: str, values: np.ndarray) -> None:
        """Save an array atomically."""
        body = io.BytesIO()
        np.save(body, values, allow_pickle=False)
        self._write(f"{name}.npy", body.getvalue())

    def clear(self) -> None:
        """Remove all parts."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _read(self, name: str) -> bytes | None:
        try:
            content = b"" if self.directory is None else read_bytes(self.directory / name)
        except OSError:
            return None
        header, _, body = content.partition(b"\n")
        return body if header == self._header(body) else None

    def _write(self, name: str, body: bytes) -> None:
        if self.directory is not None:
            write_bytes(make_directory(self.directory) / name, self._header(body) + b"\n" + body)

    def _header(self, body: bytes) -> bytes:
        return f"{self._key} {_digest(body)}".encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
