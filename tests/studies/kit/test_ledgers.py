"""A ledger: one correction for all its comparisons, asides that decide nothing, and what would decide the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.papers.deposit.synthetic_studies import SyntheticModel, make_cell

from toeplens.studies import CellKey, CellResult, Claim, Finding, Results, Verdict, above, judge, judge_all, supporting
from toeplens.studies.kit.claims import LedgerEntry, MeanTest, adjust, findings_of
from toeplens.studies.kit.results import ACCURACY
from toeplens.studies.kit.verdicts import (
    LEVEL,
    OPEN_VERDICTS,
    SIGNS,
    claim_p_value,
    combine,
    holm,
    unknown_finding,
    worst_and_best,
)

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


# ---- models that are still learning ----------------------------------------------------------------------------------

LABELS = "alibi", "nope"
model = st.tuples(st.sampled_from([0.2, 0.5, 0.501, 0.52, 0.8, 1.0]), st.booleans())  # accuracy, whether it learns on


def cells_of(study: dict[str, list[tuple[float, bool]]]) -> list[CellResult]:
    """The models by encoding; ``gap`` is 0, so that the accuracy on training examples is the same."""
    return [
        make_cell(CellKey("paper", "trigger-distance", label, seed), SyntheticModel(accuracy, 0.0, settled=not learns))
        for label, models in study.items()
        for seed, (accuracy, learns) in enumerate(models)
    ]


def judged_cells(cells: Sequence[CellResult], low: float, high: float) -> LedgerEntry:
    test = MeanTest(ACCURACY, *LABELS, above=low, below=high, task="trigger-distance")
    check = lambda data: [test.finding(data, str, *LABELS)]  # noqa: E731
    return judge([Claim("it", "", "", "", check)], Results(cells), ["paper"])[0]


@given(st.lists(model, min_size=5, max_size=6), st.lists(model, min_size=5, max_size=5), st.sampled_from([0.0, 0.02]))
def test_verdicts_with_unfinished_models_are_those_of_models_that_end_there(
    first: list[tuple[float, bool]], second: list[tuple[float, bool]], threshold: float
) -> None:
    study = dict(zip(LABELS, (first, second), strict=True))
    entry = judged_cells(cells_of(study), threshold, float("inf"))
    if not any(learns for models in study.values() for _, learns in models):
        assert entry.extremes is None
        assert entry.learning_text == ""
        return
    findings = []
    for ends in itertools.product((None, 1.0), repeat=2):  # every model of an encoding stays, or becomes perfect
        ended = {
            label: [(end if learns and end else accuracy, False) for accuracy, learns in models]
            for (label, models), end in zip(study.items(), ends, strict=True)
        }
        findings.append(judged_cells(cells_of(ended), threshold, float("inf")))
    worst, best = worst_and_best([each.findings[0] for each in findings])
    assert entry.extremes == (worst.verdict, best.verdict)
    assert entry.is_sensitive == (entry.extremes != (entry.verdict,) * 2)


def test_unfinished_models_may_end_between_two_thresholds() -> None:
    study = {"alibi": [(0.5, True)] * 5, "nope": [(0.5, False)] * 5}
    entry = judged_cells(cells_of(study), 0.2, 0.3)
    assert (entry.verdict, entry.extremes) == ("undecided", ("fails", "holds"))
    assert entry.learning_text.endswith("at their present accuracy or at 1: from fails to holds")
    assert entry.to_dict()["with_learning"] == {"worst": "fails", "best": "holds"}
    certain = judged_cells(cells_of(study), -0.1, 0.6)
    assert (certain.verdict, certain.extremes) == ("undecided", ("holds", "holds"))
    assert certain.learning_text.endswith(": holds")


def test_diverged_models_leave_a_claim_open_whatever_the_others_do() -> None:
    *cells, last = cells_of({"alibi": [(0.5, True)] * 5, "nope": [(0.5, False)] * 5})
    entry = judged_cells([*cells, replace(last, status="diverged")], 0.0, float("inf"))
    assert (entry.verdict, entry.extremes) == ("undecided", ("undecided", "undecided"))


@pytest.mark.parametrize("name", ["holds", "fails", "leans to hold", "leans to fail", "undecided"])
def test_the_worst_finding_comes_first(name: Verdict) -> None:
    finding, undecided = Finding(name, "it"), Finding("undecided", "it")
    pair = worst_and_best([undecided, finding])
    assert [SIGNS.get(each.verdict, 0) for each in pair] == sorted([0, SIGNS.get(name, 0)])
