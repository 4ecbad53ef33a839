"""Encodings for length extrapolation: rotary variants and position-dependent temperatures."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import require_number, widened
from toeplens.encodings.rotary import Pairing, RoPE
from toeplens.encodings.shapes import Keys, Positions, Queries, Turned
from toeplens.ground import choose, invalid


class ResonanceRoPE(RoPE):
    """Resonance RoPE: every wavelength is rounded to a whole number of positions (Wang et al. 2024).

    theta_t = 2 pi / round(2 pi / RoPE's). A pair with a full period within the training length then repeats the same
    angles at longer lengths. The paper also rounds the wavelengths of YaRN, and the released code those of
    position interpolation: ``factor`` does the latter. The shortest wavelength is 6.

    Arguments
        factor         divides RoPE's frequencies before rounding
        base, pairing  as in RoPE
    """

    citation = "Wang et al. 2024, arXiv 2403.00071"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{2 \pi \mathrm{i} \delta / \lambda_t},"
        r" \quad \lambda_t = \mathrm{round}(2 \pi b^{2t/d})"
    )

    def __init__(self, *, factor: float = 1.0, **inherited: Any) -> None:
        require_number("factor", factor, at_least=1)
        super().__init__(**inherited)
        self.wavelengths = self.register_exact("wavelengths", (2 * math.pi * factor / self.frequencies).round())
        self.frequencies.copy_(2 * math.pi / self.wavelengths)


class HoPE(RoPE):
    """High-frequency rotary position encoding: keep only pairs with a full period in training (Chen et al. 2024).

    Pairs whose period 2 pi / theta_t is longer than the training length are not rotated, so their content counts at any
    distance. It is p-RoPE with a share set by the training length.

    Two later encodings have the same name but are different: hyperbolic (arXiv 2509.05218), and hybrid for images and
    text (arXiv 2505.20444).

    Not verified: the rule, which is taken from works that use it, because neither the paper's text nor the authors'
    code was available. The paper may set the limit differently near that length.

    Arguments
        train_length   default ``max_len``
        base, pairing  as in RoPE
    """

    citation = "Chen et al. 2024, arXiv 2410.21216"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \vartheta_t},"
        r" \quad \vartheta_t = b^{-2t/d} \text{ if } 2 \pi b^{2t/d} \le L, \text{ else } 0"
    )

    def __init__(self, *, train_length: int | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        length = self.max_len if train_length is None else train_length
        if length < 7:
            field = "max_len" if train_length is None else "train_length"
            raise invalid(field, "be at least 7, for one frequency to remain", length)
        self.frequencies[2 * math.pi / self.frequencies > length] = 0


class RoPEPlusPlus(RoPE):
    """RoPE++: pairs of heads, one with RoPE's real part as its logit, one with the imaginary part (Liu et al. 2025).

    Head 2h is real and head 2h + 1 imaginary. The queries of head 2h + 1 are rotated back by a quarter turn, so its
    logit is Im sum_t q_t conj(k_t) e^(i delta theta_t), which for a query and key of the same content is a sum of sines
    of the distance. In the released code the two heads share a query, a key and a value, either with the same number of
    heads (half of the projections and of the cache) or with the same cache (twice the heads). Here the number of heads
    is the model's. The second head of a pair uses the queries and keys of the first (its own are unused), and values
    stay separate. With an odd number of heads, the last is real (our choice).

    Arguments
        heads          ``shared``: a pair uses the first head's queries and keys, as published; ``own``: each its own
        base, pairing  as in RoPE; the released code uses halves
    """

    citation = "Liu et al. 2025, arXiv 2512.07525"
    formula = (
        r"\mathrm{Re}\, z_{2h},\; \mathrm{Im}\, z_{2h},"
        r" \quad z_h = \sum_t q_{h,t}\, \overline{k_{h,t}}\, e^{\mathrm{i}\delta\theta_t}"
    )

    def __init__(
        self, *, heads: Literal["shared", "own"] = "shared", pairing: Pairing = "half", **inherited: Any
    ) -> None:
        super().__init__(pairing=pairing, **inherited)
        self.heads = choose("heads", heads, ("shared", "own"))
        if self.num_heads < 2:
            raise invalid("num_heads", "be at least 2, a real and an imaginary head", self.num_heads)
        self.imaginary = self.register_exact("imaginary", torch.arange(self.num_heads) % 2 == 1)
        self.source = self.register_exact("source", torch.arange(self.num_heads) // 2 * 2)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        if self.heads == "shared":
            q, k = q.index_select(1, self.source), k.index_select(1, self.source)
        if self.pairing == "half":
            a, b = q.chunk(2, dim=-1)
            back = torch.cat((b, -a), dim=-1)
        else:
            a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
            back = torch.stack((b, -a), dim=-1).flatten(-2)
        q = torch.where(self.imaginary[:, None, None], back, q)
        return super().rotate(q, k, q_positions, k_positions)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """e^(i delta theta_t) for real heads, -i e^(i delta theta_t) for imaginary ones."""
        kernel = super().kernel(offsets)
        return torch.where(self.imaginary[:, None, None], -1j * kernel, kernel)


class Tempered(PositionalEncoding):
    """Multiplies queries by a position-dependent factor; subclasses define `factor`.

    The factor sets how sharp a query's softmax is and does not depend on the key's position. Encodings of this
    kind are published in combination with another one, or for layers without any other. Their `rotate` can be called
    after that of a rotation.
    """

    coupling = "rotation"
    toeplitz = False

    def factor(self, positions: Positions) -> Float[Tensor, "*B H N"]:
        """The factor at each position, in at least float32: [H or 1, N], or [B, H or 1, N]."""
        raise NotImplementedError

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        factor = self.factor(q_positions).to(widened(q.dtype)).unsqueeze(-1)
        return (q.to(factor.dtype) * factor).to(q.dtype), k


class ScalableSoftmax(Tempered):
    """SSMax: logits times s log n, with n the number of competing keys and s learned per head (Nakanishi 2025).

    Here n is the query's position + 1, so that the result at a position depends on nothing else. In a causal sequence
    from position 0 on, that is the number of keys that the query sees, both in a full pass and in decoding with a
    cache. The same holds for packed sequences and after padding, if each sequence's positions start at 0. A sequence at
    an offset is treated as if all earlier keys were visible. With a sliding window, or without a causal mask, n is not
    the number of visible keys. Negative positions count as 0. The query at position 0, which sees only itself, is
    multiplied by log 1 = 0.

    Not verified: the initial s, 0.168, which is from memory of the paper. It is 1 over the mean of log n for n = 1 ..
    1024, so that logits in sequences of that length start at their usual size.

    Arguments
        start   initial value of s
        bias    with a learned b per head that starts at 0, for (s log n + b): a variant of the paper's
        shared  one set of parameters for all layers; otherwise one per layer, as published
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
    """Llama 4's attention temperature: 1 + a log(1 + floor((i + 1) / f)), used on its layers without a rotation.

    The factor uses the absolute position, also with a sliding window. Negative positions count as 0. Llama 4 has it
    on every fourth layer, where there is no RoPE; here all layers have it. transformers computes it in float32.

    Arguments
        floor_scale  f, positions per step of the temperature (default: ``max_len``/16, which for the 131,072
                     positions of transformers' default configuration is its 8192)
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
    "resonance-rope": ResonanceRoPE,
    "hope": HoPE,
    "rope-plus-plus": RoPEPlusPlus,
    "scalable-softmax": ScalableSoftmax,
    "llama4-temperature": Llama4Temperature,
}
