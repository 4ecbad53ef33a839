"""Claims about positional and symbolic heads, frequencies and length, judged on a grid study.

They know tasks and encodings by the labels index, retrieval, mix; rope, nope, high, low, and the scan turn. The first
rules were written before the study that is recorded was looked at; what was seen before was one trial of each kind of
model under another seed (7), which set the sizes of the tasks and the range of the scan. Bars and parts were written
anew after it, when all ledgers got one kind of rule: for these the record of seeds 42 to 44 was known.

Of arXiv 2511.11579 we have the abstract. What stands there has it as its source; "ours" is what does not.
"""

from __future__ import annotations

from toeplens.papers.positional_symbolic.claims import frequencies, heads, length
from toeplens.studies.grid.study import Evidence
from toeplens.studies.kit.claims import Claim

CLAIMS: tuple[Claim[Evidence], ...] = (*heads.CLAIMS, *frequencies.CLAIMS, *length.CLAIMS)

__all__ = ["CLAIMS", "Evidence"]
