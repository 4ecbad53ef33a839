"""Claims on pretrained models, with rules that were written before a model was recorded.

What is left to chance is a sequence (or a question): rules over seeds are over these here. Beside each statement about
what was learned stands the same architecture with random weights, and the model on the same tokens in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toeplens.papers.positional_symbolic.pretrained.making import PREVIOUS, retrieving
from toeplens.papers.positional_symbolic.pretrained.state import DRAWS, FEWEST, Pretrained, effects_of
from toeplens.studies.kit.asking import chance
from toeplens.studies.kit.claims import Claim, Entry
from toeplens.studies.kit.contrasts import of_one
from toeplens.studies.kit.verdicts import (
    LEVEL,
    Comparison,
    Finding,
    Verdict,
    above,
    below,
    interval_above,
    supporting,
    unknown,
)
from toeplens.studies.probing import RETRIEVES, Behaviour

Check = Callable[[Pretrained], list[Finding]]
_SISTER = "arXiv 2511.11579"
_ROUND = "arXiv 2410.06205"
_RETRIEVAL = "arXiv 2404.15574"
_ROPE_RETRIEVAL = "arXiv 2606.21249"
_STRONG, _LEARNED, _OCTAVES, _PURE, _FEW = 0.5, 0.1, 2.0, 0.9, 0.05
_STILL = "the model has no rotation"
_SILENT = "the model does not predict the next token"
_UNPLACED = "no head has a rotation or a bias that could be taken from it"
_UNSHARED = "no head's share is known"
_LOST, _SPARED = 0.5, 0.1  # of the needles
_NULLS = {"random": "random weights", "shuffled": "tokens in random order"}


def _over(finding: Finding, units: str) -> Finding:
    """What is over seeds elsewhere is over sequences here, or over questions."""
    said, wanting = (
        text.replace(" seeds", f" {units}").replace(" seed)", f" {units[:-1]})")
        for text in (finding.evidence, finding.wanting)
    )
    return replace(finding, evidence=said, wanting=wanting)


def over_units(finding: Finding, study: Pretrained) -> bool:
    """Whether a finding is over the study's sequences, or its groups of them, one number each."""
    return f" over {len(study.plan.places)} {study.plan.units}," in finding.evidence


def _missing(study: Pretrained, what: str, nature: str) -> list[Finding]:
    """Nothing is known: of a study that is complete because of the model's ``nature``."""
    return [unknown(what, nature if study.complete else "its pieces are not finished")]


# ---- positional heads and frequencies --------------------------------------------------------------------------------


def _correspondence(study: Pretrained) -> list[Finding]:
    heads, what = study.heads("text"), "rank correlation of the positional share and the frequency used"
    if heads is None or not study.plan.turns:
        return _missing(study, what, _STILL)
    found = []
    for part, which in heads.parts.items():
        own = heads.correlations("positional", "centre", which)
        found.append(_over(above(f"{what}, {part}", own, _STRONG), study.plan.units))
    return found


def _learned(study: Pretrained) -> list[Finding]:
    heads, what = study.heads("text"), "that correlation less that of"
    if heads is None or not study.plan.turns:
        return _missing(study, what, _STILL)
    found = []
    for kind, words in _NULLS.items():
        other = study.heads(kind)
        if other is None:
            found += _missing(study, f"{what} {words}", _STILL)
            continue
        for part, which in heads.parts.items():
            pairs = zip(*(each.correlations("positional", "centre", which) for each in (heads, other)), strict=True)
            finding = above(f"{what} {words}, {part}", [a - b for a, b in pairs], _LEARNED)
            finding = _over(finding, study.plan.units)
            found.append(finding if kind == "random" else supporting(finding))
    return found


def _previous_fast(study: Pretrained) -> list[Finding]:
    heads, what = study.heads("text"), "octaves by which previous-token heads use faster pairs than the others"
    if heads is None or not study.plan.turns:
        return _missing(study, what, _STILL)
    chosen = heads.mean("previous") >= PREVIOUS
    if chosen.sum() < FEWEST:
        return [unknown(what, f"{int(chosen.sum())} heads look at the token before; {FEWEST} are needed")]

    def apart(columns: dict[str, np.ndarray]) -> float:
        return float(np.nanmean(columns["centre"][chosen]) - np.nanmean(columns["centre"][~chosen]))

    found = [_over(above(f"{what} ({int(chosen.sum())} heads)", heads.by_text(apart), _OCTAVES), study.plan.units)]
    found += _more(study, "fast-still", "slow-still", "copying", "their fastest quarter stopped, less the slowest", 0.1)
    return found


