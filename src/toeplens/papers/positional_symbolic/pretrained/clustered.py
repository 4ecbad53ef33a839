"""The verdicts with each text as one: two places in one text are not as independent as two texts are.

Claims are judged over sequences, several of which may come from one text. Here the sequences of a text are one number,
their mean, and the interval is that of these means. It stands beside a verdict and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from toeplens.papers.positional_symbolic.pretrained.claims import over_units
from toeplens.papers.positional_symbolic.pretrained.state import Pretrained
from toeplens.studies.kit.claims import Entry
from toeplens.studies.kit.contrasts import of_one
from toeplens.studies.kit.verdicts import LEVEL, Comparison, Finding, Verdict

FEWEST = 2  # texts of whose means an interval can be had


@dataclass(frozen=True)
class ByText:
    """A comparison over sequences, with each text as one number.

    part       of the claim
    low, high  the 95 % interval of the texts' mean
    verdict    by that interval, without correction, and however few texts there are
    """

    entry: Entry
    part: Finding
    texts: int
    value: float
    low: float
    high: float
    verdict: Verdict

    @property
    def differs(self) -> bool:
        """Whether the part, without correction too, is decided otherwise over sequences."""
        return self.verdict != self.part.verdict


def by_text(study: Pretrained) -> Iterator[ByText]:
    """Every comparison of the ledger that is over sequences; none where there is one text, or one sequence of each."""
    names = [name for name, _ in study.plan.places]
    texts = list(dict.fromkeys(names))
    if len(texts) < FEWEST or study.plan.sequences == 1:
        return
    for entry in study.entries:
        for part in entry.findings:
            if part.comparison is None or not over_units(part, study):
                continue
            ((_, values),) = part.comparison.seen.terms
            means = [np.mean([x for x, name in zip(values, names, strict=True) if name == text]) for text in texts]
            seen = of_one(np.array(means), part.comparison.seen.grain)
            yes, no = Comparison(seen, part.comparison.low, part.comparison.high).chances()
            found = Finding("undecided", "", yes, no)
            yield ByText(entry, part, len(texts), seen.value, *seen.interval(LEVEL), found.at(LEVEL))
