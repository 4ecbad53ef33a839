"""The decoder and its attention, built from a configuration and an encoding.

Here goes what a switch of `DecoderConfig` changes in the model, and nothing that trains or measures it.
"""

from toeplens.model.attention import Attention, LatentAttention
from toeplens.model.config import DecoderConfig, Protocol, decoder_config, protocol_switches, scale_left_open
from toeplens.model.decoder import Block, Context, Decoder

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
