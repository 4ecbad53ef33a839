"""A cache of corpora of a test's own."""

from __future__ import annotations

import pytest


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty cache."""
    place = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("TOEPLENS_CACHE", place)
    return place
