"""Languages that are made up: texts as often as their rules say, and their entropy as counted over all texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.tasks.readers import P_VALUE

from toeplens.tasks import build
from toeplens.tasks.corpus import SPLITS
from toeplens.tasks.synthetic import MarkovLanguage, NestedLanguage, SyntheticLanguage

Text = tuple[int, ...]
State = tuple[Any, ...]  # what only the writer knows: where copies begin and of what

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "markov": ("markov-language", {"words": 3, "order": 1, "branches": 2, "copy_rate": 0.0, "document": 5}),
    "copies": ("markov-language", {"words": 3, "order": 1, "branches": 2, "copy_rate": 0.4, "span": 2, "document": 5}),
    "short copies": (
        "markov-language",
        {"words": 3, "order": 2, "branches": 2, "copy_rate": 0.3, "span": 1, "document": 5},
    ),
    "long copies": (
        "markov-language",
        {"words": 2, "order": 1, "branches": 1, "copy_rate": 0.5, "span": 3, "document": 8},
    ),
    "nested": ("nested-language", {"kinds": 2, "max_depth": 2, "words": 2, "opens": 0.4, "closes": 0.3, "document": 4}),
    "deep": ("nested-language", {"kinds": 1, "max_depth": 9, "words": 2, "opens": 0.6, "closes": 0.1, "document": 4}),
}
each_tiny = pytest.mark.parametrize("which", TINY)


def tiny(which: str) -> SyntheticLanguage:
    name, options = TINY[which]
    task = build(name, **options)
    assert isinstance(task, SyntheticLanguage)
    return task


def zipf_shares(count: int) -> list[float]:
    """Shares as 1, 1/2, 1/3, ..."""
    total = sum(1 / rank for rank in range(1, count + 1))
    return [1 / rank / total for rank in range(1, count + 1)]


def writings_with_chances(task: SyntheticLanguage) -> Iterator[tuple[Text, State, float]]:
    """Every way in which a document can be written, by the rules as its docstring has them."""
    return _markov(task, (), (), 1.0) if isinstance(task, MarkovLanguage) else _nested(task, (), (), 1.0)


def _markov(task: MarkovLanguage, text: Text, state: State, chance: float) -> Iterator[tuple[Text, State, float]]:
    end = len(text)
    if end >= task.document:
        yield text[: task.document], state, chance
        return
    if end < task.order:
        for word in range(1, task.words + 1):
            yield from _markov(task, (*text, word), state, chance / task.words)
        return
    places = range(end - task.span + 1) if end >= task.order else ()
    copies = task.copy_rate if len(places) else 0.0
    for position in places if copies else ():
        copied = text[position : position + task.span]
        yield from _markov(task, text + copied, (*state, (end, position)), chance * copies / len(places))
    context = 0
    for word in text[end - task.order :]:
        context = task.words * context + word - 1
    for word, share in zip(_table(task)[context], zipf_shares(task.branches), strict=True):
        yield from _markov(task, (*text, 1 + int(word)), state, chance * (1 - copies) * share)


@cache
def _table(task: MarkovLanguage) -> np.ndarray:
    return task._next_words()


def _nested(task: NestedLanguage, text: Text, open_: Text, chance: float) -> Iterator[tuple[Text, State, float]]:
    if len(text) == task.document:
        yield text, (), chance
        return
    up = task.opens if len(open_) < task.max_depth else 0.0
    down = task.closes if open_ else 0.0
    for kind in range(task.kinds) if up else ():
        yield from _nested(task, (*text, 1 + kind), (*open_, kind), chance * up / task.kinds)
    if down:
        yield from _nested(task, (*text, 1 + task.kinds + open_[-1]), open_[:-1], chance * down)
    order = _orders(task)[open_[-1] if open_ else task.kinds]
    for word, share in zip(order, zipf_shares(task.words), strict=True):
        if up + down < 1:
            token = 1 + 2 * task.kinds + int(word)
            yield from _nested(task, (*text, token), open_, chance * (1 - up - down) * share)


@cache
def _orders(task: NestedLanguage) -> list[np.ndarray]:
    rng = task.rng(0)
    return [rng.permutation(task.words) for _ in range(task.kinds + 1)]


def distribution_of(chances: Any) -> float:
    return -sum(chance * math.log(chance) for chance in chances if chance)


@cache
def prefix_shares(which: str) -> Counter[Text]:
    result: Counter[Text] = Counter()
    for text, _, chance in writings_with_chances(tiny(which)):
        result[text] += chance  # pyright: ignore[reportArgumentType]
    assert sum(result.values()) == pytest.approx(1, abs=1e-12)
    return result


@each_tiny
def test_the_entropy_matches_enumeration(which: str):
    task, length = tiny(which), TINY[which][1]["document"]
    entropy_per_token = distribution_of(prefix_shares(which).values()) / length
    if isinstance(task, NestedLanguage) or not task.copy_rate:
        assert task.entropy() == pytest.approx(entropy_per_token, rel=1e-12)
        return
    assert isinstance(task, MarkovLanguage)
    copies: Counter[State] = Counter()
    for _, state, chance in writings_with_chances(task):
        copies[state] += chance  # pyright: ignore[reportArgumentType]
    joint = distribution_of(joint_chances(which).values()) / length
    assert task.entropy() + task.copy_entropy() == pytest.approx(joint, rel=1e-12)
    assert task.entropy() == pytest.approx(joint - distribution_of(copies.values()) / length, rel=1e-9)
    assert task.entropy() <= entropy_per_token <= joint


def joint_chances(which: str) -> Counter[tuple[Text, State]]:
    result: Counter[tuple[Text, State]] = Counter()
    for text, state, chance in writings_with_chances(tiny(which)):
        result[text, state] += chance  # pyright: ignore[reportArgumentType]
    return result


@each_tiny
def test_sequence_frequencies_match_the_rules(which: str):
    task, many = tiny(which), 30_000
    texts = task.build_writer()(np.random.Generator(np.random.Philox(5)), many)
    assert texts.shape == (many, task.document)
    actual = Counter(tuple(text) for text in texts.tolist())
    assert actual.keys() <= prefix_shares(which).keys()
    common = [text for text, share in prefix_shares(which).items() if many * share >= 5]
    expected = np.array([many * prefix_shares(which)[text] for text in common])
    counted = np.array([actual[text] for text in common])
    others = many - expected.sum()
    if others >= 5:
        expected, counted = np.append(expected, others), np.append(counted, many - counted.sum())
    assert stats.chisquare(counted, expected * counted.sum() / expected.sum()).pvalue > P_VALUE


def all_documents(task: SyntheticLanguage) -> set[bytes]:
    corpus = task.corpus()
    return {row.tobytes() for split in SPLITS for row in corpus.stream(split).reshape(-1, task.document + 1)}


@pytest.mark.parametrize("name", ["markov-language", "nested-language"])
def test_the_text_is_determined_by_its_seed_and_extends_shorter_text(name: str, monkeypatch: pytest.MonkeyPatch):
    def language(**options: Any) -> SyntheticLanguage:
        task = build(name, document=30, **options)
        assert isinstance(task, SyntheticLanguage)
        return task

    few, more, other = language(documents=1000), language(documents=1500), language(documents=1000, text_seed=1)
    assert all_documents(few) < all_documents(more)
    assert len(all_documents(few) & all_documents(other)) < 10
    assert few.corpus() is few.at_length(7).corpus()
    assert len({task.corpus().sha256 for task in (few, more, other)}) == 3
    assert few.pinned_options() == {}


def test_duplicate_documents_count_once():
    task = build("markov-language", words=2, order=1, branches=2, copy_rate=0.0, documents=400, document=4, length=2)
    assert isinstance(task, SyntheticLanguage)
    assert sum(task.corpus().metadata["documents"].values()) == len(all_documents(task)) == 16
