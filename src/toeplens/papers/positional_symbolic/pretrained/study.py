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
import pyarrow as pa
import torch

from toeplens.backends.hf import capture_attention
from toeplens.backends.hf.load import Dtype, LoadedModel, load_model
from toeplens.engine import ExecutionOptions
from toeplens.papers.positional_symbolic.pretrained.parts import (
    AUDIT,
    GROUP_SIZE,
    MIN_HEADS,
    MIN_PREVIOUS,
    NUM_DRAWS,
    PARTS_DIR,
    PROBE,
    ModelHeads,
    PartRunner,
    PretrainedPlan,
    effect_unit,
    effects_of,
    part_path,
    read_part,
    retrieval_heads,
)
from toeplens.studies.auditing.record import Audit, files_of
from toeplens.studies.kit.claims import Claim, LedgerEntry, claim_of, deviation, judge_all, read_claims
from toeplens.studies.kit.frames import stack_tables
from toeplens.studies.kit.study import STUDY, StoredResults, StudyState
from toeplens.studies.kit.verdicts import (
    LEVEL,
    RULE,
    Comparison,
    Finding,
    Verdict,
    above,
    below,
    interval_above,
    mean_contrast,
    supporting,
    unknown_finding,
)
from toeplens.studies.probing import MIN_RETRIEVAL, ProbeKind, ProbeRecord
from toeplens.utils import InputError, read_json
from toeplens.utils.files import make_directory
from toeplens.utils.records import Record

_STRONG, _LEARNED, _MIN_OCTAVES, _PURE, _MAX_RETRIEVAL = 0.5, 0.1, 2.0, 0.9, 0.05
_NO_ROTATION = "the model has no rotation"
_NO_PREDICTION = "the model does not predict the next token"
_NO_POSITION = "no head has a rotation or a bias that can be removed"
_NO_SHARES = "the shares of all heads are undefined"
_MIN_LOST, _MAX_LOST = 0.5, 0.1  # of the needles
_BASELINES = {"random": "random weights", "shuffled": "tokens in random order"}


def is_over_units(finding: Finding, study: PretrainedStudy) -> bool:
    """Whether a finding compares one number per sequence or group of sequences."""
    return f" over {len(study.plan.sequence_keys)} {study.plan.units}," in finding.evidence


def _missing(study: PretrainedStudy, quantity: str, reason: str) -> list[Finding]:
    """An unknown finding: not applicable for a ``reason`` of the model if complete, otherwise unfinished."""
    return [unknown_finding(quantity, reason if study.is_complete else "not finished")]


def _correspondence(study: PretrainedStudy) -> list[Finding]:
    heads, quantity = study.heads("text"), "rank correlation of the positional share and the frequency used"
    if heads is None or not study.plan.turns:
        return _missing(study, quantity, _NO_ROTATION)
    findings = []
    for part, mask in heads.layer_groups.items():
        correlations = heads.correlations("positional", "centre", mask)
        findings.append(above(f"{quantity}, {part}", correlations, _STRONG, units=study.plan.units))
    return findings


def _learned(study: PretrainedStudy) -> list[Finding]:
    heads, quantity = study.heads("text"), "that correlation − that of"
    if heads is None or not study.plan.turns:
        return _missing(study, quantity, _NO_ROTATION)
    findings = []
    for kind, words in _BASELINES.items():
        other = study.heads(kind)
        if other is None:
            findings += _missing(study, f"{quantity} {words}", _NO_ROTATION)
            continue
        for part, mask in heads.layer_groups.items():
            values = (entry.correlations("positional", "centre", mask) for entry in (heads, other))
            pairs = zip(*values, strict=True)
            finding = above(f"{quantity} {words}, {part}", [a - b for a, b in pairs], _LEARNED, units=study.plan.units)
            findings.append(finding if kind == "random" else supporting(finding))
    return findings


def _previous_fast(study: PretrainedStudy) -> list[Finding]:
    heads, quantity = study.heads("text"), "frequency of previous-token heads − of the others (octaves)"
    if heads is None or not study.plan.turns:
        return _missing(study, quantity, _NO_ROTATION)
    selected = heads.mean("previous") >= MIN_PREVIOUS
    if selected.sum() < MIN_HEADS:
        return [unknown_finding(quantity, f"{int(selected.sum())} previous-token heads; {MIN_HEADS} are needed")]

    def frequency_gap(columns: dict[str, np.ndarray]) -> float:
        return float(np.nanmean(columns["centre"][selected]) - np.nanmean(columns["centre"][~selected]))

    finding = above(
        f"{quantity} ({int(selected.sum())} heads)", heads.by_text(frequency_gap), _MIN_OCTAVES, units=study.plan.units
    )
    findings = [finding]
    words = "their fastest quarter frozen − their slowest quarter frozen"
    findings += _compare_effects(study, "fast-still", "slow-still", "copying", words, 0.1)
    return findings


