"""One model's audit in a process of its own, so that its memory and its death are its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from toeplens.engine import Limits, signals_held
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.failures import words
from toeplens.studies.auditing.many.record import Audited, of_audit
from toeplens.studies.auditing.many.request import Request, Write, audit_in

_LOOK = 0.1  # seconds


@dataclass(frozen=True)
class Piece:
    """A model to be audited.

    name       what it is called among all
    asked      as it was asked for
    model      the same; what lies on the disk by its path from the root
    there      whether it lies on the disk, as the driver sees it
    directory  of its audit
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
    """What became of a model, whatever it was; None if it was to stop.

    Told are what is being done, how much of it is, and all. What is stopped is ended at once: what it has finished is
    kept.
    """
    device = "cpu" if limits.device == "cpu" else piece.request.device  # auto is not one GPU where it has several
    own = replace(piece, request=replace(piece.request, device=device))
    context = multiprocessing.get_context("spawn")
    hears, says = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(own, torch.get_num_threads(), says), daemon=True)
    with signals_held():
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
                return _dead(piece, process.exitcode)
            if not isinstance(found, tuple):
                return found
            tell(found)
        return None
    finally:
        process.kill()
        process.join()
        hears.close()


def failed(piece: Piece, error: ToeplensError) -> Audited:
    """A model of which there is no audit."""
    return Audited(piece.name, piece.asked, " ".join(str(error).split()), error.exit_code)


def _dead(piece: Piece, code: int | None) -> Audited:
    end = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return failed(
        piece,
        EnvironmentFailure(
            f"its process died ({end}); if memory is short, lower --workers, --sequences or --max-tokens. What was "
            "finished is kept."
        ),
    )


# ---- in the process -------------------------------------------------------------------------------------------------


def _work(piece: Piece, threads: int, says: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    says.send(_audited(piece, lambda what, done, total: says.send((what, done, total))))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _audited(piece: Piece, tell: Callable[[str, int, int], None]) -> Audited:
    try:
        if piece.there and not Path(piece.model).exists():
            raise InputError(
                f"model: {piece.model} is not seen by the machine {socket.gethostname()}; give a place that all "
                "machines share."
            )
        found = audit_in(
            piece.directory, piece.model, piece.request, piece.write, digest=piece.digest, on_progress=tell
        )
    except ToeplensError as error:
        return failed(piece, error)
    except Exception as error:  # whatever one model may raise, the others are gone on with
        if out_of_memory(error):
            return failed(piece, EnvironmentFailure("memory: it was used up; lower --workers or the sizes."))
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(at.filename).name}, line {at.lineno}"
        return failed(piece, InputError(f"model: its audit broke off: {words(error)} ({where})."))
    return of_audit(piece.name, piece.asked, found)
