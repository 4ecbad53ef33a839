"""A host opened again: the model as transformers saved it, and the encoding that its configuration names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from toeplens.ground import InputError
from toeplens.hosts.host import MODULES, install, tied
from toeplens.sources.huggingface.model import library


def load(path: str | Path, **options: Any) -> Any:
    """The model of a folder that ``save_pretrained`` of a host wrote, its encoding installed and its weights in place.

    ``options`` are those of transformers' ``from_pretrained``. Raises `InputError` for a folder of another kind.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path: must be the path of a folder (got {type(path).__name__}).")
    folder, transformers = Path(path), library()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"path: {folder} was given; it must be a folder that save_pretrained wrote: {error}."
        ) from error
    described = config.get(MODULES)
    if not isinstance(described, dict) or "encoding" not in described:
        raise InputError(f"path: the model in {folder} has no encoding of ours; open it with from_pretrained.")
    name = next(iter(config.get("architectures") or ["AutoModel"]))
    model = getattr(transformers, name, transformers.AutoModel).from_pretrained(folder, **options)
    host = install(model, prove=False, **described)
    weights = _weights(folder)
    if (
        not set(host.encodings.state_dict()) - set(tied(host.encodings))
        <= set(weights)
        <= set(host.encodings.state_dict())
    ):
        raise InputError(f"path: the weights in {folder} are not those of the encoding {described['encoding']!r}.")
    host.encodings.load_state_dict(weights, strict=False)
    return model


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = (name for name in opened.keys() if name.startswith(f"{MODULES}."))  # noqa: SIM118
            found |= {name.removeprefix(f"{MODULES}."): opened.get_tensor(name) for name in names}
    return found
