"""Attention of Hugging Face models: every attention call of a pass, decomposed and verified on its own input."""

from toeplens.backends.hf.calls import AttentionCall, Proof
from toeplens.backends.hf.capture import capture_and_compare, capture_attention
from toeplens.backends.hf.effects import (
    BandEffects,
    HeadEffects,
    NoGradient,
    NoPosition,
    band_effects,
    head_effects,
)
from toeplens.backends.hf.frame_inputs import as_tokens
from toeplens.backends.hf.interventions import Change, capture_changed, intervene
from toeplens.backends.hf.load import load_model, load_tokenizer
from toeplens.backends.hf.prediction import Predictions, predict_tokens
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
    "capture_and_compare",
    "capture_attention",
    "capture_changed",
    "head_effects",
    "intervene",
    "load_model",
    "load_tokenizer",
    "predict_tokens",
]
