"""Two processes that start runs in one directory: nothing is written in it but by the one that holds it."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
from tests.builders import held, refusal, tiny

from toeplens.ground import read_json, write_json
from toeplens.ground.locks import LOCK
from toeplens.training import run as store
from toeplens.training.run import SPEC, entered


def is_held(directory: Path) -> bool:
    with (directory / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_spec_is_written_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, bool]] = []

    def write(path: Path, *given: Any, **options: Any) -> None:
        seen.append((path.name, is_held(path.parent)))
        write_json(path, *given, **options)

    monkeypatch.setattr(store, "write_json", write)
    with entered(tmp_path / "run", tiny()):
        assert is_held(tmp_path / "run")
    assert seen == [(SPEC, True)]
    assert not is_held(tmp_path / "run")


def test_what_another_process_began_while_this_one_waited_is_not_replaced(tmp_path: Path):
    other = tiny(seed=1).model_dump(mode="json")
    with held(tmp_path) as stream:

        def began() -> bool:
            write_json(tmp_path / SPEC, other, record=False)
            stream.close()
            return False

        def enter() -> None:
            with entered(tmp_path, tiny(), until=began):
                pass

        assert "holds another run; give another directory" in refusal(enter)
    assert read_json(tmp_path / SPEC) == other
