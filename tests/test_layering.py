"""The package's rules, read off its source: who may import whom, and what must be explained."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import toeplens

SOURCE = Path(toeplens.__file__).parent
# Each layer imports only from itself and from those before it in this list.
LAYERS = [
    "version",
    "utils",
    "encodings",
    "model",
    "nn",
    "tasks",
    "training",
    "lens",
    "backends",
    "hosts",
    "engine",
    "studies",
    "report",
    "papers",
    "cli",
]
TOP_LAYER = {"__main__"}
SUBDIVIDED = {"lens", "backends", "studies", "report", "papers"}  # into subpackages, which share only `kit`
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler

FILES = sorted(SOURCE.rglob("*.py"))
PAPERS = [f"papers.{path.parent.name}" for path in sorted((SOURCE / "papers").glob("*/__init__.py"))]
PACKAGES = [name for name in LAYERS if (SOURCE / name / "__init__.py").is_file() and name != "papers"] + PAPERS


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


@cache
def layer_of(module: str) -> str | None:
    """The layer of ``module``; None for the package itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "toeplens" and len(parts) > 1 and parts[1] in {*LAYERS, *TOP_LAYER} else None


@cache
def subpackage_of(module: str) -> str | None:
    """The subpackage of ``module`` or of a name in it; None for a module of the layer itself."""
    _, layer, name, *_ = (*module.split("."), "", "")
    files = (f"{name}/__init__.py", f"{name}.py") if layer == "lens" else (f"{name}/__init__.py",)
    return name if layer in SUBDIVIDED and name and any((SOURCE / layer / file).is_file() for file in files) else None


@cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree, read once."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each import in a file, also inside functions."""
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def is_allowed(module: str, imported: str) -> bool:
    here, target = layer_of(module), layer_of(imported)
    if imported.split(".")[0] != "toeplens" or here in TOP_LAYER:
        return True
    if module == "toeplens":  # offers what people use most; imported when it is first used
        return target not in {*TOP_LAYER, "cli"}
    if here is None or target is None or target in TOP_LAYER or LAYERS.index(target) > LAYERS.index(here):
        return False
    return here != target or subpackage_of(module) is None or subpackage_of(imported) in (subpackage_of(module), "kit")


def violations(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in paths
        for line, name in imports(path)
        if not is_allowed(module_of(path), name)
    ]


def test_the_rule_forbids_upward_imports():
    assert is_allowed("toeplens.model.decoder", "toeplens.encodings.build")
    assert is_allowed("toeplens.model.decoder", "toeplens.model.config.DecoderConfig")
    assert is_allowed("toeplens.report.card", "toeplens.studies.load")
    assert is_allowed("toeplens.training.environment", "toeplens.version.__version__")
    assert is_allowed("toeplens.cli", "toeplens.report")
    assert is_allowed("toeplens.__main__", "toeplens.cli.main")
    assert is_allowed("toeplens.utils.files", "torch.nn")
    assert not is_allowed("toeplens.encodings.additive", "toeplens.model.Decoder")
    assert not is_allowed("toeplens.lens.ablation", "toeplens.backends")
    assert not is_allowed("toeplens.report", "toeplens.cli")
    assert not is_allowed("toeplens.studies.grid.study", "toeplens.papers.deposit")
    assert is_allowed("toeplens", "toeplens.model.Decoder")
    assert not is_allowed("toeplens", "toeplens.cli.app")
    assert not is_allowed("toeplens.studies", "toeplens.train")
    assert not is_allowed("toeplens.model.decoder", "toeplens.helpers")


def test_the_rule_forbids_imports_between_sister_subpackages():
    assert is_allowed("toeplens.lens.ablation", "toeplens.lens.ablation.HeadSets")
    assert is_allowed("toeplens.lens.ablation", "toeplens.lens.kit.trace.AttentionTrace")
    assert is_allowed("toeplens.lens", "toeplens.lens.ablation.ablate_heads")
    assert is_allowed("toeplens.papers.deposit.page", "toeplens.studies.auditing.Audit")
    assert not is_allowed("toeplens.lens.ablation", "toeplens.lens.gradients.seed_strength")
    assert not is_allowed("toeplens.lens.kit.trace", "toeplens.lens.ablation.ablate_heads")
    assert not is_allowed("toeplens.papers.mathematics.study", "toeplens.papers.deposit.SCALES")
    assert not is_allowed("toeplens.papers.deposit.page", "toeplens.papers.mathematics.page.theory_page")