def _pure(study: Pretrained) -> list[Finding]:
    names = ("positional", "symbolic")
    own, null = ({name: _counts(study, kind, name) for name in names} for kind in ("text", "random"))
    found = []
    for name, counts in own.items():
        what = f"heads whose {name} share is {_PURE} or more"
        if counts is None:
            found += _missing(study, what, _UNSHARED)
        else:
            found.append(_over(above(what, counts, 0.5), study.plan.units))
    for name, counts in own.items():
        what, others = f"the same ({name}) less those with random weights", null[name]
        if counts is None or others is None:
            found += map(supporting, _missing(study, what, _UNSHARED))
        else:
            more = [one - other for one, other in zip(counts, others, strict=True)]
            found.append(supporting(_over(above(what, more, 0.5), study.plan.units)))
    return found


def _counts(study: Pretrained, kind: str, name: str) -> list[float] | None:
    """Pure heads on each sequence; None where on some of them no head's share is known."""
    heads = study.heads(kind)
    if heads is None or not np.isfinite(heads.columns[name]).any(1).all():
        return None
    return heads.by_text(lambda columns: float((columns[name] >= _PURE).sum()))


# ---- retrieval -------------------------------------------------------------------------------------------------------


def _sparse(study: Pretrained) -> list[Finding]:
    what, intact = "share of the heads that retrieve", study.probes.get("intact")
    if intact is None or not intact.heads:
        return _missing(study, what, _SILENT)
    many = len(retrieving(intact))
    if not any(item.right for item in intact.of("needle")):
        return [unknown(what, "the model finds no needle")]
    share = many / len(intact.heads)
    some = Finding("holds" if many else "fails", f"{many} of {len(intact.heads)} heads have a score of {RETRIEVES}")
    low = Finding("holds" if share < _FEW else "fails", f"{what}: {share:.3f}, bar {_FEW}")
    return [some, low]


def _causal(study: Pretrained) -> list[Finding]:
    found = []
    for name, words in (("no-retrieval", "the heads that retrieve"), ("no-others", "as many others")):
        what = f"share of needles that are lost without {words}"
        names = [name] if name == "no-retrieval" else [f"{name}-{draw}" for draw in range(DRAWS)]
        values = _lost(study, names)
        if values is None:
            there = all(each in study.probes for each in names)
            found += (
                [unknown(what, "the model finds no needle, or has no such heads")]
                if there
                else _missing(study, what, _SILENT)
            )
        elif name == "no-retrieval":
            found.append(_over(above(what, values, _LOST, grain=chance(_LOST)), "needles"))
        else:
            found.append(_over(below(what, values, _SPARED, grain=chance(_SPARED)), "needles"))
    return found


def _lost(study: Pretrained, names: Sequence[str]) -> list[float] | None:
    """Of each needle that the intact model finds, whether it is lost; mean over several changes."""
    probes = [study.probes.get(name) for name in names]
    found = [
        [item.right - (item.changed_right or 0.0) for item in probe.of("needle") if item.right == 1]
        for probe in probes
        if probe is not None and probe.changes
    ]
    return None if len(found) < len(names) or not found[0] else np.mean(found, axis=0).tolist()


def _slow(study: Pretrained) -> list[Finding]:
    found = []
    for draw in range(DRAWS):
        words = f"their slowest quarter silenced, less a quarter that was drawn ({draw + 1})"
        found += _more(study, "slow-silent", f"some-silent-{draw}", "needle", words, 0.1)
    return found


def _more(study: Pretrained, first: str, second: str, of: Behaviour, words: str, bar: float) -> list[Finding]:
    """By how many nats one change costs a behaviour more than another, over its items."""
    what, probes = f"nats of {of}, {words}", [study.probes.get(name) for name in (first, second)]
    if any(probe is None for probe in probes):
        return _missing(study, what, _STILL if study.plan.predicts else _SILENT)
    nats = [[item.changed_nats for item in probe.of(of) if item.changed_nats is not None] for probe in probes if probe]
    if not all(nats):
        return [unknown(what, "the model has no such heads")]
    return [_over(above(what, [a - b for a, b in zip(*nats, strict=True)], bar), "items")]


