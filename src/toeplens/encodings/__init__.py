"""Positional encodings behind one interface: `names()`, `build(name, ...)`, and the hooks of `PositionalEncoding`.

To add an encoding, write a class with a ``name`` in the file of its family: ``class RoPE(Rotary, name="rope")``.
"""

from toeplens.encodings.additive import OffsetBias
from toeplens.encodings.attention import KEPT, attend, attention_logits, attention_weights, fixed_bias
from toeplens.encodings.base import Coupling, PositionalEncoding, Seen
from toeplens.encodings.composed import Composed, compose
from toeplens.encodings.kit import offsets_between
from toeplens.encodings.registry import build, canonical, get, named, names, options, unusable
from toeplens.encodings.rotary import MLA, BandControl, Rotary, controlled, swapped
from toeplens.encodings.shapes import Positions

__all__ = [
    "KEPT",
    "MLA",
    "BandControl",
    "Composed",
    "Coupling",
    "OffsetBias",
    "PositionalEncoding",
    "Positions",
    "Rotary",
    "Seen",
    "attend",
    "attention_logits",
    "attention_weights",
    "build",
    "canonical",
    "compose",
    "controlled",
    "fixed_bias",
    "get",
    "named",
    "names",
    "offsets_between",
    "options",
    "swapped",
    "unusable",
]
