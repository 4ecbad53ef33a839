"""What a GGUF file holds, looked at before transformers reads it: whether it is whole, and how its weights are kept."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from toeplens.ground import EnvironmentFailure, InputError

_NEEDED = ("gguf", "accelerate")
_VERSION = re.compile(r"file appears to be version (\d+)")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_VALUES = 2**22  # that a file says of itself at most: a vocabulary of 262,144 has about a million
_UNKNOWN = re.compile(r"(\d+)\)? is not a valid (GGMLQuantizationType|GGUFValueType)")


@dataclass(frozen=True)
class Quantised:
    """The weights of a GGUF file, which are dequantised when they are loaded.

    architecture  as the file names it
    types         how many tensors are kept in each type, the most frequent first
    """

    architecture: str
    types: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """Such as ``GGUF, dequantised from Q4_1 (210 tensors), F32 (61)``."""
        (first, count), *others = self.types
        told = [f"{first} ({count} tensors)", *(f"{name} ({number})" for name, number in others)]
        return f"GGUF, dequantised from {', '.join(told)}"


def read_gguf(path: Path) -> Quantised:
    """What a GGUF file says of itself; none of its weights are dequantised yet.

    Raises `InputError` for a file that is none, is cut short, is one piece of several or keeps tensors in a type that
    is not known; `EnvironmentFailure` where the package gguf, or accelerate, is missing.
    """
    for needed in _NEEDED:
        try:
            __import__(needed)
        except ImportError:
            raise EnvironmentFailure(
                f"{needed}: it is missing; pip install 'toeplens[gguf]' installs what reads GGUF files."
            ) from None
    about = path.stat()
    return _read(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, _size: int, _changed: int) -> Quantised:
    try:
        with path.open("rb") as stream:
            begins = stream.read(4)
        if begins != b"GGUF":
            raise InputError(f"model: {path} is no GGUF file: it does not begin with GGUF.")
        found = _opened(path)
        pieces = _number(found, "split.count")
        architecture = found.fields["general.architecture"].contents()
        layers = _number(found, f"{architecture}.block_count")
        blocks = {int(match[1]) for tensor in found.tensors if (match := _BLOCK.match(tensor.name))}
        types = Counter(tensor.tensor_type.name for tensor in found.tensors)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"model: {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except Exception as error:  # whatever a reader makes of bytes that are not what it takes them for
        unknown = _UNKNOWN.search(str(error))
        if unknown is not None:
            kind = "tensors" if unknown[2] == "GGMLQuantizationType" else "values"
            raise InputError(f"model: {path} keeps {kind} in a type that is not known (number {unknown[1]}).") from None
        version = _VERSION.search(str(error))
        if version is not None:
            raise InputError(
                f"model: {path} is a GGUF file of version {version[1]}, which the package gguf does not read."
            ) from None
        raise InputError(f"model: {path} is damaged or cut short.") from None
    if pieces > 1:
        raise InputError(f"model: {path} is one of {pieces} pieces; a GGUF file that is whole must be given.")
    if layers and blocks and max(blocks) >= layers:
        raise InputError(
            f"model: {path} says that it has {layers} layers, and holds weights of layer {max(blocks) + 1}; is what it "
            "says of itself another model's?"
        )
    if not types:
        raise InputError(f"model: {path} holds no weights.")
    return Quantised(str(architecture), tuple(types.most_common()))


def _opened(path: Path) -> Any:
    """A `gguf.GGUFReader` that ends where the file does, whatever counts stand in it."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        values = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **options)
            if len(found) < count:
                raise ValueError("the file ends too early")
            return found

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            self.values += 1
            if self.values > _VALUES:
                raise ValueError(f"more than {_VALUES} values")
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader(path)


def _number(found: Any, name: str) -> int:
    value = found.fields.get(name)
    return 0 if value is None else int(value.contents())