def _symbolic(study: Pretrained) -> list[Finding]:
    heads, intact = study.heads("text"), study.probes.get("intact")
    what = "symbolic share of the heads that retrieve, less that of the others"
    if heads is None or intact is None:
        return _missing(study, what, _SILENT)
    chosen = heads.among(retrieving(intact))
    if chosen.sum() < FEWEST:
        return [unknown(what, f"{int(chosen.sum())} heads retrieve; {FEWEST} are needed")]

    def apart(name: str) -> list[float]:
        return heads.by_text(lambda c: float(np.nanmean(c[name][chosen]) - np.nanmean(c[name][~chosen])))

    if not np.isfinite(heads.columns["symbolic"]).any():
        return [unknown(what, _UNSHARED)]
    found = [_over(above(what, apart("symbolic"), _LEARNED), study.plan.units)]
    slower = "octaves by which they use faster pairs than the others"
    if study.plan.turns:
        return [*found, supporting(_over(below(slower, apart("centre"), 0.0), study.plan.units))]
    return [*found, supporting(unknown(slower, _STILL))]


# ---- what position is worth ------------------------------------------------------------------------------------------


def _worth(study: Pretrained) -> list[Finding]:
    what, audit, heads = "the most positional head", study.audits.get("position"), study.heads("text")
    if audit is None or heads is None:
        return _missing(study, what, _UNPLACED)
    shares = heads.mean("positional")
    if not np.isfinite(shares).any():
        return [unknown(what, _UNSHARED)]
    at = int(np.nanargmax(shares))
    head = audit.heads[at]
    others = np.delete(effects_of(audit), at)
    others = others[np.isfinite(others)]
    if head.effect is None or head.effect_low is None or not len(others):
        return [unknown(what, "no effects are known")]
    bar = max(0.0, float(np.median(others)))
    said = (
        f"nats that position is worth to {what}, layer {head.layer + 1} head {head.head + 1}; the bar is half's worth"
    )
    high = head.effect_low if head.effect_high is None else head.effect_high
    return [interval_above(said, head.effect, head.effect_low, high, bar)]


def _concentrated(study: Pretrained) -> list[Finding]:
    what, audit = "share of the costliest head in all that position is worth", study.audits.get("position")
    if audit is None:
        return _missing(study, what, _UNPLACED)
    effects, low, high = (effects_of(audit, end) for end in ("", "_low", "_high"))
    known = np.isfinite(effects)  # a head without rotation and bias has none to be taken
    if not known.any() or not np.isfinite(low[known]).all():
        return [unknown(what, "no effects are known")]
    at, counts = int(np.nanargmax(effects)), low > 0
    if not counts[at]:
        return [unknown(what, "no head's position is worth anything that is told from nothing")]
    counts[at] = False
    rest = [float(each[counts].sum()) for each in (low, effects, high)]  # what is not told from nothing counts nowhere
    ends = float(low[at]) / (float(low[at]) + rest[2]), float(high[at]) / (float(high[at]) + rest[0])
    share = float(effects[at]) / (float(effects[at]) + rest[1])
    head, layers = audit.heads[at], len(audit.layers)
    place = f"the costliest is layer {head.layer + 1} head {head.head + 1} of {layers} layers"
    return [
        interval_above(what, share, *ends, _STRONG),
        Finding("holds" if head.layer < layers / 3 else "fails", place),
    ]


