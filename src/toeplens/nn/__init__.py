"""Any encoding in your own model: an attention layer with a key cache (full example: examples/tiny_llama.py)."""

from toeplens.nn.attention import Attention, Cache

__all__ = ["Attention", "Cache"]
