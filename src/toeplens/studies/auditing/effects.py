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

from toeplens.ground.machine import out_of_memory
from toeplens.ground.words import or_none
from toeplens.lens import bootstrap_means, check_estimates, gini, sample_heads
from toeplens.sources.huggingface import BandEffects, HeadEffects, NoGradient, band_effects, head_effects
from toeplens.sources.huggingface.effects import Taken, head_estimates
from toeplens.sources.huggingface.outcome import ENOUGH
from toeplens.studies.auditing.inputs import Work
from toeplens.studies.auditing.record import AuditRecord, BandRecord, Effect, Kept, Measured, Number

# per layer: effects of its heads, and the ends of their intervals
Columns = tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"], Float[np.ndarray, "H"]]
LEVEL = 0.95
_SIGMAS, _ONE_SIDED = 1.96, 1.645  # standard deviations for 95 %, two-sided and one-sided
_MEAN, _SPREAD = 0.399, 0.584  # mean and standard deviation of max(x, 0) for standard normal x
_ROUNDS = 8  # maximum number of rounds of an elimination
_FEWEST = 4  # minimum number of parts for an interval
_PIECES = 16  # maximum number of pieces per sequence
_GO_ON, _DRAWN = 4, 8  # heads that continue after the estimate, in multiples of N; randomly drawn heads
_AT_ONCE = 2048  # maximum tokens of an estimate, which holds the outputs of every layer
Estimate = Callable[[Mapping[str, Any]], Float[np.ndarray, "n"] | None]
Run = Callable[[Mapping[str, Any], Sequence[Sequence[int]]], HeadEffects]


def without_effects(measured: Sequence[Measured], **about: str | None) -> AuditRecord:
    """The record of an audit without effects, with the known entries of ``about``; `finished` adds the rest."""
    heads = tuple(head for each in measured for head in each.heads)
    known = {name: value for name, value in about.items() if value is not None}
    return AuditRecord(known, tuple(each.layer for each in measured), heads, None, None, None, 0.0)


def effects_of(work: Work, measured: Sequence[Measured]) -> AuditRecord:
    """Ablate each measured head of a transformers model, or remove its position (`head_effects`).

    Saved results are reused. Estimates are checked by ablating a sample of the heads exactly
    (`toeplens.lens.EstimateCheck`); if the check fails, there are no effects.
    """
    options, texts, method = work.options, work.sequences.texts, work.options.effects
    model, inputs, say = work.loaded.model, work.inputs, partial(work.report, "heads")
    calls = [(x.layer.module, x.layer.side, x.layer.kind, x.layer.layer, x.layer.heads) for x in measured]
    given: dict[str, Any] = {"mask_token": work.mask_token, "seed": options.seed}
    if method == "bands":
        return _of_bands(measured, band_effects(model, inputs, calls, **given, on_progress=say), work)
    wanted = [[head for head in range(count) if options.heads is None or head in options.heads] for *_, count in calls]
    run = partial(head_effects, model, calls=calls, **given)
    if options.first is not None and method in get_args(Taken):

        def some(inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]]) -> HeadEffects:
            both = [sorted({*one} & {*other}) for one, other in zip(chosen, wanted, strict=True)]
            return run(inputs, chosen=both, method=method)

        estimate = partial(_estimates, model, calls=calls, wanted=wanted, of=method, **given)
        return _first(work, measured, some, estimate)

    def exactly(name: str, chosen: Sequence[Sequence[int]], **how: Any) -> tuple[HeadEffects, list[np.ndarray]]:
        had = [work.kept.array(f"{name}-{number}") for number in range(len(calls))]
        left = [() if parts is not None else heads for parts, heads in zip(had, chosen, strict=True)]
        done, total = sum(map(len, chosen)) - sum(map(len, left)), sum(map(len, chosen))
        found = run(
            inputs,
            chosen=left,
            on_call=lambda number, parts: work.kept.put_array(f"{name}-{number}", parts),
            on_progress=lambda now, _: say(done + now, total),
            **how,
        )
        return found, [new if old is None else old for old, new in zip(had, found.parts, strict=True)]

    check = None
    if method != "attribution":
        found, parts = exactly("effects", wanted, method=method)
    else:
        found = run(inputs, method=method)
        parts = list(found.parts)
        estimates = [each.mean((0, 1)) for each in parts]
        sample = sample_heads(estimates)
        exact = exactly("check", [heads.tolist() for heads in sample])[1]
        alone = [each.mean((0, 1))[heads] for each, heads in zip(exact, sample, strict=True)]
        check = check_estimates(estimates, alone, sample)
        if not check.holds:
            return replace(without_effects(measured, no_effects=check.words), check=check)
    rows = [over_texts(own, texts) for own in parts]
    return with_effects(
        measured,
        (interval_of(own, options.seed) for own in rows),
        _reach(rows[0].shape[0] * rows[0].shape[1]) if rows else _SIGMAS,
        effect=found.outcome,
        method=found.method,
        baseline=_mean(found.baseline),
        intervals=way_of(parts[0], inputs["input_ids"].shape[1], texts) if parts else None,
        check=check,
    )


