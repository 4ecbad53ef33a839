"""Where attention comes from: sources that run a model, and run it again from a layer with heads changed.

A new kind of model is a room here that gives the same traces and replays as the others.
"""

from toeplens.sources.decoder.gradients import DecoderGradients
from toeplens.sources.decoder.propagation import relevance
from toeplens.sources.decoder.source import DecoderSource

__all__ = ["DecoderGradients", "DecoderSource", "relevance"]
