"""toeplens: a laboratory for positional information in Transformers."""

__version__ = "0.1.0"
