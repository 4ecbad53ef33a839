"""Which tokens of an attention are padding, as its own mask has it."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.capture.calls import AttentionCall
from toeplens.sources.huggingface.capture.masks import at_rows, blocks


def tokens_of(call: AttentionCall) -> Bool[Tensor, "B N"]:
    """Which queries of a self attention are tokens: those whose key some query sees. The others are padding.

    Raises `InputError` where that is not known: of a cross attention, of queries that are not of the same tokens as the
    keys, and where no key is hidden from all and one is from all but its own query, as XLNet hides padding.
    """
    batch, queries, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if call.kind == "cross" or (call.visible is not None and queries != keys):
        raise InputError(f"output: which queries of {call.module} are padding is not known, and none may be drawn on.")
    if call.visible is None:
        return torch.ones(batch, queries, dtype=torch.bool, device=call.q.device)
    place = torch.arange(keys, device=call.q.device)
    seen, by_others = torch.zeros(2, len(call.visible), keys, dtype=torch.bool, device=place.device)
    for part in blocks(queries, len(call.visible) * call.visible.shape[1] * keys):
        later = place - place[part].unsqueeze(-1)
        visible = at_rows(call.visible, place[part]).any(1)
        if call.causal:
            visible = visible & (later <= 0)
        seen |= visible.any(1)
        by_others |= (visible & (later != 0)).any(1)
    if call.causal:  # which the last query of all, or of a chunk, alone can see
        by_others |= (place == keys - 1) | ((place + 1) % (call.chunk or keys) == 0)
    if keys > 1 and bool(seen.all()) and not bool(by_others.all()):
        raise InputError(
            f"output: a token of {call.module} is seen by no other; whether it is padding is not known, and none may "
            "be drawn on."
        )
    return seen.expand(batch, -1)
