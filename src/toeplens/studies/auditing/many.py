"""Audits of many models with the same options: one process and one directory per model, locally or on a cluster."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import socket
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from toeplens.engine import Cluster, Limits, Workers, plan_workers, spread
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, choose, write_json
from toeplens.ground.locks import LOCK
from toeplens.ground.machine import memory, out_of_memory
from toeplens.ground.places import entered, must_be_of
from toeplens.ground.reading import Count, Text
from toeplens.ground.records import Record
from toeplens.ground.signals import ignored_by_children
from toeplens.sources.huggingface.checkpoints import GGUF, is_there
from toeplens.sources.huggingface.load import Dtype, called_of, open_model, place_of
from toeplens.sources.huggingface.model import library, words
from toeplens.studies.auditing.audit import RECORD, Audit, open_audit, parquet_of, save
from toeplens.studies.auditing.inputs import read_tokens
from toeplens.studies.auditing.kept import PARTS, files_of
from toeplens.studies.auditing.measuring import Progress
from toeplens.studies.auditing.own import is_run
from toeplens.studies.auditing.record import AuditRecord, NotThere, Number
from toeplens.studies.auditing.study import audit, check_options, check_run_options
from toeplens.studies.auditing.words import Names, worst
from toeplens.studies.kit.changes import Wish, changes_of
from toeplens.version import __version__

Write = Callable[[Audit, Path, bytes], Path]  # writes the page; takes the audit, its directory, its Parquet table
RESULT = "audits.json"
_DIGITS = 16  # length of a request's digest
_OTHERS = ("texts", "tokens", "wishes")  # fields of a request that are not options of an audit
_LOOK = 0.1  # seconds
_HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_TAKES, _PACKED = 3, 8  # memory of an audit relative to the model's files: float32 with activations; GGUF


@dataclass(frozen=True)
class Request:
    """The options of an audit, for any model; fields as in `toeplens.studies.audit`, layers and heads from 0.

    texts    texts by name
    tokens   file of token ids, instead of texts
    effects  None: ``exact``, or ``none`` for a changed model
    wishes   interventions on the model
    """

    texts: dict[str, str] | None = None
    tokens: Path | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    sequences: int | None = None
    max_tokens: int | None = None
    effects: str | None = None
    first: int | None = None
    needles: int = 0
    wishes: tuple[Wish, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    pickled: bool = False
    seed: int = 0

    @property
    def method(self) -> str:
        """The intervention whose effects are measured."""
        return ("none" if self.wishes else "exact") if self.effects is None else self.effects

    @property
    def options(self) -> dict[str, Any]:
        """The options of `toeplens.studies.audit`, without input and changes."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OTHERS}
        return own | {"effects": self.method}

    def check(self) -> None:
        """Raise `InputError` for options that are invalid for every model."""
        choose("dtype", self.dtype, get_args(Dtype))
        check_options(**self.options, changes=self.wishes)

    def check_run(self, model: str) -> None:
        """Raise `InputError` for options that do not apply to a run, if the model is one."""
        if is_run(model):
            check_run_options(text=self.texts, tokens=self.tokens, **self.options, change=self.wishes or None)

    def digest(self, model: str) -> str:
        """A digest of the request, the model and the software versions.

        Files are identified by names, sizes and times, a model on the hub by its name.
        """
        asked = {field.name: getattr(self, field.name) for field in fields(self)}
        asked |= {"effects": self.method, "tokens": None if self.tokens is None else files_of(self.tokens)}
        there = [file for file in files_of(Path(model)) if file[0] != LOCK] if Path(model).exists() else model
        versions = [__version__, torch.__version__, library().__version__]
        content = json.dumps([there, versions, asked], sort_keys=True, default=repr)
        return hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]


def audit_in(
    directory: Path,
    model: str,
    request: Request,
    write: Write | None = None,
    *,
    tokens: Any = None,
    digest: str | None = None,
    on_progress: Progress | None = None,
) -> Audit:
    """Audit a model and write its tables, its record and, with ``write``, its page to its directory, which is locked.

    Finished parts are saved there, and an interrupted audit is resumed. Error messages count layers and heads from 1.

    Arguments
        model   a directory, a GGUF file, a name on the hub or a run's directory
        tokens  tokens of the request's file, if already read
        digest  digest of the request, which is recorded
    """
    with entered(directory, "audit", (RECORD, PARTS)):
        if not is_run(model):
            must_be_of(directory / RECORD, called_of(model), "audit")
        if tokens is None and request.tokens is not None:
            tokens = read_tokens(request.tokens)
        try:
            loaded: Any = model
            if request.wishes:
                loaded = open_model(model, dtype=request.dtype, device=request.device, pickled=request.pickled)  # type: ignore[arg-type]
            found = audit(
                loaded,
                request.texts if tokens is None else tokens,
                **request.options,
                changes=changes_of(loaded, request.wishes),
                keep=directory,
                on_progress=on_progress,
            )
        except NotThere as error:
            raise error.for_people() from None
        more = {"text": None if request.tokens is None else request.tokens.name, "request": digest}
        found = replace(found, about=found.about | {name: value for name, value in more.items() if value is not None})
        if write is not None:
            write(found, directory, parquet_of(found))
        save(found, directory)
    return found


