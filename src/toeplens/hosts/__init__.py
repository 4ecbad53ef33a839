"""Any encoding in a model of transformers: installed in memory, trained, saved, opened again, taken out."""

from toeplens.sources.huggingface.hosts.host import Host, install, uninstall
from toeplens.sources.huggingface.loading import load

__all__ = ["Host", "install", "load", "uninstall"]
