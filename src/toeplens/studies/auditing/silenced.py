"""What silencing each audited head does, put into the records of heads and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from toeplens.lens import gini
from toeplens.sources.huggingface import head_effects
from toeplens.studies.auditing.intervals import interval_of, way_of
from toeplens.studies.auditing.measured import Measured
from toeplens.studies.auditing.record import Effect, HeadRecord, LayerRecord, Number, known

Method = Literal["exact", "attribution"]


@dataclass(frozen=True)
class Silenced:
    """The fields of `toeplens.studies.auditing.Audit` that effects are in."""

    layers: tuple[LayerRecord, ...]
    heads: tuple[HeadRecord, ...]
    effect: Effect | None
    method: str | None
    baseline: Number
    intervals: str | None = None  # what the effects' intervals are over, in words


def not_silenced(measured: Iterable[Measured]) -> Silenced:
    """Records without effects."""
    measured = list(measured)
    return Silenced(
        tuple(each.layer for each in measured), tuple(h for each in measured for h in each.heads), None, None, None
    )


def silence(
    model: Any,
    inputs: Mapping[str, Any],
    measured: Sequence[Measured],
    method: Method,
    mask_token: int | None,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> Silenced:
    """Silence each measured head of a transformers model (`toeplens.sources.huggingface.head_effects`)."""
    tokens = inputs["input_ids"].shape[1]
    calls = [(x.layer.module, x.layer.side, x.layer.kind, x.layer.layer, x.layer.heads) for x in measured]
    options = {"method": method, "mask_token": mask_token, "seed": seed, "on_progress": on_progress}
    found = head_effects(model, inputs, calls, **options)
    baseline = None if found.baseline is None else known(float(np.mean(found.baseline)))
    pairs = zip(measured, found.parts, strict=True)
    changed = [with_effects(each, *interval_of(parts, seed)) for each, parts in pairs]
    way = way_of(found.parts[0], tokens) if found.parts else None
    return replace(not_silenced(changed), effect=found.outcome, method=found.method, baseline=baseline, intervals=way)


def with_effects(
    measured: Measured, effects: Float[np.ndarray, "H"], low: Float[np.ndarray, "H"], high: Float[np.ndarray, "H"]
) -> Measured:
    """A layer's records with its heads' effects, the ends of their intervals, and how the layer shares them out."""
    numbers = zip(measured.heads, effects, low, high, strict=True)
    heads = tuple(
        replace(head, effect=known(a), effect_low=known(b), effect_high=known(c)) for head, a, b, c in numbers
    )
    return Measured(replace(measured.layer, deposit=concentration(effects)), heads)


def concentration(effects: Float[np.ndarray, "H"]) -> dict[str, Number]:
    """How much of a layer's effects is in one head (measures, "deposit"), of d = max(effect, 0).

    ``top_share`` max d / sum d, ``effective_heads`` (sum d)^2 / sum d^2, ``gini``, and ``lead``, the largest d less the
    second; where no head's effect is positive, or one is not known, all but the lead are None.
    """
    clipped = np.clip(effects, 0, None)
    total, order = clipped.sum(), np.sort(clipped)[::-1]
    lead = known(order[0] - order[1]) if len(order) > 1 else known(order[0])
    if not total > 0:
        return {"top_share": None, "effective_heads": None, "gini": None, "lead": lead}
    return {
        "top_share": float(order[0] / total),
        "effective_heads": float(total**2 / (clipped**2).sum()),
        "gini": gini(clipped),
        "lead": lead,
    }