def _pure(study: PretrainedStudy) -> list[Finding]:
    names = ("positional", "symbolic")
    trained, baseline = ({name: _pure_counts(study, kind, name) for name in names} for kind in ("text", "random"))
    findings = []
    for name, counts in trained.items():
        quantity = f"heads with a {name} share of at least {_PURE}"
        if counts is None:
            findings += _missing(study, quantity, _NO_SHARES)
        else:
            findings.append(above(quantity, counts, 0.5, units=study.plan.units))
    for name, counts in trained.items():
        quantity, baseline_counts = f"that number ({name}) − that with random weights", baseline[name]
        if counts is None or baseline_counts is None:
            findings += map(supporting, _missing(study, quantity, _NO_SHARES))
        else:
            excess = [count - other for count, other in zip(counts, baseline_counts, strict=True)]
            findings.append(supporting(above(quantity, excess, 0.5, units=study.plan.units)))
    return findings


def _pure_counts(study: PretrainedStudy, kind: str, name: str) -> list[float] | None:
    """Number of pure heads per sequence; None if a sequence has no defined share."""
    heads = study.heads(kind)
    if heads is None or not np.isfinite(heads.columns[name]).any(1).all():
        return None
    return heads.by_text(lambda columns: float((columns[name] >= _PURE).sum()))


def _sparse(study: PretrainedStudy) -> list[Finding]:
    quantity, intact = "share of retrieval heads", study.probes.get("intact")
    if intact is None or not intact.heads:
        return _missing(study, quantity, _NO_PREDICTION)
    count = len(retrieval_heads(intact))
    if not any(item.right for item in intact.items_of("needle")):
        return [unknown_finding(quantity, "the model finds no needle")]
    share = count / len(intact.heads)
    text = f"{count} of {len(intact.heads)} heads have a score of at least {MIN_RETRIEVAL}"
    exists = Finding("holds" if count else "fails", text)
    text = f"{quantity}: {share:.3f}, threshold {_MAX_RETRIEVAL}"
    is_sparse = Finding("holds" if share < _MAX_RETRIEVAL else "fails", text)
    return [exists, is_sparse]


def _causal(study: PretrainedStudy) -> list[Finding]:
    findings = []
    for name, words in (("no-retrieval", "the retrieval heads"), ("no-others", "the same number of other heads")):
        quantity = f"share of needles lost without {words}"
        names = [name] if name == "no-retrieval" else [f"{name}-{draw}" for draw in range(NUM_DRAWS)]
        values = _needles_lost(study, names)
        if values is None:
            measured = all(probe in study.probes for probe in names)
            findings += (
                [unknown_finding(quantity, "the model finds no needle, or has no such heads")]
                if measured
                else _missing(study, quantity, _NO_PREDICTION)
            )
        elif name == "no-retrieval":
            findings.append(above(quantity, values, _MIN_LOST, grain=deviation(_MIN_LOST), units="needles"))
        else:
            findings.append(below(quantity, values, _MAX_LOST, grain=deviation(_MAX_LOST), units="needles"))
    return findings


def _needles_lost(study: PretrainedStudy, names: Sequence[str]) -> list[float] | None:
    """For each needle that the intact model finds: whether it is lost, mean over the interventions."""
    probes = [study.probes.get(name) for name in names]
    losses = [
        [item.right - (item.changed_right or 0.0) for item in probe.items_of("needle") if item.right == 1]
        for probe in probes
        if probe is not None and probe.changes
    ]
    return None if len(losses) < len(names) or not losses[0] else np.mean(losses, axis=0).tolist()


def _slow(study: PretrainedStudy) -> list[Finding]:
    findings = []
    for draw in range(NUM_DRAWS):
        words = f"their slowest quarter removed − a random quarter removed ({draw + 1})"
        findings += _compare_effects(study, "slow-silent", f"some-silent-{draw}", "needle", words, 0.1)
    return findings


