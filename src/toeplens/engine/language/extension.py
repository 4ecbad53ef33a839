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
from toeplens.engine.language.bits import TEST, Interval, Passages, bpb_scale, compute_losses, cut_longest
from toeplens.model import Decoder, decoder_config
from toeplens.tasks.language import LanguageTask
from toeplens.training import Batches, RunSpec
from toeplens.training.batches import loss_of, micro_batch_size, to_float32
from toeplens.utils import InputError, invalid
from toeplens.utils.records import NonNegative, NonNegativeInt, PositiveInt, Record, StrictBool, StrictStr

TARGET_FACTOR = 4  # target length of the methods, in training lengths
FACTORS = (1, 2, 4, 8)  # evaluated lengths, in training lengths
TUNED_METHODS = ("none", "interpolation", "ntk", "yarn", "dropped")
TUNING_SHARE = 0.03  # tuning steps as a share of the training steps
TUNING_RATE = 0.2  # peak learning rate of tuning relative to training; warm-up over the first tenth, then decay to 0
_TEST_TEXTS, _SEARCH_TEXTS = 24, 8
_POPULATION, _ROUNDS = 6, 4
_SCALES = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5)


@dataclass(frozen=True)
class ExtensionRow(Record):
    """A method at one length, in bits per byte on the last half training length of the same texts.

    method   name of the method; ``none``: the unchanged model
    tuned    whether the model was tuned with the method
    bits     bits per byte at the end of the texts; None if the model cannot read them, or has diverged
    gain     difference from the untuned ``none`` on the same texts; negative if the method helps
    set      settings of the method, as text; empty if there are none
    why      why there are no values; otherwise empty
    """

    method: StrictStr
    tuned: StrictBool
    length: PositiveInt
    factor: NonNegative
    texts: NonNegativeInt = 0
    bits: Interval | None = None
    gain: Interval | None = None
    set: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Extension(Record):
    """All methods at all lengths; ``steps``: tuning steps, 0 without tuning."""

    target: PositiveInt
    steps: NonNegativeInt
    rows: tuple[ExtensionRow, ...]


def extension(model: Decoder, spec: RunSpec, task: LanguageTask, *, tuned: bool, seed: int = 0) -> Extension:
    """Compare methods of context extension for a trained model, for texts of `TARGET_FACTOR` times the training length.

    For RoPE: position interpolation (2306.15595), NTK-aware, dynamic NTK, YaRN (2309.00071), LongRoPE (with a small
    search of factors on the validation split; 2402.13753), p-RoPE (the lower half of the frequencies frozen;
    2410.06205), ReRoPE, Self-Extend (2401.01325), and dropped position (2512.12167). Without an encoding: scaled
    logits, with the factor searched on the validation split (2404.12224).

    Arguments
        tuned  compare `TUNED_METHODS` after tuning for `TUNING_SHARE` of the training steps on texts of the target
               length (of the training length for dropped position, as published); otherwise all methods without tuning.
               With tuning, ``none`` is the model tuned on longer texts without a change

    Lengths that fewer than two test documents have are skipped. Raises `InputError` for other encodings, and if no
    length remains.
    """
    methods = _methods(model, spec, task, seed)
    texts, missing = cut_longest(task.corpus(), TEST, [task.length * factor for factor in FACTORS], _TEST_TEXTS, seed)
    scale, half = bpb_scale(task.corpus(), TEST, texts.documents), task.length // 2
    steps = max(1, round(TUNING_SHARE * spec.total_steps)) if tuned else 0
    lengths = {task.length * factor: float(factor) for factor in FACTORS if task.length * factor not in missing}
    baseline = {length: _end_losses(model, texts, length, half) for length in lengths}
    rows = []
    for name in [name for name in methods if not tuned or name in TUNED_METHODS]:
        extended, settings = methods[name]()
        if tuned:
            _tune(extended, spec, task, task.length * (1 if name == "dropped" else TARGET_FACTOR), steps, seed)
        for length, factor in lengths.items():
            losses, base_losses = _end_losses(extended, texts, length, half), baseline[length]
            results: dict[str, Any] = {"reason": losses}
            if not isinstance(losses, str):
                results = {"texts": len(texts), "bits": Interval.over(scale * losses, texts.documents)}
                if not isinstance(base_losses, str):
                    results["gain"] = Interval.over(scale * (losses - base_losses), texts.documents)
            rows.append(ExtensionRow(name, tuned, length, factor, set=settings, **results))
    return Extension(TARGET_FACTOR, steps, tuple(rows))


