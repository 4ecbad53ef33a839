"""The papers' mathematics as numerical experiments: each statement as published, and corrected."""

from toeplens.papers.mathematics.statements import UNIVERSAL, Record, Records, universal_finding
from toeplens.papers.mathematics.study import CLAIMS, EXPERIMENTS, Theory, check_theory, gather, is_theory, model_jobs

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
    "model_jobs",
    "universal_finding",
]
