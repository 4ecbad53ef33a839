"""For tests of the lens."""

from __future__ import annotations

import pytest
from jaxtyping import config


@pytest.fixture
def checked(unchecked: None) -> None:
    """Shapes are checked all the same, in a file whose tests are `unchecked`."""
    config.update("jaxtyping_disable", False)
