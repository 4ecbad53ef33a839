"""Run jobs (train, ablate, measure) in parallel, locally or on a cluster, with output to a directory or a URL.

The measures themselves are in ``lens``; studies decide which jobs to run.
"""

from toeplens.engine.extrapolation import FACTORS, Extrapolation, LengthResult, extrapolate
from toeplens.engine.head_watch import HeadWatch, Watched
from toeplens.engine.jobs import Event, Job, ablate_run, must_have, read_ablation, run_job, run_jobs, without_weights
from toeplens.engine.measures import (
    FEWEST,
    MEASURES,
    Asked,
    DataSplit,
    as_record,
    examples_of,
    measure_run,
    read_measures,
)
from toeplens.engine.pool import must_serve, plan_workers, spread
from toeplens.engine.remote import working_copy
from toeplens.ground.execution import ClusterOptions, ExecutionOptions, Workers, cluster_of, stop_on_signals

__all__ = [
    "FACTORS",
    "FEWEST",
    "MEASURES",
    "Asked",
    "ClusterOptions",
    "DataSplit",
    "Event",
    "ExecutionOptions",
    "Extrapolation",
    "HeadWatch",
    "Job",
    "LengthResult",
    "Watched",
    "Workers",
    "ablate_run",
    "as_record",
    "cluster_of",
    "examples_of",
    "extrapolate",
    "measure_run",
    "must_have",
    "must_serve",
    "plan_workers",
    "read_ablation",
    "read_measures",
    "run_job",
    "run_jobs",
    "spread",
    "stop_on_signals",
    "without_weights",
    "working_copy",
]
