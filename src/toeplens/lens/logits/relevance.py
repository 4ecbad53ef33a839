"""Relevance of content and of position: the propagation rules, and their results.

Layer-wise relevance propagation distributes a class logit back, layer by layer, to the inputs. Here every operation is
replaced by one with the same value that is homogeneous of degree 1 in the inputs that receive relevance. The relevance
of x is then x . gradient, and by Euler's theorem the relevances add up to the logit.

From AttnLRP (Achtibat et al. 2024, arXiv 2402.05602)
    linear maps   each input by its own term (z-rule)
    norms         linear, with fixed statistics; activations: x times a fixed act(x)/x
    products      of weights and values, of queries and keys: half to each factor
    softmax       Taylor's rule: logit j receives L_j (R(A_j) - A_j sum_k R(A_k))
Ours
    biases        of linear maps and norms, and the remainder of the softmax rule, are separate terms
    rotation      L = L_0 + (L - L_0), where L_0 is the logit of the same query and key with both at position 0. For a
                  rotation L_0 = Re sum_t q_t conj(k_t), without rotation, and the coupled rest is
                  Re sum_t q_t conj(k_t) (e^(iota delta theta_t) - 1). L_0 belongs to content: half to the query, half
                  to the key. Of the rest, half belongs to position, a quarter to the query, a quarter to the key. So
                  content gets (L + L_0)/2 and position (L - L_0)/2: their Shapley values if content without rotation
                  gives L_0 and rotation without content gives nothing
    bias          of the logits, which depends only on position: belongs to position
    input         x = e + p is linear: the vector p belongs to position, the embedding e to content
    pairs         position's part of a logit belongs half to the query's position, half to the key's
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from toeplens.ground.records import Record
from toeplens.lens.kit.toeplitz import diagonal_sums
from toeplens.model.decoder import frozen


@dataclass(frozen=True)
class Relevance(Record):
    """The relevance of content and position for each example's logit. All relevances are in units of the logit.

    content             [B, N] of the token embedding at each position
    position_input      [B, N] of the vector added to it
    position_attention  [B, N] of position in attention, half at the query's and half at the key's position
    biases              [B] of the biases of linear maps and the shifts of norms
    softmax             [B] remainder of the softmax rule
    target              [B] the logit; the five above add up to it
    classes             [B] the class of the logit
    by_layer            [L, H] position in attention, summed over the pairs, mean over the examples
    by_offset           [L, H, D] the same at each offset i - j, query minus key, of positions in the sequence
    offsets             [D] the offsets: 0 .. N-1 if causal, otherwise -(N-1) .. N-1
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
        """Relevance of position at each position, from the input and from attention."""
        return self.position_input + self.position_attention

    @property
    def total(self) -> Float[np.ndarray, "B"]:
        """The sum of all parts, equal to the logit."""
        return (self.content + self.position).sum(1) + self.biases + self.softmax

    @property
    def share(self) -> Float[np.ndarray, "B"]:
        """Position's share of the summed absolute values, taken position by position; NaN if all are 0."""
        position = np.abs(self.position_input).sum(1) + np.abs(self.position_attention).sum(1)
        return np.divide(position, self._size, out=np.full_like(position, np.nan), where=self._size > 0)

    @property
    def errors(self) -> Float[np.ndarray, "B"]:
        """Error of the sum of the parts, relative to the sum of their absolute values; 0 if all are 0."""
        with np.errstate(invalid="ignore"):
            off, size = np.abs(self.total - self.target), self._size + np.abs(self.target)
        return np.where(off == 0, 0, off / np.where(size == 0, 1, size))

    @property
    def _size(self) -> Float[np.ndarray, "B"]:
        places = np.abs(self.content) + np.abs(self.position_input) + np.abs(self.position_attention)
        return places.sum(1) + np.abs(self.biases) + np.abs(self.softmax)


# ---- the rules: each returns the operation's own value --------------------------------------------------------------


def kept(y: Float[Tensor, "B *N"], constant: Float[Tensor, "..."], unit: Float[Tensor, "B"]) -> Float[Tensor, "B *N"]:
    """``y``, with the relevance of its summand ``constant`` sent to ``unit`` (ones, one per example)."""
    return y + constant.detach() * (unit.view(-1, *[1] * (y.ndim - 1)) - 1)


def held_norm(norm: nn.Module, x: Float[Tensor, "B N d"], unit: Float[Tensor, "B"]) -> Float[Tensor, "B N d"]:
    """A norm with fixed statistics; the relevance of its shift goes to ``unit``."""
    y = frozen(norm, x, x.detach())
    shift = getattr(norm, "bias", None)
    return y if shift is None else kept(y + shift, shift, unit)


def held_factor(x: Float[Tensor, "*B d"], y: Float[Tensor, "*B d"]) -> Float[Tensor, "*B d"]:
    """An activation's output ``y`` as x times a fixed y/x; 0 where x is 0, as for ReLU and GELU."""
    return x * torch.where(x == 0, 0, y / x).detach()


def product(a: Float[Tensor, "*B n m"], b: Float[Tensor, "*B m k"]) -> Float[Tensor, "*B n k"]:
    """A matrix product; half of its relevance goes to each factor."""
    return (a @ b.detach() + a.detach() @ b) / 2


def parted_logits(
    still: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]],
    turned: tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]] | None,
    bias: Float[Tensor, "*_B _H N N"] | None,
    scale: float,
) -> tuple[Float[Tensor, "B H N N"], Float[Tensor, "B H N N"]]:
    """A layer's logits, and position's part of them, as a leaf of the graph.

    Arguments
        still   queries and keys as they enter the product if all are at position 0
        turned  as they enter it at their positions; None if equal
        bias    added to the scaled products; None if there is none
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
    """Attention weights by Taylor's rule, linear in the logits; the remainder goes to ``unit``."""
    seen = logits if visible is None else logits.masked_fill(~visible, float("-inf"))
    weights = seen.softmax(-1)
    with torch.no_grad():
        linear = weights * (logits - (weights * logits).sum(-1, keepdim=True))
    return kept(weights, weights - linear, unit)


# ---- sums over pairs of positions -----------------------------------------------------------------------------------


def by_place(pairs: Float[Tensor, "B H N N"]) -> Float[Tensor, "B N"]:
    """The relevance of pairs, half at the query's and half at the key's position."""
    return (pairs.sum((1, 3)) + pairs.sum((1, 2))) / 2


def offsets_of(length: int, causal: bool) -> Int[Tensor, "D"]:
    """The offsets i - j among ``length`` positions."""
    return torch.arange(0 if causal else 1 - length, length)


def by_offset(pairs: Float[Tensor, "B H N N"], causal: bool) -> Float[Tensor, "H D"]:
    """The relevance of pairs at each of `offsets_of`, summed over the examples."""
    found = diagonal_sums(pairs.sum(0))
    return found[:, pairs.shape[-1] - 1 :] if causal else found
