"""Interventions: what replaces a head's output, and the metrics of each example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.ground import InputError, invalid
from toeplens.lens.kit.trace import Replacement, Source

# tokens [b, N], labels [b] or [b, N], lengths [b]; without names, as b may differ between batches
Batch = tuple[Int[Tensor, "_ _"], Int[Tensor, "_ *_"], Int[Tensor, "_"] | None]
Intervention = Literal["zero", "mean", "resample", "position"]
Metric = Literal["accuracy", "loss", "kl"]


def counted_batches(batches: Iterable[Batch]) -> list[Batch]:
    """The batches as a list; raises `InputError` if no example in them counts."""
    kept = list(batches)
    if not any((labels >= 0).any() for _, labels, _ in kept):
        raise InputError("batches must have at least one example that counts, got none.")
    return kept


def replacements(
    source: Source, batches: Sequence[Batch], intervention: Intervention, seed: int
) -> Callable[[int], Replacement]:
    """A function that returns the replacement of all layers' head outputs for a batch index (see `ablate_heads`)."""
    if intervention == "mean":
        means = mean_outputs(source, batches)
        return lambda index: [mean[None, : batches[index][0].shape[1]] for mean in means]
    if intervention == "resample":
        widths = {tokens.shape[1] for tokens, _, _ in batches}
        if len(widths) > 1:
            raise invalid("batches", "have one width for resampling", sorted(widths))
        tokens = torch.cat([tokens for tokens, _, _ in batches])
        lengths = torch.cat([_lengths(tokens, lengths) for tokens, _, lengths in batches])
        counted = counts(torch.cat([labels for _, labels, _ in batches]))
        others = torch.arange(len(tokens), device=tokens.device)  # ignored examples keep their own outputs
        chosen = torch.from_numpy(donors(lengths[counted].cpu().numpy(), seed)).to(tokens.device)
        others[counted] = others[counted][chosen]
        of_batch = others.split([len(labels) for _, labels, _ in batches])
        padded = any(given is not None for _, _, given in batches)
        return lambda index: list(source.outputs(tokens[of_batch[index]], lengths[of_batch[index]] if padded else None))
    return lambda index: "position" if intervention == "position" else None


@torch.no_grad()
def mean_outputs(source: Source, batches: Sequence[Batch]) -> list[Float[Tensor, "N H head_dim"]]:
    """Each layer's mean head outputs by position, over the counted sequences that have a token there.

    The mean is 0 at positions without tokens. Sums are in float64.
    """
    width = max(tokens.shape[1] for tokens, _, _ in batches)
    sums: list[Tensor] = []
    reached = torch.zeros(width, dtype=torch.float64)
    for tokens, labels, lengths in batches:
        length = tokens.shape[1]
        here = torch.arange(length, device=tokens.device) < _lengths(tokens, lengths).unsqueeze(1)
        present = here & counts(labels).unsqueeze(1)
        reached[:length] += present.sum(0).cpu()
        for layer, z in enumerate(source.outputs(tokens, lengths)):
            if layer == len(sums):
                sums.append(torch.zeros(width, *z.shape[2:], dtype=torch.float64, device=z.device))
            sums[layer][:length] += torch.where(present[:, :, None, None], z, 0).sum(0, dtype=torch.float64)
    return [total / reached.clamp(min=1).to(total.device)[:, None, None] for total in sums]


def donors(lengths: Int[np.ndarray, "n"], seed: int) -> Int[np.ndarray, "n"]:
    """For each example another one, of the same length if there is one: the previous in a random ring of that length.

    The only example of a length takes the next longer one, the longest of all the next shorter one.
    """
    if len(lengths) < 2:
        raise invalid("batches", "have at least 2 examples that count for resampling", len(lengths))
    rng = np.random.Generator(np.random.Philox(seed))
    order = np.lexsort((rng.random(len(lengths)), lengths))
    found = np.empty(len(lengths), dtype=np.int64)
    for ring in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        found[ring] = np.roll(ring, 1)
    for place in np.flatnonzero(found[order] == order):
        found[order[place]] = order[place + 1 if place + 1 < len(order) else place - 1]
    return found


