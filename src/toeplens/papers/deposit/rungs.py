"""The ladder: what is changed of a scale, one thing at a time, to see what a deposit comes with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from toeplens.model import Protocol
from toeplens.training.presets import DISTANCE, Preset, task_sizes

Sized = TypeVar("Sized", bound=Preset)


@dataclass(frozen=True)
class Rung:
    """One change of a scale.

    axis       what is changed: the rungs of an axis stand on one line
    value      what it is here, in a few words
    model, optimiser  fields of the model and of the training that it sets
    tokens     length of the texts
    epochs     most epochs
    """

    axis: str
    value: str
    model: dict[str, Any] = field(default_factory=dict)
    optimiser: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    epochs: int | None = None

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.axis}: {self.value}"

    def applied(self, scale: Sized) -> Sized:
        """The scale with this change."""
        sizes = scale.tasks
        if self.tokens is not None:
            sizes = task_sizes(sizes, self.tokens)
        if self.epochs is not None:
            sizes = {task: replace(size, epochs=self.epochs) for task, size in sizes.items()}
        model = scale.model | self.model | ({} if self.tokens is None else {"max_len": self.tokens})
        return replace(scale, model=model, optimiser=scale.optimiser | self.optimiser, tasks=sizes)


LENGTH, HEADS, LAYERS, WIDTH = "tokens", "heads", "layers", "width"
RATE, REGULARISED, TRAINED = "learning rate", "regularisation", "training"
_PLATEAU = {"gain": 0.05, "patience": 3}
# at a tenth of the rate a plateau takes five times as many evaluations to tell
_SLOW = {"lr": 1e-4, "betas": (0.98, 0.9), "plateau": {"gain": 0.05, "patience": 15}, "warmup": 0.006}

RUNGS: dict[str, Rung] = {
    **{f"tokens-{count}": Rung(LENGTH, str(count), tokens=count) for count in (24, 32, 48, 64)},
    "tokens-96": Rung(LENGTH, "96, of 128 words", model={"vocab_size": 128}, tokens=96),  # the labels need as many
    **{f"heads-{count}": Rung(HEADS, str(count), model={"num_heads": count}) for count in (4, 8)},
    **{f"layers-{count}": Rung(LAYERS, str(count), model={"num_layers": count}) for count in (2, 4)},
    "width-256": Rung(WIDTH, "256", model={"d_model": 256, "d_ff": 512}),
    "rate-paper": Rung(RATE, "the papers' 1e-4 and betas", optimiser=_SLOW, epochs=20),
    "cosine": Rung(RATE, "1e-3 with a cosine", optimiser={"schedule": "cosine", "average": None, "plateau": None}),
    "drop": Rung(REGULARISED, "dropout 0.1", model={"dropout": 0.1}),
    "decay": Rung(REGULARISED, "weight decay 0.1", optimiser={"weight_decay": 0.1}),
    # the warm-up has as many steps as without the change
    "longer": Rung(
        TRAINED,
        "8 times the plateau's steps",
        optimiser={"plateau": _PLATEAU | {"beyond": 8.0}, "warmup": 0.004},
        epochs=30,
    ),
}
BASES: dict[Protocol, tuple[str, ...]] = {
    "paper": ("rope", "mla", "absolute", "nope"),
    "released": ("rope-alone", "rope"),
}
TASK = DISTANCE
