"""Context extension of a trained model by changing its rotation, with and without short tuning."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from toeplens.encodings import options as encoding_options
from toeplens.engine.language.bits import TEST, Interval, Texts, bits_a_byte, longest, read
from toeplens.ground import InputError, invalid
from toeplens.ground.records import AtLeast1, Count, Positive, Record, Text, Truth
from toeplens.model import Decoder, decoder_config
from toeplens.tasks.language import LanguageTask
from toeplens.training import Batches, RunSpec
from toeplens.training.batches import loss_of, precise, texts_at_once

TARGET = 4  # target length of the methods, in training lengths
FACTORS = (1, 2, 4, 8)  # evaluated lengths, in training lengths
TUNED = ("none", "interpolation", "ntk", "yarn", "dropped")
SHARE = 0.03  # tuning steps as a share of the training steps
RATE = 0.2  # peak learning rate of tuning relative to training; warm-up over the first tenth, then decay to 0
_TEXTS, _SEARCHED = 24, 8
_POPULATION, _ROUNDS = 6, 4
_SCALES = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5)


@dataclass(frozen=True)
class Extended(Record):
    """A method at one length, in bits per byte on the last half training length of the same texts.

    method   name of the method; ``none``: the unchanged model
    tuned    whether the model was tuned with the method
    bits     bits per byte at the end of the texts; None if the model cannot read them, or has diverged
    gain     difference from the untuned ``none`` on the same texts; negative if the method helps
    set      settings of the method, as text; empty if there are none
    why      why there are no values; otherwise empty
    """

    method: Text
    tuned: Truth
    length: AtLeast1
    factor: Positive
    texts: Count = 0
    bits: Interval | None = None
    gain: Interval | None = None
    set: str = ""
    why: str = ""


@dataclass(frozen=True)
class Extension(Record):
    """All methods at all lengths; ``steps``: tuning steps, 0 without tuning."""

    target: AtLeast1
    steps: Count
    rows: tuple[Extended, ...]


def extension(model: Decoder, spec: RunSpec, task: LanguageTask, *, tuned: bool, seed: int = 0) -> Extension:
    """Compare methods of context extension for a trained model, with a target of `TARGET` times the training length.

    For RoPE: position interpolation (2306.15595), NTK-aware, dynamic NTK, YaRN (2309.00071), LongRoPE (with a small
    search of factors on the validation split; 2402.13753), p-RoPE (the lower half of the frequencies frozen;
    2410.06205), ReRoPE, Self-Extend (2401.01325), and dropped position (2512.12167). Without an encoding: scaled
    logits, with the factor searched on the validation split (2404.12224).

    Arguments
        tuned  compare the methods of `TUNED` after tuning for `SHARE` of the training steps on texts of the target
               length (of the training length for dropped position, as published); otherwise all methods without tuning.
               With tuning, ``none`` is the model tuned on longer texts without a change

    Lengths that fewer than two test documents have are skipped. Raises `InputError` for other encodings, and if no
    length remains.
    """
    methods = _methods(model, spec, task, seed)
    texts, missing = longest(task.corpus(), TEST, [task.length * factor for factor in FACTORS], _TEXTS, seed)
    scale, half = bits_a_byte(task.corpus(), TEST, texts.documents), task.length // 2
    steps = max(1, round(SHARE * spec.total_steps)) if tuned else 0
    lengths = {task.length * factor: float(factor) for factor in FACTORS if task.length * factor not in missing}
    plain = {length: _ends(model, texts, length, half) for length in lengths}
    rows = []
    for name in [name for name in methods if not tuned or name in TUNED]:
        changed, told = methods[name]()
        if tuned:
            _tune(changed, spec, task, task.length * (1 if name == "dropped" else TARGET), steps, seed)
        for length, factor in lengths.items():
            found, before = _ends(changed, texts, length, half), plain[length]
            results: dict[str, Any] = {"why": found}
            if not isinstance(found, str):
                results = {"texts": len(texts), "bits": Interval.over(scale * found, texts.documents)}
                if not isinstance(before, str):
                    results["gain"] = Interval.over(scale * (found - before), texts.documents)
            rows.append(Extended(name, tuned, length, factor, set=told, **results))
    return Extension(TARGET, steps, tuple(rows))


Made = Callable[[], tuple[Decoder, str]]


def _methods(model: Decoder, spec: RunSpec, task: LanguageTask, seed: int) -> dict[str, Made]:
    config, trained = model.config, task.length
    if config.encoding == "nope" and config.input_encoding is None:
        return {"none": lambda: (copy.deepcopy(model), ""), "scaled": lambda: _scaled(model, task, seed)}
    if config.encoding != "rope" or config.input_encoding is not None:
        raise invalid("encoding", "be 'rope' or 'nope' to extend the length after training", config.encoding)
    known = {name: option.default for name, option in encoding_options("rope").items()}
    given = {**known, **config.encoding_options}
    plain: dict[str, Any] = {"base": given["base"], "pairing": given["pairing"]}
    ruled: dict[str, Any] = {
        "rope_theta": given["base"],
        "pairing": given["pairing"],
        "max_position_embeddings": trained,
    }
    first = {"original_max_position_embeddings": trained, "factor": float(TARGET)}
    window = trained // 2
    group = math.ceil(
        (TARGET * trained - window) / (trained - window)
    )  # the largest offset is within those of training

    def of(encoding: str, **options: Any) -> Made:
        return lambda: (_with(model, encoding, options), "")

    def longrope() -> tuple[Decoder, str]:
        factors = _searched(model, task, ruled, first, seed)
        told = ", ".join(f"{factor:.2f}" for factor in factors)
        return _with(model, "rope-longrope", _longrope(ruled, first, factors)), f"factors {told}"

    return {
        "none": lambda: (copy.deepcopy(model), ""),
        "interpolation": of("rope-linear", **ruled, factor=float(TARGET)),
        "ntk": of("rope-ntk", **ruled, factor=float(TARGET)),
        "dynamic": of("rope-dynamic", **ruled, factor=1.0),
        "yarn": of("rope-yarn", **ruled, **first),
        "longrope": longrope,
        "p-rope": of("p-rope", **plain, p=0.5),
        "rerope": of("rerope", **plain, window=window),
        "self-extend": of("self-extend", **plain, window=window, group=group),
        "dropped": of("nope"),
    }


def _longrope(ruled: dict[str, Any], first: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    each = [float(factor) for factor in factors]
    return {**ruled, **first, "short_factor": [1.0] * len(each), "long_factor": each}


def _with(model: Decoder, encoding: str, options: dict[str, Any]) -> Decoder:
    """The same weights with another encoding, which has no weights."""
    fields = {**dict(model.config), "encoding": encoding, "encoding_options": options}
    with torch.random.fork_rng(devices=[]):
        made = Decoder(decoder_config(**fields)).to(model.readout.weight)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(weights[name])
    return made.eval()


def _ends(model: Decoder, texts: Texts, length: int, half: int) -> np.ndarray | str:
    """The mean loss at the end of each text, or why there is none."""
    try:
        found = read(model, texts.tokens[:, -length - 1 :], length - half)[0].mean(1)
    except InputError as error:
        return str(error)
    return found if np.isfinite(found).all() else "its losses are not finite."


def _loss(model: Decoder, texts: Texts, length: int) -> float:
    found = _ends(model, texts, length, length // 2)
    return math.inf if isinstance(found, str) else float(found.mean())


def _validation(task: LanguageTask, seed: int) -> tuple[Texts, int]:
    """Texts of the longest available length up to the target, and that length."""
    lengths = [task.length * factor for factor in range(1, TARGET + 1)]
    texts, _ = longest(task.corpus(), "validation", lengths, _SEARCHED, seed)
    return texts, texts.tokens.shape[1] - 1


def _searched(
    model: Decoder, task: LanguageTask, ruled: dict[str, Any], first: dict[str, Any], seed: int
) -> np.ndarray:
    """LongRoPE's non-decreasing factors, from a small evolutionary search that starts at interpolation and NTK."""
    texts, length = _validation(task, seed)
    pairs = model.config.head_dim // 2
    rng = np.random.Generator(np.random.Philox(seed))
    share = np.linspace(0, 1, pairs)
    living = [np.full(pairs, float(TARGET)), TARGET**share, 1 + (TARGET - 1) * share]

    def loss(factors: np.ndarray) -> float:
        return _loss(_with(model, "rope-longrope", _longrope(ruled, first, factors)), texts, length)

    scored = [(loss(factors), factors) for factors in living]
    for _ in range(_ROUNDS):
        best = sorted(scored, key=lambda one: one[0])[:3]
        for index in range(_POPULATION):
            changed = best[index % len(best)][1] * np.exp(rng.normal(0, 0.2, pairs))
            changed = np.maximum.accumulate(np.clip(changed, 1.0, 1.25 * TARGET))
            scored.append((loss(changed), changed))
    return min(scored, key=lambda one: one[0])[1]


