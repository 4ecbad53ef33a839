"""How many sequences of the released Task 1 are ambiguous, as docs/reference/tasks.md says: all readings are tried."""

from __future__ import annotations

import re
from collections import Counter
from math import exp, lgamma
from pathlib import Path

import numpy as np
import pytest

from toeplens import tasks
from toeplens.tasks.triggers import TriggerDistance
from toeplens.training.presets import DISTANCE, PRESETS

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "tasks.md").read_text(encoding="utf-8")
SCALES = ("desk", "laptop", "paper")
MANY = 1500


def readings(task: TriggerDistance, text: np.ndarray, first: int, second: int, words: int) -> Counter[int]:
    """Each distance that a text may have been made with, weighed by how likely it is to have been made so.

    A segment is drawn without replacement, so that its likelihood is one over the falling factorial of the words.
    """
    found: Counter[int] = Counter()
    for left in np.flatnonzero(text == first):
        for place in np.flatnonzero(text == second):
            between, right = int(place - left - 1), len(text) - int(place) - 1
            segments = text[:left], text[left + 1 : place], text[place + 1 :]
            ends = [
                end for end in range(1, task.max_side + 1) if end == right or (len(text) == task.cut and end > right)
            ]
            if (
                1 <= left <= task.max_side
                and 1 <= between <= task.max_between
                and all(len(set(segment)) == len(segment) for segment in segments)
            ):
                likely = sum(lgamma(words - len(segment) + 1) - lgamma(words + 1) for segment in segments)
                found[between + 1] += len(ends) * exp(likely)  # type: ignore[assignment]
    return +found


@pytest.mark.heavy
@pytest.mark.parametrize("scale", SCALES)
def test_so_many_texts_can_be_read_in_more_than_one_way(scale: str) -> None:
    preset = PRESETS[scale]
    words = preset.model["vocab_size"] - 1
    task = tasks.build(DISTANCE, form="released", vocab_size=words + 1, **preset.tasks[DISTANCE].released)
    assert isinstance(task, TriggerDistance)
    first, second = task.marked_words(100)
    examples = task.dataset("test", MANY, 100)
    several, best = 0, 0.0
    for tokens, label, length in zip(examples.tokens, examples.labels, examples.lengths, strict=True):
        found = readings(task, tokens[:length], first, second, words)
        assert label in found
        several += len(found) > 1
        best += max(found.values()) / sum(found.values())
    row = re.search(rf"^\| `{scale}` \| (\d+)% \| (\d+)% \|$", TEXT, re.M)
    assert row is not None
    share, most = (int(number) / 100 for number in row.groups())
    assert several / MANY == pytest.approx(share, abs=0.02)
    assert best / MANY == pytest.approx(most, abs=0.012)
