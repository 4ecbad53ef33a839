"""The notebook of the documentation: kept without outputs, and run from top to bottom in a kernel of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first-look.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
RUN_SCRIPT = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
where = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
nbformat.write(notebook, sys.argv[3])
"""


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.heavy
def test_the_notebook_runs(tmp_path: Path) -> None:
    """In a process of its own: what a kernel's client warns of is no matter of ours."""
    done = tmp_path / "done.ipynb"
    kernels = tmp_path / "kernels" / "python3"
    kernels.mkdir(parents=True)  # whatever kernels this machine knows by that name
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PATH": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", RUN_SCRIPT, str(NOTEBOOK), str(tmp_path), str(done)], check=True, env=environment
    )
    cells = [cell for cell in json.loads(done.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    output = ["".join(piece for out in cell["outputs"] for piece in out.get("text", [])) for cell in cells]
    right = {name: int(percent) for name, percent in re.findall(r"(\w+): (\d+) % right", output[0])}
    assert right["rope"] > right["nope"] + 20, "the task needs a position"
    assert float(re.findall(r"logits by (\S+)", output[2])[0]) < 1e-5
    for cell in (cells[3], cells[4]):
        assert "vegaEmbed" in "".join(cell["outputs"][-1]["data"]["text/html"])
    assert float(re.findall(r"differ by (\S+)", output[4])[0]) < 1e-5
