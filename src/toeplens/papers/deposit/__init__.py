"""The papers' central experiment: encodings x tasks x protocols, head ablation, and the claims about them."""

from toeplens.papers.deposit.claims import CLAIMS, claims_of
from toeplens.papers.deposit.measures import PAPER_TABLE_1, AccuracyRow, accuracy_table
from toeplens.papers.deposit.spec import PARTS, SCALES, ReproductionScale, select_parts, title
from toeplens.papers.deposit.study import Reproduction, ReproductionPlan, gather, grid, merged_plan, reproduce
from toeplens.utils.citations import Citation

__all__ = [
    "CLAIMS",
    "PAPER",
    "PAPER_TABLE_1",
    "PARTS",
    "SCALES",
    "AccuracyRow",
    "Reproduction",
    "ReproductionPlan",
    "ReproductionScale",
    "accuracy_table",
    "claims_of",
    "gather",
    "grid",
    "merged_plan",
    "reproduce",
    "select_parts",
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
