"""Ablation effects of the audited heads, added to the records of heads and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from toeplens.ground.machine import out_of_memory
from toeplens.ground.words import or_none
from toeplens.lens import EstimateCheck, bootstrap_means, check_estimates, gini, sample_heads
from toeplens.sources.huggingface import BandEffects, HeadEffects, NoGradient, band_effects, head_effects
from toeplens.sources.huggingface.effects import Taken, head_estimates
from toeplens.sources.huggingface.outcome import ENOUGH
from toeplens.studies.auditing.kept import Kept
from toeplens.studies.auditing.racing import race
from toeplens.studies.auditing.record import BandRecord, Effect, HeadRecord, LayerRecord, Measured, Method, Number

# per layer: effects of its heads, and the ends of their intervals
Columns = tuple[Float[np.ndarray, "H"], Float[np.ndarray, "H"], Float[np.ndarray, "H"]]
LEVEL = 0.95
WAYS = {
    "sequences": "over sequences",
    "blocks": "over blocks of about {} tokens within the sequences",
    "texts": "over {} texts",
}

_SIGMAS, _ONE_SIDED = 1.96, 1.645  # standard deviations for 95 %, two-sided and one-sided
_MEAN, _SPREAD = 0.399, 0.584  # mean and standard deviation of max(x, 0) for standard normal x


@dataclass(frozen=True)
class Silenced:
    """The fields of `toeplens.studies.auditing.Audit` that hold effects.

    intervals  what the intervals are taken over, as text
    race       which heads were dropped early, as text; None if none
    unknown    why there are no effects; None if there are, or if none were requested
    """

    layers: tuple[LayerRecord, ...]
    heads: tuple[HeadRecord, ...]
    effect: Effect | None = None
    method: Method | None = None
    baseline: Number = None
    intervals: str | None = None
    race: str | None = None
    check: EstimateCheck | None = None
    unknown: str | None = None
    bands: tuple[BandRecord, ...] = ()


def not_silenced(measured: Sequence[Measured], why: str | None = None) -> Silenced:
    """Records without effects."""
    heads = tuple(head for each in measured for head in each.heads)
    return Silenced(tuple(each.layer for each in measured), heads, unknown=why)


def silence(
    model: Any,
    inputs: Mapping[str, Any],
    measured: Sequence[Measured],
    method: Method,
    mask_token: int | None,
    seed: int,
    kept: Kept,
    on_progress: Callable[[int, int], None],
    first: int | None = None,
    heads: frozenset[int] | None = None,
    texts: Sequence[str] = (),
) -> Silenced:
    """Ablate each measured head of a transformers model, or remove its position (`head_effects`).

    Saved results are reused. Estimates are checked by ablating a sample of the heads exactly
    (`toeplens.lens.EstimateCheck`); if the check fails, there are no effects.

    Arguments
        first  only find this many heads with the largest effects; the others are dropped early
        heads  heads of each call to measure; all if None
        texts  name of each sequence's text, for intervals over texts; empty if there are not several
    """
    calls = [(x.layer.module, x.layer.side, x.layer.kind, x.layer.layer, x.layer.heads) for x in measured]
    if method == "bands":
        taken = band_effects(model, inputs, calls, mask_token=mask_token, seed=seed, on_progress=on_progress)
        return _of_bands(measured, taken, inputs["input_ids"].shape[1], seed, texts)
    wanted = [[head for head in range(count) if heads is None or head in heads] for *_, count in calls]
    if first is not None and method != "attribution":
        return _race(model, inputs, measured, calls, wanted, method, mask_token, seed, kept, on_progress, first)
    run = partial(head_effects, model, inputs, calls, mask_token=mask_token, seed=seed)

    def exactly(name: str, chosen: Sequence[Sequence[int]]) -> tuple[HeadEffects, list[Float[np.ndarray, "B K _H"]]]:
        had = [kept.array(f"{name}-{number}") for number in range(len(calls))]
        left = [() if parts is not None else heads for parts, heads in zip(had, chosen, strict=True)]
        done, total = sum(map(len, chosen)) - sum(map(len, left)), sum(map(len, chosen))
        found = run(
            chosen=left,
            on_call=lambda number, parts: kept.put_array(f"{name}-{number}", parts),
            on_progress=lambda now, _: on_progress(done + now, total),
        )
        return found, [new if old is None else old for old, new in zip(had, found.parts, strict=True)]

    check = None
    if method != "attribution":
        run = partial(run, method=method)
        found, parts = exactly("effects", wanted)
    else:
        found = run(method="attribution")
        parts = list(found.parts)
        estimates = [each.mean((0, 1)) for each in parts]
        sample = sample_heads(estimates)
        exact = exactly("check", [heads.tolist() for heads in sample])[1]
        alone = [each.mean((0, 1))[heads] for each, heads in zip(exact, sample, strict=True)]
        check = check_estimates(estimates, alone, sample)
        if not check.holds:
            return replace(not_silenced(measured, check.words), check=check)
    rows = [over_texts(own, texts) for own in parts]
    columns = (interval_of(own, seed) for own in rows)
    reach = _reach(rows[0].shape[0] * rows[0].shape[1]) if rows else _SIGMAS
    way = way_of(parts[0], inputs["input_ids"].shape[1], texts) if parts else None
    told = {"effect": found.outcome, "method": found.method, "baseline": _mean(found.baseline)}
    return silenced(measured, columns, reach, intervals=way, check=check, **told)


def _race(
    model: Any,
    inputs: Mapping[str, Any],
    measured: Sequence[Measured],
    calls: Sequence[tuple[str, str, str, int, int]],
    wanted: Sequence[Sequence[int]],
    method: Taken,
    mask_token: int | None,
    seed: int,
    kept: Kept,
    on_progress: Callable[[int, int], None],
    first: int,
) -> Silenced:
    """The heads with the largest effects; the others are dropped early (`race`)."""
    run = partial(head_effects, model, calls=calls, mask_token=mask_token, seed=seed)

    def some(inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]]) -> HeadEffects:
        both = [sorted(set(one) & set(other)) for one, other in zip(chosen, wanted, strict=True)]
        return run(inputs, method=method, chosen=both)

    def estimate(inputs: Mapping[str, Any]) -> Float[np.ndarray, "n"] | None:
        try:
            found = head_estimates(model, inputs, calls, of=method, mask_token=mask_token, seed=seed)
        except Exception as error:
            if isinstance(error, NoGradient) or out_of_memory(error):
                return None
            raise
        kept = [each.mean((0, 1)) for each in found.parts]
        for own, heads in zip(kept, wanted, strict=True):
            without = method == "position" and bool(np.isnan(own).all())  # heads without position
            if not without and not np.isfinite(own[heads]).all():  # in 16 bits, gradients overflow before states do
                return None
            own[np.setdiff1d(np.arange(len(own)), heads)] = np.nan
        return np.concatenate(kept)

    counts = [count for *_, count in calls]
    raced = race(some, inputs, counts, first, kept, on_progress, estimate, seed)
    race_words = f"Heads whose intervals lay below those of {first} others were dropped early."
    if (guess := raced.guess) is not None:
        doubt = " Further heads may be missing; measure all heads to be sure." if guess.missed else ""
        race_words = (
            f"A gradient-based estimate excluded {guess.left} heads without measuring them. As a check, {guess.drawn} "
            f"randomly chosen heads with low estimates were measured too; {guess.missed or 'none'} of them came out "
            f"among the first {first}.{doubt} {race_words}"
        )
    told = {"effect": raced.outcome, "method": method, "baseline": _mean(raced.baseline), "race": race_words}
    columns, way = (interval_of(own, seed) for own in raced.parts), "over blocks of tokens within the sequences"
    return silenced(measured, columns, intervals=way, **told)


def _mean(baseline: Float[np.ndarray, "B"] | None) -> Number:
    return None if baseline is None else or_none(float(np.mean(baseline)))


def _of_bands(
    measured: Sequence[Measured], found: BandEffects, tokens: int, seed: int, texts: Sequence[str]
) -> Silenced:
    """Records of heads without effects, and of the measured bands."""
    made: list[BandRecord] = []
    for each, parts, bands, frequencies in zip(measured, found.parts, found.bands, found.frequencies, strict=True):
        speeds = np.abs(frequencies)
        for band, *column in zip(bands, *interval_of(over_texts(parts, texts), seed), strict=True):
            effect, low, high = (or_none(float(value)) for value in column)
            own = speeds[list(band)]
            place = {"layer": each.layer.layer, "kind": each.layer.kind, "side": each.layer.side}
            ends = {"first": band[0], "last": band[-1], "fastest": float(own.max()), "slowest": float(own.min())}
            made.append(BandRecord(**place, **ends, effect=effect, effect_low=low, effect_high=high))
    return replace(
        not_silenced(measured),
        effect=found.outcome,
        method="bands",
        baseline=_mean(found.baseline),
        intervals=way_of(found.parts[0], tokens, texts),
        bands=tuple(made),
    )


def silenced(measured: Sequence[Measured], columns: Iterable[Columns], reach: float = _SIGMAS, **told: Any) -> Silenced:
    """Records with each layer's effects, their intervals and their concentration.

    Arguments
        reach  half width of an interval in standard errors
        told   the other fields
    """
    found = []
    for each, (effects, low, high) in zip(measured, columns, strict=True):
        heads = tuple(
            replace(head, effect=or_none(a), effect_low=or_none(b), effect_high=or_none(c))
            for head, a, b, c in zip(each.heads, effects, low, high, strict=True)
        )
        found.append(Measured(replace(each.layer, deposit=concentration(effects, low, high, reach)), heads))
    return replace(not_silenced(found), **told)


def concentration(
    effects: Float[np.ndarray, "H"],
    low: Float[np.ndarray, "H"],
    high: Float[np.ndarray, "H"],
    reach: float = _SIGMAS,
) -> dict[str, Number]:
    """Sums of a layer's positive and negative effects, and how concentrated the positive ones are (the deposit).

    ``helps`` and ``harms`` are the sums of the positive and negative effects. With d = max(effect, 0): ``top_share``
    max d / sum d, ``effective_heads`` (sum d)^2 / sum d^2, ``gini``, and ``lead``, the largest minus the second largest
    d. The shares are None if the sum of d is not significant at 5 % (compared with independent heads without effect and
    with the same interval widths), or if intervals are unknown.

    Arguments
        low, high  ends of the effects' 95 % intervals
        reach      half width of an interval in standard errors
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
    return found | {
        "top_share": float(order[0] / total),
        "effective_heads": float(total**2 / (clipped**2).sum()),
        "gini": gini(clipped),
    }


def interval_of(parts: Float[np.ndarray, "B K H"], seed: int) -> Columns:
    """Mean over sequences and blocks, and the ends of its 95 % interval; NaN if there is only one part.

    The interval is a bootstrap over sequences and their blocks, or Student's t interval for fewer than 8 parts.

    Arguments
        parts  values per sequence, block of tokens, and head (`toeplens.sources.huggingface.HeadEffects`)
        seed   seed of the bootstrap
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
        return WAYS["texts"].format(len(set(texts)))
    if sequences * blocks < 2:
        return None
    return WAYS["sequences"] if blocks == 1 else WAYS["blocks"].format(round(tokens / blocks))
