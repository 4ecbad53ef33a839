"""Ablation effects of the audited heads, added to the records of heads and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from toeplens.ground.machine import out_of_memory
from toeplens.ground.words import or_none
from toeplens.lens import EstimateCheck, bootstrap_means, check_estimates, gini, sample_heads
from toeplens.sources.huggingface import BandEffects, HeadEffects, NoGradient, band_effects, head_effects
from toeplens.sources.huggingface.effects import Taken, head_estimates
from toeplens.sources.huggingface.outcome import ENOUGH
from toeplens.studies.auditing.elimination import eliminate
from toeplens.studies.auditing.inputs import Work
from toeplens.studies.auditing.record import BandRecord, Effect, HeadRecord, LayerRecord, Measured, Method, Number

# per layer: effects of its heads, and the ends of their intervals
Columns = tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"], Float[np.ndarray, "H"]]
LEVEL = 0.95
_SIGMAS, _ONE_SIDED = 1.96, 1.645  # standard deviations for 95 %, two-sided and one-sided
_MEAN, _SPREAD = 0.399, 0.584  # mean and standard deviation of max(x, 0) for standard normal x


@dataclass(frozen=True)
class Effects:
    """The fields of `toeplens.studies.auditing.Audit` and of its ``about`` that effects add to or change."""

    layers: tuple[LayerRecord, ...]
    heads: tuple[HeadRecord, ...]
    effect: Effect | None = None
    method: Method | None = None
    baseline: Number = None
    intervals: str | None = None
    race: str | None = None
    check: EstimateCheck | None = None
    no_effects: str | None = None
    bands: tuple[BandRecord, ...] = ()


def without_effects(measured: Sequence[Measured], why: str | None = None) -> Effects:
    """Records without effects."""
    heads = tuple(head for each in measured for head in each.heads)
    return Effects(tuple(each.layer for each in measured), heads, no_effects=why)


def effects_of(work: Work, measured: Sequence[Measured]) -> Effects:
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
        estimate = partial(_estimates, model, calls=calls, wanted=wanted, of=method, **given)
        return _first(work, measured, partial(run, method=method), estimate, wanted)

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
            return replace(without_effects(measured, check.words), check=check)
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


def _first(
    work: Work, measured: Sequence[Measured], run: Any, estimate: Any, wanted: Sequence[Sequence[int]]
) -> Effects:
    """The heads with the largest effects; the others are dropped early (`eliminate`)."""
    options, counts = work.options, [each.layer.heads for each in measured]

    def some(inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]]) -> HeadEffects:
        return run(inputs, chosen=[sorted({*one} & {*other}) for one, other in zip(chosen, wanted, strict=True)])

    first, say = options.first or 1, partial(work.report, "heads")
    found = eliminate(some, work.inputs, counts, first, work.kept, say, estimate, options.seed)
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


def _of_bands(measured: Sequence[Measured], found: BandEffects, work: Work) -> Effects:
    """Records of heads without effects, and of the measured bands."""
    made: list[BandRecord] = []
    texts, tokens = work.sequences.texts, work.inputs["input_ids"].shape[1]
    for each, parts, bands, frequencies in zip(measured, found.parts, found.bands, found.frequencies, strict=True):
        speeds = np.abs(frequencies)
        for band, *column in zip(bands, *interval_of(over_texts(parts, texts), work.options.seed), strict=True):
            own = speeds[list(band)]
            place = {"layer": each.layer.layer, "kind": each.layer.kind, "side": each.layer.side}
            ends = {"first": band[0], "last": band[-1], "fastest": float(own.max()), "slowest": float(own.min())}
            effect, low, high = (or_none(float(value)) for value in column)
            made.append(BandRecord(**place, **ends, effect=effect, effect_low=low, effect_high=high))
    return replace(
        without_effects(measured),
        effect=found.outcome,
        method="bands",
        baseline=_mean(found.baseline),
        intervals=way_of(found.parts[0], tokens, texts),
        bands=tuple(made),
    )


def with_effects(
    measured: Sequence[Measured], columns: Iterable[Columns], reach: float = _SIGMAS, **fields: Any
) -> Effects:
    """Records with each layer's effects, their intervals and their concentration, and other fields.

    ``reach`` is the half width of an interval in standard errors.
    """
    found = []
    for each, (effects, low, high) in zip(measured, columns, strict=True):
        heads = tuple(
            replace(head, effect=or_none(a), effect_low=or_none(b), effect_high=or_none(c))
            for head, a, b, c in zip(each.heads, effects, low, high, strict=True)
        )
        found.append(Measured(replace(each.layer, deposit=concentration(effects, low, high, reach)), heads))
    return replace(without_effects(found), **fields)


def concentration(
    effects: Float[np.ndarray, "H"],
    low: Float[np.ndarray, "H"],
    high: Float[np.ndarray, "H"],
    reach: float = _SIGMAS,
) -> dict[str, Number]:
    """Sums of a layer's positive and negative effects, and how concentrated the positive ones are (the deposit).

    See `LayerRecord`. The shares are None if the sum of the positive effects is not significant at 5 % (compared with
    independent heads without effect and with the same interval widths), or if intervals are unknown. ``reach`` is the
    half width of an interval in standard errors.
    """
    if not np.isfinite(effects).all():  # unknown for some heads
        return {}
    clipped = np.clip(effects, 0, None)
    total, order = clipped.sum(), np.sort(clipped)[::-1]
    found: dict[str, Number] = {
        "helps": or_none(total),
        "harms": or_none(np.clip(effects, None, 0).sum()),
        "lead": or_none(order[0] - order[1]) if len(order) > 1 else or_none(order[0]),
    }
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
    names = sorted(set(texts))
    if len(names) < 2:
        return parts
    each, own = parts.mean(1), np.array(texts)
    mean = each.mean(0)
    far = np.stack([(each[own == name] - mean).sum(0) for name in names])
    return (mean + len(names) / len(own) * far)[:, None]


def way_of(parts: Float[np.ndarray, "B K H"], tokens: int, texts: Sequence[str] = ()) -> str | None:
    """What the intervals are taken over, as text; None if there are none."""
    sequences, blocks, _ = parts.shape
    if len(set(texts)) > 1:
        return f"over {len(set(texts))} texts"
    if sequences * blocks < 2:
        return None
    if blocks == 1:
        return "over sequences"
    return f"over blocks of about {round(tokens / blocks)} tokens within the sequences"
