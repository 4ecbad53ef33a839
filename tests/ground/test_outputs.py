"""A page replaces an older page of the same command, and nothing else; a directory is held by one process at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.builders import held, refusal

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.ground.outputs import LOCK, free, locked, write_page

PAGE = '<!doctype html>\n<meta name="generator" content="toeplens card">\n'


def test_an_older_page_of_the_same_command_is_replaced(tmp_path: Path):
    page = tmp_path / "new" / "page.html"
    assert write_page(page, PAGE, "card") == page
    write_page(page, PAGE + "again", "card")
    assert page.read_text() == PAGE + "again"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_another_file_is_not(tmp_path: Path):
    for content in ("", PAGE):
        (tmp_path / "page.html").write_text(content)
        with pytest.raises(
            InputError, match=r"^out: .*page\.html was not written by this version of 'toeplens decompose'"
        ):
            write_page(tmp_path / "page.html", "x", "decompose")
        assert (tmp_path / "page.html").read_text() == content


def test_what_a_link_leads_to_is_what_counts(tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(InputError, match="was not written by"):
        free(tmp_path / "link", "card")
    (tmp_path / "loose").symlink_to("later")
    assert free(tmp_path / "loose", "card") == (tmp_path / "later").resolve()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises((InputError, EnvironmentFailure)):
        free(tmp_path / "circle", "card")


def test_directories_and_devices_are_no_pages(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("mine")
    for place, words in (
        (tmp_path, "out must be a file such as"),
        (Path(os.devnull), "must be a regular or new file"),
        (tmp_path / "pipe", "must be a regular or new file"),
        (tmp_path / "file" / "page.html", "is a file or lies under one"),
    ):
        assert words in refusal(lambda place=place: free(place, "card"))


def test_a_place_that_cannot_be_written_is_the_machines_failure(tmp_path: Path):
    for place in (Path("/proc/page.html"), tmp_path / ("x" * 300)):
        with pytest.raises(EnvironmentFailure, match=r"[Cc]annot write"):
            free(place, "card")


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
