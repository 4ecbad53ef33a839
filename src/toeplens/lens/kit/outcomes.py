"""What becomes of each example when heads are ablated: answered right or not, its loss, how far its answer moved."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

Metric = Literal["accuracy", "loss", "kl"]


def outcomes(
    metric: Metric, logits: Float[Tensor, "V b C"], intact: Float[Tensor, "b C"], labels: Int[Tensor, "b"]
) -> Bool[Tensor, "V n"] | Float[Tensor, "V n"]:
    """The metric of each example that counts (its label is not negative), in each of V changed passes.

    ``accuracy``: whether the answer is right. ``loss``: cross-entropy in nats. ``kl``: KL(intact || changed) of the
    output distribution in nats. The latter two in float64.
    """
    counted = labels >= 0
    if metric == "accuracy":
        return (logits.argmax(-1) == labels)[:, counted]
    log_q = logits[:, counted].double().log_softmax(-1)
    if metric == "loss":
        return -log_q.gather(-1, labels[counted].expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)
    log_p = intact[counted].double().log_softmax(-1)
    return F.kl_div(log_q, log_p.expand_as(log_q), reduction="none", log_target=True).sum(-1)


def harm(metric: Metric, intact: Float[np.ndarray, "*#V n"], changed: Float[np.ndarray, "*V n"]) -> np.ndarray:
    """What each example loses, positive for harm: right answers lost, the rise in loss, the rise in divergence."""
    return intact - changed if metric == "accuracy" else changed - intact
