"""Claims on pretrained models, with rules that were written before a model was recorded.

Comparisons are over sequences (or questions) instead of seeds. Claims about learning have two baselines: the same
architecture with random weights, and the model on the same tokens in random order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from toeplens.papers.positional_symbolic.pretrained.parts import (
    DRAWS,
    FEWEST,
    PREVIOUS,
    Examined,
    effects_of,
    retrieving,
)
from toeplens.studies.kit.claims import Claim, Entry, deviation
from toeplens.studies.kit.verdicts import (
    LEVEL,
    Comparison,
    Finding,
    Verdict,
    above,
    below,
    interval_above,
    of_one,
    supporting,
    unknown,
)
from toeplens.studies.probing import RETRIEVES, Behaviour

_SISTER = "arXiv 2511.11579"
_ROUND = "arXiv 2410.06205"
_RETRIEVAL = "arXiv 2404.15574"
_ROPE_RETRIEVAL = "arXiv 2606.21249"
_STRONG, _LEARNED, _OCTAVES, _PURE, _FEW = 0.5, 0.1, 2.0, 0.9, 0.05
_STILL = "the model has no rotation"
_SILENT = "the model does not predict the next token"
_UNPLACED = "no head has a rotation or a bias that can be removed"
_UNSHARED = "the shares of all heads are undefined"
_LOST, _SPARED = 0.5, 0.1  # of the needles
_NULLS = {"random": "random weights", "shuffled": "tokens in random order"}


def _over(finding: Finding, units: str) -> Finding:
    """The finding with its units (sequences, questions) in place of seeds."""
    said, wanting = (
        text.replace(" seeds", f" {units}").replace(" seed)", f" {units[:-1]})")
        for text in (finding.evidence, finding.wanting)
    )
    return replace(finding, evidence=said, wanting=wanting)


def over_units(finding: Finding, study: Examined) -> bool:
    """Whether a finding compares one number per sequence or group of sequences."""
    return f" over {len(study.plan.places)} {study.plan.units}," in finding.evidence


def _missing(study: Examined, what: str, nature: str) -> list[Finding]:
    """An unknown finding: not applicable because of the model's ``nature`` if complete, otherwise unfinished."""
    return [unknown(what, nature if study.complete else "not finished")]


# ---- positional heads and frequencies --------------------------------------------------------------------------------


def _correspondence(study: Examined) -> list[Finding]:
    heads, what = study.heads("text"), "rank correlation of the positional share and the frequency used"
    if heads is None or not study.plan.turns:
        return _missing(study, what, _STILL)
    found = []
    for part, which in heads.parts.items():
        own = heads.correlations("positional", "centre", which)
        found.append(_over(above(f"{what}, {part}", own, _STRONG), study.plan.units))
    return found


def _learned(study: Examined) -> list[Finding]:
    heads, what = study.heads("text"), "that correlation − that of"
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


def _previous_fast(study: Examined) -> list[Finding]:
    heads, what = study.heads("text"), "frequency of previous-token heads − of the others (octaves)"
    if heads is None or not study.plan.turns:
        return _missing(study, what, _STILL)
    chosen = heads.mean("previous") >= PREVIOUS
    if chosen.sum() < FEWEST:
        return [unknown(what, f"{int(chosen.sum())} previous-token heads; {FEWEST} are needed")]

    def apart(columns: dict[str, np.ndarray]) -> float:
        return float(np.nanmean(columns["centre"][chosen]) - np.nanmean(columns["centre"][~chosen]))

    found = [_over(above(f"{what} ({int(chosen.sum())} heads)", heads.by_text(apart), _OCTAVES), study.plan.units)]
    words = "their fastest quarter frozen − their slowest quarter frozen"
    found += _more(study, "fast-still", "slow-still", "copying", words, 0.1)
    return found


def _pure(study: Examined) -> list[Finding]:
    names = ("positional", "symbolic")
    own, null = ({name: _counts(study, kind, name) for name in names} for kind in ("text", "random"))
    found = []
    for name, counts in own.items():
        what = f"heads with a {name} share of at least {_PURE}"
        if counts is None:
            found += _missing(study, what, _UNSHARED)
        else:
            found.append(_over(above(what, counts, 0.5), study.plan.units))
    for name, counts in own.items():
        what, others = f"that number ({name}) − that with random weights", null[name]
        if counts is None or others is None:
            found += map(supporting, _missing(study, what, _UNSHARED))
        else:
            more = [one - other for one, other in zip(counts, others, strict=True)]
            found.append(supporting(_over(above(what, more, 0.5), study.plan.units)))
    return found


def _counts(study: Examined, kind: str, name: str) -> list[float] | None:
    """Number of pure heads per sequence; None if a sequence has no defined share."""
    heads = study.heads(kind)
    if heads is None or not np.isfinite(heads.columns[name]).any(1).all():
        return None
    return heads.by_text(lambda columns: float((columns[name] >= _PURE).sum()))


