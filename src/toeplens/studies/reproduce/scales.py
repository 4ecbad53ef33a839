"""The sizes at which the papers' experiments are run: smoke, laptop, paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ScaleName = Literal["smoke", "laptop", "paper"]
DISTANCE, COUNT = "trigger-distance", "trigger-count"


@dataclass(frozen=True)
class TaskSize:
    """A task's sizes: its options by protocol, and how long and on how many examples to train."""

    paper: dict[str, Any]
    released: dict[str, Any]
    train_examples: int
    test_examples: int
    epochs: int


@dataclass(frozen=True)
class Scale:
    """One scale.

    labels         the encodings of each task
    partial_heads  the numbers of RoPE heads of Fig. 5
    watched        whether heads are watched in training: at the paper's size a look takes minutes on a CPU, more than a
                   short time budget allows
    """

    name: ScaleName
    about: str
    model: dict[str, Any]
    optimiser: dict[str, Any]
    tasks: dict[str, TaskSize]
    labels: dict[str, tuple[str, ...]]
    partial_heads: dict[str, tuple[int, ...]]
    ablation_examples: int
    watched: bool = True


_CURVES = ("rope", "mla", "nope", "alibi", "relative", "absolute", "rope-absolute")

SMOKE = Scale(
    name="smoke",
    about="does everything once at toy size, in about a minute on 2 cores; its verdicts mean nothing",
    model={"vocab_size": 32, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "max_len": 12, "dropout": 0.0},
    optimiser={"lr": 3e-3, "betas": (0.9, 0.98), "batch_size": 128},
    tasks={
        DISTANCE: TaskSize(
            paper={"length": 12},
            released={"length": 12, "max_between": 5, "max_side": 3},
            train_examples=2048,
            test_examples=512,
            epochs=3,
        ),
        COUNT: TaskSize(
            paper={"length": 12, "num_triggers": 8},
            released={"length": 12, "num_triggers": 8},
            train_examples=2048,
            test_examples=512,
            epochs=2,
        ),
    },
    labels={DISTANCE: ("rope", "nope", "mla", "rope-absolute"), COUNT: ("rope", "nope", "mla")},
    partial_heads={DISTANCE: (1,), COUNT: ()},
    ablation_examples=512,
)

LAPTOP = Scale(
    name="laptop",
    about="small models and short texts that still show the differences, in under 10 minutes on 2 cores",
    model={
        "vocab_size": 64,
        "d_model": 64,
        "d_ff": 128,
        "num_layers": 3,
        "num_heads": 4,
        "max_len": 24,
        "dropout": 0.0,
    },
    optimiser={"lr": 3e-3, "betas": (0.9, 0.98), "batch_size": 128},
    tasks={
        DISTANCE: TaskSize(
            paper={"length": 24},
            released={"length": 24, "max_between": 14, "max_side": 4},
            train_examples=12288,
            test_examples=2048,
            epochs=5,
        ),
        COUNT: TaskSize(
            paper={"length": 24, "num_triggers": 10},
            released={"length": 24, "num_triggers": 10},
            train_examples=8192,
            test_examples=2048,
            epochs=4,
        ),
    },
    labels={DISTANCE: _CURVES, COUNT: ("rope", "nope", "mla")},
    partial_heads={DISTANCE: (1, 2), COUNT: ()},
    ablation_examples=2048,
)

PAPER = Scale(
    name="paper",
    about="the sizes and settings of the paper's Tables 3 and 4; hours on one GPU, in pieces",
    model={
        "vocab_size": 574,
        "d_model": 256,
        "d_ff": 512,
        "num_layers": 6,
        "num_heads": 16,
        "max_len": 128,
        "dropout": 0.1,
    },
    optimiser={"lr": 1e-4, "betas": (0.98, 0.9), "batch_size": 512},
    tasks={
        DISTANCE: TaskSize(
            paper={"length": 120, "max_distance": 71},
            released={"length": 128},
            train_examples=70_000,
            test_examples=30_000,
            epochs=100,
        ),
        COUNT: TaskSize(
            paper={"length": 120},
            released={"length": 128},
            train_examples=35_000,
            test_examples=15_000,
            epochs=150,
        ),
    },
    labels={DISTANCE: (*_CURVES, "random"), COUNT: (*_CURVES, "random")},
    partial_heads={DISTANCE: (1, 2, 4, 8), COUNT: (1, 2, 4, 8)},
    ablation_examples=8192,
    watched=False,
)

SCALES: dict[str, Scale] = {scale.name: scale for scale in (SMOKE, LAPTOP, PAPER)}
