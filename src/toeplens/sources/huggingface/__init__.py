"""Attention of Hugging Face models: every call of a pass, taken apart and proved on its own input."""

from toeplens.sources.huggingface.calls import AttentionCall
from toeplens.sources.huggingface.capture import captured
from toeplens.sources.huggingface.proof import Proof
from toeplens.sources.huggingface.rotation import Rotation

__all__ = ["AttentionCall", "Proof", "Rotation", "captured"]