MethodBuilder = Callable[[], tuple[Decoder, str]]


def _methods(model: Decoder, spec: RunSpec, task: LanguageTask, seed: int) -> dict[str, MethodBuilder]:
    config, train_length = model.config, task.length
    if config.encoding == "nope" and config.input_encoding is None:
        return {"none": lambda: (copy.deepcopy(model), ""), "scaled": lambda: _scale_logits(model, task, seed)}
    if config.encoding != "rope" or config.input_encoding is not None:
        raise invalid("encoding", "be 'rope' or 'nope' to extend the length after training", config.encoding)
    defaults = {name: option.default for name, option in encoding_options("rope").items()}
    rope_options = {**defaults, **config.encoding_options}
    base_options: dict[str, Any] = {"base": rope_options["base"], "pairing": rope_options["pairing"]}
    settings: dict[str, Any] = {
        "rope_theta": rope_options["base"],
        "pairing": rope_options["pairing"],
        "max_position_embeddings": train_length,
    }
    scaling = {"original_max_position_embeddings": train_length, "factor": float(TARGET_FACTOR)}
    window = train_length // 2
    # the largest offset is at most one beyond those of training
    group = math.ceil((TARGET_FACTOR * train_length - window) / (train_length - window))

    def method(encoding: str, **options: Any) -> MethodBuilder:
        return lambda: (_with_encoding(model, encoding, options), "")

    def longrope() -> tuple[Decoder, str]:
        factors = _search_factors(model, task, settings, scaling, seed)
        text = ", ".join(f"{factor:.2f}" for factor in factors)
        return _with_encoding(model, "rope-longrope", _longrope(settings, scaling, factors)), f"factors {text}"

    return {
        "none": lambda: (copy.deepcopy(model), ""),
        "interpolation": method("rope-linear", **settings, factor=float(TARGET_FACTOR)),
        "ntk": method("rope-ntk", **settings, factor=float(TARGET_FACTOR)),
        "dynamic": method("rope-dynamic", **settings, factor=1.0),
        "yarn": method("rope-yarn", **settings, **scaling),
        "longrope": longrope,
        "p-rope": method("p-rope", **base_options, p=0.5),
        "rerope": method("rerope", **base_options, window=window),
        "self-extend": method("self-extend", **base_options, window=window, group=group),
        "dropped": method("nope"),
    }


