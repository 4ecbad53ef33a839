"""What a command costs before it works: help without torch, one sentence for a signal, names when they are used."""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.command import TOEPLENS, Toeplens

import toeplens as tl
from toeplens.cli.studies import OURS, PARTS
from toeplens.ground.stops import STOPPED
from toeplens.papers import deposit as study
from toeplens.start import starting, uncollected
from toeplens.studies import grid

LIGHT = """
import sys
import toeplens
from toeplens.__main__ import main
sys.argv = ["toeplens", *sys.argv[1:]]
try:
    main()
except SystemExit as left:
    heavy = {"torch", "numpy", "scipy", "plotly", "rich.progress"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else left.code)
"""


def light(*arguments: str, **environment: str) -> str:
    """What a command prints that has to get by without torch."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_help_and_the_version_do_without_torch():
    assert "Fit one run" in light("--help")
    assert "--encoding" in light("train", "--help")
    assert "--effects" in light("audit", "--help")
    assert light("--version") == f"toeplens {tl.__version__}\n"


def test_a_shell_completes_commands_and_options_without_torch():
    words = {"_TOEPLENS_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert light(COMP_WORDS="toeplens tr", **words).split() == ["train"]
    options = light(COMP_WORDS="toeplens card --le", **words | {"COMP_CWORD": "2"}).split()
    assert options == ["--length"]
    assert "complete" in light("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")


def test_the_list_of_encodings_imports_torch_and_little_else() -> None:
    heavy = '{"torch", "numpy", "scipy", "plotly", "rich.progress"}'
    assert heavy in LIGHT
    program = LIGHT.replace(heavy, '{"scipy.special", "scipy.stats", "plotly", "toeplens.studies", "toeplens.engine"}')
    done = subprocess.run([sys.executable, "-c", program, "encodings"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("asked", "spins"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_that_wait_give_their_cores_back_unless_something_else_is_asked_for(asked: dict[str, str], spins: str):
    ending = "finally:\n    import os\n    print(os.environ.get('GOMP_SPINCOUNT'))\n"
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT + ending, "--version"], capture_output=True, text=True, env=plain | asked
    )
    assert done.stdout.split() == ["toeplens", tl.__version__, spins]


def test_what_help_lists_is_what_there_is():
    assert tuple(study.PARTS) == PARTS
    assert grid.specs() == OURS


def test_every_public_name_is_offered_by_the_package():
    assert callable(tl.audit)
    assert callable(tl.train)
    assert callable(tl.behaviour)
    assert "nope" in tl.encodings.names()
    assert [name for name in tl.__all__ if not hasattr(tl, name)] == []
    assert dir(tl) == sorted(tl.__all__)
    with pytest.raises(AttributeError, match="'toeplens' has no attribute 'adit'"):
        _ = tl.adit  # pyright: ignore[reportAttributeAccessIssue]


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(tl.__file__).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names | {"__version__"} == set(tl.__all__)


def test_handlers_are_left_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    with starting():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_is_imported_is_one_sentence(number: signal.Signals, tmp_path: Path):
    """What is imported here waits until the signal has come."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    command = [*TOEPLENS, "encodings"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "error: stopped; no work was under way.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["extrapolate", "card"])
def test_a_signal_while_any_command_works_is_one_sentence(
    toeplens: Toeplens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, number: signal.Signals
):
    def signalled(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("toeplens.training.Run.open", signalled)
    monkeypatch.setattr("toeplens.studies.card.make_card", signalled)
    arguments = {"extrapolate": [tmp_path], "card": ["rope", "--out", tmp_path / "page.html"]}
    answer = toeplens(command, *arguments[command])
    assert (answer.code, answer.out) == (130, "")
    assert answer.err == f"error: {STOPPED}\n"


def test_garbage_is_looked_for_again_after_imports_unless_it_was_not() -> None:
    def fail() -> None:
        with uncollected():
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError

    assert gc.isenabled()
    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_imports_made_is_old_and_can_be_collected() -> None:
    with uncollected():
        made = [["a list in a list"]]
    assert any(each is made for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0
    frozen = [["kept"]]
    gc.freeze()
    try:
        with uncollected():
            pass
        assert gc.get_freeze_count() > 0, "what somebody froze stays frozen"
    finally:
        gc.unfreeze()
    assert frozen