@dataclass(frozen=True)
class Audited(Record):
    """The outcome for one model.

    name        name of its directory
    model       the model as requested
    why         why there is no audit; None if there is one
    code        the exit code of that failure; 0 if there is an audit
    about       description of the model and settings, from the audit
    layers      number of attention calls
    positional  mean positional share over the heads
    baseline    loss of the intact model
    effect      largest effect of a head
    head        the head with that effect, counted from 1: L2 H5
    difference  largest difference of recomputed weights and outputs
    whole       largest difference between the captured and a plain forward pass
    """

    WORDS = "audits"

    name: Text
    model: Text
    why: Text | None = None
    code: Count = 0
    about: dict[Text, Any] = field(default_factory=dict)
    layers: Count = 0
    heads: Count = 0
    positional: Number = None
    baseline: Number = None
    effect: Number = None
    head: Text | None = None
    difference: Number = None
    whole: Number = None


@dataclass(frozen=True)
class Audits(Record):
    """Audits of many models, in the given order.

    found    finished and failed models
    missing  names of models that were not processed
    """

    WORDS = "audits"

    found: tuple[Audited, ...]
    missing: tuple[Text, ...] = ()

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
    effects = [(head.effect, head) for head in audit.heads if head.effect is not None]
    effect, largest = max(effects, key=lambda each: each[0], default=(None, None))
    return Audited(
        name,
        model,
        about=audit.about,
        layers=len(audit.layers),
        heads=len(audit.heads),
        positional=float(np.mean(shares)) if shares else None,
        baseline=audit.baseline,
        effect=effect,
        head=None if largest is None else Names.of(audit).short(largest),
        difference=worst(audit),
        whole=audit.whole,
    )


@dataclass(frozen=True)
class Piece:
    """A model to be audited.

    name       its unique name
    asked      the model as requested
    model      the same, as an absolute path if it is on disk
    there      whether it is on disk, as seen by the driver
    directory  directory of its audit
    """

    name: str
    asked: str
    model: str
    there: bool
    directory: Path
    request: Request
    digest: str
    write: Write | None


def apart(piece: Piece, limits: Limits, tell: Callable[[Any], None]) -> Audited | None:
    """Audit a model in a separate process; None if interrupted.

    ``tell`` receives a description of the current work, the finished amount and the total. An interrupted process is
    killed at once; its finished parts are saved.
    """
    device = "cpu" if limits.device == "cpu" else piece.request.device  # auto would not spread over several GPUs
    own = replace(piece, request=replace(piece.request, device=device))
    context = multiprocessing.get_context("spawn")
    hears, says = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(own, torch.get_num_threads(), says), daemon=True)
    with ignored_by_children():
        process.start()
    says.close()
    try:
        while not limits.over():
            if not hears.poll(_LOOK):
                continue
            try:
                found = hears.recv()
            except (EOFError, OSError):
                process.join()
                code = process.exitcode
                end = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
                why = f"The process ended ({end}). If memory is short, lower --workers, --sequences or --max-tokens."
                return failed(piece, EnvironmentFailure(f"{why} Finished work is saved."))
            if not isinstance(found, tuple):
                return found
            tell(found)
        return None
    finally:
        process.kill()
        process.join()
        hears.close()


def failed(piece: Piece, error: ToeplensError) -> Audited:
    """The outcome for a model whose audit failed."""
    return Audited(piece.name, piece.asked, " ".join(str(error).split()), error.exit_code)


# ---- in the process -------------------------------------------------------------------------------------------------


def _work(piece: Piece, threads: int, says: Connection) -> None:
    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    says.send(_audited(piece, lambda what, done, total: says.send((what, done, total))))


def _audited(piece: Piece, tell: Callable[[str, int, int], None]) -> Audited:
    try:
        if piece.there and not Path(piece.model).exists():
            raise InputError(
                f"model: machine {socket.gethostname()} has no {piece.model}. Use a directory that all machines share."
            )
        found = audit_in(
            piece.directory, piece.model, piece.request, piece.write, digest=piece.digest, on_progress=tell
        )
    except ToeplensError as error:
        return failed(piece, error)
    except Exception as error:  # one failing model does not stop the others
        if out_of_memory(error):
            return failed(piece, EnvironmentFailure("Out of memory. Lower --workers or the sizes."))
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(at.filename).name}, line {at.lineno}"
        return failed(piece, InputError(f"model: the audit failed: {words(error)} ({where})."))
    return of_audit(piece.name, piece.asked, found)


