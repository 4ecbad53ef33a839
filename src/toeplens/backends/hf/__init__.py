"""Attention of Hugging Face models: every attention call of a pass, decomposed and verified on its own input."""

from toeplens.backends.hf.calls import AttentionCall, Proof
from toeplens.backends.hf.capture import captured, compared
from toeplens.backends.hf.effects import (
    BandEffects,
    HeadEffects,
    NoGradient,
    NoPosition,
    band_effects,
    head_effects,
)
from toeplens.backends.hf.frames import as_tokens
from toeplens.backends.hf.interventions import Change, compared_changed, intervened
from toeplens.backends.hf.load import load_model, load_tokenizer
from toeplens.backends.hf.prediction import Predictions, predictions
from toeplens.backends.hf.rotation import Rotation

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
