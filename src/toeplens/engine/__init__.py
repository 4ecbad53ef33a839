"""Run jobs (train, ablate, measure) in parallel, locally or on a cluster, with output to a directory or a URL.

The measures themselves are in ``lens``; studies decide which jobs to run.
"""

from toeplens.engine.extrapolation import FACTORS, Extrapolation, LengthResult, extrapolate
from toeplens.engine.head_probe import HeadProbe, HeadProbeRow
from toeplens.engine.jobs import (
    Event,
    Job,
    ablate_run,
    check_workers,
    read_ablation,
    run_job,
    run_jobs,
    without_weights,
)
from toeplens.engine.measures import (
    MEASURES,
    MIN_EXAMPLES,
    DataSplit,
    ExampleRequest,
    as_record,
    examples_of,
    measure_run,
    read_measures,
)
from toeplens.engine.pool import check_cluster, plan_workers, run_parallel
from toeplens.engine.remote import working_copy
from toeplens.utils.execution import ClusterOptions, ExecutionOptions, Workers, cluster_of, stop_on_signals
from toeplens.utils.renamed import renamed_getattr

__all__ = [
    "FACTORS",
    "MEASURES",
    "MIN_EXAMPLES",
    "ClusterOptions",
    "DataSplit",
    "Event",
    "ExampleRequest",
    "ExecutionOptions",
    "Extrapolation",
    "HeadProbe",
    "HeadProbeRow",
    "Job",
    "LengthResult",
    "Workers",
    "ablate_run",
    "as_record",
    "check_cluster",
    "check_workers",
    "cluster_of",
    "examples_of",
    "extrapolate",
    "measure_run",
    "plan_workers",
    "read_ablation",
    "read_measures",
    "run_job",
    "run_jobs",
    "run_parallel",
    "stop_on_signals",
    "without_weights",
    "working_copy",
]
__getattr__ = renamed_getattr(__name__)
