"""Judging what Appendix C.4 says of taking position out (arXiv 2505.13027 v1), on the records of `estimators`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from toeplens.papers.mathematics.c4.estimators import DRAWS, ENCODINGS, SIZES, TEXTS
from toeplens.papers.mathematics.records import UNIVERSAL, Record, Records, in_all, universal
from toeplens.studies.kit.claims import Claim
from toeplens.studies.kit.verdicts import Finding, opposite, supporting

EXACT = 1e-6  # a relative error below this is rounding
SQUARE = 90 - EXACT  # degrees
CLEAR = 0.1  # a relative error above this is none
NOTICED = 0.3  # the size of content against position at which own and shared content are compared
TURNED = 0.5  # of what chance puts of the words into the positions' span: less is nearer to orthogonal than to chance

_SOURCE = "arXiv 2505.13027 v1, Appendix C.4"


def _rows(records: Records) -> list[Record]:
    return [row for run in records.get("estimators", ()) for row in run["spans"]]


def _judged(*parts: tuple[str, Callable[[Record], bool]]) -> Callable[[Records], list[Finding]]:
    """A check of what each seed's record is to show."""
    return lambda records: [
        in_all(what, [shows(run) for run in records.get("estimators", ())]) for what, shows in parts
    ]


def _under(error: float | None, bar: float) -> bool:
    """Is an error below a bar? One that is infinite, and so none in JSON, is not."""
    return error is not None and error < bar


def _every(what: str, rows: Sequence[Record], breaks: Callable[[Record], bool], worst: str) -> Finding:
    """A statement about all rows, and what breaks it."""
    return universal(what, tried=len(rows), violations=sum(map(breaks, rows)), worst=worst)


def _not_orthogonal(records: Records) -> list[Finding]:
    findings = []
    for encoding in ENCODINGS:
        own = [row for row in _rows(records) if row["encoding"] == encoding]
        ratios = [row["overlap"] / row["chance"] for row in own]
        worst = f"from {min(ratios, default=np.nan):.2f} times chance on, {np.mean(ratios or [np.nan]):.2f} in the mean"
        what = f"{encoding}: words have in the positions' span what chance puts there"
        findings.append(_every(what, own, lambda row: not row["overlap"] / row["chance"] > TURNED, worst))
    return findings


def _no_subspace(records: Records) -> list[Finding]:
    rows = [row for row in _rows(records) if row["least_angle"] < SQUARE]
    exact = [row for row in rows if _under(row["oblique_error"], EXACT)]
    worst = "none was separated"
    if exact:
        row = min(exact, key=lambda row: row["least_angle"])
        error, words = f"relative error {row['oblique_error']:.1e}", f"{row['vocabulary']} words"
        worst = f"{row['encoding']}, {words} in {row['width']}: least angle {row['least_angle']:.1f}°, {error}"
    what = "no linear projection separates position from words that are not orthogonal to it"
    return [_every(what, rows, lambda row: _under(row["oblique_error"], EXACT), worst)]


def _meeting_spans(records: Records) -> list[Finding]:
    rows = _rows(records)
    apart = max((row["linear_error"] for row in rows if row["separable"]), default=np.nan)
    meeting = min((row["linear_error"] for row in rows if not row["separable"]), default=np.nan)
    return [
        _every(
            "the best linear map is exact just where the spans share 0 alone",
            rows,
            lambda row: row["separable"] != _under(row["linear_error"], EXACT),
            f"error up to {apart:.1e} where they do, from {meeting:.2f} on where they do not",
        ),
        _every(
            "the nearest of all sums of a word and a position names both",
            rows,
            lambda row: row["lookup"] < 1,
            f"a share of at least {min((row['lookup'] for row in rows), default=np.nan):.2f}",
        ),
    ]


def _ideal(name: str) -> Callable[[Record], bool]:
    return lambda run: all(_under(run["levinson"][kind][name][0], EXACT) for kind in ("own", "shared"))


def _noticed(kind: str) -> Callable[[Record], bool]:
    place = SIZES.index(NOTICED)
    return lambda run: not _under(run["levinson"][kind]["predictor"][place], CLEAR)


def _told_apart(run: Record) -> bool:
    """Does a permutation leave one head's logits in place, and take the other's along?"""
    position, content = run["pair"]["positional"], run["pair"]["content"]
    return position["stay"] - position["move"] > 0.5 and content["move"] - content["stay"] > 0.5


def _against(finding: Finding) -> Finding:
    return supporting(replace(opposite(finding), evidence=f"not: {finding.evidence}"))


