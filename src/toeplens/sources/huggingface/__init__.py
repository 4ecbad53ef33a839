"""Attention of Hugging Face models: every attention call of a pass, decomposed and verified on its own input."""

from toeplens.sources.huggingface.calls import AttentionCall, Proof
from toeplens.sources.huggingface.capture import captured, compared
from toeplens.sources.huggingface.effects import (
    BandEffects,
    HeadEffects,
    NoGradient,
    NoPosition,
    band_effects,
    head_effects,
)
from toeplens.sources.huggingface.frames import as_tokens
from toeplens.sources.huggingface.interventions import Change, compared_changed, intervened
from toeplens.sources.huggingface.load import load_model, load_tokenizer
from toeplens.sources.huggingface.prediction import Predictions, predictions
from toeplens.sources.huggingface.rotation import Rotation

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
