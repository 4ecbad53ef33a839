"""arXiv 2511.11579 and 2605.31558, positional and symbolic heads: grid files and claims."""

from pathlib import Path

from toeplens.utils.citations import Citation

_FILES = Path(__file__).parent / "specs"
CANONICAL = _FILES / "canonical.yaml"  # the study of the canonical tasks
CANONICAL_SMOKE = _FILES / "canonical-smoke.yaml"  # toy size
MULTIHOP = _FILES / "multihop.yaml"  # the study of the multi-hop tasks

# for citations
PAPER = Citation(
    key="urrutia2025decoupling",
    authors=(
        "Urrutia, Felipe",
        "Salas, Jorge",
        "Kozachinskiy, Alexander",
        "{Buc Calderon}, Cristian",
        "Pasten, Hector",
        "Rojas, Cristobal",
    ),
    title="Decoupling Positional and Symbolic Attention Behavior in Transformers",
    year=2025,
    arxiv="2511.11579",
)
# for citations: the multi-hop tasks
FOLLOW_UP = Citation(
    key="urrutia2026positional",
    authors=(
        "Urrutia, Felipe",
        "Alegría, Juan José",
        "{Sanchez Macias}, Cinthia",
        "Salas, Jorge",
        "{Buc Calderon}, Cristian",
        "Rojas, Cristobal",
    ),
    title="Positional versus Symbolic Attention Heads: Learning Dynamics, RoPE Geometry, and Length Generalization",
    year=2026,
    arxiv="2605.31558",
)

__all__ = ["CANONICAL", "CANONICAL_SMOKE", "FOLLOW_UP", "MULTIHOP", "PAPER"]
