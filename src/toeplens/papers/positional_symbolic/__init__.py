"""arXiv 2511.11579, positional and symbolic heads: grid files and claims."""

from pathlib import Path

from toeplens.utils.citations import Citation

_FILES = Path(__file__).parent / "specs"
CANONICAL = _FILES / "canonical.yaml"  # the study of the canonical tasks
CANONICAL_SMOKE = _FILES / "canonical-smoke.yaml"  # toy size

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

__all__ = ["CANONICAL", "CANONICAL_SMOKE", "PAPER"]
