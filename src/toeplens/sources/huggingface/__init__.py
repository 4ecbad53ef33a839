"""Attention of Hugging Face models: every attention call of a pass, decomposed and verified on its own input."""

from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.passes import captured, compared
from toeplens.sources.huggingface.capture.proof import Proof
from toeplens.sources.huggingface.capture.rotation import Rotation
from toeplens.sources.huggingface.effects.head_effects import (
    BandEffects,
    HeadEffects,
    NoGradient,
    NoPosition,
    band_effects,
    head_effects,
)
from toeplens.sources.huggingface.frames import as_tokens
from toeplens.sources.huggingface.interventions.change import Change, compared_changed, intervened
from toeplens.sources.huggingface.loading import load_model, load_tokenizer
from toeplens.sources.huggingface.prediction import Predictions, predictions

__all__ = [
    "AttentionCall",
    "BandEffects",
    "Change",
    "HeadEffects",
    "NoGradient",
    "NoPosition",
    "Predictions",
    "Proof",
    "Rotation",
    "as_tokens",
    "band_effects",
    "captured",
    "compared",
    "compared_changed",
    "head_effects",
    "intervened",
    "load_model",
    "load_tokenizer",
    "predictions",
]
