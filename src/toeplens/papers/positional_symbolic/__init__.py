"""arXiv 2511.11579, positional and symbolic heads: its grid files, and the claims on them."""

from pathlib import Path

_FILES = Path(__file__).parent / "specs"
CANONICAL, CANONICAL_SMOKE = _FILES / "canonical.yaml", _FILES / "canonical-smoke.yaml"

__all__ = ["CANONICAL", "CANONICAL_SMOKE"]