# ---- all of them ----------------------------------------------------------------------------------------------------


def audit_many(
    models: Sequence[str],
    out: Path | str,
    request: Request,
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
        workers      number of models to audit in parallel on this machine (default: as many as cores and memory allow;
                     1 on a GPU and for models on the hub, whose size is unknown); or a `toeplens.engine.Cluster`, whose
                     machines must see ``out`` and the models on disk
        write        function that writes each audit's page; must be importable
        on_progress  called with a model's name, a description of the current work, the finished amount and the total
        on_done      called with the outcome for each model, and whether it is new

    Raises `InputError`, before anything is written, for a model that is given twice, for invalid options or options
    that do not apply to a run among the models, and for an ``out`` that holds something else.
    """
    place = Path(out)
    names = directories_of(models)
    request.check()
    for model in models:
        request.check_run(model)
    if request.tokens is not None:
        if not request.tokens.is_file():
            raise InputError(f"tokens must be a file for several models, but {request.tokens} does not exist.")
        request = replace(request, tokens=request.tokens.absolute())
    pieces = []
    for name, model in zip(names, models, strict=True):
        there = is_there(model)
        at = os.path.abspath(model) if there else model
        directory = place.absolute() / name
        pieces.append(Piece(name, model, at, there, directory, request, request.digest(at), write))
    if isinstance(workers, Cluster):
        workers.must_serve(request.device)
    else:
        place_of(request.device)
        count, _ = plan_workers(len(pieces), request.device, workers)
        workers = count if workers is not None else min(count, _room(pieces))
    with entered(place, "audits", (RESULT,)):
        return _go_on(pieces, place, request, workers, on_progress, on_done)


def directories_of(models: Sequence[str]) -> list[str]:
    """Unique names of models that are valid names of directories.

    A name on the hub is kept, with ``--`` for the slash. A path is named by its last folder, or by its file name
    without ``.gguf``, with as many parent folders as needed to be unique. Raises `InputError` for a model that is given
    twice.
    """
    parts = []
    for model in models:
        path = Path(os.path.abspath(model))  # links keep their own names
        named = path.with_suffix("") if path.suffix == GGUF else path
        found = [part for part in named.parts if part != path.anchor] or ["root"]
        parts.append(model.split("/") if _on_hub(model) else found)
    depths = [len(each) if _on_hub(model) else 1 for each, model in zip(parts, models, strict=True)]
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


def _on_hub(model: str) -> bool:
    """Whether the model can only be a name on the hub."""
    return not is_there(model) and _HUB.fullmatch(model) is not None


def _room(pieces: Sequence[Piece]) -> int:
    """The number of models that fit into this machine's memory at once; 1 if their size is unknown."""
    if not all(piece.there for piece in pieces):
        return 1
    largest = 1
    for files in (files_of(Path(piece.model)) for piece in pieces):
        packed = any(name.endswith(GGUF) for name, *_ in files)
        largest = max(largest, (_PACKED if packed else _TAKES) * sum(size for _, size, _ in files))
    return max(1, memory() // largest)


def _go_on(
    pieces: Sequence[Piece],
    out: Path,
    request: Request,
    workers: Workers,
    on_progress: Callable[[str, str, int, int], None],
    on_done: Callable[[Audited, bool], None],
) -> Audits:
    names, found = [piece.name for piece in pieces], dict[str, Audited]()

    def kept() -> Audits:
        there = tuple(found[name] for name in names if name in found)
        state = Audits(there, tuple(name for name in names if name not in found))
        write_json(out / RESULT, state.to_dict(), rows="found")
        return state

    def done(each: Audited, new: bool) -> None:
        found[each.name] = each
        kept()
        on_done(each, new)

    kept()
    left = []
    for piece in pieces:
        had = _had(piece)
        if had is None:
            left.append(piece)
        else:
            done(had, False)
    if left:
        spread(
            apart,
            left,
            Limits(device=request.device),
            workers,
            on_done=lambda index, each: None if each is None else done(each, True),
            on_told=lambda index, told: on_progress(left[index].name, *told),
        )
    return kept()


def _had(piece: Piece) -> Audited | None:
    """The outcome of an existing audit with the same request; None if there is none."""
    if not (piece.directory / RECORD).is_file():
        return None
    try:
        audit = open_audit(piece.directory)
    except InputError:  # damaged
        return None
    return of_audit(piece.name, piece.asked, audit) if audit.about.get("request") == piece.digest else None
