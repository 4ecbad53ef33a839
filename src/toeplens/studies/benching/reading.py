"""An audit of a model, against what one writes by hand: hooks on its projections, and the patterns read off them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toeplens.ground import EnvironmentFailure
from toeplens.lens import PatternSums
from toeplens.sources.huggingface import AttentionCall, compared
from toeplens.studies.benching.race import race
from toeplens.studies.benching.record import Contest, Timed

READ = ("previous", "current", "first", "induction", "entropy", "distance")
ALLOWED = 1e-4  # between the audit's numbers and the reader's
_LAYERS, _HEADS, _KEY_HEADS, _WIDTH, _WORDS, _THETA = 4, 8, 4, 256, 512, 10_000.0
_SEQUENCES, _TOKENS = 8, 256
Numbers = dict[str, np.ndarray]  # [layers, heads] by name
Audit = Callable[..., Any]  # `toeplens.studies.audit`


def audits(
    audit: Audit,
    device: torch.device,
    rounds: int,
    seconds: float,
    *,
    sequences: int = _SEQUENCES,
    tokens: int = _TOKENS,
) -> Contest:
    """Every head of a small Llama read: by an audit, by its proof and patterns alone, and by hooks.

    The texts' second half repeats the first, so that there is induction to be seen. Raises `EnvironmentFailure` where
    the numbers that all three give are not the same.
    """
    model, ids = random_llama(device), _texts(device, sequences, tokens)
    found: dict[str, Numbers] = {}

    def whole() -> None:
        heads = audit(model, ids, effects="none").heads
        found["audit"] = {name: np.array([getattr(head, name) for head in heads], float) for name in READ}

    def patterns() -> None:
        found["patterns"] = _patterns(model, ids)

    def hooks() -> None:
        found["hooks"] = read_by_hooks(model, ids)

    names = ("toeplens", "toeplens, proof and patterns alone", "hooks written by hand")
    times = race(dict(zip(names, (whole, patterns, hooks), strict=True)), device, rounds=rounds, seconds=seconds)
    read = {program: np.stack([numbers[name].ravel() for name in READ]) for program, numbers in found.items()}
    apart = float(np.abs(np.stack((read["audit"], read["patterns"])) - read["hooks"]).max())
    if not apart <= ALLOWED:
        raise EnvironmentFailure(
            f"audit: its numbers and those read by hand differ by {apart:.1g}; at most {ALLOWED:g} is allowed with "
            "this version of transformers."
        )
    return Contest(
        kind="audit",
        work=f"audit: a random Llama of {_LAYERS} layers of {_HEADS} heads, {sequences} texts of {tokens} tokens; all "
        f"give {', '.join(READ)}; hooks prove nothing; the audit alone gives shares of position and content, use of "
        "frequencies and decay, and with the patterns what depends on the offset",
        unit="heads",
        count=_LAYERS * _HEADS,
        apart=apart,
        timed=tuple(
            Timed(name=name, ours=name != names[2], work="equal" if name == names[1] else "asked", seconds=times[name])
            for name in names
        ),
    )


def random_llama(device: torch.device, longest: int = _TOKENS, layers: int = _LAYERS) -> Any:
    """A small Llama of transformers with random weights, large enough that its heads' weights are not all alike."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KEY_HEADS,
        max_position_embeddings=longest,
        initializer_range=0.1,
    )
    model: Any = LlamaModel(config)
    return model.eval().to(device)


def _texts(device: torch.device, sequences: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(1, _WORDS, (sequences, tokens // 2), generator=generator)
    return torch.cat((half, half), 1).to(device)


def _patterns(model: Any, ids: Tensor) -> Numbers:
    """By the audit's own passes, with its proof, and of its measures the patterns alone."""
    rows: list[Any] = []

    def look(call: AttentionCall) -> None:
        heads, tokens = call.q.shape[1:3]
        sums = PatternSums(heads=heads, queries=tokens, keys=tokens, tokens=ids)
        for some, first, logits, weights in call.blocks():
            sums.add(some, logits, weights, start=first)
        rows.append(sums.result())

    compared(model, {"input_ids": ids}, look)
    return {name: np.stack([getattr(row, name) for row in rows]) for name in READ}


@torch.no_grad()
def read_by_hooks(model: Any, ids: Tensor) -> Numbers:
    """As one writes it: q and k by hooks on their projections, rotated, their weights, and the patterns of these."""
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[..., None]:
        def hook(module: object, given: object, output: Tensor) -> None:
            caught[name] = output

        return hook

    hooks = []
    for number, layer in enumerate(model.layers):
        for part in ("q_proj", "k_proj"):
            projection = getattr(layer.self_attn, part)
            hooks.append(projection.register_forward_hook(catch(f"{number}.{part}")))
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    rows = []
    for number in range(len(model.layers)):
        q, k = (_rotated(caught[f"{number}.{part}"]) for part in ("q_proj", "k_proj"))
        rows.append(_read(_weights(q, k), ids))
    return {name: torch.stack([row[name] for row in rows]).cpu().numpy() for name in READ}


def _rotated(projected: Tensor) -> Tensor:
    """[B, N, heads * dim] as [B, heads, N, dim], its halves turned by each position's angles."""
    dim = _WIDTH // _HEADS
    x = projected.unflatten(-1, (-1, dim)).transpose(1, 2)
    frequencies = _THETA ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.arange(x.shape[2], device=x.device).unsqueeze(1) * frequencies
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """Causal attention [B, H, N, N]; heads of keys are shared by neighbouring heads of queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(later, -math.inf).softmax(-1)


def _read(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """The numbers of each head [H], means over texts and over the queries that have them."""
    length = ids.shape[1]
    at = torch.arange(length, device=ids.device)
    after = torch.zeros(len(ids), length, length, dtype=torch.bool, device=ids.device)
    after[:, :, 1:] = ids.unsqueeze(2) == ids[:, None, :-1]  # the key's token follows a copy of the query's
    after &= (at <= at.unsqueeze(1)) & (at != at.unsqueeze(1) + 1)
    entropies = -torch.special.xlogy(weights, weights).sum(-1)[..., 1:] / (at[1:] + 1).log()
    return {
        "previous": weights.diagonal(-1, 2, 3).mean((0, 2)),
        "current": weights.diagonal(0, 2, 3).mean((0, 2)),
        "first": weights[:, :, 1:, 0].mean((0, 2)),
        "induction": (weights * after.unsqueeze(1)).sum((0, 2, 3)) / after.any(-1).sum(),
        "entropy": entropies.mean((0, 2)),
        "distance": (weights * (at.unsqueeze(1) - at).abs()).sum(-1).mean((0, 2)),
    }
