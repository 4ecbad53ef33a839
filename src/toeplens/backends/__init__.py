"""Sources of attention: models that can be traced, and replayed from a layer with changed heads.

Each kind of model has a folder here; all give the same traces and replays.
"""

from toeplens.backends.decoder import DecoderSource
from toeplens.backends.gradients import DecoderGradients
from toeplens.backends.propagation import relevance

__all__ = ["DecoderGradients", "DecoderSource", "relevance"]
