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
from tests.tasks.readers import SAFE, assert_well_formed, count_words, draw

from toeplens.ground import InputError
from toeplens.tasks import PAD, build, fingerprint, in_test


def uniform(values: np.ndarray, support: range) -> bool:
    """Whether ``values`` are all in ``support``, and uniform on it by a chi-square test."""
    counts = Counter(values.tolist())
    return set(counts) <= set(support) and stats.chisquare([counts[v] for v in support]).pvalue > SAFE


def test_the_split_of_random_sequences_is_seventy_to_thirty():
    tokens = np.random.default_rng(0).integers(0, 574, size=(100_000, 32))
    assert stats.binomtest(int(in_test(fingerprint(tokens)).sum()), 100_000, 0.3).pvalue > SAFE


def test_the_split_of_a_known_sequence_never_changes():
    """A split that moved between versions would leak test examples into the training of a resumed study."""
    known = fingerprint(np.array([[1, 2, 3], [3, 2, 1]]))
    assert known.tolist() == [278516695507079181, 14168652546099060852]
    assert in_test(known).tolist() == [True, False]


def test_asking_for_more_examples_than_there_are_is_refused():
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


def test_given_the_distance_every_place_for_the_first_trigger_is_as_likely():
    task = build("trigger-distance", length=8, vocab_size=30)
    examples, words = draw(task, 20_000), task.marked_words(0)
    first = np.isin(examples.tokens, words).argmax(axis=1)
    for distance in range(1, 8):
        chosen = first[examples.labels == distance]
        assert uniform(chosen, range(8 - distance)) if distance < 7 else (chosen == 0).all()


@pytest.mark.parametrize("num_triggers", [2, 4])
def test_either_order_of_the_triggers_is_as_likely_unless_ordered(num_triggers: int):
    options = {"length": 6, "vocab_size": 30, "num_triggers": num_triggers}
    words = build("trigger-distance", **options).marked_words(0).tolist()
    pairs, ordered = (
        [
            tuple(word for word in row if word in words)
            for row in draw(build("trigger-distance", **options, ordered=way), 5000).tokens.tolist()
        ]
        for way in (False, True)
    )
    assert set(pairs) == set(itertools.permutations(words, 2))
    assert stats.chisquare(list(Counter(pairs).values())).pvalue > SAFE
    assert len(set(ordered)) == num_triggers * (num_triggers - 1) // 2
    assert not set(ordered) & {(b, a) for a, b in ordered}


def test_the_released_distance_has_the_codes_sizes():
    """Sides of 1-25 words, 1-70 between, cut at 120, padded to 128 with 0; label = between + 1, 2..71."""
    task: Any = build("trigger-distance", form="released")
    assert (task.length, task.cut, task.vocab_size, task.labels) == (128, 120, 574, range(2, 72))
    examples = draw(task, 12_000)
    assert_well_formed(task, examples)
    assert uniform(examples.labels, range(2, 72))
    assert (examples.lengths.min(), examples.lengths.max()) == (5, 120)
    first, _ = task.marked_words(0)
    left = (examples.tokens == first).argmax(axis=1)
    alone = (examples.tokens == first).sum(axis=1) == 1  # fillers may be triggers too
    assert uniform(left[alone], range(1, 26))


def test_the_released_fillers_come_from_the_whole_vocabulary_triggers_included():
    task = build("trigger-distance", form="released")
    examples = draw(task, 4096)
    counts = np.bincount(examples.tokens.ravel(), minlength=574)
    pair = task.marked_words(0)
    others = np.setdiff1d(np.arange(1, 574), pair)
    assert stats.chisquare(counts[others]).pvalue > SAFE
    expected = counts[others].mean()
    for word in pair:
        assert abs(counts[word] - len(examples) - expected) < 5 * expected**0.5


@pytest.mark.parametrize(("form", "words", "num_triggers"), [("paper", 128, 20), ("released", 120, 30)])
def test_the_papers_counts(form: str, words: int, num_triggers: int):
    task: Any = build("trigger-count", form=form)
    assert (task.length, task.vocab_size, task.labels) == (128, 574, range(101))
    examples = task.dataset("train", 10_000, seed=0)
    assert_well_formed(task, examples)
    assert (examples.lengths == words).all()
    assert uniform(examples.labels, range(101))
    triggers = count_words(task, 0)
    assert len(triggers) == num_triggers
    is_trigger = np.isin(examples.tokens, triggers)
    assert np.array_equal(is_trigger.sum(axis=1), examples.labels)
    assert stats.chisquare(is_trigger[:, :words].sum(axis=0)).pvalue > SAFE  # their order is shuffled
    for group in (examples.tokens[is_trigger], examples.tokens[~is_trigger & (examples.tokens != PAD)]):
        assert stats.chisquare(np.unique(group, return_counts=True)[1]).pvalue > SAFE


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
def test_length_chance_is_the_count_over_all_cases(max_between: int, max_side: int, spare: int):
    cut = max_between + max_side + 2 + spare
    sizes = {"max_between": max_between, "max_side": max_side, "cut": cut}
    task = build("trigger-distance", form="released", length=128, **sizes)
    assert task.length_chance() == pytest.approx(float(best_guess_from_length(**sizes)), rel=1e-12)
    if max_between > 1:
        assert task.length_chance(2) == pytest.approx(float(best_guess_from_length(**sizes, ignored=2)), rel=1e-12)
