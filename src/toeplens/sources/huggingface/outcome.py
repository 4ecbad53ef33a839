"""What an ablation effect is measured on: the loss of a model's predictions, or its last hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.ground import InputError

Effect = Literal["loss", "states"]

ENOUGH = 8  # minimum number of sequences for intervals over sequences; with fewer, over blocks of their tokens
_LONG, _FIRST = 512, 64  # tokens from which on a sequence is long, and number of its first tokens
_ROWS, _BLOCK = 32, 8  # number of blocks over all sequences, and minimum tokens per block
AT_ONCE = 1 << 26  # logits in memory at once, over copies, sequences and positions
_ON_CPU = 3 << 21  # the same on a CPU: 24 MB, small enough to be reused without new pages
_ROWS_AT_ONCE, _WORDS = 2048, 2048  # tokens and words at once on a CPU; 16 MB of logits
_ROUNDED, _FEW = 16, 3  # allowed roundings of a logit; the second for 16-bit precision
_LARGE = 1024.0  # states are scaled up to this size, at which a softcap would show
_MASKED = 0.15  # share of the tokens to mask for a masked language model
NONE = -100  # label of positions without a prediction
_PREDICTS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "MTModel",
    "ForTextToText",
    "EncoderDecoderModel",
)
_FILLS = ("ForMaskedLM",)


@dataclass(frozen=True)
class Outcome:
    """What effects are measured on in a pass."""

    effect: Effect  # ``loss`` or ``states``
    inputs: dict[str, Any]  # inputs of the pass
    counted: Bool[Tensor, "B N"]  # tokens of the last hidden states without padding
    labels: (
        Int[Tensor, "B N"] | None
    )  # the token predicted from each position's state, -100 for none; None without a loss

    @property
    def tokens(self) -> int:
        """Length of the longest sequence, of the encoder or the decoder."""
        read = (self.inputs.get(name) for name in ("input_ids", "inputs_embeds", "decoder_input_ids"))
        return max(self.counted.shape[1], *(x.shape[1] for x in read if x is not None))

    @property
    def blocks(self) -> int:
        """Number of blocks of tokens that each sequence's effects are split into; 1 with enough sequences."""
        count, tokens = self.counted.shape
        return 1 if count >= ENOUGH else max(1, min(-(-_ROWS // count), tokens // _BLOCK))

    @property
    def copies(self) -> bool:
        """Whether copies of the batch can form one batch: the first dimension of all input tensors is the batch."""
        tensors = (x for x in self.inputs.values() if isinstance(x, Tensor))
        return all(x.ndim > 0 and x.shape[0] == len(self.counted) for x in tensors)

    @classmethod
    def of(
        cls, model: Any, inputs: Mapping[str, Any], sides: Collection[str], mask_token: int | None, seed: int
    ) -> Outcome:
        """The outcome for a model's class and the sides of its attention on these inputs; see `head_effects`.

        A model whose queries see later keys is never tested on the next token, whatever its class is called.
        """
        inputs = {name: each for name, each in inputs.items() if each is not None and name != "labels"}
        side = "decoder_" if getattr(model.config, "is_encoder_decoder", False) else ""
        tokens = inputs.get(f"{side}input_ids")
        given = inputs.get(f"{side}inputs_embeds") if tokens is None else tokens
        if given is None:
            raise InputError(f"inputs must contain {side}input_ids.")
        there = inputs.get(f"{side}attention_mask")
        counted = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        if isinstance(there, Tensor) and there.shape == counted.shape:
            counted = there.to(given.device) != 0
        names = [each.__name__ for each in type(model).__mro__]
        predicts, fills = (any(name.endswith(ends) for name in names) for ends in (_PREDICTS, _FILLS))
        if predicts and not side and "encoder" in sides:
            predicts, fills = False, True
        fills = fills and mask_token is not None
        if tokens is None or model.get_output_embeddings() is None or not (fills or predicts):
            return cls("states", inputs, counted, None)
        if predicts:
            following = counted[:, :-1] & counted[:, 1:]
            labels = F.pad(tokens[:, 1:].masked_fill(~following, NONE), (0, 1), value=NONE)
            return cls("loss", inputs, counted, labels)
        random, chosen = np.random.Generator(np.random.Philox(seed)), torch.zeros(counted.shape, dtype=torch.bool)
        for row, real in zip(chosen, counted.cpu().numpy(), strict=True):  # 15 % of each sequence's tokens
            if len(places := np.flatnonzero(real)):
                row[random.choice(places, max(1, round(_MASKED * len(places))), replace=False)] = True
        chosen = chosen.to(counted.device)
        masked = tokens.masked_fill(chosen, mask_token or 0)
        return cls("loss", inputs | {f"{side}input_ids": masked}, counted, tokens.masked_fill(~chosen, NONE))

    def shortened(self) -> Outcome | None:
        """The first tokens of long sequences, with states as the outcome; None if they are not long, the inputs contain
        more than tokens, or padding is among the first tokens."""
        count, tokens = self.counted.shape
        tensors = [x for x in self.inputs.values() if isinstance(x, Tensor)]
        if tokens < _LONG or any(x.shape != (count, tokens) for x in tensors) or not self.counted[:, :_FIRST].all():
            return None
        inputs = {name: x[:, :_FIRST] if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        return Outcome("states", inputs, self.counted[:, :_FIRST], None)


def losses(
    labels: Int[Tensor, "R N"],
    logits: Callable[[Int[Tensor, "n"]], Float[Tensor, "R n V"]],
    vocabulary: int,
    blocks: int,
) -> Float[Tensor, "R K"]:
    """Cross-entropy of each row in nats, float64, split over blocks of positions: their mean is the mean over labels,
    NaN without one. ``logits`` returns those at some positions."""
    each = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    most = min(AT_ONCE, _ON_CPU) if labels.device.type == "cpu" else AT_ONCE
    for places in pieces(labels, vocabulary, most):
        each[:, places] = cross_entropies(logits(places), labels[:, places]).to(each.device)
    return over_labels(each, labels, blocks)


@dataclass(frozen=True)
class Readout:
    """A head whose logits are weight x + bias, so that losses can be computed for some words at a time: going through
    all logits of a long input repeatedly would take over half as long as the product itself."""

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, "V"] | None

    @classmethod
    def of(
        cls,
        embedding: nn.Module | None,
        states: Float[Tensor, "B n d"],
        head: Callable[[Float[Tensor, "B n d"]], Float[Tensor, "B n V"]],
    ) -> Readout | None:
        """The output embedding as such a head. None unless the model's own ``head`` computes its product, on some
        states and on scaled ones, which would reveal a softcap."""
        if type(embedding) is not nn.Linear or type(embedding.weight) is not nn.Parameter or embedding.weight.is_meta:
            return None
        # models convert states of another dtype in their own ways; with another width there is something in between
        if states.dtype != embedding.weight.dtype or states.shape[-1] != embedding.weight.shape[1]:
            return None
        eps = torch.finfo(states.dtype).eps
        allowed = eps * (_ROUNDED if eps <= torch.finfo(torch.float32).eps else _FEW)
        factor = 1.0
        for _ in range(2):
            some = factor * states
            logits = wide(head(some))
            made = wide(F.linear(some.to(embedding.weight.device), embedding.weight, embedding.bias)).to(logits.device)
            size = float(logits.abs().max())
            if made.shape != logits.shape or not float((made - logits).abs().max()) <= allowed * size:
                return None
            largest = max(size, float(wide(states).abs().max()))
            factor = 2.0 ** math.floor(math.log2(_LARGE / largest)) if largest > 0 else 1.0  # exact in any dtype
        return cls(embedding.weight, embedding.bias)

    def cross_entropies(self, states: Float[Tensor, "R N d"], labels: Int[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        """Cross-entropy at each position, 0 without a label, in float64; sums over words are at least float32."""
        there, each = labels != NONE, torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        if not there.any():
            return each
        rows, wanted = states[there.to(states.device)].split(_ROWS_AT_ONCE), labels[there].split(_ROWS_AT_ONCE)
        device = self.weight.device
        found = [self._of(x.to(device), y.to(device)) for x, y in zip(rows, wanted, strict=True)]
        each[there] = torch.cat(found).to(each.device)
        return each

    def slopes(
        self, states: Float[Tensor, "B n d"]
    ) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
        """The probabilities of all words at some positions, and a function that returns the gradient of the labels'
        summed losses at the states, 0 without a label."""
        weight = self.weight
        shares = wide(F.linear(states.to(weight.device), weight, self.bias)).softmax(-1)
        expected = shares.to(weight.dtype) @ weight

        def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
            labels = labels.to(weight.device)
            return torch.where((labels != NONE).unsqueeze(-1), expected - weight[labels.clamp_min(0)], 0)

        return shares, slopes

    def _of(self, x: Float[Tensor, "n d"], labels: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        words = _WORDS if x.device.type == "cpu" else max(_WORDS, AT_ONCE // len(x))
        dtype = torch.promote_types(x.dtype, torch.float32)
        total, own = (torch.zeros(len(x), dtype=dtype, device=x.device) for _ in range(2))
        top = torch.full_like(total, torch.finfo(dtype).min)
        for start in range(0, len(self.weight), words):
            some = slice(start, start + words)
            logits = wide(F.linear(x, self.weight[some], None if self.bias is None else self.bias[some]))
            at = labels - start
            here = (at >= 0) & (at < logits.shape[1])
            own = torch.where(here, logits.gather(1, at.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1), own)
            higher = torch.maximum(top, logits.amax(-1))
            total = total * (top - higher).exp() + logits.sub_(higher.unsqueeze(-1)).exp_().sum(-1)
            top = higher
        return (top + total.log() - own).double()


def over_labels(each: Float[Tensor, "R N"], labels: Int[Tensor, "R N"], blocks: int) -> Float[Tensor, "R K"]:
    """Losses at each position split over blocks of positions: their mean is the mean over labels."""
    return in_blocks(each, blocks) / (labels != NONE).sum(1, keepdim=True)


def in_blocks(each: Float[Tensor, "R N"], blocks: int) -> Float[Tensor, "R K"]:
    """K times the sums over K blocks of equal length (up to one position): their mean is the sum over all positions."""
    count = each.shape[1]
    block = torch.arange(count, device=each.device) * blocks // count
    return blocks * each.new_zeros(len(each), blocks).index_add_(1, block, each)


def pieces(labels: Int[Tensor, "R N"], vocabulary: int, most: int) -> tuple[Int[Tensor, "n"], ...]:
    """The positions with a label in any row, in pieces of at most ``most`` logits."""
    places = (labels != NONE).any(0).nonzero()[:, 0]
    return places.split(max(1, most // (len(labels) * vocabulary)))


def cross_entropies(logits: Float[Tensor, "R n V"], labels: Int[Tensor, "R n"]) -> Float[Tensor, "R n"]:
    """Cross-entropy at each position, 0 without a label, in float64 (the logarithms in float32 at least)."""
    flat = wide(logits).flatten(0, 1)
    each = F.cross_entropy(flat, labels.to(flat.device).flatten(), ignore_index=NONE, reduction="none")
    return each.view(labels.shape).double()


def moved(
    states: Float[Tensor, "R N d"], intact: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"], blocks: int
) -> Float[Tensor, "R K"]:
    """Mean squared distance of states (R is copies x B) from the intact ones, relative to the variance of these over
    tokens, NaN if that is 0; float64, split over blocks of positions."""
    own = wide(intact)
    middle = _counted(intact, counted).sum(1, keepdim=True, dtype=torch.float64) / counted.sum(1).view(-1, 1, 1)
    spread = _counted((own - middle.to(own.dtype)).square(), counted).sum(1, dtype=torch.float64).sum(-1)
    distance = in_blocks(_distance(states, intact, counted).flatten(0, 1), blocks).unflatten(0, (-1, len(intact)))
    return (distance / spread.unsqueeze(-1)).masked_fill((spread == 0).unsqueeze(-1), torch.nan).flatten(0, 1)


def apart(states: Float[Tensor, "B N d"], intact: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"]) -> float:
    """Largest distance of a sequence's states from the intact ones, relative to their size (root mean squares)."""
    size = _counted(wide(intact).square(), counted).sum(1, dtype=torch.float64).sum(-1)
    far = _distance(states, intact, counted).sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return float(far.max().sqrt())


def _distance(
    states: Float[Tensor, "R N d"], intact: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"]
) -> Float[Tensor, "C B N"]:
    """Squared distance summed over the dimensions, for each copy of the batch, at each counted token."""
    copies = wide(states).unflatten(0, (-1, len(intact)))
    each = [_counted((copy - wide(intact)).square(), counted).sum(-1, dtype=torch.float64) for copy in copies]
    return torch.stack(each)


def _counted(x: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"]) -> Float[Tensor, "B N d"]:
    return torch.where(counted.to(x.device).unsqueeze(-1), x, 0)


def wide(x: Tensor) -> Tensor:
    """Convert to float32 unless wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
