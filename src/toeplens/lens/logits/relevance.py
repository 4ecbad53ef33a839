"""Relevance of content and of position: the rules by which a logit is traced back, and what they give.

Layer-wise relevance propagation hands a class logit back, layer by layer, to what it was made of. Here every operation
is replaced by one of the same value that is homogeneous of degree 1 in what may receive relevance; the relevance of x
is then x . gradient, and by Euler's theorem the relevances add up to the logit.

From AttnLRP (Achtibat et al. 2024, arXiv 2402.05602)
    linear maps   each input by its own term (z-rule)
    norms         linear with their statistics held; activations: x times act(x)/x held
    products      of weights and values, of queries and keys: half to each
    softmax       Taylor's rule: logit j receives L_j (R(A_j) - A_j sum_k R(A_k))
Ours
    biases        of linear maps and norms, and what the softmax's rule leaves over, are not spread: terms of their own
    rotation      L = L_0 + (L - L_0), where L_0 is the logit of the same query and key with both at position 0. For a
                  rotation L_0 = Re sum_t q_t conj(k_t), the pair not turned, and the coupled rest is
                  Re sum_t q_t conj(k_t) (e^(iota delta theta_t) - 1). L_0 is content's: half the query's, half the
                  key's. Of the rest half is position's, a quarter the query's, a quarter the key's. So content has
                  (L + L_0)/2 and position (L - L_0)/2: their Shapley values where content without the rotation gives
                  L_0 and the rotation without content gives nothing
    bias          of the logits, a function of position alone: all of it is position's
    input         x = e + p is linear: the vector p is position's, the embedding e content's
    pairs         what position has of a logit belongs to two places: half to the query's, half to the key's
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toeplens.ground.records import Record
from toeplens.lens.kit.toeplitz import diagonal_sums
from toeplens.model.attention import frozen


@dataclass(frozen=True)
class Relevance(Record):
    """What of each example's logit goes back to what. All relevances are in units of the logit.

    content             [B, N] to the token's embedding at each place
    position_input      [B, N] to the vector added to it there
    position_attention  [B, N] to position in attention, by place: half of a pair's at the query, half at the key
    biases              [B] stays with the biases of linear maps and the shifts of norms
    softmax             [B] left over by the softmax's rule
    target              [B] the logit; the five above add up to it
    classes             [B] whose logit it is
    by_layer            [L, H] position in attention, summed over the pairs, mean over the examples
    by_offset           [L, H, D] the same at each offset i - j, query minus key, of places in the sequence
    offsets             [D] the offsets: 0 .. N-1 if causal, else -(N-1) .. N-1
    """

    WORDS = "relevance"

    content: Float[np.ndarray, "B N"]
    position_input: Float[np.ndarray, "B N"]
    position_attention: Float[np.ndarray, "B N"]
    biases: Float[np.ndarray, "B"]
    softmax: Float[np.ndarray, "B"]
    target: Float[np.ndarray, "B"]
    classes: Int[np.ndarray, "B"]
    by_layer: Float[np.ndarray, "L H"]
    by_offset: Float[np.ndarray, "L H D"]
    offsets: Int[np.ndarray, "D"]

    @property
    def position(self) -> Float[np.ndarray, "B N"]:
        """Position's relevance at each place, of the input and of attention."""
        return self.position_input + self.position_attention

    @property
    def total(self) -> Float[np.ndarray, "B"]:
        """The sum of all parts, which is the logit."""
        return (self.content + self.position).sum(1) + self.biases + self.softmax

    @property
    def share(self) -> Float[np.ndarray, "B"]:
        """Position's share of the parts' absolute values, each place counted by itself; NaN where all are 0."""
        position = np.abs(self.position_input).sum(1) + np.abs(self.position_attention).sum(1)
        return np.divide(position, self._size, out=np.full_like(position, np.nan), where=self._size > 0)

    @property
    def errors(self) -> Float[np.ndarray, "B"]:
        """How far the parts are from adding up to the logit, over the absolute values of all; 0 where all are 0."""
        with np.errstate(invalid="ignore"):
            off, size = np.abs(self.total - self.target), self._size + np.abs(self.target)
        return np.where(off == 0, 0, off / np.where(size == 0, 1, size))

    @property
    def _size(self) -> Float[np.ndarray, "B"]:
        places = np.abs(self.content) + np.abs(self.position_input) + np.abs(self.position_attention)
        return places.sum(1) + np.abs(self.biases) + np.abs(self.softmax)