def _longrope(settings: dict[str, Any], scaling: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    values = [float(factor) for factor in factors]
    return {**settings, **scaling, "short_factor": [1.0] * len(values), "long_factor": values}


def _with_encoding(model: Decoder, encoding: str, options: dict[str, Any]) -> Decoder:
    """The same weights with another encoding, which has no weights."""
    fields = {**dict(model.config), "encoding": encoding, "encoding_options": options}
    with torch.random.fork_rng(devices=[]):
        new_model = Decoder(decoder_config(**fields)).to(model.readout.weight)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in new_model.named_parameters():
            parameter.copy_(weights[name])
    return new_model.eval()


def _end_losses(model: Decoder, texts: Passages, length: int, half: int) -> np.ndarray | str:
    """The mean loss at the end of each text, or why there is none."""
    try:
        losses = compute_losses(model, texts.tokens[:, -length - 1 :], length - half)[0].mean(1)
    except InputError as error:
        return str(error)
    return losses if np.isfinite(losses).all() else "its losses are not finite."


def _mean_loss(model: Decoder, texts: Passages, length: int) -> float:
    losses = _end_losses(model, texts, length, length // 2)
    return math.inf if isinstance(losses, str) else float(losses.mean())


def _validation_texts(task: LanguageTask, seed: int) -> tuple[Passages, int]:
    """Texts of the longest available length up to the target, and that length."""
    lengths = [task.length * factor for factor in range(1, TARGET_FACTOR + 1)]
    texts, _ = cut_longest(task.corpus(), "validation", lengths, _SEARCH_TEXTS, seed)
    return texts, texts.tokens.shape[1] - 1


def _search_factors(
    model: Decoder, task: LanguageTask, settings: dict[str, Any], scaling: dict[str, Any], seed: int
) -> np.ndarray:
    """LongRoPE's non-decreasing factors, from a small evolutionary search that starts at interpolation and NTK."""
    texts, length = _validation_texts(task, seed)
    pairs = model.config.head_dim // 2
    rng = np.random.Generator(np.random.Philox(seed))
    share = np.linspace(0, 1, pairs)
    candidates = [np.full(pairs, float(TARGET_FACTOR)), TARGET_FACTOR**share, 1 + (TARGET_FACTOR - 1) * share]

    def loss(factors: np.ndarray) -> float:
        return _mean_loss(_with_encoding(model, "rope-longrope", _longrope(settings, scaling, factors)), texts, length)

    scored = [(loss(factors), factors) for factors in candidates]
    for _ in range(_ROUNDS):
        best = sorted(scored, key=lambda pair: pair[0])[:3]
        for index in range(_POPULATION):
            changed = best[index % len(best)][1] * np.exp(rng.normal(0, 0.2, pairs))
            changed = np.maximum.accumulate(np.clip(changed, 1.0, 1.25 * TARGET_FACTOR))
            scored.append((loss(changed), changed))
    return min(scored, key=lambda pair: pair[0])[1]


def _scale_logits(model: Decoder, task: LanguageTask, seed: int) -> tuple[Decoder, str]:
    """Scale all logits by the best factor on validation texts of the target length."""
    texts, length = _validation_texts(task, seed)

    def scale_by(factor: float) -> Decoder:
        scaled = copy.deepcopy(model)
        for layer in range(scaled.config.num_layers):
            scaled.block(layer).attention.scale *= factor
        return scaled

    best = min(_SCALES, key=lambda factor: _mean_loss(scale_by(factor), texts, length))
    return scale_by(best), f"factor {best:g}"


def _tune(model: Decoder, spec: RunSpec, task: LanguageTask, length: int, steps: int, seed: int) -> None:
    """Tune on texts of this length, with as many tokens per step as in training."""
    size = max(1, spec.batch_size * task.length // length)
    longer = task if length == task.length else task.at_length(length)
    device = model.readout.weight.device
    available = (len(task.corpus().stream("train")) - 1) // length
    data = Batches.of(longer.dataset("train", min(size * steps, available), seed), device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TUNING_RATE * spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
    )
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        for step, (tokens, labels, lengths) in enumerate(islice(cycle(data.split(size)), steps)):
            share = min((step + 1) / max(1.0, 0.1 * steps), (steps - step) / max(1.0, 0.9 * steps), 1.0)
            optimizer.param_groups[0]["lr"] = TUNING_RATE * spec.lr * share  # linear warm-up, then linear decay to 0
            optimizer.zero_grad()
            parts = Batches(tokens, labels, lengths).split(micro_batch_size(spec, tokens.shape[1], device))
            for inputs, targets, ends in parts:
                (loss_of(to_float32(model(inputs, ends)), targets) / labels.numel()).backward()
            optimizer.step()
    model.eval()
