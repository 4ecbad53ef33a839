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

from toeplens.engine import ExecutionOptions, Workers, cluster_of, must_serve, plan_workers, spread
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, write_json
from toeplens.ground.execution import ignored_by_children
from toeplens.ground.machine import memory, out_of_memory
from toeplens.ground.outputs import LOCK, entered
from toeplens.ground.records import Count, Record, Text
from toeplens.sources.huggingface.checkpoints import GGUF, is_there
from toeplens.sources.huggingface.load import place_of
from toeplens.sources.huggingface.model import library, words
from toeplens.studies.auditing.inputs import Progress
from toeplens.studies.auditing.record import AuditRecord, Number, files_of
from toeplens.studies.auditing.result import open_audit
from toeplens.studies.auditing.study import Data, Write, audit_in, is_run
from toeplens.studies.auditing.words import Names, largest, worst
from toeplens.studies.kit.options import AuditOptions
from toeplens.version import __version__

RESULT = "audits.json"
_DIGITS = 16  # length of a request's digest
_LOOK = 0.1  # seconds
_HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_TAKES, _PACKED = 3, 8  # memory of an audit relative to the model's files: float32 with activations; GGUF


def digest_of(model: str, data: Data, options: AuditOptions) -> str:
    """A digest of a requested audit and the software versions.

    Files are identified by names, sizes and times, a model on the hub by its name.
    """
    there = [file for file in files_of(Path(model)) if file[0] != LOCK] if Path(model).exists() else model
    read = files_of(data) if isinstance(data, Path) else data
    versions = [__version__, torch.__version__, library().__version__]
    return hashlib.sha256(repr((there, versions, read, options)).encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Audited(Record):
    """The outcome for one model."""

    WORDS = "audits"

    name: Text  # of its directory
    model: Text  # as requested
    why: Text | None = None  # there is no audit; None if there is one
    code: Count = 0  # the exit code of that failure
    about: dict[Text, Any] = field(default_factory=dict)  # from the audit
    layers: Count = 0
    heads: Count = 0
    positional: Number = None  # mean positional share over the heads
    baseline: Number = None  # loss of the intact model
    effect: Number = None  # largest effect of a head
    head: Text | None = None  # with that effect, counted from 1: L2 H5
    difference: Number = None  # of recomputed weights and outputs; the largest
    whole: Number = None  # difference between the captured and a plain forward pass


@dataclass(frozen=True)
class Audits(Record):
    """Audits of many models, in the given order."""

    WORDS = "audits"

    found: tuple[Audited, ...]  # finished and failed models
    missing: tuple[Text, ...] = ()  # names of models that were not processed

    @property
    def done(self) -> list[Audited]:
        """Models with an audit."""
        return [each for each in self.found if each.why is None]

    @property
    def failed(self) -> list[Audited]:
        """Models whose audit failed."""
        return [each for each in self.found if each.why is not None]

    @property
    def code(self) -> int:
        """The exit code: failures of the environment take precedence over invalid input."""
        return max((each.code for each in self.failed), default=0)


def of_audit(name: str, model: str, audit: AuditRecord) -> Audited:
    """A short summary of an audit."""
    shares = [head.positional for head in audit.heads if head.positional is not None]
    top = largest(audit.heads, "effect")
    return Audited(
        name,
        model,
        about=audit.about,
        layers=len(audit.layers),
        heads=len(audit.heads),
        positional=float(np.mean(shares)) if shares else None,
        baseline=audit.baseline,
        effect=None if top is None else top[1],
        head=None if top is None else Names.of(audit).short(top[0]),
        difference=worst(audit),
        whole=audit.whole,
    )


@dataclass(frozen=True)
class Piece:
    """A model to be audited."""

    name: str
    asked: str  # the model as requested
    model: str  # the same, as an absolute path if it is on disk
    there: bool  # whether it is on disk, as seen by the driver
    directory: Path  # of its audit
    data: Data
    options: AuditOptions
    digest: str
    write: Write | None

    def failed(self, error: ToeplensError) -> Audited:
        """The outcome if its audit failed."""
        return Audited(self.name, self.asked, " ".join(str(error).split()), error.exit_code)

    def had(self) -> Audited | None:
        """The outcome of an existing audit with the same request; None if there is none."""
        try:
            audit = open_audit(self.directory)
        except InputError:  # none, or damaged
            return None
        return of_audit(self.name, self.asked, audit) if audit.about.get("request") == self.digest else None


def apart(piece: Piece, limits: ExecutionOptions, tell: Callable[..., None]) -> Audited | None:
    """Audit a model in a separate process; None if interrupted.

    ``tell`` receives a description of the current work, the finished amount and the total. An interrupted process is
    killed at once; its finished parts are saved.
    """
    device = "cpu" if limits.device == "cpu" else piece.options.device  # auto would not spread over several GPUs
    own = replace(piece, options=replace(piece.options, device=device))
    context = multiprocessing.get_context("spawn")
    hears, says = context.Pipe(duplex=False)
    process = context.Process(target=_audit_and_send, args=(own, torch.get_num_threads(), says), daemon=True)
    with ignored_by_children():
        process.start()
    says.close()
    try:
        while not limits.over():
            if not hears.poll(_LOOK):
                continue
            found = hears.recv()
            if not isinstance(found, tuple):
                return found
            tell(*found)
        return None
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"The process ended ({end}). If memory is short, lower --workers, --sequences or --max-tokens."
        return piece.failed(EnvironmentFailure(f"{why} Finished work is saved."))
    finally:
        process.kill()
        process.join()
        hears.close()


def _audit_and_send(piece: Piece, threads: int, says: Connection) -> None:
    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    says.send(audited(piece, lambda what, done, total: says.send((what, done, total))))


def audited(piece: Piece, tell: Progress) -> Audited:
    """The outcome for one model; no error of one model stops the others."""
    try:
        if piece.there and not Path(piece.model).exists():
            raise InputError(
                f"model: machine {socket.gethostname()} has no {piece.model}. Use a directory that all machines share."
            )
        where = piece.directory, piece.model, piece.data, piece.options, piece.write
        return of_audit(piece.name, piece.asked, audit_in(*where, digest=piece.digest, on_progress=tell))
    except ToeplensError as error:
        return piece.failed(error)
    except Exception as error:
        if out_of_memory(error):
            return piece.failed(EnvironmentFailure("Out of memory. Lower --workers or the sizes."))
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} in {Path(at.filename).name}, line {at.lineno}"
        return piece.failed(InputError(f"model: the audit failed: {words(error)} ({place})."))


