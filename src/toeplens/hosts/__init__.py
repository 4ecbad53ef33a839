"""Use any encoding in a transformers model: install, train, save, load and uninstall it."""

from toeplens.sources.huggingface.hosts.host import Host, install, uninstall
from toeplens.sources.huggingface.loading import load

__all__ = ["Host", "install", "load", "uninstall"]
