"""Any encoding in a model of your own: an attention layer with a key cache, and a small decoder made of it."""

from toeplens.nn.attention import Attention
from toeplens.nn.cache import Cache
from toeplens.nn.generation import generate
from toeplens.nn.transformer import Transformer

__all__ = ["Attention", "Cache", "Transformer", "generate"]