# ---- the rules: each gives the operation's own value ----------------------------------------------------------------


def kept(y: Float[Tensor, "B *N"], constant: Float[Tensor, "..."], unit: Float[Tensor, "B"]) -> Float[Tensor, "B *N"]:
    """``y``, whose summand ``constant`` hands its relevance to ``unit``, ones that stand for it, one an example."""
    return y + constant.detach() * (unit.view(-1, *[1] * (y.ndim - 1)) - 1)


def held_norm(norm: nn.Module, x: Float[Tensor, "B N d"], unit: Float[Tensor, "B"]) -> Float[Tensor, "B N d"]:
    """A norm with its statistics held; its shift goes to ``unit``."""
    y = frozen(norm, x, x.detach())
    shift = getattr(norm, "bias", None)
    return y if shift is None else kept(y + shift, shift, unit)


def held_factor(x: Float[Tensor, "*B d"], y: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
    """An activation's output ``y`` as x times y/x held; 0 where x is, as for ReLU and GELU."""
    return x * torch.where(x == 0, 0, y / x).detach()


def product(a: Float[Tensor, "*B n m"], b: Float[Tensor, "*B m k"]) -> Float[Tensor, "*B n k"]:
    """A matrix product, half of whose relevance goes to each factor."""
    return (a @ b.detach() + a.detach() @ b) / 2


def parted_logits(
    still: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]],
    turned: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]] | None,
    bias: Float[Tensor, "*_B _H N N"] | None,
    scale: float,
) -> tuple[Float[Tensor, "B H N N"], Float[Tensor, "B H N N"]]:
    """A layer's logits, and position's part of them, a leaf of the graph.

    Arguments
        still   queries and keys as they enter the product if all stand at position 0
        turned  as they enter it where they stand; None if that is the same
        bias    what is added to the scaled products; None if nothing
    """
    content = product(still[0], still[1].transpose(-2, -1)) * scale
    position = torch.zeros_like(content)
    if turned is not None:
        whole = product(turned[0], turned[1].transpose(-2, -1)) * scale
        content, position = (whole + content) / 2, (whole - content) / 2
    if bias is not None:
        position = position + bias
    position = position.detach().requires_grad_()
    return content + position, position


def taylor_softmax(
    logits: Float[Tensor, "B H N K"], visible: Bool[Tensor, "... K"] | None, unit: Float[Tensor, "B"]
) -> Float[Tensor, "B H N K"]:
    """Attention weights by Taylor's rule, their linear part in the logits; the rest goes to ``unit``."""
    seen = logits if visible is None else logits.masked_fill(~visible, float("-inf"))
    weights = seen.softmax(-1)
    with torch.no_grad():
        linear = weights * (logits - (weights * logits).sum(-1, keepdim=True))
    return kept(weights, weights - linear, unit)


# ---- sums of what pairs of places have ------------------------------------------------------------------------------


def by_place(pairs: Float[Tensor, "B H N N"]) -> Float[Tensor, "B N"]:
    """The relevance of pairs, query by key, half at the query and half at the key."""
    return (pairs.sum((1, 3)) + pairs.sum((1, 2))) / 2


def offsets_of(length: int, causal: bool) -> Int[Tensor, "D"]:
    """The offsets i - j that occur among ``length`` places."""
    return torch.arange(0 if causal else 1 - length, length)


def by_offset(pairs: Float[Tensor, "B H N N"], causal: bool) -> Float[Tensor, "H D"]:
    """The relevance of pairs at each of `offsets_of`, summed over the examples."""
    found = diagonal_sums(pairs.sum(0))
    return found[:, pairs.shape[-1] - 1 :] if causal else found
