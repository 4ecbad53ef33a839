"""Temperatures by position: a query is multiplied by a factor of where it stands, so that long texts stay in focus."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import require_number, widened
from toeplens.encodings.shapes import Keys, Positions, Queries, Turned


class Tempered(PositionalEncoding):
    """Queries times a factor of their position, and nothing else: a subclass gives `factor`.

    A logit is then that factor times q . k, so it says how sharp a query's softmax is, and nothing of the key's place.
    Encodings of this kind are published beside another one, or for layers that have no other: their `rotate` can be
    called after that of a rotation.
    """

    coupling = "rotation"
    toeplitz = False

    def factor(self, positions: Positions) -> Float[Tensor, "*B H N"]:
        """The factor at each position, in float32 or better: [H or 1, N], or [B, H or 1, N]."""
        raise NotImplementedError

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        factor = self.factor(q_positions).to(widened(q.dtype)).unsqueeze(-1)
        return (q.to(factor.dtype) * factor).to(q.dtype), k


class ScalableSoftmax(Tempered):
    """SSMax: logits times s log n, n the number of keys that compete and s a learned number a head (Nakanishi 2025).

    Here n is the query's position + 1, so that what is done at a position depends on nothing else. In a causal text
    from position 0 on that is the number of keys that the query sees, in a full pass and in decoding with a key cache
    alike; so it is in packed sequences and after padding, if each sequence's positions start at 0. A text at an offset
    is treated as if all before it were seen; with a window of keys, or without a causal mask, n is not their number.
    Positions under 0 count as 0. The query at position 0, which sees itself alone, is multiplied by log 1 = 0.

    Not verified: the start of s, 0.168, which is from memory of the paper. It is 1 over the mean of log n for n = 1 ..
    1024, so that logits in texts of that length start at their usual size.

    Arguments
        start   where s starts
        bias    with a learned number b a head that starts at 0, for (s log n + b): a variant of the paper's
        shared  one set of numbers for all layers; else each layer has its own, as published
    """

    citation = "Nakanishi 2025, arXiv 2501.19399"
    formula = r"(s_h \log n_i)\, q_i^\top k_j / \sqrt d,\quad n_i = i + 1"

    def __init__(self, *, start: float = 0.168, bias: bool = False, shared: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        require_number("start", start)
        self.shared = shared
        self.slope = self.learned((self.num_heads,), partial(nn.init.constant_, val=start))
        self.level = self.learned((self.num_heads,), nn.init.zeros_) if bias else None

    def factor(self, positions: Positions) -> Float[Tensor, "*B H N"]:
        logs = (positions.to(torch.float64).clamp(min=0) + 1).log().unsqueeze(-2)
        factor = logs * self.slope.to(torch.float64).unsqueeze(-1)
        return factor if self.level is None else factor + self.level.to(torch.float64).unsqueeze(-1)


class Llama4Temperature(Tempered):
    """Llama 4's attention temperature: 1 + a log(1 + floor((i + 1) / f)), on its layers without a rotation.

    A position is what it is, in a window of keys too: nothing is counted. Positions under 0 count as 0. Llama 4 has it
    on every fourth layer, where there is no RoPE; here all layers have it. transformers forms it in float32.

    Arguments
        floor_scale  f, positions at which the temperature changes; default ``max_len``/16, which for the 131,072
                     positions of transformers' default configuration is its 8192
        attn_scale   a
    """

    citation = "Meta 2025, Llama 4, as in transformers (after arXiv 2501.19399)"
    formula = r"\left(1 + a \log\left(1 + \lfloor (i + 1) / f \rfloor\right)\right) q_i^\top k_j / \sqrt d"

    def __init__(self, *, floor_scale: float | None = None, attn_scale: float = 0.1, **sizes: int) -> None:
        super().__init__(**sizes)
        self.floor_scale = max(1.0, self.max_len / 16) if floor_scale is None else floor_scale
        require_number("floor_scale", self.floor_scale, over=0)
        self.attn_scale = require_number("attn_scale", attn_scale)

    def factor(self, positions: Positions) -> Float[Tensor, "*B H N"]:
        count = positions.to(torch.float64).clamp(min=0) + 1
        steps = torch.div(count, self.floor_scale, rounding_mode="floor")
        return (1 + self.attn_scale * steps.log1p()).unsqueeze(-2)


ENCODINGS: dict[str, type[PositionalEncoding]] = {
    "scalable-softmax": ScalableSoftmax,
    "llama4-temperature": Llama4Temperature,
}
