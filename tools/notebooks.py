"""A hook of mkdocs that shows a notebook as a page: its text, and its code in blocks.

Nothing is executed and no package is needed: notebooks are stored without outputs, and the tests run them.
"""

from __future__ import annotations

import json
from typing import Any

from mkdocs.structure.files import File, Files


class Notebook(File):
    """A notebook's file, for which a page is made instead of a copy."""

    def is_documentation_page(self) -> bool:
        return True


def as_markdown(notebook: str) -> str:
    """A notebook's cells, one after another."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with what lies in docs/."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(page: Any, **_: Any) -> str | None:
    """Called by mkdocs for each page; None where it reads the file itself."""
    if isinstance(page.file, Notebook):
        return as_markdown(page.file.content_string)
    return None
