"""A corpus is made once, is whole or not there, and is another when a byte of its text is another."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toeplens.ground import InputError
from toeplens.tasks import build
from toeplens.tasks.language import Corpus, Language, store, task
from toeplens.tasks.language.corpus import SPLITS

TEXT = "".join(f"{number} bottles of beer on the wall\n" for number in range(900, 0, -1))


@pytest.fixture(autouse=True)
def fresh(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet, and files that were just written are taken for old ones."""
    store._opened.cache_clear()
    task._unchanged.cache_clear()
    monkeypatch.setattr(store, "_SETTLED", -(10**18))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def language(file: Path, **options: Any) -> Language:
    task = build("language", text=[str(file)], length=16, **options)
    assert isinstance(task, Language)
    return task


def contents(corpus: Corpus) -> list[bytes]:
    return [np.asarray(corpus.stream(split)).tobytes() for split in SPLITS]


def made_in(cache: str) -> list[str]:
    return sorted(path.name for path in (Path(cache) / "toeplens" / "corpora").iterdir())


def test_text_is_read_once_until_its_file_changes(cache: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    first = language(file).corpus()
    corpora, memos = made_in(cache)[0:1], made_in(cache)[1:]
    assert {name.endswith(".json") for name in (*corpora, *memos)} == {True, False}
    assert (len(corpora), len(memos)) == (1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(store, "scan", lambda *given: pytest.fail("the text was read again"))
        store._opened.cache_clear()  # as another process
        again = language(file).corpus()
    assert (again.sha256, again.about) == (first.sha256, first.about)
    assert contents(again) == contents(first)
    assert isinstance(again.stream("train"), np.memmap)
    assert not again.stream("train").flags.writeable
    os.utime(file)  # the same text, which has to be read to know it
    assert language(file).corpus().sha256 == first.sha256
    assert len(made_in(cache)) == 2


def test_a_file_that_was_just_written_is_not_trusted_to_its_time(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_SETTLED", 2 * 10**9)
    for age, noticed in ((0, True), (10**10, False)):
        monkeypatch.setattr(store, "looked_at", lambda files, age=age: (f"mark {age}", time.time_ns() - age))
        first = language(file).corpus()
        file.write_text(TEXT.replace("900", f"9{age % 7}1"), encoding="utf-8")  # and neither size nor time tells
        assert (language(file).corpus().sha256 != first.sha256) == noticed


def test_a_byte_makes_another_corpus_and_is_refused_where_text_is_pinned(file: Path):
    task = language(file)
    pinned = task.pinned()
    assert pinned == {"sha256": task.corpus().sha256, "text": [str(file.resolve())]}
    sha256 = pinned["sha256"]
    file.write_text(TEXT.replace("900", "901"), encoding="utf-8")
    changed = language(file).corpus().sha256
    with pytest.raises(InputError) as caught:
        language(file, sha256=sha256).corpus()
    assert str(caught.value) == (
        f"text: {file} has changed: the recorded sha256 is {pinned['sha256']}, it is now {changed}."
    )
    for ask in (Language.chance, lambda task: task.dataset("test", 1, seed=0)):
        with pytest.raises(InputError, match="has changed"):
            ask(language(file, sha256=sha256))
    assert language(file, sha256=sha256).pinned() == pinned  # which asks for no text
    file.write_text(TEXT, encoding="utf-8")
    assert language(file, sha256=sha256).corpus().sha256 == pinned["sha256"]


def test_nothing_is_left_of_a_corpus_that_could_not_be_made(cache: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*given: Any) -> Any:
        raise InputError("text: it broke.")

    monkeypatch.setattr(store, "write", broken)
    with pytest.raises(InputError, match="it broke"):
        language(file).corpus()
    assert made_in(cache) == []


DAMAGE = {
    "shorter tokens": lambda place: os.truncate(place / "train.bin", 100),
    "another record": lambda place: (place / "corpus.json").write_bytes(b'{"sha256": 1}'),
    "other starts": lambda place: np.save(place / "test-starts.npy", np.zeros(3)),
    "a file": lambda place: (place / "validation.bin").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corpus_that_is_not_whole_is_made_again(damage: str, cache: str, file: Path):
    whole = contents(language(file).corpus())
    place = next(path for path in (Path(cache) / "toeplens" / "corpora").iterdir() if path.is_dir())
    DAMAGE[damage](place)
    store._opened.cache_clear()
    assert contents(language(file).corpus()) == whole
    store._opened.cache_clear()
    assert contents(language(file).corpus()) == whole
    assert len(made_in(cache)) == 2


def test_where_no_cache_can_be_written_a_corpus_lives_as_long_as_the_process(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = contents(language(file).corpus())
    store._temporary.cache_clear()
    monkeypatch.setenv("TOEPLENS_CACHE", "/dev/null")
    assert contents(language(file).corpus()) == whole
    monkeypatch.setattr(store, "scan", lambda *given: pytest.fail("the text was read again"))
    assert contents(language(file).corpus()) == whole
    store._temporary().cleanup()
    store._temporary.cache_clear()


def test_the_cache_is_where_the_environment_says(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOEPLENS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    language(file).corpus()
    assert len(made_in(str(tmp_path / "xdg"))) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    language(file).corpus()
    assert len(made_in(str(tmp_path / "home" / ".cache"))) == 2


def test_what_a_killed_process_left_is_removed_after_a_week(cache: str, file: Path):
    place = Path(cache) / "toeplens" / "corpora"
    old, new = place / f".{'a' * 64}-1.01234567.tmp", place / f".{'a' * 64}-1.89abcdef.tmp"
    for leftover in (old, new):
        leftover.mkdir(parents=True)
        (leftover / "train.bin").write_bytes(b"half")
    os.utime(old, (0, time.time() - 8 * 86_400))
    language(file).corpus()
    assert not old.exists()
    assert new.exists()
