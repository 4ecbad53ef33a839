"""The reference: every public name is on a page, docstrings are Markdown there, formulas MathML; and all builds."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.builders import load_script

import toeplens

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCED = {
    name
    for page in (DOCS / "reference" / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)
}
LAYERS = [f"toeplens.{module.name}" for module in pkgutil.iter_modules(toeplens.__path__) if module.ispkg]
PUBLIC = [name for name in LAYERS if name not in ("toeplens.cli", "toeplens.papers")]
PACKAGES = sorted(name for name in REFERENCED if (ROOT / "src" / name.replace(".", "/") / "__init__.py").exists())


def names_of(package: str) -> list[str]:
    module = importlib.import_module(package)
    return [name for name in getattr(module, "__all__", ()) if not inspect.ismodule(getattr(module, name))]


def test_every_subpackage_has_a_page() -> None:
    assert [name for name in PUBLIC if name not in REFERENCED] == []


def test_toeplens_exports_only_names_of_subpackages() -> None:
    by_layer = {name for package in PUBLIC for name in names_of(package)}
    offered = {name for name in toeplens.__all__ if not inspect.ismodule(getattr(toeplens, name))}
    assert offered - by_layer == {"__version__"}
    listed = (DOCS / "reference" / "api.md").read_text("utf-8")
    assert [name for name in offered - {"__version__"} if f"`{name}`" not in listed] == []


def test_the_navigation_has_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = re.findall(r"([\w./-]+\.(?:md|ipynb))$", nav, re.MULTILINE)
    assert len(set(named)) == len(named)
    kept = {str(path.relative_to(DOCS)) for kind in ("*.md", "*.ipynb") for path in DOCS.rglob(kind)}
    assert set(named) == kept
    content = yaml.safe_load(f"nav:{nav}")["nav"]
    assert [next(iter(part)) for part in content] == ["Get started", "How-to", "Findings", "Reference"]


def test_tables_of_names_become_lists() -> None:
    pytest.importorskip("griffe")
    docstrings = load_script(ROOT / "tools" / "docstrings.py")
    told = "    q, k     [B, N] vectors of `x[0]`,\n             a < b\n    **more   what else"
    text = f"A head.\n\nArguments\n{told}\n\nAnd [so]."
    assert [line for line in docstrings.as_markdown(text).splitlines() if line] == [
        "A head.",
        "**Arguments**",
        r"- `q`, `k`: \[B, N\] vectors of `x[0]`, a &lt; b",
        "- `**more`: what else",
        r"And \[so\].",
    ]


def test_formulas_become_mathml() -> None:
    hook = load_script(ROOT / "tools" / "formulas.py")
    html = hook.on_page_content(r'<p>a <span class="arithmatex">\(\lambda \le 1\)</span> b</p>')
    assert html.startswith("<p>a <math")
    assert "\\" not in html
    assert hook.on_page_content("<p>nothing</p>") == "<p>nothing</p>"
    with pytest.raises(ValueError, match="does not know all of the formula"):
        hook.on_page_content(r'<span class="arithmatex">\(\nosuchcommand{x}\)</span>')


@pytest.mark.heavy
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """And whatever a package offers has a place in the reference to which links can lead."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = [page.read_text("utf-8") for page in (tmp_path / "reference" / "api").rglob("index.html")]
    places = {place for page in pages for place in re.findall(r'id="(toeplens\.[\w.]+)"', page)}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in names_of(package):
            value = getattr(module, name)
            own = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', name)}"
            assert {f"{package}.{name}", own} & places, f"{package}.{name}"
    assert "<math" in (tmp_path / "findings" / "theory" / "index.html").read_text("utf-8")
    assert "decompose" in (tmp_path / "notebooks" / "first-look" / "index.html").read_text("utf-8")
