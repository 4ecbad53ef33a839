"""Saved parts of an unfinished audit, so that it can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from toeplens.ground import write_text
from toeplens.ground.files import make_directory, read_bytes
from toeplens.studies.auditing.record import Measured
from toeplens.version import __version__

PARTS = ".parts"  # directory of the saved parts


class Kept:
    """Finished parts in an audit's directory (None saves nothing), under a key of everything that determines them.

    Parts with another key, of other versions of torch or toeplens, or whose content was changed are ignored.
    """

    def __init__(self, directory: Path | None, key: Mapping[str, Any]) -> None:
        self._place = None if directory is None else directory / PARTS
        versions = {"toeplens": __version__, "torch": torch.__version__}
        self._key = _digest(json.dumps({**key, **versions}, sort_keys=True))

    def get(self, name: str) -> Any:
        """A part; None if there is none."""
        try:
            text = "" if self._place is None else read_bytes(self._place / f"{name}.json").decode()
            head, _, body = text.partition("\n")
            return json.loads(body) if head == f"{self._key} {_digest(body)}" else None
        except (OSError, ValueError):
            return None

    def put(self, name: str, content: Any) -> None:
        """Save a part atomically."""
        if self._place is None:
            return
        make_directory(self._place)
        body = json.dumps(content)
        write_text(self._place / f"{name}.json", f"{self._key} {_digest(body)}\n{body}")

    def clear(self) -> None:
        """Remove all parts."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def layer(self, number: int) -> Measured | None:
        """The measures of a call, by its index in the forward pass."""
        found = self.get(f"layer-{number}")
        return None if found is None else Measured.from_dict(found, "part")

    def put_layer(self, number: int, measured: Measured) -> None:
        """Save the measures of a call."""
        self.put(f"layer-{number}", measured.to_dict())

    def array(self, name: str) -> Float[np.ndarray, "..."] | None:
        """An array, which may contain NaN; saved by ``put`` as a list."""
        found = self.get(name)
        return None if found is None else np.asarray(found, dtype=float)


def identity(model: Any, name: str | None) -> Any:
    """An identity of the model's weights: its files with sizes and times, or a digest of the weights.

    Arguments
        name  directory or file it was loaded from, or its name on the hub; None for a model object
    """
    if name is not None and Path(name).exists():
        return files_of(Path(name))
    commit = getattr(model.config, "_commit_hash", None)
    if name is not None and commit is not None:
        return [name, commit]
    digest = hashlib.sha256(repr(model.config).encode())
    for key, x in sorted(model.state_dict().items()):
        digest.update(f"{key} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def files_of(directory: Path) -> list[list[Any]]:
    """Name, size and modification time of each file in a directory, or of one file."""
    inside = [directory] if directory.is_file() else sorted(directory.iterdir())
    files = [(path, path.stat()) for path in inside if path.is_file()]
    return [[path.name, found.st_size, found.st_mtime_ns] for path, found in files]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
