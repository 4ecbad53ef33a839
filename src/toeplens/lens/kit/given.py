"""What may be given beside queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from torch import Tensor

from toeplens.encodings import PositionalEncoding
from toeplens.encodings.rotary import Pairing
from toeplens.ground import InputError
from toeplens.lens.kit.toeplitz import Layout
from toeplens.lens.kit.trace import Counted

KeySplit = Literal["known", "none", "input", "mean", "ablate"]


class Around(TypedDict, total=False):
    """What may be given beside queries and keys: the fields of `Given`, whose defaults hold where one is not."""

    rotation: Tensor | PositionalEncoding | None
    pairing: Pairing | None
    layout: Layout | None
    bias: Tensor | None
    k_position: Tensor | None
    causal: bool
    scale: float
    lengths: Tensor | None
    split: KeySplit
    counted: Counted
    window: int | None
    chunk: int | None


@dataclass(frozen=True)
class Given:
    """What is given beside queries and keys; each is told of at `toeplens.lens.following.behaviour.behaviour`."""

    rotation: Tensor | PositionalEncoding | None = None
    pairing: Pairing | None = None
    layout: Layout | None = None
    bias: Tensor | None = None
    k_position: Tensor | None = None
    causal: bool = True
    scale: float = 1.0
    lengths: Tensor | None = None
    split: KeySplit = "known"
    counted: Counted = "all"
    window: int | None = None
    chunk: int | None = None

    def require_trace_alone(self, k: Tensor | None) -> None:
        """Refuse what a trace has of its own."""
        for name, value in {"k": k, **vars(self)}.items():
            if name not in ("causal", "scale", "split", "counted") and value is not None:
                raise InputError(f"{name}: it was given beside a trace; a trace has its own.")
