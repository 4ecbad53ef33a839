"""The most important head: its attention, its frequencies, and the paths that read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.backends.decoder.path_patching import iter_path_logits, paths_from
from toeplens.lens import Batch, ablate_bands, ablate_heads, bootstrap_means
from toeplens.lens.kit.interventions import example_metrics
from toeplens.lens.kit.terms import dense_profile
from toeplens.tasks import Task
from toeplens.utils.records import Dims, FiniteFloat, NonNegativeInt, PositiveInt, Record, StrictStr

QUERY_ROLES = ("first trigger", "second trigger", "last token")  # positions of queries and keys that are distinguished
KEY_ROLES = (*QUERY_ROLES, "itself", "others")


@dataclass(frozen=True)
class Circuit(Record):
    """The head with the largest ablation effect on the loss, and its circuit.

    head        layer and head, from 0
    cost        ablation effect in nats
    examples    number of examples
    attention   [3, 5] mean attention of the `QUERY_ROLES` on the `KEY_ROLES`; a key with two of these roles
                counts as the first; NaN if the sequences have no triggers
    offsets     [D] mean logit by distance, query minus key
    first       the smallest distance
    bands       [n] effect in nats of freezing one frequency of the head; empty without a rotation
    readers     readers of the head: ``ffn`` of its own layer, then queries, keys, values and ffn of each later layer,
                and the readout
    layers      [P] layers of the readers, from 0
    paths       [P] effect in nats of removing the head from the reader's input; low, high: bootstrap interval
    """

    LABEL = "circuit"

    head: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]
    cost: FiniteFloat
    examples: PositiveInt
    attention: Float[np.ndarray, "Q K"]
    offsets: Float[np.ndarray, "D"]
    first: int
    bands: Float[np.ndarray, "n"]
    readers: Annotated[tuple[StrictStr, ...], Dims("P")]
    layers: Annotated[tuple[NonNegativeInt, ...], Dims("P")]
    paths: Float[np.ndarray, "P"]
    low: Float[np.ndarray, "P"]
    high: Float[np.ndarray, "P"]


@torch.no_grad()
def circuit(source: DecoderSource, batches: Sequence[Batch], task: Task, seed: int) -> Circuit:
    """The circuit of the head with the largest ablation effect in a trained decoder (by loss, on these examples).

    Arguments
        batches  (tokens [b, N], labels [b], lengths [b] or None); negative labels are ignored
        task     task whose triggers are distinguished, if it has any
        seed     seed of the data
    """
    ablation = ablate_heads(source, batches, metric="loss", cumulative=False, bootstrap=0)
    layer, head = (int(i) for i in np.unravel_index(ablation.drops.argmax(), ablation.drops.shape))
    paths = paths_from(source.model, layer)

    def logits_of(index: int) -> Iterator[Tensor]:
        tokens, _, lengths = batches[index]
        for logits in iter_path_logits(source.model, tokens, lengths, (layer, head)):
            yield logits.unsqueeze(0)

    intact, ablated = example_metrics(("loss",), batches, logits_of)
    effects = (ablated[0] - intact[0]).T
    low, high = bootstrap_means(effects)
    tokens = torch.cat([batch[0] for batch in batches])
    lengths = None if batches[0][2] is None else torch.cat([batch[2] for batch in batches if batch[2] is not None])
    trace = next(iter(source.attention(tokens, lengths, layers=[layer], positions=None)))
    bands = np.empty(0)
    if source.pairs_per_layer[layer]:
        bands = ablate_bands(source, batches, layers=[layer], bootstrap=0).drops[layer, head]
    return Circuit(
        head=[layer, head],
        cost=float(effects[:, -1].mean()),
        examples=len(effects),
        attention=_role_attention(trace.weights()[:, head].double(), tokens, lengths, task.marked_words(seed)),
        offsets=dense_profile(trace).diagonal_means[head].cpu().numpy(),
        first=0 if trace.causal else 1 - tokens.shape[1],
        bands=bands,
        readers=tuple(path.reader for path in paths),
        layers=tuple(path.layer for path in paths),
        paths=effects[:, :-1].mean(0),
        low=low[:-1],
        high=high[:-1],
    )


def _role_attention(
    weights: Float[Tensor, "b N N"], tokens: Tensor, lengths: Tensor | None, words: np.ndarray
) -> Float[np.ndarray, "Q K"]:
    """See `Circuit.attention`; over sequences with marked words at two or more positions."""
    marked = torch.isin(tokens, torch.as_tensor(words, device=tokens.device))
    ends = torch.full((len(tokens),), tokens.shape[1], device=tokens.device) if lengths is None else lengths
    marked &= torch.arange(tokens.shape[1], device=tokens.device) < ends[:, None]
    has_triggers = marked.sum(1) > 1
    if not bool(has_triggers.any()):
        return np.full((len(QUERY_ROLES), len(KEY_ROLES)), np.nan)
    weights, marked, ends = weights[has_triggers], marked[has_triggers].int(), ends[has_triggers]
    first, last = marked.argmax(1), marked.shape[1] - 1 - marked.flip(1).argmax(1)
    positions = torch.stack((first, last, ends - 1), dim=1)
    sequences = torch.arange(len(positions), device=positions.device)
    rows = []
    for query in positions.T:
        remaining = weights[sequences, query].clone()
        row = []
        for key in (*positions.T, query):
            row.append(remaining[sequences, key].clone())
            remaining[sequences, key] = 0  # a key with two roles counts once
        rows.append(torch.stack([*row, remaining.sum(1)]).mean(1))
    return torch.stack(rows).cpu().numpy()
