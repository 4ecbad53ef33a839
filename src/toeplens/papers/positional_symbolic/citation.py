"""How the paper is cited."""

from toeplens.ground.works import Work

PAPER = Work(
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
    eprint="2511.11579",
)
