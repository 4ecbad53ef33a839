"""The house's rules, read off its source: who may import whom, how long a file may be, what must be explained."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
from collections import Counter
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
LONGEST, MOST = 800, 25  # lines of a file; files of a folder of a floor of rooms
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler

FILES = sorted(SOURCE.rglob("*.py"))
PAPERS = [f"papers.{path.parent.name}" for path in sorted((SOURCE / "papers").glob("*/__init__.py"))]
PACKAGES = [floor for floor in FLOORS if (SOURCE / floor / "__init__.py").is_file() and floor != "papers"] + PAPERS


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def floor_of(module: str) -> str | None:
    """The floor that ``module`` is on; None for the package itself and for what is not ours."""
    parts = module.split(".")
    return parts[1] if parts[0] == "toeplens" and len(parts) > 1 and parts[1] in {*FLOORS, *TOP} else None


def room_of(module: str) -> str | None:
    """The room that ``module``, or what is taken from it, is in; None for what stands on a floor itself."""
    _, floor, room, *_ = (*module.split("."), "", "")
    return room if floor in ROOMS and (SOURCE / floor / room / "__init__.py").is_file() and room else None


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of all that is imported anywhere in a file, inside functions too."""
    for node in ast.walk(tree):
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
        for line, name in imports(parsed(path))
        if not allowed(module_of(path), name)
    ]


def test_the_reader_of_imports_sees_all_kinds():
    code = "import a.b as c\nfrom d import e, f\nfrom . import g\ndef h():\n    from toeplens import lens\n"
    assert [name for _, name in imports(ast.parse(code))] == ["a.b", "d.e", "d.f", "..g", "toeplens.lens"]


def test_the_rule_tells_up_from_down():
    assert allowed("toeplens.model.decoder", "toeplens.encodings.build")
    assert allowed("toeplens.model.decoder", "toeplens.model.config.DecoderConfig")
    assert allowed("toeplens.report.card", "toeplens.studies.load")
    assert allowed("toeplens.training.environment", "toeplens.version.__version__")
    assert allowed("toeplens.cli", "toeplens.report")
    assert allowed("toeplens.__main__", "toeplens.cli.main")
    assert allowed("toeplens.ground.files", "torch.nn")
    assert not allowed("toeplens.encodings.bias", "toeplens.model.Decoder")
    assert not allowed("toeplens.lens.ablation.ablate", "toeplens.sources")
    assert not allowed("toeplens.report", "toeplens.cli")
    assert not allowed("toeplens.studies.grid.study", "toeplens.papers.deposit")
    assert allowed("toeplens", "toeplens.model.Decoder")
    assert not allowed("toeplens", "toeplens.cli.app")
    assert not allowed("toeplens.studies", "toeplens.train")
    assert not allowed("toeplens.model.decoder", "toeplens.helpers")


def test_the_rule_tells_sister_rooms():
    assert allowed("toeplens.lens.ablation.ablate", "toeplens.lens.ablation.attribution.Scalable")
    assert allowed("toeplens.lens.ablation.ablate", "toeplens.lens.kit.trace.AttentionTrace")
    assert allowed("toeplens.lens", "toeplens.lens.ablation.ablate.ablate_heads")
    assert allowed("toeplens.report.grid.page", "toeplens.studies.auditing.Audit")
    assert not allowed("toeplens.lens.ablation.ablate", "toeplens.lens.gradients.signal.seed_strength")
    assert not allowed("toeplens.lens.kit.trace", "toeplens.lens.ablation.ablate.ablate_heads")
    assert not allowed("toeplens.papers.mathematics.study", "toeplens.papers.deposit.SCALES")
    assert not allowed("toeplens.report.grid.page", "toeplens.report.card.render_card")


def test_everything_stands_on_a_floor():
    assert PACKAGES[:5] == FLOORS[1:6]
    assert [str(p) for p in FILES if p.parent != SOURCE and floor_of(module_of(p)) is None] == []
    assert {p.stem for p in SOURCE.glob("*.py")} <= {"__init__", "__main__", "version"}


def test_a_file_imports_only_from_its_own_floor_and_those_below():
    assert broken(FILES) == []


def files_imported(path: Path) -> set[str]:
    """The modules that a file imports: of ``from a import b`` it is a.b where that is a module, else a."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
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


def test_a_room_is_seen_at_a_glance():
    of_rooms = [path for path in FILES if path.relative_to(SOURCE).parts[0] in ROOMS - {"sources"}]
    files = Counter(path.parent.relative_to(SOURCE) for path in of_rooms)
    assert {folder: count for folder, count in files.items() if count > MOST} == {}


def test_imports_are_absolute_and_name_what_they_take():
    names = [(module_of(path), name) for path in FILES for _, name in imports(parsed(path))]
    assert [(path, name) for path, name in names if name.startswith(".") or name.endswith(".*")] == []


def test_every_name_comes_from_somewhere():
    """Those of annotations too, which nothing evaluates; linters are told to pass over shapes, so over all of them."""
    assert {module_of(path): lost for path in FILES if (lost := names_from_nowhere(path))} == {}


def names_from_nowhere(path: Path) -> set[str]:
    nodes = list(ast.walk(parsed(path)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, _NAMED)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    taken = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    made |= {(alias.asname or alias.name).split(".")[0] for alias in taken}
    return names - made - {*dir(builtins), "__file__"}


@pytest.mark.parametrize("path", sorted((SOURCE / "encodings").glob("*.py")), ids=module_of)
def test_encodings_need_torch_and_nothing_else(path: Path):
    roots = {name.split(".")[0] for _, name in imports(parsed(path))}
    assert roots <= {"torch", "jaxtyping", "toeplens", *sys.stdlib_module_names}


def test_no_file_is_over_800_lines():
    lines = {module_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_every_file_says_what_it_is_for():
    assert [module_of(path) for path in FILES if not ast.get_docstring(parsed(path))] == []


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


def test_text_files_are_utf8_by_name():
    """Not in the encoding of the locale that a machine happens to have."""
    unnamed = [
        f"{module_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and _opens_text(node)
        and not any(keyword.arg == "encoding" for keyword in node.keywords)
    ]
    assert unnamed == []


def _opens_text(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes a file as text; reading and opening of our own are told by their place."""
    name = ast.unparse(call.func)
    if name.endswith((".read_text", ".write_text")):
        return name.split(".")[0] not in {"auditing", "files"}
    modes = [each.value for each in (*call.args, *(k.value for k in call.keywords)) if isinstance(each, ast.Constant)]
    opens = name == "open" or (name.endswith(".open") and name not in {"os.open", "Run.open", "training.Run.open"})
    return opens and not any(isinstance(mode, str) and "b" in mode for mode in modes)


def test_the_reader_of_open_files_sees_all_kinds():
    code = ("open(a)", "b.open('w')", "c.read_text()", "d.write_text(x)", "open(e, 'rb')", "Run.open(f)", "g(h)")
    calls = [ast.parse(line, mode="eval").body for line in code]
    assert [isinstance(call, ast.Call) and _opens_text(call) for call in calls] == [True] * 4 + [False] * 3