def _compare_effects(
    study: PretrainedStudy, first: str, second: str, behaviour: ProbeKind, words: str, threshold: float
) -> list[Finding]:
    """Test: loss increase of a behaviour by one intervention minus that by another, over its items."""
    quantity = f"loss increase on {behaviour} (nats), {words}"
    probes = [study.probes.get(name) for name in (first, second)]
    if any(probe is None for probe in probes):
        return _missing(study, quantity, _NO_ROTATION if study.plan.predicts else _NO_PREDICTION)
    items = [probe.items_of(behaviour) for probe in probes if probe]
    nats = [[item.changed_nats for item in group if item.changed_nats is not None] for group in items]
    if not all(nats):
        return [unknown_finding(quantity, "the model has no such heads")]
    return [above(quantity, [a - b for a, b in zip(*nats, strict=True)], threshold, units="items")]


def _symbolic(study: PretrainedStudy) -> list[Finding]:
    heads, intact = study.heads("text"), study.probes.get("intact")
    quantity = "symbolic share of the retrieval heads − that of the others"
    if heads is None or intact is None:
        return _missing(study, quantity, _NO_PREDICTION)
    selected = heads.mask_of(retrieval_heads(intact))
    if selected.sum() < MIN_HEADS:
        return [unknown_finding(quantity, f"{int(selected.sum())} retrieval heads; {MIN_HEADS} are needed")]

    def share_gap(name: str) -> list[float]:
        return heads.by_text(lambda x: float(np.nanmean(x[name][selected]) - np.nanmean(x[name][~selected])))

    if not np.isfinite(heads.columns["symbolic"]).any():
        return [unknown_finding(quantity, _NO_SHARES)]
    findings = [above(quantity, share_gap("symbolic"), _LEARNED, units=study.plan.units)]
    slower = "frequency of the retrieval heads − of the others (octaves)"
    if study.plan.turns:
        return [*findings, supporting(below(slower, share_gap("centre"), 0.0, units=study.plan.units))]
    return [*findings, supporting(unknown_finding(slower, _NO_ROTATION))]


def _position_effect(study: PretrainedStudy) -> list[Finding]:
    quantity, audit, heads = "the most positional head", study.audits.get("position"), study.heads("text")
    if audit is None or heads is None:
        return _missing(study, quantity, _NO_POSITION)
    shares = heads.mean("positional")
    if not np.isfinite(shares).any():
        return [unknown_finding(quantity, _NO_SHARES)]
    index = int(np.nanargmax(shares))
    head = audit.heads[index]
    others = np.delete(effects_of(audit), index)
    others = others[np.isfinite(others)]
    if head.effect is None or head.effect_low is None or not len(others):
        return [unknown_finding(quantity, "no effects are known")]
    threshold = max(0.0, float(np.median(others)))
    text = (
        f"{effect_unit(audit)} from removing position from {quantity}, layer {head.layer + 1} head {head.head + 1}, "
        f"compared with the median of the others"
    )
    high = head.effect_low if head.effect_high is None else head.effect_high
    return [interval_above(text, head.effect, head.effect_low, high, threshold)]


def _concentration(study: PretrainedStudy) -> list[Finding]:
    quantity, audit = "share of the most important head in the summed effects of position", study.audits.get("position")
    if audit is None:
        return _missing(study, quantity, _NO_POSITION)
    effects, low, high = (effects_of(audit, end) for end in ("", "_low", "_high"))
    known = np.isfinite(effects)  # undefined for a head without rotation and bias
    if not known.any() or not np.isfinite(low[known]).all():
        return [unknown_finding(quantity, "no effects are known")]
    index, counts = int(np.nanargmax(effects)), low > 0
    if not counts[index]:
        return [unknown_finding(quantity, "no head has a significant effect of removing position")]
    counts[index] = False
    others = [float(values[counts].sum()) for values in (low, effects, high)]  # significant effects only
    ends = float(low[index]) / (float(low[index]) + others[2]), float(high[index]) / (float(high[index]) + others[0])
    share = float(effects[index]) / (float(effects[index]) + others[1])
    head, layers = audit.heads[index], len(audit.layers)
    text = f"the most important head is layer {head.layer + 1} head {head.head + 1} of {layers} layers"
    is_early = Finding("holds" if head.layer < layers / 3 else "fails", text)
    return [interval_above(quantity, share, *ends, _STRONG), is_early]


_CHECKS = {
    "correspondence": _correspondence,
    "learned": _learned,
    "previous-fast": _previous_fast,
    "pure": _pure,
    "sparse": _sparse,
    "causal": _causal,
    "slow": _slow,
    "symbolic": _symbolic,
    "worth": _position_effect,
    "concentrated": _concentration,
}
_DATA = read_claims(Path(__file__).with_name("claims.yaml"))
CLAIMS: tuple[Claim[PretrainedStudy], ...] = tuple(claim_of(item, _CHECKS, _DATA["words"]) for item in _DATA["claims"])


