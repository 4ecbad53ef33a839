"""What is asked of a model: the options of an audit as they are typed, and an audit by them in its directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

from toeplens.ground import choose
from toeplens.ground.locks import LOCK
from toeplens.ground.places import entered, must_be_of
from toeplens.sources.huggingface.loading import Dtype, called_of, open_model
from toeplens.sources.huggingface.model import library
from toeplens.studies.auditing.audit import RECORD, Audit, parquet_of, save
from toeplens.studies.auditing.inputs import read_tokens
from toeplens.studies.auditing.kept import PARTS, files_of
from toeplens.studies.auditing.measuring import Progress
from toeplens.studies.auditing.own import is_run
from toeplens.studies.auditing.record import NotThere
from toeplens.studies.auditing.study import audit, check_options, check_run_options
from toeplens.studies.kit.changes import Wish, changes_of
from toeplens.version import __version__

Write = Callable[[Audit, Path, bytes], Path]  # of an audit, its directory and its table as Parquet: writes its page
_DIGITS = 16  # of a request's digest


@dataclass(frozen=True)
class Request:
    """What is asked, of whatever model; the fields are `toeplens.studies.audit`'s, with layers and heads from 0.

    texts    by what they are called
    tokens   a file of token ids, in their place
    effects  None: exact, and of a changed model none
    wishes   changes of the model
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
        """What is done to each head."""
        return ("none" if self.wishes else "exact") if self.effects is None else self.effects

    def check(self) -> None:
        """Refuse what is wrong whatever the model."""
        choose("dtype", self.dtype, get_args(Dtype))
        check_options(
            effects=self.method,
            sequences=self.sequences,
            max_tokens=self.max_tokens,
            seed=self.seed,
            first=self.first,
            heads=self.heads,
            needles=self.needles,
            changes=self.wishes,
        )

    def check_run(self, model: str) -> None:
        """Refuse what a run has no use for, if the model is one."""
        if is_run(model):
            check_run_options(
                text=self.texts,
                tokens=self.tokens,
                max_tokens=self.max_tokens,
                first=self.first,
                heads=self.heads,
                needles=self.needles or None,
                change=self.wishes or None,
                dtype=self.dtype,
                pickled=self.pickled,
            )

    def digest(self, model: str) -> str:
        """Tells this request, of this model as it is now, with these versions, from others.

        Files are told by their names, sizes and times, a model on the hub by its name.
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
    """Audit a model in its directory, which is held meanwhile: its page, if one is to be written, tables and record.

    What is finished is kept there, and the same audit goes on with it. What is refused is said with numbers from 1.

    Arguments
        model   a directory, a GGUF file, a name on the hub or a run's directory
        tokens  those of the request's file, where it was read before
        digest  of the request, to be told by what its audit is of
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
                layers=request.layers,
                sequences=request.sequences,
                max_tokens=request.max_tokens,
                effects=request.method,  # type: ignore[arg-type]
                first=request.first,
                heads=request.heads,
                needles=request.needles,
                changes=changes_of(loaded, request.wishes),
                dtype=request.dtype,  # type: ignore[arg-type]
                device=request.device,
                pickled=request.pickled,
                seed=request.seed,
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