def _first(work: Work, measured: Sequence[Measured], run: Run, estimate: Estimate) -> AuditRecord:
    """The heads with the largest effects; the others are dropped early (`eliminate`)."""
    options, counts, first = work.options, [each.layer.heads for each in measured], work.options.first or 1
    say = partial(work.report, "heads")
    found = eliminate(run, work.inputs, counts, first, work.kept, say, estimate, options.seed)
    words = f"Heads whose intervals lay below those of {first} others were dropped early."
    if found.drawn:
        doubt = " Further heads may be missing; measure all heads to be sure." if found.missed else ""
        words = (
            f"A gradient-based estimate excluded {found.left} heads without measuring them. As a check, {found.drawn} "
            f"randomly chosen heads with low estimates were measured too; {found.missed or 'none'} of them came out "
            f"among the first {first}.{doubt} {words}"
        )
    return with_effects(
        measured,
        (interval_of(own, options.seed) for own in found.parts),
        effect=found.outcome,
        method=options.effects,
        baseline=_mean(found.baseline),
        intervals="over blocks of tokens within the sequences",
        race=words,
    )


def _estimates(
    model: Any, inputs: Mapping[str, Any], calls: Any, wanted: Sequence[Sequence[int]], of: Taken, **given: Any
) -> Float[np.ndarray, "n"] | None:
    """The estimated effects of all wanted heads; None if they are not available."""
    try:
        found = head_estimates(model, inputs, calls, of=of, **given)
    except Exception as error:
        if isinstance(error, NoGradient) or out_of_memory(error):
            return None
        raise
    means = [each.mean((0, 1)) for each in found.parts]
    for own, heads in zip(means, wanted, strict=True):
        without = of == "position" and bool(np.isnan(own).all())  # heads without position
        if not without and not np.isfinite(own[heads]).all():  # in 16 bits, gradients overflow before states do
            return None
        own[np.setdiff1d(np.arange(len(own)), heads)] = np.nan
    return np.concatenate(means)


def _mean(baseline: Float[np.ndarray, "B"] | None) -> Number:
    return None if baseline is None else or_none(float(np.mean(baseline)))


def _of_bands(measured: Sequence[Measured], found: BandEffects, work: Work) -> AuditRecord:
    """Records of heads without effects, and of the measured bands."""
    made: list[BandRecord] = []
    texts = work.sequences.texts
    for each, parts, bands, frequencies in zip(measured, found.parts, found.bands, found.frequencies, strict=True):
        speeds = np.abs(frequencies)
        for band, *column in zip(bands, *interval_of(over_texts(parts, texts), work.options.seed), strict=True):
            own = speeds[list(band)]
            ends = band[0], band[-1], float(own.max()), float(own.min())
            made.append(BandRecord(*each.layer.place, *ends, *(or_none(float(value)) for value in column)))
    intervals = way_of(found.parts[0], work.inputs["input_ids"].shape[1], texts)
    fields: dict[str, Any] = {"effect": found.outcome, "method": "bands", "baseline": _mean(found.baseline)}
    return replace(without_effects(measured, intervals=intervals), **fields, bands=tuple(made))


def with_effects(
    measured: Sequence[Measured],
    columns: Iterable[Columns],
    reach: float = _SIGMAS,
    *,
    intervals: str | None,
    race: str | None = None,
    **fields: Any,
) -> AuditRecord:
    """The record with each layer's effects, their intervals and their concentration, and other fields.

    ``reach`` is the half width of an interval in standard errors.
    """
    found = []
    for each, column in zip(measured, columns, strict=True):
        heads = tuple(
            replace(head, effect=or_none(a), effect_low=or_none(b), effect_high=or_none(c))
            for head, a, b, c in zip(each.heads, *column, strict=True)
        )
        found.append(Measured(replace(each.layer, deposit=concentration(*column, reach)), heads))
    return replace(without_effects(found, intervals=intervals, race=race), **fields)


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
    found: dict[str, Number] = {name: or_none(value) for name, value in sums.items()}
    sigma = (high - low) / (2 * reach)
    noise = _MEAN * sigma.sum() + _ONE_SIDED * _SPREAD * np.sqrt((sigma**2).sum())
    if not total > noise:  # also if intervals are unknown
        return found | {"top_share": None, "effective_heads": None, "gini": None}
    effective = float(total**2 / (clipped**2).sum())
    return found | {"top_share": float(order[0] / total), "effective_heads": effective, "gini": gini(clipped)}


