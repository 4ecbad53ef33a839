"""The two trigger tasks, in both forms, are as their papers and programs say; train and test are apart."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.tasks.readers import P_VALUE, assert_well_formed, count_words, draw_examples

from toeplens.tasks import PAD, build, fingerprint, in_test
from toeplens.utils import InputError


def is_uniform(values: np.ndarray, support: range) -> bool:
    """Whether ``values`` are all in ``support``, and uniform on it by a chi-square test."""
    counts = Counter(values.tolist())
    return set(counts) <= set(support) and stats.chisquare([counts[v] for v in support]).pvalue > P_VALUE


def test_random_sequences_are_split_70_to_30():
    tokens = np.random.default_rng(0).integers(0, 574, size=(100_000, 32))
    assert stats.binomtest(int(in_test(fingerprint(tokens)).sum()), 100_000, 0.3).pvalue > P_VALUE


def test_the_split_of_a_known_sequence_is_fixed():
    """A split that moved between versions would leak test examples into the training of a resumed study."""
    known = fingerprint(np.array([[1, 2, 3], [3, 2, 1]]))
    assert known.tolist() == [278516695507079181, 14168652546099060852]
    assert in_test(known).tolist() == [True, False]


def test_too_many_examples_are_refused():
    task = build("trigger-distance", length=2, vocab_size=4)  # two sequences: the two triggers in either order
    have = {split: sum(len(part) for part in task.stream(split, 0)) for split in ("train", "test")}
    assert sum(have.values()) == 2
    for split, count in have.items():
        with pytest.raises(
            InputError,
            match=rf"^{split}_examples: trigger-distance .* {count} different .*, got {count + 1}",
        ):
            task.dataset(split, count + 1, seed=0)


# ---- the papers' facts --------------------------------------------------------------------------------------------


def test_the_first_trigger_position_is_uniform_given_the_distance():
    task = build("trigger-distance", length=8, vocab_size=30)
    examples, words = draw_examples(task, 20_000), task.marked_words(0)
    first = np.isin(examples.tokens, words).argmax(axis=1)
    for distance in range(1, 8):
        chosen = first[examples.labels == distance]
        assert is_uniform(chosen, range(8 - distance)) if distance < 7 else (chosen == 0).all()


@pytest.mark.parametrize("num_triggers", [2, 4])
def test_trigger_order_is_uniform_unless_ordered(num_triggers: int):
    options = {"length": 6, "vocab_size": 30, "num_triggers": num_triggers}
    words = build("trigger-distance", **options).marked_words(0).tolist()
    pairs, ordered = (
        [
            tuple(word for word in row if word in words)
            for row in draw_examples(build("trigger-distance", **options, ordered=way), 5000).tokens.tolist()
        ]
        for way in (False, True)
    )
    assert set(pairs) == set(itertools.permutations(words, 2))
    assert stats.chisquare(list(Counter(pairs).values())).pvalue > P_VALUE
    assert len(set(ordered)) == num_triggers * (num_triggers - 1) // 2
    assert not set(ordered) & {(b, a) for a, b in ordered}


def test_the_released_distance_task_has_the_codes_sizes():
    """Sides of 1-25 words, 1-70 between, cut at 120, padded to 128 with 0; label = between + 1, 2..71."""
    task: Any = build("trigger-distance", form="released")
    assert (task.length, task.cut, task.vocab_size, task.labels) == (128, 120, 574, range(2, 72))
    examples = draw_examples(task, 12_000)
    assert_well_formed(task, examples)
    assert is_uniform(examples.labels, range(2, 72))
    assert (examples.lengths.min(), examples.lengths.max()) == (5, 120)
    first, _ = task.marked_words(0)
    left = (examples.tokens == first).argmax(axis=1)
    alone = (examples.tokens == first).sum(axis=1) == 1  # fillers may be triggers too
    assert is_uniform(left[alone], range(1, 26))


def test_released_fillers_are_drawn_from_the_whole_vocabulary():
    task = build("trigger-distance", form="released")
    examples = draw_examples(task, 4096)
    counts = np.bincount(examples.tokens.ravel(), minlength=574)
    pair = task.marked_words(0)
    others = np.setdiff1d(np.arange(1, 574), pair)
    assert stats.chisquare(counts[others]).pvalue > P_VALUE
    expected = counts[others].mean()
    for word in pair:
        assert abs(counts[word] - len(examples) - expected) < 5 * expected**0.5


@pytest.mark.parametrize(("form", "words", "num_triggers"), [("paper", 128, 20), ("released", 120, 30)])
def test_the_counting_task_matches_the_paper(form: str, words: int, num_triggers: int):
    task: Any = build("trigger-count", form=form)
    assert (task.length, task.vocab_size, task.labels) == (128, 574, range(101))
    examples = task.dataset("train", 10_000, seed=0)
    assert_well_formed(task, examples)
    assert (examples.lengths == words).all()
    assert is_uniform(examples.labels, range(101))
    triggers = count_words(task, 0)
    assert len(triggers) == num_triggers
    is_trigger = np.isin(examples.tokens, triggers)
    assert np.array_equal(is_trigger.sum(axis=1), examples.labels)
    assert stats.chisquare(is_trigger[:, :words].sum(axis=0)).pvalue > P_VALUE  # their order is shuffled
    for group in (examples.tokens[is_trigger], examples.tokens[~is_trigger & (examples.tokens != PAD)]):
        assert stats.chisquare(np.unique(group, return_counts=True)[1]).pvalue > P_VALUE


# ---- chance -------------------------------------------------------------------------------------------------------


def best_guess_from_length(max_between: int, max_side: int, cut: int, ignored: int | None = None) -> Fraction:
    """By counting every equally likely (left, between, right)."""
    ways: Counter[tuple[int, int]] = Counter()
    for between in set(range(1, max_between + 1)) - {None if ignored is None else ignored - 1}:
        for left, right in itertools.product(range(1, max_side + 1), repeat=2):
            ways[min(left + between + right + 2, cut), between] += 1
    best = {total: max(n for (t, _), n in ways.items() if t == total) for total in {t for t, _ in ways}}
    return Fraction(sum(best.values()), ways.total())


@given(max_between=st.integers(1, 12), max_side=st.integers(1, 6), spare=st.integers(0, 10))
def test_length_chance_matches_enumeration(max_between: int, max_side: int, spare: int):
    cut = max_between + max_side + 2 + spare
    sizes = {"max_between": max_between, "max_side": max_side, "cut": cut}
    task = build("trigger-distance", form="released", length=128, **sizes)
    assert task.length_chance() == pytest.approx(float(best_guess_from_length(**sizes)), rel=1e-12)
    if max_between > 1:
        assert task.length_chance(2) == pytest.approx(float(best_guess_from_length(**sizes, ignored=2)), rel=1e-12)
