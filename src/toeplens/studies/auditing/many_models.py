"""Audits of many models with the same options: one process and one directory per model, locally or on a cluster."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import socket
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toeplens.backends.hf.checkpoints import GGUF, is_local_path
from toeplens.backends.hf.load import resolve_device
from toeplens.backends.hf.model import error_summary, import_transformers
from toeplens.engine import ExecutionOptions, Workers, check_cluster, cluster_of, plan_workers, run_parallel
from toeplens.studies.auditing.inputs import Progress
from toeplens.studies.auditing.record import Audit, Number, files_of
from toeplens.studies.auditing.result import open_audit
from toeplens.studies.auditing.sentences import HeadNames, largest_difference, top_row
from toeplens.studies.auditing.study import Data, WritePage, audit_in, is_run
from toeplens.studies.kit.options import AuditOptions
from toeplens.utils import EnvironmentFailure, InputError, ToeplensError, write_json
from toeplens.utils.execution import children_ignore_sigint
from toeplens.utils.machine import is_out_of_memory, memory, parse_bytes
from toeplens.utils.outputs import LOCK, open_output_dir
from toeplens.utils.records import NonNegativeInt, Record, StrictStr
from toeplens.version import __version__

RESULT = "audits.json"
_DIGITS = 16  # length of a request's digest
_POLL_SECONDS = 0.1  # seconds
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_MEMORY_RATIO, _GGUF_RATIO = 3, 8  # memory of an audit relative to the model's files: float32 with activations; GGUF


def digest_of(model: str, data: Data, options: AuditOptions) -> str:
    """A digest of a requested audit and the software versions.

    Files are identified by names, sizes and times, a model on the hub by its name.
    """
    model_files = [file for file in files_of(Path(model)) if file[0] != LOCK] if Path(model).exists() else model
    data_files = files_of(data) if isinstance(data, Path) else data
    request = replace(options, memory=None)  # which changes no number
    versions = [__version__, torch.__version__, import_transformers().__version__]
    return hashlib.sha256(repr((model_files, versions, data_files, request)).encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class ModelOutcome(Record):
    """The outcome for one model."""

    LABEL = "audits"

    name: StrictStr  # of its directory
    model: StrictStr  # as requested
    reason: StrictStr | None = None  # there is no audit; None if there is one
    code: NonNegativeInt = 0  # the exit code of that failure
    about: dict[StrictStr, Any] = field(default_factory=dict)  # from the audit
    layers: NonNegativeInt = 0
    heads: NonNegativeInt = 0
    positional: Number = None  # mean positional share over the heads
    baseline: Number = None  # loss of the intact model
    effect: Number = None  # largest effect of a head
    head: StrictStr | None = None  # with that effect, counted from 1: L2 H5
    difference: Number = None  # of recomputed weights and outputs; the largest
    max_difference: Number = None  # difference between the captured and a plain forward pass


@dataclass(frozen=True)
class Audits(Record):
    """Audits of many models, in the given order."""

    LABEL = "audits"

    found: tuple[ModelOutcome, ...]  # finished and failed models
    missing: tuple[StrictStr, ...] = ()  # names of models that were not processed

    @property
    def succeeded(self) -> list[ModelOutcome]:
        """Models with an audit."""
        return [outcome for outcome in self.found if outcome.reason is None]

    @property
    def failed(self) -> list[ModelOutcome]:
        """Models whose audit failed."""
        return [outcome for outcome in self.found if outcome.reason is not None]

    @property
    def code(self) -> int:
        """The exit code: failures of the environment take precedence over invalid input."""
        return max((outcome.code for outcome in self.failed), default=0)


def outcome_of(name: str, model: str, audit: Audit) -> ModelOutcome:
    """A short summary of an audit."""
    shares = [head.positional for head in audit.heads if head.positional is not None]
    top = top_row(audit.heads, "effect")
    return ModelOutcome(
        name,
        model,
        about=audit.about,
        layers=len(audit.layers),
        heads=len(audit.heads),
        positional=float(np.mean(shares)) if shares else None,
        baseline=audit.baseline,
        effect=None if top is None else top[1],
        head=None if top is None else HeadNames.of_audits(audit).short(top[0]),
        difference=largest_difference(audit),
        max_difference=audit.max_difference,
    )


@dataclass(frozen=True)
class AuditJob:
    """A model to be audited."""

    name: str
    requested: str  # the model as requested
    model: str  # the same, as an absolute path if it is on disk
    on_disk: bool  # whether it is on disk, as seen by the driver
    directory: Path  # of its audit
    data: Data
    options: AuditOptions
    digest: str
    write: WritePage | None

    def failed(self, error: ToeplensError) -> ModelOutcome:
        """The outcome if its audit failed."""
        return ModelOutcome(self.name, self.requested, " ".join(str(error).split()), error.exit_code)

    def existing_outcome(self) -> ModelOutcome | None:
        """The outcome of an existing audit with the same request; None if there is none."""
        try:
            audit = open_audit(self.directory)
        except InputError:  # none, or damaged
            return None
        return outcome_of(self.name, self.requested, audit) if audit.about.get("request") == self.digest else None


def audit_in_process(
    job: AuditJob, execution: ExecutionOptions, on_progress: Callable[..., None]
) -> ModelOutcome | None:
    """Audit a model in a separate process; None if interrupted.

    ``on_progress`` receives a description of the current work, the finished amount and the total. An interrupted
    process is killed at once; its finished parts are saved.
    """
    device = "cpu" if execution.device == "cpu" else job.options.device  # auto would not spread over several GPUs
    local_job = replace(job, options=replace(job.options, device=device))
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_audit_and_send, args=(local_job, torch.get_num_threads(), sender), daemon=True)
    with children_ignore_sigint():
        process.start()
    sender.close()
    try:
        while not execution.is_over():
            if not receiver.poll(_POLL_SECONDS):
                continue
            message = receiver.recv()
            if not isinstance(message, tuple):
                return message
            on_progress(*message)
        return None
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = f"The process ended ({cause}). If memory is short, lower --workers, --sequences or --max-tokens."
        return job.failed(EnvironmentFailure(f"{reason} Finished work is saved."))
    finally:
        process.kill()
        process.join()
        receiver.close()


def _audit_and_send(job: AuditJob, threads: int, sender: Connection) -> None:
    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    sender.send(audit_job(job, lambda what, done, total: sender.send((what, done, total))))


def audit_job(job: AuditJob, on_progress: Progress) -> ModelOutcome:
    """The outcome for one model; no error of one model stops the others."""
    try:
        if job.on_disk and not Path(job.model).exists():
            raise InputError(
                f"model: machine {socket.gethostname()} has no {job.model}. Use a directory that all machines share."
            )
        arguments = job.directory, job.model, job.data, job.options, job.write
        return outcome_of(job.name, job.requested, audit_in(*arguments, digest=job.digest, on_progress=on_progress))
    except ToeplensError as error:
        return job.failed(error)
    except Exception as error:
        if is_out_of_memory(error):
            return job.failed(EnvironmentFailure("Out of memory. Lower --workers or the sizes."))
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"
        return job.failed(InputError(f"model: the audit failed: {error_summary(error)} ({location})."))


def audit_many(
    models: Sequence[str],
    out: Path | str,
    data: Data = None,
    options: AuditOptions | None = None,
    *,
    workers: Workers = None,
    write: WritePage | None = None,
    on_progress: Callable[[str, str, int, int], None] = lambda name, what, done, total: None,
    on_done: Callable[[ModelOutcome, bool], None] = lambda outcome, new: None,
) -> Audits:
    """Audit several models, each in its own process and its own directory in ``out`` (`directories_of`).

    If a model fails or its process dies, the error is recorded and the other models are still audited. Models with an
    audit of the same request, files and versions are not audited again; interrupted audits are resumed.

    Arguments
        models       directories, GGUF files, names on the hub, or runs' directories
        data         texts by name, or a file of token ids (default: random tokens)
        workers      number of models to audit in parallel on this machine (default: as many as cores and memory allow;
                     1 on a GPU and for models on the hub, whose size is unknown); or
                     `toeplens.engine.ClusterOptions`, whose machines must see ``out`` and the models on disk
        write        function that writes a page to a directory; must be importable
        on_progress  called with a model's name, a description of the current work, the finished amount and the total
        on_done      called with the outcome for each model, and whether it is new

    Raises `InputError`, before anything is written, for a model that is given twice, for options that do not apply to a
    run among the models, and for an ``out`` that holds something else.
    """
    out_dir, options, names = Path(out), options or AuditOptions(), directories_of(models)
    tokens, texts = (data, None) if isinstance(data, Path) else (None, data)
    if any(map(is_run, models)):
        options.check_run(text=texts, tokens=tokens)
    if tokens is not None:
        if not tokens.is_file():
            raise InputError(f"tokens must be a file for several models, but {tokens} does not exist.")
        data = tokens.absolute()
    jobs = []
    for name, model in zip(names, models, strict=True):
        on_disk = is_local_path(model)
        path, target = os.path.abspath(model) if on_disk else model, out_dir.absolute() / name
        jobs.append(AuditJob(name, model, path, on_disk, target, data, options, digest_of(path, data, options), write))
    cluster = cluster_of(workers)
    if cluster.on_ray:
        check_cluster(cluster, options.device)
    else:
        resolve_device(options.device)
        count, _ = plan_workers(len(jobs), options.device, cluster.workers)
        workers = count if cluster.workers is not None else min(count, _memory_limit(jobs))
    outcomes: dict[str, ModelOutcome] = {}

    def write_state() -> Audits:
        finished = tuple(outcomes[job.name] for job in jobs if job.name in outcomes)
        state = Audits(finished, tuple(job.name for job in jobs if job.name not in outcomes))
        write_json(out_dir / RESULT, state.to_dict(), rows="found")
        return state

    def finish(outcome: ModelOutcome | None, new: bool) -> bool:
        if outcome is not None:
            outcomes[outcome.name] = outcome
            write_state()
            on_done(outcome, new)
        return outcome is not None

    with open_output_dir(out_dir, "audits", (RESULT,)):
        write_state()
        for job in jobs:
            finish(job.existing_outcome(), False)
        remaining = [job for job in jobs if job.name not in outcomes]
        if remaining:
            run_parallel(
                audit_in_process,
                remaining,
                ExecutionOptions(device=options.device),
                workers,
                on_done=lambda index, outcome: finish(outcome, True),
                on_message=lambda index, *progress: on_progress(remaining[index].name, *progress),
            )
        return write_state()


def directories_of(models: Sequence[str]) -> list[str]:
    """Unique names of models that are valid names of directories.

    A name on the hub is kept, with ``--`` for the slash. A path is named by its last folder, or by its file name
    without ``.gguf``, with as many parent folders as needed to be unique. Raises `InputError` for a model that is given
    twice.
    """
    parts, depths = [], []
    for model in models:
        if not is_local_path(model) and _HUB_NAME.fullmatch(model):  # it can only be a name on the hub
            parts.append(model.split("/"))
            depths.append(len(parts[-1]))
        else:
            path = Path(os.path.abspath(model))  # links keep their own names
            stem = path.with_suffix("") if path.suffix == GGUF else path
            parts.append([part for part in stem.parts if part != path.anchor] or ["root"])
            depths.append(1)
    while True:
        names = ["--".join(path_parts[-depth:]) for path_parts, depth in zip(parts, depths, strict=True)]
        counts = Counter(names)
        duplicates = [index for index, name in enumerate(names) if counts[name] > 1]
        deeper = [index for index in duplicates if depths[index] < len(parts[index])]
        if not duplicates:
            return names
        if not deeper:
            raise InputError(f"model must not name {models[duplicates[-1]]} twice.")
        for index in deeper:
            depths[index] += 1


def _memory_limit(jobs: Sequence[AuditJob]) -> int:
    """The number of models that fit into this machine's memory at once; 1 if their size is unknown."""
    if (limit := jobs[0].options.memory) is not None:
        return max(1, memory() // parse_bytes("memory", limit))
    if not all(job.on_disk for job in jobs):
        return 1
    most_bytes = 1
    for files in (files_of(Path(job.model)) for job in jobs):
        packed = any(name.endswith(GGUF) for name, *_ in files)
        most_bytes = max(most_bytes, (_GGUF_RATIO if packed else _MEMORY_RATIO) * sum(size for _, size, _ in files))
    return max(1, memory() // most_bytes)
