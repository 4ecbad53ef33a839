"""Positional encodings behind one interface: `names()`, `build(name, ...)`, and the hooks of `PositionalEncoding`.

To add an encoding, write a class with a ``name`` in the file of its family: ``class RoPE(Rotary, name="rope")``.
"""

from toeplens.encodings.additive import OffsetBias
from toeplens.encodings.attention import MAX_SHARED_BIAS, attend, attention_logits, attention_weights, fixed_bias
from toeplens.encodings.base import AttentionInputs, Coupling, PositionalEncoding
from toeplens.encodings.composed import Composed, compose
from toeplens.encodings.kit import offsets_between
from toeplens.encodings.registry import build, canonical_name, get, load_errors, names, options, split_names
from toeplens.encodings.rotary import MLA, FrequencyMask, Rotary, swap_bands, with_frequency_mask
from toeplens.encodings.shapes import Positions
from toeplens.utils.renamed import renamed_getattr

__all__ = [
    "MAX_SHARED_BIAS",
    "MLA",
    "AttentionInputs",
    "Composed",
    "Coupling",
    "FrequencyMask",
    "OffsetBias",
    "PositionalEncoding",
    "Positions",
    "Rotary",
    "attend",
    "attention_logits",
    "attention_weights",
    "build",
    "canonical_name",
    "compose",
    "fixed_bias",
    "get",
    "load_errors",
    "names",
    "offsets_between",
    "options",
    "split_names",
    "swap_bands",
    "with_frequency_mask",
]
__getattr__ = renamed_getattr(__name__)
