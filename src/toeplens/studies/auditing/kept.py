"""Saved parts of an unfinished audit, so that it can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from toeplens.ground.cache import Cache
from toeplens.studies.auditing.record import Measured
from toeplens.version import __version__

PARTS = ".parts"  # directory of the saved parts


class Kept(Cache):
    """`toeplens.ground.cache.Cache` in an audit's directory; the versions of torch and toeplens are part of the key."""

    def __init__(self, directory: Path | None, key: Mapping[str, Any]) -> None:
        versions = {"toeplens": __version__, "torch": torch.__version__}
        super().__init__(None if directory is None else directory / PARTS, {**key, **versions})

    def layer(self, number: int) -> Measured | None:
        """The measures of a call, by its index in the forward pass."""
        found = self.get(f"layer-{number}")
        return None if found is None else Measured.from_dict(found, "part")

    def put_layer(self, number: int, measured: Measured) -> None:
        """Save the measures of a call."""
        self.put(f"layer-{number}", measured.to_dict())


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
