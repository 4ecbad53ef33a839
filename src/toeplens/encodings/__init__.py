"""Positional encodings under one contract: `names()`, `build(name, ...)`, and the hooks of `PositionalEncoding`."""

from toeplens.encodings.base import Coupling, PositionalEncoding, Positions, offsets_between
from toeplens.encodings.bias import OffsetBias
from toeplens.encodings.latent import MLA
from toeplens.encodings.registry import build, get, names, options
from toeplens.encodings.rotary import Rotary

__all__ = [
    "MLA",
    "Coupling",
    "OffsetBias",
    "PositionalEncoding",
    "Positions",
    "Rotary",
    "build",
    "get",
    "names",
    "offsets_between",
    "options",
]
