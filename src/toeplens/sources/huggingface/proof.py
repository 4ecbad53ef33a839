"""The proof of a captured attention: its weights and outputs formed again from the parts, against the model's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError

_AT_ONCE = 1 << 22  # weights that are formed again, over batch and heads
_LOOSE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference that rounding explains; models round to float32 inside whatever their own dtype is."""
    return _LOOSE.get(dtype, 1e-4)


@dataclass(frozen=True)
class Proof:
    """How far weights and outputs formed again in float64 are from those that the model itself went on with.

    weights    largest difference of an attention weight; None where the model formed none, but outputs alone
    outputs    largest difference of a head's output, relative to the largest output of the layer
    queries    how many queries of a sequence were formed again
    tolerance  what is let pass
    """

    weights: float | None
    outputs: float
    queries: int
    tolerance: float


def prove(
    name: str,
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B G Nk d"],
    v: Float[Tensor, "B _G Nk dv"],
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, "H"] | None,
    bias: Tensor | None,
    visible: Tensor | None,
    weights: Float[Tensor, "B H Nq Nk"] | None,
    heads: Float[Tensor, "B Nq H dv"],
) -> Proof:
    """Form weights and outputs again, of all queries or, on long inputs, of some; as the fields of `AttentionCall`.

    Raises `InputError` that names the module where they are not the model's own. Queries that see no key are left out:
    their weights are whatever the model's substitute for minus infinity makes of them.
    """
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[1] % k.shape[1] == 0 and q.shape[1] % v.shape[1] == 0
    fits = fits and q.shape[3] == k.shape[3] and (weights is None or weights.shape == (*q.shape[:3], k.shape[2]))
    if not fits or heads.shape != (q.shape[0], q.shape[2], q.shape[1], v.shape[3]):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, weights, heads) if x is not None)
        raise InputError(
            f"model: the attention of {name} was not understood: its queries, keys, values, weights and outputs are of "
            f"shapes that do not fit, {shapes}."
        )
    count = max(1, min(q.shape[2], _AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2])))
    rows = torch.linspace(0, q.shape[2] - 1, count, device=q.device, dtype=torch.float64).round().long()
    formed = logits(q, k, scale=scale, softcap=softcap, bias=bias, visible=visible, rows=rows)
    seen = formed.isfinite().any(-1, keepdim=True)
    ours = softmax(formed.masked_fill(~seen, 0), sinks)
    made = torch.einsum("bhqk,bhkd->bqhd", ours, _spread(v, q.shape[1]).double())
    own, asked = heads.index_select(1, rows).double(), seen.transpose(1, 2)
    given = ours if weights is None else weights.index_select(2, rows).double()
    wrong = float(((ours - given) * seen).abs().max())
    size = float((own * asked).abs().max())
    missed = float(((made - own) * asked).abs().max()) / (size if size > 0 else 1.0)
    allowed = tolerance(max(q.dtype, heads.dtype, key=lambda dtype: torch.finfo(dtype).eps))
    if not (wrong <= allowed and missed <= allowed):
        hint = "" if allowed == tolerance(torch.float32) else f", and the model in float32 instead of {q.dtype}"
        raise InputError(
            f"model: the attention of {name} was not understood: formed again from its parts, its weights differ by "
            f"{wrong:.1e} and its outputs by {missed:.1e} (relative) from the model's own, where at most {allowed:.0e} "
            f"is allowed; known are a scaled product, a cap, a bias, a mask and sinks{hint}."
        )
    return Proof(None if weights is None else wrong, missed, count, allowed)


def logits(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B G Nk d"],
    *,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    visible: Tensor | None,
    rows: Int[Tensor, "R"],
) -> Float[Tensor, "B H R Nk"]:
    """softcap(scale q . k) + bias in float64 at these queries; minus infinity where a key is not visible."""
    made = scale * (q.index_select(2, rows).double() @ _spread(k, q.shape[1]).double().transpose(-2, -1))
    if softcap is not None:
        made = softcap * (made / softcap).tanh()
    if bias is not None:
        made = made + _rows(bias, rows).double()
    return made if visible is None else made.masked_fill(~_rows(visible, rows), -torch.inf)


def softmax(logits: Float[Tensor, "B H R Nk"], sinks: Float[Tensor, "H"] | None) -> Float[Tensor, "B H R Nk"]:
    """The weights; a sink is one more logit of each head, whose weight is dropped."""
    if sinks is None:
        return logits.softmax(-1)
    more = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat((logits, more), -1).softmax(-1)[..., :-1]


def _spread(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x if x.shape[-2] == 1 else x.index_select(2, rows)
