"""What a change costs a recorded model, and what became of a claim."""

from __future__ import annotations

import numpy as np

from toeplens.papers.positional_symbolic.pretrained import Pretrained


def more(study: Pretrained, piece: str, behaviour: str) -> float:
    values = [item for item in study.probes[piece].items if item.behaviour == behaviour]
    weights = [item.places for item in values]
    return float(np.average([(item.changed_nats or 0) - item.nats for item in values], weights=weights))


def verdict(study: Pretrained, claim: str) -> str:
    return next(entry.verdict for entry in study.entries if entry.claim.id == claim)
