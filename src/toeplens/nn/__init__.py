"""Any encoding in a model of your own: an attention layer with a key cache (a model of it: examples/tiny_llama.py)."""

from toeplens.nn.attention import Attention
from toeplens.nn.cache import Cache

__all__ = ["Attention", "Cache"]
