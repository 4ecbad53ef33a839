"""Rotations of queries and keys that come from any model: which dimensions are rotated, and by which frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.encodings.kit import require_even, rotary_frequencies
from toeplens.encodings.rotary import Pairing, join_pairs, split_pairs
from toeplens.utils import choose, invalid

# named, not imported: backends stand above lens
_READER = "toeplens.backends.hf.layer_rotation"


@dataclass(frozen=True, eq=False)
class RotaryPairs:
    """Pairs of a head's dimensions, rotated by angles that are linear in the position; see `rope` and `rotation_of`.

    A pair, as a complex number x at position i, becomes m e^(iota i theta) x, with its frequency theta and magnitude m.

    frequencies    [n], or [H, n] for each head, in radians per position
    pairing        which dimensions form a pair, counted from ``first``: ``half`` t and t + n (Llama, Qwen, Gemma),
                   ``interleaved`` 2t and 2t + 1 (GPT-J, Cohere)
    head_dim       dimensions of a head, d
    first          the first rotated dimension; those outside of ``first`` .. ``first`` + 2n - 1 are not rotated
    magnitude      m, for queries and for keys; 1 except for scaled rotations such as YaRN's
    pairing_after  which dimensions form a pair after the rotation (default: ``pairing``); DeepSeek-V3 reorders them
    num_heads      heads of the layer's queries, if known: then [B, N, H, d] is not taken for [B, H, N, d]

    Raises `InputError` for frequencies that do not fit the head or are not finite.
    """

    frequencies: Float[Tensor, "*_H n"]
    pairing: Pairing
    head_dim: int
    first: int = 0
    magnitude: float = 1.0
    pairing_after: Pairing | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        choose("pairing", self.pairing, get_args(Pairing))
        shape, free = self.frequencies.shape, self.head_dim - self.first
        if len(shape) not in (1, 2) or 2 * shape[-1] > free:
            raise invalid("rotation", f"have shape [n] or [H, n] with 2n <= {free}", got=f"shape {list(shape)}")
        if not self.frequencies.isfinite().all():
            raise invalid("rotation", "have finite frequencies", self.frequencies)
        frequencies = self.frequencies.detach().double()
        object.__setattr__(self, "frequencies", frequencies[0] if shape[:-1] == (1,) else frequencies)

    @property
    def num_pairs(self) -> int:
        """Number of pairs, n."""
        return self.frequencies.shape[-1]

    def groups(self, device: torch.device) -> Int[Tensor, "d"]:
        """The pair of each dimension before the rotation, as in `groups_of`."""
        return groups_of(self.num_pairs, self.pairing, self.head_dim, self.first, device)

    def rotate(self, x: Float[Tensor, "*B N d"], *, inverse: bool = False) -> Float[Tensor, "*B N d"]:
        """Queries or keys of the positions 0 .. N-1 after the rotation, or with ``inverse`` before it, in float64."""
        width, source, target = 2 * self.num_pairs, self.pairing, self.pairing_after or self.pairing
        if self.frequencies.ndim == 2 and x.shape[-3:-2] != self.frequencies.shape[:1]:
            heads = "one row, or one per head of q and of k"
            raise invalid("rotation", f"have {heads}", got=f"shape {list(self.frequencies.shape)}")
        before, rotated, after = x.double().split((self.first, width, self.head_dim - self.first - width), dim=-1)
        positions = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)
        phases = positions.unsqueeze(-1) * self.frequencies.to(x.device).unsqueeze(-2)
        factors = torch.polar(torch.full_like(phases, self.magnitude), phases)
        if inverse:
            source, target, factors = target, source, 1 / factors
        pairs = torch.complex(*split_pairs(rotated, source)) * factors
        return torch.cat((before, join_pairs(pairs.real, pairs.imag, target), after), dim=-1)

    def scale(self, x: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
        """Queries or keys with the magnitude, but not the angles, of the rotation."""
        if self.magnitude == 1:
            return x
        sizes = torch.ones(self.head_dim, dtype=torch.float64, device=x.device)
        sizes[self.first : self.first + 2 * self.num_pairs] = self.magnitude
        return x * sizes


def rope(*, dim: int, layout: Pairing, base: float = 10000.0, rotary_dim: int | None = None) -> RotaryPairs:
    """The rotation of RoPE, theta_t = base^(-2t/d), for queries and keys of any model.

    It is the argument ``rotation`` of the measures on tensors, such as `behaviour`. `rotation_of` reads it from a
    model; for scaled frequencies use that, or make `RotaryPairs` with them.

    Arguments
        dim         dimensions of a head (``head_dim`` in transformers)
        layout      which dimensions form a pair: ``half`` t and t + d/2 (Llama, Qwen, Gemma, GPT-NeoX), ``interleaved``
                    2t and 2t + 1 (GPT-J, Cohere)
        base        as in the model's configuration (``rope_theta``, default: 10000)
        rotary_dim  dimensions that are rotated, starting at the first, if not all are: in transformers ``rotary_dim``,
                    or ``partial_rotary_factor`` times ``head_dim`` (default: ``dim``)
    """
    require_even("dim", dim)
    rotary_dim = dim if rotary_dim is None else rotary_dim
    require_even("rotary_dim", rotary_dim)
    if rotary_dim > dim:
        raise invalid("rotary_dim", f"be at most {dim}, the dimensions of a head", rotary_dim)
    return RotaryPairs(rotary_frequencies(rotary_dim, base), choose("layout", layout, get_args(Pairing)), dim)


def rotation_of(
    model: Any,
    layer: int,
    tokens: Int[Tensor, "*_B N"] | None = None,
    *,
    side: Literal["encoder", "decoder"] | None = None,
) -> RotaryPairs:
    """The rotation of a layer of a transformers model, as its own pass shows it, with scaled frequencies if it has any.

    The model runs once, up to this layer. The rotation is what turns the layer's queries and keys before it into those
    after it, up to rounding; where this pass cannot tell a table of frequencies in the model from the measured ones,
    they are the table's.

    Arguments
        model   a `transformers.PreTrainedModel`, or its name or directory
        layer   from 0; only layers with attention count
        tokens  [B, N] or [N], for the pass (default: 64 different tokens). Needed if the rotation depends on the length
                of the text, as with the scalings ``dynamic`` and ``longrope``
        side    of an encoder-decoder model

    Raises `InputError` that says why if the layer has no rotation, or one that is not known to be of this form.
    """
    return import_module(_READER).read_rotation(model, layer, tokens, side)


def as_rotation(rotation: Any, pairing: Pairing | None, q: Float[Tensor, "*_B N d"]) -> RotaryPairs:
    """A rotation, or frequencies with their pairing, that fits the queries [..., H, N, d].

    There is no default pairing, as a wrong one gives wrong numbers.
    """
    width, heads = q.shape[-1], q.shape[-3] if q.ndim > 2 else 1
    if isinstance(rotation, Tensor):
        if pairing is None:
            allowed = "'half' (dimensions t and t + n, as in Llama) or 'interleaved' (2t and 2t + 1, as in GPT-J)"
            raise invalid("pairing", f"be {allowed} with a rotation by frequencies", None)
        rotation = RotaryPairs(rotation, pairing, width)
    if not isinstance(rotation, RotaryPairs):
        raise invalid("rotation", "be frequencies, an encoding, or come from lens.rope or lens.rotation_of", rotation)
    if pairing not in (None, rotation.pairing):
        raise invalid("pairing", f"be {rotation.pairing!r}, as in the rotation", pairing)
    if rotation.head_dim != width:
        raise invalid("rotation", f"be of {width} dimensions per head, as q has", rotation.head_dim)
    if rotation.frequencies.shape[:-1] not in ((), (heads,)):
        got = f"shape {list(rotation.frequencies.shape)}"
        raise invalid("rotation", f"have shape [n] or [{heads}, n] with 2n <= {width}", got=got)
    return rotation


def groups_of(pairs: int, pairing: Pairing, width: int, first: int, device: torch.device) -> Int[Tensor, "d"]:
    """The pair, from 1, of each of ``width`` dimensions, of which those from ``first`` on are rotated; 0 elsewhere."""
    numbers = torch.arange(1, pairs + 1, device=device)
    groups = torch.zeros(width, dtype=torch.long, device=device)
    groups[first : first + 2 * pairs] = numbers.repeat(2) if pairing == "half" else numbers.repeat_interleave(2)
    return groups
