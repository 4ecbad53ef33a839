"""Rotary encodings: pairs of dimensions of queries and keys are rotated by angles that depend on position."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.encodings import kit
from toeplens.encodings.additive import NoPE, Sinusoidal
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.shapes import Frequencies, Keys, Positions, Queries, RotatedQK, Stream
from toeplens.utils import InputError, invalid
from toeplens.utils.options import NonNegative, Positive, PositiveInt, Range, Share
from toeplens.utils.renamed import renamed


@renamed
@dataclass(frozen=True)
class FrequencyMask:
    """An intervention on the frequencies of a rotation, t = 0 (the highest) .. n - 1.

    freeze   pairs that are not rotated: their content counts as if all offsets were 0, so E_t becomes J (up to the
             encoding's own magnitude)
    drop     pairs whose part of every logit is 0
    permute  pair t uses the frequency of pair ``permute[t]``; None for no change
    heads    the heads to change; None for all

    Raises `InputError` for pairs that are both frozen and dropped.
    """

    freeze: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    permute: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if set(self.freeze) & set(self.drop):
            raise InputError("freeze and drop must have no pairs in common.")

    def check(self, pairs: int, num_heads: int) -> None:
        """Raise `InputError` unless all indices fit ``pairs`` frequencies and ``num_heads`` heads."""
        for field, limit in {"freeze": pairs, "drop": pairs, "heads": num_heads}.items():
            indices = getattr(self, field)
            kit.require_indices(field, () if indices is None else indices, limit)
        if self.permute is not None and sorted(self.permute) != list(range(pairs)):
            raise invalid("permute", f"name each of 0 to {pairs - 1} once", list(self.permute))

    def mask_tables(
        self, cos: Float[Tensor, "*B H N n"], sin: Float[Tensor, "*B H N n"], num_heads: int
    ) -> tuple[Tensor, Tensor]:
        """Apply the intervention to cosines and sines (H is 1 if heads share them)."""
        masked = self.mask_kernel(torch.complex(cos, sin).mT, num_heads).mT
        return masked.real, masked.imag

    def mask_kernel(self, kernel: Complex[Tensor, "*B H n D"], num_heads: int) -> Complex[Tensor, "*B G n D"]:
        """Apply the intervention to a rotation's kernel."""

        def select(indices: Sequence[int], count: int) -> Bool[Tensor, "count 1"]:
            mask = torch.zeros(count, 1, dtype=torch.bool, device=kernel.device)
            mask[list(indices)] = True
            return mask

        pairs = kernel.shape[-2]
        masked = kernel if self.permute is None else kernel[..., list(self.permute), :]
        masked = torch.where(select(self.freeze, pairs), masked.abs().to(masked.dtype), masked)
        masked = masked.masked_fill(select(self.drop, pairs), 0.0)
        return masked if self.heads is None else torch.where(select(self.heads, num_heads)[..., None], masked, kernel)


def swap_bands(pairs: int, first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """The permutation in which two bands of equal size exchange their frequencies, in sequence."""
    order = list(range(pairs))
    bands = [*first, *second]
    if len(first) != len(second) or len(set(bands)) != len(bands) or not all(0 <= t < pairs for t in bands):
        must = f"have as many indices from 0 to {pairs - 1} as first, all different"
        raise invalid("second", must, got=f"{list(second)} for {list(first)}")
    for t, s in zip(first, second, strict=True):
        order[t], order[s] = s, t
    return tuple(order)


Pairing = Literal["interleaved", "half"]
# these treat all heads alike
_SHARED_ROTATION_METHODS = ("rotate", "frequencies_at", "phases", "tables", "_rotate_vectors")


def rotate_pairs(
    x: Float[Tensor, "*B H N d"], cos: Float[Tensor, "*#B #H N n"], sin: Float[Tensor, "*#B #H N n"], pairing: Pairing
) -> Float[Tensor, "*B H N d"]:
    """Rotate the pairs of ``x`` (d = 2n) by the angles with the given cosines and sines, in their precision."""
    wide = x.to(cos.dtype)
    if pairing == "interleaved" and not torch.compiler.is_compiling():
        if wide.stride(-1) != 1 or any(step % 2 for step in (*wide.stride()[:-1], wide.storage_offset())):
            wide = wide.clone(memory_format=torch.contiguous_format)  # a complex view needs contiguous pairs
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x.dtype)
    a, b = split_pairs(wide, pairing)
    return join_pairs(a * cos - b * sin, a * sin + b * cos, pairing).to(x.dtype)


def split_pairs(x: Float[Tensor, "*B d"], pairing: Pairing) -> tuple[Float[Tensor, "*B n"], Float[Tensor, "*B n"]]:
    """The first and second dimensions of all pairs, as views."""
    a, b = x.chunk(2, dim=-1) if pairing == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    return a, b


def join_pairs(a: Float[Tensor, "*B n"], b: Float[Tensor, "*B n"], pairing: Pairing) -> Float[Tensor, "*B d"]:
    """The vectors with these first and second dimensions of all pairs."""
    return torch.cat((a, b), dim=-1) if pairing == "half" else torch.stack((a, b), dim=-1).flatten(-2)


def rotate_by(x: Float[Tensor, "*B H N d"], phases: Float[Tensor, "*#B #H N n"], pairing: Pairing) -> Tensor:
    """Rotate the pairs of ``x`` by angles in float64; their cosines and sines are applied in at least float32."""
    wide = kit.wide_dtype(x.dtype)
    return rotate_pairs(x, phases.cos().to(wide), phases.sin().to(wide), pairing)


class Rotary(PositionalEncoding):
    """A rotation: ``frequencies`` [H or 1, n] rotate dimensions ``first`` to ``first + 2n`` of each head.

    Phases i theta_t are computed in float64, and their cosines and sines are applied in float32
    (float64 for float64 input), whatever the model's dtype: bfloat16 cannot represent all integers over 256.

    Subclasses whose frequencies depend on the length override `frequencies_at`. Subclasses that also scale queries
    and keys set ``magnitude``, which multiplies both, so logits are scaled by its square.
    """

    coupling = "rotation"
    magnitude: float = 1.0
    frequency_mask: FrequencyMask | None = None

    def __init__(self, frequencies: Float[Tensor, "H n"], *, pairing: Pairing, first: int = 0, **sizes: int) -> None:
        super().__init__(**sizes)
        self.pairing: Pairing = pairing
        self.first = first
        self.frequencies = self.register_exact("frequencies", frequencies)

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        """The frequencies for these keys: [H or 1, n], or [B, H or 1, n] if they differ between sequences."""
        return self.frequencies

    def phases(self, positions: Positions, frequencies: Frequencies) -> Float[Tensor, "*B H N n"]:
        """The angles i theta_t (see `kit.phases_of`)."""
        return kit.phases_of(positions, frequencies)

    def tables(self, positions: Positions, frequencies: Frequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the phases, times ``magnitude``, in float32 or, for float64 input, float64."""
        phases = self.phases(positions, frequencies)
        wide = kit.wide_dtype(dtype)
        return self._mask((phases.cos() * self.magnitude).to(wide), (phases.sin() * self.magnitude).to(wide))

    def _mask(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.frequency_mask
        return (cos, sin) if mask is None else mask.mask_tables(cos, sin, self.num_heads)

    def _rotate_vectors(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        width = 2 * self.frequencies.shape[-1]
        if width == x.shape[-1]:
            return rotate_pairs(x, *tables, self.pairing)
        if x.shape[-1] < self.first + width or (self.first and x.shape[-1] > self.first + width):
            dims_text = f" ({self.first} that are not rotated, {width} that are)" if self.first else ""
            raise invalid("head_dim", f"be {self.first + width}{dims_text} for {type(self).__name__}", x.shape[-1])
        before, middle, after = x.split((self.first, width, x.shape[-1] - self.first - width), dim=-1)
        return torch.cat((before, rotate_pairs(middle, *tables, self.pairing), after), dim=-1)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        frequencies = self.frequencies_at(k_positions)
        k_tables = self.tables(k_positions, frequencies, k.dtype)
        q_tables = k_tables if q_positions is k_positions else self.tables(q_positions, frequencies, q.dtype)
        return self._rotate_vectors(q, q_tables), self._rotate_vectors(k, k_tables)

    def pair_factors(self, positions: Positions, dtype: torch.dtype) -> Complex[Tensor, "*B H N n"] | None:
        rotated_dims = 2 * self.frequencies.shape[-1]
        adjacent = self.frequency_mask is None and self.pairing == "interleaved" and rotated_dims == self.query_dim
        if not adjacent or not self._uses_default("rotate", "_rotate_vectors"):
            return None
        return torch.complex(*self.tables(positions, self.frequencies_at(positions), dtype))

    def _uses_default(self, *names: str) -> bool:
        """Whether no subclass overrides these methods."""
        return all(getattr(type(self), name) is getattr(Rotary, name) for name in names)

    @property
    def rotation_is_shared(self) -> bool:
        uses_default = self._uses_default(*_SHARED_ROTATION_METHODS)
        return uses_default and len(self.frequencies) == 1 and self.frequency_mask is None

    def kernel(self, offsets: Int[Tensor, "D *axes"]) -> Complex[Tensor, "H n D"]:
        """e^(i delta theta_t) times the squared magnitude, so that a logit is Re sum_t q_t conj(k_t) kernel_t.

        A frequency of 0 gives 1. Length-dependent frequencies are those for ``max_len`` positions.
        """
        frequencies = self.frequencies_at(torch.tensor([self.max_len - 1], device=self.frequencies.device))
        kernel = kit.complex_exp(self.phases(offsets, frequencies).transpose(-2, -1), self.magnitude**2)
        return kernel if self.frequency_mask is None else self.frequency_mask.mask_kernel(kernel, self.num_heads)


def with_frequency_mask(encoding: Rotary, mask: FrequencyMask) -> Rotary:
    """A copy of ``encoding`` with a `FrequencyMask`, which replaces any earlier one; parameters are shared.

    Effects other than rotating pairs (a decay, a map, a second copy of a pair) are unchanged. Raises `InputError` for
    an encoding that is not `Rotary`.
    """
    if not isinstance(encoding, Rotary):
        raise invalid("encoding", "be a Rotary encoding, to have a frequency mask", got=type(encoding).__name__)
    mask.check(encoding.frequencies.shape[-1], encoding.num_heads)
    masked = copy.copy(encoding)
    masked.frequency_mask = mask
    return masked


class RoPE(Rotary, name="rope"):
    """Rotary position embedding (Su et al. 2021, eq. 14-16).

    Arguments
        base     theta_t = base^(-2t/d)
        pairing  ``interleaved`` (the paper: dimensions 2t and 2t+1) or ``half`` (Llama, NeoX: t and t + d/2); the same
                 up to a fixed permutation of the dimensions
    """

    citation = "Su et al. 2021, arXiv 2104.09864"
    formula = (
        r"\mathrm{Re} \sum_t q_{i,t}\, \overline{k_{j,t}}\, e^{\mathrm{i}\delta\theta_t},\quad \theta_t = b^{-2t/d}"
    )

    def __init__(self, *, base: float = 10000.0, pairing: Pairing = "interleaved", **sizes: int) -> None:
        kit.require_even("head_dim", sizes["head_dim"])
        super().__init__(kit.rotary_frequencies(sizes["head_dim"], base).unsqueeze(0), pairing=pairing, **sizes)


class PartialRoPE(Rotary, name="partial-rope"):
    """RoPE on some of the dimensions, heads or layers, and no encoding on the rest.

    The defaults give plain RoPE. GPT-NeoX and Pythia: ``rotary_pct`` 0.25 and ``pairing`` "half".

    Arguments
        rotary_pct  share of each head's dimensions that is rotated, starting at the first
        heads       number of heads, starting at the first, or a list of heads, from 0 (default: all)
        layers      a list of layers, from 0 (default: all)
        base        as in RoPE; the frequencies are spread over the rotated dimensions
    """

    citation = "Black et al. 2022, arXiv 2204.06745; Gu et al. 2025, arXiv 2505.13027, section 5.1"
    formula = (
        r"\mathrm{Re} \sum_{t \in T} q_t\, \overline{k_t}\, e^{\mathrm{i}\delta\theta_t} + \sum_{s \notin T} q_s k_s"
    )

    def __init__(
        self,
        *,
        rotary_pct: Annotated[float, Range(above=0, at_most=1)] = 1.0,
        heads: int | Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        head_dim, num_heads = sizes["head_dim"], sizes["num_heads"]
        kit.require_even("head_dim", head_dim)
        rotary_dim = int(head_dim * rotary_pct)
        kit.require_even("rotary_pct", rotary_dim, f"{rotary_pct} of head_dim {head_dim} gives the rotated dimensions")
        rotated = list(range(heads)) if isinstance(heads, int) else list(range(num_heads) if heads is None else heads)
        if (isinstance(heads, int) and heads < 0) or any(not 0 <= head < num_heads for head in rotated):
            raise invalid("heads", f"be a number from 0 to {num_heads} or a list of indices under {num_heads}", heads)
        head_mask = torch.zeros(num_heads, 1, dtype=torch.float64)
        head_mask[rotated] = 1
        super().__init__(kit.rotary_frequencies(rotary_dim, base) * head_mask, pairing=pairing, **sizes)
        is_valid = layers is None or all(isinstance(layer, int) and layer >= 0 for layer in layers)
        if layers is not None and (not is_valid or len(set(layers)) != len(layers)):
            raise invalid("layers", "be a list of different layers, counted from 0", list(layers))
        self.layers = None if layers is None else frozenset(layers)

    def for_layer(self, layer: int) -> PositionalEncoding:
        return self if self.layers is None or layer in self.layers else NoPE(**self.sizes)


class RoPEAbsolute(RoPE, name="rope-absolute"):
    """RoPE plus a sinusoid added to the token embeddings (arXiv 2505.13027, section 5.2; the released code's "rope").

    Arguments
        layout  the sinusoid's layout (see `Sinusoidal`)
    """

    also_couples = ("input",)
    citation = "Gu et al. 2025, arXiv 2505.13027, section 5.2"
    formula = r"q_i = R_i W_Q (x_i + p_i),\quad k_j = R_j W_K (x_j + p_j)"
    toeplitz = False

    def __init__(
        self, *, layout: Literal["interleaved", "halves"] = "interleaved", base: float = 10000.0, **inherited: Any
    ) -> None:
        super().__init__(base=base, **inherited)
        self.sinusoid = Sinusoidal(base=base, layout=layout, **self.sizes)

    def embed(self, x: Stream, positions: Positions) -> Stream:
        return self.sinusoid.embed(x, positions)


class MLA(Rotary, name="mla"):
    """DeepSeek's decoupled RoPE: q = [q_content ; R_i q_rotary], k = [k_content ; R_j k_rotary] (V2, eq. 14-19).

    Heads have ``head_dim + rotary_dim`` dimensions, of which the last ``rotary_dim`` are rotated; all heads share
    one rotary key. The attention layer provides the projections to and from the latent vectors.

    Arguments
        rotary_dim    dimensions of the rotary part (default: half of ``head_dim``, as in DeepSeek-V2)
        d_compress    size of the latent vector c^KV (default: half of ``d_model``, as in arXiv 2505.13027; DeepSeek-V2:
                      512 of 5120)
        q_compress    size of c^Q: ``same`` as c^KV, as in arXiv 2505.13027; another number (DeepSeek-V2: 1536); or
                      None for queries projected directly from the layer's input, as in V2-Lite
        rotary_query  ``per-head`` (DeepSeek) or ``shared``: one rotary query for all heads (released code of
                      arXiv 2505.13027)
        latent_norm   RMSNorm on the latent vectors, as in DeepSeek
        phase_table   ``rotation``, or ``released``: the released code reads cosines and sines from a concatenated
                      table as if it were interleaved, so that the result is neither a rotation nor a function of
                      the offset
    """

    coupling = "concatenation"
    citation = "DeepSeek-AI 2024, arXiv 2405.04434"
    formula = r"q_i = [q^C_i;\, R_i q^R_i],\quad k_j = [k^C_j;\, R_j k^R_j]"

    def __init__(
        self,
        *,
        rotary_dim: int | None = None,
        d_compress: PositiveInt | None = None,
        q_compress: int | Literal["same"] | None = "same",
        rotary_query: Literal["per-head", "shared"] = "per-head",
        latent_norm: bool = True,
        phase_table: Literal["rotation", "released"] = "rotation",
        base: float = 10000.0,
        pairing: Pairing = "interleaved",
        **sizes: int,
    ) -> None:
        head_dim = sizes["head_dim"]
        rotary_dim = 2 * max(1, head_dim // 4) if rotary_dim is None else rotary_dim
        kit.require_even("rotary_dim", rotary_dim)
        frequencies = kit.rotary_frequencies(rotary_dim, base).unsqueeze(0)
        super().__init__(frequencies, pairing=pairing, first=head_dim, **sizes)
        self.rotary_dim = rotary_dim
        self.d_compress = max(1, self.d_model // 2) if d_compress is None else d_compress
        self.q_compress = self.d_compress if q_compress == "same" else q_compress
        if self.q_compress is not None and not (isinstance(self.q_compress, int) and self.q_compress >= 1):
            raise invalid("q_compress", "be at least 1, 'same', or None", q_compress)
        self.rotary_query, self.latent_norm, self.phase_table = rotary_query, latent_norm, phase_table
        if phase_table == "released":
            self.toeplitz = False
            if rotary_dim % 4:
                raise invalid("rotary_dim", "be a multiple of 4 for the released phase table", rotary_dim)

    @property
    def query_dim(self) -> int:
        return self.head_dim + self.rotary_dim

    def tables(self, positions: Positions, frequencies: Frequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.phase_table == "rotation":
            return super().tables(positions, frequencies, dtype)
        phases = self.phases(positions, frequencies)
        table = torch.cat((phases.sin(), phases.cos()), dim=-1).to(kit.wide_dtype(dtype))
        return self._mask(table[..., 1::2], table[..., 0::2])

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"] | None:
        """The rotary part's kernel; None for the released table, which has none."""
        return super().kernel(offsets) if self.phase_table == "rotation" else None


class RopeBands(PartialRoPE, name="rope-bands"):
    """RoPE with a gain g_t per frequency (Mikaeili et al. 2026, "Untwisting RoPE", for the ramp and "pair").

    Without gains it is RoPE. The paper applies its gains only to the keys of a reference image; here they apply to all
    keys.

    Not verified: the ramp and what it modulates. Both are read from the paper, without code to compare.

    Arguments
        gains   n = d/2 non-negative numbers, or one such list per head, from the highest frequency to the lowest
        keep    instead of ``gains``: the indices t with a gain of 1; all others have 0
        ramp    instead of ``gains``: (s_hf, s_lf, beta) for g_t = s_hf + (s_lf - s_hf) (t / (n-1))^beta, as published
        off     what a gain acts on. ``rotation``: the kernel becomes (1-g) + g e^(i delta theta_t), where 0 leaves only
                the pair's content. This is exact: the pair is split into a rotated copy of weight sqrt(g) and an
                unrotated one of sqrt(1-g), which adds two dimensions to queries and keys. ``pair``: the pair's part of
                the logit is multiplied by g, as published
        frequencies  replacement for RoPE's: one for all pairs, or n of them, in radians per position; not negative
        layers  a list of layers, counted from 0 (default: all). The others have no encoding, as in `PartialRoPE`
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
        self.off = off
        set_options = [name for name, value in (("gains", gains), ("keep", keep), ("ramp", ramp)) if value is not None]
        if len(set_options) > 1:
            raise InputError(f"{set_options[0]} and {set_options[1]} must not both be set.")
        values = torch.ones(1, pairs, dtype=torch.float64)
        if keep is not None:
            kit.require_indices("keep", keep, pairs)
            values = values * torch.tensor([t in keep for t in range(pairs)])
        elif ramp is not None:
            values = _ramp_gains(ramp, pairs)
        elif gains is not None:
            values = _parse_gains(gains, self.num_heads, pairs)
        base_frequencies = self.frequencies[:1] if frequencies is None else _parse_frequencies(frequencies, pairs)
        rotated_weight, frozen_weight = values.sqrt(), torch.zeros_like(values)
        if self.off == "rotation":
            if float(values.max()) > 1:
                largest = f"a gain of {float(values.max()):g}"
                raise invalid(set_options[0], "be at most 1 unless off='pair'", got=largest)
            is_split = (values > 0) & (values < 1)
            base_frequencies = base_frequencies * (values > 0)
            rotated_weight = torch.where(is_split, rotated_weight, 1.0)
            frozen_weight = torch.where(is_split, (1 - values).sqrt(), 0.0)
        split = (frozen_weight > 0).any(0).nonzero().flatten()
        self.register_exact("frequencies", base_frequencies)
        self.gains = self.register_exact("gains", values)
        self.rotated_weight = self.register_exact("rotated_weight", rotated_weight.unsqueeze(-2))
        self.frozen_weight = self.register_exact("frozen_weight", frozen_weight[:, split].unsqueeze(-2))
        second = split + pairs if self.pairing == "half" else 2 * split + 1
        first = split if self.pairing == "half" else 2 * split
        self.split_dims = self.register_exact("split_dims", torch.cat((first, second)))

    def tables(self, positions: Positions, frequencies: Frequencies, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().tables(positions, frequencies, dtype)
        return (cos * self.rotated_weight).to(cos.dtype), (sin * self.rotated_weight).to(sin.dtype)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        rotated_q, rotated_k = super().rotate(q, k, q_positions, k_positions)
        if not len(self.split_dims):
            return rotated_q, rotated_k
        q, k = self._frozen_copies(q), self._frozen_copies(k)
        return torch.cat((rotated_q, q), dim=-1), torch.cat((rotated_k, k), dim=-1)

    def _frozen_copies(self, x: Float[Tensor, "B H N d"]) -> Float[Tensor, "B H N s"]:
        """The unrotated copies of the split pairs."""
        return (x.index_select(-1, self.split_dims) * self.frozen_weight.repeat(1, 1, 2)).to(x.dtype)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H n D"]:
        """The factor of each pair's q_t conj(k_t): (1-g) + g e^(i delta theta_t), or g e^(i delta theta_t)."""
        rotated = self.rotated_weight.mT.square()
        kernel = rotated * super().kernel(offsets)
        return kernel if self.off == "pair" else (1 - rotated) + kernel


def _parse_frequencies(frequencies: float | Sequence[float], pairs: int) -> Float[Tensor, "1 n"]:
    values = list(frequencies) if isinstance(frequencies, Sequence) else [frequencies] * pairs
    if len(values) != pairs:
        raise invalid("frequencies", f"be one number or a list of {pairs}", values)
    values = [kit.require_number("frequencies", value, at_least=0) for value in values]
    return torch.tensor([values], dtype=torch.float64)


def _ramp_gains(ramp: Sequence[float], pairs: int) -> Float[Tensor, "1 n"]:
    if len(ramp) != 3:
        raise invalid("ramp", "be the three numbers s_hf, s_lf, beta", list(ramp))
    high, low = (kit.require_number("ramp", value, at_least=0) for value in ramp[:2])
    beta = kit.require_number("ramp", ramp[2], above=0)
    fraction = torch.arange(pairs, dtype=torch.float64) / max(1, pairs - 1)
    return (high + (low - high) * fraction**beta).unsqueeze(0)


def _parse_gains(
    gains: Sequence[float] | Sequence[Sequence[float]], num_heads: int, pairs: int
) -> Float[Tensor, "H n"]:
    by_head = [list(row) for row in gains if isinstance(row, Sequence)]
    rows = by_head or [[g for g in gains if not isinstance(g, Sequence)]]
    is_complete = not by_head or len(by_head) == len(gains) == num_heads
    if not is_complete or any(len(row) != pairs for row in rows):
        raise invalid("gains", f"be a list of {pairs} numbers, or {num_heads} such lists", list(gains))
    values = [[kit.require_number("gains", g, at_least=0) for g in row] for row in rows]
    return torch.tensor(values, dtype=torch.float64)


class PRoPE(RoPE, name="p-rope"):
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

    def __init__(self, *, p: Share = 0.75, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.frequencies[:, int(p * self.head_dim // 2) :] = 0


class XPos(RoPE, name="xpos"):
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

    def __init__(self, *, scale_base: Positive = 512.0, gamma: Positive = 0.4, **inherited: Any) -> None:
        super().__init__(**inherited)
        fraction = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        zeta = (fraction + gamma) / (1 + gamma)
        self.log_decay = self.register_exact("log_decay", zeta.log() / scale_base)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        centre = (k_positions.amin(-1, keepdim=True) + k_positions.amax(-1, keepdim=True)) // 2
        q_offsets, k_offsets = q_positions - centre, k_positions - centre
        self._check_span(q_offsets, k_offsets, kit.product_dtype(q))
        frequencies = self.frequencies_at(k_positions)
        k_tables = self.tables(k_positions, frequencies, k.dtype)
        q_tables = k_tables if q_positions is k_positions else self.tables(q_positions, frequencies, q.dtype)
        q_tables, k_tables = self._decay_tables(q_tables, q_offsets), self._decay_tables(k_tables, -k_offsets)
        return self._rotate_vectors(q, q_tables), self._rotate_vectors(k, k_tables)

    def _decay_tables(self, tables: tuple[Tensor, Tensor], offsets: Positions) -> tuple[Tensor, Tensor]:
        """The tables times zeta_t^(position/B)."""
        cos, sin = tables
        factor = kit.phases_of(offsets, self.log_decay).exp().to(cos.dtype)
        return cos * factor, sin * factor

    def _check_span(self, q_offsets: Positions, k_offsets: Positions, dtype: torch.dtype) -> None:
        """Check that each side's factors stay within a quarter of the dtype's exponent range, so that products fit."""
        if torch.compiler.is_compiling() or k_offsets.device.type != "cpu" or not q_offsets.numel():
            return
        limit = int(math.log(torch.finfo(dtype).max) / 4 / float(-self.log_decay.min()))
        widest = max(int(q_offsets.abs().max()), int(k_offsets.abs().max()))
        if widest > limit:
            must = f"be within {limit} of the middle position of the keys for {dtype} and this scale_base"
            raise invalid("positions", must, widest)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """zeta_t^(delta/B) e^(i delta theta_t)."""
        return super().kernel(offsets) * (self.log_decay.unsqueeze(-1) * offsets.to(torch.float64)).exp()


class PoPE(PositionalEncoding, name="pope"):
    """Polar coordinate position embedding: magnitudes carry content, phases position (Gopalakrishnan et al. 2025).

    Each of the d dimensions is a complex number of magnitude softplus(x_c) and phase i theta_c, with d frequencies
    theta_c = base^(-c/d), c = 0..d-1. A learned delta_c in [-2 pi, 0] is added to a key's phase. Queries and keys
    become 2d wide; the scale of the logits stays 1/sqrt(d). delta is clamped to its range, so a value
    outside it receives no gradient, as in x-transformers.

    Arguments
        base    theta_c = base^(-c/d)
        init    initial delta: ``zero`` (which generalises better to longer input, says the paper) or ``uniform``
        shared  one delta for all layers (as in x-transformers); otherwise one per layer
    """

    coupling = "rotation"
    citation = "Gopalakrishnan et al. 2025, arXiv 2509.10534"
    formula = (
        r"\sum_{c=1}^{d} \mathrm{softplus}(q_c)\, \mathrm{softplus}(k_c) \cos(\delta \theta_c - \Delta_c),"
        r" \quad \theta_c = b^{-(c-1)/d}"
    )

    def __init__(
        self, *, base: float = 10000.0, init: Literal["zero", "uniform"] = "zero", shared: bool = False, **sizes: int
    ) -> None:
        super().__init__(**sizes)
        self.shared = shared
        self.frequencies = self.register_exact("frequencies", kit.rotary_frequencies(2 * self.head_dim, base))
        lowest = -2 * math.pi if init == "uniform" else 0.0
        self.delta = self.new_parameter((self.num_heads, self.head_dim), partial(nn.init.uniform_, a=lowest, b=0.0))

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        q_phases, k_phases = (kit.phases_of(positions, self.frequencies) for positions in (q_positions, k_positions))
        return _to_polar(q, q_phases), _to_polar(k, k_phases + self._shift().unsqueeze(-2))

    def _shift(self) -> Float[Tensor, "H d"]:
        return self.delta.to(torch.float64).clamp(-2 * math.pi, 0)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "H d D"]:
        """e^(i (offset theta_c - delta_c)), so that a logit is Re sum_c softplus(q_c) softplus(k_c) kernel_c."""
        return kit.complex_exp(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64) - self._shift().unsqueeze(-1))


def _to_polar(x: Float[Tensor, "B H N d"], phases: Float[Tensor, "*_B #H N d"]) -> Float[Tensor, "B H N e"]:
    """Vectors of magnitude softplus(x) at the given phases: d real parts, then d imaginary ones."""
    wide = kit.wide_dtype(x.dtype)
    magnitude = F.softplus(x.to(wide))
    return torch.cat((magnitude * phases.cos().to(wide), magnitude * phases.sin().to(wide)), dim=-1).to(x.dtype)


class ComplexFormer(RoPE, name="complexformer"):
    """RoPE with a learned map of the phase differences between query and key (Shao et al. 2025; unverified, see below).

    The abstract of the paper (withdrawn by its authors) says that a head converts real queries and keys to polar
    complex vectors and takes the real part of their product under a rotation by Adapt(AS_ij) + Delta(P_ij), with AS the
    difference of their own phases and P that of their positions. It does not define Adapt and Delta. This
    reading takes the affine Adapt of its predecessor EulerFormer (arXiv 2403.17729), with a factor and a shift for
    each head and pair, and RoPE's angle for Delta:

        logit = sum_t |q_t| |k_t| cos(a_t (arg q_t - arg k_t) + b_t + (i - j) theta_t)

    It starts as RoPE (a = 1, b = 0). By our definition its position part is not data-dependent. For a_t other than an
    integer the logit is discontinuous where an argument passes pi. `kernel` is that of the rotation, between the
    adapted queries and keys.

    Not verified: everything except that sentence, as neither the paper's text nor code was available.
    """

    citation = "Shao et al. 2025, arXiv 2505.10222 (withdrawn; read from its abstract)"
    formula = r"\sum_t |q_t| |k_t| \cos\left(a_t (\arg q_t - \arg k_t) + b_t + \delta \theta_t\right)"
    shared = False

    def __init__(self, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.factor = self.new_parameter((self.num_heads, self.head_dim // 2), nn.init.ones_)
        self.offset = self.new_parameter((self.num_heads, self.head_dim // 2), nn.init.zeros_)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        adapted = self._adapt(q, self.offset), self._adapt(k, torch.zeros_like(self.offset))
        rotated_q, rotated_k = super().rotate(*adapted, q_positions, k_positions)
        return rotated_q.to(q.dtype), rotated_k.to(k.dtype)

    def _adapt(self, x: Float[Tensor, "B H N d"], offset: Float[Tensor, "H n"]) -> Float[Tensor, "B H N d"]:
        """Each pair with its phase multiplied by the factor and shifted by the offset, in at least float32."""
        wide = x.to(kit.wide_dtype(x.dtype))
        a, b = split_pairs(wide, self.pairing)
        is_zero = a.abs() + b.abs() < 1e-18  # zero has no phase, and near zero its derivative explodes
        a = torch.where(is_zero, 1.0, a)
        magnitude = torch.where(is_zero, 0.0, torch.hypot(a, b))
        phase = self.factor.to(wide.dtype).unsqueeze(-2) * torch.atan2(b, a) + offset.to(wide.dtype).unsqueeze(-2)
        return join_pairs(magnitude * phase.cos(), magnitude * phase.sin(), self.pairing)


class FoPE(PositionalEncoding, name="fope"):
    """Fourier position embedding (Hua et al. 2024), as computed by its released code.

    RoPE frequencies below 2 pi / train_length, whose full period training never shows, are dropped; D remain. Each of
    O = min(D, d/4) pairs then has sum_f C_fo cos(i theta_f) instead of its cosine and sum_f S_fo sin(i theta_f) instead
    of its sine. Each head has its own matrices, initialised as the identity (if D > O, pair o starts from frequency
    o ceil(D/O)) plus Xavier noise. Such a pair is not a rotation, and the logit is not a function of i - j.

    The released code pads the sines of the pairs beyond O with 1, which rotates them by 45 degrees and doubles their
    part of the logit. The paper gives them frequency 0, the default here. The paper's formula would give every kept
    frequency its own pair; here the code's d/4 is used.

    Arguments
        gain          of the Xavier noise; 0.3 in the code (its configurations: 0.3 to 0.6, growing with the model)
        learnable     train the matrices; by default they stay fixed, as in the code
        train_length  sets the lowest frequency (default: ``max_len``)
        padding       ``identity`` (sine 0) or ``ones`` (the released code) for the pairs without a series
        pairing       as in RoPE; the released code uses halves
    """

    coupling = "rotation"
    toeplitz = False
    shared = False
    citation = "Hua et al. 2024, arXiv 2412.17739"
    formula = (
        r"\mathrm{Re} \sum_t q_t \bar k_t \, h_t(i) \overline{h_t(j)},"
        r" \quad h_t(i) = \sum_f C_{ft} \cos(i \theta_f) + \mathrm{i} \sum_f S_{ft} \sin(i \theta_f)"
    )
    cosines: Tensor
    sines: Tensor

    def __init__(
        self,
        *,
        gain: NonNegative = 0.3,
        learnable: bool = False,
        train_length: int | None = None,
        padding: Literal["identity", "ones"] = "identity",
        base: float = 10000.0,
        pairing: Pairing = "half",
        **sizes: int,
    ) -> None:
        super().__init__(**sizes)
        kit.require_even("head_dim", self.head_dim)
        self.gain, self.padding = gain, padding
        self.pairing: Pairing = pairing
        length = kit.require_train_length(train_length, self.max_len)
        if self.head_dim < 4:
            raise invalid("head_dim", "be at least 4, for one Fourier series", self.head_dim)
        frequencies = kit.rotary_frequencies(self.head_dim, base)
        self.frequencies = self.register_exact("frequencies", frequencies[frequencies >= 2 * math.pi / length])
        count = len(self.frequencies)
        shape = (self.num_heads, count, min(count, self.head_dim // 4))
        for name in ("cosines", "sines"):
            if learnable:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            else:
                self.register_buffer(name, torch.empty(shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for matrix in (self.cosines, self.sines):
            nn.init.xavier_normal_(matrix, gain=self.gain)
            count, series = matrix.shape[1:]
            start_rows = torch.arange(0, count, math.ceil(count / series), device=matrix.device)
            matrix[:, start_rows, torch.arange(len(start_rows), device=matrix.device)] += 1

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        k_tables = self.tables(k_positions, k.dtype)
        q_tables = k_tables if q_positions is k_positions else self.tables(q_positions, q.dtype)
        return rotate_pairs(q, *q_tables, self.pairing), rotate_pairs(k, *k_tables, self.pairing)

    def tables(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The series that replace cosines and sines: [H, N, n], or [B, H, N, n] for positions per sequence."""
        phases = kit.phases_of(positions, self.frequencies)
        wide = kit.wide_dtype(dtype)
        pad = (0, self.head_dim // 2 - self.cosines.shape[-1])
        cosine = F.pad(phases.cos() @ self.cosines.double(), pad, value=1.0)
        sine = F.pad(phases.sin() @ self.sines.double(), pad, value=1.0 if self.padding == "ones" else 0.0)
        return cosine.to(wide), sine.to(wide)


class RollPE(PositionalEncoding, name="rollpe"):
    """Queries and keys shifted circularly along the head's dimensions (van de Geijn et al. 2025).

    The query at position i becomes torch.roll(q, speed * i, -1). In the Fourier basis, a shift by a rotates component
    f = 1, 2, ... by 2 pi f a/d: RoPE in another basis, with multiples of 2 pi speed/d as frequencies. It is computed
    that way, so that a shift may be a fraction of a dimension. Component 0 (the mean) is unchanged. For even d,
    component d/2 (the alternating sum) has no fractional rotation: it is multiplied by (-1)^(i r), with r the integer
    nearest to ``speed``, which is torch.roll's factor for integer speeds; positions must then be integers.

    Not verified: the paper's speed; 1, the discrete roll, is our choice.

    Arguments
        speed  dimensions per position
    """

    coupling = "rotation"
    citation = "van de Geijn et al. 2025, arXiv 2511.11668"
    formula = r"\sum_c q_c \, k_{(c + s \delta) \bmod d}"

    def __init__(self, *, speed: Positive = 1.0, **sizes: int) -> None:
        super().__init__(**sizes)
        d = self.head_dim
        if d < 3:
            raise invalid("head_dim", "be at least 3, for a Fourier component to turn", d)
        self.speed = speed
        component = torch.arange(1, (d + 1) // 2, dtype=torch.float64)
        angles = 2 * math.pi / d * torch.arange(d, dtype=torch.float64).unsqueeze(-1) * component
        waves = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2) * math.sqrt(2 / d)
        unrotated = [torch.full((d, 1), d**-0.5, dtype=torch.float64)]
        if d % 2 == 0:
            unrotated.append(unrotated[0] * (1 - 2 * (torch.arange(d).unsqueeze(-1) % 2)))
        self.basis = self.register_exact("basis", torch.cat((waves, *unrotated), dim=-1))
        self.frequencies = self.register_exact("frequencies", 2 * math.pi * speed / d * component)

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        return self._roll(q, q_positions), self._roll(k, k_positions)

    def _roll(self, x: Float[Tensor, "B H N d"], positions: Positions) -> Float[Tensor, "B H N d"]:
        wide = kit.wide_dtype(x.dtype)
        basis = self.basis.to(wide)
        sizes = (2 * len(self.frequencies), 1, self.head_dim % 2 == 0)
        waves, mean, alternating = (x.to(wide) @ basis).split(sizes, dim=-1)
        rotated = rotate_by(waves, kit.phases_of(positions, self.frequencies), "interleaved")
        signs = self._signs(positions).to(wide)[..., None, :, None]
        return (torch.cat((rotated, mean, alternating * signs), dim=-1) @ basis.T).to(x.dtype)

    def _signs(self, positions: Positions) -> Positions:
        """(-1)^(i r): the factor of the alternating component."""
        return 1 - 2 * (positions * round(self.speed) % 2)

    def kernel(self, offsets: Int[Tensor, "D"]) -> Complex[Tensor, "1 n D"]:
        """e^(i delta theta_f) of the Fourier components f = 0, 1, ..., d//2."""
        waves = kit.complex_exp(self.frequencies.unsqueeze(-1) * offsets.to(torch.float64))
        rows = [torch.ones_like(waves[:1]), waves]
        if self.head_dim % 2 == 0:
            rows.append(self._signs(offsets).to(waves.dtype).unsqueeze(0))
        return torch.cat(rows).unsqueeze(0)


class DRoPE(Rotary, name="drope"):
    """Directional RoPE: every pair is rotated by the same angle, the heading of an agent (Zhao et al. 2025).

    A position is a heading, in integer units of ``step`` (default: one degree). With token indices as positions, the
    logit repeats every 2 pi/step tokens. Not included: the paper's combination with a rotary encoding of locations, in
    other heads or other dimensions of the same head.

    Arguments
        step  the angle of one position unit, in radians; the resolution is ours, the paper's angles are real numbers
    """

    citation = "Zhao et al. 2025, arXiv 2503.15029"
    formula = r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta \varphi}"

    def __init__(self, *, step: Positive = 2 * math.pi / 360, pairing: Pairing = "interleaved", **sizes: int) -> None:
        kit.require_even("head_dim", sizes["head_dim"])
        frequencies = torch.full((1, sizes["head_dim"] // 2), step, dtype=torch.float64)
        super().__init__(frequencies, pairing=pairing, **sizes)


class RopeLearned(RoPE, name="rope-learned"):
    """RoPE with learned frequencies (``learned_freq`` of rotary-embedding-torch).

    The parameter is an offset from RoPE's frequencies and receives the gradient that the frequency would receive. The
    base frequencies stay in float64, so casting the model to half precision does not round them.

    Arguments
        per_head       separate frequencies for each head; otherwise all heads share them, as published
        shared         one set for all layers, as published; otherwise one per layer
    """

    citation = "Wang, rotary-embedding-torch, learned_freq"
    formula = r"\mathrm{Re} \sum_t q_t \bar k_t \, e^{\mathrm{i} \delta (\theta_t + \epsilon_t)}"

    def __init__(self, *, per_head: bool = False, shared: bool = True, **inherited: Any) -> None:
        super().__init__(**inherited)
        self.shared = shared
        self.offset = self.new_parameter((self.num_heads if per_head else 1, self.head_dim // 2), nn.init.zeros_)

    def frequencies_at(self, k_positions: Positions) -> Frequencies:
        return self.frequencies + self.offset.to(torch.float64)


class HARoPE(RoPE, name="harope"):
    """A learned map applied to each head's queries and keys before the rotation (Li et al. 2025).

    M = U diag(s) V^T with U, V the exponentials of skew-symmetric matrices and s = softplus(sigma) + 10^-6. M starts
    within 10^-6 of the identity, so the encoding starts as RoPE. The paper and its code use it with axial RoPE on
    images; here positions are those of a sequence. `kernel` is that of the rotation, between the mapped queries and
    keys.

    Arguments
        map            ``inverse``: M on queries and M^-T on keys, as in the released code, so that at offset 0 the
                       logit is q . k; ``shared``: M on both, as the abstract can be read
    """

    citation = "Li et al. 2025, arXiv 2510.10489"
    formula = r"q^\top M^\top R_{j-i} M^{-\top} k, \quad M = U \,\mathrm{diag}(s)\, V^\top"
    shared = False

    def __init__(self, *, map: Literal["inverse", "shared"] = "inverse", **inherited: Any) -> None:
        super().__init__(**inherited)
        self.map = map
        shape = (self.num_heads, self.head_dim, self.head_dim)
        self.left, self.right = (self.new_parameter(shape, nn.init.zeros_) for _ in range(2))
        init = partial(nn.init.constant_, val=math.log(math.e - 1))
        self.sigma = self.new_parameter((self.num_heads, self.head_dim), init)

    def maps(self, dtype: torch.dtype) -> tuple[Float[Tensor, "H d d"], Float[Tensor, "H d d"]]:
        """The matrices that queries and keys are multiplied by."""
        u, v = (torch.matrix_exp(0.5 * (a - a.mT)) for a in (self.left.to(dtype), self.right.to(dtype)))
        s = (F.softplus(self.sigma.to(dtype)) + 1e-6).unsqueeze(-2)
        forward = (u * s) @ v.mT
        return forward, (u / s) @ v.mT if self.map == "inverse" else forward

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        wide = kit.wide_dtype(q.dtype)
        map_q, map_k = self.maps(wide)
        rotated_q, rotated_k = super().rotate(q.to(wide) @ map_q.mT, k.to(wide) @ map_k.mT, q_positions, k_positions)
        return rotated_q.to(q.dtype), rotated_k.to(k.dtype)