def test_every_module_belongs_to_a_layer():
    assert PACKAGES[:5] == LAYERS[1:6]
    assert [str(p) for p in FILES if p.parent != SOURCE and layer_of(module_of(p)) is None] == []
    assert {p.stem for p in SOURCE.glob("*.py")} <= {"__init__", "__main__", "version"}


def test_a_file_imports_only_from_its_own_layer_and_those_below():
    assert violations(FILES) == []


def files_imported(path: Path) -> set[str]:
    """The modules that a file imports: of ``from a import b`` it is a.b where that is a module, else a."""
    result: set[str] = set()
    for node in syntax_nodes(path):
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            result |= {name if name in MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
    return result & MODULES


def test_there_are_no_import_cycles():
    """Imports for types and imports inside functions count as any other."""
    graph = {module_of(path): files_imported(path) for path in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_class_names_are_unique():
    """A name has one meaning: also private classes, with and without the underscore."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in syntax_nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module_of(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_imports_are_absolute_and_explicit():
    names = [(module_of(path), name) for path in FILES for _, name in imports(path)]
    assert [(path, name) for path, name in names if name.startswith(".") or name.endswith(".*")] == []


def test_every_name_is_defined():
    """Also in annotations, which nothing evaluates; linters skip undefined names because of jaxtyping's shapes."""
    assert {module_of(path): lost for path in FILES if (lost := undefined_names(path))} == {}


def undefined_names(path: Path) -> set[str]:
    result = syntax_nodes(path)
    names = {node.id for node in result if isinstance(node, ast.Name)}
    defined = {node.id for node in result if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.name for node in result if isinstance(node, _NAMED)}
    defined |= {node.arg for node in result if isinstance(node, ast.arg)}
    taken = [alias for node in result if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    defined |= {(alias.asname or alias.name).split(".")[0] for alias in taken}
    return names - defined - {*dir(builtins), "__file__"}


@pytest.mark.parametrize("path", sorted((SOURCE / "encodings").glob("*.py")), ids=module_of)
def test_encodings_import_only_torch(path: Path):
    roots = {name.split(".")[0] for _, name in imports(path)}
    assert roots <= {"torch", "jaxtyping", "toeplens", *sys.stdlib_module_names}


def test_every_file_has_a_docstring():
    assert [module_of(path) for path in FILES if not ast.get_docstring(syntax_nodes(path)[0])] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_an_all_list_and_every_name_exists(name: str):
    package = importlib.import_module(f"toeplens.{name}")
    assert package.__all__
    assert len(set(package.__all__)) == len(package.__all__)
    assert [entry for entry in package.__all__ if not hasattr(package, entry)] == []
    assert [entry for entry in package.__all__ if entry.startswith("_")] == []


def has_docstring(entry: object) -> bool:
    """Whether a function or class has a docstring of its own; a dataclass's made-up signature is none."""
    text = inspect.cleandoc(getattr(entry, "__doc__", None) or "")
    return bool(text) and not text.startswith(f"{getattr(entry, '__name__', '')}(")


@pytest.mark.parametrize("name", PACKAGES)
def test_everything_public_has_a_docstring(name: str):
    package = importlib.import_module(f"toeplens.{name}")
    public = {entry: getattr(package, entry) for entry in package.__all__}
    code = {entry: value for entry, value in public.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert [entry for entry, value in code.items() if not has_docstring(value)] == []


def test_error_messages_state_what_a_value_must_be() -> None:
    """In the one form that `toeplens.utils.invalid` gives."""
    texts = [
        (module_of(path), part.value)
        for path in FILES
        for node in syntax_nodes(path)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
        if isinstance(part, ast.Constant)
    ]
    assert [text for text in texts if any(old in text[1] for old in (" was given", " were given", "(got "))] == []