def interval_of(parts: Float[np.ndarray, "B K H"], seed: int) -> Columns:
    """Mean over sequences and blocks, and the ends of its 95 % interval; NaN if there is only one part.

    The interval is a bootstrap over sequences and their blocks, or Student's t interval for fewer than 8 parts.
    """
    rows = parts.reshape(-1, parts.shape[-1])
    there = np.isfinite(rows)
    known = np.atleast_1d(there.any(0))
    if known.any() and not there[:, known].all():  # some heads were dropped early
        alone = [
            interval_of(rows[there[:, head] if known[head] else slice(None), head].reshape(-1, 1, 1), seed)
            for head in range(rows.shape[1])
        ]
        mean, low, high = (np.concatenate(each) for each in zip(*alone, strict=True))
        return mean, low, high
    count, mean = len(rows), rows.mean(0)
    if count < 2:
        unknown = np.full_like(mean, np.nan)
        return mean, unknown, unknown
    if count >= ENOUGH:
        return mean, *bootstrap_means(rows, level=LEVEL, seed=seed)
    reach = _reach(count) * rows.std(0, ddof=1) / np.sqrt(count)
    return mean, mean - reach, mean + reach


def _reach(count: int) -> float:
    """Half width of the interval of a mean over ``count`` parts, in standard errors."""
    return _SIGMAS if not 1 < count < ENOUGH else float(stdtrit(count - 1, (1 + LEVEL) / 2))


def over_texts(parts: Float[np.ndarray, "B K H"], texts: Sequence[str]) -> Float[np.ndarray, "_T _K H"]:
    """Merge the parts of each text, as sequences of one text are not independent; the mean stays the same.

    With m the mean over all sequences and m_t the mean over the n_t sequences of one of T texts, the part of the text
    is m + T n_t (m_t - m) / sum n. This is m_t if all texts have equally many sequences, and otherwise the linearised
    contribution of the text to the mean.

    Arguments
        texts  name of each sequence's text; with fewer than two texts the parts are returned unchanged
    """
    names, own, each = sorted(set(texts)), np.array(texts), parts.mean(1)
    if len(names) < 2:
        return parts
    far = np.stack([(each[own == name] - each.mean(0)).sum(0) for name in names])
    return (each.mean(0) + len(names) / len(own) * far)[:, None]


def way_of(parts: Float[np.ndarray, "B K H"], tokens: int, texts: Sequence[str] = ()) -> str | None:
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
    outcome: Effect
    left: int = 0  # heads dropped by the estimate without measuring them
    drawn: int = 0  # heads with low estimates that were measured anyway; 0 without an estimate
    missed: int = 0  # of the drawn heads, those that ended up among the first


