"""The citation of the paper: its first version, with the title of the later one as a note."""

from toeplens.ground.citations import Citation

PAPER = Citation(
    key="gu2025positional",
    authors=("Gu, Zihan", "Zhang, Han", "Chen, Ruoyu", "Hu, Yue", "Zhang, Hua"),
    title="Unpacking Positional Encoding in Transformers: A Spectral Analysis of Content-Position Coupling",
    year=2025,
    arxiv="2505.13027",
    note="Later version, ICLR 2026: Deconstructing Positional Information: From Attention Logits to Training Biases",
)
