"""What holds for every task: examples from a seed, train apart from test, chance as counted, other lengths.

Languages, which have a label at every token, have their own splits, ends and chance: what holds for each of them is in
``test_language.py``, but for what is asked here of every name.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.tasks.readers import P_VALUE, READERS, SEED, assert_well_formed, draw_examples, rows, same, texts

from toeplens import tasks
from toeplens.tasks import PAD, Examples, Task, build
from toeplens.utils import InputError

COUNT = 8_000

# Small, so that every label is seen often, with every option away from its default somewhere; and a longer length.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "distance": ("trigger-distance", {"length": 9, "vocab_size": 20, "num_triggers": 3}, 15),
    "distance-ordered": ("trigger-distance", {"length": 9, "vocab_size": 20, "max_distance": 5, "ordered": True}, 15),
    "distance-released": (
        "trigger-distance",
        {"form": "released", "length": 20, "vocab_size": 40, "max_between": 6, "max_side": 4, "cut": 15},
        30,
    ),
    "count": ("trigger-count", {"length": 9, "vocab_size": 20, "num_triggers": 5}, 15),
    "count-released": ("trigger-count", {"form": "released", "length": 12, "words": 9, "vocab_size": 50}, 30),
    "index": ("index", {"length": 10, "words": 5}, 17),
    "index-from-end": ("index", {"length": 12, "min_length": 7, "words": 5, "positions": 4, "from_end": True}, 20),
    "retrieval": (
        "retrieval",
        {"length": 9, "min_length": 6, "keys": 5, "values": 4, "pairs": 3, "distractors": 6},
        20,
    ),
    "retrieval-bare": ("retrieval", {"length": 7, "keys": 7, "values": 4, "pairs": 5, "distractors": 0}, 8),
    "mix": ("mix", {"length": 10, "min_length": 9, "words": 6, "keys": 4, "placed": 3, "min_offset": -2}, 18),
    "mix-one-offset": ("mix", {"length": 10, "words": 6, "keys": 4, "placed": 3, "min_offset": 2, "max_offset": 2}, 18),
    "recall": ("recall", {"length": 13, "keys": 5, "values": 4, "pairs": 3, "queries": 2, "distractors": 3}, 21),
    "recall-bare": ("recall", {"length": 14, "keys": 8, "values": 4, "pairs": 4, "queries": 3, "distractors": 0}, 21),
    "number-hops": ("number-hops", {"length": 10, "min_length": 8, "links": 4, "hops": 2, "distractors": 5}, 17),
    "letter-hops": ("letter-hops", {"length": 9, "links": 5, "hops": 3, "min_hops": 1, "distractors": 4}, 16),
    "region": ("contextual-count", {"length": 15, "min_length": 13, "regions": 2, "max_count": 3, "words": 3}, 24),
    "parity": ("parity", {"length": 16, "min_length": 12, "marks": 2, "words": 3}, 25),
    "member": ("dyck", {"length": 14, "min_length": 9, "kinds": 3, "max_depth": 4}, 20),
    "depth": ("dyck", {"length": 14, "min_length": 3, "max_depth": 5, "ask": "depth"}, 20),
    "copy": ("copy", {"length": 13, "min_items": 4, "words": 5}, 20),
    "reverse": ("reverse", {"length": 12, "min_items": 5, "words": 5}, 20),
    "sort": ("sort", {"length": 12, "min_items": 4, "words": 5}, 20),
    "sort-unique": ("sort", {"length": 12, "min_items": 4, "words": 11, "repeats": False}, 20),
    "addition": ("addition", {"length": 15, "min_digits": 2, "base": 6}, 24),
    "addition-padded": ("addition", {"length": 14, "min_digits": 2, "base": 7, "padded": True}, 24),
    "addition-least": ("addition", {"length": 12, "base": 3, "order": "least-first"}, 24),
}
each_case = pytest.mark.parametrize("which", CASES)
each_task = pytest.mark.parametrize("which", {name: which for which, (name, *_) in reversed(CASES.items())}.values())


def task_of(which: str) -> Task:
    name, options, _ = CASES[which]
    return build(name, **options)


@cache
def examples_of(which: str) -> Examples:
    return draw_examples(task_of(which), COUNT)


def test_every_task_has_a_test_case_and_a_reader():
    assert (
        READERS.keys()
        == {name for name, _, _ in CASES.values()}
        == {name for name in tasks.names() if not tasks.get(name).per_token}
    )
    assert tasks.names()[:2] == ("trigger-distance", "trigger-count")


def resized_task(which: str, draws: st.DataObject) -> Task | None:
    """The task of a case with other numbers; None if they do not fit."""
    name, options, _ = CASES[which]
    other = {
        key: draws.draw(st.integers(max(1, value - 3), value + 3)) if type(value) is int and value > 0 else value
        for key, value in options.items()
    }
    try:
        return build(name, **other)
    except InputError:
        return None


@each_case
@given(draws=st.data())
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_a_reader_finds_each_label_at_any_size(which: str, draws: st.DataObject):
    task = resized_task(which, draws)
    assume(task is not None)
    assert task is not None
    longer = [task]
    with suppress(InputError):  # of pairs alone, no more fit
        longer.append(task.at_length(task.length + 6))
    for each in longer:
        examples = draw_examples(each, 50, SEED)
        assert_well_formed(each, examples)
        assert examples.lengths.min() >= getattr(each, "shortest", 1) or not getattr(each, "distractors", 1)
        for text, label in texts(examples):
            actual = READERS[each.name](each, text)
            assert label in (actual if isinstance(actual, set) else {actual})


@pytest.mark.parametrize("name", tasks.names())
def test_the_defaults_make_a_task(name: str):
    task = build(name)
    assert isinstance(task, tasks.get(name))
    assert task.name == name
    assert task.answer in ("position", "content", "both")
    assert max(task.labels) < task.vocab_size  # a decoder has as many classes as tokens unless told otherwise
    assert "self" not in tasks.options(name)
    assert "length" in tasks.options(name)
    assert 0 < task.chance() <= task.length_chance() <= 1
    assert task.eval_split in ("test", "validation")
    assert_well_formed(task, draw_examples(task, 200))


@each_task
def test_a_synthetic_task_has_two_splits_and_no_pinned_data(which: str):
    task = task_of(which)
    assert (task.per_token, task.eval_split, task.pinned_options()) == (False, "test", {})
    with pytest.raises(InputError, match=r"^split must be one of test, train, got 'validation'"):
        task.dataset("validation", 1, seed=0)
    with pytest.raises(InputError, match=r"^test_examples must be at least 1, got 0"):
        task.dataset("test", 0, seed=0)


@each_task
def test_a_data_set_is_determined_by_its_seed_and_streams(which: str):
    task = task_of(which)
    for split in ("train", "test"):
        once = task.dataset(split, 300, seed=3)
        assert same(once, task_of(which).dataset(split, 300, seed=3))
        assert not np.array_equal(once.tokens, task.dataset(split, 300, seed=4).tokens)
        assert same(next(task.stream(split, 3))[:300], once)


@each_task
def test_train_and_test_are_disjoint(which: str):
    task = task_of(which)
    train = task.dataset("train", 1500, seed=0)
    for test in (task.dataset("test", 1500, seed) for seed in (0, 1)):
        assert len(rows(train.tokens)) == len(rows(test.tokens)) == 1500
        assert not rows(train.tokens) & rows(test.tokens)
        assert not rows(task.split_key(train)) & rows(task.split_key(test))


@pytest.mark.parametrize("which", [which for which in CASES if which != "distance-released"])  # it states none
def test_the_joint_distribution_of_length_and_label_matches_the_task(which: str):
    task, examples = task_of(which), examples_of(which)
    lengths, labels = np.unique(examples.lengths), list(task.labels)
    counts = np.zeros((len(lengths), len(labels)))
    np.add.at(counts, (np.searchsorted(lengths, examples.lengths), examples.labels - labels[0]), 1)
    stated = task.shares()
    if stated is None:
        expected = np.repeat(counts.sum(axis=1, keepdims=True) / len(labels), len(labels), axis=1)
    else:
        assert stated.sum() == pytest.approx(1, abs=1e-12)
        expected = COUNT * stated[stated.any(axis=1)]
    assert counts.shape == expected.shape
    assert not counts[expected == 0].any()
    common = expected >= 5
    actual = np.append(counts[common], counts[~common].sum())
    target = np.append(expected[common], expected[~common].sum())
    possible = target > 0
    assert stats.chisquare(actual[possible], target[possible] * actual.sum() / target.sum()).pvalue > P_VALUE


@each_case
def test_chance_levels_are_the_accuracy_of_the_best_guess(which: str):
    """With no knowledge, and from the length alone."""
    task, drawn_ones = task_of(which), examples_of(which)
    for ignored in (None, int(np.bincount(drawn_ones.labels).argmax())):
        examples = drawn_ones[drawn_ones.labels != ignored]
        half = len(examples) // 2
        learn, check = examples[:half], examples[half:]
        best = {n: np.bincount(learn.labels[learn.lengths == n]).argmax() for n in np.unique(learn.lengths)}
        hits = np.mean([best.get(n, -1) == label for n, label in zip(check.lengths, check.labels, strict=True)])
        chance, from_length = task.chance(ignored), task.length_chance(ignored)
        share = np.bincount(examples.labels).max() / len(examples)
        assert share == pytest.approx(chance, abs=5 * (chance / len(examples)) ** 0.5)
        assert chance <= from_length + 1e-12
        assert hits < from_length + 5 * (from_length / half) ** 0.5
        assert hits == pytest.approx(from_length, abs=0.025)


@each_case
def test_another_length_keeps_labels_and_vocabulary(which: str):
    task, length = task_of(which), CASES[which][2]
    longer = task.at_length(length)
    assert type(longer) is type(task)
    assert (longer.length, longer.labels, longer.vocab_size) == (length, task.labels, task.vocab_size)
    examples = draw_examples(longer, 2000)
    assert_well_formed(longer, examples)
    assert examples.lengths.max() > examples_of(which).lengths.max()
    assert set(examples.tokens.flat) - {PAD} <= set(
        examples_of(which).tokens.flat
    )  # no token that training has not seen
    assert set(examples.labels.tolist()) == set(task.labels)
    again = longer.at_length(task.length)
    assert (again.labels, again.vocab_size) == (task.labels, task.vocab_size)


def test_streams_last_as_long_as_there_are_sequences():
    task = build("parity", length=5)
    actual = [rows(part.tokens) for split in ("train", "test") for part in itertools.islice(task.stream(split, 0), 60)]
    assert sum(len(part) for part in actual) == len(set().union(*actual)) == 2**5


def test_a_depth_or_an_offset_beyond_the_text_takes_no_memory():
    plain, deep = (tasks.build("dyck", length=8, max_depth=depth) for depth in (8, 10**12))
    assert np.array_equal(plain.dataset("train", 20, 3).tokens, deep.dataset("train", 20, 3).tokens)
    with pytest.raises(InputError, match=r"length(:| must) "):
        tasks.build("mix", max_offset=10**12)


@pytest.mark.parametrize(
    ("name", "options", "length"),
    [
        ("addition", {"length": 9}, 11),
        ("dyck", {"length": 24, "min_length": 8}, 12),
        ("copy", {"length": 16, "words": 8}, 7),
    ],
)
def test_sequences_of_another_length_are_not_in_the_training_set(
    name: str, options: dict[str, Any], length: int
) -> None:
    task = tasks.build(name, **options)
    longer_task = task.at_length(length)
    trained = task.dataset("train", 20_000, 42)
    seen = {tuple(row[:size]) for row, size in zip(trained.tokens.tolist(), trained.lengths, strict=True)}

    def again(examples: tasks.Examples) -> list[bool]:
        return [tuple(row[:n]) in seen for row, n in zip(examples.tokens.tolist(), examples.lengths, strict=True)]

    actual = longer_task.unseen_dataset(task, 100, 42)
    assert len(actual) == 100
    assert not any(again(actual))
    assert any(again(longer_task.dataset("test", 400, 42))), "else nothing had to be left out"


def test_seeds_beyond_32_bits_are_distinct() -> None:
    task = tasks.build("parity", length=40)
    rows = [
        {tuple(row) for row in task.dataset("train", 2000, seed).tokens.tolist()}
        for seed in (42, 42 + 5 * 2**32, 42 + 2**32, 2**32, 0)
    ]
    assert len(set.union(*rows)) == sum(map(len, rows))
