"""Train one run: `train(spec, out) -> Run`. `RunSpec` defines a run, `Run.open(directory)` loads it.

This package contains what one run needs, from its spec to its weights; sizes shared by studies are in ``presets``.
"""

from toeplens.training.batches import Batches, eval_batch, evaluate, is_correct
from toeplens.training.environment import Execution, Segment, Setup, describe_history, environment, plan_execution
from toeplens.training.loggers import Logger, RunInfo
from toeplens.training.loop import TrainingProbe, train, train_batched
from toeplens.training.presets import PRESETS, Preset, starting_spec
from toeplens.training.run import Run, initial_model
from toeplens.training.spec import Plateau, RunSpec, cosine_with_warmup, run_spec
from toeplens.utils.renamed import renamed_getattr

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
    "TrainingProbe",
    "cosine_with_warmup",
    "describe_history",
    "environment",
    "eval_batch",
    "evaluate",
    "initial_model",
    "is_correct",
    "plan_execution",
    "run_spec",
    "starting_spec",
    "train",
    "train_batched",
]
__getattr__ = renamed_getattr(__name__)
