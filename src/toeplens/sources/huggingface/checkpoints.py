"""The files of a model: in a directory, in one GGUF file, on the hub or in its cache."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toeplens.ground import EnvironmentFailure, InputError, invalid
from toeplens.sources.huggingface.model import not_loaded, words

_NEEDED = ("gguf", "accelerate")
_VERSION = re.compile(r"file appears to be version (\d+)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_UNKNOWN = re.compile(r"(\d+)\)? is not a valid (GGMLQuantizationType|GGUFValueType)")


@dataclass(frozen=True)
class Quantised:
    """The weights of a GGUF file, which are dequantised on loading."""

    architecture: str  # as named in the file
    types: tuple[tuple[str, int], ...]  # number of tensors of each type, the most frequent first

    def __str__(self) -> str:
        """Such as ``GGUF, dequantised from Q4_1 (210 tensors), F32 (61)``."""
        (first, count), *others = self.types
        told = [f"{first} ({count} tensors)", *(f"{name} ({number})" for name, number in others)]
        return f"GGUF, dequantised from {', '.join(told)}"


def read_gguf(path: Path) -> Quantised:
    """Read the metadata of a GGUF file without dequantising weights.

    Raises `InputError` for a file that is not a whole GGUF file or has tensors of an unknown type.
    """
    for needed in _NEEDED:
        if find_spec(needed) is None:
            raise EnvironmentFailure(f"{needed} is not installed. Run: pip install 'toeplens[gguf]'.")
    about = path.stat()
    return _read(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, _size: int, _changed: int) -> Quantised:
    from gguf import GGUFReader

    class Reader(GGUFReader):  # does not read past the end of the file, whatever its counts say
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **options)
            if len(found) < count:
                raise ValueError("the file ends too early")
            return found

    try:
        with path.open("rb") as stream:
            begins = stream.read(4)
        if begins != b"GGUF":
            raise InputError(f"model: {path} is not a GGUF file: it does not start with GGUF.")
        found = Reader(path)
        pieces = _number(found, "split.count")
        architecture = found.fields["general.architecture"].contents()
        layers = _number(found, f"{architecture}.block_count")
        blocks = {int(match[1]) for tensor in found.tensors if (match := _BLOCK.match(tensor.name))}
        types = Counter(tensor.tensor_type.name for tensor in found.tensors)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"model: {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except Exception as error:  # the reader may fail in any way on invalid bytes
        if unknown := _UNKNOWN.search(str(error)):
            kind = "tensors" if unknown[2] == "GGMLQuantizationType" else "values"
            raise InputError(f"model: {path} stores {kind} in an unknown type (number {unknown[1]}).") from None
        if version := _VERSION.search(str(error)):
            why = f"has GGUF version {version[1]}, which the package gguf does not support"
            raise InputError(f"model: {path} {why}.") from None
        raise InputError(f"model: {path} is damaged or truncated.") from None
    if pieces > 1:
        raise InputError(f"model: {path} is one of {pieces} pieces. Give a complete GGUF file.")
    if layers and blocks and max(blocks) >= layers:
        raise InputError(f"model: {path} declares {layers} layers but contains weights of layer {max(blocks) + 1}.")
    if not types:
        raise InputError(f"model: {path} contains no weights.")
    return Quantised(str(architecture), tuple(types.most_common()))


def _number(found: Any, name: str) -> int:
    return int(found.fields[name].contents()) if name in found.fields else 0


CONFIG = "config.json"
_SAFE, _INDEX = ".safetensors", "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX)  # all weights, or the index of their files; the first one found is read
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF = ".gguf"
LIMIT = 5  # seconds to wait for the hub
_NAMED = 100  # maximum characters of an invalid name in messages


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model."""

    name: str  # as requested
    place: str  # what transformers loads from: a directory, or a name on the hub
    options: dict[str, Any] = field(default_factory=dict)  # other arguments for loading
    quantised: Quantised | None = None  # contents of a GGUF file; None for other weights

    def content(self) -> dict[str, Any] | None:
        """The configuration of a directory, unchecked; None if it cannot be read before loading."""
        path = Path(self.place) / CONFIG
        if self.quantised is not None or not path.parent.exists():
            return None
        if not path.is_file():
            but = f"{self.name} has no {CONFIG} and no {GGUF} file"
            raise InputError(f"model must be the directory of a run or a transformers model, but {but}.")
        content = _json(path)
        if not isinstance(content, dict):
            raise InputError(f"model: {path} is damaged: it is not a configuration.")
        return content

    def missing(self) -> list[str]:
        """The weight files that a directory's index names but that are missing."""
        path = Path(self.place) / _INDEX
        return [each for each in _pieces(path) if not (path.parent / each).is_file()] if path.is_file() else []

    def check_weights(self, named: Any, pickled: bool) -> None:
        """Refuse weights outside the model's directory and, unless ``pickled``, pickle files; the configuration may
        have ``named`` one."""
        for each in [*([] if named is None else [str(named)]), *self._files(named, pickled, fetch=True)]:
            if Path(each).is_absolute() or ".." in Path(each).parts:
                raise InputError(f"model: weights of {self.name} in {each} lie outside its own directory.")
            if not pickled and not each.endswith((_SAFE, f"{_SAFE}.index.json")):
                allow = "Set --pickled to allow pickle checkpoints"
                raise InputError(f"model: weights of {self.name} in {each} are not a {_SAFE} file. {allow}.")

    def safetensors(self, named: Any) -> list[Path]:
        """The safetensors files of the weights; for a model on the hub only those in the cache."""
        files = (each for each in self._files(named, pickled=False) if each.endswith(_SAFE))
        return [path for each in files if (path := self._path(each)) is not None]

    def _files(self, named: Any, pickled: bool, fetch: bool = False) -> list[str]:
        """The weight files, the index first; with ``fetch`` the index is downloaded from the hub."""
        order = _WEIGHTS + (_PICKLED if pickled else ()) if named is None else (str(named),)
        for each in order if self.quantised is None else ():
            is_index = each.endswith(".json")
            if (path := self._path(each, fetch and is_index)) is not None:
                return [each, *(_pieces(path) if is_index else ())]
        return []

    def _path(self, file: str, fetch: bool = False) -> Path | None:
        """A file of the model; None if it does not exist, or is not in the cache and ``fetch`` is false."""
        if Path(self.place).is_dir():
            path = Path(self.place) / file
            return path if path.is_file() else None
        from transformers.utils.hub import cached_file

        errors = ("gated_repo", "missing_entries", "connection_errors")
        quiet = {f"_raise_exceptions_for_{name}": False for name in errors}
        found = cached_file(self.place, file, **quiet, **self.options | ({} if fetch else {"local_files_only": True}))
        return None if found is None else Path(found)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"model: {path} is damaged: it is not JSON ({words(error)}).") from None


