"""The version, below everything that records it."""

__version__ = "0.2.0"
