"""The papers' mathematics as experiments: each statement as it stands, and as it should stand, judged on numbers."""

from toeplens.studies.theory.records import UNIVERSAL, Record, Records, universal
from toeplens.studies.theory.study import CLAIMS, EXPERIMENTS, Theory, check_theory, gather, is_theory, jobs

__all__ = [
    "CLAIMS",
    "EXPERIMENTS",
    "UNIVERSAL",
    "Record",
    "Records",
    "Theory",
    "check_theory",
    "gather",
    "is_theory",
    "jobs",
    "universal",
]
