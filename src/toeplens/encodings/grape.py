"""Group representational position encoding (GRAPE): rotations composed of planes, and biases of a unipotent group."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.bias import geometric_slopes
from toeplens.encodings.kit import (
    linear,
    normal,
    offsets_between,
    phases_of,
    require_even,
    rotary_frequencies,
    turns,
    widened,
)
from toeplens.encodings.rotary import turn
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Earlier, Keys, Notes, Pairs, Positions, Queries, Stream, Turned
from toeplens.ground import choose, invalid

SHARE = 1e-12  # share of |a|^2 |b|^2 below which two vectors span no plane


class GRAPE(PositionalEncoding):
    """Multiplicative GRAPE: exp(n sum_r theta_r L_r), each L(a, b) = a b^T - b a^T (Zhang et al. 2025).

    The frequencies are learned as logarithms and start as RoPE's. ``canonical`` planes are RoPE's pairs, which is
    what the released code trains: RoPE at the start. ``orthogonal`` planes are those pairs in a learned orthogonal
    basis B = exp(A - A^T), which starts as the identity (the paper does not say how B is made); they commute.
    ``free`` planes are spanned by any learned a_r, b_r, not necessarily orthogonal. Their generators do not
    commute, but logits still depend only on the offset (the paper's appendix D). One free plane has the closed form of
    section 2.3,

        exp(n L) x = x + sin(n s)/s (a v - b u) + (1 - cos(n s))/s^2 [g (a v + b u) - |b|^2 a u - |a|^2 b v],

    u = a.x, v = b.x, g = a.b, s^2 = |a|^2 |b|^2 - g^2; several planes are compressed to the 2r dimensions that they
    span. Free planes start orthonormal to each other, along random directions (our choice).

    Left out: the code's factor of 16 on the logarithms, which slows their learning; its opposite direction of rotation;
    and the contextual form, whose step is a gate of the token.

    Arguments
        planes    ``canonical``, ``orthogonal`` or ``free``
        count     number of free planes (default: d/2, the maximum)
        per_head  separate parameters for each head; otherwise one set for all heads, as published
        base      RoPE base of the initial frequencies
    """

    coupling = "rotation"
    shared = False
    citation = "Zhang et al. 2025, arXiv 2512.07805, sections 2 and 3"
    formula = r"q_i^\top e^{(j - i) L} k_j,\quad L = \sum_r \theta_r (a_r b_r^\top - b_r a_r^\top)"

    def __init__(
        self,
        *,
        planes: Literal["canonical", "orthogonal", "free"] = "canonical",
        count: int | None = None,
        per_head: bool = False,
        base: float = 10000.0,
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        require_even("head_dim", self.head_dim)
        self.planes = choose("planes", planes, ("canonical", "orthogonal", "free"))
        pairs, heads = self.head_dim // 2, self.num_heads if per_head else 1
        if count is not None and (self.planes != "free" or not 1 <= count <= pairs):
            raise invalid("count", f"be from 1 to {pairs}, with planes='free' only", count)
        start = rotary_frequencies(self.head_dim, base)[:count]
        self.start = self.register_exact("start", start.log())
        self.log_frequency = self.learned((heads, len(start)), nn.init.zeros_)
        self.basis = self.vectors = None
        if self.planes == "orthogonal":
            self.basis = self.learned((heads, self.head_dim, self.head_dim), nn.init.zeros_)
        if self.planes == "free":
            self.vectors = self.learned((heads, self.head_dim, 2 * len(start)), _orthonormal)

    def frequencies(self) -> Float[Tensor, "H n"]:
        """theta_r, in float64; the parameter is log theta_r relative to RoPE's."""
        return (self.start + self.log_frequency.to(torch.float64)).exp()

    def compressed(self) -> tuple[Float[Tensor, "H d m"], Float[Tensor, "H m m"]]:
        """The sum of free generators as E M E^T, E orthonormal: its m = 2r dimensions, and M in them; in float64."""
        assert self.vectors is not None
        span, inner = torch.linalg.qr(self.vectors.to(torch.float64))
        a, b = inner[..., 0::2] * self.frequencies().unsqueeze(-2), inner[..., 1::2]
        half = a @ b.mT
        return span, half - half.mT

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        wide = widened(q.dtype)
        return self._turned(q.to(wide), q_positions).to(q.dtype), self._turned(k.to(wide), k_positions).to(k.dtype)

    def _turned(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        if self.vectors is not None:
            return self._one(x, positions) if self.vectors.shape[-1] == 2 else self._many(x, positions)
        phases = phases_of(positions, self.frequencies())
        tables = phases.cos().to(x.dtype), phases.sin().to(x.dtype)
        if self.basis is None:
            return turn(x, *tables, "interleaved")
        weight = self.basis.to(torch.float64)
        basis = torch.matrix_exp(weight - weight.mT).to(x.dtype)
        return turn(x @ basis, *tables, "interleaved") @ basis.mT

    def _one(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        assert self.vectors is not None
        a, b = self.vectors.to(torch.float64).unbind(-1)
        aa, bb, ab = (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)
        s = (aa * bb - ab * ab).clamp(min=SHARE * aa * bb).sqrt()
        phases = phases_of(positions, s.unsqueeze(-1) * self.frequencies())
        s, aa, bb, ab = (y[:, None, None] for y in (s, aa, bb, ab))
        first, second = (phases.sin() / s).to(x.dtype), ((1 - phases.cos()) / (s * s)).to(x.dtype)
        a, b, aa, bb, ab = (y.to(x.dtype) for y in (a.unsqueeze(-2), b.unsqueeze(-2), aa, bb, ab))
        u, v = (x * a).sum(-1, keepdim=True), (x * b).sum(-1, keepdim=True)
        return x + first * (a * v - b * u) + second * (ab * (a * v + b * u) - bb * a * u - aa * b * v)

    def _many(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        span, small = self.compressed()
        turned = torch.matrix_exp(positions.to(torch.float64)[..., None, :, None, None] * small.unsqueeze(-3))
        inside = x @ span.to(x.dtype)
        moved = (turned.to(x.dtype) @ inside.unsqueeze(-1)).squeeze(-1) - inside
        return x + moved @ span.mT.to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """e^(i delta lambda) of each plane of rotation, and first 1 for the unrotated part."""
        if self.vectors is None:
            return turns(phases_of(offsets, self.frequencies()).transpose(-2, -1))
        small = self.compressed()[1]
        angles = torch.linalg.eigvalsh(1j * small)[..., small.shape[-1] // 2 :]
        return turns(phases_of(offsets, F.pad(angles, (1, 0))).transpose(-2, -1))


def _orthonormal(vectors: Float[Tensor, "H d m"]) -> None:
    for each in vectors:
        nn.init.orthogonal_(each)


class GRAPEAdditive(PositionalEncoding):
    """Additive GRAPE: a penalty linear in the distance, at a rate set by the query and the key (Zhang et al. 2025).

    The bias is -|i - j| omega_h (softplus(v_h . q_i / sqrt d) + softplus(u_h . k_j / sqrt d)), generated by a unipotent
    matrix with two extra dimensions. As in the released code, u and v are divided by their norms, and omega_h is
    ALiBi's slope times the softplus of a parameter, 1 at the start; with ``constant`` the rate is only omega_h: ALiBi
    at the start. Without a causal mask, keys after the query take the same penalty (our choice). The penalty is a
    function of the offset times numbers of the query and of the key, so by our definition its position part is not
    data-dependent; `kernel` is that function, |delta|. FoX is a special case of `GRAPEPath`.

    Arguments
        rate  ``query-key`` (the paper's GRAPE-A-QK), ``query``, ``key``, or ``constant``
    """

    coupling = "logits"
    shared = False
    pair_width = 3
    citation = "Zhang et al. 2025, arXiv 2512.07805, section 4"
    formula = (
        r"b_{ij} = -|i - j|\, \omega_h \left(\mathrm{softplus}(v_h^\top q_i / \sqrt d)"
        r" + \mathrm{softplus}(u_h^\top k_j / \sqrt d)\right)"
    )

    def __init__(self, *, rate: Literal["query-key", "query", "key", "constant"] = "query-key", **sizes: int) -> None:
        super().__init__(**sizes)
        self.rate = choose("rate", rate, ("query-key", "query", "key", "constant"))
        self.slopes = self.register_exact("slopes", geometric_slopes(self.num_heads))
        self.omega = self.learned((self.num_heads,), partial(nn.init.constant_, val=0.541324854612918))  # softplus: 1
        start = normal(self.head_dim**-0.5)
        self.v = self.learned((self.num_heads, self.head_dim), start) if "query" in self.rate else None
        self.u = self.learned((self.num_heads, self.head_dim), start) if "key" in self.rate else None

    def scales(self) -> Float[Tensor, "H"]:
        """omega_h, in float64."""
        return self.slopes * F.softplus(self.omega.to(torch.float64))

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        wide = widened(logits.dtype)
        rates = [_rate(seen.q, self.v).unsqueeze(-1)] if self.v is not None else []
        rates += [_rate(seen.k, self.u).unsqueeze(-2)] if self.u is not None else []
        distances = offsets_between(q_positions, k_positions).abs().to(torch.float64).unsqueeze(-3)
        penalty = (distances * self.scales()[:, None, None]).to(wide)
        return (logits - penalty * sum(rates[1:], rates[0]) if rates else logits - penalty).to(logits.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 1 D"]:
        """The function of the offset that queries and keys weight: the distance."""
        return offsets.abs().to(torch.complex128)[None, None]


def _rate(x: Float[Tensor, "B H N d"], direction: Float[Tensor, "H d"]) -> Float[Tensor, "B H N"]:
    wide = widened(x.dtype)
    unit = F.normalize(direction.to(wide), dim=-1, eps=1e-6)
    return F.softplus((x.to(wide) * unit.unsqueeze(-2)).sum(-1) * x.shape[-1] ** -0.5)


class GRAPEPath(PositionalEncoding):
    """Path-integral additive GRAPE: each token between key and query lowers the logit (Zhang et al. 2025).

    b_ij = alpha_h sum over j < m <= i of log sigmoid(p_i . R_m p'_m / w), with alpha ALiBi's slopes, p a projection of
    the layer's input to w dimensions, p' the same divided by its root mean square, and R_m a rotation of every pair by
    m radians. As in the released code, p_i itself is not divided; in the paper's text both are. With ``edges``
    "token" a token's term is log sigmoid(w_h . x_m + b_h) for every query: the Forgetting Transformer, `FoX`.
    The sum runs over the keys that the query sees, in their order. Without a causal mask, keys after the query get no
    penalty (our choice).

    Arguments
        edges  ``endpoint`` (each term depends on the query) or ``token`` (FoX)
        width  w; even; 8 in the released configurations
    """

    coupling = "bias"
    data_dependent = True
    toeplitz = False
    shared = False
    pair_width = 3
    citation = "Zhang et al. 2025, arXiv 2512.07805, section 5 and appendix C"
    formula = r"b_{ij} = \alpha_h \sum_{m=j+1}^{i} \log \sigma\left(p_i^\top R_m p_m / w\right)"

    def __init__(self, *, edges: Literal["endpoint", "token"] = "endpoint", width: int = 8, **sizes: int) -> None:
        super().__init__(**sizes)
        require_even("width", width)
        self.edges, self.width = choose("edges", edges, ("endpoint", "token")), width
        rows = self.num_heads * width if self.edges == "endpoint" else self.num_heads
        self.probe = nn.Linear(self.d_model, rows, bias=self.edges == "token")
        self.slopes = self.register_exact("slopes", geometric_slopes(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.probe.weight, std=0.02)
        if self.edges == "token":
            nn.init.zeros_(self.probe.bias)

    def note(self, x: Stream, before: Earlier | None = None) -> Notes:
        return linear(self.probe, x.to(widened(x.dtype))).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def bias(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> Pairs:
        assert seen.notes is not None
        past = torch.arange(seen.notes.shape[2], device=seen.rows.device) <= seen.rows.unsqueeze(-1)
        past = past if past.ndim == 2 else past.unsqueeze(1)
        if seen.is_masked and (visible := seen.visible()) is not None:
            past = past & visible
        if self.edges == "token":
            shares = F.logsigmoid(seen.notes[..., 0]).unsqueeze(-2)
        else:
            probes = F.rms_norm(seen.notes, (self.width,))
            phases = phases_of(k_positions, torch.ones(1, self.width // 2, dtype=torch.float64, device=probes.device))
            turned = turn(probes, phases.cos().to(probes.dtype), phases.sin().to(probes.dtype), "half")
            shares = self.slopes[:, None, None] * F.logsigmoid(seen.own_notes() @ turned.mT / self.width)
        shares = torch.where(past, shares.double(), 0.0)
        return (shares.sum(-1, keepdim=True) - shares.cumsum(-1)).to(widened(seen.q.dtype))


ENCODINGS: dict[str, type[PositionalEncoding]] = {
    "grape": GRAPE,
    "grape-additive": GRAPEAdditive,
    "grape-path": GRAPEPath,
}