def _scaled(model: Decoder, task: LanguageTask, seed: int) -> tuple[Decoder, str]:
    """Scale all logits by the best factor on validation texts of the target length."""
    texts, length = _validation(task, seed)

    def by(factor: float) -> Decoder:
        made = copy.deepcopy(model)
        for layer in range(made.config.num_layers):
            made.block(layer).attention.scale *= factor
        return made

    best = min(_SCALES, key=lambda factor: _loss(by(factor), texts, length))
    return by(best), f"factor {best:g}"


def _tune(model: Decoder, spec: RunSpec, task: LanguageTask, length: int, steps: int, seed: int) -> None:
    """Tune on texts of this length, with as many tokens per step as in training."""
    size = max(1, spec.batch_size * task.length // length)
    longer = task if length == task.length else task.at_length(length)
    device = model.readout.weight.device
    there = (len(task.corpus().stream("train")) - 1) // length
    data = Batches.of(longer.dataset("train", min(size * steps, there), seed), device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE * spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
    )
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        for step, (tokens, labels, lengths) in enumerate(islice(cycle(data.split(size)), steps)):
            share = min((step + 1) / max(1.0, 0.1 * steps), (steps - step) / max(1.0, 0.9 * steps), 1.0)
            optimizer.param_groups[0]["lr"] = RATE * spec.lr * share  # linear warm-up, then linear decay to 0
            optimizer.zero_grad()
            parts = Batches(tokens, labels, lengths).split(texts_at_once(spec, tokens.shape[1], device))
            for some, wanted, ends in parts:
                (loss_of(precise(model(some, ends)), wanted) / labels.numel()).backward()
            optimizer.step()
    model.eval()
