"""A page replaces an older page of the same command, and nothing else; a directory is held by one process at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.builders import locked_elsewhere, refusal_message

from toeplens.utils import EnvironmentFailure, InputError
from toeplens.utils.outputs import LOCK, check_output_file, lock_directory, write_page

PAGE = '<!doctype html>\n<meta name="generator" content="toeplens card">\n'


def test_an_older_page_of_the_same_command_is_replaced(tmp_path: Path):
    page = tmp_path / "new" / "page.html"
    assert write_page(page, PAGE, "card") == page
    write_page(page, PAGE + "again", "card")
    assert page.read_text() == PAGE + "again"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_another_file_is_not_replaced(tmp_path: Path):
    for content in ("", PAGE):
        (tmp_path / "page.html").write_text(content)
        with pytest.raises(
            InputError, match=r"^out: .*page\.html was not written by this version of 'toeplens decompose'"
        ):
            write_page(tmp_path / "page.html", "x", "decompose")
        assert (tmp_path / "page.html").read_text() == content


def test_links_are_followed(tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(InputError, match="was not written by"):
        check_output_file(tmp_path / "link", "card")
    (tmp_path / "loose").symlink_to("later")
    assert check_output_file(tmp_path / "loose", "card") == (tmp_path / "later").resolve()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises((InputError, EnvironmentFailure)):
        check_output_file(tmp_path / "circle", "card")


def test_directories_and_devices_are_refused_as_pages(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("mine")
    for place, words in (
        (tmp_path, "out must be a file such as"),
        (Path(os.devnull), "must be a regular or new file"),
        (tmp_path / "pipe", "must be a regular or new file"),
        (tmp_path / "file" / "page.html", "is a file or lies under one"),
    ):
        assert words in refusal_message(lambda place=place: check_output_file(place, "card"))


def test_an_unwritable_path_is_a_machine_error(tmp_path: Path):
    for place in (Path("/proc/page.html"), tmp_path / ("x" * 300)):
        with pytest.raises(EnvironmentFailure, match=r"[Cc]annot write"):
            check_output_file(place, "card")


def test_a_directory_locked_by_another_process_is_refused(tmp_path: Path):
    with locked_elsewhere(tmp_path), pytest.raises(InputError, match=r"^study: .* is in use by another process"):
        lock_directory(tmp_path, "study").__enter__()
    with lock_directory(tmp_path, "study"):
        pass


def test_waiting_for_a_lock_ends_on_release_or_timeout(tmp_path: Path):
    with locked_elsewhere(tmp_path) as stream:
        threading.Timer(0.15, stream.close).start()
        with lock_directory(tmp_path, "run", until=lambda: False):
            assert stream.closed
    attempts: list[int] = []
    with locked_elsewhere(tmp_path), pytest.raises(InputError, match=r"^run(:| must) "):
        lock_directory(tmp_path, "run", until=lambda: bool(attempts) or bool(attempts.append(0))).__enter__()
    assert attempts == [0]


def test_the_lock_is_reentrant_for_its_thread_only(tmp_path: Path):
    refused: list[Exception] = []

    def other() -> None:
        try:
            with lock_directory(tmp_path, "run"):
                pass
        except InputError as error:
            refused.append(error)

    def run_other() -> int:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return len(refused)

    with lock_directory(tmp_path, "run"), lock_directory(tmp_path / ".", "run"):
        assert run_other() == 1
    assert run_other() == 1
    with pytest.raises(ZeroDivisionError), lock_directory(tmp_path, "run"):
        raise ZeroDivisionError
    assert run_other() == 1


def test_only_partial_files_are_removed(tmp_path: Path):
    unrelated = [".hidden.tmp", "spec.json", ".spec.json.12345678.tmp.bak", "x.12345678.tmp"]
    gone = [".spec.json.a1b2c3d4.tmp", ".0-1.npy.0f_9abcd.tmp"]
    for name in unrelated + gone:
        (tmp_path / name).write_text("")
    with lock_directory(tmp_path, "run"):
        assert {path.name for path in tmp_path.iterdir()} == {*unrelated, LOCK}


def test_an_unwritable_lock_is_a_machine_error(tmp_path: Path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(EnvironmentFailure, match=r"[Cc]annot write"), lock_directory(tmp_path, "run"):
        pass
