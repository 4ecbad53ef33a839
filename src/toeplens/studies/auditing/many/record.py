"""The record of audits of many models: what became of each, in few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toeplens.ground.reading import Count, Text
from toeplens.ground.records import Record
from toeplens.studies.auditing.record import AuditRecord, Number
from toeplens.studies.auditing.words import Names, worst


@dataclass(frozen=True)
class Audited(Record):
    """What became of one model.

    name        its directory's, in that of all
    model       as it was asked for
    why         why there is no audit, in a sentence; None where there is one
    code        the exit code that goes with that; 0 where there is an audit
    about       what the audit says of the model and of how it was audited
    layers      attention calls
    positional  mean over the heads of their positional share
    baseline    the intact model's loss
    effect      the largest of a head's effects
    head        which head that is, counted from 1: L2 H5
    difference  the largest of weights and outputs formed again from the model's own
    whole       largest difference of the captured pass from a plain one
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
    """Audits of many models, in the order in which these were given.

    found    those that are done, and those that failed
    missing  names of those that were not come to
    """

    WORDS = "audits"

    found: tuple[Audited, ...]
    missing: tuple[Text, ...] = ()

    @property
    def done(self) -> list[Audited]:
        """Those of which there is an audit."""
        return [each for each in self.found if each.why is None]

    @property
    def failed(self) -> list[Audited]:
        """Those of which there is none."""
        return [each for each in self.found if each.why is not None]

    @property
    def code(self) -> int:
        """The exit code of all: that of what failed, the machine's failures before bad input."""
        return max((each.code for each in self.failed), default=0)


def of_audit(name: str, model: str, audit: AuditRecord) -> Audited:
    """An audit in few numbers."""
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
