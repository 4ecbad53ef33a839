"""Content-dependent angles: cumulative sums of steps, learned positions, or a phase per token pair."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.kit import (
    linear,
    offsets_between,
    require_count,
    require_even,
    require_number,
    rotary_frequencies,
    short_convolution,
    widened,
)
from toeplens.encodings.rotary import Pairing, pairing_of, turn
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Earlier, Keys, Notes, Pairs, Positions, Queries, Stream, Turned
from toeplens.ground import choose, invalid

EPS = 1e-6  # added to |x|^2 before the square root, as in the released kernels


class _Chosen(PositionalEncoding):
    """A rotation by angles that subclasses compute from the key features; positions are not used."""

    coupling = "rotation"
    data_dependent = True
    toeplitz = False
    shared = False

    def __init__(self, *, base: float, pairing: Pairing, **sizes: int) -> None:
        super().__init__(**sizes)
        require_even("head_dim", self.head_dim)
        self.pairing: Pairing = pairing_of(pairing)
        self.frequencies = self.register_exact("frequencies", rotary_frequencies(self.head_dim, base))

    def angles(self, notes: Notes, seen: Seen) -> Float[Tensor, "B H N n"]:
        """The angles of all keys, in float64."""
        raise NotImplementedError

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions, *, seen: Seen) -> Turned:
        assert seen.notes is not None
        wide, angles = widened(q.dtype), self.angles(seen.notes, seen)
        own = replace(seen, notes=angles).own_notes()
        turned = (turn(x, a.cos().to(wide), a.sin().to(wide), self.pairing) for x, a in ((q, own), (k, angles)))
        return next(turned), next(turned)


class SelectiveRoPE(_Chosen):
    """Selective RoPE: each token determines the step of every pair's angle, and steps add up (Movahedi et al. 2025).

    phi is a low-rank projection of the layer's input. Each head's slice of it is normalised and passed through a short
    causal depthwise convolution. A step is phi times a gate sigmoid(w_h . x + b_h) of the same normalised x. Pair
    t is rotated by tau_t = base^(-2t/d) (the temperature) times the cumulative sum of the steps, computed in float64.
    Only the order of tokens matters, not their position numbers. The cached key features are phi before its
    convolution, and the gate. Decoding with a cache therefore equals the full pass, and packed documents are convolved
    separately.

    The defaults are those of the paper's language models, with SiLU after the convolution and the gate, as reported by
    others; the released code leaves both out by default. Left out here: its per-head projection with
    weight norm, temperatures that are learned or of the paper's tan(theta/2), and the norm of q and k after rotation.

    Arguments
        rank        rank of the projection (16 in the released code; the paper also has 8)
        conv_size   tokens in the convolution; None: phi's difference from the previous token instead of a convolution,
                    as in the released code, so that the angle is tau_t phi (without a gate)
        activation  after the convolution: ``silu`` or ``none``
        gate        with the gate
        bias        add exp(b) to the steps, with b learned and 0 at the start
        base        500000 in the released code
        pairing     as in RoPE; the released code uses halves
    """

    citation = "Movahedi et al. 2025, arXiv 2511.17388"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \exp\Big(\mathrm{i} \tau_t \sum_{m=j+1}^{i} \sigma(w_h^\top \hat x_m + b_h)\,"
        r" \mathrm{silu}\,\phi_t(\hat x_{\le m})\Big)"
    )

    def __init__(
        self,
        *,
        rank: int = 16,
        conv_size: int | None = 4,
        activation: Literal["silu", "none"] = "silu",
        gate: bool = True,
        bias: bool = False,
        base: float = 500000.0,
        pairing: Pairing = "half",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        require_count(rank=rank, conv_size=1 if conv_size is None else conv_size)
        if self.d_model % self.num_heads:
            raise invalid("d_model", f"be a multiple of num_heads ({self.num_heads})", self.d_model)
        self.activation = choose("activation", activation, ("silu", "none"))
        self.down = nn.Linear(self.d_model, rank, bias=False)
        self.up = nn.Linear(rank, self.num_heads * self.head_dim // 2, bias=False)
        self.taps = self.register_exact("taps", torch.tensor([-1.0, 1.0], dtype=torch.float64).expand(1, 1, 2))
        shape = (self.num_heads, self.head_dim // 2, conv_size or 0)
        self.conv = None if conv_size is None else self.learned(shape, _as_convolution)
        self.gate = nn.Linear(self.d_model, self.num_heads) if gate else None
        self.constant = self.learned((self.num_heads, 1, self.head_dim // 2), nn.init.zeros_) if bias else None

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        """Phi before its convolution, and the gate."""
        slices = x.to(widened(x.dtype)).unflatten(-1, (self.num_heads, -1))
        normed = (slices * (slices.square().sum(-1, keepdim=True) + EPS).rsqrt()).flatten(-2)
        phi = linear(self.up, linear(self.down, normed)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if self.gate is None:
            return phi
        return torch.cat((phi, linear(self.gate, normed).sigmoid().transpose(1, 2).unsqueeze(-1)), dim=-1)

    def angles(self, notes: Notes, seen: Seen) -> Float[Tensor, "B H N n"]:
        seen.require_run(self)
        phi = notes[..., : self.head_dim // 2]
        taps = self.taps.to(phi.dtype) if self.conv is None else self.conv.to(phi.dtype)
        steps = short_convolution(phi, taps, seen.texts, seen.padding)
        if self.activation == "silu" and self.conv is not None:
            steps = F.silu(steps)
        if self.constant is not None:
            steps = steps + self.constant.to(steps.dtype).exp()
        if self.gate is not None:
            steps = steps * notes[..., -1:]
        if seen.padding is not None:
            steps = steps.masked_fill(seen.padding[:, None, :, None], 0.0)
        return steps.to(torch.float64).cumsum(-2) * self.frequencies


def _as_convolution(taps: Float[Tensor, "H n size"]) -> Tensor:
    """Initialise like torch's convolutions of one channel each."""
    return nn.init.uniform_(taps, -(taps.shape[-1] ** -0.5), taps.shape[-1] ** -0.5)


