"""Evaluation of language models: bits per byte, longer texts, planted spans, context extension."""

from toeplens.engine.language.bits import BitsPerByte, LengthBits, bits_per_byte
from toeplens.engine.language.context_use import (
    Copying,
    CopyingRow,
    HeadPatterns,
    NeedleRow,
    Needles,
    copying,
    head_patterns,
    needles,
)
from toeplens.engine.language.extension import Extension, ExtensionRow, extension

__all__ = [
    "BitsPerByte",
    "Copying",
    "CopyingRow",
    "Extension",
    "ExtensionRow",
    "HeadPatterns",
    "LengthBits",
    "NeedleRow",
    "Needles",
    "bits_per_byte",
    "copying",
    "extension",
    "head_patterns",
    "needles",
]
