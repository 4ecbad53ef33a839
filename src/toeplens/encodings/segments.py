"""Positions on two levels: which segment of a text a token is in, and where in the segment it stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings.absolute import Sinusoidal
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.bias import ALiBi
from toeplens.encodings.kit import normal, require_number, require_whole
from toeplens.encodings.rotary import Pairing, RoPE
from toeplens.encodings.shapes import Keys, Positions, Queries, Stream, Turned
from toeplens.ground import InputError, choose


def segment_positions(
    tokens: Int[Tensor, "*B N"], separators: Sequence[int], *, first: Int[Tensor, "*B 2"] | None = None
) -> Int[Tensor, "*B N 2"]:
    """Segment and place of each token, both from 0; a separator is the last token of its segment.

    Arguments
        separators  token ids that end a segment, as those of full stops and line breaks
        first       the position of the first of these tokens, as `following_position` gives it; default (0, 0)
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
    """The position of the token after ``token``, which stands at ``position``: for decoding one by one."""
    segment, place = position.unbind(-1)
    ends = _ends(token, separators)
    return torch.stack((segment + ends, torch.where(ends, 0, place + 1)), dim=-1)


def _ends(tokens: Int[Tensor, "*B"], separators: Sequence[int]) -> Bool[Tensor, "*B"]:
    if len(separators) < 1:
        raise InputError("separators: none was given; at least one token must end a segment.")
    return torch.isin(tokens, torch.tensor(list(separators), device=tokens.device))


class BiPE(PositionalEncoding):
    """Bilevel positional encoding: a vector for the place in a segment, RoPE or ALiBi for segments (He et al. 2024).

    A position is (segment, place), [N, 2] or [B, N, 2]; `segment_positions` makes them from tokens, and
    `following_position` the next one in decoding. The vector of the place is added at the input; RoPE or ALiBi sees
    the segments' numbers alone, so that tokens of one segment are told apart by their vectors only. Running numbers
    [N] mean segments of equal length, which is ours, for texts without separators.

    Arguments
        across        ``rope`` or ``alibi``, for the segments
        inside        ``learned``, as in the released program; or ``sinusoidal``
        places_max    rows of the learned table; later places share the last, as in the released program (1024 rows).
                      Default ``max_len``
        segment       tokens of a segment, where positions are running numbers; default the root of ``max_len``
        slope_factor  what ALiBi's slopes are multiplied by, for segments are fewer than tokens: the released program's
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
        """Segments and places; of running numbers [N] too."""
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


ENCODINGS: dict[str, type[PositionalEncoding]] = {"bipe": BiPE}
