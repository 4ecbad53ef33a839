"""What silencing a head of a Hugging Face model changes: the loss of its predictions, or its last hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.ground import InputError

Effect = Literal["loss", "states"]

_AT_ONCE = 1 << 24  # logits that are held at once, over copies, sequences and positions
_MASKED = 0.15  # share of the tokens that a masked language model has to predict
_NONE = -100  # a label where nothing is to be predicted
_PREDICTS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
_FILLS = ("ForMaskedLM",)


@dataclass(frozen=True)
class Outcome:
    """What is measured of a pass.

    effect   ``loss`` or ``states``
    inputs   what the pass is given
    counted  [B, N] the tokens of the last hidden states that are no padding
    labels   [B, N] the token that is predicted from each position's state, -100 for none; None without a loss
    """

    effect: Effect
    inputs: dict[str, Any]
    counted: Bool[Tensor, "B N"]
    labels: Int[Tensor, "B N"] | None

    @property
    def tokens(self) -> int:
        """Positions of the longest sequence that a pass reads, of an encoder or a decoder."""
        read = (self.inputs.get(name) for name in ("input_ids", "inputs_embeds", "decoder_input_ids"))
        return max(self.counted.shape[1], *(x.shape[1] for x in read if x is not None))

    @property
    def copies(self) -> bool:
        """Whether copies of the batch can be one batch: all tensors of the inputs have the sequences first."""
        tensors = (x for x in self.inputs.values() if isinstance(x, Tensor))
        return all(x.ndim > 0 and x.shape[0] == len(self.counted) for x in tensors)


def outcome_of(
    model: Any, inputs: Mapping[str, Any], sides: Collection[str], mask_token: int | None, seed: int
) -> Outcome:
    """What a model's class, and the sides of its attention, let be measured on these inputs; see `head_effects`.

    A model whose queries see the keys after them is not asked for the next token, whatever its class is called.
    """
    inputs = {name: each for name, each in inputs.items() if each is not None and name != "labels"}
    side = "decoder_" if getattr(model.config, "is_encoder_decoder", False) else ""
    tokens = inputs.get(f"{side}input_ids")
    given = inputs.get(f"{side}inputs_embeds") if tokens is None else tokens
    if given is None:
        raise InputError(f"inputs: {side}input_ids are missing; they are what the model's effects are measured on.")
    there = inputs.get(f"{side}attention_mask")
    counted = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
    if isinstance(there, Tensor) and there.shape == counted.shape:
        counted = there.to(given.device) != 0
    names = [cls.__name__ for cls in type(model).__mro__]
    predicts = any(name.endswith(_PREDICTS) for name in names)
    fills = any(name.endswith(_FILLS) for name in names)
    if predicts and not side and "encoder" in sides:
        predicts, fills = False, True
    fills = fills and mask_token is not None
    if tokens is None or model.get_output_embeddings() is None or not (fills or predicts):
        return Outcome("states", inputs, counted, None)
    if predicts:
        following = counted[:, :-1] & counted[:, 1:]
        labels = F.pad(tokens[:, 1:].masked_fill(~following, _NONE), (0, 1), value=_NONE)
        return Outcome("loss", inputs, counted, labels)
    chosen = _chosen(counted, seed)
    masked = tokens.masked_fill(chosen, mask_token or 0)
    return Outcome("loss", inputs | {f"{side}input_ids": masked}, counted, tokens.masked_fill(~chosen, _NONE))


def _chosen(counted: Bool[Tensor, "B N"], seed: int) -> Bool[Tensor, "B N"]:
    """15 % of each sequence's tokens, at least one, by a seed."""
    random = np.random.Generator(np.random.Philox(seed))
    chosen = torch.zeros(counted.shape, dtype=torch.bool)
    for row, there in zip(chosen, counted.cpu().numpy(), strict=True):
        places = np.flatnonzero(there)
        if len(places):
            row[random.choice(places, max(1, round(_MASKED * len(places))), replace=False)] = True
    return chosen.to(counted.device)


def losses(
    labels: Int[Tensor, "R N"], logits: Callable[[Int[Tensor, "n"]], Float[Tensor, "R n V"]], vocabulary: int
) -> Float[Tensor, "R"]:
    """Mean cross-entropy of each row, nats, float64; ``logits`` gives those at some positions. NaN without a label."""
    total = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    for places in pieces(labels, vocabulary):
        total += summed(logits(places), labels[:, places]).to(total.device)
    return total / (labels != _NONE).sum(1)


def pieces(labels: Int[Tensor, "R N"], vocabulary: int) -> tuple[Int[Tensor, "n"], ...]:
    """The positions with a label in any row, in pieces whose logits may be held at once."""
    places = (labels != _NONE).any(0).nonzero()[:, 0]
    return places.split(max(1, _AT_ONCE // (len(labels) * vocabulary)))


def summed(logits: Float[Tensor, "R n V"], labels: Int[Tensor, "R n"]) -> Float[Tensor, "R"]:
    """Sum of each row's cross-entropy, in float64 (the logarithms in float32 at least)."""
    flat = wide(logits).flatten(0, 1)
    each = F.cross_entropy(flat, labels.to(flat.device).flatten(), ignore_index=_NONE, reduction="none")
    return each.view(labels.shape).sum(1, dtype=torch.float64)


def moved(
    states: Float[Tensor, "R N d"], intact: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"]
) -> Float[Tensor, "R"]:
    """Mean squared distance of states from the intact ones, relative to these' variance over tokens; R is copies x B.

    Mean over the dimensions, counted tokens alone, float64. NaN where the variance is 0.
    """
    middle = _over_tokens(intact, counted, keep=True) / counted.sum(1).view(-1, 1, 1)
    spread = _over_tokens((wide(intact) - middle.to(wide(intact).dtype)).square(), counted).sum(-1)
    distance = _distance(states, intact, counted)
    return (distance / spread).masked_fill(spread == 0, torch.nan).flatten()


def apart(states: Float[Tensor, "B N d"], intact: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"]) -> float:
    """Largest distance of a sequence's states from the intact ones, relative to their size (root mean squares)."""
    size = _over_tokens(wide(intact).square(), counted).sum(-1)
    return float((_distance(states, intact, counted) / size.clamp_min(torch.finfo(size.dtype).tiny)).max().sqrt())


def _distance(
    states: Float[Tensor, "R N d"], intact: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"]
) -> Float[Tensor, "K B"]:
    copies = wide(states).unflatten(0, (-1, len(intact)))
    return torch.stack([_over_tokens((each - wide(intact)).square(), counted).sum(-1) for each in copies])


def _over_tokens(x: Float[Tensor, "B N d"], counted: Bool[Tensor, "B N"], *, keep: bool = False) -> Tensor:
    there = counted.to(x.device).unsqueeze(-1)
    return torch.where(there, x, 0).sum(1, keepdim=keep, dtype=torch.float64)


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
