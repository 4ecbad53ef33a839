"""The contract of a positional encoding: what position may do to attention, and where it enters."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.ground import InputError

Coupling = Literal["none", "input", "bias", "rotation", "concatenation", "logits", "weights", "accumulated"]
Positions = Int[Tensor, "_"] | Int[Tensor, "B _"]  # unnamed: queries and keys may differ in number


class PositionalEncoding(nn.Module):
    """What position does to attention, through whichever of six hooks an encoding needs.

    A subclass overrides only the hooks through which it acts; the others stay neutral. Every hook takes the
    positions explicitly, as integers of shape [N] (the same for every sequence) or [B, N] (one row a sequence),
    so offset windows, packed sequences and decoding with a key cache are all the same call.

    Class facts
        coupling        where position enters attention (see `Coupling`)
        data_dependent  whether the position part depends on the tokens' content
        toeplitz        whether the position part is a function of the offset i - j alone
        bounded         whether positions must stay under ``max_len``
        citation        where the scheme was published
        layers          the layers on which it acts, counted from 0; None for all
    """

    coupling: ClassVar[Coupling] = "none"
    data_dependent: ClassVar[bool] = False
    toeplitz: bool = True
    bounded: ClassVar[bool] = False
    citation: ClassVar[str] = ""
    layers: frozenset[int] | None = None

    def __init__(self, *, d_model: int, num_heads: int, head_dim: int, max_len: int) -> None:
        super().__init__()
        for field, value in (
            ("d_model", d_model),
            ("num_heads", num_heads),
            ("head_dim", head_dim),
            ("max_len", max_len),
        ):
            if value < 1:
                raise InputError(f"{field}: {value} was given; it must be at least 1.")
        if self.coupling not in get_args(Coupling):
            raise InputError(
                f"coupling: {self.coupling!r} was declared; it must be one of {', '.join(get_args(Coupling))}."
            )
        self.d_model, self.num_heads, self.head_dim, self.max_len = d_model, num_heads, head_dim, max_len
        self._exact: set[str] = set()

    # ---- the hooks ------------------------------------------------------------------------------------------------

    def embed(self, x: Float[Tensor, "B N d_model"], positions: Positions) -> Float[Tensor, "B N d_model"]:
        """Add position to the token embeddings, once, before the first layer."""
        return x

    def rotate(
        self,
        q: Float[Tensor, "B H Nq d"],
        k: Float[Tensor, "B H Nk d"],
        q_positions: Positions,
        k_positions: Positions,
    ) -> tuple[Float[Tensor, "B H Nq d"], Float[Tensor, "B H Nk d"]]:
        """Act on queries and keys before their inner product."""
        return q, k

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"] | None:
        """A term added to the scaled logits: [H, Nq, Nk], or [B, H, Nq, Nk] for positions by sequence; or None."""
        return None

    def transform_logits(
        self, logits: Float[Tensor, "B H Nq Nk"], q_positions: Positions, k_positions: Positions
    ) -> Float[Tensor, "B H Nq Nk"]:
        """Change the logits before the mask and the softmax. Overriding it takes the explicit path."""
        return logits

    def transform_weights(
        self, weights: Float[Tensor, "B H Nq Nk"], q_positions: Positions, k_positions: Positions
    ) -> Float[Tensor, "B H Nq Nk"]:
        """Change the attention weights after the softmax. Overriding it takes the explicit path."""
        return weights

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"] | Complex[Tensor, "H n D"] | None:
        """The position kernel at offsets i - j: real [H, D] for a bias, complex [H or 1, n, D] for a rotation.

        None where position has no kernel that is a function of the offset alone.
        """
        return None

    # ---- how a model uses it --------------------------------------------------------------------------------------

    def for_layer(self, layer: int) -> PositionalEncoding:
        """The encoding as layer ``layer`` (from 0) sees it; itself where all layers share it."""
        return self

    @property
    def fusable(self) -> bool:
        """Whether fused attention can carry it: it leaves logits and weights to rotation and bias."""
        kind = type(self)
        return (
            kind.transform_logits is PositionalEncoding.transform_logits
            and kind.transform_weights is PositionalEncoding.transform_weights
        )

    def check_positions(self, positions: Positions) -> None:
        """Refuse positions that a table of ``max_len`` rows does not hold."""
        if not self.bounded or torch.compiler.is_compiling() or positions.numel() == 0:
            return
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.max_len:
            raise InputError(
                f"max_len: position {high if high >= self.max_len else low} was asked for; "
                f"this table holds positions 0 to {self.max_len - 1}."
            )

    def register_exact(self, name: str, value: Tensor) -> None:
        """Keep ``value`` as a buffer that moves between devices but never changes its dtype.

        ``model.half()`` and ``model.to(torch.bfloat16)`` must not touch what phases are made from: bfloat16 holds
        no integer over 256 exactly. The buffer is derived from the options, so it is not part of the state dict.
        """
        self.register_buffer(name, value, persistent=False)
        self._exact.add(name)

    def _apply(self, fn: Any, recurse: bool = True) -> PositionalEncoding:
        kept = {name: self._buffers[name] for name in self._exact}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            moved = self._buffers[name]
            assert value is not None
            assert moved is not None
            self._buffers[name] = value.to(moved.device)
        return self


def offsets_between(q_positions: Positions, k_positions: Positions) -> Int[Tensor, "*B Nq Nk"]:
    """Signed offsets i - j, query minus key: [Nq, Nk], or [B, Nq, Nk] where either has a row a sequence."""
    return q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)


def require_even(field: str, value: int, why: str) -> None:
    """Refuse an odd size where dimensions are taken in pairs."""
    if value % 2 or value < 2:
        raise InputError(f"{field}: {value} was given; {why}, so it must be even and at least 2.")
