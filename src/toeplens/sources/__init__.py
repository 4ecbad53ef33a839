"""Sources of attention: models that can be traced, and replayed from a layer with changed heads.

Each kind of model has a folder here; all give the same traces and replays.
"""

from typing import TYPE_CHECKING

from toeplens.ground.lazy import lazy

if TYPE_CHECKING:
    from toeplens.sources.decoder.gradients import DecoderGradients
    from toeplens.sources.decoder.propagation import relevance
    from toeplens.sources.decoder.source import DecoderSource

__all__ = ["DecoderGradients", "DecoderSource", "relevance"]
__getattr__ = lazy(__name__, __file__)
