"""What a command costs before it works: help without torch, one sentence for a signal, names when they are used."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command import TINY, TOEPLENS, Toeplens

import toeplens as tl
from toeplens.cli.studies import BUILTIN_STUDIES, PARTS
from toeplens.papers import deposit as study
from toeplens.studies import grid
from toeplens.utils.execution import INTERRUPTED_MESSAGE

WITHOUT_TORCH_SCRIPT = """
import sys
import toeplens
from toeplens.__main__ import main
sys.argv = ["toeplens", *sys.argv[1:]]
try:
    main()
except SystemExit as left:
    heavy = {"torch", "numpy", "scipy", "altair", "vl_convert", "great_tables", "rich.progress"} & set(sys.modules)
    sys.exit(f"imported {heavy}" if heavy else left.code)
"""


def run_without_torch(*arguments: str, **environment: str) -> str:
    """What a command prints that has to get by without torch."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH_SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_help_and_version_work_without_torch():
    assert "Train one model" in run_without_torch("--help")
    assert "--encoding" in run_without_torch("train", "--help")
    assert "--effects" in run_without_torch("audit", "--help")
    assert run_without_torch("--version") == f"toeplens {tl.__version__}\n"


MODULES_SCRIPT = """
import sys
from toeplens.__main__ import main
sys.argv = ["toeplens", *sys.argv[1:]]
try:
    main()
except SystemExit as left:
    ours = [name for name in sys.modules if name.partition(".")[0] == "toeplens"]
    sys.exit(left.code or len(ours))
"""


@pytest.mark.heavy
def test_training_imports_only_what_it_needs(tmp_path: Path):
    """Its exit code is the number of our modules: no lens, no study, no page."""
    command = [sys.executable, "-c", MODULES_SCRIPT, "train", *TINY, "--out", str(tmp_path)]
    assert 60 < subprocess.run(command, capture_output=True).returncode <= 120


def test_a_shell_completes_commands_and_options_without_torch():
    words = {"_TOEPLENS_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert run_without_torch(COMP_WORDS="toeplens tr", **words).split() == ["train"]
    options = run_without_torch(COMP_WORDS="toeplens card --le", **words | {"COMP_CWORD": "2"}).split()
    assert options == ["--length"]
    assert "complete" in run_without_torch(
        "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )


def test_help_lists_every_command():
    assert tuple(study.PARTS) == PARTS
    assert grid.spec_names() == BUILTIN_STUDIES


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(tl.__file__).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names | {"__version__"} == set(tl.__all__)


AUDIT_IMPORTS_SCRIPT = """
import sys
import toeplens.cli.pretrained, toeplens.cli.audit_output, toeplens.report.audit
print(sum(name.split(".")[0] == "toeplens" for name in sys.modules))
"""


def test_an_audit_imports_few_modules():
    """Neither training, nor tasks, nor the engine, nor other studies."""
    done = subprocess.run([sys.executable, "-c", AUDIT_IMPORTS_SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 170


LIBRARY_SCRIPT = """
import gc, os, signal, sys
before = dict(os.environ), [signal.getsignal(each) for each in signal.valid_signals()], list(sys.warnoptions)
import toeplens
from toeplens.engine import ExecutionOptions, run_jobs
from toeplens.training import plan_execution
plan_execution("cpu", "off", "auto")
assert before == (dict(os.environ), [signal.getsignal(each) for each in signal.valid_signals()], sys.warnoptions)
assert gc.isenabled()
"""


@pytest.mark.heavy
def test_importing_toeplens_leaves_the_process_unchanged():
    done = subprocess.run([sys.executable, "-c", LIBRARY_SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_imports_is_one_sentence(number: signal.Signals, tmp_path: Path):
    """What is imported here waits until the signal has come."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(
        [*TOEPLENS, "encodings"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, f"{INTERRUPTED_MESSAGE}\n")


def test_ctrl_c_is_one_sentence(toeplens: Toeplens, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("toeplens.studies.card.make_card", interrupted)
    answer = toeplens("card", "rope", "--out", tmp_path / "page.html")
    assert (answer.code, answer.out, answer.err) == (130, "", f"{INTERRUPTED_MESSAGE}\n")
