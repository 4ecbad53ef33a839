"""What every test runs under: one thread, the same random examples each time; shapes are checked when asked for."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy reads it once: two workers of two threads each wait for each other

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook
from tests.cli.command import TINY, CommandResult, Toeplens

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from toeplens.training import Run

# TOEPLENS_CHECK_SHAPES=1 checks the annotations of these packages in every call (an int passes for a float, as in
# PEP 484), but for constructors, which validate by themselves. `make test-shapes` runs the suites that call them all.
CHECK_SHAPES = os.environ.get("TOEPLENS_CHECK_SHAPES") == "1"
_CHECKED = ("toeplens.encodings", "toeplens.model", "toeplens.lens")
_CHECKER = """beartype.beartype(conf=beartype.BeartypeConf(
    is_pep484_tower=True,
    strategy=beartype.BeartypeStrategy.O0 if x.__name__ == "__init__" else beartype.BeartypeStrategy.O1,
))"""
if CHECK_SHAPES:
    assert not any(name.startswith(_CHECKED) for name in sys.modules), "the hook must come before the first import"
    install_import_hook(_CHECKED, _CHECKER)

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in its background ignore it
os.environ["COLUMNS"] = "200"  # xdist gives its workers another width, which rich would keep from its import on

_MEMORY, _ROOM = Path("/dev/shm"), 4 * 2**30
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM:
    # tests write small files and flush them often: a disk would be waited for
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

_EXAMPLES = {"quick": 8, "ci": 25}
for _name, _examples in _EXAMPLES.items():
    settings.register_profile(_name, deadline=None, derandomize=True, max_examples=_examples, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a heavy test are not even imported where those alone are asked for."""
    if config.option.markexpr != "heavy" or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if "heavy" in text else True


@pytest.fixture(scope="session", autouse=True)
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Corpora lie in a folder of the session's, and not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOEPLENS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real browser, opened once."""
    from tests.report.browsing import open_chromium

    with open_chromium() as opened:
        yield opened


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads as it was, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def toeplens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Toeplens:
    """The command in this process."""
    from toeplens.__main__ import main

    def call(*arguments: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["toeplens", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return CommandResult(ended.value.code, out, err)

    return call


@pytest.fixture
def run(toeplens: Toeplens, tmp_path: Path) -> Run:
    """A finished run of a tiny model."""
    from toeplens.training import Run

    return Run.open(toeplens("train", *TINY, "--out", tmp_path / "runs", "--json").json()["directory"])
