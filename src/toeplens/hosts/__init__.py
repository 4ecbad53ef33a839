"""Use any encoding in a transformers model: install, train, save, load and uninstall it."""

from toeplens.backends.hf.install import Host, install, uninstall
from toeplens.backends.hf.load import load

__all__ = ["Host", "install", "load", "uninstall"]
