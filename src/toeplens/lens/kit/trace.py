"""What attention works on, layer by layer: queries, keys, values as projected, and what the encoding makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import PositionalEncoding, Positions, attention_logits, attention_weights
from toeplens.encodings.seen import Seen
from toeplens.ground import InputError, choose, invalid

Counted = Literal["all", "used"]
Projection = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerTrace:
    """One layer's attention on a batch of B sequences, at the R positions that were chosen.

    layer       from 0
    inputs      [B, R, D] the residual stream that queries are made from, before its norm
    key_inputs  [B, R, D] what keys are made from; the same, but for protocols that take the raw embeddings
    added       [R, D] or [B, R, D] the position vectors added at the input of the model; None if not known
    q, k, v     [B, H, R, d], [B, G, R, d], [B, G, R, dv] as projected, before the encoding acts; query head h reads
                key head h // (H / G)
    encoding    what position does to this layer
    positions   the positions of the R tokens, as the encoding takes them
    rows        [R] their places in the sequence, increasing
    scale       factor of q . k
    causal      whether keys after the query's own are hidden
    lengths     [B] tokens before the padding, where padding is hidden; None if every token may be seen
    part        what parts of ``inputs`` and ``key_inputs`` give to q and k: bias-free, norms held at their value here
    notes       what the encoding notes of the tokens' content (see `PositionalEncoding.note`); None where it notes
                nothing or not all tokens are here
    whole       whether the R positions are all there are
    read        [B] the place in each sequence whose output alone the model uses of this layer; None where it uses all
    """

    layer: int
    inputs: Float[Tensor, "B R D"]
    key_inputs: Float[Tensor, "B R D"]
    added: Tensor | None
    q: Float[Tensor, "B H R d"]
    k: Float[Tensor, "B G R d"]
    v: Float[Tensor, "B G R dv"]
    encoding: PositionalEncoding
    positions: Positions
    rows: Int[Tensor, "R"]
    scale: float
    causal: bool
    lengths: Int[Tensor, "B"] | None
    part: Projection = field(repr=False)
    notes: Tensor | None = None
    whole: bool = True
    read: Int[Tensor, "B"] | None = None

    @property
    def vectors(self) -> Tensor | None:
        """The position vectors added at the input, where ``inputs`` is that input; else None."""
        return None if self.layer else self.added

    @cached_property
    def turned(self) -> tuple[Float[Tensor, "B H R e"], Float[Tensor, "B G R e"]]:
        """Queries and keys as they enter the inner product, after the encoding's rotation."""
        return self.turn(self.q, self.k)

    @torch.no_grad()
    def turn(
        self, q: Float[Tensor, "B H R d"], k: Float[Tensor, "B G R d"]
    ) -> tuple[Float[Tensor, "B H R e"], Float[Tensor, "B G R e"]]:
        """What the encoding's rotation makes of any queries and keys at these positions."""
        self._require_all("rotate")
        seen = Seen(q, k, self._index, self.notes, self.mask, self.causal, self.scale)
        return self.encoding.hook("rotate", q, k, self.positions, self.positions, seen=seen)

    @torch.no_grad()
    def logits(
        self,
        q: Tensor | None = None,
        k: Tensor | None = None,
        *,
        sequences: slice = slice(None),
        queries: Int[Tensor, "Q"] | None = None,
    ) -> Float[Tensor, "b H Q R"]:
        """The layer's own logits, formed as queries by keys; minus infinity where a key is not seen.

        Arguments
            q, k       other queries and keys in place of this layer's, [B, H, R, d] and [B, G, R, d]
            sequences  which of the batch; all unless given
            queries    which of the R queries; all unless given
        """
        k = self.k if k is None else k
        return self.formed(attention_logits, self.q if q is None else q, k[sequences], sequences, queries)

    @torch.no_grad()
    def weights(
        self, *, sequences: slice = slice(None), queries: Int[Tensor, "Q"] | None = None
    ) -> Float[Tensor, "b H Q R"]:
        """The layer's attention weights, formed as queries by keys: what the values are weighed with. As `logits`."""
        self._require_all("transform_weights")
        return self.formed(attention_weights, self.q, self.k[sequences], sequences, queries)

    def formed(
        self,
        form: Callable[..., Tensor],
        q: Float[Tensor, "B H R d"],
        k: Float[Tensor, "b G R d"],
        sequences: slice | Int[Tensor, "b"],
        queries: Int[Tensor, "*_b Q"] | None,
    ) -> Float[Tensor, "b H Q R"]:
        """What ``form`` makes of queries and of the chosen sequences' keys, differentiable in them.

        Arguments
            queries  which of the R queries: [Q] the same of all chosen sequences, or [b, Q]; all if None
        """
        for hook in ("rotate", "score", "bias", "transform_logits"):
            self._require_all(hook)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # grouped queries: a key head serves several
        mask, notes = self.mask, self.notes
        places = self.positions[sequences] if self.encoding.by_sequence(self.positions) else self.positions
        rows = self._index if queries is None else queries
        each = torch.arange(len(k), device=k.device)[:, None]
        chosen = q[sequences]
        return form(
            chosen[:, :, rows] if rows.ndim == 1 else chosen.transpose(1, 2)[each, rows].transpose(1, 2),
            k,
            encoding=self.encoding,
            q_positions=places[each, rows] if self.encoding.by_sequence(self.positions) else places[rows],
            k_positions=places,
            scale=self.scale,
            rows=rows,
            notes=None if notes is None else notes[sequences],
            mask=None if mask is None else mask[sequences],
            causal=self.causal,
        )

    @property
    def mask(self) -> Bool[Tensor, "B 1 1 R"] | None:
        """True where a key may be seen, padding apart; None if all may."""
        return None if self.lengths is None else self.present[:, None, None, :]

    @property
    def present(self) -> Bool[Tensor, "B R"]:
        """True where a sequence has a token that counts: not hidden padding."""
        if self.lengths is None:
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.rows < self.lengths.unsqueeze(1)

    def counted(self, which: Counted) -> Bool[Tensor, "B R"]:
        """The queries that count: ``all`` that are present, or those ``used``, whose output goes on in the model."""
        choose("counted", which, get_args(Counted))
        if which == "all" or self.read is None:
            return self.present
        return self.present & (self.rows == self.read.unsqueeze(1))

    @property
    def kept_lengths(self) -> Int[Tensor, "B"] | None:
        """How many of the R positions each sequence has; None if every token may be seen."""
        return None if self.lengths is None else self.present.sum(1)

    @property
    def consecutive(self) -> bool:
        """Whether the positions run on one by one, so that a difference of places is an offset."""
        places = self.positions
        if self.encoding.axes > 1:
            return bool((self.rows.diff() == 1).all())
        return bool((places.diff(dim=-1) == 1).all())

    @property
    def _index(self) -> Int[Tensor, "R"]:
        return torch.arange(len(self.rows), device=self.rows.device)

    def _require_all(self, hook: str) -> None:
        if not self.whole and hook in self.encoding._seeing:
            raise InputError(
                f"positions must not be set for {type(self.encoding).__name__}, which depends on the content of other "
                "tokens."
            )


