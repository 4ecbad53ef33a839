"""RoPE with a gain for each frequency: bands that are switched off, damped or raised; p-RoPE's share of the highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from toeplens.encodings.base import Positions, require_even, require_number
from toeplens.encodings.rotary import Pairing, PartialRoPE, Rotary, rotary_frequencies
from toeplens.ground import InputError, choose


class RopeBands(PartialRoPE):
    """RoPE whose frequencies each have a gain g_t (Mikaeili et al. 2026, "Untwisting RoPE", for the ramp and "pair").

    With no gain given, all are 1: RoPE. The paper applies its gains to the keys of a reference image alone; here they
    hold for all keys.

    Not verified: the ramp and what it modulates, which are read from the paper without a program to compare.

    Arguments
        gains   n = d/2 numbers, or one such list a head, from the highest frequency to the lowest; not negative
        keep    instead of ``gains``: the indices t that keep a gain of 1; all others have 0
        ramp    instead of ``gains``: (s_hf, s_lf, beta) for g_t = s_hf + (s_lf - s_hf) (t / (n-1))^beta, as published
        off     what a gain does. ``rotation``: the kernel e^(i delta theta_t) becomes (1-g) + g e^(i delta theta_t), so
                that 0 leaves the pair in place and its content counts, and between 0 and 1 the turning is damped;
                exact, by splitting the pair into a turned copy of weight sqrt(g) and a still one of sqrt(1-g), whose
                two dimensions queries and keys get more. ``pair``: the pair's part of the logit is multiplied by g, so
                that 0 takes it out and over 1 raises it; the published modulation
        frequencies  instead of RoPE's: one for all pairs, or n of them, in radians a position; not negative
        layers  a list of layers (from 0); all by default. The others have no encoding, as in `PartialRoPE`
        base, pairing  as in RoPE
    """

    citation = "Mikaeili et al. 2026, arXiv 2602.05013; gains that stop a rotation are ours"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \,[(1 - g_t) + g_t e^{\mathrm{i} \delta \theta_t}]"
        r" \quad\text{or}\quad \mathrm{Re} \sum_t q_t \bar k_t \, g_t e^{\mathrm{i} \delta \theta_t}"
    )
    gains: Tensor
    turned: Tensor
    still: Tensor
    split: Tensor

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
            raise InputError(f"{given[1]}: {given[0]} was given too; only one of gains, keep and ramp may be given.")
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
                raise InputError(
                    f"{given[0]}: a gain of {float(values.max()):g} was given; it must be at most 1 unless off='pair'."
                )
            damped = (values > 0) & (values < 1)
            chosen = chosen * (values > 0)
            turned = torch.where(damped, turned, 1.0)
            still = torch.where(damped, (1 - values).sqrt(), 0.0)
        split = (still > 0).any(0).nonzero().flatten()
        self.register_exact("frequencies", chosen)
        self.register_exact("gains", values)
        self.register_exact("turned", turned.unsqueeze(-2))
        self.register_exact("still", still[:, split].unsqueeze(-2))
        second = split + pairs if self.pairing == "half" else 2 * split + 1
        self.register_exact("split", torch.cat((split if self.pairing == "half" else 2 * split, second)))

    def tables(
        self, positions: Positions, frequencies: Float[Tensor, "*_B H n"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(positions, frequencies, dtype)
        return (cos * self.turned).to(cos.dtype), (sin * self.turned).to(sin.dtype)

    def rotate(
        self, q: Float[Tensor, "B H Nq d"], k: Float[Tensor, "B H Nk d"], q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "B H Nq e"], Float[Tensor, "B H Nk e"]]:
        turned_q, turned_k = super().rotate(q, k, q_positions, k_positions)
        if not len(self.split):
            return turned_q, turned_k
        return torch.cat((turned_q, self._still(q)), dim=-1), torch.cat((turned_k, self._still(k)), dim=-1)

    def _still(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N s"]:
        """The copies of the split pairs that are not turned."""
        return (x.index_select(-1, self.split) * self.still.repeat(1, 1, 2)).to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """What each pair's q_t conj(k_t) is multiplied by: (1-g) + g e^(i delta theta_t), or g e^(i delta theta_t)."""
        turns = super().kernel(offsets)
        gains = self.gains.unsqueeze(-1)
        return gains * turns if self.off == "pair" else (1 - gains) + gains * turns


