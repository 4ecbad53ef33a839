"""Interventions: what replaces a head's output, and the metrics of each example."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from toeplens.lens.kit.trace import Replacement, Source
from toeplens.utils import InputError, invalid

# tokens [b, N], labels [b] or [b, N], lengths [b]; without names, as b may differ between batches
Batch = tuple[Int[Tensor, "_ _"], Int[Tensor, "_ *_"], Int[Tensor, "_"] | None]
Intervention = Literal["zero", "mean", "resample", "position"]
Metric = Literal["accuracy", "loss", "kl"]


def counted_batches(batches: Iterable[Batch]) -> list[Batch]:
    """The batches as a list; raises `InputError` if no example in them counts."""
    batch_list = list(batches)
    if not any((labels >= 0).any() for _, labels, _ in batch_list):
        raise InputError("batches must have at least one example that counts, got none.")
    return batch_list


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
        counted = is_counted(torch.cat([labels for _, labels, _ in batches]))
        donor_index = torch.arange(len(tokens), device=tokens.device)  # ignored examples keep their own outputs
        chosen = torch.from_numpy(donors(lengths[counted].cpu().numpy(), seed)).to(tokens.device)
        donor_index[counted] = donor_index[counted][chosen]
        rows = donor_index.split([len(labels) for _, labels, _ in batches])
        padded = any(batch_lengths is not None for _, _, batch_lengths in batches)
        return lambda index: list(source.head_outputs(tokens[rows[index]], lengths[rows[index]] if padded else None))
    return lambda index: "position" if intervention == "position" else None


@torch.no_grad()
def mean_outputs(source: Source, batches: Sequence[Batch]) -> list[Float[Tensor, "N H head_dim"]]:
    """Each layer's mean head outputs by position, over the counted sequences that have a token there.

    The mean is 0 at positions without tokens. Sums are in float64.
    """
    width = max(tokens.shape[1] for tokens, _, _ in batches)
    sums: list[Tensor] = []
    token_counts = torch.zeros(width, dtype=torch.float64)
    for tokens, labels, lengths in batches:
        length = tokens.shape[1]
        in_sequence = torch.arange(length, device=tokens.device) < _lengths(tokens, lengths).unsqueeze(1)
        present = in_sequence & is_counted(labels).unsqueeze(1)
        token_counts[:length] += present.sum(0).cpu()
        for layer, z in enumerate(source.head_outputs(tokens, lengths)):
            if layer == len(sums):
                sums.append(torch.zeros(width, *z.shape[2:], dtype=torch.float64, device=z.device))
            sums[layer][:length] += torch.where(present[:, :, None, None], z, 0).sum(0, dtype=torch.float64)
    return [total / token_counts.clamp(min=1).to(total.device)[:, None, None] for total in sums]


def donors(lengths: Int[np.ndarray, "n"], seed: int) -> Int[np.ndarray, "n"]:
    """For each example another one, of the same length if there is one: the previous in a random ring of that length.

    The only example of a length takes the next longer one, the longest of all the next shorter one.
    """
    if len(lengths) < 2:
        raise invalid("batches", "have at least 2 examples that count for resampling", len(lengths))
    rng = np.random.Generator(np.random.Philox(seed))
    order = np.lexsort((rng.random(len(lengths)), lengths))
    donor = np.empty(len(lengths), dtype=np.int64)
    for ring in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        donor[ring] = np.roll(ring, 1)
    for index in np.flatnonzero(donor[order] == order):
        donor[order[index]] = order[index + 1 if index + 1 < len(order) else index - 1]
    return donor


def _lengths(tokens: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.full((len(tokens),), tokens.shape[1], device=tokens.device) if lengths is None else lengths


def is_counted(labels: Int[Tensor, "b *N"]) -> Bool[Tensor, "b"]:
    """Which examples count: those with a label that is not negative."""
    return labels >= 0 if labels.ndim == 1 else (labels >= 0).any(1)


def losses(logits: Float[Tensor, "b *N C"], labels: Int[Tensor, "b *N"]) -> Float[Tensor, "b"]:
    """Each example's cross-entropy in nats, the mean over its counted labels; 0 if there are none."""
    counted = labels >= 0
    values = F.cross_entropy(logits.flatten(0, -2), labels.clamp(min=0).flatten(), reduction="none").view_as(labels)
    values = torch.where(counted, values, 0)
    return values if labels.ndim == 1 else values.sum(1) / counted.sum(1).clamp(min=1)


def metric_values(
    metric: Metric, logits: Float[Tensor, "V b *N C"], intact: Float[Tensor, "b *N C"], labels: Int[Tensor, "b *N"]
) -> Bool[Tensor, "V n"] | Float[Tensor, "V n"]:
    """The metric of each counted example (the mean over its counted labels), in each of V changed passes.

    ``accuracy``: whether the answer is correct. ``loss``: cross-entropy in nats. ``kl``: KL(intact || changed) of the
    output distribution in nats. The latter two are float64.
    """
    counted = labels >= 0
    if labels.ndim == 2:
        intact, answers = intact[counted], labels[counted]
        results = [metric_values(metric, changed[counted].unsqueeze(0), intact, answers)[0] for changed in logits]
        values = torch.zeros(len(logits), *labels.shape, dtype=torch.float64, device=labels.device)
        values[:, counted] = torch.stack(results).double()
        has_label = counted.any(1)
        return values.sum(-1)[:, has_label] / counted.sum(1)[has_label]
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
class AblationCache(Protocol):
    """Stores the results of an ablation; `get` may raise to interrupt it between two batches.

    Use one cache per ablation: the keys do not contain metrics, intervention or method.
    """

    def get(self, key: str) -> Bool[np.ndarray, "M V n"] | Float[np.ndarray, "M V n"] | None: ...

    def put(self, key: str, values: Bool[np.ndarray, "M V n"] | Float[np.ndarray, "M V n"]) -> None: ...


def example_metrics(
    metrics: Sequence[Metric],
    batches: Sequence[Batch],
    logits_of: Callable[[int], Iterable[Float[Tensor, "_ _ *N C"]]],
    cache: AblationCache | None = None,
    phase: str = "",
) -> tuple[Float[np.ndarray, "M n"], Float[np.ndarray, "M V n"]]:
    """Each metric of each counted example, for the intact model and V changed ones, from one pass.

    For a batch index, ``logits_of`` gives the class logits of all these passes, the intact model's first, some at once.
    """
    batch_values = []
    for index, (_, labels, _) in enumerate(batches):
        key = f"{phase}-{index}"
        values = cache.get(key) if cache else None
        if values is None:
            chunks, intact = [], None
            for logits in logits_of(index):
                intact = logits[0] if intact is None else intact
                chunks.append([metric_values(metric, logits, intact, labels).cpu().numpy() for metric in metrics])
            values = np.stack([np.concatenate(metric) for metric in zip(*chunks, strict=True)])
            if cache:
                cache.put(key, values)
        batch_values.append(values)
    all_values = np.concatenate(batch_values, axis=-1).astype(float)
    return all_values[:, 0], all_values[:, 1:]
