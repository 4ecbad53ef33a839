"""The study of a pretrained language model: run part by part, resumed, gathered and judged."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from toeplens.engine import ExecutionOptions
from toeplens.ground import InputError, read_json
from toeplens.ground.files import make_directory
from toeplens.ground.records import Record
from toeplens.papers.positional_symbolic.pretrained.claims import CLAIMS
from toeplens.papers.positional_symbolic.pretrained.parts import (
    AUDITED,
    PIECES,
    PROBED,
    TOGETHER,
    Examined,
    Making,
    Plan,
    path_of,
    read,
)
from toeplens.sources.huggingface import captured
from toeplens.sources.huggingface.load import Dtype, Loaded, load_model
from toeplens.studies.auditing.record import AuditRecord, files_of
from toeplens.studies.kit.claims import judge_all
from toeplens.studies.kit.study import STUDY, Kept
from toeplens.studies.probing import ProbeRecord


@dataclass(frozen=True, kw_only=True)
class _Pieces(Record):
    audits: dict[str, AuditRecord]
    probes: dict[str, ProbeRecord]


class Pretrained(Examined):
    """The state of the study."""

    NAME, COMMAND, REQUEST = "pretrained", "pretrained", Plan

    @classmethod
    def planned(cls, request: Plan) -> Plan:
        return request.checked()

    @classmethod
    def read(cls, directory: Path, plan: Plan, environment: dict[str, Any]) -> Self:
        kinds: dict[str, Any] = {AUDITED: AuditRecord, PROBED: ProbeRecord}
        found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, kind in plan.pieces():
            if path_of(directory, name).exists():
                found[kind][name] = read(directory, name, kinds[kind])
        audits, probes = found.values()
        counted: dict[str, Any] = {"finished": len(audits) + len(probes), "total": len(list(plan.pieces()))}
        told = {"directory": directory, "environment": environment, "plan": plan, "audits": audits, "probes": probes}
        return cls(**told, **counted).judged()

    @classmethod
    def reread(cls, kept: Kept, plan: Plan) -> Self:
        found = _Pieces.from_dict(kept.content, kept.path)
        return cls(**kept.head, plan=plan, audits=found.audits, probes=found.probes).judged()

    def judged(self) -> Self:
        """The state with the verdicts on its claims."""
        return replace(self, entries=judge_all(CLAIMS, self))


gather, is_pretrained, open_record = Pretrained.gather, Pretrained.tells, Pretrained.open_record


class _Stopped(BaseException):
    """Raised between two passes to stop a part; a BaseException, so it is not taken for a failure of the model."""


def examine(
    model: str,
    texts: Mapping[str, str],
    out: Path | str,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    limits: ExecutionOptions | None = None,
    on_piece: Callable[[str, int, int], None] = lambda name, done, total: None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    **sizes: Any,
) -> Pretrained:
    """Run the study of a pretrained model in ``out``, or resume it.

    Arguments
        model        a model's directory or its name on the hub, or a GGUF file
        texts        texts by name, from which sequences, needles and questions are taken
        dtype, device  as in `toeplens.sources.huggingface.load_model`
        limits       deadline and stop signal
        on_piece     called after every part with its name, the number of finished parts and the total
        on_progress  called with the progress within a part
        sizes        of `Plan`: sequences, tokens, effect_tokens, probe_tokens, seed

    Raises `InputError` for an unsupported model or one with an encoder, for more tokens than the model has positions,
    for texts that are too short, and if the directory holds another study, or this study with another model, texts or
    sizes.
    """
    limits, directory = limits or ExecutionOptions(), Path(out)
    plan = Plan(model=model, texts=dict(sorted(texts.items())), **sizes).checked()
    loaded = load_model(model, dtype=dtype, device=device)
    loaded.check_decoder("the study of a pretrained model")
    loaded.check_length("tokens", plan.tokens)
    loaded.check_all()
    plan = replace(plan, **_nature(loaded))
    if plan.predicts:
        loaded.check_length("probe_tokens", plan.probe_tokens)
    asked = asdict(replace(plan, texts=plan.digests()))
    _same(directory, asked)
    pieces = list(plan.pieces())

    def report(what: str, done: int, total: int) -> None:
        if limits.over():
            raise _Stopped
        on_progress(what, done, total)

    making = Making(loaded, plan, directory, report)
    making.check()
    with Pretrained.opened(directory, asked) as gathered:
        make_directory(directory / PIECES)
        for at, (name, kind) in enumerate(pieces, 1):
            if limits.over():
                break
            if not path_of(directory, name).exists():
                try:
                    making.make(name, kind)
                except _Stopped:
                    break
                shutil.rmtree(directory / PIECES / f"{name}.parts", ignore_errors=True)
                on_piece(name, at, len(pieces))
    return gathered[0]


def _nature(loaded: Loaded) -> dict[str, Any]:
    """Properties of a model from a short forward pass: rotation, bias, next-token prediction, dtype."""
    turns, biased, causal, inside = [], [], [], []
    tokens = torch.arange(1, 9, device=loaded.model.device).unsqueeze(0)

    def look(call: Any) -> None:
        turns.append(call.rotation is not None)
        biased.append(call.bias is not None)
        inside.append(call.rotation is None and call.bias is None and call.unknown is None)
        causal.append(call.causal)

    captured(loaded.model, {"input_ids": tokens}, look)
    head = loaded.model.get_output_embeddings() is not None
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    weights = hashlib.sha256(repr(_files(loaded)).encode()).hexdigest()
    return {
        "turns": any(turns),
        "biased": any(biased),
        "together": TOGETHER if all(inside) else 1,
        "predicts": head and all(causal),
        "dtype": dtype,
        "weights": weights,
    }


def _files(loaded: Loaded) -> list[Any]:
    """An identification of the model's weights that does not depend on their location."""
    path = Path(loaded.name or "")
    if loaded.name and path.exists():
        return [[name, size] for name, size, _ in files_of(path)]
    return [loaded.name, getattr(loaded.model.config, "_commit_hash", None)]


def _same(directory: Path, asked: dict[str, Any]) -> None:
    """Raise `InputError` if the directory holds another study."""
    path = directory / STUDY
    if not path.exists():
        return
    had = read_json(path)
    for name, value in asked.items():
        if isinstance(had, dict) and name in had and had[name] != value:
            wanted = "the same" if name in ("texts", "weights") else f"{had[name]!r},"  # these are hashes
            raise InputError(
                f"{name} must be {wanted} as in the study in {directory}. Choose another directory otherwise."
            )
