"""Fit one run: `train(spec, out) -> Run`; `RunSpec` says what it is, `Run.open(directory)` reads it back."""

from toeplens.training.environment import Execution, environment, plan_execution
from toeplens.training.loop import Batches, answer, correct, cosine_with_warmup, evaluate, train
from toeplens.training.run import Run
from toeplens.training.spec import RunSpec, run_spec

__all__ = [
    "Batches",
    "Execution",
    "Run",
    "RunSpec",
    "answer",
    "correct",
    "cosine_with_warmup",
    "environment",
    "evaluate",
    "plan_execution",
    "run_spec",
    "train",
]
