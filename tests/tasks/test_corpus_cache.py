"""A corpus is made once, is whole or not there, and is another when a byte of its text is another."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import refusal_message
from tests.tasks.readers import language

from toeplens.tasks import corpus
from toeplens.tasks import language as languages
from toeplens.tasks.corpus import SPLITS, Corpus
from toeplens.tasks.language import Language
from toeplens.tasks.text import TextSource
from toeplens.utils import InputError

TEXT = "".join(f"{number} bottles of beer on the wall\n" for number in range(900, 0, -1))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty cache; nothing is known yet, and files that were just written are taken for old ones."""
    folder = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("TOEPLENS_CACHE", folder)
    corpus._open_corpus.cache_clear()
    languages._verified_corpus.cache_clear()
    monkeypatch.setattr(corpus, "_SETTLE_TIME", -(10**18))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def files_of(made: Corpus) -> list[bytes]:
    return [np.asarray(made.stream(split)).tobytes() for split in SPLITS]


def corpora(cache: str | Path) -> list[Path]:
    """The directories of corpora; not the links to them."""
    return [path for path in (Path(cache) / "toeplens" / "corpora").iterdir() if not path.is_symlink()]


def test_text_is_read_once_until_its_file_changes(cache: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    first = language(file).corpus()
    with monkeypatch.context() as patched:
        patched.setattr(corpus, "scan_documents", lambda *given: pytest.fail("the text was read again"))
        corpus._open_corpus.cache_clear()  # as another process
        reread = language(file).corpus()
    assert (reread.sha256, reread.metadata) == (first.sha256, first.metadata)
    assert files_of(reread) == files_of(first)
    assert isinstance(reread.stream("train"), np.memmap)
    assert not reread.stream("train").flags.writeable
    os.utime(file)  # the same text, which has to be read to know it
    assert language(file).corpus().sha256 == first.sha256
    assert len(corpora(cache)) == 1


def test_the_mtime_of_a_new_file_is_not_trusted(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_SETTLE_TIME", 2 * 10**9)
    for age, noticed in ((0, True), (10**10, False)):
        monkeypatch.setattr(TextSource, "state", lambda self, age=age: (f"mark {age}", time.time_ns() - age))
        first = language(file).corpus()
        file.write_text(TEXT.replace("900", f"9{age % 7}1"), encoding="utf-8")  # and neither size nor time tells
        assert (language(file).corpus().sha256 != first.sha256) == noticed


def test_a_changed_byte_makes_another_corpus_and_a_pin_refuses_it(file: Path):
    pinned = language(file).pinned_options()
    sha256 = pinned["sha256"]
    assert pinned == {"sha256": language(file).corpus().sha256, "text": [str(file.resolve())]}
    file.write_text(TEXT.replace("900", "901"), encoding="utf-8")
    changed = language(file).corpus().sha256
    for ask in (Language.corpus, Language.chance, lambda task: task.dataset("test", 1, seed=0)):
        said = refusal_message(partial(ask, language(file, sha256=sha256)))
        assert said == f"text: {file} has changed: the recorded sha256 is {sha256}, it is now {changed}."
    assert language(file, sha256=sha256).pinned_options() == pinned  # which asks for no text
    file.write_text(TEXT, encoding="utf-8")
    assert language(file, sha256=sha256).corpus().sha256 == sha256


def test_a_failed_corpus_leaves_no_files(cache: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(source: TextSource, tokens: Any, found: Any, directory: Path) -> None:
        (directory / "train.bin").write_bytes(b"half")
        raise InputError("text: it broke.")

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "write_corpus", broken)
        with pytest.raises(InputError, match="it broke"):
            language(file).corpus()
    (place,) = corpora(cache)
    assert {path.name for path in place.iterdir()} <= {".lock"}
    assert language(file).corpus().metadata["bytes"]["train"]


DAMAGE = {
    "shorter tokens": lambda place: os.truncate(place / "train.bin", 100),
    "another record": lambda place: (place / "corpus.json").write_bytes(b'{"sha256": 1}'),
    "half the numbers": lambda place: os.truncate(place / "numbers.npz", 100),
    "no numbers": lambda place: os.truncate(place / "numbers.npz", 0),
    "a file": lambda place: (place / "validation.bin").unlink(),
    "no record": lambda place: (place / "corpus.json").unlink(),  # its process was killed
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_corpus_is_rebuilt(damage: str, cache: str, file: Path):
    whole = files_of(language(file).corpus())
    (directory,) = corpora(cache)
    DAMAGE[damage](directory)
    for _ in range(2):
        corpus._open_corpus.cache_clear()
        assert files_of(language(file).corpus()) == whole
    assert corpora(cache) == [directory]


def test_without_a_writable_cache_a_corpus_lasts_for_the_process(file: Path, monkeypatch: pytest.MonkeyPatch):
    contents_before = files_of(language(file).corpus())
    corpus._temporary_cache.cache_clear()
    monkeypatch.setenv("TOEPLENS_CACHE", "/dev/null")
    assert files_of(language(file).corpus()) == contents_before
    monkeypatch.setattr(corpus, "scan_documents", lambda *given: pytest.fail("the text was read again"))
    assert files_of(language(file).corpus()) == contents_before
    corpus._temporary_cache().cleanup()
    corpus._temporary_cache.cache_clear()


def test_the_cache_directory_follows_the_environment_variable(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, place in (("TOEPLENS_CACHE", "xdg"), ("XDG_CACHE_HOME", "home/.cache")):
        monkeypatch.delenv(variable)
        language(file).corpus()
        assert len(corpora(tmp_path / place)) == 1
