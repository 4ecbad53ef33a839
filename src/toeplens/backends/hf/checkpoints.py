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

from toeplens.backends.hf.model import error_summary, load_error
from toeplens.utils import EnvironmentFailure, InputError, invalid

_GGUF_PACKAGES = ("gguf", "accelerate")
_VERSION = re.compile(r"file appears to be version (\d+)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_UNKNOWN = re.compile(r"(\d+)\)? is not a valid (GGMLQuantizationType|GGUFValueType)")


@dataclass(frozen=True)
class QuantisedWeights:
    """The weights of a GGUF file, which are dequantised on loading."""

    architecture: str  # as named in the file
    types: tuple[tuple[str, int], ...]  # number of tensors of each type, the most frequent first

    def __str__(self) -> str:
        """Such as ``GGUF, dequantised from Q4_1 (210 tensors), F32 (61)``."""
        (first, count), *others = self.types
        types = [f"{first} ({count} tensors)", *(f"{name} ({number})" for name, number in others)]
        return f"GGUF, dequantised from {', '.join(types)}"


def read_gguf(path: Path) -> QuantisedWeights:
    """Read the metadata of a GGUF file without dequantising weights.

    Raises `InputError` for a file that is not a whole GGUF file or has tensors of an unknown type.
    """
    for package in _GGUF_PACKAGES:
        if find_spec(package) is None:
            raise EnvironmentFailure(f"{package} is not installed. Run: pip install 'toeplens[gguf]'.")
    stat = path.stat()
    return _read_metadata(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4)
def _read_metadata(path: Path, _size: int, _mtime: int) -> QuantisedWeights:
    from gguf import GGUFReader

    class WeightReader(GGUFReader):  # does not read past the end of the file, whatever its counts say
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            contents = super()._get(offset, dtype, count, *order, **options)
            if len(contents) < count:
                raise ValueError("the file ends too early")
            return contents

    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic != b"GGUF":
            raise InputError(f"model: {path} is not a GGUF file: it does not start with GGUF.")
        contents = WeightReader(path)
        shards = _read_number(contents, "split.count")
        architecture = contents.fields["general.architecture"].contents()
        layers = _read_number(contents, f"{architecture}.block_count")
        blocks = {int(match[1]) for tensor in contents.tensors if (match := _BLOCK.match(tensor.name))}
        types = Counter(tensor.tensor_type.name for tensor in contents.tensors)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"model: {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except Exception as error:  # the reader may fail in any way on invalid bytes
        if unknown := _UNKNOWN.search(str(error)):
            kind = "tensors" if unknown[2] == "GGMLQuantizationType" else "values"
            raise InputError(f"model: {path} stores {kind} in an unknown type (number {unknown[1]}).") from None
        if version := _VERSION.search(str(error)):
            reason = f"has GGUF version {version[1]}, which the package gguf does not support"
            raise InputError(f"model: {path} {reason}.") from None
        raise InputError(f"model: {path} is damaged or truncated.") from None
    if shards > 1:
        raise InputError(f"model: {path} is one of {shards} pieces. Give a complete GGUF file.")
    if layers and blocks and max(blocks) >= layers:
        raise InputError(f"model: {path} declares {layers} layers but contains weights of layer {max(blocks) + 1}.")
    if not types:
        raise InputError(f"model: {path} contains no weights.")
    return QuantisedWeights(str(architecture), tuple(types.most_common()))


def _read_number(reader: Any, name: str) -> int:
    return int(reader.fields[name].contents()) if name in reader.fields else 0


CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_SAFETENSORS = ".safetensors"
_WEIGHTS = ("model.safetensors", INDEX)  # all weights, or the index of their files; the first one found is read
_PICKLE_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
GGUF = ".gguf"
HUB_TIMEOUT = 5  # seconds to wait for the hub
_MAX_NAME = 100  # maximum characters of an invalid name in messages


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model."""

    name: str  # as requested
    location: str  # what transformers loads from: a directory, or a name on the hub
    options: dict[str, Any] = field(default_factory=dict)  # other arguments for loading
    quantised: QuantisedWeights | None = None  # contents of a GGUF file; None for other weights

    @property
    def gguf(self) -> Path:
        """The GGUF file."""
        return Path(self.location) / self.options["gguf_file"]

    def read_config(self) -> dict[str, Any] | None:
        """The configuration of a directory, unchecked; None if it cannot be read before loading."""
        path = Path(self.location) / CONFIG
        if self.quantised is not None or not path.parent.exists():
            return None
        if not path.is_file():
            but = f"{self.name} has no {CONFIG} and no {GGUF} file"
            raise InputError(f"model must be the directory of a run or a transformers model, but {but}.")
        content = _json(path)
        if not isinstance(content, dict):
            raise InputError(f"model: {path} is damaged: it is not a configuration.")
        return content

    def missing_files(self) -> list[str]:
        """The weight files that a directory's index names but that are missing."""
        path = Path(self.location) / INDEX
        return [file for file in _indexed_files(path) if not (path.parent / file).is_file()] if path.is_file() else []

    def check_weights(self, weight_file: Any, pickled: bool) -> None:
        """Refuse weights outside the model's directory and, unless ``pickled``, pickle files; the configuration may
        name a ``weight_file``."""
        named = [] if weight_file is None else [str(weight_file)]
        for file in [*named, *self._files(weight_file, pickled, fetch=True)]:
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise InputError(f"model: weights of {self.name} in {file} lie outside its own directory.")
            if not pickled and not file.endswith((_SAFETENSORS, f"{_SAFETENSORS}.index.json")):
                allow = "Set --pickled to allow pickle checkpoints"
                raise InputError(f"model: weights of {self.name} in {file} are not a {_SAFETENSORS} file. {allow}.")

    def safetensors(self, weight_file: Any) -> list[Path]:
        """The safetensors files of the weights; for a model on the hub only those in the cache."""
        files = (file for file in self._files(weight_file, pickled=False) if file.endswith(_SAFETENSORS))
        return [path for file in files if (path := self._path(file)) is not None]

    def _files(self, weight_file: Any, pickled: bool, fetch: bool = False) -> list[str]:
        """The weight files, the index first; with ``fetch`` the index is downloaded from the hub."""
        order = _WEIGHTS + (_PICKLE_WEIGHTS if pickled else ()) if weight_file is None else (str(weight_file),)
        for file in order if self.quantised is None else ():
            is_index = file.endswith(".json")
            if (path := self._path(file, fetch and is_index)) is not None:
                return [file, *(_indexed_files(path) if is_index else ())]
        return []

    def _path(self, file: str, fetch: bool = False) -> Path | None:
        """A file of the model; None if it does not exist, or is not in the cache and ``fetch`` is false."""
        if Path(self.location).is_dir():
            path = Path(self.location) / file
            return path if path.is_file() else None
        from transformers.utils.hub import cached_file

        errors = ("gated_repo", "missing_entries", "connection_errors")
        quiet = {f"_raise_exceptions_for_{name}": False for name in errors}
        options = self.options | ({} if fetch else {"local_files_only": True})
        cached = cached_file(self.location, file, **quiet, **options)
        return None if cached is None else Path(cached)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"model: {path} is damaged: it is not JSON ({error_summary(error)}).") from None


def _indexed_files(index: Path) -> list[str]:
    """The files that an index of weights names. Raises `InputError` if it is not JSON."""
    content = _json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    return sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []


def find_checkpoint(name: str) -> Checkpoint:
    """The files of a model, from a directory, a GGUF file, a directory with one, or a name on the hub."""
    if not is_local_path(name):
        return Checkpoint(name, name, _hub_options(name))
    path = Path(name)
    if path.is_file() and path.suffix != GGUF:
        raise invalid("model", f"be a model's directory, a {GGUF} file or a name on the hub", path)
    if path.is_dir():
        files = [] if (path / CONFIG).exists() else sorted(path.glob(f"*{GGUF}"))
        if len(files) > 1:
            raise InputError(f"model: {path} contains {len(files)} {GGUF} files. Name one of them, such as {files[0]}.")
        if not files:
            return Checkpoint(name, name)
        path = files[0]
    return Checkpoint(name, str(path.parent), {"gguf_file": path.name}, read_gguf(path))


def is_local_path(name: str) -> bool:
    """Whether it is a file or directory. Raises `InputError` for an impossible name."""
    if not name:
        raise invalid("model", "be a directory, a GGUF file or a name on the hub", got="an empty name")
    try:
        return Path(name).exists()
    except OSError as error:
        short_name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]} ..."
        raise load_error(short_name, (error.strerror or str(error)).lower()) from None


def _hub_options(name: str) -> dict[str, Any]:
    """Loading options for a model on the hub: empty if the hub knows the name; otherwise cache only."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG), timeout=HUB_TIMEOUT)
        return {}
    except Exception as error:  # whatever a network can do
        if isinstance(error, HFValidationError):
            reason = "and it is not a valid name on the hub"
        elif isinstance(try_to_load_from_cache(name, CONFIG), str):
            return {"local_files_only": True}
        elif isinstance(error, HfHubHTTPError):
            reason = f"and the hub does not have it ({error_summary(error)})"
        else:
            reason = f"the hub did not answer within {HUB_TIMEOUT} seconds, and the cache does not contain it"
    raise load_error(name, f"file or directory does not exist, {reason}") from None
