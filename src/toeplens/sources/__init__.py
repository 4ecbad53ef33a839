"""Sources of attention: models that can be traced, and replayed from a layer with changed heads.

Each kind of model has a folder here; all give the same traces and replays.
"""

from toeplens.sources.decoder.gradients import DecoderGradients
from toeplens.sources.decoder.propagation import relevance
from toeplens.sources.decoder.source import DecoderSource

__all__ = ["DecoderGradients", "DecoderSource", "relevance"]
