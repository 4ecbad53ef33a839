"""Run the checks on an encoding and say what was found."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from toeplens.encodings import registry
from toeplens.encodings.base import PositionalEncoding
from toeplens.encodings.conformance import behaviour
from toeplens.encodings.conformance.specimen import SIZES, Specimen
from toeplens.ground import choose, invalid

# name -> a function of the specimen that says what it found, or raises `Broken` with what is wrong
CHECKS: dict[str, Callable[[Specimen], str]] = {
    "shapes": behaviour.shapes,
    "facts": behaviour.facts,
    "kernel": behaviour.kernel,
    "positions": behaviour.positions,
    "causal": behaviour.causal,
    "paths": behaviour.paths,
    "decoding": behaviour.decoding,
    "padding": behaviour.padding,
    "shift": behaviour.shift,
    "precision": behaviour.precision,
    "casts": behaviour.casts,
    "gradients": behaviour.gradients,
    "state": behaviour.state,
    "memory": behaviour.memory,
    "compile": behaviour.compiled,
}


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    check: str
    passed: bool
    seen: str


@dataclass(frozen=True)
class Report:
    """All findings on one encoding."""

    encoding: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        width = max(len(finding.check) for finding in self.findings)
        lines = [f"{'ok  ' if f.passed else 'FAIL'} {f.check:<{width}}  {f.seen}" for f in self.findings]
        return "\n".join([f"conformance of {self.encoding}", *lines])


class NonConformance(AssertionError):
    """At least one check failed; ``report`` has all findings, and so has the message."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check(
    encoding: str | type,
    /,
    *,
    strict: bool = True,
    skip: Collection[str] = (),
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Report:
    """Check that an encoding keeps to the contract of `PositionalEncoding` and that its declared facts are true.

    Arguments
        encoding  a registered name or a class
        strict    raise `NonConformance` if a check fails; else return the report whatever it says
        skip      names of checks to leave out, of `CHECKS` (``compile`` takes most of the time)
        sizes     d_model, num_heads, head_dim, max_len, where the small ones do not suit the encoding
        options   the encoding's own

    An encoding that cannot be built from its options raises what `toeplens.encodings.build` raises.
    """
    for name in skip:
        choose("skip", name, CHECKS)
    for name in sizes or {}:
        choose("sizes", name, SIZES)
    all_sizes = {**SIZES, **(sizes or {})}
    kind = registry.get(encoding) if isinstance(encoding, str) else encoding
    if not (isinstance(kind, type) and issubclass(kind, PositionalEncoding)):
        raise invalid("encoding", "be a name or a subclass of PositionalEncoding", kind)

    def build() -> PositionalEncoding:
        return kind(**all_sizes, **options)

    label = encoding if isinstance(encoding, str) else encoding.__name__
    if options:
        label += f" ({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    findings = []
    with torch.random.fork_rng(devices=[]):
        build()  # what it refuses is the caller's to hear
        for name, run in CHECKS.items():
            if name not in skip:
                findings.append(_run(name, run, build))
    report = Report(label, tuple(findings))
    if strict and not report.passed:
        raise NonConformance(report)
    return report


def _run(name: str, run: Callable[[Specimen], str], build: Callable[[], PositionalEncoding]) -> Finding:
    try:
        return Finding(name, True, run(Specimen(build)))
    except behaviour.Broken as broken:
        return Finding(name, False, str(broken))
    except Exception as error:  # whatever an encoding's own code raises is a finding on it
        return Finding(name, False, f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
