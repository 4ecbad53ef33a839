"""What the tests of all tasks share: examples that are drawn and read, and what is checked of them alike."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from toeplens.tasks import PAD, Examples, Language, Split, Task, build
from toeplens.tasks.corpus import Corpus

SAFE = 1e-4  # every draw here is seeded, so a statistic passes always or never


def draw(task: Task, count: int, seed: int = 0) -> Examples:
    return task.draw(np.random.Generator(np.random.Philox(seed)), count, seed)


def texts(examples: Examples) -> list[tuple[list[int], int]]:
    """Each text without its padding, and its label."""
    found = zip(examples.tokens.tolist(), examples.lengths.tolist(), examples.labels.tolist(), strict=True)
    return [(row[:length], label) for row, length, label in found]


def assert_even(counts: dict[Any, int], support: Iterable[Any]) -> None:
    """All of ``support`` occurs, nothing else, and as often by a chi-square test."""
    assert counts.keys() == set(support)
    assert stats.chisquare(list(counts.values())).pvalue > SAFE


def rows(tokens: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


def same(a: Examples, b: Examples) -> bool:
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("tokens", "labels", "lengths"))


def assert_well_formed(task: Task, examples: Examples) -> None:
    """Shapes, padding on the right and nowhere else, ids and labels that the task has; of each token the next one."""
    assert examples.tokens.shape == (len(examples), task.length)
    assert examples.lengths.shape == (len(examples),)
    assert {examples.tokens.dtype, examples.labels.dtype, examples.lengths.dtype} == {np.dtype(np.int64)}
    if task.each:
        assert examples.labels.shape == examples.tokens.shape
        assert (examples.labels[:, :-1] == examples.tokens[:, 1:]).all()
        assert (examples.lengths == task.length).all()
        assert (examples.tokens >= 0).all()
    else:
        assert examples.labels.shape == (len(examples),)
        inside = np.arange(task.length) < examples.lengths[:, None]
        assert (examples.tokens[~inside] == PAD).all()
        assert (examples.tokens[inside] > PAD).all()
    assert (examples.tokens < task.vocab_size).all()
    assert np.isin(examples.labels, list(task.labels)).all()


def language(*text: Path, **options: Any) -> Language:
    task = build("language", text=[str(path) for path in text], **options)
    assert isinstance(task, Language)
    return task


def written(folder: Path, texts: list[bytes]) -> Path:
    """A folder with a file for each text."""
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:04}.txt").write_bytes(text)
    return folder


def documents_of(corpus: Corpus, split: Split) -> list[np.ndarray]:
    """The tokens of each document, without its separator."""
    stream, starts = corpus.stream(split), corpus.starts(split)
    return [np.asarray(stream[a : b - 1]) for a, b in pairwise(starts)]