def _frequencies(given: float | Sequence[float], pairs: int) -> Float[Tensor, "1 n"]:
    values = list(given) if isinstance(given, Sequence) else [given] * pairs
    if len(values) != pairs:
        raise InputError(f"frequencies: {values} was given; it must be one number or a list of {pairs}.")
    values = [require_number("frequencies", value, at_least=0) for value in values]
    return torch.tensor([values], dtype=torch.float64)


def _kept(keep: Sequence[int], pairs: int) -> Float[Tensor, "1 n"]:
    if not all(isinstance(t, int) and 0 <= t < pairs for t in keep) or len(set(keep)) != len(keep):
        raise InputError(f"keep: {list(keep)} was given; it must be a list of different indices from 0 to {pairs - 1}.")
    values = torch.zeros(1, pairs, dtype=torch.float64)
    values[:, list(keep)] = 1
    return values


def _ramp(ramp: Sequence[float], pairs: int) -> Float[Tensor, "1 n"]:
    if len(ramp) != 3:
        raise InputError(f"ramp: {list(ramp)} was given; it must be the three numbers s_hf, s_lf, beta.")
    high, low = (require_number("ramp", value, at_least=0) for value in ramp[:2])
    beta = require_number("ramp", ramp[2], over=0)
    share = torch.arange(pairs, dtype=torch.float64) / max(1, pairs - 1)
    return (high + (low - high) * share**beta).unsqueeze(0)


def _gains(gains: Sequence[float] | Sequence[Sequence[float]], num_heads: int, pairs: int) -> Float[Tensor, "H n"]:
    by_head = [list(row) for row in gains if isinstance(row, Sequence)]
    rows = by_head or [[g for g in gains if not isinstance(g, Sequence)]]
    whole = not by_head or len(by_head) == len(gains) == num_heads
    if not whole or any(len(row) != pairs for row in rows):
        raise InputError(
            f"gains: {list(gains)} was given; it must be a list of {pairs} numbers, or {num_heads} such lists."
        )
    return torch.tensor([[require_number("gains", g, at_least=0) for g in row] for row in rows], dtype=torch.float64)


class PRoPE(Rotary):
    """p-RoPE: the highest frequencies are kept, the lowest do not turn (Barbero et al. 2024, section 6).

    The first int(p d/2) frequencies are RoPE's own, with the whole head dimension in the exponent; p = 1 is RoPE, p = 0
    no encoding. The "proportional" RoPE of transformers (Gemma 4) is the same.

    Arguments
        p              share of the frequencies that is kept; the paper's best is 0.75, it also tries 0.25
        base, pairing  as in RoPE
    """

    citation = "Barbero et al. 2024, arXiv 2410.06205"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \vartheta_t},"
        r" \quad \vartheta_t = b^{-2t/d} \text{ for } t < \lfloor p d / 2 \rfloor, \text{ else } 0"
    )

    def __init__(
        self, *, p: float = 0.75, base: float = 10000.0, pairing: Pairing = "interleaved", **sizes: int
    ) -> None:
        head_dim = sizes["head_dim"]
        require_even("head_dim", head_dim, "a rotation takes dimensions in pairs")
        require_number("p", p, at_least=0, at_most=1)
        frequencies = rotary_frequencies(head_dim, base)
        frequencies[int(p * head_dim // 2) :] = 0
        super().__init__(frequencies.unsqueeze(0), pairing=pairing, **sizes)


ENCODINGS = {"rope-bands": RopeBands, "p-rope": PRoPE}