def eliminate(
    run: Run,
    inputs: Mapping[str, Any],
    counts: Sequence[int],
    first: int,
    kept: Kept,
    report: Callable[[int, int], None],
    estimate: Estimate = lambda inputs: None,
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
        run       effects of chosen heads of each call on some sequences (`head_effects`)
        counts    number of heads of each call
        kept      saved rounds are not run again
        report    called with the number of finished heads, as if every round measured all heads
        estimate  estimated effect of each head of all calls on some sequences; None if not available
        seed      seed of the randomly drawn heads
    """
    sequences, ends = len(inputs["input_ids"]), np.cumsum(counts)[:-1]
    rounds = np.array_split(np.arange(sequences), min(sequences, _ROUNDS))
    level = 1 - (1 - LEVEL) / len(rounds)
    racing: Bool[np.ndarray, "n"] = np.ones(sum(counts), dtype=bool)
    rows: Float[np.ndarray, "R n"] = np.empty((0, len(racing)))
    pieces, left = _PIECES, 0
    made: dict[str, Any] = {}
    baselines: list[float] = []
    drawn: Int[np.ndarray, "d"] = np.empty(0, dtype=int)
    report(0, len(rounds) * len(racing))
    if len(racing) > _GO_ON * first + _DRAWN:
        made = kept.get("estimates") or {"estimates": _estimated(estimate, _cut(inputs, rounds[0]))}
        kept.put("estimates", made)
        if made["estimates"] is not None:
            estimates: Float[np.ndarray, "n"] = np.asarray(made["estimates"], dtype=float)
            order = np.argsort(-np.nan_to_num(estimates, nan=-np.inf), kind="stable")
            best, others = np.split(order[np.isfinite(estimates[order])], [_GO_ON * first])
            random = np.random.Generator(np.random.Philox(seed))
            drawn = random.choice(others, min(_DRAWN, len(others)), replace=False)
            racing = np.isin(np.arange(len(racing)), np.concatenate((best, drawn)))
            left = len(others) - len(drawn)  # without heads that have no estimate
    for number, some in enumerate(rounds):
        made = kept.get(f"heads-{number}")
        if made is None:
            found = run(_cut(inputs, some), [np.flatnonzero(each).tolist() for each in np.split(racing, ends)])
            parts = np.concatenate([_pooled(each, pieces) for each in found.parts], axis=1).tolist()
            baseline = None if found.baseline is None else found.baseline.tolist()
            made = {"parts": parts, "baseline": baseline, "outcome": found.outcome}
        kept.put(f"heads-{number}", made)
        rows = np.concatenate((rows, np.asarray(made["parts"], dtype=float)))
        pieces = len(rows) // len(some) if number == 0 else pieces  # later rounds have fewer sequences, of more blocks
        baselines += made["baseline"] or []
        racing = _may_be(rows, racing, first, level)
        report((number + 1) * len(racing), len(rounds) * len(racing))
        if racing.sum() <= first < np.isfinite(rows[: len(made["parts"])]).all(0).sum():
            break
    report(len(rounds) * len(racing), len(rounds) * len(racing))
    known = np.isfinite(rows).sum(0)
    means = np.where(known > 0, np.nansum(rows, 0) / np.maximum(known, 1), -np.inf)
    return Elimination(
        [each[:, None] for each in np.split(rows, ends, axis=1)],
        np.array(baselines) if baselines else None,
        made["outcome"],
        left,
        len(drawn),
        len(np.intersect1d(drawn, np.argsort(-means)[:first])),
    )


def _estimated(estimate: Estimate, inputs: Mapping[str, Any]) -> list[float] | None:
    """Estimated effect of each head over as many sequences, or tokens of the first one, as fit into one estimate; None
    if not available."""
    tokens = inputs["input_ids"]
    read = sum(inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if inputs.get(name) is not None)
    few = _cut(inputs, np.arange(max(1, min(len(tokens), _AT_ONCE // read))))
    if read > _AT_ONCE:
        if any(isinstance(x, Tensor) and x.shape != few["input_ids"].shape for x in few.values()):
            return None
        first = _AT_ONCE * tokens.shape[1] // read
        few = {name: x[:, :first] if isinstance(x, Tensor) else x for name, x in few.items()}
    found = estimate(few)
    return None if found is None else found.tolist()


def _pooled(parts: Float[np.ndarray, "B K H"], pieces: int) -> Float[np.ndarray, "R H"]:
    """Merge neighbouring blocks into at most ``pieces`` per sequence; the mean stays the same.

    With m the mean over a sequence's K blocks and m_g the mean over the n_g blocks of one of G pieces, the part of the
    piece is m + G n_g (m_g - m) / K, as pieces may have different sizes.
    """
    count = parts.shape[1]
    cut = np.array_split(np.arange(count), min(pieces, count))
    mean = parts.mean(1)
    made = [mean + len(cut) * len(some) / count * (parts[:, some].mean(1) - mean) for some in cut]
    return np.stack(made, axis=1).reshape(-1, parts.shape[-1])


def _may_be(
    rows: Float[np.ndarray, "R n"], racing: Bool[np.ndarray, "n"], first: int, level: float
) -> Bool[np.ndarray, "n"]:
    """Heads that may still be among the first, by their intervals."""
    known = racing & np.isfinite(rows).all(0)
    count = len(rows)
    if count < _FEWEST or known.sum() <= first:
        return known
    own = rows[:, known]
    mean = own.mean(0)
    reach = stdtrit(count - 1, (1 + level) / 2) * own.std(0, ddof=1) / np.sqrt(count)
    bar = np.sort(mean - reach)[-first]
    stays = known.copy()
    stays[known] = mean + reach >= bar
    return stays


def _cut(inputs: Mapping[str, Any], some: Int[np.ndarray, "b"]) -> dict[str, Any]:
    """The inputs of some sequences."""
    count = len(inputs["input_ids"])
    return {name: x[some] if isinstance(x, Tensor) and x.ndim and len(x) == count else x for name, x in inputs.items()}
