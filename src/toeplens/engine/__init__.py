"""Run jobs (train, ablate, measure) in parallel, locally or on a cluster, with output to a directory or a URL.

The measures themselves are in ``lens``; studies decide which jobs to run.
"""

from toeplens.engine.cluster import Cluster
from toeplens.engine.examples import DataSplit, examples_of
from toeplens.engine.extrapolation import FACTORS, Extrapolation, LengthResult, extrapolate
from toeplens.engine.head_watch import HeadWatch, Watched
from toeplens.engine.jobs import Job, ablate_run, carry_out, read_ablation, without_weights
from toeplens.engine.many import Event, Workers, must_have, plan_workers, run_jobs, spread
from toeplens.engine.measures import FEWEST, MEASURES, Asked, as_record, measure_run, read_measures
from toeplens.engine.pool import Limits
from toeplens.engine.remote import working_copy
from toeplens.ground.signals import stop_on_signals

__all__ = [
    "FACTORS",
    "FEWEST",
    "MEASURES",
    "Asked",
    "Cluster",
    "DataSplit",
    "Event",
    "Extrapolation",
    "HeadWatch",
    "Job",
    "LengthResult",
    "Limits",
    "Watched",
    "Workers",
    "ablate_run",
    "as_record",
    "carry_out",
    "examples_of",
    "extrapolate",
    "measure_run",
    "must_have",
    "plan_workers",
    "read_ablation",
    "read_measures",
    "run_jobs",
    "spread",
    "stop_on_signals",
    "without_weights",
    "working_copy",
]
