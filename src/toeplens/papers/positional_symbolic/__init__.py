"""arXiv 2511.11579, positional and symbolic heads: grid files and claims."""

from pathlib import Path

_FILES = Path(__file__).parent / "specs"
CANONICAL = _FILES / "canonical.yaml"  # the study of the canonical tasks
CANONICAL_SMOKE = _FILES / "canonical-smoke.yaml"  # toy size

__all__ = ["CANONICAL", "CANONICAL_SMOKE"]
