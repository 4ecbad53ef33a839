"""Retrieval heads of a language model: attention to a needle's number when the model has to predict it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toeplens.ground import InputError, reading
from toeplens.ground.records import NearlyShare, Record
from toeplens.lens import retrieval
from toeplens.sources.huggingface import AttentionCall, captured
from toeplens.sources.huggingface.load import Loaded
from toeplens.studies.kit.questions import Item, batches

RETRIEVES = 0.1  # minimum score of a retrieval head (Wu et al. 2024, section 2)
_AT_ONCE = 1024  # tokens per batch
_DIGITS = 9  # decimals of a score, so that a tenth of the tokens is exactly 0.1
Place = tuple[int, int]  # layer and head


@dataclass(frozen=True, kw_only=True)
class HeadRetrieval(Record):
    """Retrieval of one head of the intact model, mean over needles (`toeplens.lens.Retrieval`)."""

    layer: reading.Count
    head: reading.Count
    score: NearlyShare
    mass: NearlyShare


@torch.no_grad()
def retrieval_of(
    loaded: Loaded, items: Sequence[Item], report: Callable[[int, int], None]
) -> tuple[HeadRetrieval, ...]:
    """Retrieval of every self-attention head of the decoder, mean over all needles among the items.

    Raises `InputError` for models that do not predict the next token: with an encoder, or without causal attention.
    """
    if loaded.model.config.is_encoder_decoder:
        raise InputError("needles must not be set for a model with an encoder.")
    asked = [item for item in items if item.needle is not None]
    sums: dict[Place, list[np.ndarray]] = {}
    done = 0
    report(0, len(asked))
    for numbers, tokens in batches(asked, _AT_ONCE):
        some = [asked[number] for number in numbers]
        read = torch.from_numpy(tokens).to(loaded.model.device)
        places = torch.tensor(some[0].places)
        needles = torch.tensor([item.needle for item in some])

        def look(call: AttentionCall, read: Tensor = read, places: Tensor = places, needles: Tensor = needles) -> None:
            loaded.check_attention(call.module)
            if call.kind != "self" or call.q.shape[2] != read.shape[1]:
                return
            if not call.causal:
                raise InputError(f"needles need causal attention, but {call.module} also sees later keys.")
            rows = places.to(call.q.device) - 1
            weights = call.softmax(call.logits(rows), rows)
            found = retrieval(weights, read, places, needles)
            for head, both in enumerate(torch.stack(found).sum(1).T.cpu().numpy()):
                sums.setdefault((call.layer, head), []).append(both)

        captured(loaded.model, {"input_ids": read}, look)
        done += len(some)
        report(done, len(asked))
    if not sums:
        raise InputError("needles: no self-attention of the model reads a whole text.")
    means = {place: np.sum(both, 0) / len(asked) for place, both in sums.items()}
    return tuple(
        HeadRetrieval(layer=layer, head=head, score=round(float(both[0]), _DIGITS), mass=float(both[1]))
        for (layer, head), both in sorted(means.items())
    )
