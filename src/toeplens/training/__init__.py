"""Train one run: `train(spec, out) -> Run`. `RunSpec` defines a run, `Run.open(directory)` loads it.

This package contains what one run needs, from its spec to its weights; sizes shared by studies are in ``presets``.
"""

from toeplens.training.batches import Batches, answer, correct, evaluate
from toeplens.training.environment import Execution, Segment, Setup, environment, plan_execution, told
from toeplens.training.loggers import Logger, RunInfo
from toeplens.training.loop import Watcher, train, train_as_one
from toeplens.training.presets import PRESETS, Preset, starting_spec
from toeplens.training.run import Run, initial_model
from toeplens.training.spec import Plateau, RunSpec, cosine_with_warmup, run_spec

__all__ = [
    "PRESETS",
    "Batches",
    "Execution",
    "Logger",
    "Plateau",
    "Preset",
    "Run",
    "RunInfo",
    "RunSpec",
    "Segment",
    "Setup",
    "Watcher",
    "answer",
    "correct",
    "cosine_with_warmup",
    "environment",
    "evaluate",
    "initial_model",
    "plan_execution",
    "run_spec",
    "starting_spec",
    "told",
    "train",
    "train_as_one",
]
