"""Presets by scale (smoke, laptop, desk, full, paper), shared by `toeplens train`, studies and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from toeplens import tasks
from toeplens.model import Protocol
from toeplens.utils import InputError, choose

PresetName = Literal["smoke", "laptop", "desk", "full", "paper"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
DISTANCE, COUNT = "trigger-distance", "trigger-count"


@dataclass(frozen=True)
class TaskSize:
    """A task's sizes: options by protocol, numbers of examples, and epochs."""

    paper: dict[str, Any]
    released: dict[str, Any]
    train_examples: int
    test_examples: int
    epochs: int


@dataclass(frozen=True)
class Preset:
    """Sizes of a model, its tasks and its training."""

    name: PresetName
    about: str
    model: dict[str, Any]
    optimiser: dict[str, Any]
    tasks: dict[str, TaskSize]


def _decoder(vocab_size: int, d_model: int, num_layers: int, num_heads: int, length: int, dropout: float = 0.0) -> Any:
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "d_ff": 2 * d_model, "num_layers": num_layers}
    return sizes | {"num_heads": num_heads, "max_len": length, "dropout": dropout}


def _tasks(length: int, between: int, side: int, triggers: int, *, distance: Any, count: Any) -> dict[str, TaskSize]:
    """Both tasks at one length; ``distance`` and ``count``: train examples, test examples, epochs."""
    shared = {"length": length, "num_triggers": triggers}
    released = {"length": length, "max_between": between, "max_side": side}
    return {DISTANCE: TaskSize({"length": length}, released, *distance), COUNT: TaskSize(shared, shared, *count)}


def task_sizes(sizes: dict[str, TaskSize], length: int) -> dict[str, TaskSize]:
    """The same tasks at another length, with trigger distances that grow with it."""
    released = sizes[DISTANCE].released
    between = length - sizes[DISTANCE].paper["length"] + released["max_between"]
    return {
        DISTANCE: replace(
            sizes[DISTANCE], paper={"length": length}, released={**released, "length": length, "max_between": between}
        ),
        COUNT: replace(
            sizes[COUNT],
            paper={**sizes[COUNT].paper, "length": length},
            released={**sizes[COUNT].released, "length": length},
        ),
    }


_FAST_OPTIMISER = {"lr": 3e-3, "betas": (0.9, 0.98), "batch_size": 128}
_SMOKE = Preset(
    name="smoke",
    about="runs everything once at toy size, in about a minute on 2 cores; its verdicts are not meaningful",
    model=_decoder(32, 32, num_layers=2, num_heads=4, length=12),
    optimiser=_FAST_OPTIMISER,
    tasks=_tasks(12, 5, 3, 8, distance=(2048, 512, 3), count=(2048, 512, 2)),
)
_LAPTOP = Preset(
    name="laptop",
    about="small models and short sequences that still show the differences, in under 10 minutes on 2 cores",
    model=_decoder(64, 64, num_layers=3, num_heads=4, length=24),
    optimiser=_FAST_OPTIMISER,
    tasks=_tasks(24, 14, 4, 10, distance=(12288, 2048, 5), count=(8192, 2048, 4)),
)
_DESK = Preset(
    name="desk",
    about="the papers' 6 layers and 16 heads at half their width on sequences of 40 tokens, each model trained to a "
    "plateau; minutes per model on one core",
    model=_decoder(64, 128, num_layers=6, num_heads=16, length=40),
    optimiser={
        "lr": 1e-3,
        "betas": (0.9, 0.98),
        "batch_size": 32,
        "warmup": 0.03,
        "schedule": "constant",
        "average": 0.998,
        "evaluations": 5,
        "plateau": {"gain": 0.05, "patience": 3},
    },
    tasks=_tasks(40, 22, 8, 16, distance=(30_000, 1024, 4), count=(30_000, 1024, 4)),
)
_FULL = Preset(
    name="full",
    about="the papers' sizes, trained by the recipe of desk, without dropout and on more examples; one to six hours "
    "per model on one core",
    model=_decoder(574, 256, num_layers=6, num_heads=16, length=128),
    optimiser=_DESK.optimiser
    | {"warmup": 0.0036, "evaluations": 25}  # as many steps, one per 10,000 examples
    # a model can stall for 30,000 examples before it learns the rest, so no plateau counts below 90 %
    | {"plateau": {"gain": 0.05, "patience": 3, "skill": 0.9}},
    tasks={
        DISTANCE: TaskSize(
            {"length": 120, "max_distance": 71}, {"length": 128, "max_between": 70}, 250_000, 1024, epochs=4
        ),
        COUNT: TaskSize({"length": 120}, {"length": 128}, 250_000, 1024, epochs=4),
    },
)
_PAPER = Preset(
    name="paper",
    about="the sizes and settings of Tables 3 and 4 of arXiv 2505.13027; hours on one GPU, resumable",
    model=_decoder(574, 256, num_layers=6, num_heads=16, length=128, dropout=0.1),
    optimiser={"lr": 1e-4, "betas": (0.98, 0.9), "batch_size": 512},
    tasks={
        DISTANCE: TaskSize({"length": 120, "max_distance": 71}, {"length": 128}, 70_000, 30_000, epochs=100),
        COUNT: TaskSize({"length": 120}, {"length": 128}, 35_000, 15_000, epochs=150),
    },
)
# sizes of models and their training, by name
PRESETS: dict[str, Preset] = {preset.name: preset for preset in (_SMOKE, _LAPTOP, _DESK, _FULL, _PAPER)}


def starting_spec(scale: str | Preset, protocol: str, task: str, encoding: str, seed: int) -> dict[str, Any]:
    """A spec for any encoding at a preset's sizes, as plain fields for `run_spec`.

    The model's protocol switches are left out, so they follow the encoding and the protocol. Raises `InputError`
    for an unknown scale, protocol or task, and for a task without preset sizes.
    """
    preset = scale if isinstance(scale, Preset) else PRESETS[choose("scale", scale, PRESETS)]
    form = choose("protocol", protocol, PROTOCOLS)
    if choose("task", task, tasks.names()) not in preset.tasks:
        raise InputError(
            f"task must be one of {', '.join(preset.tasks)} with a scale, got {task!r}. Use a spec or 'toeplens "
            "study' for others."
        )
    size = preset.tasks[task]
    options = size.paper if form == "paper" else size.released
    return {
        "task": task,
        "task_options": {"form": form, "vocab_size": preset.model["vocab_size"], **options},
        "model": {"protocol": form, "encoding": encoding, **preset.model},
        "train_examples": size.train_examples,
        "test_examples": size.test_examples,
        "epochs": size.epochs,
        "seed": seed,
        "data_seed": seed,
        **preset.optimiser,
    }
