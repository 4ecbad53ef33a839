"""Audits of many models, several at a time, by this machine's processes or a cluster's; what is done is kept."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from toeplens.engine import Cluster, Limits, Workers, plan_workers, spread
from toeplens.ground import InputError, write_json
from toeplens.ground.machine import memory
from toeplens.ground.places import entered
from toeplens.sources.huggingface.checkpoints import GGUF, is_there
from toeplens.sources.huggingface.loading import place_of
from toeplens.studies.auditing.audit import RECORD, open_audit
from toeplens.studies.auditing.kept import files_of
from toeplens.studies.auditing.many.apart import Piece, apart
from toeplens.studies.auditing.many.record import Audited, Audits, of_audit
from toeplens.studies.auditing.many.request import Request, Write

RESULT = "audits.json"
_HUB = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_TAKES, _PACKED = 3, 8  # times the bytes of its files that a model takes: in float32, with its passes; and a GGUF file


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
    """Audit models, each in a process of its own and in a directory of its own in ``out`` (`directories_of`).

    A model that fails, or whose process dies, is recorded with its sentence; the others are gone on with. One of which
    there is an audit by the same request, of the same files and versions, is not audited again; one that was stopped
    goes on.

    Arguments
        models       directories, GGUF files, names on the hub, or runs' directories
        workers      models at a time on this machine, unless given as many as there are cores and memory for (of models
                     on the hub, whose size is not known, one, and on a GPU one); or a `toeplens.engine.Cluster`, whose
                     machines see ``out`` and the models that are no names
        write        writes each audit's page: a function of a module
        on_progress  is called with a model's name, what is being done, how much of it is, and all
        on_done      is called with what became of each model, and whether that is new

    Raises `InputError` for a model that is given twice, for options that are wrong whatever the model, or that a run
    among the models has no use for, and for an ``out`` that holds something else: before anything is written.
    """
    place = Path(out)
    names = directories_of(models)
    request.check()
    for model in models:
        request.check_run(model)
    if request.tokens is not None:
        if not request.tokens.is_file():
            raise InputError(f"tokens: there is no file {request.tokens}; of many models it must be one.")
        request = replace(request, tokens=request.tokens.absolute())
    pieces = [_piece(name, model, place.absolute(), request, write) for name, model in zip(names, models, strict=True)]
    if isinstance(workers, Cluster):
        workers.must_serve(request.device)
    else:
        place_of(request.device)
        count, _ = plan_workers(len(pieces), request.device, workers)
        workers = count if workers is not None else min(count, _room(pieces))
    with entered(place, "audits", (RESULT,)):
        return _go_on(pieces, place, request, workers, on_progress, on_done)


def directories_of(models: Sequence[str]) -> list[str]:
    """What models are called, each by a name of its own that a directory can have.

    A name on the hub is itself, with ``--`` for the slash; a path its last folder, or its file's name without
    ``.gguf``, with as many of the folders above as tell it from the others. Raises `InputError` for a model that is
    given twice.
    """
    parts = [_parts(model) for model in models]
    depths = [len(each) if _on_hub(model) else 1 for each, model in zip(parts, models, strict=True)]
    while True:
        names = ["--".join(each[-depth:]) for each, depth in zip(parts, depths, strict=True)]
        counts = Counter(names)
        alike = [place for place, name in enumerate(names) if counts[name] > 1]
        deeper = [place for place in alike if depths[place] < len(parts[place])]
        if not alike:
            return names
        if not deeper:
            raise InputError(f"model: {models[alike[-1]]} was given twice; each model has one audit.")
        for place in deeper:
            depths[place] += 1


def _on_hub(model: str) -> bool:
    """Whether it can only be a name on the hub."""
    return not is_there(model) and _HUB.fullmatch(model) is not None


def _parts(model: str) -> list[str]:
    if _on_hub(model):
        return model.split("/")
    place = Path(os.path.abspath(model))  # a link by its own name
    named = place.with_suffix("") if place.suffix == GGUF else place
    return [part for part in named.parts if part != place.anchor] or ["root"]


def _piece(name: str, model: str, out: Path, request: Request, write: Write | None) -> Piece:
    there = is_there(model)
    at = os.path.abspath(model) if there else model
    return Piece(name, model, at, there, out / name, request, request.digest(at), write)


def _room(pieces: Sequence[Piece]) -> int:
    """How many of the models this machine's memory holds at a time; one where it is not known how large they are."""
    if not all(piece.there for piece in pieces):
        return 1
    return max(1, memory() // max(1, *(_need(Path(piece.model)) for piece in pieces)))


def _need(model: Path) -> int:
    files = files_of(model)
    packed = any(name.endswith(GGUF) for name, *_ in files)
    return (_PACKED if packed else _TAKES) * sum(size for _, size, _ in files)


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
    """What is there of the same request."""
    if not (piece.directory / RECORD).is_file():
        return None
    try:
        audit = open_audit(piece.directory)
    except InputError:  # damaged
        return None
    return of_audit(piece.name, piece.asked, audit) if audit.about.get("request") == piece.digest else None
