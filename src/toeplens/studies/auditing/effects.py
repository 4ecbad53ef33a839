"""Ablation effects of the audited heads, of all of them or of the N most important, added to the records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit
from torch import Tensor

from toeplens.backends.hf import BandEffects, HeadEffects, NoGradient, band_effects, head_effects
from toeplens.backends.hf.effect_metric import MIN_SEQUENCES
from toeplens.backends.hf.effects import EstimateTarget, head_estimates
from toeplens.lens import bootstrap_means, check_estimates, gini, sample_heads
from toeplens.studies.auditing.inputs import AuditContext
from toeplens.studies.auditing.record import Audit, AuditCache, BandRecord, CallRecords, MetricName, Number
from toeplens.utils.formatting import finite_or_none
from toeplens.utils.machine import is_out_of_memory

# per layer: effects of its heads, and the ends of their intervals
Columns = tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"], Float[np.ndarray, "H"]]
LEVEL = 0.95
_SIGMAS, _ONE_SIDED = 1.96, 1.645  # standard deviations for 95 %, two-sided and one-sided
_HALF_MEAN, _HALF_STD = 0.399, 0.584  # mean and standard deviation of max(x, 0) for standard normal x
_MAX_ROUNDS = 8  # maximum number of rounds of an elimination
_MIN_PARTS = 4  # minimum number of parts for an interval
_MAX_BLOCKS = 16  # maximum number of pieces per sequence
_CANDIDATE_FACTOR, _NUM_DRAWN = 4, 8  # heads that continue after the estimate, in multiples of N; randomly drawn heads
_MAX_TOKENS = 2048  # maximum tokens of an estimate, which holds the outputs of every layer
EstimateFn = Callable[[Mapping[str, Any]], Float[np.ndarray, "n"] | None]
AblateFn = Callable[[Mapping[str, Any], Sequence[Sequence[int]], Callable[[int, int], None]], HeadEffects]


def without_effects(measured: Sequence[CallRecords], **about: str | None) -> Audit:
    """The record of an audit without effects, with the known entries of ``about``; `finish_audit` adds the rest."""
    heads = tuple(head for call in measured for head in call.heads)
    known = {name: value for name, value in about.items() if value is not None}
    return Audit(known, tuple(call.layer for call in measured), heads, None, None, None, 0.0)


def effects_of(work: AuditContext, measured: Sequence[CallRecords]) -> Audit:
    """Ablate each measured head of a transformers model, or remove its position (`head_effects`).

    Saved results are reused. Estimates are checked by ablating a sample of the heads exactly
    (`toeplens.lens.EstimateCheck`); if the check fails, there are no effects.
    """
    options, texts, method = work.options, work.sequences.texts, work.options.effects
    model, inputs, progress = work.loaded.model, work.inputs, partial(work.report, "heads")
    calls = [(x.layer.module, x.layer.side, x.layer.kind, x.layer.layer, x.layer.heads) for x in measured]
    common: dict[str, Any] = {"mask_token": work.mask_token, "seed": options.seed}
    if method == "bands":
        return _band_record(measured, band_effects(model, inputs, calls, **common, on_progress=progress), work)
    wanted = [[head for head in range(count) if options.heads is None or head in options.heads] for *_, count in calls]
    ablate = partial(head_effects, model, calls=calls, **common)
    if options.first is not None and method in get_args(EstimateTarget):

        def ablate_wanted(
            inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]], on_progress: Callable[[int, int], None]
        ) -> HeadEffects:
            both = [sorted({*one} & {*other}) for one, other in zip(chosen, wanted, strict=True)]
            return ablate(inputs, chosen=both, method=method, on_progress=on_progress)

        estimate = partial(_estimate_effects, model, calls=calls, wanted=wanted, of=method, **common)
        return _top_effects(work, measured, ablate_wanted, estimate)

    def ablate_saved(name: str, chosen: Sequence[Sequence[int]], **kwargs: Any) -> tuple[HeadEffects, list[np.ndarray]]:
        saved = [work.cache.get_array(f"{name}-{number}") for number in range(len(calls))]
        remaining = [() if parts is not None else heads for parts, heads in zip(saved, chosen, strict=True)]
        done, total = sum(map(len, chosen)) - sum(map(len, remaining)), sum(map(len, chosen))
        result = ablate(
            inputs,
            chosen=remaining,
            on_call=lambda number, parts: work.cache.put_array(f"{name}-{number}", parts),
            on_progress=lambda now, _: progress(done + now, total),
            **kwargs,
        )
        return result, [new if old is None else old for old, new in zip(saved, result.block_effects, strict=True)]

    check = None
    if method != "attribution":
        result, parts = ablate_saved("effects", wanted, method=method)
    else:
        result = ablate(inputs, method=method)
        parts = list(result.block_effects)
        estimates = [effects.mean((0, 1)) for effects in parts]
        sample = sample_heads(estimates)
        exact = ablate_saved("check", [heads.tolist() for heads in sample])[1]
        exact_means = [effects.mean((0, 1))[heads] for effects, heads in zip(exact, sample, strict=True)]
        check = check_estimates(estimates, exact_means, sample)
        if not check.is_reliable:
            return replace(without_effects(measured, no_effects=check.summary), check=check)
    rows = [merge_texts(values, texts) for values in parts]
    return with_effects(
        measured,
        (interval_of(values, options.seed) for values in rows),
        _reach(rows[0].shape[0] * rows[0].shape[1]) if rows else _SIGMAS,
        effect=result.metric,
        method=result.method,
        baseline=_mean_or_none(result.baseline),
        intervals=describe_intervals(parts[0], inputs["input_ids"].shape[1], texts) if parts else None,
        check=check,
    )


def _top_effects(work: AuditContext, calls: Sequence[CallRecords], ablate: AblateFn, estimate: EstimateFn) -> Audit:
    """The heads with the largest effects; the others are dropped early (`eliminate`)."""
    options, counts, first = work.options, [call.layer.heads for call in calls], work.options.first or 1
    progress = partial(work.report, "heads")
    race = eliminate(ablate, work.inputs, counts, first, work.cache, progress, estimate, options.seed)
    text = f"Heads whose intervals lay below those of {first} others were dropped early."
    if race.drawn:
        doubt = " Further heads may be missing; measure all heads to be sure." if race.missed else ""
        text = (
            f"A gradient-based estimate excluded {race.skipped} heads without measuring them. As a check, {race.drawn} "
            f"randomly chosen heads with low estimates were measured too; {race.missed or 'none'} of them came out "
            f"among the first {first}.{doubt} {text}"
        )
    return with_effects(
        calls,
        (interval_of(values, options.seed) for values in race.parts),
        effect=race.outcome,
        method=options.effects,
        baseline=_mean_or_none(race.baseline),
        intervals="over blocks of tokens within the sequences",
        race=text,
    )


def _estimate_effects(
    model: Any, inputs: Mapping[str, Any], calls: Any, wanted: Sequence[Sequence[int]], of: EstimateTarget, **given: Any
) -> Float[np.ndarray, "n"] | None:
    """The estimated effects of all wanted heads; None if they are not available."""
    try:
        result = head_estimates(model, inputs, calls, target=of, **given)
    except Exception as error:
        if isinstance(error, NoGradient) or is_out_of_memory(error):
            return None
        raise
    means = [effects.mean((0, 1)) for effects in result.block_effects]
    for mean, heads in zip(means, wanted, strict=True):
        without = of == "position" and bool(np.isnan(mean).all())  # heads without position
        if not without and not np.isfinite(mean[heads]).all():  # in 16 bits, gradients overflow before states do
            return None
        mean[np.setdiff1d(np.arange(len(mean)), heads)] = np.nan
    return np.concatenate(means)


def _mean_or_none(baseline: Float[np.ndarray, "B"] | None) -> Number:
    return None if baseline is None else finite_or_none(float(np.mean(baseline)))


def _band_record(measured: Sequence[CallRecords], result: BandEffects, work: AuditContext) -> Audit:
    """Records of heads without effects, and of the measured bands."""
    records: list[BandRecord] = []
    texts = work.sequences.texts
    columns = zip(measured, result.block_effects, result.bands, result.frequencies, strict=True)
    for call, parts, bands, frequencies in columns:
        speeds = np.abs(frequencies)
        for band, *column in zip(bands, *interval_of(merge_texts(parts, texts), work.options.seed), strict=True):
            band_speeds = speeds[list(band)]
            ends = band[0], band[-1], float(band_speeds.max()), float(band_speeds.min())
            records.append(BandRecord(*call.layer.layer_key, *ends, *(finite_or_none(float(x)) for x in column)))
    intervals = describe_intervals(result.block_effects[0], work.inputs["input_ids"].shape[1], texts)
    fields: dict[str, Any] = {"effect": result.metric, "method": "bands", "baseline": _mean_or_none(result.baseline)}
    return replace(without_effects(measured, intervals=intervals), **fields, bands=tuple(records))


def with_effects(
    measured: Sequence[CallRecords],
    columns: Iterable[Columns],
    reach: float = _SIGMAS,
    *,
    intervals: str | None,
    race: str | None = None,
    **fields: Any,
) -> Audit:
    """The record with each layer's effects, their intervals and their concentration, and other fields.

    ``reach`` is the half width of an interval in standard errors.
    """
    records = []
    for call, column in zip(measured, columns, strict=True):
        heads = tuple(
            replace(head, effect=finite_or_none(a), effect_low=finite_or_none(b), effect_high=finite_or_none(c))
            for head, a, b, c in zip(call.heads, *column, strict=True)
        )
        records.append(CallRecords(replace(call.layer, deposit=concentration(*column, reach)), heads))
    return replace(without_effects(records, intervals=intervals, race=race), **fields)


def concentration(
    effects: Float[np.ndarray, "H"], low: Float[np.ndarray, "H"], high: Float[np.ndarray, "H"], reach: float = _SIGMAS
) -> dict[str, Number]:
    """Sums of a layer's positive and negative effects, and how concentrated the positive ones are (the deposit).

    See `LayerRecord`. The shares are None if the sum of the positive effects is not significant at 5 % (compared with
    independent heads without effect and with the same interval widths), or if intervals are unknown. ``reach`` is the
    half width of an interval in standard errors.
    """
    if not np.isfinite(effects).all():  # unknown for some heads
        return {}
    clipped = np.clip(effects, 0, None)
    total, order = clipped.sum(), np.sort([*clipped, 0.0])[::-1]
    sums = {"helps": total, "harms": np.clip(effects, None, 0).sum(), "lead": order[0] - order[1]}
    result: dict[str, Number] = {name: finite_or_none(value) for name, value in sums.items()}
    sigma = (high - low) / (2 * reach)
    noise = _HALF_MEAN * sigma.sum() + _ONE_SIDED * _HALF_STD * np.sqrt((sigma**2).sum())
    if not total > noise:  # also if intervals are unknown
        return result | {"top_share": None, "effective_heads": None, "gini": None}
    effective = float(total**2 / (clipped**2).sum())
    return result | {"top_share": float(order[0] / total), "effective_heads": effective, "gini": gini(clipped)}


def interval_of(parts: Float[np.ndarray, "B K H"], seed: int) -> Columns:
    """Mean over sequences and blocks, and the ends of its 95 % interval; NaN if there is only one part.

    The interval is a bootstrap over sequences and their blocks, or Student's t interval for fewer than 8 parts.
    """
    rows = parts.reshape(-1, parts.shape[-1])
    finite = np.isfinite(rows)
    known = np.atleast_1d(finite.any(0))
    if known.any() and not finite[:, known].all():  # some heads were dropped early
        per_head = [
            interval_of(rows[finite[:, head] if known[head] else slice(None), head].reshape(-1, 1, 1), seed)
            for head in range(rows.shape[1])
        ]
        mean, low, high = (np.concatenate(columns) for columns in zip(*per_head, strict=True))
        return mean, low, high
    count, mean = len(rows), rows.mean(0)
    if count < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown
    if count >= MIN_SEQUENCES:
        return mean, *bootstrap_means(rows, level=LEVEL, seed=seed)
    reach = _reach(count) * rows.std(0, ddof=1) / np.sqrt(count)
    return mean, mean - reach, mean + reach


def _reach(count: int) -> float:
    """Half width of the interval of a mean over ``count`` parts, in standard errors."""
    return _SIGMAS if not 1 < count < MIN_SEQUENCES else float(stdtrit(count - 1, (1 + LEVEL) / 2))


def merge_texts(parts: Float[np.ndarray, "B K H"], texts: Sequence[str]) -> Float[np.ndarray, "_T _K H"]:
    """Merge the parts of each text, as sequences of one text are not independent; the mean stays the same.

    With m the mean over all sequences and m_t the mean over the n_t sequences of one of T texts, the part of the text
    is m + T n_t (m_t - m) / sum n. This is m_t if all texts have equally many sequences, and otherwise the linearised
    contribution of the text to the mean.

    Arguments
        texts  name of each sequence's text; with fewer than two texts the parts are returned unchanged
    """
    names, labels, means = sorted(set(texts)), np.array(texts), parts.mean(1)
    if len(names) < 2:
        return parts
    shifts = np.stack([(means[labels == name] - means.mean(0)).sum(0) for name in names])
    return (means.mean(0) + len(names) / len(labels) * shifts)[:, None]


def describe_intervals(parts: Float[np.ndarray, "B K H"], tokens: int, texts: Sequence[str] = ()) -> str | None:
    """What the intervals are taken over, as text; None if there are none."""
    sequences, blocks, _ = parts.shape
    if len(set(texts)) > 1:
        return f"over {len(set(texts))} texts"
    if blocks > 1:
        return f"over blocks of about {round(tokens / blocks)} tokens within the sequences"
    return "over sequences" if sequences > 1 else None


# ---- successive elimination: the N most important heads --------------------------------------------------------------


@dataclass(frozen=True)
class Elimination:
    """The effects of the heads that were not dropped."""

    parts: list[Float[np.ndarray, "R 1 _H"]]  # per call, in each part of the sequences; NaN after a head was dropped
    baseline: Float[np.ndarray, "B"] | None  # loss of the intact model per processed sequence; None for states
    outcome: MetricName
    skipped: int = 0  # heads dropped by the estimate without measuring them
    drawn: int = 0  # heads with low estimates that were measured anyway; 0 without an estimate
    missed: int = 0  # of the drawn heads, those that ended up among the first


def eliminate(
    ablate: AblateFn,
    inputs: Mapping[str, Any],
    counts: Sequence[int],
    first: int,
    cache: AuditCache,
    report: Callable[[int, int], None],
    estimate: EstimateFn = lambda inputs: None,
    seed: int = 0,
) -> Elimination:
    """Effects of all heads, more precise for heads that may be among the ``first``.

    Sequences are processed in rounds. After each round, heads are dropped whose interval lies below those of ``first``
    other heads, until the sequences end or only these are left. Intervals are Student's t intervals over all parts so
    far, at 95 % jointly over the rounds. Every sequence has the same number of parts, so that sequences of all rounds
    have equal weight.

    Before the first round, a gradient-based estimate drops most heads: only four times ``first`` continue. An estimate
    can be wrong, so a few of the dropped heads, drawn at random, continue as well, and are counted if they end up among
    the first.

    Arguments
        ablate    effects of chosen heads of each call on some sequences, with progress (`head_effects`)
        counts    number of heads of each call
        cache     saved rounds are not run again
        report    called with the number of finished heads, as if every round measured all heads
        estimate  estimated effect of each head of all calls on some sequences; None if not available
        seed      seed of the randomly drawn heads
    """
    sequences, ends = len(inputs["input_ids"]), np.cumsum(counts)[:-1]
    rounds = np.array_split(np.arange(sequences), min(sequences, _MAX_ROUNDS))
    level = 1 - (1 - LEVEL) / len(rounds)
    remaining: Bool[np.ndarray, "n"] = np.ones(sum(counts), dtype=bool)
    rows: Float[np.ndarray, "R n"] = np.empty((0, len(remaining)))
    pieces, skipped = _MAX_BLOCKS, 0
    saved: dict[str, Any] = {}
    baselines: list[float] = []
    drawn: Int[np.ndarray, "d"] = np.empty(0, dtype=int)
    report(0, len(rounds) * len(remaining))
    if len(remaining) > _CANDIDATE_FACTOR * first + _NUM_DRAWN:
        saved = cache.get("estimates") or {"estimates": _first_estimates(estimate, _subset(inputs, rounds[0]))}
        cache.put("estimates", saved)
        if saved["estimates"] is not None:
            estimates: Float[np.ndarray, "n"] = np.asarray(saved["estimates"], dtype=float)
            order = np.argsort(-np.nan_to_num(estimates, nan=-np.inf), kind="stable")
            best, others = np.split(order[np.isfinite(estimates[order])], [_CANDIDATE_FACTOR * first])
            random = np.random.Generator(np.random.Philox(seed))
            drawn = random.choice(others, min(_NUM_DRAWN, len(others)), replace=False)
            remaining = np.isin(np.arange(len(remaining)), np.concatenate((best, drawn)))
            skipped = len(others) - len(drawn)  # without heads that have no estimate
    for number, chunk in enumerate(rounds):
        saved = cache.get(f"heads-{number}")
        if saved is None:
            count, before, total = len(remaining), number * len(remaining), len(rounds) * len(remaining)
            result = ablate(
                _subset(inputs, chunk),
                [np.flatnonzero(x).tolist() for x in np.split(remaining, ends)],
                lambda done, of, count=count, before=before, total=total: report(before + count * done // of, total),
            )
            parts = np.concatenate([_pool_blocks(x, pieces) for x in result.block_effects], axis=1).tolist()
            baseline = None if result.baseline is None else result.baseline.tolist()
            saved = {"parts": parts, "baseline": baseline, "outcome": result.metric}
        cache.put(f"heads-{number}", saved)
        rows = np.concatenate((rows, np.asarray(saved["parts"], dtype=float)))
        pieces = len(rows) // len(chunk) if number == 0 else pieces  # later rounds have fewer sequences, of more blocks
        baselines += saved["baseline"] or []
        remaining = _top_candidates(rows, remaining, first, level)
        report((number + 1) * len(remaining), len(rounds) * len(remaining))
        if remaining.sum() <= first < np.isfinite(rows[: len(saved["parts"])]).all(0).sum():
            break
    report(len(rounds) * len(remaining), len(rounds) * len(remaining))
    known = np.isfinite(rows).sum(0)
    means = np.where(known > 0, np.nansum(rows, 0) / np.maximum(known, 1), -np.inf)
    return Elimination(
        [x[:, None] for x in np.split(rows, ends, axis=1)],
        np.array(baselines) if baselines else None,
        saved["outcome"],
        skipped,
        len(drawn),
        len(np.intersect1d(drawn, np.argsort(-means)[:first])),
    )


def _first_estimates(estimate: EstimateFn, inputs: Mapping[str, Any]) -> list[float] | None:
    """Estimated effect of each head over as many sequences, or tokens of the first one, as fit into one estimate; None
    if not available."""
    tokens = inputs["input_ids"]
    count = sum(inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if inputs.get(name) is not None)
    subset = _subset(inputs, np.arange(max(1, min(len(tokens), _MAX_TOKENS // count))))
    if count > _MAX_TOKENS:
        if any(isinstance(x, Tensor) and x.shape != subset["input_ids"].shape for x in subset.values()):
            return None
        first = _MAX_TOKENS * tokens.shape[1] // count
        subset = {name: x[:, :first] if isinstance(x, Tensor) else x for name, x in subset.items()}
    result = estimate(subset)
    return None if result is None else result.tolist()


def _pool_blocks(parts: Float[np.ndarray, "B K H"], pieces: int) -> Float[np.ndarray, "R H"]:
    """Merge neighbouring blocks into at most ``pieces`` per sequence; the mean stays the same.

    With m the mean over a sequence's K blocks and m_g the mean over the n_g blocks of one of G pieces, the part of the
    piece is m + G n_g (m_g - m) / K, as pieces may have different sizes.
    """
    count = parts.shape[1]
    groups = np.array_split(np.arange(count), min(pieces, count))
    mean = parts.mean(1)
    pooled = [mean + len(groups) * len(group) / count * (parts[:, group].mean(1) - mean) for group in groups]
    return np.stack(pooled, axis=1).reshape(-1, parts.shape[-1])


def _top_candidates(
    rows: Float[np.ndarray, "R n"], remaining: Bool[np.ndarray, "n"], first: int, level: float
) -> Bool[np.ndarray, "n"]:
    """Heads that may still be among the first, by their intervals."""
    known = remaining & np.isfinite(rows).all(0)
    count = len(rows)
    if count < _MIN_PARTS or known.sum() <= first:
        return known
    values = rows[:, known]
    mean = values.mean(0)
    reach = stdtrit(count - 1, (1 + level) / 2) * values.std(0, ddof=1) / np.sqrt(count)
    threshold = np.sort(mean - reach)[-first]
    candidates = known.copy()
    candidates[known] = mean + reach >= threshold
    return candidates


def _subset(inputs: Mapping[str, Any], rows: Int[np.ndarray, "b"]) -> dict[str, Any]:
    """The inputs of some sequences."""
    count = len(inputs["input_ids"])
    return {name: x[rows] if isinstance(x, Tensor) and x.ndim and len(x) == count else x for name, x in inputs.items()}
