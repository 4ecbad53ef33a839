"""The record of a study: its results.json, compressed or not, without its directory of pieces; judged again."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from toeplens.ground import InputError, parse_json, read_json, reading
from toeplens.papers.positional_symbolic.pretrained.claims import CLAIMS
from toeplens.papers.positional_symbolic.pretrained.plan import Asking
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.studies.auditing.record import AuditRecord
from toeplens.studies.kit.claims import judge_all
from toeplens.studies.kit.study import CLAIMS_FILE, RESULTS, STUDY
from toeplens.studies.probing import ProbeRecord

PACKED = f"{RESULTS}.gz"


@dataclass(frozen=True, kw_only=True)
class Recorded(Asking):
    """results.json: what study.json has, and the pieces."""

    finished: reading.Count
    total: reading.Count
    audits: dict[str, AuditRecord]
    probes: dict[str, ProbeRecord]


def judged(state: Pretrained) -> Pretrained:
    """The same with the verdicts on its claims."""
    return replace(state, entries=judge_all(CLAIMS, state))


def record_in(directory: Path) -> Path | None:
    """The results of a study that is recorded in a directory, beside its claims.json; None where there is no such."""
    packed, claims = directory / PACKED, directory / CLAIMS_FILE
    if (directory / STUDY).exists() or not (packed.is_file() and claims.is_file()):
        return None
    content = read_json(claims)
    return packed if isinstance(content, dict) and content.get("study") == "pretrained" else None


def open_record(path: Path | str) -> Pretrained:
    """A study as its results.json tells it, or that file compressed by gzip; its claims are judged as rules are now."""
    path = Path(path)
    found = Recorded.from_dict(parse_json(_text(path), path), path)
    return judged(
        Pretrained(
            directory=path.parent,
            finished=found.finished,
            total=found.total,
            environment=found.environment,
            plan=found.plan(),
            audits=found.audits,
            probes=found.probes,
        )
    )


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"study: {path} could not be read ({str(error).lower().rstrip('.')}).") from None
