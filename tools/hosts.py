"""Write the table of model families into docs/how-to/hosts-models.md: the largest differences measured.

python tools/hosts.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
OWN_POSITION = {"BloomForCausalLM": "ALiBi", "T5ForConditionalGeneration": "T5's bias"}
PAGE, MARKS = ROOT / "docs" / "how-to" / "hosts-models.md", ("<!-- families -->", "<!-- end -->")


def rows() -> list[str]:
    """One line a family."""
    from tests.backends.hf.models import tiny
    from tests.hosts.families import FAMILIES, TABLES
    from tests.hosts.test_families import (
        inputs_of,
        logits,
        logits_without_position,
        max_difference,
        reinstall_own_position,
    )

    from toeplens import hosts

    lines = []
    for name, (kind, sizes) in FAMILIES.items():
        model = tiny(kind, **sizes)
        off, on = [], []
        for padding in ("whole", "right"):
            inputs = inputs_of(model, padding)
            plain, expected = logits(model, inputs), logits_without_position(model, inputs)
            hosts.install(model, "nope")
            off.append(max_difference(logits(model, inputs), expected))
            hosts.uninstall(model)
            assert logits(model, inputs).equal(plain), name
            if reinstall_own_position(model):
                on.append(max_difference(logits(model, inputs), plain))
                hosts.uninstall(model)
        own = OWN_POSITION.get(kind) or ("a table at the input" if kind in TABLES else "a rotation")
        again = f"{max(on):.0e}" if on else "not tested"
        lines.append(f"| {name} | {own} | {max(off):.0e} | {again} |")
    return lines


def main() -> None:
    """Put the table in its place."""
    torch.manual_seed(0)
    differences = "without position, largest difference | own encoding reinstalled, largest difference"
    head = [f"| family | its own position | {differences} |"]
    table = "\n".join([*head, "|---|---|---|---|", *rows()])
    page = PAGE.read_text()
    between = f"{MARKS[0]}\n\n{table}\n\n{MARKS[1]}"
    PAGE.write_text(re.sub(f"{MARKS[0]}.*{MARKS[1]}", lambda _: between, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