def audit_many(
    models: Sequence[str],
    out: Path | str,
    data: Data = None,
    options: AuditOptions | None = None,
    *,
    workers: Workers = None,
    write: Write | None = None,
    on_progress: Callable[[str, str, int, int], None] = lambda name, what, done, total: None,
    on_done: Callable[[Audited, bool], None] = lambda found, new: None,
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
    place, options, names = Path(out), options or AuditOptions(), directories_of(models)
    tokens, texts = (data, None) if isinstance(data, Path) else (None, data)
    if any(map(is_run, models)):
        options.check_run(text=texts, tokens=tokens)
    if tokens is not None:
        if not tokens.is_file():
            raise InputError(f"tokens must be a file for several models, but {tokens} does not exist.")
        data = tokens.absolute()
    pieces = []
    for name, model in zip(names, models, strict=True):
        there = is_there(model)
        at, directory = os.path.abspath(model) if there else model, place.absolute() / name
        pieces.append(Piece(name, model, at, there, directory, data, options, digest_of(at, data, options), write))
    cluster = cluster_of(workers)
    if cluster.on_ray:
        must_serve(cluster, options.device)
    else:
        place_of(options.device)
        count, _ = plan_workers(len(pieces), options.device, cluster.workers)
        workers = count if cluster.workers is not None else min(count, _room(pieces))
    found: dict[str, Audited] = {}

    def written() -> Audits:
        there = tuple(found[piece.name] for piece in pieces if piece.name in found)
        state = Audits(there, tuple(piece.name for piece in pieces if piece.name not in found))
        write_json(place / RESULT, state.to_dict(), rows="found")
        return state

    def done(each: Audited | None, new: bool) -> bool:
        if each is not None:
            found[each.name] = each
            written()
            on_done(each, new)
        return each is not None

    with entered(place, "audits", (RESULT,)):
        written()
        for piece in pieces:
            done(piece.had(), False)
        left = [piece for piece in pieces if piece.name not in found]
        if left:
            spread(
                apart,
                left,
                ExecutionOptions(device=options.device),
                workers,
                on_done=lambda index, each: done(each, True),
                on_told=lambda index, *told: on_progress(left[index].name, *told),
            )
        return written()


def directories_of(models: Sequence[str]) -> list[str]:
    """Unique names of models that are valid names of directories.

    A name on the hub is kept, with ``--`` for the slash. A path is named by its last folder, or by its file name
    without ``.gguf``, with as many parent folders as needed to be unique. Raises `InputError` for a model that is given
    twice.
    """
    parts, depths = [], []
    for model in models:
        if not is_there(model) and _HUB.fullmatch(model):  # it can only be a name on the hub
            parts.append(model.split("/"))
            depths.append(len(parts[-1]))
        else:
            path = Path(os.path.abspath(model))  # links keep their own names
            named = path.with_suffix("") if path.suffix == GGUF else path
            parts.append([part for part in named.parts if part != path.anchor] or ["root"])
            depths.append(1)
    while True:
        names = ["--".join(each[-depth:]) for each, depth in zip(parts, depths, strict=True)]
        counts = Counter(names)
        alike = [place for place, name in enumerate(names) if counts[name] > 1]
        deeper = [place for place in alike if depths[place] < len(parts[place])]
        if not alike:
            return names
        if not deeper:
            raise InputError(f"model must not name {models[alike[-1]]} twice.")
        for place in deeper:
            depths[place] += 1


def _room(pieces: Sequence[Piece]) -> int:
    """The number of models that fit into this machine's memory at once; 1 if their size is unknown."""
    if not all(piece.there for piece in pieces):
        return 1
    largest = 1
    for files in (files_of(Path(piece.model)) for piece in pieces):
        packed = any(name.endswith(GGUF) for name, *_ in files)
        largest = max(largest, (_PACKED if packed else _TAKES) * sum(size for _, size, _ in files))
    return max(1, memory() // largest)
