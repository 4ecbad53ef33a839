"""What is made for lengths that training does not show: rotary variants, and temperatures by position."""

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

    theta_t = 2 pi / round(2 pi / RoPE's), so that a pair that has turned once within the training length shows, beyond
    it, only angles that were seen. The paper also rounds the wavelengths that YaRN makes, and the program those of
    position interpolation: ``factor`` does the latter. The shortest wavelength is 6.

    Arguments
        factor         divides RoPE's frequencies before they are rounded
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
    """High-frequency rotary position encoding: what turns once within the training length is kept (Chen et al. 2024).

    Pairs whose period 2 pi / theta_t is longer do not turn, so that their content counts whatever the distance. It is
    p-RoPE with a share that the training length decides.

    Two later encodings have the same name and are others: hyperbolic (arXiv 2509.05218), and hybrid for images and text
    (arXiv 2505.20444).

    Not verified: the rule, which is read from works that use it, as neither the paper's text nor a program of the
    authors could be read; the paper may set the limit in another way near that length.

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
    """RoPE++: beside a head whose logit is RoPE's real part, one whose logit is the imaginary part (Liu et al. 2025).

    Head 2h is real and head 2h + 1 imaginary: its queries are turned back by a quarter turn, so that its logit is
    Im sum_t q_t conj(k_t) e^(i delta theta_t), which for a query and key of the same content is a sum of sines of the
    distance. In the released program a pair shares a query, a key and a value, either at equal heads (half of the
    projections and of the cache) or at equal cache (twice the heads). Here the number of heads is the model's, the
    second of a pair takes queries and keys of the first (its own are idle), and values stay each head's own. If the
    number of heads is odd, the last is real: ours.

    Arguments
        heads          ``shared``: queries and keys of a pair are the first one's, as published; ``own``: each its own
        base, pairing  as in RoPE; the program pairs in halves
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
        """e^(i delta theta_t) of real heads, -i e^(i delta theta_t) of imaginary ones."""
        kernel = super().kernel(offsets)
        return torch.where(self.imaginary[:, None, None], -1j * kernel, kernel)


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
    "resonance-rope": ResonanceRoPE,
    "hope": HoPE,
    "rope-plus-plus": RoPEPlusPlus,
    "scalable-softmax": ScalableSoftmax,
    "llama4-temperature": Llama4Temperature,
}
