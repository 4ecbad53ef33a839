"""Evaluation of language models: bits per byte, longer texts, planted spans, context extension."""

from toeplens.engine.language.bits import AtLength, Bits, bits
from toeplens.engine.language.extension import Extended, Extension, extension
from toeplens.engine.language.planted import (
    Copied,
    Copying,
    HeadPatterns,
    Needle,
    Needles,
    copying,
    head_patterns,
    needles,
)

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
