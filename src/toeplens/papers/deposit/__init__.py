"""The papers' central experiment: encodings x tasks x protocols, head ablation, and the claims about them."""

from toeplens.ground.citations import Citation
from toeplens.papers.deposit.claims import CLAIMS, claims_of
from toeplens.papers.deposit.measured import PAPER_TABLE_1, Row, accuracy_table
from toeplens.papers.deposit.spec import PARTS, SCALES, Scale, chosen_parts, title
from toeplens.papers.deposit.study import Plan, Reproduction, gather, grid, planned, reproduce

__all__ = [
    "CLAIMS",
    "PAPER",
    "PAPER_TABLE_1",
    "PARTS",
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
    "title",
]

# the first version, with the title of the later one as a note
PAPER = Citation(
    key="gu2025positional",
    authors=("Gu, Zihan", "Zhang, Han", "Chen, Ruoyu", "Hu, Yue", "Zhang, Hua"),
    title="Unpacking Positional Encoding in Transformers: A Spectral Analysis of Content-Position Coupling",
    year=2025,
    arxiv="2505.13027",
    note="Later version, ICLR 2026: Deconstructing Positional Information: From Attention Logits to Training Biases",
)
