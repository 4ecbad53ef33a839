"""The conformance suite: does an encoding keep the interface, and are its declared attributes true?

    from toeplens.encodings import conformance
    print(conformance.check(MyEncoding, slope=2.0))

This runs every check on a small instance. If one fails, it raises `NonConformance` with all findings in the message.
"""

from toeplens.encodings.conformance.specimen import SIZES, Facts, Specimen, declared, measure
from toeplens.encodings.conformance.suite import CHECKS, Finding, NonConformance, Report, check

__all__ = [
    "CHECKS",
    "SIZES",
    "Facts",
    "Finding",
    "NonConformance",
    "Report",
    "Specimen",
    "check",
    "declared",
    "measure",
]
