"""RoPE with a weight per frequency: band gains, p-RoPE's highest frequencies, xPos's decay with distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.encodings.kit import phases_of, product_dtype, require_indices, require_number
from toeplens.encodings.rotary import Pairing, PartialRoPE, RoPE
from toeplens.encodings.shapes import Frequencies, Keys, Positions, Queries, Turned
from toeplens.ground import InputError, choose, invalid


class RopeBands(PartialRoPE):
    """RoPE with a gain g_t per frequency (Mikaeili et al. 2026, "Untwisting RoPE", for the ramp and "pair").

    Without gains it is RoPE. The paper applies its gains only to the keys of a reference image; here they apply to all
    keys.

    Not verified: the ramp and what it modulates. Both are read from the paper, without code to compare.

    Arguments
        gains   n = d/2 non-negative numbers, or one such list per head, from the highest frequency to the lowest
        keep    instead of ``gains``: the indices t with a gain of 1; all others have 0
        ramp    instead of ``gains``: (s_hf, s_lf, beta) for g_t = s_hf + (s_lf - s_hf) (t / (n-1))^beta, as published
        off     what a gain acts on. ``rotation``: the kernel e^(i delta theta_t) becomes (1-g) + g e^(i delta theta_t).
                A gain of 0 leaves the pair unrotated, so that only its content counts; a gain between 0 and 1 dampens
                the rotation. This is exact: the pair is split into a rotated copy of weight sqrt(g) and an unrotated
                one of sqrt(1-g), which adds two dimensions to queries and keys. ``pair``: the pair's part of the logit
                is multiplied by g, so that 0 removes it and values over 1 amplify it, as published
        frequencies  replacement for RoPE's: one for all pairs, or n of them, in radians per position; not negative
        layers  a list of layers, counted from 0 (default: all). The others have no encoding, as in `PartialRoPE`
        base, pairing  as in RoPE
    """

    citation = "Mikaeili et al. 2026, arXiv 2602.05013; gains that freeze a rotation are ours"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \,[(1 - g_t) + g_t e^{\mathrm{i} \delta \theta_t}]"
        r" \quad\text{or}\quad \mathrm{Re} \sum_t q_t \bar k_t \, g_t e^{\mathrm{i} \delta \theta_t}"
    )

    def __init__(
        self,
        *,
        gains: Sequence[float] | Sequence[Sequence[float]] | None = None,
        keep: Sequence[int] | None = None,
        ramp: Sequence[float] | None = None,
        off: Literal["rotation", "pair"] = "rotation",
        frequencies: float | Sequence[float] | None = None,
        layers: Sequence[int] | None = None,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(layers=layers, base=base, pairing=pairing, **sizes)
        pairs = self.head_dim // 2
        self.off = choose("off", off, ("rotation", "pair"))
        given = [name for name, value in (("gains", gains), ("keep", keep), ("ramp", ramp)) if value is not None]
        if len(given) > 1:
            raise InputError(f"{given[0]} and {given[1]} must not both be set.")
        if keep is not None:
            values = _kept(keep, pairs)
        elif ramp is not None:
            values = _ramp(ramp, pairs)
        elif gains is not None:
            values = _gains(gains, self.num_heads, pairs)
        else:
            values = torch.ones(1, pairs, dtype=torch.float64)
        chosen = self.frequencies[:1] if frequencies is None else _frequencies(frequencies, pairs)
        turned, still = values.sqrt(), torch.zeros_like(values)
        if self.off == "rotation":
            if float(values.max()) > 1:
                raise invalid(given[0], "be at most 1 unless off='pair'", got=f"a gain of {float(values.max()):g}")
            damped = (values > 0) & (values < 1)
            chosen = chosen * (values > 0)
            turned = torch.where(damped, turned, 1.0)
            still = torch.where(damped, (1 - values).sqrt(), 0.0)
        split = (still > 0).any(0).nonzero().flatten()
        self.register_exact("frequencies", chosen)
        self.gains = self.register_exact("gains", values)
        self.turned = self.register_exact("turned", turned.unsqueeze(-2))
        self.still = self.register_exact("still", still[:, split].unsqueeze(-2))
        second = split + pairs if self.pairing == "half" else 2 * split + 1
        self.split = self.register_exact("split", torch.cat((split if self.pairing == "half" else 2 * split, second)))

    def tables(self, positions: Positions, frequencies: Frequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(positions, frequencies, dtype)
        return (cos * self.turned).to(cos.dtype), (sin * self.turned).to(sin.dtype)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        turned_q, turned_k = super().rotate(q, k, q_positions, k_positions)
        if not len(self.split):
            return turned_q, turned_k
        return torch.cat((turned_q, self._still(q)), dim=-1), torch.cat((turned_k, self._still(k)), dim=-1)

    def _still(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N s"]:
        """The unrotated copies of the split pairs."""
        return (x.index_select(-1, self.split) * self.still.repeat(1, 1, 2)).to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """The factor of each pair's q_t conj(k_t): (1-g) + g e^(i delta theta_t), or g e^(i delta theta_t)."""
        turns = super().kernel(offsets)
        gains = self.gains.unsqueeze(-1)
        return gains * turns if self.off == "pair" else (1 - gains) + gains * turns


def _frequencies(given: float | Sequence[float], pairs: int) -> Float[Tensor, "1 n"]:
    values = list(given) if isinstance(given, Sequence) else [given] * pairs
    if len(values) != pairs:
        raise invalid("frequencies", f"be one number or a list of {pairs}", values)
    values = [require_number("frequencies", value, at_least=0) for value in values]
    return torch.tensor([values], dtype=torch.float64)