def _lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.full((len(tokens),), tokens.shape[1], device=tokens.device) if lengths is None else lengths


def counts(labels: Int[Tensor, "b *N"]) -> Bool[Tensor, "b"]:
    """Which examples count: those with a label that is not negative."""
    return labels >= 0 if labels.ndim == 1 else (labels >= 0).any(1)


def losses(logits: Float[Tensor, "b *N C"], labels: Int[Tensor, "b *N"]) -> Float[Tensor, "b"]:
    """Each example's cross-entropy in nats, the mean over its counted labels; 0 if there are none."""
    counted = labels >= 0
    each = F.cross_entropy(logits.flatten(0, -2), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    each = torch.where(counted, each, 0)
    return each if labels.ndim == 1 else each.sum(1) / counted.sum(1).clamp(min=1)


def outcomes(
    metric: Metric, logits: Float[Tensor, "V b *N C"], intact: Float[Tensor, "b *N C"], labels: Int[Tensor, "b *N"]
) -> Bool[Tensor, "V n"] | Float[Tensor, "V n"]:
    """The metric of each counted example (the mean over its counted labels), in each of V changed passes.

    ``accuracy``: whether the answer is correct. ``loss``: cross-entropy in nats. ``kl``: KL(intact || changed) of the
    output distribution in nats. The latter two are float64.
    """
    counted = labels >= 0
    if labels.ndim == 2:
        own, answers = intact[counted], labels[counted]
        found = [outcomes(metric, changed[counted].unsqueeze(0), own, answers)[0] for changed in logits]
        each = torch.zeros(len(logits), *labels.shape, dtype=torch.float64, device=labels.device)
        each[:, counted] = torch.stack(found).double()
        some = counted.any(1)
        return each.sum(-1)[:, some] / counted.sum(1)[some]
    if metric == "accuracy":
        return (logits.argmax(-1) == labels)[:, counted]
    log_q = logits[:, counted].double().log_softmax(-1)
    if metric == "loss":
        return -log_q.gather(-1, labels[counted].expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)
    log_p = intact[counted].double().log_softmax(-1)
    return F.kl_div(log_q, log_p.expand_as(log_q), reduction="none", log_target=True).sum(-1)


def harm(metric: Metric, intact: Float[np.ndarray, "*#V n"], changed: Float[np.ndarray, "*V n"]) -> np.ndarray:
    """The harm to each example: correct answers lost, the rise in loss, or the rise in divergence."""
    return intact - changed if metric == "accuracy" else changed - intact


@runtime_checkable
class Memory(Protocol):
    """Stores the results of an ablation; `get` may raise to interrupt it between two batches.

    Use one memory per ablation: the keys do not contain metrics, intervention or method.
    """

    def get(self, key: str) -> Bool[np.ndarray, "M V n"] | Float[np.ndarray, "M V n"] | None: ...

    def put(self, key: str, answers: Bool[np.ndarray, "M V n"] | Float[np.ndarray, "M V n"]) -> None: ...


def examples_answers(
    metrics: Sequence[Metric],
    batches: Sequence[Batch],
    logits_of: Callable[[int], Iterable[Float[Tensor, "_ _ *N C"]]],
    memory: Memory | None = None,
    phase: str = "",
) -> tuple[Float[np.ndarray, "M n"], Float[np.ndarray, "M V n"]]:
    """Each metric of each counted example, for the intact model and V changed ones, from one pass.

    For a batch index, ``logits_of`` gives the class logits of all these passes, the intact model's first, some at once.
    """
    parts = []
    for index, (_, labels, _) in enumerate(batches):
        key = f"{phase}-{index}"
        answers = memory.get(key) if memory else None
        if answers is None:
            pieces, intact = [], None
            for logits in logits_of(index):
                intact = logits[0] if intact is None else intact
                pieces.append([outcomes(each, logits, intact, labels).cpu().numpy() for each in metrics])
            answers = np.stack([np.concatenate(each) for each in zip(*pieces, strict=True)])
            if memory:
                memory.put(key, answers)
        parts.append(answers)
    together = np.concatenate(parts, axis=-1).astype(float)
    return together[:, 0], together[:, 1:]