# ---- retrieval -------------------------------------------------------------------------------------------------------


def _sparse(study: Examined) -> list[Finding]:
    what, intact = "share of retrieval heads", study.probes.get("intact")
    if intact is None or not intact.heads:
        return _missing(study, what, _SILENT)
    many = len(retrieving(intact))
    if not any(item.right for item in intact.of("needle")):
        return [unknown(what, "the model finds no needle")]
    share = many / len(intact.heads)
    said = f"{many} of {len(intact.heads)} heads have a score of at least {RETRIEVES}"
    some = Finding("holds" if many else "fails", said)
    low = Finding("holds" if share < _FEW else "fails", f"{what}: {share:.3f}, threshold {_FEW}")
    return [some, low]


def _causal(study: Examined) -> list[Finding]:
    found = []
    for name, words in (("no-retrieval", "the retrieval heads"), ("no-others", "the same number of other heads")):
        what = f"share of needles lost without {words}"
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
            found.append(_over(above(what, values, _LOST, grain=deviation(_LOST)), "needles"))
        else:
            found.append(_over(below(what, values, _SPARED, grain=deviation(_SPARED)), "needles"))
    return found


def _lost(study: Examined, names: Sequence[str]) -> list[float] | None:
    """For each needle that the intact model finds: whether it is lost, mean over the interventions."""
    probes = [study.probes.get(name) for name in names]
    found = [
        [item.right - (item.changed_right or 0.0) for item in probe.of("needle") if item.right == 1]
        for probe in probes
        if probe is not None and probe.changes
    ]
    return None if len(found) < len(names) or not found[0] else np.mean(found, axis=0).tolist()


def _slow(study: Examined) -> list[Finding]:
    found = []
    for draw in range(DRAWS):
        words = f"their slowest quarter removed − a random quarter removed ({draw + 1})"
        found += _more(study, "slow-silent", f"some-silent-{draw}", "needle", words, 0.1)
    return found


def _more(study: Examined, first: str, second: str, of: Behaviour, words: str, bar: float) -> list[Finding]:
    """Test: loss increase of a behaviour by one intervention minus that by another, over its items."""
    what, probes = f"loss increase on {of} (nats), {words}", [study.probes.get(name) for name in (first, second)]
    if any(probe is None for probe in probes):
        return _missing(study, what, _STILL if study.plan.predicts else _SILENT)
    nats = [[item.changed_nats for item in probe.of(of) if item.changed_nats is not None] for probe in probes if probe]
    if not all(nats):
        return [unknown(what, "the model has no such heads")]
    return [_over(above(what, [a - b for a, b in zip(*nats, strict=True)], bar), "items")]


def _symbolic(study: Examined) -> list[Finding]:
    heads, intact = study.heads("text"), study.probes.get("intact")
    what = "symbolic share of the retrieval heads − that of the others"
    if heads is None or intact is None:
        return _missing(study, what, _SILENT)
    chosen = heads.among(retrieving(intact))
    if chosen.sum() < FEWEST:
        return [unknown(what, f"{int(chosen.sum())} retrieval heads; {FEWEST} are needed")]

    def apart(name: str) -> list[float]:
        return heads.by_text(lambda c: float(np.nanmean(c[name][chosen]) - np.nanmean(c[name][~chosen])))

    if not np.isfinite(heads.columns["symbolic"]).any():
        return [unknown(what, _UNSHARED)]
    found = [_over(above(what, apart("symbolic"), _LEARNED), study.plan.units)]
    slower = "frequency of the retrieval heads − of the others (octaves)"
    if study.plan.turns:
        return [*found, supporting(_over(below(slower, apart("centre"), 0.0), study.plan.units))]
    return [*found, supporting(unknown(slower, _STILL))]


# ---- effects of removing position ------------------------------------------------------------------------------------


def _worth(study: Examined) -> list[Finding]:
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
        f"loss increase (nats) from removing position from {what}, layer {head.layer + 1} head {head.head + 1}, "
        f"compared with the median of the others"
    )
    high = head.effect_low if head.effect_high is None else head.effect_high
    return [interval_above(said, head.effect, head.effect_low, high, bar)]


def _concentrated(study: Examined) -> list[Finding]:
    what, audit = "share of the most important head in the summed effects of position", study.audits.get("position")
    if audit is None:
        return _missing(study, what, _UNPLACED)
    effects, low, high = (effects_of(audit, end) for end in ("", "_low", "_high"))
    known = np.isfinite(effects)  # undefined for a head without rotation and bias
    if not known.any() or not np.isfinite(low[known]).all():
        return [unknown(what, "no effects are known")]
    at, counts = int(np.nanargmax(effects)), low > 0
    if not counts[at]:
        return [unknown(what, "no head has a significant effect of removing position")]
    counts[at] = False
    rest = [float(each[counts].sum()) for each in (low, effects, high)]  # significant effects only
    ends = float(low[at]) / (float(low[at]) + rest[2]), float(high[at]) / (float(high[at]) + rest[0])
    share = float(effects[at]) / (float(effects[at]) + rest[1])
    head, layers = audit.heads[at], len(audit.layers)
    place = f"the most important head is layer {head.layer + 1} head {head.head + 1} of {layers} layers"
    return [
        interval_above(what, share, *ends, _STRONG),
        Finding("holds" if head.layer < layers / 3 else "fails", place),
    ]


