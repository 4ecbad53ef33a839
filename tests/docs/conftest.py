"""The recorded language models, as docs/real-models.md is written from them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.builders import script

from toeplens.papers.positional_symbolic.pretrained import Pretrained

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tool() -> ModuleType:
    return script(ROOT / "tools" / "findings.py")


@pytest.fixture(scope="session")
def found(tool: ModuleType) -> dict[str, Pretrained]:
    return tool.records()


@pytest.fixture(scope="session")
def smollm2(found: dict[str, Pretrained]) -> Pretrained:
    return found["SmolLM2"]


@pytest.fixture(scope="session")
def gemma3(found: dict[str, Pretrained]) -> Pretrained:
    return found["Gemma 3"]


@pytest.fixture(params=["SmolLM2", "Gemma 3"])
def either(request: pytest.FixtureRequest, found: dict[str, Pretrained]) -> Pretrained:
    return found[request.param]
