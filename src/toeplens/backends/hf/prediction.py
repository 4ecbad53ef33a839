"""Next-token predictions of a causal language model: how likely each given token is, and whether it ranks first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.backends.hf.interventions import Change, intervene
from toeplens.backends.hf.model import (
    INSTALLED,
    apply_patches,
    configs_of,
    device_of,
    require_pretrained,
    rope_settings,
)
from toeplens.utils import InputError, invalid

_AT_ONCE = 1 << 27  # maximum logits of a block of tokens, over its sequences
_MIN_BLOCK, _MAX_BLOCK = 64, 1024  # tokens per block
_CACHE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # of transformers' cache
_LENGTH_DEPENDENT = ("longrope", "dynamic")


class Predictions(NamedTuple):
    """For the tokens at some positions: -log p in nats, and whether none is more likely; both [B, n]."""

    nats: Float[Tensor, "B n"]
    correct: Bool[Tensor, "B n"]


@torch.no_grad()
def predict_tokens(
    model: Any,
    tokens: Int[Tensor, "B N"],
    positions: Sequence[int],
    *,
    choices: Int[Tensor, "B c"] | None = None,
    changes: Sequence[Change] = (),
) -> Predictions:
    """How well the tokens at some positions are predicted from those before them.

    The model must be in evaluation mode. Long inputs are processed in blocks, with the model's key cache, unless that
    would change the result (a recurrent state, a rotation that depends on the length) or there are ``changes``.

    Arguments
        model      a `transformers.PreTrainedModel` that predicts the next token
        tokens     [B, N] on any device, without padding
        positions  those of the predicted tokens, from 1 on, in ascending order
        choices    [B, c] candidate tokens, which must include the predicted ones (default: the vocabulary)
        changes    of the model's attention, as in `intervene`

    Raises `InputError` for positions out of range, for tokens that are not among the choices, for a model without
    logits, and as `intervene` does.
    """
    require_pretrained(model)
    length, ordered = tokens.shape[1], list(positions)
    if not ordered or ordered != sorted(set(ordered)) or not 1 <= ordered[0] <= ordered[-1] < length:
        raise invalid("positions", f"be of 1 to {length - 1} and ascend", got=f"{ordered[:3]} ...")
    tokens = tokens.to(device_of(model))
    nats, correct = [], []
    for block, logits in _block_logits(model, tokens, ordered, changes):
        target = tokens[:, block]
        if choices is None:
            target_logits = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        else:
            candidates = choices.to(target.device)
            is_target = target.unsqueeze(-1) == candidates.unsqueeze(1)
            if not bool(is_target.any(-1).all()):
                raise InputError("choices must contain the token at each position.")
            logits = logits.gather(-1, candidates.unsqueeze(1).expand(-1, len(block), -1))
            target_logits = logits.masked_fill(~is_target, -torch.inf).amax(-1)
        nats.append((logits.logsumexp(-1) - target_logits).double())
        correct.append(target_logits >= logits.amax(-1))
    return Predictions(torch.cat(nats, 1), torch.cat(correct, 1))


def _block_logits(
    model: Any, tokens: Int[Tensor, "B N"], positions: list[int], changes: Sequence[Change]
) -> Iterator[tuple[list[int], Float[Tensor, "B n V"]]]:
    """Some positions and the logits that predict them, in order, at least in float32."""
    last, step = positions[-1], positions[-1]
    if not changes and not _depends_on_length(model):
        vocab_size = int(getattr(model.config.get_text_config(), "vocab_size", 1))
        step = min(_MAX_BLOCK, max(_MIN_BLOCK, _AT_ONCE // (vocab_size * len(tokens))))
    cache: dict[str, Any] = {}
    start = 0
    while start < last:
        stop = min(last, start + step)
        block = [position for position in positions if start < position <= stop]
        offsets = [position - 1 - start for position in block]
        columns = torch.tensor(offsets, dtype=torch.long, device=tokens.device)
        takes_positions = "logits_to_keep" in inspect.signature(model.forward).parameters
        options = cache | {"use_cache": stop - start < last}
        options |= {"logits_to_keep": columns if offsets else 1} if takes_positions else {}
        with intervene(model, changes) if changes else apply_patches(model):
            output = model(tokens[:, start:stop], **options)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(f"model: {type(model).__name__} returns no logits. Use a model that predicts tokens.")
        keys = getattr(output, "past_key_values", None)
        kinds = {type(layer).__name__ for layer in getattr(keys, "layers", ())}  # does it hold only keys and values?
        if stop - start < last and not (kinds and kinds <= _CACHE_LAYERS):  # all tokens at once
            step = last
            continue
        cache = {"past_key_values": keys}
        start = stop
        if block:
            logits = logits if takes_positions else logits[:, columns]
            yield block, logits.to(torch.promote_types(logits.dtype, torch.float32))


def _depends_on_length(model: Any) -> bool:
    """Whether the frequencies of a rotation, or an installed encoding, depend on the number of tokens."""
    patches = [vars(module)[INSTALLED] for module in model.modules() if INSTALLED in vars(module)]
    if any(patch.encoding.length_dependent for patch in patches):
        return True
    return any(x.get("rope_type") in _LENGTH_DEPENDENT for config in configs_of(model) for x in rope_settings(config))
