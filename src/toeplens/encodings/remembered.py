"""To be written."""

from __future__ import annotations

from toeplens.encodings.base import PositionalEncoding

ENCODINGS: dict[str, type[PositionalEncoding]] = {}
