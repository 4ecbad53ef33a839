"""The claims about language models follow the data: in made-up worlds each holds, fails, and stays undecided."""

from __future__ import annotations

import pytest
from tests.papers.language.worlds import CHANGES, ESSENTIAL, HELD, SUPPORTING, World, changed, judged

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


def test_every_part_is_tried_but_a_support_that_cannot_fail_alone() -> None:
    for name, entry in judged(HELD).items():
        essential = {place for place, part in enumerate(entry.findings) if part.essential}
        supporting = set(range(len(entry.findings))) - essential
        assert essential == ESSENTIAL.get(name, {0: HELD}).keys()
        assert supporting == ({1} if name == "language-deposit" else SUPPORTING.get(name, {}).keys())
        assert bool(supporting) == ("Supporting" in entry.claim.rule)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, worlds in ESSENTIAL.items() for part in worlds])
def test_a_claim_fails_with_each_essential_part_alone(name: str, part: int) -> None:
    world = ESSENTIAL[name][part]
    assert parts(name, world, essential=True) == dict.fromkeys(ESSENTIAL[name], "holds") | {part: "fails"}
    assert set(parts(name, world, essential=False).values()) <= {"holds"}
    assert judged(world)[name].verdict == "fails"


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, worlds in SUPPORTING.items() for part in worlds])
def test_a_claim_holds_in_part_without_its_support(name: str, part: int) -> None:
    world = SUPPORTING[name][part]
    assert set(parts(name, world, essential=True).values()) == {"holds"}
    assert parts(name, world, essential=False) == {part: "fails"}
    assert judged(world)[name].verdict == "holds in part"


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
