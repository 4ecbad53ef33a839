"""What a language model's heads look at: the token before, the first one, and what followed an earlier copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from toeplens.engine.language.bits import TEST
from toeplens.engine.language.planted import letters_of
from toeplens.engine.language.texts import cut
from toeplens.ground.records import AtLeast1, Each, NearlyShare, Record
from toeplens.lens import AttentionTrace
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.tasks.language import LanguageTask

_Shares = Annotated[Float[np.ndarray, "L H"], Each(NearlyShare)]
_ALPHABET = 64  # frequent tokens of which repeated texts are made
_WEIGHTS = 2**24  # attention weights that are formed at once


@dataclass(frozen=True)
class HeadPatterns(Record):
    """Mean weights of each head, over the queries that have such a key.

    previous   on the token before the query's, in texts of the test split
    first      on the text's first token, there
    induction  on the token that followed the earlier copy of the query's, in random tokens that are repeated once
               (prefix matching, Olsson et al. 2022)
    texts      of either kind
    """

    previous: _Shares
    first: _Shares
    induction: _Shares
    texts: AtLeast1


@torch.no_grad()
def head_patterns(model: Decoder, task: LanguageTask, *, texts: int = 64, seed: int = 0) -> HeadPatterns:
    """What each head attends to, on texts of the training length.

    Arguments
        texts  how many of the test split, and how many of repeated random tokens
        seed   of both
    """
    corpus, half = task.corpus(), task.length // 2
    real = cut(corpus, TEST, task.length, texts, seed).tokens[:, :-1]
    rng = np.random.Generator(np.random.Philox(seed))
    once = rng.choice(letters_of(corpus, _ALPHABET), (texts, half))
    rows = torch.arange(1, task.length)
    looked = _mean_weights(model, real, [(rows, rows - 1), (rows, torch.zeros_like(rows))])
    again = torch.arange(half, 2 * half - 1)
    (copied,) = _mean_weights(model, np.concatenate((once, once), axis=1), [(again, again - half + 1)])
    return HeadPatterns(looked[0], looked[1], copied, len(real))


def _mean_weights(
    model: Decoder, tokens: Int[np.ndarray, "K n"], pairs: list[tuple[Tensor, Tensor]]
) -> list[Float[np.ndarray, "L H"]]:
    """Each head's mean weight at some pairs of query and key, over texts and pairs."""
    device = model.readout.weight.device
    given = torch.from_numpy(tokens).to(device)
    size = max(1, _WEIGHTS // (model.config.num_heads * tokens.shape[1] ** 2))
    sums: list[list[Tensor]] = [[] for _ in pairs]
    for layer in AttentionTrace(DecoderSource(model), given):
        found = [torch.zeros(model.config.num_heads, dtype=torch.float64) for _ in pairs]
        for start in range(0, len(tokens), size):
            weights = layer.weights(sequences=slice(start, start + size))
            for total, (queries, keys) in zip(found, pairs, strict=True):
                total += weights[:, :, queries, keys].double().mean(-1).sum(0).cpu()
        for every, total in zip(sums, found, strict=True):
            every.append(total / len(tokens))
    return [torch.stack(every).numpy() for every in sums]
