"""The decoder and its attention, built from a configuration and an encoding.

This package contains what the switches of `DecoderConfig` change in the model, but no training and no measurements.
"""

from toeplens.model.config import DecoderConfig, Protocol, decoder_config, protocol_switches, scale_left_open
from toeplens.model.decoder import Attention, Block, Context, Decoder, LatentAttention

__all__ = [
    "Attention",
    "Block",
    "Context",
    "Decoder",
    "DecoderConfig",
    "LatentAttention",
    "Protocol",
    "decoder_config",
    "protocol_switches",
    "scale_left_open",
]