_ALIKE = (
    ("one text: a positional and a content head have one matrix", lambda run: _under(run["pair"]["single_gap"], EXACT)),
    (f"{TEXTS} stationary texts: the same mean diagonals", lambda run: _under(run["pair"]["means_gap"], CLEAR)),
)
_APART = (
    ("one permutation of the tokens tells them apart", _told_apart),
    (
        f"the position means of {TEXTS} texts tell them apart",
        lambda run: run["pair"]["positional"]["position_share"] - run["pair"]["content"]["position_share"] > 0.5,
    ),
)
_TWO_PARTS = (
    "the means and the medians of one matrix's diagonals differ",
    lambda run: not _under(run["pair"]["extraction_gap"], CLEAR),
)


CLAIMS: tuple[Claim[Records], ...] = (
    Claim(
        "c4-not-orthogonal",
        _SOURCE,
        "The position embedding of absolute position encoding is not orthogonal to word embedding.",
        f"{UNIVERSAL} Decides what is so before training: spans drawn independently are never orthogonal, and an "
        f"instance (a fresh encoding, words of a fresh embedding) counts against it if the share of the words' "
        f"variance in the span of the positions is at most {TURNED:g} of what chance puts there. What training makes "
        f"of it is another claim (heads-not-orthogonal).",
        _not_orthogonal,
    ),
    Claim(
        "c4-no-subspace",
        _SOURCE,
        "Therefore, there is no subspace decomposition that can completely separate the two components.",
        f"{UNIVERSAL} An instance counts against it if the spans are not orthogonal and an oblique projection still "
        f"separates their sums with a relative error below {EXACT:g}.",
        _no_subspace,
    ),
    Claim(
        "c4-no-subspace-corrected",
        _SOURCE,
        "A linear map separates position and words exactly if and only if their centred spans share 0 alone, "
        "orthogonal or not; so never where the words span the whole space, as the paper's 574 in 256 dimensions do. A "
        "search of the two finite tables still finds both parts there.",
        f"{UNIVERSAL} Exact: a relative error below {EXACT:g}; for the search: every sampled sum.",
        _meeting_spans,
    ),
    Claim(
        "c4-levinson",
        _SOURCE,
        "In an extremely ideal case, we can use the Levinson-Durbin algorithm to recursively solve the changes in the "
        "position manifold through the values of the Toeplitz matrix.",
        f"on heads whose logits are position times position, what was planted comes back with a relative error below "
        f"{EXACT:g}: predictors and frequencies in the median of {DRAWS} heads, position vectors in each of them",
        _judged(
            ("the predictor of an autoregressive kernel", _ideal("predictor")),
            ("the frequencies of a sum of sinusoids", _ideal("frequencies")),
            (
                "the sinusoids' position vectors, up to a turn",
                lambda run: all(_under(error, EXACT) for error in run["levinson"]["recovered"]),
            ),
        ),
    ),
    Claim(
        "c4-levinson-corrected",
        _SOURCE,
        "The case is ideal in more than little content: content that query and key share biases the recursion, while "
        "content of their own only adds noise; and two different projections of position leave no autocorrelation.",
        f"median error of the predictor over {DRAWS} heads with content of {NOTICED:g} of position's size, bar "
        f"{CLEAR:g}; fewer than half of the kernels after random projections positive definite",
        _judged(
            ("shared content: the error passes the bar", _noticed("shared")),
            ("own content: the error stays below it", lambda run: not _noticed("own")(run)),
            ("random projections: few kernels are definite", lambda run: run["definite"] < 0.5),
        ),
    ),
    Claim(
        "c4-not-unique",
        _SOURCE,
        "Extracting a Toeplitz matrix from a general matrix is not unique, and we cannot determine whether the "
        "extracted Toeplitz matrix truly represents the position information.",
        f"not unique: two ways of extracting differ by more than {CLEAR:g}. Cannot determine: a positional and a "
        f"content head agree in what is extracted from one matrix. That neither several texts nor permuted tokens "
        f"tell them apart are supporting parts: the statement has one matrix and no more",
        lambda records: [
            *_judged(_TWO_PARTS, _ALIKE[0])(records),
            *map(supporting, _judged(_ALIKE[1])(records)),
            *map(_against, _judged(*_APART)(records)),
        ],
    ),
    Claim(
        "c4-not-unique-corrected",
        _SOURCE,
        "One logit matrix cannot tell position from stationary content, nor can the mean diagonals of many texts; one "
        "permutation of the tokens can, and so can the position means of the heads' vectors over many texts.",
        f"the pair agrees to {EXACT:g} on one text and to {CLEAR:g} in the mean diagonals; it is told apart by more "
        f"than 0.5, in correlation after a permutation and in the energy share of the position means",
        _judged(*_ALIKE, *_APART),
    ),
)
