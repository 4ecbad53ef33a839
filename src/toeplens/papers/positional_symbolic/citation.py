"""The citation of the paper."""

from toeplens.ground.citations import Citation

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