def _kept(keep: Sequence[int], pairs: int) -> Float[Tensor, "1 n"]:
    require_indices("keep", keep, pairs)
    values = torch.zeros(1, pairs, dtype=torch.float64)
    values[:, list(keep)] = 1
    return values


def _ramp(ramp: Sequence[float], pairs: int) -> Float[Tensor, "1 n"]:
    if len(ramp) != 3:
        raise invalid("ramp", "be the three numbers s_hf, s_lf, beta", list(ramp))
    high, low = (require_number("ramp", value, at_least=0) for value in ramp[:2])
    beta = require_number("ramp", ramp[2], over=0)
    share = torch.arange(pairs, dtype=torch.float64) / max(1, pairs - 1)
    return (high + (low - high) * share**beta).unsqueeze(0)


def _gains(gains: Sequence[float] | Sequence[Sequence[float]], num_heads: int, pairs: int) -> Float[Tensor, "H n"]:
    by_head = [list(row) for row in gains if isinstance(row, Sequence)]
    rows = by_head or [[g for g in gains if not isinstance(g, Sequence)]]
    whole = not by_head or len(by_head) == len(gains) == num_heads
    if not whole or any(len(row) != pairs for row in rows):
        raise invalid("gains", f"be a list of {pairs} numbers, or {num_heads} such lists", list(gains))
    return torch.tensor([[require_number("gains", g, at_least=0) for g in row] for row in rows], dtype=torch.float64)


class PRoPE(RoPE):
    """p-RoPE: the highest frequencies are kept and the lowest are set to 0 (Barbero et al. 2024, section 6).

    The first int(p d/2) frequencies are RoPE's, with the whole head dimension in the exponent. p = 1 is RoPE and p = 0
    is no encoding. The "proportional" RoPE of transformers (Gemma 4) is the same.

    Arguments
        p              share of the frequencies that is kept; the paper's best is 0.75, it also tries 0.25
    """

    citation = "Barbero et al. 2024, arXiv 2410.06205"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \vartheta_t},"
        r" \quad \vartheta_t = b^{-2t/d} \text{ for } t < \lfloor p d / 2 \rfloor, \text{ else } 0"
    )

    def __init__(self, *, p: float = 0.75, **inherited: Any) -> None:
        super().__init__(**inherited)
        require_number("p", p, at_least=0, at_most=1)
        self.frequencies[:, int(p * self.head_dim // 2) :] = 0


class XPos(RoPE):
    """RoPE times zeta_t^((i - j)/B), which decays with the distance to earlier keys (Sun et al. 2022, section 3).

    zeta_t = (2t/d + gamma)/(1 + gamma). Queries are multiplied by zeta_t^((i - c)/B), keys by zeta_t^((c - j)/B); the
    centre c cancels. The released code uses half the length as c. Here it is the middle of the keys' positions (one
    per sequence), so that a window at any position has the same, small factors. For keys after the query the factor
    would grow, so xPos is for causal attention. Positions that are too far apart for the factors to fit the queries'
    dtype raise an error, except while compiling or on a GPU, where the check would synchronise.

    Arguments
        scale_base  B; 512 in the released code
        gamma       constant that keeps the highest frequency from vanishing at once
    """

    citation = "Sun et al. 2022, arXiv 2212.10554"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, \zeta_t^{\delta / B} e^{\mathrm{i} \delta \theta_t},"
        r" \quad \zeta_t = \frac{2t/d + \gamma}{1 + \gamma}"
    )

    def __init__(self, *, scale_base: float = 512.0, gamma: float = 0.4, **inherited: Any) -> None:
        require_number("scale_base", scale_base, over=0)
        require_number("gamma", gamma, over=0)
        super().__init__(**inherited)
        share = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        zeta = (share + gamma) / (1 + gamma)
        self.log_decay = self.register_exact("log_decay", zeta.log() / scale_base)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        centre = (k_positions.amin(-1, keepdim=True) + k_positions.amax(-1, keepdim=True)) // 2
        q_places, k_places = q_positions - centre, k_positions - centre
        self._check_span(q_places, k_places, product_dtype(q))
        frequencies = self.frequencies_at(k_positions)
        k_tables = self.tables(k_positions, frequencies, k.dtype)
        q_tables = k_tables if q_positions is k_positions else self.tables(q_positions, frequencies, q.dtype)
        return self._turn(q, self._scaled(q_tables, q_places)), self._turn(k, self._scaled(k_tables, -k_places))

    def _scaled(self, tables: tuple[Tensor, Tensor], places: Positions) -> tuple[Tensor, Tensor]:
        """The tables times zeta_t^(position/B)."""
        cos, sin = tables
        factor = phases_of(places, self.log_decay).exp().to(cos.dtype)
        return cos * factor, sin * factor

    def _check_span(self, q_places: Positions, k_places: Positions, dtype: torch.dtype) -> None:
        """Check that each side's factors stay within a quarter of the dtype's exponent range, so that products fit."""
        if torch.compiler.is_compiling() or k_places.device.type != "cpu" or not q_places.numel():
            return
        limit = int(math.log(torch.finfo(dtype).max) / 4 / float(-self.log_decay.min()))
        widest = max(int(q_places.abs().max()), int(k_places.abs().max()))
        if widest > limit:
            raise invalid(
                "positions",
                f"be within {limit} of the middle position of the keys for {dtype} and this scale_base",
                widest,
            )

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """zeta_t^(delta/B) e^(i delta theta_t)."""
        return super().kernel(offsets) * (self.log_decay.unsqueeze(-1) * offsets.to(torch.float64)).exp()


ENCODINGS = {"rope-bands": RopeBands, "p-rope": PRoPE, "xpos": XPos}
