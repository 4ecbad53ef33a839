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
# Each floor may import from itself and from those before it in this list.
FLOORS = [
    "version",
    "ground",
    "encodings",
    "model",
    "nn",
    "tasks",
    "training",
    "lens",
    "sources",
    "hosts",
    "engine",
    "studies",
    "report",
    "papers",
    "cli",
]
TOP = {"__main__"}  # stands above all of them
ROOMS = {"lens", "sources", "studies", "report", "papers"}  # floors of rooms: kit, and what two others share is in it
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler

FILES = sorted(SOURCE.rglob("*.py"))
PAPERS = [f"papers.{path.parent.name}" for path in sorted((SOURCE / "papers").glob("*/__init__.py"))]
PACKAGES = [floor for floor in FLOORS if (SOURCE / floor / "__init__.py").is_file() and floor != "papers"] + PAPERS


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


@cache
def floor_of(module: str) -> str | None:
    """The floor that ``module`` is on; None for the package itself and for what is not ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "toeplens" and len(parts) > 1 and parts[1] in {*FLOORS, *TOP} else None


@cache
def room_of(module: str) -> str | None:
    """The room that ``module``, or what is taken from it, is in; None for what stands on a floor itself."""
    _, floor, room, *_ = (*module.split("."), "", "")
    known = (f"{room}/__init__.py", f"{room}.py") if floor == "lens" else (f"{room}/__init__.py",)
    return room if floor in ROOMS and room and any((SOURCE / floor / name).is_file() for name in known) else None


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree, read once."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that is imported anywhere in a file, inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def allowed(module: str, imported: str) -> bool:
    here, there = floor_of(module), floor_of(imported)
    if imported.split(".")[0] != "toeplens" or here in TOP:
        return True
    if module == "toeplens":  # offers what people use most; imported when it is first used
        return there not in {*TOP, "cli"}
    if here is None or there is None or there in TOP or FLOORS.index(there) > FLOORS.index(here):
        return False
    return here != there or room_of(module) is None or room_of(imported) in (room_of(module), "kit")


def broken(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in paths
        for line, name in imports(path)
        if not allowed(module_of(path), name)
    ]


def test_the_rule_tells_up_from_down():
    assert allowed("toeplens.model.decoder", "toeplens.encodings.build")
    assert allowed("toeplens.model.decoder", "toeplens.model.config.DecoderConfig")
    assert allowed("toeplens.report.card", "toeplens.studies.load")
    assert allowed("toeplens.training.environment", "toeplens.version.__version__")
    assert allowed("toeplens.cli", "toeplens.report")
    assert allowed("toeplens.__main__", "toeplens.cli.main")
    assert allowed("toeplens.ground.files", "torch.nn")
    assert not allowed("toeplens.encodings.additive", "toeplens.model.Decoder")
    assert not allowed("toeplens.lens.ablation", "toeplens.sources")
    assert not allowed("toeplens.report", "toeplens.cli")
    assert not allowed("toeplens.studies.grid.study", "toeplens.papers.deposit")
    assert allowed("toeplens", "toeplens.model.Decoder")
    assert not allowed("toeplens", "toeplens.cli.app")
    assert not allowed("toeplens.studies", "toeplens.train")
    assert not allowed("toeplens.model.decoder", "toeplens.helpers")


def test_the_rule_tells_sister_rooms():
    assert allowed("toeplens.lens.ablation", "toeplens.lens.ablation.HeadSets")
    assert allowed("toeplens.lens.ablation", "toeplens.lens.kit.trace.AttentionTrace")
    assert allowed("toeplens.lens", "toeplens.lens.ablation.ablate_heads")
    assert allowed("toeplens.papers.deposit.page", "toeplens.studies.auditing.Audit")
    assert not allowed("toeplens.lens.ablation", "toeplens.lens.gradients.seed_strength")
    assert not allowed("toeplens.lens.kit.trace", "toeplens.lens.ablation.ablate_heads")
    assert not allowed("toeplens.papers.mathematics.study", "toeplens.papers.deposit.SCALES")
    assert not allowed("toeplens.papers.deposit.page", "toeplens.papers.mathematics.page.theory_page")


def test_everything_stands_on_a_floor():
    assert PACKAGES[:5] == FLOORS[1:6]
    assert [str(p) for p in FILES if p.parent != SOURCE and floor_of(module_of(p)) is None] == []
    assert {p.stem for p in SOURCE.glob("*.py")} <= {"__init__", "__main__", "version"}


def test_a_file_imports_only_from_its_own_floor_and_those_below():
    assert broken(FILES) == []


def files_imported(path: Path) -> set[str]:
    """The modules that a file imports: of ``from a import b`` it is a.b where that is a module, else a."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES


def test_no_file_imports_itself_by_way_of_others():
    """Imports for types and imports inside functions count as any other."""
    graph = {module_of(path): files_imported(path) for path in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_imports_are_absolute_and_name_what_they_take():
    names = [(module_of(path), name) for path in FILES for _, name in imports(path)]
    assert [(path, name) for path, name in names if name.startswith(".") or name.endswith(".*")] == []


def test_every_name_comes_from_somewhere():
    """Those of annotations too, which nothing evaluates; linters are told to pass over shapes, so over all of them."""
    assert {module_of(path): lost for path in FILES if (lost := names_from_nowhere(path))} == {}


def names_from_nowhere(path: Path) -> set[str]:
    found = nodes(path)
    names = {node.id for node in found if isinstance(node, ast.Name)}
    made = {node.id for node in found if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in found if isinstance(node, _NAMED)}
    made |= {node.arg for node in found if isinstance(node, ast.arg)}
    taken = [alias for node in found if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    made |= {(alias.asname or alias.name).split(".")[0] for alias in taken}
    return names - made - {*dir(builtins), "__file__"}


@pytest.mark.parametrize("path", sorted((SOURCE / "encodings").glob("*.py")), ids=module_of)
def test_encodings_need_torch_and_nothing_else(path: Path):
    roots = {name.split(".")[0] for _, name in imports(path)}
    assert roots <= {"torch", "jaxtyping", "toeplens", *sys.stdlib_module_names}


def test_every_file_says_what_it_is_for():
    assert [module_of(path) for path in FILES if not ast.get_docstring(nodes(path)[0])] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_has_a_table_of_contents_and_all_of_it_exists(name: str):
    package = importlib.import_module(f"toeplens.{name}")
    assert package.__all__
    assert len(set(package.__all__)) == len(package.__all__)
    assert [entry for entry in package.__all__ if not hasattr(package, entry)] == []
    assert [entry for entry in package.__all__ if entry.startswith("_")] == []


def explained(entry: object) -> bool:
    """Whether a function or class has a docstring of its own; a dataclass's made-up signature is none."""
    text = inspect.cleandoc(getattr(entry, "__doc__", None) or "")
    return bool(text) and not text.startswith(f"{getattr(entry, '__name__', '')}(")


@pytest.mark.parametrize("name", PACKAGES)
def test_everything_public_is_explained(name: str):
    package = importlib.import_module(f"toeplens.{name}")
    public = {entry: getattr(package, entry) for entry in package.__all__}
    code = {entry: value for entry, value in public.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert [entry for entry, value in code.items() if not explained(value)] == []


def test_messages_say_what_a_value_must_be() -> None:
    """In the one form that `toeplens.ground.invalid` gives."""
    texts = [
        (module_of(path), part.value)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
        if isinstance(part, ast.Constant)
    ]
    assert [text for text in texts if any(old in text[1] for old in (" was given", " were given", "(got "))] == []
