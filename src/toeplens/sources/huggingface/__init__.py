"""Attention of Hugging Face models: every call of a pass, taken apart and proved on its own input."""

from toeplens.sources.huggingface.calls import AttentionCall
from toeplens.sources.huggingface.capture import captured
from toeplens.sources.huggingface.effects import HeadEffects, NoGradient, head_effects
from toeplens.sources.huggingface.loading import load_model, load_tokenizer
from toeplens.sources.huggingface.proof import Proof
from toeplens.sources.huggingface.rotation import Rotation
from toeplens.sources.huggingface.whole import compared

__all__ = [
    "AttentionCall",
    "HeadEffects",
    "NoGradient",
    "Proof",
    "Rotation",
    "captured",
    "compared",
    "head_effects",
    "load_model",
    "load_tokenizer",
]
