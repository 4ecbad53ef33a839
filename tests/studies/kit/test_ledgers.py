"""A ledger: one correction for all its comparisons, asides that decide nothing, and what would decide the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from toeplens.studies import Claim, Finding, Verdict, above, judge_all, supporting
from toeplens.studies.kit.claims import adjust, findings_of
from toeplens.studies.kit.verdicts import LEVEL, OPEN_VERDICTS, claim_p_value, combine, holm, unknown_finding

NEAR = [0.2, 0.201, 0.199, 0.2, 0.2]
WEAK = [0.2, 0.1, 0.3, 0.45, 0.05]  # above 0 alone (p = 0.04), but not among three
p_value = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.001, 0.01, 0.0125, 0.025, 0.05, 1.0]))
levels = st.sampled_from([0.01, 0.05, 0.2])


def holm_procedure(chances: Sequence[float], level: float) -> list[bool]:
    """Holm's procedure as it is written down (1979).

    The least of m p-values is compared with level / m, the next with level / (m - 1), and so on; at the first that is
    larger than what it is compared with, it and all that follow stay undecided.
    """
    rejected = [False] * len(chances)
    order = sorted(range(len(chances)), key=lambda index: chances[index])
    for step, index in enumerate(order):
        if chances[index] > level / (len(chances) - step):
            break
        rejected[index] = True
    return rejected


def with_p_value(p: float) -> Finding:
    """A part with this two-sided p-value on the side of holding."""
    finding = Finding("undecided", "", p / 2, 1 - p / 2)
    return replace(finding, verdict=finding.verdict_at(LEVEL))


@given(st.lists(p_value, max_size=8), levels)
def test_decisions_at_an_error_level_match_holm(chances: list[float], level: float) -> None:
    errors = holm(chances, level)
    assert [p <= error for p, error in zip(chances, errors, strict=True)] == holm_procedure(chances, level)


@given(st.lists(p_value, min_size=1, max_size=6))
def test_a_ledger_matches_holms_procedure(chances: list[float]) -> None:
    settled = adjust([[with_p_value(p)] for p in chances])
    rejected = holm_procedure([claim_p_value([with_p_value(p)]) or 0.0 for p in chances], LEVEL)
    assert [verdict not in OPEN_VERDICTS for verdict, _, _ in settled] == rejected
    assert [plain for _, plain, _ in settled] == [combine([with_p_value(p)]) for p in chances]
    assert all(plain == verdict or verdict == "undecided" for verdict, plain, _ in settled)


def part(values: Sequence[float], bar: float = 0.0) -> Finding:
    return above("it", values, bar)


def claim(*parts: Finding, name: str = "it", **elsewhere: list[Finding]) -> Claim[None]:
    ways = {way: (lambda data, found=found: found) for way, found in elsewhere.items()}
    return Claim(name, "source", "statement", "rule", lambda data: parts, elsewhere=ways)


def judged(*claims: Claim[None]) -> list[tuple[Verdict, Verdict]]:
    return [(entry.verdict, entry.uncorrected) for entry in judge_all(claims, None)]


def test_a_ledger_corrects_for_all_its_claims() -> None:
    weak, strong = part(WEAK), part(NEAR)
    assert judged(claim(weak)) == [("holds", "holds")]
    assert judged(claim(weak), claim(strong)) == [("holds", "holds")] * 2
    assert judged(*[claim(weak)] * 3) == [("undecided", "holds")] * 3
    assert judged(claim(weak), claim(part([0.2]))) == [("holds", "holds"), ("leans to hold", "leans to hold")]


def test_a_claim_may_have_several_tests_and_support_does_not_carry() -> None:
    good, bad = (lambda data: [part(NEAR)]), (lambda data: [supporting(part(NEAR, 0.5))])
    assert [actual.essential for actual in findings_of([good, bad], None)] == [True, False]
    (entry,) = judge_all([Claim("it", "", "", "", [good, bad])], None)
    assert entry.verdict == "holds in part"
    assert entry.evidence[1] == f"supporting: {entry.findings[1].evidence}"
    nothing = unknown_finding("it", "nobody looked")
    assert findings_of([lambda data: [nothing], lambda data: [nothing, supporting(nothing)]], None) == (
        nothing,
        supporting(nothing),
    ), "a reason is given once"


def test_alternative_checks_are_shown_and_never_change_the_verdict() -> None:
    against, nothing = [part(NEAR, 0.5)], [unknown_finding("it", "not looked at")]
    (entry,) = judge_all([claim(part(NEAR), early=against, late=nothing, later=[*nothing, part([0.2])])], None)
    assert (entry.verdict, entry.uncorrected, entry.error) == ("holds", "holds", LEVEL)
    assert [(aside.name, aside.verdict) for aside in entry.alternatives] == [("early", "fails"), ("later", "undecided")]
    assert entry.alternatives[0].evidence == (against[0].evidence,)
    assert entry.to_dict()["elsewhere"][0]["verdict"] == "fails"
    weak = [part(WEAK)]
    (three,) = judge_all([claim(part(NEAR), a=weak, b=weak, c=weak)], None)
    assert [aside.verdict for aside in three.alternatives] == ["undecided"] * 3, "they share an error of their own"


def test_an_undecided_claim_states_what_would_decide_it() -> None:
    weak = part(WEAK)
    (decided,) = judge_all([claim(weak)], None)
    assert decided.missing == []
    corrected = judge_all([claim(weak)] * 3, None)[0]
    needed = corrected.findings[0].comparison.missing(0.05 / 3, 0.05 / 3)
    assert corrected.missing == ["holds without correction, but open after the correction for the whole ledger", needed]
    assert needed != corrected.findings[0].missing, "by the error that the ledger leaves to it"
    wide, single = part([0.9, 0.1, 0.5, 0.4, 0.6], 0.25), part([0.2])
    (open_,) = judge_all([claim(wide, single, single, part(NEAR), supporting(part(NEAR, 0.2)))], None)
    assert open_.missing == [wide.missing, single.missing], "each once; of essential parts that are open alone"


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.004, 0.02, 0.3]), st.booleans(), st.booleans()), max_size=4), levels)
def test_verdicts_of_the_parts_agree_with_the_claims_verdict(
    drawn: list[tuple[float, bool, bool]], error: float
) -> None:
    """A part is not told to fail where the claim does not, nor to hold where the claim says otherwise."""
    parts = [
        replace(
            with_p_value(p) if good else replace(with_p_value(p), holds=1 - p / 2, fails=p / 2), essential=essential
        )
        for p, good, essential in drawn
    ]
    (entry,) = judge_all([claim(*parts)], None)
    entry = replace(entry, verdict=combine(parts, error), error=error)
    essential = [row["verdict"] for row in entry.to_dict()["parts"] if row["essential"]]
    support = [row["verdict"] for row in entry.to_dict()["parts"] if not row["essential"]]
    assert ("fails" in essential) == (entry.verdict == "fails")
    assert (bool(essential) and set(essential) == {"holds"}) == entry.verdict.startswith("holds")
    if entry.verdict.startswith("holds"):
        assert ("fails" in support) == (entry.verdict == "holds in part")
