"""Sources of attention: models that can be traced, and replayed from a layer with changed heads.

Each kind of model has a folder here; all give the same traces and replays.
"""

from typing import TYPE_CHECKING

from toeplens.utils.lazy import lazy_getattr

if TYPE_CHECKING:
    from toeplens.backends.decoder.gradients import DecoderGradients
    from toeplens.backends.decoder.propagation import relevance
    from toeplens.backends.decoder.source import DecoderSource

__all__ = ["DecoderGradients", "DecoderSource", "relevance"]
__getattr__ = lazy_getattr(__name__, __file__)
