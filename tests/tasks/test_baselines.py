"""Rules that need no model, against rules written out text by text, and on texts that give the answer away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from tests.tasks.reading import texts

from toeplens.ground import InputError
from toeplens.tasks import Examples, Task, build, trivial_baselines

FACTS: dict[str, Callable[[list[int]], int]] = {
    "constant": lambda text: 0,
    "length": len,
    "first": lambda text: text[0],
    "last": lambda text: text[-1],
    "last but one": lambda text: text[-2] if len(text) > 1 else 0,
    "most frequent": lambda text: min(text, key=lambda word: (-text.count(word), word)),
}


def draw(task: Task, count: int, seed: int) -> Examples:
    """Examples of one data set, whatever the seed: its special words are the same."""
    return task.draw(np.random.Generator(np.random.Philox(seed)), count, 0)


def commonest(labels: list[int]) -> int:
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label))


def by_fact(fact: Callable[[list[int]], int], train: Examples, test: Examples) -> float:
    told: dict[int, list[int]] = {}
    for text, label in texts(train):
        told.setdefault(fact(text), []).append(label)
    usual = commonest(train.labels.tolist())
    hits = [(commonest(told[fact(text)]) if fact(text) in told else usual) == label for text, label in texts(test)]
    return sum(hits) / len(hits)


def by_bag(train: Examples, test: Examples) -> float:
    vocab_size = 1 + max(int(train.tokens.max()), int(test.tokens.max()))
    bags: dict[int, Counter[int]] = {}
    seen = Counter(train.labels.tolist())
    for text, label in texts(train):
        bags.setdefault(label, Counter()).update(text)
    hits = 0
    for text, label in texts(test):
        score = {
            each: math.log(seen[each] / len(train))
            + sum(math.log((bag[word] + 1) / (bag.total() + vocab_size)) for word in text)
            for each, bag in bags.items()
        }
        hits += max(sorted(score), key=score.__getitem__) == label
    return hits / len(test)


CASES = {
    "sort": build("sort", length=12, words=5),
    "recall": build("recall", length=14, keys=4, values=3, pairs=3, queries=2, distractors=2),
    "depth": build("dyck", ask="depth", length=9, min_length=2, max_depth=3),
    "distance": build("trigger-distance", form="released", length=20, vocab_size=40, max_between=6, max_side=4),
}


@pytest.mark.parametrize("which", CASES)
def test_the_rules_score_what_they_score_text_by_text(which: str):
    train, test = draw(CASES[which], 300, 0), draw(CASES[which], 200, 1)
    found = trivial_baselines(train, test)
    assert list(found) == [*FACTS, "bag"]
    for name, fact in FACTS.items():
        assert found[name] == pytest.approx(by_fact(fact, train, test), abs=1e-12), name
    assert found["bag"] == pytest.approx(by_bag(train, test), abs=1e-12)


@pytest.mark.parametrize(("rule", "place"), [("first", 0), ("last but one", -2), ("last", -1)])
def test_an_answer_that_is_given_away_is_found(rule: str, place: int):
    task = build("parity", length=12)
    train, test = draw(task, 500, 0), draw(task, 500, 1)
    assert max(trivial_baselines(train, test).values()) < 0.65
    for examples in (train, test):
        examples.tokens[:, place] = 5 + examples.labels
    assert trivial_baselines(train, test)[rule] == 1


def test_the_constant_scores_chance_and_the_length_what_it_tells():
    task = build("dyck", ask="depth", length=9, min_length=2, max_depth=3)
    found = trivial_baselines(draw(task, 9000, 0), draw(task, 9000, 1))
    assert found["constant"] == pytest.approx(task.chance(), abs=0.02)
    assert found["length"] == pytest.approx(task.length_chance(), abs=0.02)


@pytest.mark.parametrize("field", ["train", "test"])
def test_an_empty_set_is_refused(field: str):
    sets = {name: draw(build("parity"), 3, 0) for name in ("train", "test")}
    sets[field] = sets[field][:0]
    with pytest.raises(InputError, match=f"^{field} must have at least one example, got none"):
        trivial_baselines(**sets)