CLAIMS: tuple[Claim[Examined], ...] = (
    Claim(
        "positional-frequency",
        f"{_SISTER}, abstract",
        "How a head behaves, by position or by content, corresponds to the frequencies it uses.",
        f"Over a model's heads, the rank correlation of the positional share with the centre of gravity of the "
        f"frequencies used is above {_STRONG}, mean over sequences (correlations from 0.5 are commonly called large). "
        "Sliding-window and full-attention layers are tested separately.",
        _correspondence,
    ),
    Claim(
        "correspondence-learned",
        "ours",
        "Training strengthens that correspondence: random weights have less of it.",
        f"Over sequences, the rank correlation is more than {_LEARNED} above that of the same architecture with random "
        f"weights. Supporting: it is more than {_LEARNED} above that on the same tokens in random order.",
        _learned,
    ),
    Claim(
        "previous-token-fast",
        f"{_ROUND}, abstract",
        "Positional patterns such as attention to the previous token use the highest frequencies.",
        f"Previous-token heads give the previous token at least {PREVIOUS} of their attention. The centre of the "
        f"frequencies they use is more than {_OCTAVES:g} octaves (a factor of four) above that of the others, mean "
        "over sequences. Freezing the fastest quarter of their pairs increases the loss on copying by more than 0.1 "
        "nats more than freezing the slowest quarter.",
        _previous_fast,
    ),
    Claim(
        "pure-heads",
        "ours",
        "Purely positional and purely symbolic heads exist.",
        f"The mean number per sequence of heads with a positional share of at least {_PURE} is above 0.5, and so is "
        "that of heads with such a symbolic share (allowing a tenth for incomplete training). Supporting (they are "
        "learned): each number exceeds that with random weights by more than 0.5.",
        _pure,
    ),
    Claim(
        "retrieval-sparse",
        f"{_RETRIEVAL}, abstract",
        "There are retrieval heads, and they are few.",
        f"At least one head has a retrieval score of at least {RETRIEVES}, and less than {_FEW:.0%} of all heads have "
        "(the source's own numbers).",
        _sparse,
    ),
    Claim(
        "retrieval-causal",
        f"{_RETRIEVAL}, abstract; {_ROPE_RETRIEVAL}, abstract (i)",
        "Ablating the retrieval heads loses needles; ablating the same number of other heads does not.",
        "Of the needles that the intact model finds, more than half are lost when these heads are ablated, and less "
        f"than a tenth when the same number of other heads of the same layers is, mean of {DRAWS} random choices (the "
        "source: all, and none). The spread over needles is at least that of chance at each threshold.",
        _causal,
    ),
    Claim(
        "retrieval-slow",
        f"{_ROPE_RETRIEVAL}, abstract (iv)",
        "Retrieval heads retrieve with their lowest frequencies.",
        "Removing the slowest quarter of the retrieval heads' pairs increases the loss on the needle by more than 0.1 "
        f"nats per token more than removing a random quarter, for each of {DRAWS} random choices.",
        _slow,
    ),
    Claim(
        "retrieval-symbolic",
        f"ours, in the terms of {_SISTER}",
        "Retrieval heads are symbolic.",
        f"The symbolic share of the retrieval heads is more than {_LEARNED} above that of the others, mean over "
        "sequences. Supporting: they use slower pairs.",
        _symbolic,
    ),
    Claim(
        "position-worth",
        "ours",
        "Removing position from the most positional head has a larger effect than from most other heads.",
        "Removing position from the head with the largest positional share increases the loss, and by more than for "
        "half of the other heads: the interval of its effect lies above both.",
        _worth,
    ),
    Claim(
        "deposit-pretrained",
        "arXiv 2505.13027 v1, 5.1, for models trained on Task 1; for pretrained models: ours",
        "RoPE deposits position in one early head.",
        f"Position is removed from one head at a time. Over the heads whose effect's interval excludes 0, one head has "
        f"more than {_STRONG} of the summed effects. The interval of its share combines the ends of all intervals (its "
        "low end with the others' high ends, and the reverse). The head is in the first third of the layers.",
        _concentrated,
    ),
)


# ---- verdicts with one number per text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByText:
    """A comparison over sequences, recomputed with one number per text.

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
        """Whether the uncorrected verdict over sequences differs."""
        return self.verdict != self.part.verdict


def by_text(study: Examined) -> Iterator[ByText]:
    """Every comparison of the ledger over sequences; empty with one text or one sequence per text."""
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
