"""The conformance suite: is an encoding what the contract asks for, and what it says of itself?

    from toeplens.encodings import conformance
    print(conformance.check(MyEncoding, slope=2.0))

runs every check on a small instance and raises `NonConformance`, with all findings in its message, if one fails.
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
