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
from tests.tasks.readers import SAFE

from toeplens.tasks import build
from toeplens.tasks.corpus import SPLITS
from toeplens.tasks.synthetic import MarkovLanguage, NestedLanguage, SyntheticLanguage

Text = tuple[int, ...]
Told = tuple[Any, ...]  # what only the writer knows: where copies begin and of what

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


def falling(count: int) -> list[float]:
    """Shares as 1, 1/2, 1/3, ..."""
    total = sum(1 / rank for rank in range(1, count + 1))
    return [1 / rank / total for rank in range(1, count + 1)]


def ways(task: SyntheticLanguage) -> Iterator[tuple[Text, Told, float]]:
    """Every way in which a document can be written, by the rules as its docstring has them."""
    return _markov(task, (), (), 1.0) if isinstance(task, MarkovLanguage) else _nested(task, (), (), 1.0)


def _markov(task: MarkovLanguage, text: Text, told: Told, chance: float) -> Iterator[tuple[Text, Told, float]]:
    at = len(text)
    if at >= task.document:
        yield text[: task.document], told, chance
        return
    if at < task.order:
        for word in range(1, task.words + 1):
            yield from _markov(task, (*text, word), told, chance / task.words)
        return
    places = range(at - task.span + 1) if at >= task.order else ()
    copies = task.copy_rate if len(places) else 0.0
    for place in places if copies else ():
        copied = text[place : place + task.span]
        yield from _markov(task, text + copied, (*told, (at, place)), chance * copies / len(places))
    context = 0
    for word in text[at - task.order :]:
        context = task.words * context + word - 1
    for word, share in zip(_table(task)[context], falling(task.branches), strict=True):
        yield from _markov(task, (*text, 1 + int(word)), told, chance * (1 - copies) * share)


@cache
def _table(task: MarkovLanguage) -> np.ndarray:
    return task._followers()


def _nested(task: NestedLanguage, text: Text, open_: Text, chance: float) -> Iterator[tuple[Text, Told, float]]:
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
    for word, share in zip(order, falling(task.words), strict=True):
        if up + down < 1:
            token = 1 + 2 * task.kinds + int(word)
            yield from _nested(task, (*text, token), open_, chance * (1 - up - down) * share)


@cache
def _orders(task: NestedLanguage) -> list[np.ndarray]:
    rng = task.rng(0)
    return [rng.permutation(task.words) for _ in range(task.kinds + 1)]


def of(chances: Any) -> float:
    return -sum(chance * math.log(chance) for chance in chances if chance)


@cache
def shares(which: str) -> Counter[Text]:
    found: Counter[Text] = Counter()
    for text, _, chance in ways(tiny(which)):
        found[text] += chance  # pyright: ignore[reportArgumentType]
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found


@each_tiny
def test_the_entropy_is_that_of_all_texts(which: str):
    task, length = tiny(which), TINY[which][1]["document"]
    whole = of(shares(which).values()) / length
    if isinstance(task, NestedLanguage) or not task.copy_rate:
        assert task.entropy() == pytest.approx(whole, rel=1e-12)
        return
    assert isinstance(task, MarkovLanguage)
    copies: Counter[Told] = Counter()
    for _, told, chance in ways(task):
        copies[told] += chance  # pyright: ignore[reportArgumentType]
    joint = of(_joint(which).values()) / length
    assert task.entropy() + task.copies() == pytest.approx(joint, rel=1e-12)
    assert task.entropy() == pytest.approx(joint - of(copies.values()) / length, rel=1e-9)
    assert task.entropy() <= whole <= joint


def _joint(which: str) -> Counter[tuple[Text, Told]]:
    found: Counter[tuple[Text, Told]] = Counter()
    for text, told, chance in ways(tiny(which)):
        found[text, told] += chance  # pyright: ignore[reportArgumentType]
    return found


@each_tiny
def test_each_text_is_written_as_often_as_the_rules_say(which: str):
    task, many = tiny(which), 30_000
    texts = task.write()(np.random.Generator(np.random.Philox(5)), many)
    assert texts.shape == (many, task.document)
    found = Counter(tuple(text) for text in texts.tolist())
    assert found.keys() <= shares(which).keys()
    common = [text for text, share in shares(which).items() if many * share >= 5]
    wanted = np.array([many * shares(which)[text] for text in common])
    counted = np.array([found[text] for text in common])
    rest = many - wanted.sum()
    if rest >= 5:
        wanted, counted = np.append(wanted, rest), np.append(counted, many - counted.sum())
    assert stats.chisquare(counted, wanted * counted.sum() / wanted.sum()).pvalue > SAFE


def all_documents(task: SyntheticLanguage) -> set[bytes]:
    corpus = task.corpus()
    return {row.tobytes() for split in SPLITS for row in corpus.stream(split).reshape(-1, task.document + 1)}


@pytest.mark.parametrize("name", ["markov-language", "nested-language"])
def test_the_text_is_a_function_of_its_seed_and_more_begins_with_less(name: str, monkeypatch: pytest.MonkeyPatch):
    def language(**options: Any) -> SyntheticLanguage:
        task = build(name, document=30, **options)
        assert isinstance(task, SyntheticLanguage)
        return task

    few, more, other = language(documents=1000), language(documents=1500), language(documents=1000, text_seed=1)
    assert all_documents(few) < all_documents(more)
    assert len(all_documents(few) & all_documents(other)) < 10
    assert few.corpus() is few.at_length(7).corpus()
    assert len({task.corpus().sha256 for task in (few, more, other)}) == 3
    assert few.pinned() == {}


def test_documents_that_are_alike_count_once():
    task = build("markov-language", words=2, order=1, branches=2, copy_rate=0.0, documents=400, document=4, length=2)
    assert isinstance(task, SyntheticLanguage)
    assert sum(task.corpus().about["documents"].values()) == len(all_documents(task)) == 16
