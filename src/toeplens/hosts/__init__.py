"""Use any encoding in a transformers model: install, train, save, load and uninstall it."""

from toeplens.backends.hf.install import PatchedModel, install, uninstall
from toeplens.backends.hf.load import load
from toeplens.utils.renamed import renamed_getattr

__all__ = ["PatchedModel", "install", "load", "uninstall"]
__getattr__ = renamed_getattr(__name__)