@dataclass(frozen=True)
class TextComparison:
    """A comparison over sequences, recomputed with one number per text.

    finding    the part of the claim
    low, high  the 95 % interval of the texts' mean
    verdict    by that interval, without correction, and however few texts there are
    """

    entry: LedgerEntry
    finding: Finding
    texts: int
    value: float
    low: float
    high: float
    verdict: Verdict

    @property
    def differs(self) -> bool:
        """Whether the uncorrected verdict over sequences differs."""
        return self.verdict != self.finding.verdict


def compare_by_text(study: PretrainedStudy) -> Iterator[TextComparison]:
    """Every comparison of the ledger over sequences; empty with one text or one sequence per text."""
    names = [name for name, _ in study.plan.sequence_keys]
    texts = list(dict.fromkeys(names))
    if len(texts) < 2 or study.plan.sequences == 1:
        return
    for entry in study.entries:
        for finding in entry.findings:
            if finding.comparison is None or not is_over_units(finding, study):
                continue
            ((_, values),) = finding.comparison.mean.terms
            means = [np.mean([x for x, name in zip(values, names, strict=True) if name == text]) for text in texts]
            contrast = mean_contrast(np.array(means), finding.comparison.mean.grain)
            holds, fails = Comparison(contrast, finding.comparison.low, finding.comparison.high).p_values()
            judged = Finding("undecided", "", holds, fails)
            ends, verdict = contrast.interval(LEVEL), judged.verdict_at(LEVEL)
            yield TextComparison(entry, finding, len(texts), contrast.value, *ends, verdict)


@dataclass(frozen=True, kw_only=True)
class _PartCache(Record):
    audits: dict[str, Audit]
    probes: dict[str, ProbeRecord]


@dataclass(frozen=True, kw_only=True)
class PretrainedStudy(StudyState):
    """The finished parts of the study.

    audits, probes  by name
    """

    NAME, COMMAND, REQUEST = "pretrained", "pretrained", PretrainedPlan
    PAGE = "toeplens.papers.positional_symbolic.pretrained.page:pretrained_page"

    plan: PretrainedPlan
    audits: Mapping[str, Audit]
    probes: Mapping[str, ProbeRecord]

    @property
    def rule(self) -> str:
        return RULE.replace("seed", self.plan.units.removesuffix("s"))

    def request_fields(self) -> dict[str, Any]:
        return asdict(self.plan)

    def result_fields(self) -> dict[str, Any]:
        return {
            "audits": {name: record.to_dict() for name, record in self.audits.items()},
            "probes": {name: record.to_dict() for name, record in self.probes.items()},
        }

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        """Those of its audits and probes, with their names as a first column, and the claims."""

        def maker(column: str, parts: Mapping[str, Any], rows: str) -> Callable[[], pa.Table]:
            return lambda: stack_tables(column, {name: record.table_makers()[rows]() for name, record in parts.items()})

        audits = {
            rows: maker("audit", self.audits, rows) for rows in ("heads", "layers", "frequencies", "distances", "bands")
        }
        probes = {rows: maker("probe", self.probes, rows) for rows in ("behaviours", "items")}
        return audits | probes | super().table_makers()

    def heads(self, kind: str) -> ModelHeads | None:
        """The heads on all sequences: of the model (``text``), of random weights, or on shuffled tokens."""
        records = [self.audits.get(f"{kind}-{number}") for number in range(len(self.plan.sequence_keys))]
        audits = [record for record in records if record is not None]
        return ModelHeads.from_audits(audits) if len(audits) == len(records) else None

    @classmethod
    def plan_from_request(cls, request: PretrainedPlan) -> PretrainedPlan:
        return request.validate()

    @classmethod
    def read(cls, directory: Path, plan: PretrainedPlan, environment: dict[str, Any]) -> Self:
        kinds: dict[str, Any] = {AUDIT: Audit, PROBE: ProbeRecord}
        records: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, kind in plan.iter_parts():
            if part_path(directory, name).exists():
                records[kind][name] = read_part(directory, name, kinds[kind])
        audits, probes = records.values()
        progress: dict[str, Any] = {"finished": len(audits) + len(probes), "total": len(list(plan.iter_parts()))}
        fields = {"directory": directory, "environment": environment, "plan": plan, "audits": audits, "probes": probes}
        return cls(**fields, **progress).with_verdicts()

    @classmethod
    def from_record(cls, stored: StoredResults, plan: PretrainedPlan) -> Self:
        cache = _PartCache.from_dict(stored.content, stored.path)
        return cls(**stored.head, plan=plan, audits=cache.audits, probes=cache.probes).with_verdicts()

    def with_verdicts(self) -> Self:
        """The state with the verdicts on its claims."""
        return replace(self, entries=judge_all(CLAIMS, self))


