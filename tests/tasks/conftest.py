"""What the tests of all tasks check alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toeplens.ground import InputError
from toeplens.tasks import PAD, Examples, Task, build


@pytest.fixture(scope="session")
def assert_well_formed() -> Callable[[Task, Examples], None]:
    """Shapes, padding on the right and nowhere else, ids and labels that the task has."""

    def check(task: Task, examples: Examples) -> None:
        assert examples.tokens.shape == (len(examples), task.length)
        assert examples.labels.shape == examples.lengths.shape == (len(examples),)
        assert {examples.tokens.dtype, examples.labels.dtype, examples.lengths.dtype} == {np.dtype(np.int64)}
        inside = np.arange(task.length) < examples.lengths[:, None]
        assert (examples.tokens[~inside] == PAD).all()
        assert (examples.tokens[inside] > PAD).all()
        assert (examples.tokens < task.vocab_size).all()
        assert np.isin(examples.labels, list(task.labels)).all()

    return check


@pytest.fixture(scope="session")
def assert_refused() -> Callable[[str, dict[str, Any], str], None]:
    """A task that cannot be built is refused in one sentence, which says so."""

    def check(name: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError) as caught:
            build(name, **options)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    return check
