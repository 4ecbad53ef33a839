"""Use any encoding in a transformers model: install, train, save, load and uninstall it."""

from toeplens.sources.huggingface.install import Host, install, uninstall
from toeplens.sources.huggingface.load import load

__all__ = ["Host", "install", "load", "uninstall"]
