"""The claims about language models follow the data: in made-up worlds each holds, fails, and stays undecided."""

from __future__ import annotations

import pytest
from tests.papers.language.worlds import CHANGES, HELD, IN_PART, World, changed, judged

from toeplens.papers.language.claims import CLAIMS
from toeplens.studies import Verdict

CASES = [(name, verdict) for name, worlds in CHANGES.items() for verdict in worlds]
LEANING: dict[Verdict, Verdict] = {"holds": "leans to hold", "fails": "leans to fail"}
# of each claim, the measures without which nothing can be said
NEEDED = {
    "language-needs-position": ["bits"],
    "rope-over-absolute": ["bits"],
    "alibi-extrapolates": ["bits"],
    "rope-fails-beyond": ["bits"],
    "nope-extrapolates": ["bits"],
    "long-context-helps": ["bits"],
    "interpolation-helps": ["extension", "extension-tuned"],
    "previous-heads-positional": ["patterns", "behaviour"],
    "induction-heads-symbolic": ["patterns", "behaviour"],
    "positional-by-frequency": ["behaviour", "frequency"],
    "language-deposit": ["position-loss"],
    "needles-end-at-the-training-length": ["needles"],
}


def parts(claim: str, world: World, *, essential: bool) -> dict[int, Verdict]:
    found = enumerate(judged(world)[claim].findings)
    return {place: part.verdict for place, part in found if part.essential is essential}


def test_all_hold_in_one_world() -> None:
    found = judged(HELD)
    assert {name: entry.verdict for name, entry in found.items()} == dict.fromkeys(found, "holds")
    assert {name: entry.plain for name, entry in found.items()} == dict.fromkeys(found, "holds")


def test_every_claim_is_tried_otherwise_and_undecided() -> None:
    assert CHANGES.keys() == {claim.id for claim in CLAIMS}
    assert all(worlds.keys() == {"fails", "undecided"} for worlds in CHANGES.values())


@pytest.mark.parametrize(("name", "expected"), CASES)
def test_a_claims_verdict_follows_one_figure(name: str, expected: Verdict) -> None:
    entry = judged(CHANGES[name][expected])[name]
    assert entry.verdict == expected, entry.evidence


# interpolation has four essential parts, needles two; the first of the others is tried by `CHANGES`
@pytest.mark.parametrize(
    ("name", "part", "figure"),
    [
        ("interpolation-helps", 1, {"tuned_left": 2.01}),
        ("interpolation-helps", 2, {"ntk": 2.08}),
        ("interpolation-helps", 3, {"tuned_short": 1.98}),
        ("needles-end-at-the-training-length", 0, {"found": 0.25}),
        ("needles-end-at-the-training-length", 1, {"beyond": 0.5}),
        ("language-deposit", 0, {"second": 0.9}),
    ],
)
def test_a_claim_fails_with_one_essential_part(name: str, part: int, figure: dict[str, float]) -> None:
    world = changed("rope", **figure)
    found = parts(name, world, essential=True)
    assert found == dict.fromkeys(found, "holds") | {part: "fails"}
    assert judged(world)[name].verdict == "fails"


@pytest.mark.parametrize("name", IN_PART)
def test_a_claim_holds_in_part_without_its_support(name: str) -> None:
    assert set(parts(name, IN_PART[name], essential=True).values()) == {"holds"}
    assert set(parts(name, IN_PART[name], essential=False).values()) == {"fails"}
    assert judged(IN_PART[name])[name].verdict == "holds in part"


def test_a_deposit_may_be_elsewhere_than_in_the_first_layer() -> None:
    """The claim fails, what supports it does not; and where it is nowhere, both fail."""
    assert parts("language-deposit", changed("rope", second=0.9), essential=False) == {1: "holds"}
    assert parts("language-deposit", changed("rope", first=0.05), essential=False) == {1: "fails"}


@pytest.mark.parametrize("seeds", [1, 4])
def test_with_few_seeds_they_lean(seeds: int) -> None:
    assert {entry.verdict for entry in judged(HELD, seeds).values()} == {"leans to hold"}
    for name, worlds in CHANGES.items():
        assert judged(worlds["fails"], seeds)[name].verdict == "leans to fail"


@pytest.mark.parametrize("measure", sorted({measure for needed in NEEDED.values() for measure in needed}))
def test_what_was_not_measured_decides_nothing_and_what_else_was_does(measure: str) -> None:
    found = judged(HELD, without=measure)
    assert {name: entry.verdict for name, entry in found.items()} == {
        name: "undecided" if measure in needed else "holds" for name, needed in NEEDED.items()
    }
    assert all(entry.wanting for entry in found.values() if entry.verdict == "undecided")


def test_without_models_nothing_is_decided() -> None:
    assert {entry.verdict for entry in judged({}).values()} == {"undecided"}


def test_needles_are_asked_where_they_are_found_at_the_training_length() -> None:
    """Models that find none lose none, which says nothing."""
    entry = judged(changed("rope", found=0.15))["needles-end-at-the-training-length"]
    assert (entry.verdict, entry.wanting) == ("undecided", ["longer training"])
    assert entry.evidence[0].endswith("the models find less than 20% at the training length")


def test_heads_that_hardly_look_there_are_of_no_kind() -> None:
    found = judged(changed("rope", looks=0.19))
    assert {name for name, entry in found.items() if entry.verdict == "undecided"} == {
        "previous-heads-positional",
        "induction-heads-symbolic",
    }
