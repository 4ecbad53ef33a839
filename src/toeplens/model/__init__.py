"""The decoder and its attention, built from a configuration and an encoding.

This package contains what the switches of `DecoderConfig` change in the model, but no training and no measurements.
"""

from toeplens.model.config import DecoderConfig, Protocol, decoder_config, protocol_switches, without_published_scale
from toeplens.model.decoder import Block, Decoder, DecoderAttention, LatentAttention, PassContext
from toeplens.utils.renamed import renamed_getattr

__all__ = [
    "Block",
    "Decoder",
    "DecoderAttention",
    "DecoderConfig",
    "LatentAttention",
    "PassContext",
    "Protocol",
    "decoder_config",
    "protocol_switches",
    "without_published_scale",
]
__getattr__ = renamed_getattr(__name__)
