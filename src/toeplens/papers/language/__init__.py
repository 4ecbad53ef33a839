"""Encodings in language models: grid files, and claims from the literature and ours."""

from pathlib import Path

_FILES = Path(__file__).parent / "specs"
LANGUAGE, LANGUAGE_SMOKE, LANGUAGE_LARGE = (
    _FILES / f"{name}.yaml" for name in ("language", "language-smoke", "language-large")
)

__all__ = ["LANGUAGE", "LANGUAGE_LARGE", "LANGUAGE_SMOKE"]
