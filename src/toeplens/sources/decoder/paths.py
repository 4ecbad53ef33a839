"""Path patching: cut the paths from one head's output to its later readers, one at a time or together."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.encodings import attend
from toeplens.model import Block, Context, Decoder

Reader = Literal["queries", "keys", "values", "ffn", "readout"]


class Path(NamedTuple):
    """From a head directly to its reader: queries, keys or values of a layer, its FFN, or the readout.

    The readout's layer is the number of layers.
    """

    layer: int
    reader: Reader


def paths_from(model: Decoder, layer: int) -> list[Path]:
    """All paths from a head of ``layer``, in the order in which they are read.

    If keys and values are computed from the input embeddings, they read no head.
    """
    attended: tuple[Reader, ...] = ("queries", "keys", "values")
    if model.config.key_value_source == "embeddings":
        attended = ("queries",)
    found = [Path(layer, "ffn")]
    for later in range(layer + 1, model.config.num_layers):
        found += [*(Path(later, reader) for reader in attended), Path(later, "ffn")]
    return [*found, Path(model.config.num_layers, "readout")]


@torch.no_grad()
def cut_paths(
    model: Decoder,
    tokens: Int[Tensor, "b N"],
    lengths: Int[Tensor, "b"] | None,
    head: tuple[int, int],
    cuts: Collection[Path],
) -> Float[Tensor, "b *N C"]:
    """Class logits of a pass in which these readers do not see what a head adds to the residual stream.

    A cut reader reads the stream without the head's direct contribution, its output through W_O; indirect contributions
    through other components stay. Everything after a cut reader sees the changed values. With no path cut this is the
    plain pass; with all paths cut the head is ablated (path patching with zero, after Goldowsky-Dill et al. 2023).

    Arguments
        head  layer and head, from 0
        cuts  paths from `paths_from` the head's layer
    """
    first, index = head
    x, context = model.begin(tokens, lengths)
    for layer in range(first):
        x = model.block(layer).finish(x, model.block(layer).heads(x, context, read=None, fused=True)[1])
    block = model.block(first)
    z = block.heads(x, context, read=None, fused=True)[1]
    size = z.shape[-1]
    own = F.linear(z[:, :, index], block.attention.out.weight[:, index * size : (index + 1) * size])
    x = _fed(block, x + block.attention.merge(z), own, Path(first, "ffn") in cuts)
    for layer in range(first + 1, model.config.num_layers):
        block = model.block(layer)
        missed = {reader: own if Path(layer, reader) in cuts else None for reader in ("queries", "keys", "values")}
        x = x + block.attention.merge(_attended(block, x, context, missed))
        x = _fed(block, x, own, Path(layer, "ffn") in cuts)
    if Path(model.config.num_layers, "readout") in cuts:
        x = x - own
    read = model.read_position(model.config.num_layers - 1, x.shape[:2], context)
    if read is not None:  # the part of the last layer's output that the readout sees
        x = x[torch.arange(len(x), device=x.device), read].unsqueeze(1)
    return model.end(x, context)


def each_path(
    model: Decoder, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None, head: tuple[int, int]
) -> Iterator[Float[Tensor, "b *N C"]]:
    """Class logits with nothing cut, then with each of `paths_from` the head's layer cut, then with all of them cut."""
    every = paths_from(model, head[0])
    for cuts in ([], *([path] for path in every), every):
        yield cut_paths(model, tokens, lengths, head, cuts)


def _fed(block: Block, x: Tensor, own: Tensor, cut: bool) -> Float[Tensor, "b N d_model"]:
    return x + block.ffn(block.norm_ffn(x - own if cut else x))


def _attended(block: Block, x: Tensor, context: Context, missed: dict[str, Tensor | None]) -> Tensor:
    """Head outputs at all positions, [b, N, H, head_dim], each projection of the stream that it may read."""
    attention = block.attention
    normed = {reader: block.norm_attention(x if away is None else x - away) for reader, away in missed.items()}
    keys, values = (normed[name] if context.embeddings is None else context.embeddings for name in ("keys", "values"))
    q, k, v = attention.project(normed["queries"], keys)
    if missed["keys"] is not missed["values"]:
        v = attention.project(normed["queries"], values)[2]
    z = attend(
        q,
        k,
        v,
        encoding=attention.encoding,
        scale=attention.scale,
        notes=attention.encoding.note(keys),
        causal=attention.causal,
        q_positions=context.positions,
        k_positions=context.positions,
        mask=context.key_mask,
        added=context.added if block.shares_bias else None,
    )
    return z.transpose(1, 2)
