"""Traces of attention, layer by layer: queries, keys and values as projected, and the encoding's effect on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import FrequencyMask, PositionalEncoding, Positions, attention_logits, attention_weights
from toeplens.encodings.base import AttentionInputs
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.renamed import renamed

CountedQueries = Literal["all", "used"]
Projection = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@renamed
@dataclass(frozen=True)
class LayerTrace:
    """One layer's attention on a batch of B sequences, at the R chosen positions.

    inputs             [B, R, D] the residual stream that queries are computed from, before its norm
    key_inputs         [B, R, D] the input of the keys; differs only for protocols that use the raw embeddings
    position_vectors   [R, D] or [B, R, D] the vectors added at the input of the model; None if not known
    q, k, v            [B, H, R, d], [B, G, R, d], [B, G, R, dv] as projected, before the encoding acts; query head h
                       reads key head h // (H / G)
    encoding           the positional encoding of this layer
    positions          the positions of the R tokens, as passed to the encoding
    rows               [R] their indices in the sequence, increasing
    scale              factor of q . k
    causal             whether keys after the query are masked
    lengths            [B] number of tokens before the padding, if padding is masked; None if every token is visible
    project_part       maps parts of ``inputs`` and ``key_inputs`` to q and k: without bias, norm statistics fixed
    key_features       those of the tokens' content (`PositionalEncoding.key_features`), if all tokens are traced
    has_all_positions  whether the R positions are the whole sequence
    read_position      [B] the only position in each sequence whose output the model uses; None if it uses all
    """

    layer: int
    inputs: Float[Tensor, "B R D"]
    key_inputs: Float[Tensor, "B R D"]
    position_vectors: Tensor | None
    q: Float[Tensor, "B H R d"]
    k: Float[Tensor, "B G R d"]
    v: Float[Tensor, "B G R dv"]
    encoding: PositionalEncoding
    positions: Positions
    rows: Int[Tensor, "R"]
    scale: float
    causal: bool
    lengths: Int[Tensor, "B"] | None
    project_part: Projection = field(repr=False)
    key_features: Tensor | None = None
    has_all_positions: bool = True
    read_position: Int[Tensor, "B"] | None = None

    @property
    def input_position_part(self) -> Tensor | None:
        """The position vectors added at the input, if ``inputs`` is that input; otherwise None."""
        return None if self.layer else self.position_vectors

    @cached_property
    def rotated(self) -> tuple[Float[Tensor, "B H R e"], Float[Tensor, "B G R e"]]:
        """Queries and keys as they enter the inner product, after the encoding's rotation."""
        return self.rotate(self.q, self.k)

    @torch.no_grad()
    def rotate(
        self, q: Float[Tensor, "B H R d"], k: Float[Tensor, "B G R d"]
    ) -> tuple[Float[Tensor, "B H R e"], Float[Tensor, "B G R e"]]:
        """Apply the encoding's rotation to any queries and keys at these positions."""
        self._require_all_positions("rotate")
        inputs = AttentionInputs(q, k, self._row_index, self.key_features, self.mask, self.causal, self.scale)
        return self.encoding.call_hook("rotate", q, k, self.positions, self.positions, inputs=inputs)

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
        return self.call_attention(attention_logits, self.q if q is None else q, k[sequences], sequences, queries)

    @torch.no_grad()
    def weights(
        self, *, sequences: slice = slice(None), queries: Int[Tensor, "Q"] | None = None
    ) -> Float[Tensor, "b H Q R"]:
        """The layer's attention weights as applied to the values; arguments as for `logits`."""
        self._require_all_positions("transform_weights")
        return self.call_attention(attention_weights, self.q, self.k[sequences], sequences, queries)

    def call_attention(
        self,
        function: Callable[..., Tensor],
        q: Float[Tensor, "B H R d"],
        k: Float[Tensor, "b G R d"],
        sequences: slice | Int[Tensor, "b"],
        queries: Int[Tensor, "*_b Q"] | None,
    ) -> Float[Tensor, "b H Q R"]:
        """Apply ``function`` to some queries (equal for all sequences or not) and keys, differentiable in them."""
        for hook in ("rotate", "score", "bias", "transform_logits"):
            self._require_all_positions(hook)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # grouped queries share a key head
        mask, key_features = self.mask, self.key_features
        per_sequence = self.encoding.is_per_sequence(self.positions)
        positions = self.positions[sequences] if per_sequence else self.positions
        rows = self._row_index if queries is None else queries
        batch_index = torch.arange(len(k), device=k.device)[:, None]
        q = q[sequences]
        return function(
            q[:, :, rows] if rows.ndim == 1 else q.transpose(1, 2)[batch_index, rows].transpose(1, 2),
            k,
            encoding=self.encoding,
            q_positions=positions[batch_index, rows] if per_sequence else positions[rows],
            k_positions=positions,
            scale=self.scale,
            rows=rows,
            key_features=None if key_features is None else key_features[sequences],
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

    def query_mask(self, queries: CountedQueries) -> Bool[Tensor, "B R"]:
        """The queries that count: ``all`` that are present, or those ``used``, whose output the model uses."""
        choose("counted", queries, get_args(CountedQueries))
        if queries == "all" or self.read_position is None:
            return self.present
        return self.present & (self.rows == self.read_position.unsqueeze(1))

    @property
    def traced_lengths(self) -> Int[Tensor, "B"] | None:
        """How many of the R positions each sequence has; None if every token is visible."""
        return None if self.lengths is None else self.present.sum(1)

    @property
    def is_consecutive(self) -> bool:
        """Whether the positions are consecutive, so that differences of indices are offsets."""
        positions = self.rows if self.encoding.axes > 1 else self.positions
        return bool((positions.diff(dim=-1) == 1).all())

    @property
    def _row_index(self) -> Int[Tensor, "R"]:
        return torch.arange(len(self.rows), device=self.rows.device)

    def _require_all_positions(self, hook: str) -> None:
        if not self.has_all_positions and hook in self.encoding._inputs_argument:
            raise InputError(
                f"positions must not be set for {type(self.encoding).__name__}, which depends on the content of other "
                "tokens."
            )


# for each layer [1 or b, N, H, head_dim]; or each head's own output with its encoding switched off; or nothing
Replacement = list[Tensor] | Literal["position"] | None


@runtime_checkable
class Source(Protocol):
    """A model that can be traced and replayed, such as `toeplens.backends.DecoderSource`.

    ``pairs_per_layer`` is the number of rotated pairs of dimensions in each layer; 0 without a rotation.
    """

    num_layers: int
    num_heads: int

    @property
    def pairs_per_layer(self) -> Sequence[int]: ...

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

    def head_outputs(self, tokens: Tensor, lengths: Tensor | None) -> Iterable[Float[Tensor, "b N H head_dim"]]:
        """For each layer in order, the head outputs z at all positions, padding included."""
        ...

    def head_outputs_with(self, state: Any, frequency_mask: FrequencyMask) -> Float[Tensor, "b N H head_dim"]:
        """The head outputs of the state's layer at all positions, with a mask of its frequencies."""
        ...

    def replay(
        self, state: Any, gains: Float[Tensor, "V *K H"], replacement: Replacement = None
    ) -> Float[Tensor, "V b *N C"]:
        """Class logits with the head outputs changed to gain * z + (1 - gain) * replacement, in V ways.

        Gains and replacements are those of the state's layer, or of that layer and the K - 1 after it.
        """
        ...

    def scale_heads(
        self, tokens: Tensor, lengths: Tensor | None, gains: Float[Tensor, "L b H"], replacement: Replacement = None
    ) -> Float[Tensor, "b *N C"]:
        """Class logits with separate gains on the heads per sequence, differentiable in the gains (attribution)."""
        ...


class AttentionTrace:
    """A batch's attention in the chosen layers; layers are computed when accessed, and only one is kept at a time.

    Iterating over the layers in order takes one forward pass; accessing an earlier layer starts another.

    Arguments
        source     a model that can be traced (`toeplens.backends`)
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
            chosen = torch.as_tensor(list(positions), dtype=torch.long)
            length = tokens.shape[1]
            if len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= length or (chosen.diff() <= 0).any():
                raise invalid("positions", f"increase and lie from 0 to {length - 1}", chosen.tolist()[:8])
            self.positions = chosen.to(tokens.device)
        self._positional = True
        self._trace_without_position: AttentionTrace | None = None
        self._layer_iterator: Iterator[LayerTrace] = iter(())
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
            self._layer_iterator = self.source.attention(
                self.tokens, self.lengths, layers=self.layers, positions=self.positions, positional=self._positional
            )
        self._current = None
        for layer_trace in self._layer_iterator:
            if layer_trace.layer == layer:
                self._current = layer_trace
                return layer_trace
        raise InputError(f"layer: the forward pass did not reach layer {layer}.")

    def without_position(self, layer: int) -> LayerTrace:
        """The layer in a pass over the same tokens with the encoding switched off in the whole model."""
        if self._trace_without_position is None:
            self._trace_without_position = AttentionTrace(self.source, self.tokens, self.lengths, layers=self.layers)
            self._trace_without_position.positions, self._trace_without_position._positional = self.positions, False
        return self._trace_without_position[layer]
