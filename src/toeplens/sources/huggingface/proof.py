"""The proof of a captured attention: its weights and outputs formed again from the parts, against the model's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.masks import at_rows

_AT_ONCE = 1 << 21  # weights that are formed again, over batch and heads
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


def proved_rows(q: Float[Tensor, "B H Nq d"], k: Float[Tensor, "B _G Nk d"]) -> Int[Tensor, "R"]:
    """The queries whose weights are formed again: all, or on long inputs some, first and last among them."""
    count = max(1, min(q.shape[2], _AT_ONCE // (q.shape[0] * q.shape[1] * k.shape[2])))
    return torch.linspace(0, q.shape[2] - 1, count, device=q.device, dtype=torch.float64).round().long()


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
    causal: bool,
    rows: Int[Tensor, "R"],
    own: Float[Tensor, "B H R Nk"] | None,
    heads: Float[Tensor, "B Nq H dv"],
) -> Proof:
    """Form weights and outputs again at these queries; as the fields of `AttentionCall`, ``own`` the model's weights.

    Raises `InputError` that names the module where they are not the model's own. Queries that see no key are left out:
    their weights are whatever the model's substitute for minus infinity makes of them.
    """
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[1] % k.shape[1] == 0 and q.shape[1] % v.shape[1] == 0
    fits = fits and q.shape[3] == k.shape[3] and (own is None or own.shape == (*q.shape[:2], len(rows), k.shape[2]))
    if not fits or heads.shape != (q.shape[0], q.shape[2], q.shape[1], v.shape[3]):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, own, heads) if x is not None)
        raise InputError(
            f"model: the attention of {name} was not understood: its queries, keys, values, weights and outputs are of "
            f"shapes that do not fit, {shapes}."
        )
    formed = logits(q, k, scale=scale, softcap=softcap, bias=bias, visible=visible, causal=causal, rows=rows)
    seen = formed.isfinite().any(-1, keepdim=True)
    ours = softmax(formed.masked_fill(~seen, 0), sinks)
    made = torch.einsum("bhqk,bhkd->bqhd", ours, _spread(v, q.shape[1]).double())
    outputs, asked = heads.index_select(1, rows).double(), seen.transpose(1, 2)
    wrong = 0.0 if own is None else float(((ours - own.double()) * seen).abs().max())
    if own is not None and sinks is not None:  # some models return them before the sink has taken its part
        before = formed.masked_fill(~seen, 0).softmax(-1)
        wrong = min(wrong, float(((before - own.double()) * seen).abs().max()))
    size = float((outputs * asked).abs().max())
    missed = float(((made - outputs) * asked).abs().max()) / (size if size > 0 else 1.0)
    allowed = tolerance(max(q.dtype, heads.dtype, key=lambda dtype: torch.finfo(dtype).eps))
    if not (wrong <= allowed and missed <= allowed):
        hint = "" if allowed == tolerance(torch.float32) else f", and the model in float32 instead of {q.dtype}"
        raise InputError(
            f"model: the attention of {name} was not understood: formed again from its parts, its weights differ by "
            f"{wrong:.1e} and its outputs by {missed:.1e} (relative) from the model's own, where at most {allowed:.0e} "
            f"is allowed; known are a scaled product, a cap, a bias, a mask and sinks{hint}."
        )
    return Proof(None if own is None else wrong, missed, len(rows), allowed)


def logits(
    q: Float[Tensor, "B H Nq d"],
    k: Float[Tensor, "B G Nk d"],
    *,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    visible: Tensor | None,
    causal: bool,
    rows: Int[Tensor, "R"],
    first: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "B H R Nk"]:
    """softcap(scale q . k) + bias at these queries; minus infinity where a key is not visible. ``first``: k's place."""
    groups = k.shape[1]  # the heads of a group together: keys are not repeated
    parts = q.index_select(2, rows).to(dtype).unflatten(1, (groups, -1)), k.to(dtype).transpose(-2, -1)
    made = scale * (parts[0] @ parts[1].unsqueeze(2)).flatten(1, 2)
    if softcap is not None:
        made = softcap * (made / softcap).tanh()
    if bias is not None:
        made = made + at_rows(bias, rows).to(dtype)
    if visible is not None:
        made = made.masked_fill(~at_rows(visible, rows), -torch.inf)
    if causal:
        later = first + torch.arange(k.shape[2], device=rows.device) > rows.unsqueeze(-1)
        made = made.masked_fill(later, -torch.inf)
    return made


def softmax(logits: Float[Tensor, "B H R Nk"], sinks: Float[Tensor, "H"] | None) -> Float[Tensor, "B H R Nk"]:
    """The weights; a sink is one more logit of each head, whose weight is dropped."""
    if sinks is None:
        return logits.softmax(-1)
    more = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat((logits, more), -1).softmax(-1)[..., :-1]


def _spread(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)