def _pieces(index: Path) -> list[str]:
    """The files that an index of weights names. Raises `InputError` if it is not JSON."""
    content = _json(index)
    named = content.get("weight_map") if isinstance(content, dict) else None
    return sorted({str(each) for each in named.values()}) if isinstance(named, dict) else []


def checkpoint_of(name: str) -> Checkpoint:
    """The files of a model, from a directory, a GGUF file, a directory with one, or a name on the hub."""
    if not is_there(name):
        return Checkpoint(name, name, _hub_options(name))
    path = Path(name)
    if path.is_file() and path.suffix != GGUF:
        raise invalid("model", f"be a model's directory, a {GGUF} file or a name on the hub", path)
    if path.is_dir():
        found = [] if (path / CONFIG).exists() else sorted(path.glob(f"*{GGUF}"))
        if len(found) > 1:
            raise InputError(f"model: {path} contains {len(found)} {GGUF} files. Name one of them, such as {found[0]}.")
        if not found:
            return Checkpoint(name, name)
        path = found[0]
    return Checkpoint(name, str(path.parent), {"gguf_file": path.name}, read_gguf(path))


def is_there(name: str) -> bool:
    """Whether it is a file or directory. Raises `InputError` for an impossible name."""
    if not name:
        raise invalid("model", "be a directory, a GGUF file or a name on the hub", got="an empty name")
    try:
        return Path(name).exists()
    except OSError as error:
        told = name if len(name) <= _NAMED else f"{name[:_NAMED]} ..."
        raise not_loaded(told, (error.strerror or str(error)).lower()) from None


def _hub_options(name: str) -> dict[str, Any]:
    """Loading options for a model on the hub: empty if the hub knows the name; otherwise cache only."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=LIMIT)
        return {}
    except Exception as error:  # whatever a network can do
        if isinstance(error, HFValidationError):
            why = "and it is not a valid name on the hub"
        elif isinstance(try_to_load_from_cache(name, CONFIG), str):
            return {"local_files_only": True}
        elif isinstance(error, HfHubHTTPError):
            why = f"and the hub does not have it ({words(error)})"
        else:
            why = f"the hub did not answer within {LIMIT} seconds, and the cache does not contain it"
    raise not_loaded(name, f"file or directory does not exist, {why}") from None
