"""The parts of one call of attention, and the logits and weights that they make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.capture.masks import at_rows


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Weights = factor softmax(softcap(scale q . k) + bias) over the visible keys and sinks.

    q, k, v    [B, H, Nq, d], [B, G, Nk, d], [B, G, Nk, dv] as they enter the products; head h reads h // (H / G)
    scale      factor of q . k
    softcap    c of c tanh(x / c), which the scaled product passes through; None if it does not
    sinks      [H] one more logit of each head, which takes weight and gives no value; [H, B, Nq] where each query has
               its own; None if there is none
    bias       [B or 1, H or 1, Nq or 1, Nk] what is added after the cap, 0 where nothing is visible; None if nothing is
    causal     whether keys after the query are hidden
    visible    the same shape as the bias: whether the query sees the key; None if every key is seen that ``causal``
               leaves
    factor     [B, H, Nq, Nk] what the weights are multiplied by after the softmax; None if they are not
    """

    q: Float[Tensor, "B H Nq d"] = field(repr=False)
    k: Float[Tensor, "B G Nk d"] = field(repr=False)
    v: Float[Tensor, "B G2 Nk dv"] = field(repr=False)
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "H"] | Float[Tensor, "H B Nq"] | None = None
    bias: Float[Tensor, "_B _H _Nq Nk"] | None = field(default=None, repr=False)
    causal: bool = False
    visible: Bool[Tensor, "_B _H _Nq Nk"] | None = field(default=None, repr=False)
    factor: Float[Tensor, "B H Nq Nk"] | None = field(default=None, repr=False)

    def logits(
        self, rows: Int[Tensor, "R"] | None = None, keys: slice = slice(None), dtype: torch.dtype = torch.float64
    ) -> Float[Tensor, "B H R K"]:
        """softcap(scale q . k) + bias at these queries and keys, all unless given; -inf where a key is not visible."""
        rows = torch.arange(self.q.shape[2], device=self.q.device) if rows is None else rows
        k = self.k[:, :, keys]  # the heads of a group are rows of one product: keys are not repeated
        q = (self.scale * self.q.index_select(2, rows).to(dtype)).unflatten(1, (k.shape[1], -1))
        made = q.flatten(2, 3) @ k.to(dtype).transpose(-2, -1)
        made = made.unflatten(2, q.shape[2:4]).flatten(1, 2)
        if self.softcap is not None:
            made = self.softcap * (made / self.softcap).tanh()
        if self.bias is not None:
            made = made + at_rows(self.bias[..., keys], rows).to(dtype)
        if self.visible is not None:
            made = made.masked_fill(~at_rows(self.visible[..., keys], rows), -torch.inf)
        if self.causal and len(rows):
            place = (keys.start or 0) + torch.arange(k.shape[2], device=rows.device)
            after = slice(max(0, int(rows.min()) + 1 - (keys.start or 0)), None)  # all queries see those before
            made[..., after].masked_fill_(place[after] > rows.unsqueeze(-1), -torch.inf)
        return made

    def seen(self, rows: Int[Tensor, "R"], keys: slice) -> Bool[Tensor, "_B _H R K"]:
        """Whether these queries see these keys."""
        place = torch.arange(self.k.shape[2], device=rows.device)[keys]
        later = place > rows.unsqueeze(-1) if self.causal else torch.zeros_like(place > rows.unsqueeze(-1))
        return ~later[None, None] if self.visible is None else at_rows(self.visible[..., keys], rows) & ~later

    def softmax(
        self, logits: Float[Tensor, "B H R K"], rows: Int[Tensor, "R"] | None = None, keys: slice = slice(None)
    ) -> Float[Tensor, "B H R K"]:
        """The weights; a sink is one more logit of each head, whose weight is dropped.

        Arguments
            rows, keys  the queries and keys of the logits; all unless given

        Raises `InputError` for logits of some queries where each has a sink of its own and they are not said.
        """
        if self.factor is not None:
            factor = self.factor[: len(logits), ..., keys]
            factor = factor if rows is None else at_rows(factor, rows)
            return replace(self, factor=None).softmax(logits, rows) * factor.to(logits.dtype)
        if self.sinks is None:
            return logits.softmax(-1)
        more = (
            self.sinks.view(1, -1, 1) if self.sinks.ndim == 1 else self._own_sinks(len(logits), logits.shape[2], rows)
        )
        more = more.to(logits.dtype).unsqueeze(-1).expand(*logits.shape[:3], 1)
        return torch.cat((logits, more), -1).softmax(-1)[..., :-1]

    def _own_sinks(self, batch: int, queries: int, rows: Int[Tensor, "R"] | None) -> Float[Tensor, "B H R"]:
        """Those of these queries, in the first so many sequences."""
        assert self.sinks is not None
        own = self.sinks[:, :batch].transpose(0, 1)
        own = own if rows is None else own.index_select(2, rows)
        if own.shape[2] != queries:
            raise InputError(
                f"sinks: each of {own.shape[2]} queries has its own, and weights of {queries} were asked for without "
                "saying which; give fewer tokens."
            )
        return own
