"""Draw architecture.svg: the packages with their folders, and which imports which, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "toeplens"
PICTURE = Path(__file__).with_suffix(".svg")
# from the top down: each imports only from those below it
LAYERS = {
    "cli": "parse, call, print",
    "papers": "study, claims and page per paper",
    "report": "pages",
    "studies": "grids, audits, probes, verdicts",
    "engine": "many runs, their records",
    "hosts": "encodings in Hugging Face models",
    "backends": "attention of a model",
    "lens": "measures, by question",
    "training": "one run",
    "tasks": "synthetic tasks, language",
    "nn": "encodings in your own model",
    "model": "the decoder",
    "encodings": "positional encodings, attention",
    "utils": "errors, files, records, locks",
}
ROW, LEFT, WIDTH, CELL = 46, 12, 820, 26
STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; fill: #22262d }
.floor { fill: #f3f5f8 } .room { fill: #fff; stroke: #b9c1cd } .name { font-weight: 600 } .what { fill: #667080 }
.dot { fill: #2f6fe0 } .none { fill: #d8dde5 } .head { fill: #667080; font-size: 11px }
@media (prefers-color-scheme: dark) {
  svg { background: #14171c; fill: #e4e8ee } .floor { fill: #1d222a } .room { fill: #14171c; stroke: #4a5362 }
  .what, .head { fill: #98a3b3 } .none { fill: #2c333e } .dot { fill: #6ea0ff }
}
"""


def modules_of(floor: str) -> list[str]:
    """The folders of a floor, and the modules of lens beside them."""
    folders = [path.parent.name for path in (SOURCE / floor).glob("*/__init__.py")]
    modules = [path.stem for path in (SOURCE / floor).glob("[a-z]*.py")] if floor == "lens" else []
    return sorted(folders + modules, key=lambda name: (name != "kit", name))


def imported_layers(floor: str) -> set[str]:
    """The other floors that the files of a floor import from."""
    result = set()
    for path in (SOURCE / floor).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toeplens"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                result |= {name.split(".")[1] for name in names}
    return result & (LAYERS.keys() - {floor})


def drawing() -> str:
    """The picture, the same for the same source."""
    names = list(LAYERS)
    width, top = WIDTH + 60 + CELL * len(names), 74
    height = top + ROW * len(names) + 34
    parts = [f'<text x="{LEFT}" y="24" class="name">toeplens: each package imports only from those below</text>']
    parts.append(f'<text x="{WIDTH + 34}" y="24" class="head">imports from</text>')
    for row, floor in enumerate(names):
        y = top + ROW * row
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 8}" rx="4" class="floor"/>')
        parts.append(f'<text x="{LEFT + 10}" y="{y + 16}" class="name">{floor}/</text>')
        parts.append(f'<text x="{LEFT + 10}" y="{y + 31}" class="what">{LAYERS[floor]}</text>')
        x = LEFT + 228
        for room in modules_of(floor):
            wide = 7 * len(room) + 14
            parts.append(f'<rect x="{x}" y="{y + 8}" width="{wide}" height="22" rx="3" class="room"/>')
            parts.append(f'<text x="{x + 7}" y="{y + 23}">{room}</text>')
            x += wide + 6
        taken = imported_layers(floor)
        for column, other in enumerate(names):
            if column > row:
                kind, size = ("dot", 6) if other in taken else ("none", 2)
                centre = WIDTH + 46 + CELL * column
                parts.append(f'<circle cx="{centre}" cy="{y + 19}" r="{size}" class="{kind}"/>')
    for column, other in enumerate(names):
        x = WIDTH + 46 + CELL * column
        parts.append(f'<text x="{x}" y="{top - 8}" class="head" transform="rotate(-40 {x} {top - 8})">{other}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{height - 10}" class="what">A folder imports from itself, from its package\'s kit and '
        "from the packages below; never from a sibling folder.</text>"
    )
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>\n{body}\n</svg>\n'


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
