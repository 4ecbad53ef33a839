"""Where attention comes from: sources that can run a model and run it again from a layer with heads changed."""

from toeplens.sources.decoder import DecoderSource
from toeplens.sources.gradients import DecoderGradients

__all__ = ["DecoderGradients", "DecoderSource"]
