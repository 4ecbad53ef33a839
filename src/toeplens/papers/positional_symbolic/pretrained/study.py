"""The study of a pretrained language model: its claims, and how it is run part by part, resumed and gathered.

The rules of the claims were written before a model was recorded. Comparisons are over sequences (or questions) instead
of seeds. Claims about learning have two baselines: the same architecture with random weights, and the model on the same
tokens in random order.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from toeplens.engine import ExecutionOptions
from toeplens.ground import InputError, read_json
from toeplens.ground.files import make_directory
from toeplens.ground.records import Record
from toeplens.papers.positional_symbolic.pretrained.parts import (
    AUDITED,
    DRAWS,
    FEWEST,
    PIECES,
    PREVIOUS,
    PROBED,
    TOGETHER,
    Examined,
    Making,
    Plan,
    effects_of,
    path_of,
    read,
    retrieving,
)
from toeplens.sources.huggingface import captured
from toeplens.sources.huggingface.load import Dtype, Loaded, load_model
from toeplens.studies.auditing.record import AuditRecord, files_of
from toeplens.studies.kit.claims import Claim, Entry, claim_of, deviation, judge_all, read_claims
from toeplens.studies.kit.study import STUDY, Kept
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
from toeplens.studies.probing import RETRIEVES, Behaviour, ProbeRecord

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


_CHECKS = {
    "correspondence": _correspondence,
    "learned": _learned,
    "previous-fast": _previous_fast,
    "pure": _pure,
    "sparse": _sparse,
    "causal": _causal,
    "slow": _slow,
    "symbolic": _symbolic,
    "worth": _worth,
    "concentrated": _concentrated,
}
_DATA = read_claims(Path(__file__).with_name("claims.yaml"))
CLAIMS: tuple[Claim[Examined], ...] = tuple(claim_of(entry, _CHECKS, _DATA["words"]) for entry in _DATA["claims"])


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


@dataclass(frozen=True, kw_only=True)
class _Pieces(Record):
    audits: dict[str, AuditRecord]
    probes: dict[str, ProbeRecord]


class Pretrained(Examined):
    """The state of the study."""

    NAME, COMMAND, REQUEST = "pretrained", "pretrained", Plan
    PAGE = "toeplens.papers.positional_symbolic.pretrained.page:pretrained_page"

    @classmethod
    def planned(cls, request: Plan) -> Plan:
        return request.checked()

    @classmethod
    def read(cls, directory: Path, plan: Plan, environment: dict[str, Any]) -> Self:
        kinds: dict[str, Any] = {AUDITED: AuditRecord, PROBED: ProbeRecord}
        found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, kind in plan.pieces():
            if path_of(directory, name).exists():
                found[kind][name] = read(directory, name, kinds[kind])
        audits, probes = found.values()
        counted: dict[str, Any] = {"finished": len(audits) + len(probes), "total": len(list(plan.pieces()))}
        told = {"directory": directory, "environment": environment, "plan": plan, "audits": audits, "probes": probes}
        return cls(**told, **counted).judged()

    @classmethod
    def reread(cls, kept: Kept, plan: Plan) -> Self:
        found = _Pieces.from_dict(kept.content, kept.path)
        return cls(**kept.head, plan=plan, audits=found.audits, probes=found.probes).judged()

    def judged(self) -> Self:
        """The state with the verdicts on its claims."""
        return replace(self, entries=judge_all(CLAIMS, self))


gather, is_pretrained, open_record = Pretrained.gather, Pretrained.tells, Pretrained.open_record


class _Stopped(BaseException):
    """Raised between two passes to stop a part; a BaseException, so it is not taken for a failure of the model."""


def examine(
    model: str,
    texts: Mapping[str, str],
    out: Path | str,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    limits: ExecutionOptions | None = None,
    on_piece: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **sizes: Any,
) -> Pretrained:
    """Run the study of a pretrained model in ``out``, or resume it.

    Arguments
        model        a model's directory or its name on the hub, or a GGUF file
        texts        texts by name, from which sequences, needles and questions are taken
        dtype, device  as in `toeplens.sources.huggingface.load_model`
        limits       deadline and stop signal
        on_piece     called after every part with its name, the number of finished parts and the total
        on_progress  called with the progress within a part
        sizes        of `Plan`: sequences, tokens, effect_tokens, probe_tokens, seed

    Raises `InputError` for an unsupported model or one with an encoder, for more tokens than the model has positions,
    for texts that are too short, and if the directory holds another study, or this study with another model, texts or
    sizes.
    """
    limits, directory = limits or ExecutionOptions(), Path(out)
    plan = Plan(model=model, texts=dict(sorted(texts.items())), **sizes).checked()
    loaded = load_model(model, dtype=dtype, device=device)
    loaded.check_decoder("the study of a pretrained model")
    loaded.check_length("tokens", plan.tokens)
    loaded.check_all()
    plan = replace(plan, **_nature(loaded))
    if plan.predicts:
        loaded.check_length("probe_tokens", plan.probe_tokens)
    asked = asdict(replace(plan, texts=plan.digests()))
    _same(directory, asked)
    pieces = list(plan.pieces())

    def report(what: str, done: int, total: int) -> None:
        if limits.over():
            raise _Stopped
        on_progress(what, done, total)

    making = Making(loaded, plan, directory, report)
    making.check()
    with Pretrained.opened(directory, asked) as gathered:
        make_directory(directory / PIECES)
        for at, (name, kind) in enumerate(pieces, 1):
            if limits.over():
                break
            if not path_of(directory, name).exists():
                try:
                    making.make(name, kind)
                except _Stopped:
                    break
                shutil.rmtree(directory / PIECES / f"{name}.parts", ignore_errors=True)
                on_piece(name, at, len(pieces))
    return gathered[0]


def _nature(loaded: Loaded) -> dict[str, Any]:
    """Properties of a model from a short forward pass: rotation, bias, next-token prediction, dtype."""
    turns, biased, causal, inside = [], [], [], []
    tokens = torch.arange(1, 9, device=loaded.model.device).unsqueeze(0)

    def look(call: Any) -> None:
        turns.append(call.rotation is not None)
        biased.append(call.bias is not None)
        inside.append(call.rotation is None and call.bias is None and call.unknown is None)
        causal.append(call.causal)

    captured(loaded.model, {"input_ids": tokens}, look)
    head = loaded.model.get_output_embeddings() is not None
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    weights = hashlib.sha256(repr(_files(loaded)).encode()).hexdigest()
    return {
        "turns": any(turns),
        "biased": any(biased),
        "together": TOGETHER if all(inside) else 1,
        "predicts": head and all(causal),
        "dtype": dtype,
        "weights": weights,
    }


def _files(loaded: Loaded) -> list[Any]:
    """An identification of the model's weights that does not depend on their location."""
    path = Path(loaded.name or "")
    if loaded.name and path.exists():
        return [[name, size] for name, size, _ in files_of(path)]
    return [loaded.name, getattr(loaded.model.config, "_commit_hash", None)]


def _same(directory: Path, asked: dict[str, Any]) -> None:
    """Raise `InputError` if the directory holds another study."""
    path = directory / STUDY
    if not path.exists():
        return
    had = read_json(path)
    for name, value in asked.items():
        if isinstance(had, dict) and name in had and had[name] != value:
            wanted = "the same" if name in ("texts", "weights") else f"{had[name]!r},"  # these are hashes
            raise InputError(
                f"{name} must be {wanted} as in the study in {directory}. Choose another directory otherwise."
            )
