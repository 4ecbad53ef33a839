"""A ledger in worlds whose truth is known: what is true, what is drawn, and what is counted as wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import script

from toeplens.studies import Claim, Finding, above, below, judge_all, supporting, within
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.verdicts import one_sided

simulated = script(Path(__file__).parents[2] / "tools" / "simulated.py")
simulate = simulated.simulate
SHAPES = ("normal", "two-valued", "skewed", "as seen")
pytestmark = pytest.mark.heavy
SEEN = [0.4, 0.6, 0.5, 0.55, 0.45]
Part = Callable[[], Finding]


def entries(*parts: Part) -> list[Any]:
    return judge_all([Claim("it", "a source", "It is so.", "A rule.", lambda _: [part() for part in parts])], None)


def over() -> Finding:
    return above("it", SEEN, 0.5)


@pytest.mark.parametrize(
    ("parts", "truths"),
    [
        ((over,), ("fails", "at the bar", "holds")),
        ((lambda: below("it", SEEN, 0.5),), ("holds", "at the bar", "fails")),
        ((lambda: within("it", SEEN, -0.1, 0.5),), ("holds", "at the bar", "fails")),
        ((lambda: above("it", SEEN, 0.0),), ("at the bar", "at the bar", "holds")),
        ((over, lambda: Finding("fails", "exactly")), ("fails", "fails", "fails")),
        ((over, lambda: Finding("holds", "exactly")), ("fails", "at the bar", "holds")),
        ((over, lambda: supporting(below("it", SEEN, 0.5))), ("fails", "at the bar", "holds")),
    ],
)
def test_the_truth_of_a_world_follows_from_its_means(parts: tuple[Part, ...], truths: tuple[str, ...]) -> None:
    (entry,) = entries(*parts)
    for size, truth in zip(simulated.EFFECTS.values(), truths, strict=True):
        found = [simulated._part_truth(part, size) for part in entry.findings if part.essential]
        assert simulated._truth(found) == truth


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_drawn_has_the_mean_the_spread_and_the_models_of_the_data(shape: str) -> None:
    part = above("it", difference(SEEN, [0.2, 0.3, 0.1, 0.25, 0.2, 0.21]), 0.3)
    assert part.comparison is not None
    rng = np.random.default_rng(0)
    drawn = [simulated._drawn(part, 2.0, simulated._Noise(shape, rng)).comparison for _ in range(2000)]
    terms = [[np.array(each.seen.terms[place][1]) for each in drawn if each] for place in (0, 1)]
    assert [len(values[0]) for values in terms] == [5, 6]
    means = [float(np.mean(values)) for values in terms]
    assert means[0] - means[1] == pytest.approx(0.6, abs=0.01)
    for values, (_, own) in zip(terms, part.comparison.seen.terms, strict=True):
        assert float(np.std(values)) == pytest.approx(float(np.std(own, ddof=1)), rel=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_models_that_two_comparisons_share_are_off_alike_in_a_world(shape: str) -> None:
    others = [0.2, 0.3, 0.1, 0.25, 0.2]
    parts = [above("it", difference(SEEN, others), 0.3), below("it", SEEN, 0.5), above("it", [0.7] * 5, 0.3)]
    noise = simulated._Noise(shape, np.random.default_rng(0))
    drawn = [simulated._drawn(part, 0.0, noise).comparison for part in [*parts, parts[2]]]
    first, alone, same, again = (each.seen.terms for each in drawn if each)
    assert first[0][1] == alone[0][1]
    assert first[0][1] != first[1][1]
    if shape != "two-valued":
        assert same[0][1] != again[0][1], "models that are all alike may be others"


def test_wrong_verdicts_are_counted_and_at_most_one_in_twenty_ledgers_at_the_bar_is_wrong() -> None:
    rng = np.random.default_rng(1)
    figures = [rng.normal(0.5, 0.1, 6) for _ in range(15)]
    claims = [
        Claim(f"claim-{n}", "a source", "It is so.", "A rule.", lambda _, values=values: [above("it", values, 0.5)])
        for n, values in enumerate(figures)
    ]
    ledger = judge_all(claims, None)
    found = simulate(ledger, worlds=120, effect="at the bar")
    assert found.any_wrong <= 0.05 + 3 * (0.05 * 0.95 / 120) ** 0.5
    assert found.plain_any_wrong > 0.5, "without correction most ledgers are wrong somewhere"
    assert all(error.right == 0 for error in found.errors), "at the bar nothing is right"
    assert found == simulate(ledger, worlds=120, effect="at the bar")
    assert found != simulate(ledger, worlds=120, effect="at the bar", seed=1)
    nothing = simulate(ledger, worlds=50, effect="nothing there")
    assert nothing.any_wrong == 0
    assert np.mean([error.right for error in nothing.errors]) > 0.9, "far below the bar it is seen to fail"


def of_first(values: list[float], *, counts: tuple[int, ...] = (5,)) -> list[Any]:
    """The ledger of one claim as it is, and as it was by so many of its models."""
    return [entries(lambda n=n: above("it", values[:n], 0.5)) for n in (len(values), *counts)]


def test_what_is_wrong_at_any_look_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of worlds at the bar whose first five models of each are over it, and with all of which it is not decided."""
    values = [*[0.6 + 0.001 * n for n in range(5)], *[0.4 - 0.001 * n for n in range(5)]]
    ledger, fifth, seventh, none = of_first(values, counts=(5, 7, 0))
    monkeypatch.setattr(simulated, "_drawn", lambda part, *_: part)
    once = simulate(ledger, worlds=1, effect="at the bar")
    assert (once.any_wrong, once.errors[0].wrong_holds) == (0, 0)
    for earlier in ([fifth], [fifth, seventh], [seventh, fifth]):
        again = simulate(ledger, worlds=1, effect="at the bar", earlier=earlier)
        assert (again.any_wrong, again.plain_any_wrong, again.errors[0].wrong_holds) == (1, 1, 1)
        assert again.last_wrong == 0, "what is read by all of them is not"
    for earlier in ([ledger], [seventh], [none], [[]], [ledger, ledger]):
        assert simulate(ledger, worlds=1, effect="at the bar", earlier=earlier) == once, "open there, or the same"


