"""What a language model is asked about real text: bits a byte, longer texts, planted spans, other rotations."""

from toeplens.engine.language.bits import AtLength, Bits, bits
from toeplens.engine.language.extension import Extended, Extension, extension
from toeplens.engine.language.heads import HeadPatterns, head_patterns
from toeplens.engine.language.planted import Copied, Copying, Needle, Needles, copying, needles

__all__ = [
    "AtLength",
    "Bits",
    "Copied",
    "Copying",
    "Extended",
    "Extension",
    "HeadPatterns",
    "Needle",
    "Needles",
    "bits",
    "copying",
    "extension",
    "head_patterns",
    "needles",
]
