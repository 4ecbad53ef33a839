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

from toeplens.backends.hf.offload import stored_weight
from toeplens.utils import InputError

MetricName = Literal["loss", "states"]

MIN_SEQUENCES = 8  # minimum number of sequences for intervals over sequences; with fewer, over blocks of their tokens
_LONG, _FIRST = 512, 64  # tokens from which on a sequence is long, and number of its first tokens
_TOTAL_BLOCKS, _MIN_BLOCK = 32, 8  # number of blocks over all sequences, and minimum tokens per block
AT_ONCE = 1 << 26  # logits in memory at once, over copies, sequences and positions
_CPU_AT_ONCE = 3 << 21  # the same on a CPU: 24 MB, small enough to be reused without new pages
_ROWS_AT_ONCE, _VOCAB_AT_ONCE = 2048, 2048  # tokens and words at once on a CPU; 16 MB of logits
_ROUNDINGS, _ROUNDINGS_16_BIT = 16, 3  # allowed roundings of a logit; the second for 16-bit precision
_MAX_STATE = 1024.0  # states are scaled up to this size, at which a softcap would show
_MASKED = 0.15  # share of the tokens to mask for a masked language model
NO_LABEL = -100  # label of positions without a prediction
_CAUSAL_CLASSES = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "MTModel",
    "ForTextToText",
    "EncoderDecoderModel",
)
_MASKED_CLASSES = ("ForMaskedLM",)