CLAIMS: tuple[Claim[Pretrained], ...] = (
    Claim(
        "positional-frequency",
        f"{_SISTER}, abstract",
        "How a head behaves, by position or by content, corresponds to the frequencies it uses.",
        f"Over a model's heads, the rank correlation of the positional share with the centre of gravity of the "
        f"frequencies used is above {_STRONG}, mean over sequences (from half on a correlation is commonly called "
        "large); in layers that see a window and in those that see all apart, where a model has both.",
        _correspondence,
    ),
    Claim(
        "correspondence-learned",
        "ours",
        "Training strengthens that correspondence: random weights have less of it.",
        f"Over sequences, the rank correlation is more than {_LEARNED} above that of the same architecture with random "
        "weights (less could not be told from how heads are drawn). Supporting: and by as much above that of the same "
        "tokens in random order.",
        _learned,
    ),
    Claim(
        "previous-token-fast",
        f"{_ROUND}, abstract",
        "Positional patterns such as attention to the token before are made with the highest frequencies.",
        f"Of the heads that give the token before {PREVIOUS} or more of their attention, the centre of the frequencies "
        f"used is more than {_OCTAVES:g} octaves above that of the others, mean over sequences (a factor of four, more "
        "than neighbouring bands differ by); and stopping the fastest quarter of their pairs costs copying 0.1 nats "
        "more than stopping the slowest.",
        _previous_fast,
    ),
    Claim(
        "pure-heads",
        "ours",
        "Purely positional and purely symbolic heads exist.",
        f"Heads with a positional share of {_PURE} or more are more than 0.5 on the mean sequence (one on every "
        "second), and so are heads with a symbolic share of as much (a tenth is left for what training does not clean "
        "away). Supporting, that learning made them: of each kind there are more by as much than with random weights.",
        _pure,
    ),
    Claim(
        "retrieval-sparse",
        f"{_RETRIEVAL}, abstract",
        "Some heads retrieve, and they are few.",
        f"At least one head has a retrieval score of {RETRIEVES} or more, and less than {_FEW:.0%} of them have (the "
        "source's own numbers).",
        _sparse,
    ),
    Claim(
        "retrieval-causal",
        f"{_RETRIEVAL}, abstract; {_ROPE_RETRIEVAL}, abstract (i)",
        "Without the heads that retrieve needles are lost; without as many others they are not.",
        "Of the needles that the intact model finds, more than half are lost when these heads are silenced, and less "
        f"than a tenth when as many others of the same layers are, mean of {DRAWS} draws (the source: all, and none). "
        "The spread over needles is taken to be no less than chance gives at each bar.",
        _causal,
    ),
    Claim(
        "retrieval-slow",
        f"{_ROPE_RETRIEVAL}, abstract (iv)",
        "Heads that retrieve do it with their lowest frequencies.",
        "Silencing the slowest quarter of the pairs of the heads that retrieve costs the needle more than 0.1 nats a "
        f"token more than silencing a quarter that was drawn, for each of {DRAWS} draws.",
        _slow,
    ),
    Claim(
        "retrieval-symbolic",
        f"ours, in the terms of {_SISTER}",
        "Heads that retrieve are symbolic.",
        f"The symbolic share of the heads that retrieve is more than {_LEARNED} above that of the others, mean over "
        "sequences. Supporting: they use slower pairs.",
        _symbolic,
    ),
    Claim(
        "position-worth",
        "ours",
        "The most positional head's position is worth more than most other heads'.",
        "Taking position from the head with the largest positional share adds to the loss, and more than it does for "
        "half of the other heads, by the interval of its effect.",
        _worth,
    ),
    Claim(
        "deposit-pretrained",
        "arXiv 2505.13027 v1, 5.1, which asks it of models trained on Task 1; of pretrained ones: ours",
        "RoPE puts positional work into one early head.",
        f"Of what position is worth to the heads whose interval leaves 0, one head has more than {_STRONG}, by the "
        "ends of all their intervals (its low end against the others' high ends, and the reverse), and it is in the "
        "first third of the layers.",
        _concentrated,
    ),
)


# ---- verdicts with each text as one ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByText:
    """A comparison over sequences, with each text as one number.

    part       of the claim
    low, high  the 95 % interval of the texts' mean
    verdict    by that interval, without correction, and however few texts there are
    """

    entry: Entry
    part: Finding
    texts: int
    value: float
    low: float
    high: float
    verdict: Verdict

    @property
    def differs(self) -> bool:
        """Whether the part, without correction too, is decided otherwise over sequences."""
        return self.verdict != self.part.verdict


def by_text(study: Pretrained) -> Iterator[ByText]:
    """Every comparison of the ledger that is over sequences; none where there is one text, or one sequence of each."""
    names = [name for name, _ in study.plan.places]
    texts = list(dict.fromkeys(names))
    if len(texts) < 2 or study.plan.sequences == 1:
        return
    for entry in study.entries:
        for part in entry.findings:
            if part.comparison is None or not over_units(part, study):
                continue
            ((_, values),) = part.comparison.seen.terms
            means = [np.mean([x for x, name in zip(values, names, strict=True) if name == text]) for text in texts]
            seen = of_one(np.array(means), part.comparison.seen.grain)
            yes, no = Comparison(seen, part.comparison.low, part.comparison.high).chances()
            found = Finding("undecided", "", yes, no)
            yield ByText(entry, part, len(texts), seen.value, *seen.interval(LEVEL), found.at(LEVEL))
