"""A directory that holds a model with an installed encoding, opened by one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.ground import InputError, choose, shown
from toeplens.sources.huggingface.hosts.host import HOST
from toeplens.sources.huggingface.loading import Dtype, open_folder


def load(path: str | Path, *, dtype: Dtype | None = None, device: str = "cpu") -> Any:
    """The model of a directory that ``save_pretrained`` of a host wrote, with its encoding and all of its weights.

    It is opened as `toeplens.sources.huggingface.load_model` opens models, which takes such a directory too: no code
    that comes with it is run, and weights are read from its safetensors alone.

    Arguments
        dtype   of the weights; as they were saved unless given. ``auto``: float32 on a CPU
        device  ``cpu``, ``cuda``, ``cuda:N`` or ``auto``

    Raises `InputError` for a directory of another kind and for one that is damaged.
    """
    if not isinstance(path, str | Path) or not Path(path).is_dir():
        given = path if isinstance(path, str | Path) else shown(path)
        raise InputError(f"path: {given} was given; it must be a directory that save_pretrained wrote.")
    if dtype is not None:
        choose("dtype", dtype, ("auto", "float64", "float32", "bfloat16", "float16"))
    model = open_folder(str(path), dtype, device).model
    if HOST not in vars(model):
        raise InputError(f"path: the model in {path} has no encoding of ours; open it with from_pretrained.")
    return model
