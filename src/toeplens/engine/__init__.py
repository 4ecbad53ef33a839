"""How many runs are carried out: jobs (train, then ablate), several at a time on this machine."""

from toeplens.engine.jobs import Job, Limits, ablate_run, carry_out, examples_of, read_ablation
from toeplens.engine.local import Event, plan_workers, run_local
from toeplens.engine.signals import signals_held, stop_on_signals

__all__ = [
    "Event",
    "Job",
    "Limits",
    "ablate_run",
    "carry_out",
    "examples_of",
    "plan_workers",
    "read_ablation",
    "run_local",
    "signals_held",
    "stop_on_signals",
]
