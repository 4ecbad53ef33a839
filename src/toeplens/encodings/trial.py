"""Encodings that act together, tried on three tokens: what one cannot read of another is found before it is used."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from toeplens.encodings.accord import quoted
from toeplens.encodings.attention import attention_weights
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Positions
from toeplens.encodings.tempered import Tempered
from toeplens.ground import InputError

_TOKENS, _FARTHEST = 3, 64


class Trial:
    """A few random tokens before an encoding and its parts.

    Arguments
        whole  the parts as one
        parts  by name
    """

    def __init__(
        self, whole: PositionalEncoding, parts: Mapping[str, PositionalEncoding], device: torch.device
    ) -> None:
        self.whole, self.parts = whole, parts
        length = min(_TOKENS, whole.max_len)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(1, length, whole.d_model, generator=generator).to(device)
        self.q, self.k = torch.randn(2, 1, whole.num_heads, length, whole.query_dim, generator=generator).to(device)
        end = min(whole.max_len, _FARTHEST)
        tokens = torch.arange(end - length, end, device=device)
        tokens[0] = 0  # far from the others
        self.positions: Positions = whole.place(tokens) if whole.axes > 1 else tokens

    def run(self) -> bool:
        """Refuse what cannot act together; give whether logits come to depend on content, through a rotation."""
        try:
            attention_weights(
                self.q,
                self.k,
                encoding=self.whole,
                q_positions=self.positions,
                k_positions=self.positions,
                scale=self.whole.scale,
                notes=self.whole.note(self.x),
            )
        except Exception as error:  # whatever their own code raises
            raise InputError(
                f"encoding: {quoted(self.parts)} do not go together: one of them cannot read what another makes of "
                f"queries and keys."
            ) from error
        found = False
        for name, part in self.parts.items():
            if part.overrides("transform_logits"):
                self._loses_nothing(name, part)
                found = found or self._reads_turned(name, part)
        return found

    def _loses_nothing(self, name: str, part: PositionalEncoding) -> None:
        """Refuse a `transform_logits` that forms logits anew, or once more after the softmax, beside others' terms."""
        for other, its in self.parts.items():
            hook = next((hook for hook in ("score", "bias") if its.overrides(hook)), None)
            if other == name or hook is None:
                continue
            made = [self._transformed(part, self.q, self.k, more) for more in (0.0, 1.0)]
            if part.overrides("transform_weights") or torch.equal(*made):
                raise InputError(
                    f"encoding: {name!r} forms logits anew from queries and keys (transform_logits), so that the "
                    f"{hook} of {other!r} would be lost."
                )

    def _reads_turned(self, name: str, part: PositionalEncoding) -> bool:
        """Whether what a `transform_logits` makes of turned queries and keys is no sum of products with them.

        Refused where the turn of a query is not its own: xPos scales queries and keys about the middle of the text, and
        only their product is a function of their two places.
        """
        turning = {n: p for n, p in self.parts.items() if p.overrides("rotate") and not isinstance(p, Tempered)}
        if "transform_logits" not in part._seeing or not turning:
            return False
        mixing, _ = torch.linalg.qr(torch.randn(self.q.shape[-1], self.q.shape[-1], generator=_generator()))
        mixing = mixing.to(self.q)
        part = _anywhere(part)
        apart = not _near(
            self._transformed(part, self.q @ mixing, self.k @ mixing), self._transformed(part, self.q, self.k)
        )
        for other, its in turning.items():
            if apart and "rotate" not in its._seeing and not self._is_own(its):
                raise InputError(
                    f"encoding: {name!r} reads queries and keys themselves (transform_logits), which {other!r} scales "
                    f"by where the text begins and ends (rotate)."
                )
        if not apart:
            return False
        one, two, three = (self._transformed(part, n * self.q, n * self.k) for n in (1, 2, 3))
        return not _near(three - two, two - one)

    def _transformed(self, part: PositionalEncoding, q: Tensor, k: Tensor, more: float = 0.0) -> Tensor:
        logits = self.q @ self.k.transpose(-2, -1) * self.whole.scale + more
        seen = Seen.of(q, k, notes=part.note(self.x), scale=self.whole.scale)
        return part.hook("transform_logits", logits, self.positions, self.positions, seen=seen)

    def _is_own(self, part: PositionalEncoding) -> bool:
        """Whether a query's turn stays what it is when there are fewer keys before it."""
        q, k, p = self.q[..., 1:, :], self.k[..., 1:, :], self.positions[1:]
        return _near(
            part.rotate(q, k, p, p)[0], part.rotate(self.q, self.k, self.positions, self.positions)[0][..., 1:, :]
        )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _anywhere(part: PositionalEncoding) -> PositionalEncoding:
    """A copy with random parameters: a start may be 0, where much that differs looks alike."""
    moved, generator = copy.deepcopy(part), _generator()
    for parameter in moved.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return moved


def _near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)
