"""A ledger in worlds whose truth is known: what is true, what is drawn, and what is counted as wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import load_script

from toeplens.studies import Claim, Finding, above, below, judge_all, supporting, within

simulated = load_script(Path(__file__).parents[2] / "tools" / "simulated.py")
simulate = simulated.simulate
SHAPES = ("normal", "two-valued", "skewed", "as seen")
pytestmark = pytest.mark.heavy
OBSERVED = [0.4, 0.6, 0.5, 0.55, 0.45]
Part = Callable[[], Finding]


def ledger_entries(*parts: Part) -> list[Any]:
    return judge_all([Claim("it", "a source", "It is so.", "A rule.", lambda _: [part() for part in parts])], None)


def above_half() -> Finding:
    return above("it", OBSERVED, 0.5)


@pytest.mark.parametrize(
    ("parts", "truths"),
    [
        ((above_half,), ("fails", "at the bar", "holds")),
        ((lambda: below("it", OBSERVED, 0.5),), ("holds", "at the bar", "fails")),
        ((lambda: within("it", OBSERVED, -0.1, 0.5),), ("holds", "at the bar", "fails")),
        ((lambda: above("it", OBSERVED, 0.0),), ("at the bar", "at the bar", "holds")),
        ((above_half, lambda: Finding("fails", "exactly")), ("fails", "fails", "fails")),
        ((above_half, lambda: Finding("holds", "exactly")), ("fails", "at the bar", "holds")),
        ((above_half, lambda: supporting(below("it", OBSERVED, 0.5))), ("fails", "at the bar", "holds")),
    ],
)
def test_the_true_verdicts_follow_from_the_means(parts: tuple[Part, ...], truths: tuple[str, ...]) -> None:
    (entry,) = ledger_entries(*parts)
    for size, truth in zip(simulated.EFFECTS.values(), truths, strict=True):
        actual = [simulated._true_part_verdict(part, size) for part in entry.findings if part.essential]
        assert simulated._true_verdict(actual) == truth


def test_at_most_one_in_twenty_ledgers_at_the_threshold_is_wrong() -> None:
    rng = np.random.default_rng(1)
    figures = [rng.normal(0.5, 0.1, 6) for _ in range(15)]
    claims = [
        Claim(f"claim-{n}", "a source", "It is so.", "A rule.", lambda _, values=values: [above("it", values, 0.5)])
        for n, values in enumerate(figures)
    ]
    ledger = judge_all(claims, None)
    actual = simulate(ledger, worlds=120, effect="at the bar")
    assert actual["any_wrong"] <= 0.05 + 3 * (0.05 * 0.95 / 120) ** 0.5
    assert actual["plain_any_wrong"] > 0.5, "without correction most ledgers are wrong somewhere"
    assert actual["right"] == 0, "at the bar nothing is right"
    assert actual == simulate(ledger, worlds=120, effect="at the bar")
    assert actual != simulate(ledger, worlds=120, effect="at the bar", seed=1)
    nothing = simulate(ledger, worlds=50, effect="nothing there")
    assert nothing["any_wrong"] == 0
    assert nothing["right"] > 0.9, "far below the bar it is seen to fail"


def test_a_ledger_wrong_at_any_interim_look_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of worlds at the bar whose first five models of each are over it, and with all of which it is not decided."""
    values = [*[0.6 + 0.001 * n for n in range(5)], *[0.4 - 0.001 * n for n in range(5)]]
    ledger, fifth, seventh, none = (ledger_entries(lambda n=n: above("it", values[:n], 0.5)) for n in (10, 5, 7, 0))
    monkeypatch.setattr(simulated, "_simulated_part", lambda part, *_: part)
    once = simulate(ledger, worlds=1, effect="at the bar")
    assert once["any_wrong"] == 0
    for earlier in ([fifth], [fifth, seventh], [seventh, fifth]):
        again = simulate(ledger, worlds=1, effect="at the bar", earlier=earlier)
        assert (again["any_wrong"], again["plain_any_wrong"]) == (1, 1)
        assert again["last_wrong"] == 0, "what is read by all of them is not"
    for earlier in ([ledger], [seventh], [none], [[]], [ledger, ledger]):
        assert simulate(ledger, worlds=1, effect="at the bar", earlier=earlier) == once, "open there, or the same"
