"""Remapped positions: offsets clipped, grouped or within chunks; segments and positions within segments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings.absolute import Sinusoidal
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.bias import ALiBi
from toeplens.encodings.kit import (
    normal,
    offsets_between,
    phases_of,
    require_even,
    require_number,
    require_whole,
    rotary_frequencies,
    turns,
    widened,
)
from toeplens.encodings.rotary import Pairing, RoPE, pairing_of, turn
from toeplens.encodings.shapes import Keys, Pairs, Positions, Queries, Stream, Turned
from toeplens.ground import InputError, choose

Places = Float[Tensor, "... _"]  # unnamed: queries and keys may differ
Way = tuple[Places, Places, Tensor]


class Remapped(PositionalEncoding):
    """RoPE with remapped positions: several ways to assign positions to queries and keys, one of them for each pair.

    Subclasses define `ways`. Each way is a rotation of all queries and keys and a product. Each pair then takes the
    entry of its way, since its offset is no longer a difference of two positions. Keys are cached unrotated and rotated
    when they are compared. Angles are computed in float64, as in `Rotary`.

    Arguments
        base     theta_t = base^(-2t/d)
        pairing  as in RoPE
    """

    coupling = "accumulated"
    pair_width = 4

    def __init__(self, *, base: float = 10000.0, pairing: Pairing = "interleaved", **sizes: int) -> None:
        super().__init__(**sizes)
        require_even("head_dim", self.head_dim)
        self.pairing: Pairing = pairing_of(pairing)
        self.frequencies = self.register_exact("frequencies", rotary_frequencies(self.head_dim, base).unsqueeze(0))

    def ways(self, q_positions: Positions, k_positions: Positions) -> Iterator[Way]:
        """Yield positions of queries, positions of keys, and the pairs that use them: [Nq, Nk] or [B, Nq, Nk].

        Each pair has one way; pairs that no later way takes use the first.
        """
        raise NotImplementedError

    def offsets(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*B Nq Nk"]:
        """The offset that each pair uses instead of i - j."""
        ways = self.ways(q_positions, k_positions)
        q_places, k_places, _ = next(ways)
        offsets = q_places.unsqueeze(-1) - k_places.unsqueeze(-2)
        for q_places, k_places, taken in ways:
            offsets = torch.where(taken, q_places.unsqueeze(-1) - k_places.unsqueeze(-2), offsets)
        return offsets

    def score(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Pairs:
        ways = self.ways(q_positions, k_positions)
        product = self._product(q, k, next(ways))
        for way in ways:
            product = torch.where(way[2].unsqueeze(-3), self._product(q, k, way), product)
        return product

    def _product(self, q: Queries, k: Keys, way: Way) -> Pairs:
        return self._turned(q, way[0]) @ self._turned(k, way[1]).transpose(-2, -1)

    def _turned(self, x: Float[Tensor, "B H N d"], places: Places) -> Float[Tensor, "B H N d"]:
        phases, wide = self._phases(places), widened(x.dtype)
        return turn(x, phases.cos().to(wide), phases.sin().to(wide), self.pairing)

    def _phases(self, places: Places) -> Float[Tensor, "... n"]:
        return phases_of(places, self.frequencies)

    def _kernel_at(self, offsets: Float[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        return turns(self._phases(offsets).transpose(-2, -1))


class ReRoPE(Remapped):
    """Rectified RoPE: offsets beyond a window w are clipped to w (Su 2023).

    With a ``leak`` of 1/k, larger offsets continue in steps of 1/k (the published Leaky ReRoPE): r(delta) = w +
    (delta - w)/k. Keys after the query are clipped to -w. The released code, which is for causal attention, gives those
    beyond -w the offset +w. Its factor of queries by log position is left out; use a `Tempered` encoding for it.

    Arguments
        window  w, in positions (default: ``max_len``/8, as the released code's 512 of 4096)
        leak    1/k, at least 0 (ReRoPE, k infinite), at most 1 (RoPE); 1/16 in the released leaky version
        base, pairing  as in RoPE
    """

    citation = "Su 2023, Rectified rotary position embeddings (kexue.fm/archives/9708)"
    formula = (
        r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i} r(\delta) \theta_t},"
        r" \quad r(\delta) = \min(\delta, w + (\delta - w)/k)"
    )

    def __init__(
        self,
        *,
        window: float | None = None,
        leak: float = 0.0,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        self.window = max(1.0, self.max_len / 8) if window is None else window
        require_number("window", self.window, over=0)
        self.leak = require_number("leak", leak, at_least=0, at_most=1)

    def ways(self, q_positions: Positions, k_positions: Positions) -> Iterator[Way]:
        q_places, k_places = q_positions.double(), k_positions.double()
        offsets = offsets_between(q_positions, k_positions)
        yield q_places, k_places, offsets.abs() <= self.window
        rest = self.window * (1 - self.leak)
        yield q_places * self.leak + rest, k_places * self.leak, offsets > self.window
        yield q_places * self.leak - rest, k_places * self.leak, offsets < -self.window

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i r(delta) theta_t)."""
        near = offsets.double().clamp(-self.window, self.window)
        return self._kernel_at(near + self.leak * (offsets - near))


class SelfExtend(Remapped):
    """Self-Extend: exact offsets below a window w, and offsets between groups of G positions beyond (Jin et al. 2024).

    A pair at a distance of w or more has the offset floor(i/G) - floor(j/G) + w - floor(w/G), so the largest offset
    grows with the length over G. Group boundaries depend on the positions, so it is not a function of i - j. Keys after
    the query mirror those before it (our choice). One implementation in the released code shifts by w - w/G, unrounded,
    and another as the paper does; the two agree if G divides w.

    Arguments
        window  w, in positions (default: ``max_len``/4, as the released code's 1024 for models of 4096)
        group   G, an integer; 8 in the released code. With 1 it is RoPE
        base, pairing  as in RoPE
    """

    citation = "Jin et al. 2024, arXiv 2401.01325"
    formula = (
        r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i} r_{ij} \theta_t},\quad r_{ij} = \delta"
        r" \text{ for } \delta < w, \text{ else } \lfloor i/G \rfloor - \lfloor j/G \rfloor + w - \lfloor w/G \rfloor"
    )
    toeplitz = False

    def __init__(
        self,
        *,
        window: int | None = None,
        group: int = 8,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        self.window = max(1, self.max_len // 4) if window is None else window
        require_number("window", self.window, at_least=1)
        require_number("group", group, at_least=1)
        self.group = group
        self.toeplitz = group == 1

    def ways(self, q_positions: Positions, k_positions: Positions) -> Iterator[Way]:
        offsets, shift = offsets_between(q_positions, k_positions), self.window - self.window // self.group
        yield q_positions.double(), k_positions.double(), offsets.abs() < self.window
        if self.group == 1:
            return
        q_groups, k_groups = (_floor(x, self.group).double() for x in (q_positions, k_positions))
        yield q_groups + shift, k_groups, offsets >= self.window
        yield q_groups - shift, k_groups, offsets <= -self.window

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"] | None:
        """RoPE's kernel for groups of one position; otherwise None."""
        return self._kernel_at(offsets.double()) if self.group == 1 else None


class DualChunk(Remapped):
    """Dual Chunk Attention: keys get positions within chunks of s, queries one of three positions (An et al. 2024).

    A key is at j mod s. A query is at i mod s for keys of its own chunk; at min(s + i mod s, m) for those of the
    previous chunk, so that offsets below the window are exact; and at m for all earlier ones. m is the largest
    position seen in training. Chunks begin at multiples of s, so it is not a function of i - j. Keys of later chunks,
    which the paper never scores, are treated like those of the query's own (our choice). Chunks depend on position
    numbers: for a sequence at an offset, or packed sequences with continuing positions, they do not start with the
    sequence.

    Not verified: the default sizes, and m = s + w - 1, which are from memory of the paper. The released code has
    m = s + w, and for models of length c uses s + w = 3c/4 and w = c/16.

    Arguments
        chunk    s, positions per chunk (default: 3/4 of ``max_len``)
        window   w, positions that a query may be beyond a chunk (default: 1/4 of ``max_len``)
        largest  m: ``paper``, s + w - 1, or ``released``, s + w
        base, pairing  as in RoPE
    """

    citation = "An et al. 2024, arXiv 2402.17463"
    formula = (
        r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i} (p_{ij} - j \bmod s) \theta_t},\quad"
        r" p_{ij} \in \{i \bmod s,\ \min(s + i \bmod s, m),\ m\}"
    )
    toeplitz = False

    def __init__(
        self,
        *,
        chunk: int | None = None,
        window: int | None = None,
        largest: Literal["paper", "released"] = "paper",
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(base=base, pairing=pairing, **sizes)
        self.chunk = max(1, self.max_len * 3 // 4) if chunk is None else chunk
        self.window = max(1, self.max_len // 4) if window is None else window
        require_number("chunk", self.chunk, at_least=1)
        require_number("window", self.window, at_least=1)
        self.largest = choose("largest", largest, ("paper", "released"))

    def ways(self, q_positions: Positions, k_positions: Positions) -> Iterator[Way]:
        q_chunks, k_chunks = (_floor(x, self.chunk) for x in (q_positions, k_positions))
        q_places = (q_positions - q_chunks * self.chunk).double()
        k_places = (k_positions - k_chunks * self.chunk).double()
        last = self.chunk + self.window - (self.largest == "paper")
        back = offsets_between(q_chunks, k_chunks)
        yield q_places, k_places, back <= 0
        yield (q_places + self.chunk).clamp(max=last), k_places, back == 1
        yield torch.full_like(q_places, last), k_places, back > 1


def _floor(positions: Positions, size: int) -> Positions:
    return torch.div(positions, size, rounding_mode="floor")


def segment_positions(
    tokens: Int[Tensor, "*B N"], separators: Sequence[int], *, first: Int[Tensor, "*B 2"] | None = None
) -> Int[Tensor, "*B N 2"]:
    """Segment and position within the segment of each token, from 0; a separator ends its segment.

    Arguments
        separators  token ids that end a segment, such as those of full stops and line breaks
        first       the position of the first token, from `following_position` (default: (0, 0))
    """
    ends = _ends(tokens, separators)
    begins = F.pad(ends, (1, 0))[..., :-1]
    numbers = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
    segments = begins.cumsum(-1)
    places = numbers - torch.where(begins, numbers, 0).cummax(-1).values
    if first is not None:
        places = places + torch.where(segments == 0, first[..., 1:], 0)
        segments = segments + first[..., :1]
    return torch.stack((segments, places), dim=-1)


def following_position(
    position: Int[Tensor, "*B 2"], token: Int[Tensor, "*B"], separators: Sequence[int]
) -> Int[Tensor, "*B 2"]:
    """The position of the token after ``token`` at ``position``, for decoding token by token."""
    segment, place = position.unbind(-1)
    ends = _ends(token, separators)
    return torch.stack((segment + ends, torch.where(ends, 0, place + 1)), dim=-1)


def _ends(tokens: Int[Tensor, "*B"], separators: Sequence[int]) -> Bool[Tensor, "*B"]:
    if len(separators) < 1:
        raise InputError("separators must have at least one token, got none.")
    return torch.isin(tokens, torch.tensor(list(separators), device=tokens.device))


class BiPE(PositionalEncoding):
    """Bilevel positional encoding: a vector for the position in a segment, RoPE or ALiBi for segments (He et al. 2024).

    A position is (segment, place), [N, 2] or [B, N, 2]. `segment_positions` computes them from tokens, and
    `following_position` the next one in decoding. The vector of the place is added to the token embeddings. RoPE or
    ALiBi uses only segment numbers, so tokens of one segment are distinguished only by their vectors. Token indices
    [N] mean segments of equal length, for sequences without separators (our choice).

    Arguments
        across        ``rope`` or ``alibi``, for the segments
        inside        ``learned``, as in the released code; or ``sinusoidal``
        places_max    rows of the learned table; later places share the last, as in the released code, which has 1024
                      (default: ``max_len``)
        segment       tokens per segment, if positions are token indices (default: the square root of ``max_len``)
        slope_factor  factor of ALiBi's slopes, as there are fewer segments than tokens; default as in the released code
        init_std      standard deviation of the initial table
        base, pairing  as in RoPE
    """

    coupling = "input"
    toeplitz = False
    citation = "He et al. 2024, arXiv 2401.16421"
    formula = (
        r"x_i + p_{\mathrm{place}(i)},\quad q_i^\top R_{\delta_s} k_j \text{ or } q_i^\top k_j - m_h |\delta_s|,"
        r" \quad \delta_s = \mathrm{segment}(i) - \mathrm{segment}(j)"
    )

    def __init__(
        self,
        *,
        across: Literal["rope", "alibi"] = "rope",
        inside: Literal["learned", "sinusoidal"] = "learned",
        places_max: int | None = None,
        segment: int | None = None,
        slope_factor: float = 96.0,
        init_std: float = 0.02,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.axes = 2
        self.segment = math.isqrt(self.max_len) if segment is None else segment
        self.places_max = self.max_len if places_max is None else places_max
        require_number("segment", self.segment, at_least=1)
        require_number("places_max", self.places_max, at_least=1)
        self.slope_factor = require_number("slope_factor", slope_factor, over=0)
        require_number("init_std", init_std, at_least=0)
        rope = choose("across", across, ("rope", "alibi")) == "rope"
        self.across = RoPE(base=base, pairing=pairing, **sizes) if rope else ALiBi(slopes="geometric", **sizes)
        self.also_couples = ("rotation",) if rope else ("bias",)
        self.factorable = not rope
        learned = choose("inside", inside, ("learned", "sinusoidal")) == "learned"
        self.inside = None if learned else Sinusoidal(base=base, layout="interleaved", **sizes)
        self.weight = self.learned((self.places_max, self.d_model), normal(init_std)) if learned else None

    def place(self, tokens: Int[Tensor, "*B N"]) -> Int[Tensor, "*B N axes"]:
        return torch.stack((tokens // self.segment, tokens % self.segment), dim=-1)

    def levels(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Segments and places within them, also for token indices [N]."""
        segments, places = (self.place(positions) if positions.ndim == 1 else positions).unbind(-1)
        return segments, places

    def overrides(self, name: str) -> bool:
        rope = isinstance(self.across, RoPE)
        return super().overrides(name) and (name != "rotate" or rope) and (name != "bias" or not rope)

    def embed(self, x: Stream, positions: Positions) -> Stream:
        places = self.levels(positions)[1]
        if self.weight is None:
            assert self.inside is not None
            return self.inside.embed(x, places)
        require_whole("BiPE", places)
        return x + F.embedding(places.clamp(0, self.places_max - 1), self.weight).to(x.dtype)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        if not isinstance(self.across, RoPE):
            return q, k
        q_segments = self.levels(q_positions)[0]
        k_segments = q_segments if k_positions is q_positions else self.levels(k_positions)[0]
        return self.across.rotate(q, k, q_segments, k_segments)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"] | None:
        if isinstance(self.across, RoPE):
            return None
        return self.across.bias(self.levels(q_positions)[0], self.levels(k_positions)[0]) * self.slope_factor

    def bias_product(
        self, q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "H Nq 1"], Float[Tensor, "*B H Nk 1"]]:
        a, b = self.across.bias_product(self.levels(q_positions)[0], self.levels(k_positions)[0])
        return a * self.slope_factor, b

    def factors_at(self, q_positions: Positions, k_positions: Positions) -> bool:
        return self.factorable and self.across.factors_at(self.levels(q_positions)[0], self.levels(k_positions)[0])


ENCODINGS: dict[str, type[PositionalEncoding]] = {
    "rerope": ReRoPE,
    "self-extend": SelfExtend,
    "dual-chunk": DualChunk,
    "bipe": BiPE,
}
