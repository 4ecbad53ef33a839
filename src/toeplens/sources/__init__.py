"""Where attention comes from: sources that run a model, and run it again from a layer with heads changed."""

from toeplens.sources.decoder import DecoderSource
from toeplens.sources.gradients import DecoderGradients
from toeplens.sources.propagation import relevance

__all__ = ["DecoderGradients", "DecoderSource", "relevance"]