def test_parts_are_found_again_by_what_they_ask() -> None:
    """More are asked once there is more, and more models are left out."""
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]

    def part(about: str, count: int) -> Any:
        return lambda: above(about, values[:count], 0.5)

    now = entries(part("it (1 of 6 models left out: why)", 6), part("later", 6), part("Task 1: more", 6), part("it", 6))
    before = entries(part("it", 5), part("Task 1: more (1 of 3 and 0 of 3 models left out: why)", 3), part("it", 4))
    assert simulated._as_it_was(now, before) == [[[5], (), [3], [4]]]
    none = entries(lambda: Finding("undecided", "it (5 of 5 models left out: why): no finished run that counts"))
    assert simulated._as_it_was(now, none) == [[(), (), (), ()]]


def test_a_part_that_cannot_fail_cannot_in_any_world_either() -> None:
    values = np.random.default_rng(0).normal(0.4, 0.05, 10)
    for shown in (True, False):
        (entry,) = entries(
            lambda shown=shown: one_sided(above("it", values, 0.5), holds=True, fails=shown, why="no more is known")
        )
        found = simulate([entry], worlds=40, effect="nothing there")
        assert found.errors[0].right == float(shown), "that it fails is right, and is not seen"
        assert found.any_wrong == 0


def test_what_was_open_at_the_first_look_is_judged_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.45, 0.55, 0.5, 0.52, 0.48, *[0.9 + 0.001 * n for n in range(15)]]
    ledger, fifth = of_first(values)
    monkeypatch.setattr(simulated, "_drawn", lambda part, *_: part)
    found = simulate(ledger, worlds=1, effect="twice the bar", earlier=[fifth])
    assert found.errors[0].right == 1
