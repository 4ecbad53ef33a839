"""Traces of attention, layer by layer: queries, keys and values as projected, and the encoding's effect on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import BandControl, PositionalEncoding, Positions, attention_logits, attention_weights
from toeplens.encodings.base import Seen
from toeplens.ground import InputError, choose, invalid

Counted = Literal["all", "used"]
Projection = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerTrace:
    """One layer's attention on a batch of B sequences, at the R chosen positions.

    inputs      [B, R, D] the residual stream that queries are computed from, before its norm
    key_inputs  [B, R, D] the input of the keys; differs only for protocols that use the raw embeddings
    added       [R, D] or [B, R, D] the position vectors added at the input of the model; None if not known
    q, k, v     [B, H, R, d], [B, G, R, d], [B, G, R, dv] as projected, before the encoding acts; query head h reads
                key head h // (H / G)
    encoding    the positional encoding of this layer
    positions   the positions of the R tokens, as passed to the encoding
    rows        [R] their indices in the sequence, increasing
    scale       factor of q . k
    causal      whether keys after the query are masked
    lengths     [B] number of tokens before the padding, if padding is masked; None if every token is visible
    part        maps parts of ``inputs`` and ``key_inputs`` to q and k: without bias, norm statistics fixed
    notes       what the encoding reads from the tokens' content (`PositionalEncoding.note`), if all tokens are traced
    whole       whether the R positions are the whole sequence
    read        [B] the position in each sequence whose output is the only one that the model uses; None if it uses all
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
        """The position vectors added at the input, if ``inputs`` is that input; otherwise None."""
        return None if self.layer else self.added

    @cached_property
    def turned(self) -> tuple[Float[Tensor, "B H R e"], Float[Tensor, "B G R e"]]:
        """Queries and keys as they enter the inner product, after the encoding's rotation."""
        return self.turn(self.q, self.k)

    @torch.no_grad()
    def turn(
        self, q: Float[Tensor, "B H R d"], k: Float[Tensor, "B G R d"]
    ) -> tuple[Float[Tensor, "B H R e"], Float[Tensor, "B G R e"]]:
        """Apply the encoding's rotation to any queries and keys at these positions."""
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
        """The logits of some sequences' queries (default: all), minus infinity for masked keys.

        ``q`` and ``k`` replace this layer's queries and keys, [B, H, R, d] and [B, G, R, d].
        """
        k = self.k if k is None else k
        return self.formed(attention_logits, self.q if q is None else q, k[sequences], sequences, queries)

    @torch.no_grad()
    def weights(
        self, *, sequences: slice = slice(None), queries: Int[Tensor, "Q"] | None = None
    ) -> Float[Tensor, "b H Q R"]:
        """The layer's attention weights as applied to the values; arguments as for `logits`."""
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
        """Apply ``form`` to some queries (equal for all chosen sequences or not) and keys, differentiable in them."""
        for hook in ("rotate", "score", "bias", "transform_logits"):
            self._require_all(hook)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # grouped queries share a key head
        mask, notes = self.mask, self.notes
        places = self.positions[sequences] if self.encoding.by_sequence(self.positions) else self.positions
        rows = self._index if queries is None else queries
        each = torch.arange(len(k), device=k.device)[:, None]
        q = q[sequences]
        return form(
            q[:, :, rows] if rows.ndim == 1 else q.transpose(1, 2)[each, rows].transpose(1, 2),
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
        """True where a key is not masked padding; None if there is none."""
        return None if self.lengths is None else self.present[:, None, None, :]

    @property
    def present(self) -> Bool[Tensor, "B R"]:
        """False at masked padding."""
        if self.lengths is None:
            return torch.ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool, device=self.q.device)
        return self.rows < self.lengths.unsqueeze(1)

    def counted(self, which: Counted) -> Bool[Tensor, "B R"]:
        """The queries that count: ``all`` that are present, or those ``used``, whose output the model uses."""
        choose("counted", which, get_args(Counted))
        if which == "all" or self.read is None:
            return self.present
        return self.present & (self.rows == self.read.unsqueeze(1))

    @property
    def kept_lengths(self) -> Int[Tensor, "B"] | None:
        """How many of the R positions each sequence has; None if every token is visible."""
        return None if self.lengths is None else self.present.sum(1)

    @property
    def consecutive(self) -> bool:
        """Whether the positions are consecutive, so that differences of indices are offsets."""
        places = self.rows if self.encoding.axes > 1 else self.positions
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


# for each layer [1 or b, N, H, head_dim]; or each head's own output with its encoding switched off; or nothing
Replacement = list[Tensor] | Literal["position"] | None


@runtime_checkable
class Source(Protocol):
    """A model that can be traced and replayed, such as `toeplens.sources.DecoderSource`.

    ``pairs`` is the number of rotated pairs of dimensions in each layer; 0 without a rotation.
    """

    num_layers: int
    num_heads: int

    @property
    def pairs(self) -> Sequence[int]: ...

    def attention(
        self,
        tokens: Tensor,
        lengths: Tensor | None,
        *,
        layers: Sequence[int],
        positions: Tensor | None,
        positional: bool = True,
    ) -> Iterator[LayerTrace]:
        """The chosen layers in order, one at a time; with ``positional=False`` the encoding is switched off."""
        ...

    def states(self, tokens: Tensor, lengths: Tensor | None) -> Iterable[Any]:
        """For each layer in order, an opaque state from which `replay` continues at that layer."""
        ...

    def outputs(self, tokens: Tensor, lengths: Tensor | None) -> Iterable[Float[Tensor, "b N H head_dim"]]:
        """For each layer in order, the head outputs z at all positions, padding included."""
        ...

    def outputs_under(self, state: Any, control: BandControl) -> Float[Tensor, "b N H head_dim"]:
        """The head outputs of the state's layer at all positions, under the control of its frequencies."""
        ...

    def replay(
        self, state: Any, gains: Float[Tensor, "V *K H"], replacement: Replacement = None
    ) -> Float[Tensor, "V b *N C"]:
        """Class logits with the head outputs changed to gain * z + (1 - gain) * replacement, in V ways.

        Gains and replacements are those of the state's layer, or of that layer and the K - 1 after it.
        """
        ...

    def scaled(
        self, tokens: Tensor, lengths: Tensor | None, gains: Float[Tensor, "L b H"], replacement: Replacement = None
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with separate gains on the heads per sequence, differentiable in the gains (attribution)."""
        ...


class AttentionTrace:
    """A batch's attention in the chosen layers; layers are computed when accessed, and only one is kept at a time.

    Iterating over the layers in order takes one forward pass; accessing an earlier layer starts another.

    Arguments
        source     a model that can be traced (`toeplens.sources`)
        lengths    number of tokens of each sequence before its padding
        layers     which layers, from 0 (default: all)
        positions  which positions to keep, increasing (default: all)
    """

    def __init__(
        self,
        source: Source,
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
        """The layer in a pass over the same tokens with the encoding switched off in the whole model."""
        if self._bare is None:
            self._bare = AttentionTrace(self.source, self.tokens, self.lengths, layers=self.layers)
            self._bare.positions, self._bare._positional = self.positions, False
        return self._bare[layer]
