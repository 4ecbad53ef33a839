"""Fixed and learned biases on the logits that depend only on the offset, so they are exactly Toeplitz."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import normal, offsets_between, require_number, require_whole
from toeplens.encodings.shapes import Positions
from toeplens.ground import choose, invalid


class OffsetBias(PositionalEncoding):
    """A bias that is a function of the offset i - j only; subclasses define `kernel`."""

    coupling = "bias"

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"]:
        offsets = offsets_between(q_positions, k_positions)
        values = self._kernel_at(offsets.flatten()).unflatten(-1, offsets.shape)
        return values if offsets.ndim == 2 else values.movedim(0, 1)

    def _kernel_at(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        """The kernel, evaluated once per distinct offset where finding those is cheap."""
        costly = offsets.device.type != "cpu" or torch.compiler.is_compiling()
        if costly or offsets.is_floating_point() or offsets.numel() == 0:
            return self._whole_kernel(offsets)
        low, high = int(offsets.min()), int(offsets.max())
        if 2 * (high - low + 1) > offsets.numel():
            return self._whole_kernel(offsets)
        return self._whole_kernel(torch.arange(low, high + 1))[:, offsets - low]

    def _whole_kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        values = self.kernel(offsets)
        if values.shape != (self.num_heads, len(offsets)):
            raise invalid(
                f"{type(self).__name__}.kernel",
                f"return shape {[self.num_heads, len(offsets)]}",
                got=f"shape {list(values.shape)}",
            )
        return values

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        raise NotImplementedError


class ALiBi(OffsetBias):
    """A penalty linear in the distance, -m_h |i - j|, with a fixed slope per head (Press et al. 2022, section 3).

    Under a causal mask |i - j| is the published i - j; without one it is the usual symmetric form.

    Arguments
        slopes  ``geometric``: m_h = 2^(-8h/H), h = 1..H, with the published interleaving if H is not a power of two;
                ``exponential``: m_h = e^(-h/H), h = 0..H-1, as in the released code of arXiv 2505.13027
    """

    citation = "Press et al. 2022, arXiv 2108.12409"
    formula = r"b_{ij} = -m_h |i - j|,\quad m_h = 2^{-8h/H}"
    factorable = True

    def __init__(self, *, slopes: Literal["geometric", "exponential"] = "geometric", **sizes: int) -> None:
        super().__init__(**sizes)
        rules = {"geometric": geometric_slopes, "exponential": exponential_slopes}
        self.slopes = self.register_exact("slopes", rules[choose("slopes", slopes, rules)](self.num_heads))

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        return -self.slopes.unsqueeze(-1) * offsets.abs()

    def factors_at(self, q_positions: Positions, k_positions: Positions) -> bool:
        """Whether the keys are in the order of their positions; read only where that is cheap."""
        if k_positions.device.type != "cpu" or torch.compiler.is_compiling() or k_positions.ndim != q_positions.ndim:
            return False
        return bool((k_positions.diff() >= 0).all()) and torch.equal(
            q_positions, k_positions[..., k_positions.shape[-1] - q_positions.shape[-1] :]
        )

    def bias_product(
        self, q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "H Nq 1"], Float[Tensor, "*B H Nk 1"]]:
        places = (k_positions - q_positions[..., :1]).double()[..., None, :, None]
        slopes = self.slopes[:, None, None].expand(-1, q_positions.shape[-1], 1)
        return slopes, places.expand(*places.shape[:-3], self.num_heads, -1, -1)


def geometric_slopes(num_heads: int) -> Float[Tensor, "H"]:
    """2^(-8h/H) for a power of two; otherwise the next lower power's, then every second of the next higher's."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]

    lower = 2 ** int(math.log2(num_heads))
    values = powers(lower) + powers(2 * lower)[0::2][: num_heads - lower]
    return torch.tensor(values, dtype=torch.float64)


def exponential_slopes(num_heads: int) -> Float[Tensor, "H"]:
    """e^(-h/H), h = 0..H-1."""
    return torch.exp(-torch.arange(num_heads, dtype=torch.float64) / num_heads)


class T5(OffsetBias):
    """One learned value per head and distance bucket, shared by all layers (Raffel et al. 2020, section 2.1).

    Half of the buckets are exact distances, the others grow logarithmically up to ``max_distance``, and larger
    distances share the last one. T5 does not scale q . k by 1/sqrt(d): its `scale` is 1.

    Arguments
        num_buckets    number of buckets (both directions together)
        max_distance   distance from which on all share the last bucket
        bidirectional  use half of the buckets for keys after the query, as in T5's encoder; otherwise these share
                       bucket 0
    """

    citation = "Raffel et al. 2020, arXiv 1910.10683"
    formula = r"b_{ij} = w_{h,\,\mathrm{bucket}(i - j)}"
    scale_terms = 0

    def __init__(
        self, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        ranges = 4 if bidirectional else 2  # near and far, in each direction
        exact = num_buckets // ranges
        if num_buckets % ranges or exact < 1:
            raise invalid("num_buckets", f"be a positive multiple of {ranges}", num_buckets)
        if max_distance <= exact:
            raise invalid("max_distance", f"be over the {exact} exact distances", max_distance)
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.randn(num_buckets, self.num_heads) * 0.02)

    def buckets(self, offsets: Int[Tensor, "*D"]) -> Int[Tensor, "*D"]:
        """The bucket of each offset i - j."""
        require_whole("T5", offsets)
        count = self.num_buckets
        start, distance = 0, offsets.clamp(min=0)
        if self.bidirectional:
            count //= 2
            start, distance = (offsets < 0).to(offsets.dtype) * count, offsets.abs()
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).to(offsets.dtype)).clamp(max=count - 1)
        return start + torch.where(distance < exact, distance, far)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        return nn.functional.embedding(self.buckets(offsets), self.weight).transpose(0, 1)


class RelativeTable(OffsetBias):
    """One learned value per head and signed distance, no buckets (the released code's "relative", arXiv 2505.13027).

    Distances of ``max_len`` and more share the value of the last one.

    Arguments
        shared    one table for all layers; otherwise one per layer, as in the released code
        init_std  standard deviation of the initial table
    """

    citation = "Gu et al. 2025, arXiv 2505.13027, released code"
    formula = r"b_{ij} = w_{h,\,i - j}"

    def __init__(self, *, shared: bool = False, init_std: float = 0.02, **sizes: int) -> None:
        super().__init__(**sizes)
        self.shared = shared
        start = normal(require_number("init_std", init_std, at_least=0))
        self.weight = self.learned((2 * self.max_len - 1, self.num_heads), start)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"]:
        require_whole("RelativeTable", offsets)
        edge = self.max_len - 1
        return nn.functional.embedding(offsets.clamp(-edge, edge) + edge, self.weight).transpose(0, 1)


ENCODINGS = {"t5": T5, "relative-table": RelativeTable, "alibi": ALiBi}