@runtime_checkable
class Traceable(Protocol):
    """What a trace needs of a source."""

    num_layers: int

    def attention(
        self,
        tokens: Tensor,
        lengths: Tensor | None,
        *,
        layers: Sequence[int],
        positions: Tensor | None,
        positional: bool = True,
    ) -> Iterator[LayerTrace]:
        """The chosen layers in order, one at a time; ``positional=False`` with the encoding switched off."""
        ...


class AttentionTrace:
    """A batch's attention in the chosen layers; each is formed when asked for, and one lives at a time.

    Going through the layers in order costs one forward pass; asking for an earlier one starts over.

    Arguments
        source     a model that can be traced (`toeplens.sources`)
        tokens     token ids [B, N]
        lengths    tokens of each sequence before its padding
        layers     which layers, from 0; all unless given
        positions  which places in the sequence are kept, increasing; all unless given
    """

    def __init__(
        self,
        source: Traceable,
        tokens: Int[Tensor, "B N"],
        lengths: Int[Tensor, "B"] | None = None,
        *,
        layers: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        self.source, self.tokens, self.lengths = source, tokens, lengths
        self.layers = tuple(range(source.num_layers)) if layers is None else tuple(sorted(set(layers)))
        if not self.layers or self.layers[0] < 0 or self.layers[-1] >= source.num_layers:
            raise invalid("layers", f"be from 0 to {source.num_layers - 1}", list(self.layers))
        self.positions = None
        if positions is not None:
            kept = torch.as_tensor(list(positions), dtype=torch.long)
            length = tokens.shape[1]
            if len(kept) == 0 or kept.min() < 0 or kept.max() >= length or (kept.diff() <= 0).any():
                raise invalid("positions", f"increase and lie from 0 to {length - 1}", kept.tolist()[:8])
            self.positions = kept.to(tokens.device)
        self._positional = True
        self._bare: AttentionTrace | None = None
        self._running: Iterator[LayerTrace] = iter(())
        self._current: LayerTrace | None = None

    def __iter__(self) -> Iterator[LayerTrace]:
        for layer in self.layers:
            yield self[layer]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerTrace:
        if layer not in self.layers:
            raise invalid("layer", f"be one of the traced layers {', '.join(map(str, self.layers))}", layer)
        if self._current is not None and self._current.layer == layer:
            return self._current
        if self._current is None or layer < self._current.layer:
            self._running = self.source.attention(
                self.tokens, self.lengths, layers=self.layers, positions=self.positions, positional=self._positional
            )
        self._current = None
        for found in self._running:
            if found.layer == layer:
                self._current = found
                return found
        raise InputError(f"layer: the forward pass did not reach layer {layer}.")

    def without_position(self, layer: int) -> LayerTrace:
        """The layer in a pass of the same tokens with the encoding switched off in the whole model."""
        if self._bare is None:
            self._bare = AttentionTrace(self.source, self.tokens, self.lengths, layers=self.layers)
            self._bare.positions, self._bare._positional = self.positions, False
        return self._bare[layer]
