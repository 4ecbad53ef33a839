"""A model with an installed encoding, opened again: what its configuration and its checkpoint say of the encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from toeplens.ground import InputError, shown
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.failures import words
from toeplens.sources.huggingface.hosts.host import MARK, MODULES, install, tied

_TOLD = 3  # names of weights that are told


def reinstall(model: Any, described: Any, files: Sequence[Path], name: str) -> None:
    """Install the encoding that a configuration describes, with its weights.

    Arguments
        described  the entry ``toeplens_encodings`` of the configuration
        files      of the checkpoint that the model's own weights are from
        name       of the model, in sentences

    Raises `InputError` for an entry that is damaged, for an encoding that cannot act in the model, and for weights that
    are not the encoding's.
    """
    entry = f"the entry {MODULES} of its configuration"
    if not isinstance(described, dict) or not _is_whole(described):
        raise InputError(f"model: {name} could not be loaded: {entry} is damaged ({shown(described)}).")
    try:
        host = install(model, prove=False, **described)
    except Exception as error:  # whatever its options make of an encoding
        if out_of_memory(error):
            raise
        raise InputError(f"model: {name} could not be loaded: {entry} does not go with it ({words(error)}).") from None
    found = _weights(files)
    found.pop(MARK, None)
    known = host.encodings.state_dict()
    needed = set(known) - set(tied(host.encodings)) - {MARK}
    wrong = sorted((needed - set(found)) | (set(found) - set(known)))
    wrong += sorted(key for key, x in found.items() if key in known and not _fits(x, known[key]))
    if wrong:
        more = f" and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise InputError(
            f"model: {name} could not be loaded: its weights are not those of the encoding {host.name!r}: "
            f"{', '.join(wrong[:_TOLD])}{more} are missing, left over, of another shape or not finite numbers."
        )
    host.encodings.load_state_dict(found, strict=False)


def _is_whole(described: Mapping[str, Any]) -> bool:
    """Whether an entry has what `install` takes."""
    name, layers, max_len = (described.get(key) for key in ("encoding", "layers", "max_len"))
    named = isinstance(name, str) or (isinstance(name, list) and all(isinstance(each, str) for each in name))
    some = layers is None or (isinstance(layers, list) and all(type(each) is int for each in layers))
    return named and some and (max_len is None or type(max_len) is int) and not {"model", "prove"} & set(described)


def _fits(x: Tensor, known: Tensor) -> bool:
    """Whether a saved tensor can be the values of one that is there."""
    return x.shape == known.shape and x.is_floating_point() and bool(torch.isfinite(x).all())


def _weights(files: Sequence[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = (name for name in opened.keys() if name.startswith(f"{MODULES}."))  # noqa: SIM118
            found |= {name.removeprefix(f"{MODULES}."): opened.get_tensor(name) for name in names}
    return found
