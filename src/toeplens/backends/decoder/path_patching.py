"""Path patching: cut the paths from one head's output to its later readers, one at a time or together."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.model import Block, Decoder, PassContext

Reader = Literal["queries", "keys", "values", "ffn", "readout"]
_READERS: tuple[Reader, ...] = ("queries", "keys", "values")


class HeadPath(NamedTuple):
    """From a head directly to its reader: queries, keys or values of a layer, its FFN, or the readout.

    The readout's layer is the number of layers.
    """

    layer: int
    reader: Reader


def paths_from(model: Decoder, layer: int) -> list[HeadPath]:
    """All paths from a head of ``layer``, in the order in which they are read.

    If keys and values are computed from the input embeddings, they read no head. In a parallel layer, neither does the
    FFN of the head's own layer.
    """
    readers = ("queries",) if model.config.key_value_source == "embeddings" else _READERS
    paths = [] if model.config.parallel else [HeadPath(layer, "ffn")]
    for later in range(layer + 1, model.config.num_layers):
        paths += [*(HeadPath(later, reader) for reader in readers), HeadPath(later, "ffn")]
    return [*paths, HeadPath(model.config.num_layers, "readout")]


@torch.no_grad()
def cut_paths(
    model: Decoder,
    tokens: Int[Tensor, "b N"],
    lengths: Int[Tensor, "b"] | None,
    head: tuple[int, int],
    cuts: Collection[HeadPath],
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
    x, context = model.start_pass(tokens, lengths)
    for layer in range(first):
        block = model.block(layer)
        x = block.finish(x, block.head_outputs(x, context, read_positions=None, fused=True)[1])
    block = model.block(first)
    z = block.head_outputs(x, context, read_positions=None, fused=True)[1]
    size = z.shape[-1]
    contribution = F.linear(z[:, :, index], block.attention.out.weight[:, index * size : (index + 1) * size])
    x = _add_ffn(block, x, x + block.attention.merge(z), contribution, HeadPath(first, "ffn") in cuts)
    for layer in range(first + 1, model.config.num_layers):
        block = model.block(layer)
        removed = {reader: contribution for reader in _READERS if HeadPath(layer, reader) in cuts}
        after = x + block.attention.merge(_head_outputs(block, x, context, removed))
        x = _add_ffn(block, x, after, contribution, HeadPath(layer, "ffn") in cuts)
    if HeadPath(model.config.num_layers, "readout") in cuts:
        x = x - contribution
    read = model.read_position(model.config.num_layers - 1, x.shape[:2], context)
    if read is not None:  # the part of the last layer's output that the readout sees
        x = x[torch.arange(len(x), device=x.device), read].unsqueeze(1)
    return model.compute_logits(x, context)


def iter_path_logits(
    model: Decoder, tokens: Int[Tensor, "b N"], lengths: Int[Tensor, "b"] | None, head: tuple[int, int]
) -> Iterator[Float[Tensor, "b *N C"]]:
    """Class logits with nothing cut, then with each of `paths_from` the head's layer cut, then with all of them cut."""
    paths = paths_from(model, head[0])
    for cuts in ([], *([path] for path in paths), paths):
        yield cut_paths(model, tokens, lengths, head, cuts)


def _add_ffn(block: Block, x: Tensor, after: Tensor, contribution: Tensor, cut: bool) -> Float[Tensor, "b N d_model"]:
    """Add the output of the FFN, which reads the stream ``after`` attention, or in a parallel layer its input ``x``."""
    norm, read = (block.norm_attention, x) if block.parallel else (block.norm_ffn, after)
    return after + block.ffn(norm(read - contribution if cut else read))


def _head_outputs(block: Block, x: Tensor, context: PassContext, removed: dict[str, Tensor]) -> Tensor:
    """Head outputs at all positions, [b, N, H, head_dim], each projection of the stream that it may read."""
    attention = block.attention
    normed = {reader: block.norm_attention(x - removed[reader] if reader in removed else x) for reader in _READERS}
    keys, values = (normed[name] if context.embeddings is None else context.embeddings for name in ("keys", "values"))
    q, k, v = attention.project(normed["queries"], keys)
    if ("keys" in removed) != ("values" in removed):
        v = attention.project(normed["queries"], values)[2]
    positions = {"q_positions": context.positions, "k_positions": context.positions, "mask": context.key_mask}
    shared_bias = context.shared_bias if block.shares_bias else None
    return attention.attend(q, k, v, keys, attention.encoding, shared_bias=shared_bias, **positions)
