"""Next-token predictions of a causal language model: how likely each given token is, and whether it ranks first."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.ground import InputError, invalid
from toeplens.sources.huggingface.interventions import Change, intervened
from toeplens.sources.huggingface.model import INSTALLED, checked_model, configs_of, patched, rotations_of

_AT_ONCE = 1 << 27  # maximum logits of a block of tokens, over its sequences
_SHORTEST, _LONGEST = 64, 1024  # tokens per block
_KEYS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # of transformers' cache
_BY_LENGTH = ("longrope", "dynamic")


class Predictions(NamedTuple):
    """For the tokens at some positions: -log p in nats, and whether none is more likely; both [B, n]."""

    nats: Float[Tensor, "B n"]
    right: Bool[Tensor, "B n"]


@torch.no_grad()
def predictions(
    model: Any,
    tokens: Int[Tensor, "B N"],
    places: Sequence[int],
    *,
    choices: Int[Tensor, "B c"] | None = None,
    changes: Sequence[Change] = (),
) -> Predictions:
    """How well the tokens at some positions are predicted from those before them.

    The model must be in evaluation mode. Long inputs are processed in blocks, with the model's key cache, unless that
    would change the result (a recurrent state, a rotation that depends on the length) or there are ``changes``.

    Arguments
        model    a `transformers.PreTrainedModel` that predicts the next token
        tokens   [B, N] on any device, without padding
        places   positions of the predicted tokens, from 1 on, in ascending order
        choices  [B, c] candidate tokens, which must include the predicted ones (default: the vocabulary)
        changes  of the model's attention, as in `intervened`

    Raises `InputError` for positions out of range, for tokens that are not among the choices, for a model without
    logits, and as `intervened` does.
    """
    checked_model(model)
    length, wanted = tokens.shape[1], list(places)
    if not wanted or wanted != sorted(set(wanted)) or not 1 <= wanted[0] <= wanted[-1] < length:
        raise invalid("places", f"be of 1 to {length - 1} and ascend", got=f"{wanted[:3]} ...")
    tokens = tokens.to(model.device)
    nats, right = [], []
    for some, logits in _passes(model, tokens, wanted, changes):
        target = tokens[:, some]
        if choices is None:
            own = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        else:
            among = choices.to(target.device)
            at = target.unsqueeze(-1) == among.unsqueeze(1)
            if not bool(at.any(-1).all()):
                raise InputError("choices must contain the token at each place.")
            logits = logits.gather(-1, among.unsqueeze(1).expand(-1, len(some), -1))
            own = logits.masked_fill(~at, -torch.inf).amax(-1)
        nats.append((logits.logsumexp(-1) - own).double())
        right.append(own >= logits.amax(-1))
    return Predictions(torch.cat(nats, 1), torch.cat(right, 1))


def _passes(
    model: Any, tokens: Int[Tensor, "B N"], places: list[int], changes: Sequence[Change]
) -> Iterator[tuple[list[int], Float[Tensor, "B n V"]]]:
    """Some positions and the logits that predict them, in order, at least in float32."""
    last, step = places[-1], places[-1]
    if not changes and not _by_length(model):
        words = int(getattr(model.config.get_text_config(), "vocab_size", 1))
        step = min(_LONGEST, max(_SHORTEST, _AT_ONCE // (words * len(tokens))))
    held: dict[str, Any] = {}
    start = 0
    while start < last:
        stop = min(last, start + step)
        some = [place for place in places if start < place <= stop]
        at = [place - 1 - start for place in some]
        here = torch.tensor(at, dtype=torch.long, device=tokens.device)
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        more = held | {"use_cache": stop - start < last} | ({"logits_to_keep": here if at else 1} if keeps else {})
        with intervened(model, changes) if changes else patched(model):
            given = model(tokens[:, start:stop], **more)
        logits = getattr(given, "logits", None)
        if not isinstance(logits, Tensor):
            raise InputError(f"model: {type(model).__name__} returns no logits. Use a model that predicts tokens.")
        keys = getattr(given, "past_key_values", None)
        kinds = {type(layer).__name__ for layer in getattr(keys, "layers", ())}  # does it hold only keys and values?
        if stop - start < last and not (kinds and kinds <= _KEYS):  # all tokens at once
            step = last
            continue
        held = {"past_key_values": keys}
        start = stop
        if some:
            logits = logits if keeps else logits[:, here]
            yield some, logits.to(torch.promote_types(logits.dtype, torch.float32))


def _by_length(model: Any) -> bool:
    """Whether the frequencies of a rotation, or an installed encoding, depend on the number of tokens."""
    patches = [vars(module)[INSTALLED] for module in model.modules() if INSTALLED in vars(module)]
    if any(patch.encoding.length_dependent for patch in patches):
        return True
    return any(each.get("rope_type") in _BY_LENGTH for config in configs_of(model) for each in rotations_of(config))
