"""Run the checks on an encoding and report the findings."""

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

# name -> a function of the specimen that returns a description, or raises `Broken`
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
    """The result of one check."""

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
    """At least one check failed; ``report`` and the message have all findings."""

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
    """Check that an encoding implements `PositionalEncoding` correctly and that its declared attributes are true.

    Arguments
        encoding  a registered name or a class
        strict    raise `NonConformance` if a check fails; otherwise always return the report
        skip      names of checks to skip, from `CHECKS` (``compile`` takes most of the time)
        sizes     d_model, num_heads, head_dim, max_len, if the small defaults do not suit the encoding
        options   the encoding's options

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
        build()  # invalid options raise here
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
    except Exception as error:  # any exception in the encoding's code is a finding
        return Finding(name, False, f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}")