@dataclass(frozen=True)
class EffectMetric:
    """What effects are measured on in a pass."""

    name: MetricName  # ``loss`` or ``states``
    inputs: dict[str, Any]  # inputs of the pass
    token_mask: Bool[Tensor, "B N"]  # tokens of the last hidden states without padding
    labels: Int[Tensor, "B N"] | None  # the token after each position, -100 for none; None without a loss

    @property
    def tokens(self) -> int:
        """Length of the longest sequence, of the encoder or the decoder."""
        input_tensors = (self.inputs.get(name) for name in ("input_ids", "inputs_embeds", "decoder_input_ids"))
        return max(self.token_mask.shape[1], *(x.shape[1] for x in input_tensors if x is not None))

    @property
    def blocks(self) -> int:
        """Number of blocks of tokens that each sequence's effects are split into; 1 with enough sequences."""
        count, tokens = self.token_mask.shape
        return 1 if count >= MIN_SEQUENCES else max(1, min(-(-_TOTAL_BLOCKS // count), tokens // _MIN_BLOCK))

    @property
    def allows_copies(self) -> bool:
        """Whether copies of the batch can form one batch: the first dimension of all input tensors is the batch."""
        tensors = (x for x in self.inputs.values() if isinstance(x, Tensor))
        return all(x.ndim > 0 and x.shape[0] == len(self.token_mask) for x in tensors)

    @classmethod
    def of(
        cls, model: Any, inputs: Mapping[str, Any], sides: Collection[str], mask_token: int | None, seed: int
    ) -> EffectMetric:
        """The metric for a model's class and the sides of its attention on these inputs; see `head_effects`.

        A model whose queries see later keys is never tested on the next token, whatever its class is called.
        """
        inputs = {name: value for name, value in inputs.items() if value is not None and name != "labels"}
        side = "decoder_" if getattr(model.config, "is_encoder_decoder", False) else ""
        tokens = inputs.get(f"{side}input_ids")
        main_input = inputs.get(f"{side}inputs_embeds") if tokens is None else tokens
        if main_input is None:
            raise InputError(f"inputs must contain {side}input_ids.")
        mask = inputs.get(f"{side}attention_mask")
        token_mask = torch.ones(main_input.shape[:2], dtype=torch.bool, device=main_input.device)
        if isinstance(mask, Tensor) and mask.shape == token_mask.shape:
            token_mask = mask.to(main_input.device) != 0
        names = [value.__name__ for value in type(model).__mro__]
        is_causal, is_masked = (any(x.endswith(ends) for x in names) for ends in (_CAUSAL_CLASSES, _MASKED_CLASSES))
        if is_causal and not side and "encoder" in sides:
            is_causal, is_masked = False, True
        is_masked = is_masked and mask_token is not None
        if tokens is None or model.get_output_embeddings() is None or not (is_masked or is_causal):
            return cls("states", inputs, token_mask, None)
        if is_causal:
            has_next = token_mask[:, :-1] & token_mask[:, 1:]
            labels = F.pad(tokens[:, 1:].masked_fill(~has_next, NO_LABEL), (0, 1), value=NO_LABEL)
            return cls("loss", inputs, token_mask, labels)
        random, chosen = np.random.Generator(np.random.Philox(seed)), torch.zeros(token_mask.shape, dtype=torch.bool)
        for row, is_token in zip(chosen, token_mask.cpu().numpy(), strict=True):  # 15 % of each sequence's tokens
            if len(positions := np.flatnonzero(is_token)):
                row[random.choice(positions, max(1, round(_MASKED * len(positions))), replace=False)] = True
        chosen = chosen.to(token_mask.device)
        masked = tokens.masked_fill(chosen, mask_token or 0)
        return cls("loss", inputs | {f"{side}input_ids": masked}, token_mask, tokens.masked_fill(~chosen, NO_LABEL))

    def shortened(self) -> EffectMetric | None:
        """The first tokens of long sequences, with states as the metric; None if they are not long, the inputs contain
        more than tokens, or padding is among the first tokens."""
        count, tokens = self.token_mask.shape
        tensors = [x for x in self.inputs.values() if isinstance(x, Tensor)]
        if tokens < _LONG or any(x.shape != (count, tokens) for x in tensors) or not self.token_mask[:, :_FIRST].all():
            return None
        inputs = {name: x[:, :_FIRST] if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        return EffectMetric("states", inputs, self.token_mask[:, :_FIRST], None)


def losses(
    labels: Int[Tensor, "R N"],
    logits: Callable[[Int[Tensor, "n"]], Float[Tensor, "R n V"]],
    vocabulary: int,
    blocks: int,
) -> Float[Tensor, "R K"]:
    """Cross-entropy of each row in nats, float64, split over blocks of positions: their mean is the mean over labels,
    NaN without one. ``logits`` returns those at some positions."""
    values = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    limit = min(AT_ONCE, _CPU_AT_ONCE) if labels.device.type == "cpu" else AT_ONCE
    for positions in label_chunks(labels, vocabulary, limit):
        values[:, positions] = cross_entropies(logits(positions), labels[:, positions]).to(values.device)
    return over_labels(values, labels, blocks)


@dataclass(frozen=True)
class Readout:
    """A head whose logits are weight x + bias, so that losses can be computed for some words at a time: going through
    all logits of a long input repeatedly would take over half as long as the product itself."""

    weight: Float[Tensor, "V d"]  # as stored, if it stays on disk; products are in the dtype of the states
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
        if type(embedding) is not nn.Linear or type(embedding.weight) is not nn.Parameter:
            return None
        weight = stored_weight(embedding)
        if weight is None:
            return None
        # models convert states of another dtype in their own ways; with another width there is something in between
        if states.dtype != embedding.weight.dtype or states.shape[-1] != embedding.weight.shape[1]:
            return None
        eps = torch.finfo(states.dtype).eps
        allowed = eps * (_ROUNDINGS if eps <= torch.finfo(torch.float32).eps else _ROUNDINGS_16_BIT)
        factor = 1.0
        for _ in range(2):
            scaled = factor * states
            logits = upcast(head(scaled))
            product = F.linear(scaled.to(weight.device), weight.to(scaled.dtype), embedding.bias)
            product = upcast(product).to(logits.device)
            size = float(logits.abs().max())
            if product.shape != logits.shape or not float((product - logits).abs().max()) <= allowed * size:
                return None
            largest = max(size, float(upcast(states).abs().max()))
            factor = 2.0 ** math.floor(math.log2(_MAX_STATE / largest)) if largest > 0 else 1.0  # exact in any dtype
        return cls(weight, embedding.bias)

    def cross_entropies(self, states: Float[Tensor, "R N d"], labels: Int[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        """Cross-entropy at each position, 0 without a label, in float64; sums over words are at least float32."""
        has_label, values = labels != NO_LABEL, torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        if not has_label.any():
            return values
        rows, targets = states[has_label.to(states.device)].split(_ROWS_AT_ONCE), labels[has_label].split(_ROWS_AT_ONCE)
        device = self.weight.device
        parts = [self._row_losses(x.to(device), y.to(device)) for x, y in zip(rows, targets, strict=True)]
        values[has_label] = torch.cat(parts).to(values.device)
        return values

    def slopes(
        self, states: Float[Tensor, "B n d"]
    ) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
        """The probabilities of all words at some positions, and a function that returns the gradient of the labels'
        summed losses at the states, 0 without a label."""
        weight = self.weight.to(states.dtype)
        shares = upcast(F.linear(states.to(weight.device), weight, self.bias)).softmax(-1)
        expected = shares.to(weight.dtype) @ weight

        def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
            labels = labels.to(weight.device)
            return torch.where((labels != NO_LABEL).unsqueeze(-1), expected - weight[labels.clamp_min(0)], 0)

        return shares, slopes

    def _row_losses(self, x: Float[Tensor, "n d"], labels: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        block_size = _VOCAB_AT_ONCE if x.device.type == "cpu" else max(_VOCAB_AT_ONCE, AT_ONCE // len(x))
        dtype = torch.promote_types(x.dtype, torch.float32)
        total, label_logits = (torch.zeros(len(x), dtype=dtype, device=x.device) for _ in range(2))
        top = torch.full_like(total, torch.finfo(dtype).min)
        for start in range(0, len(self.weight), block_size):
            block = slice(start, start + block_size)
            logits = upcast(
                F.linear(x, self.weight[block].to(x.dtype), None if self.bias is None else self.bias[block])
            )
            index = labels - start
            in_block = (index >= 0) & (index < logits.shape[1])
            own = logits.gather(1, index.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
            label_logits = torch.where(in_block, own, label_logits)
            higher = torch.maximum(top, logits.amax(-1))
            total = total * (top - higher).exp() + logits.sub_(higher.unsqueeze(-1)).exp_().sum(-1)
            top = higher
        return (top + total.log() - label_logits).double()


def over_labels(values: Float[Tensor, "R N"], labels: Int[Tensor, "R N"], blocks: int) -> Float[Tensor, "R K"]:
    """Losses at each position split over blocks of positions: their mean is the mean over labels."""
    return in_blocks(values, blocks) / (labels != NO_LABEL).sum(1, keepdim=True)


def in_blocks(values: Float[Tensor, "R N"], blocks: int) -> Float[Tensor, "R K"]:
    """K times the sums over K blocks of equal length (up to one position): their mean is the sum over all positions."""
    count = values.shape[1]
    block = torch.arange(count, device=values.device) * blocks // count
    return blocks * values.new_zeros(len(values), blocks).index_add_(1, block, values)


def label_chunks(labels: Int[Tensor, "R N"], vocabulary: int, limit: int) -> tuple[Int[Tensor, "n"], ...]:
    """The positions with a label in any row, in chunks of at most ``limit`` logits."""
    positions = (labels != NO_LABEL).any(0).nonzero()[:, 0]
    return positions.split(max(1, limit // (len(labels) * vocabulary)))


def cross_entropies(logits: Float[Tensor, "R n V"], labels: Int[Tensor, "R n"]) -> Float[Tensor, "R n"]:
    """Cross-entropy at each position, 0 without a label, in float64 (the logarithms in float32 at least)."""
    flat = upcast(logits).flatten(0, 1)
    values = F.cross_entropy(flat, labels.to(flat.device).flatten(), ignore_index=NO_LABEL, reduction="none")
    return values.view(labels.shape).double()


def state_change(
    states: Float[Tensor, "R N d"], intact: Float[Tensor, "B N d"], mask: Bool[Tensor, "B N"], blocks: int
) -> Float[Tensor, "R K"]:
    """Mean squared distance of states (R is copies x B) from the intact ones, relative to the variance of these over
    tokens, NaN if that is 0; float64, split over blocks of positions."""
    x = upcast(intact)
    mean = _zero_padding(intact, mask).sum(1, keepdim=True, dtype=torch.float64) / mask.sum(1).view(-1, 1, 1)
    spread = _zero_padding((x - mean.to(x.dtype)).square(), mask).sum(1, dtype=torch.float64).sum(-1)
    distance = in_blocks(_squared_distance(states, intact, mask).flatten(0, 1), blocks).unflatten(0, (-1, len(intact)))
    return (distance / spread.unsqueeze(-1)).masked_fill((spread == 0).unsqueeze(-1), torch.nan).flatten(0, 1)


def state_distance(states: Float[Tensor, "B N d"], intact: Float[Tensor, "B N d"], mask: Bool[Tensor, "B N"]) -> float:
    """Largest distance of a sequence's states from the intact ones, relative to their size (root mean squares)."""
    size = _zero_padding(upcast(intact).square(), mask).sum(1, dtype=torch.float64).sum(-1)
    distance = _squared_distance(states, intact, mask).sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    return float(distance.max().sqrt())


def _squared_distance(states: Tensor, intact: Tensor, mask: Bool[Tensor, "B N"]) -> Float[Tensor, "C B N"]:
    """Squared distance of states [R, N, d], summed over the dimensions, for each copy of the batch, at each token."""
    copies = upcast(states).unflatten(0, (-1, len(intact)))
    distances = [_zero_padding((x - upcast(intact)).square(), mask).sum(-1, dtype=torch.float64) for x in copies]
    return torch.stack(distances)


def _zero_padding(x: Float[Tensor, "B N d"], token_mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N d"]:
    return torch.where(token_mask.to(x.device).unsqueeze(-1), x, 0)


def upcast(x: Tensor) -> Tensor:
    """Convert to float32 unless wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
