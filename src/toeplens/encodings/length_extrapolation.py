"""Encodings for length extrapolation: rotary variants and position-dependent temperatures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.additive import ALiBi, Sinusoidal
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.rotary import Pairing, RoPE, join_pairs, rotate_by, split_pairs
from toeplens.encodings.shapes import Keys, PairMatrix, Positions, Queries, RotatedQK, Stream
from toeplens.utils import InputError, invalid
from toeplens.utils.options import FiniteFloat, NonNegative, Positive, PositiveInt, Range, Share


class ResonanceRoPE(RoPE, name="resonance-rope"):
    """Resonance RoPE: every wavelength is rounded to a whole number of positions (Wang et al. 2024).

    theta_t = 2 pi / round(2 pi / RoPE's). A pair with a full period within the training length then repeats the same
    angles at longer lengths. The paper also rounds the wavelengths of YaRN, and the released code those of
    position interpolation: ``factor`` does the latter. The shortest wavelength is 6.

    Arguments
        factor         divides RoPE's frequencies before rounding
    """

    citation = "Wang et al. 2024, arXiv 2403.00071"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{2 \pi \mathrm{i} \delta / \lambda_t},"
        r" \quad \lambda_t = \mathrm{round}(2 \pi b^{2t/d})"
    )

    def __init__(self, *, factor: Annotated[float, Range(at_least=1)] = 1.0, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.wavelengths = self.register_exact("wavelengths", (2 * math.pi * factor / self.frequencies).round())
        self.frequencies.copy_(2 * math.pi / self.wavelengths)


class HoPE(RoPE, name="hope"):
    """High-frequency rotary position encoding: keep only pairs with a full period in training (Chen et al. 2024).

    Pairs whose period 2 pi / theta_t is longer than the training length are not rotated, so their content counts at any
    distance. It is p-RoPE with a share set by the training length.

    Not to be confused with the HoPE of arXiv 2509.05218 (hyperbolic) and of arXiv 2505.20444 (images and text).

    Not verified: the rule, which is taken from works that use it, because neither the paper's text nor the authors'
    code was available. The paper may set the limit differently near that length.

    Arguments
        train_length   default ``max_len``
    """

    citation = "Chen et al. 2024, arXiv 2410.21216"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \vartheta_t},"
        r" \quad \vartheta_t = b^{-2t/d} \text{ if } 2 \pi b^{2t/d} \le L, \text{ else } 0"
    )

    def __init__(self, *, train_length: int | None = None, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.frequencies[2 * math.pi / self.frequencies > kit.require_train_length(train_length, self.max_len)] = 0


class RoPEPlusPlus(RoPE, name="rope-plus-plus"):
    """RoPE++: pairs of heads, one with RoPE's real part as its logit, one with the imaginary part (Liu et al. 2025).

    The queries of head 2h + 1 are rotated back by a quarter turn, so its logit is Im sum_t q_t conj(k_t)
    e^(i delta theta_t), which for a query and key of the same content is a sum of sines of the distance. In the
    released code the two heads share a query, a key and a value, either with the same number of heads (half of the
    projections and of the cache) or with the same cache (twice the heads). Here the number of heads is the model's, the
    second head of a pair uses the queries and keys of the first, and values stay separate. With an odd number of heads,
    the last is real (our choice).

    Arguments
        heads          ``shared``: a pair uses the first head's queries and keys, as published; ``own``: each its own
        pairing        as in RoPE; the released code uses halves
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
        self.heads = heads
        if self.num_heads < 2:
            raise invalid("num_heads", "be at least 2, a real and an imaginary head", self.num_heads)
        self.imaginary = self.register_exact("imaginary", torch.arange(self.num_heads) % 2 == 1)
        self.source = self.register_exact("source", torch.arange(self.num_heads) // 2 * 2)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        if self.heads == "shared":
            q, k = q.index_select(1, self.source), k.index_select(1, self.source)
        a, b = split_pairs(q, self.pairing)
        q = torch.where(self.imaginary[:, None, None], join_pairs(b, -a, self.pairing), q)
        return super().rotate(q, k, q_positions, k_positions)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """e^(i delta theta_t) for real heads, -i e^(i delta theta_t) for imaginary ones."""
        kernel = super().kernel(offsets)
        return torch.where(self.imaginary[:, None, None], -1j * kernel, kernel)


class QueryTemperature(PositionalEncoding):
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

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        factor = self.factor(q_positions).to(kit.wide_dtype(q.dtype)).unsqueeze(-1)
        return (q.to(factor.dtype) * factor).to(q.dtype), k


class ScalableSoftmax(QueryTemperature, name="scalable-softmax"):
    """SSMax: logits times s log n, with n the number of competing keys and s learned per head (Nakanishi 2025).

    Here n is the query's position + 1: in a causal sequence from position 0 on, the number of keys that the query sees,
    also with a cache, packing or padding. A sequence at an offset is treated as if all earlier keys were visible. With
    a sliding window, or without a causal mask, n is not the number of visible keys. Negative positions count as 0. The
    query at position 0 is multiplied by log 1 = 0.

    Not verified: the initial s, 0.168, from memory of the paper: 1 over the mean of log n for n = 1 .. 1024, so that
    logits in sequences of that length start at their usual size.

    Arguments
        start   initial value of s
        bias    with a learned b per head that starts at 0, for (s log n + b): a variant of the paper's
        shared  one set of parameters for all layers; otherwise one per layer, as published
    """

    citation = "Nakanishi 2025, arXiv 2501.19399"
    formula = r"(s_h \log n_i)\, q_i^\top k_j / \sqrt d,\quad n_i = i + 1"

    def __init__(self, *, start: FiniteFloat = 0.168, bias: bool = False, shared: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self.shared = shared
        self.slope = self.new_parameter((self.num_heads,), partial(nn.init.constant_, val=start))
        self.level = self.new_parameter((self.num_heads,), nn.init.zeros_) if bias else None

    def factor(self, positions: Positions) -> Float[Tensor, "*B H N"]:
        logs = (positions.to(torch.float64).clamp(min=0) + 1).log().unsqueeze(-2)
        factor = logs * self.slope.to(torch.float64).unsqueeze(-1)
        return factor if self.level is None else factor + self.level.to(torch.float64).unsqueeze(-1)


class Llama4Temperature(QueryTemperature, name="llama4-temperature"):
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

    def __init__(self, *, floor_scale: Positive | None = None, attn_scale: FiniteFloat = 0.1, **sizes: int) -> None:
        super().__init__(**sizes)
        self.floor_scale = max(1.0, self.max_len / 16) if floor_scale is None else floor_scale
        self.attn_scale = attn_scale

    def factor(self, positions: Positions) -> Float[Tensor, "*B H N"]:
        count = positions.to(torch.float64).clamp(min=0) + 1
        steps = torch.div(count, self.floor_scale, rounding_mode="floor")
        return (1 + self.attn_scale * steps.log1p()).unsqueeze(-2)


RealPositions = Float[Tensor, "... _"]  # unnamed: queries and keys may differ
Remap = tuple[RealPositions, RealPositions, Tensor]


class RemappedRoPE(PositionalEncoding):
    """RoPE with remapped positions: several ways to assign positions to queries and keys, one of them for each pair.

    Subclasses define `remaps`. Each is a rotation of all queries and keys and a product; each pair takes the entry of
    its remap. Angles are computed in float64, as in `Rotary`.

    ``base`` and ``pairing`` as in `RoPE`.
    """

    coupling = "accumulated"
    pair_width = 4

    def __init__(self, *, base: float = 10000.0, pairing: Pairing = "interleaved", **sizes: int) -> None:
        super().__init__(**sizes)
        kit.require_even("head_dim", self.head_dim)
        self.pairing: Pairing = pairing
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(self.head_dim, base).unsqueeze(0))

    def remaps(self, q_positions: Positions, k_positions: Positions) -> Iterator[Remap]:
        """Yield positions of queries, positions of keys, and the pairs that use them: [Nq, Nk] or [B, Nq, Nk].

        Each pair has one way; pairs that no later way takes use the first.
        """
        raise NotImplementedError

    def offsets(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*B Nq Nk"]:
        """The offset that each pair uses instead of i - j."""
        (new_q, new_k, _), *others = self.remaps(q_positions, k_positions)
        offsets = kit.offsets_between(new_q, new_k)
        for new_q, new_k, mask in others:
            offsets = torch.where(mask, kit.offsets_between(new_q, new_k), offsets)
        return offsets

    def score(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> PairMatrix:
        remaps = self.remaps(q_positions, k_positions)
        product = self._product(q, k, next(remaps))
        for remap in remaps:
            product = torch.where(remap[2].unsqueeze(-3), self._product(q, k, remap), product)
        return product

    def _product(self, q: Queries, k: Keys, remap: Remap) -> PairMatrix:
        phases = (kit.phases_of(new_positions, self.frequencies) for new_positions in remap[:2])
        q, k = (rotate_by(x, angles, self.pairing) for x, angles in zip((q, k), phases, strict=True))
        return q @ k.transpose(-2, -1)

    def _kernel_at(self, offsets: Float[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        return kit.complex_exp(kit.phases_of(offsets, self.frequencies).transpose(-2, -1))


class ReRoPE(RemappedRoPE, name="rerope"):
    """Rectified RoPE: offsets beyond a window w are clipped to w (Su 2023).

    With a ``leak`` of 1/k, larger offsets continue in steps of 1/k (the published Leaky ReRoPE): r(delta) = w +
    (delta - w)/k. Keys after the query are clipped to -w. The released code, which is for causal attention, gives those
    beyond -w the offset +w. Its factor of queries by log position is left out; use a `QueryTemperature` for it.

    Arguments
        window  w, in positions (default: ``max_len``/8, as the released code's 512 of 4096)
        leak    1/k, at least 0 (ReRoPE, k infinite), at most 1 (RoPE); 1/16 in the released leaky version
    """

    citation = "Su 2023, Rectified rotary position embeddings (kexue.fm/archives/9708)"
    formula = (
        r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i} r(\delta) \theta_t},"
        r" \quad r(\delta) = \min(\delta, w + (\delta - w)/k)"
    )

    def __init__(self, *, window: Positive | None = None, leak: Share = 0.0, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.window = max(1.0, self.max_len / 8) if window is None else window
        self.leak = leak

    def remaps(self, q_positions: Positions, k_positions: Positions) -> Iterator[Remap]:
        q_float, k_float = q_positions.double(), k_positions.double()
        offsets = kit.offsets_between(q_positions, k_positions)
        yield q_float, k_float, offsets.abs() <= self.window
        shift = self.window * (1 - self.leak)
        yield q_float * self.leak + shift, k_float * self.leak, offsets > self.window
        yield q_float * self.leak - shift, k_float * self.leak, offsets < -self.window

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i r(delta) theta_t)."""
        near = offsets.double().clamp(-self.window, self.window)
        return self._kernel_at(near + self.leak * (offsets - near))


class SelfExtend(RemappedRoPE, name="self-extend"):
    """Self-Extend: exact offsets below a window w, and offsets between groups of G positions beyond (Jin et al. 2024).

    A pair at a distance of w or more has the offset floor(i/G) - floor(j/G) + w - floor(w/G), so the largest offset
    grows with the length over G. Group boundaries depend on the positions, so it is not a function of i - j. Keys after
    the query mirror those before it (our choice). One implementation in the released code shifts by w - w/G, unrounded,
    and another as the paper does; the two agree if G divides w.

    Arguments
        window  w, in positions (default: ``max_len``/4, as the released code's 1024 for models of 4096)
        group   G, an integer; 8 in the released code. With 1 it is RoPE
    """

    citation = "Jin et al. 2024, arXiv 2401.01325"
    formula = (
        r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i} r_{ij} \theta_t},\quad r_{ij} = \delta"
        r" \text{ for } \delta < w, \text{ else } \lfloor i/G \rfloor - \lfloor j/G \rfloor + w - \lfloor w/G \rfloor"
    )
    toeplitz = False

    def __init__(self, *, window: PositiveInt | None = None, group: PositiveInt = 8, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.window = max(1, self.max_len // 4) if window is None else window
        self.group = group
        self.toeplitz = group == 1

    def remaps(self, q_positions: Positions, k_positions: Positions) -> Iterator[Remap]:
        offsets, shift = kit.offsets_between(q_positions, k_positions), self.window - self.window // self.group
        yield q_positions.double(), k_positions.double(), offsets.abs() < self.window
        if self.group == 1:
            return
        q_groups, k_groups = (_floor(x, self.group).double() for x in (q_positions, k_positions))
        yield q_groups + shift, k_groups, offsets >= self.window
        yield q_groups - shift, k_groups, offsets <= -self.window

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"] | None:
        """RoPE's kernel for groups of one position; otherwise None."""
        return self._kernel_at(offsets.double()) if self.group == 1 else None


class DualChunk(RemappedRoPE, name="dual-chunk"):
    """Dual Chunk Attention: keys get positions within chunks of s, queries one of three positions (An et al. 2024).

    A key is at j mod s. A query is at i mod s for keys of its own chunk; at min(s + i mod s, m) for those of the
    previous chunk, so that offsets below the window are exact; and at m for all earlier ones. m is the largest position
    seen in training. Chunks begin at multiples of s, so it is not a function of i - j, and they need not start with the
    sequence. Keys of later chunks are treated like those of the query's own (our choice).

    Not verified: the default sizes, and m = s + w - 1, which are from memory of the paper. The released code has
    m = s + w, and for models of length c uses s + w = 3c/4 and w = c/16.

    Arguments
        chunk    s, positions per chunk (default: 3/4 of ``max_len``)
        window   w, positions that a query may be beyond a chunk (default: 1/4 of ``max_len``)
        largest  m: ``paper``, s + w - 1, or ``released``, s + w
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
        chunk: PositiveInt | None = None,
        window: PositiveInt | None = None,
        largest: Literal["paper", "released"] = "paper",
        **inherited: Any,
    ) -> None:
        super().__init__(**inherited)
        self.chunk = max(1, self.max_len * 3 // 4) if chunk is None else chunk
        self.window = max(1, self.max_len // 4) if window is None else window
        self.largest = largest

    def remaps(self, q_positions: Positions, k_positions: Positions) -> Iterator[Remap]:
        q_chunks, k_chunks = (_floor(x, self.chunk) for x in (q_positions, k_positions))
        q_within = (q_positions - q_chunks * self.chunk).double()
        k_within = (k_positions - k_chunks * self.chunk).double()
        last = self.chunk + self.window - (self.largest == "paper")
        chunk_offsets = kit.offsets_between(q_chunks, k_chunks)
        yield q_within, k_within, chunk_offsets <= 0
        yield (q_within + self.chunk).clamp(max=last), k_within, chunk_offsets == 1
        yield torch.full_like(q_within, last), k_within, chunk_offsets > 1


def _floor(positions: Positions, size: int) -> Positions:
    return torch.div(positions, size, rounding_mode="floor")


def segment_positions(
    tokens: Int[Tensor, "*B N"], separators: Sequence[int], *, first: Int[Tensor, "*B 2"] | None = None
) -> Int[Tensor, "*B N 2"]:
    """Segment and position within the segment of each token, from 0; a separator ends its segment.

    Arguments
        separators  token ids that end a segment, such as those of full stops and line breaks
        first       the position of the first token, from `next_position` (default: (0, 0))
    """
    ends = _ends_segment(tokens, separators)
    is_start = F.pad(ends, (1, 0))[..., :-1]
    indices = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
    segments = is_start.cumsum(-1)
    places = indices - torch.where(is_start, indices, 0).cummax(-1).values
    if first is not None:
        places = places + torch.where(segments == 0, first[..., 1:], 0)
        segments = segments + first[..., :1]
    return torch.stack((segments, places), dim=-1)


def next_position(
    position: Int[Tensor, "*B 2"], token: Int[Tensor, "*B"], separators: Sequence[int]
) -> Int[Tensor, "*B 2"]:
    """The position of the token after ``token`` at ``position``, for decoding token by token."""
    segment, place = position.unbind(-1)
    ends = _ends_segment(token, separators)
    return torch.stack((segment + ends, torch.where(ends, 0, place + 1)), dim=-1)


def _ends_segment(tokens: Int[Tensor, "*B"], separators: Sequence[int]) -> Bool[Tensor, "*B"]:
    if len(separators) < 1:
        raise InputError("separators must have at least one token, got none.")
    return torch.isin(tokens, torch.tensor(list(separators), device=tokens.device))


class BiPE(PositionalEncoding, name="bipe"):
    """Bilevel positional encoding: a vector for the position in a segment, RoPE or ALiBi for segments (He et al. 2024).

    A position is (segment, place), [N, 2] or [B, N, 2]; `segment_positions` and `next_position` compute them. The
    vector of the place is added to the token embeddings; RoPE or ALiBi uses only segment numbers. Token indices [N]
    mean segments of equal length, for sequences without separators (our choice).

    Arguments
        across        ``rope`` or ``alibi``, for the segments
        inside        ``learned``, as in the released code; or ``sinusoidal``
        places_max    rows of the learned table; later places share the last, as in the released code, which has 1024
                      (default: ``max_len``)
        segment       tokens per segment, if positions are token indices (default: the square root of ``max_len``)
        slope_factor  factor of ALiBi's slopes, as there are fewer segments than tokens; default as in the released code
        init_std      standard deviation of the initial table
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
        places_max: PositiveInt | None = None,
        segment: PositiveInt | None = None,
        slope_factor: Positive = 96.0,
        init_std: NonNegative = 0.02,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        self.axes = 2
        self.segment = math.isqrt(self.max_len) if segment is None else segment
        self.places_max = self.max_len if places_max is None else places_max
        self.slope_factor = slope_factor
        rope = across == "rope"
        self.across = RoPE(base=base, pairing=pairing, **sizes) if rope else ALiBi(slopes="geometric", **sizes)
        self.also_couples, self.unused_hooks = (("rotation",), {"bias"}) if rope else (("bias",), {"rotate"})
        self.factorable = not rope
        learned = inside == "learned"
        self.inside = None if learned else Sinusoidal(base=base, layout="interleaved", **sizes)
        shape, init = (self.places_max, self.d_model), kit.normal_init(init_std)
        self.weight = self.new_parameter(shape, init) if learned else None

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Int[Tensor, "*B N axes"]:
        return torch.stack((tokens // self.segment, tokens % self.segment), dim=-1)

    def segments_and_places(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Segments and places within them, also for token indices [N]."""
        segments, places = (self.to_positions(positions) if positions.ndim == 1 else positions).unbind(-1)
        return segments, places

    def embed(self, x: Stream, positions: Positions) -> Stream:
        places = self.segments_and_places(positions)[1]
        if self.weight is None:
            assert self.inside is not None
            return self.inside.embed(x, places)
        kit.require_integers("BiPE", places)
        return x + F.embedding(places.clamp(0, self.places_max - 1), self.weight).to(x.dtype)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        return self.across.rotate(q, k, *self._segments(q_positions, k_positions))

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"] | None:
        bias = self.across.bias(*self._segments(q_positions, k_positions))
        return None if bias is None else bias * self.slope_factor

    def bias_product(
        self, q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "H Nq 1"], Float[Tensor, "*B H Nk 1"]]:
        a, b = self.across.bias_product(*self._segments(q_positions, k_positions))
        return a * self.slope_factor, b

    def has_low_rank_bias(self, q_positions: Positions, k_positions: Positions) -> bool:
        return self.factorable and self.across.has_low_rank_bias(*self._segments(q_positions, k_positions))

    def _segments(self, q_positions: Positions, k_positions: Positions) -> tuple[Tensor, Tensor]:
        q_segments = self.segments_and_places(q_positions)[0]
        return q_segments, q_segments if k_positions is q_positions else self.segments_and_places(k_positions)[0]
