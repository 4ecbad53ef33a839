"""The papers' central experiment: encodings x tasks x protocols, head ablation, and the claims about them."""

from toeplens.studies.reproduce.cells import grid, starting_spec
from toeplens.studies.reproduce.claims import CLAIMS, claims_of
from toeplens.studies.reproduce.labels import PROTOCOLS, title
from toeplens.studies.reproduce.parts import PARTS, chosen_parts
from toeplens.studies.reproduce.scales import COUNT, DISTANCE, SCALES, Scale
from toeplens.studies.reproduce.study import Plan, Reproduction, gather, planned, reproduce
from toeplens.studies.reproduce.tables import PAPER_TABLE_1, Row, accuracy_table

__all__ = [
    "CLAIMS",
    "COUNT",
    "DISTANCE",
    "PAPER_TABLE_1",
    "PARTS",
    "PROTOCOLS",
    "SCALES",
    "Plan",
    "Reproduction",
    "Row",
    "Scale",
    "accuracy_table",
    "chosen_parts",
    "claims_of",
    "gather",
    "grid",
    "planned",
    "reproduce",
    "starting_spec",
    "title",
]
