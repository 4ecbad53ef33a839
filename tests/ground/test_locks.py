"""A directory is held by one process at a time, and by one thread of it; a holder that is gone holds nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.builders import held

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.ground.outputs import LOCK, locked


def test_what_another_process_holds_is_refused_in_one_sentence(tmp_path: Path):
    with held(tmp_path), pytest.raises(InputError, match=r"^study: .* is in use by another process"):
        locked(tmp_path, "study").__enter__()
    with locked(tmp_path, "study"):
        pass


def test_waiting_ends_when_the_other_is_done_or_time_is_up(tmp_path: Path):
    with held(tmp_path) as stream:
        threading.Timer(0.15, stream.close).start()
        with locked(tmp_path, "run", until=lambda: False):
            assert stream.closed
    asked: list[int] = []
    with held(tmp_path), pytest.raises(InputError, match=r"^run(:| must) "):
        locked(tmp_path, "run", until=lambda: bool(asked) or bool(asked.append(0))).__enter__()
    assert asked == [0]


def test_the_thread_that_holds_it_enters_again_and_no_other_thread(tmp_path: Path):
    refused: list[Exception] = []

    def other() -> None:
        try:
            with locked(tmp_path, "run"):
                pass
        except InputError as error:
            refused.append(error)

    def run_other() -> int:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return len(refused)

    with locked(tmp_path, "run"), locked(tmp_path / ".", "run"):
        assert run_other() == 1
    assert run_other() == 1
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "run"):
        raise ZeroDivisionError
    assert run_other() == 1


def test_only_half_written_files_are_tidied_away(tmp_path: Path):
    kept = [".hidden.tmp", "spec.json", ".spec.json.12345678.tmp.bak", "x.12345678.tmp"]
    gone = [".spec.json.a1b2c3d4.tmp", ".0-1.npy.0f_9abcd.tmp"]
    for name in kept + gone:
        (tmp_path / name).write_text("")
    with locked(tmp_path, "run"):
        assert {path.name for path in tmp_path.iterdir()} == {*kept, LOCK}


def test_a_lock_that_cannot_be_written_is_the_machines_failure(tmp_path: Path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(EnvironmentFailure, match=r"[Cc]annot write"), locked(tmp_path, "run"):
        pass