gather, open_record = PretrainedStudy.gather, PretrainedStudy.open_record
is_pretrained = PretrainedStudy.is_study_or_record


class _PartInterrupted(BaseException):
    """Raised between two passes to stop a part; a BaseException, so it is not taken for a failure of the model."""


def examine(
    model: str,
    texts: Mapping[str, str],
    out: Path | str,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    execution: ExecutionOptions | None = None,
    on_part: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    **sizes: Any,
) -> PretrainedStudy:
    """Run the study of a pretrained model in ``out``, or resume it.

    Arguments
        model        a model's directory or its name on the hub, or a GGUF file
        texts        texts by name, from which sequences, needles and questions are taken
        dtype, device  as in `toeplens.backends.hf.load_model`
        execution    deadline and stop signal
        on_part      called after every part with its name, the number of finished parts and the total
        on_progress  called with the progress within a part
        sizes        of `PretrainedPlan`: sequences, tokens, effect_tokens, probe_tokens, seed

    Raises `InputError` for an unsupported model or one with an encoder, for more tokens than the model has positions,
    for texts that are too short, and if the directory holds another study, or this study with another model, texts or
    sizes.
    """
    execution, directory = execution or ExecutionOptions(), Path(out)
    plan = PretrainedPlan(model=model, texts=dict(sorted(texts.items())), **sizes).validate()
    loaded = load_model(model, dtype=dtype, device=device)
    loaded.check_decoder("the study of a pretrained model")
    loaded.check_length("tokens", plan.tokens)
    loaded.check_complete()
    plan = replace(plan, **_model_properties(loaded))
    if plan.predicts:
        loaded.check_length("probe_tokens", plan.probe_tokens)
    request = asdict(replace(plan, texts=plan.digests()))
    _check_same(directory, request)
    parts = list(plan.iter_parts())

    def report(stage: str, done: int, total: int) -> None:
        if execution.is_over():
            raise _PartInterrupted
        on_progress(stage, done, total)

    runner = PartRunner(loaded, plan, directory, report)
    runner.check()
    with PretrainedStudy.open_locked(directory, request) as gathered:
        make_directory(directory / PARTS_DIR)
        for index, (name, kind) in enumerate(parts, 1):
            if execution.is_over():
                break
            if not part_path(directory, name).exists():
                try:
                    runner.run(name, kind)
                except _PartInterrupted:
                    break
                shutil.rmtree(directory / PARTS_DIR / f"{name}.parts", ignore_errors=True)
                on_part(name, index, len(parts))
    return gathered[0]


def _model_properties(loaded: LoadedModel) -> dict[str, Any]:
    """Properties of a model from a short forward pass: rotation, bias, next-token prediction, dtype."""
    rotated, biased, causal, at_input = [], [], [], []
    tokens = torch.arange(1, 9, device=loaded.device).unsqueeze(0)

    def record_call(call: Any) -> None:
        rotated.append(call.rotation is not None)
        biased.append(call.bias is not None)
        at_input.append(call.rotation is None and call.bias is None and call.unknown is None)
        causal.append(call.causal)

    capture_attention(loaded.model, {"input_ids": tokens}, record_call)
    has_head = loaded.model.get_output_embeddings() is not None
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    weights = hashlib.sha256(repr(_weights_id(loaded)).encode()).hexdigest()
    return {
        "turns": any(rotated),
        "biased": any(biased),
        "together": GROUP_SIZE if all(at_input) else 1,
        "predicts": has_head and all(causal),
        "dtype": dtype,
        "weights": weights,
    }


def _weights_id(loaded: LoadedModel) -> list[Any]:
    """An identification of the model's weights that does not depend on their location."""
    path = Path(loaded.name or "")
    if loaded.name and path.exists():
        return [[name, size] for name, size, _ in files_of(path)]
    return [loaded.name, getattr(loaded.model.config, "_commit_hash", None)]


def _check_same(directory: Path, request: dict[str, Any]) -> None:
    """Raise `InputError` if the directory holds another study."""
    path = directory / STUDY
    if not path.exists():
        return
    existing = read_json(path)
    for name, value in request.items():
        if isinstance(existing, dict) and name in existing and existing[name] != value:
            wanted = "the same" if name in ("texts", "weights") else f"{existing[name]!r},"  # these are hashes
            raise InputError(
                f"{name} must be {wanted} as in the study in {directory}. Choose another directory otherwise."
            )