class RePo(_Chosen):
    """RePo: each token predicts its own position, a real number per head, used by RoPE (Li et al. 2025).

    z = W_o (silu(W_g x) * W_c x), x the layer's input; z need not be ordered or positive. Position numbers and the
    order of tokens matter only through the mask. As in the released code, no projection has a bias, and
    all start from N(0, 0.02^2). Its models have RePo from layer 5 of 16 on, and RoPE before; here every layer has it.

    Arguments
        width    of the hidden layer; default d_model // 8, as published
        base     500000 in the released code
        pairing  as in RoPE; the released code uses halves
    """

    citation = "Li et al. 2025, arXiv 2512.14391"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t\, e^{\mathrm{i} (z_i - z_j) \theta_t},"
        r"\quad z = W_o\, (\mathrm{silu}(W_g x) \odot W_c x)"
    )

    def __init__(
        self, *, width: int | None = None, base: float = 500000.0, pairing: Pairing = "half", **sizes: int
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        width = max(1, self.d_model // 8) if width is None else width
        require_count(width=width)
        self.gate, self.content = (nn.Linear(self.d_model, width, bias=False) for _ in range(2))
        self.place_of = nn.Linear(width, self.num_heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.gate, self.content, self.place_of):
            nn.init.normal_(layer.weight, std=0.02)

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        wide = x.to(widened(x.dtype))
        hidden = F.silu(linear(self.gate, wide)) * linear(self.content, wide)
        return linear(self.place_of, hidden).transpose(1, 2).unsqueeze(-1)

    def angles(self, notes: Notes, seen: Seen) -> Float[Tensor, "B H N n"]:
        return notes.to(torch.float64) * self.frequencies


class TAPA(PositionalEncoding):
    """Token-aware phase attention: a cosine of two tokens' content and their distance (Wang et al. 2025, eq. 12).

    Heads are split: the first part of queries and keys gives the amplitude, the rest the phase,

        (q_A . k_A / sqrt(share d)) cos(2 pi |i - j|^alpha q_P . k_P / sqrt((1 - share) d)).

    It replaces q . k and has no parameters. It has no kernel: each query and key have their own function of the
    distance. At distance 0 it is q_A . k_A, scaled.

    Arguments
        alpha  exponent of the distance; published: 0.1
        share  share of the dimensions used for the amplitude; published: 0.5
        phase  ``quadratic``, as above, or ``linear``: the sum of q_P and k_P over sqrt((1 - share) d), which the paper
               finds worse
    """

    coupling = "logits"
    data_dependent = True
    toeplitz = False
    forms_logits = True
    pair_width = 6
    citation = "Wang et al. 2025, arXiv 2509.12635"
    formula = (
        r"\frac{q_A^\top k_A}{\sqrt{\theta d}}"
        r" \cos\left(2 \pi |\delta|^\alpha \frac{q_P^\top k_P}{\sqrt{(1 - \theta) d}}\right)"
    )

    def __init__(
        self,
        *,
        alpha: float = 0.1,
        share: float = 0.5,
        phase: Literal["quadratic", "linear"] = "quadratic",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.alpha = require_number("alpha", alpha, over=0)
        require_number("share", share, over=0)
        self.first = round(share * self.head_dim)
        if not 1 <= self.first < self.head_dim:
            raise invalid("share", "leave amplitude and phase a dimension each", share)
        self.phase = choose("phase", phase, ("quadratic", "linear"))

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        wide = widened(seen.q.dtype)
        split = (self.first, self.head_dim - self.first)
        (q_first, q_last), (k_first, k_last) = (x.to(wide).split(split, dim=-1) for x in (seen.q, seen.k))
        amplitude = q_first @ k_first.mT * (seen.scale * math.sqrt(self.head_dim / self.first))
        q_last, k_last = q_last.to(torch.float64), k_last.to(torch.float64)
        if self.phase == "quadratic":
            phase = q_last @ k_last.mT
        else:
            phase = q_last.sum(-1).unsqueeze(-1) + k_last.sum(-1).unsqueeze(-2)
        distance = offsets_between(q_positions, k_positions).abs().to(torch.float64).unsqueeze(-3)
        turns = distance**self.alpha / math.sqrt(split[1]) * phase
        return (amplitude * torch.cos(2 * math.pi * turns).to(wide)).to(logits.dtype)


ENCODINGS: dict[str, type[PositionalEncoding]] = {"selective-rope": SelectiveRoPE, "repo": RePo, "tapa": TAPA}
