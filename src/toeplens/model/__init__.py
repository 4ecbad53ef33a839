"""The decoder and its attention, built from a configuration and an encoding."""

from toeplens.model.attention import Attention, LatentAttention, attend, attention_weights
from toeplens.model.config import DecoderConfig, Protocol, decoder_config, protocol_switches
from toeplens.model.decoder import Block, Context, Decoder

__all__ = [
    "Attention",
    "Block",
    "Context",
    "Decoder",
    "DecoderConfig",
    "LatentAttention",
    "Protocol",
    "attend",
    "attention_weights",
    "decoder_config",
    "protocol_switches",
]
