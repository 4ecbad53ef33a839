"""A corpus is made once, is whole or not there, and is another when a byte of its text is another."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import refusal
from tests.tasks.readers import language

from toeplens.ground import InputError
from toeplens.tasks import corpus
from toeplens.tasks import language as languages
from toeplens.tasks.corpus import SPLITS, Corpus
from toeplens.tasks.language import Language
from toeplens.tasks.text import Source

TEXT = "".join(f"{number} bottles of beer on the wall\n" for number in range(900, 0, -1))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty cache; nothing is known yet, and files that were just written are taken for old ones."""
    place = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("TOEPLENS_CACHE", place)
    corpus._opened.cache_clear()
    languages._unchanged.cache_clear()
    monkeypatch.setattr(corpus, "_SETTLED", -(10**18))
    return place


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def contents(made: Corpus) -> list[bytes]:
    return [np.asarray(made.stream(split)).tobytes() for split in SPLITS]


def corpora(cache: str | Path) -> list[Path]:
    """The directories of corpora; not the links to them."""
    return [path for path in (Path(cache) / "toeplens" / "corpora").iterdir() if not path.is_symlink()]


def test_text_is_read_once_until_its_file_changes(cache: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    first = language(file).corpus()
    with monkeypatch.context() as patched:
        patched.setattr(corpus, "scan", lambda *given: pytest.fail("the text was read again"))
        corpus._opened.cache_clear()  # as another process
        again = language(file).corpus()
    assert (again.sha256, again.about) == (first.sha256, first.about)
    assert contents(again) == contents(first)
    assert isinstance(again.stream("train"), np.memmap)
    assert not again.stream("train").flags.writeable
    os.utime(file)  # the same text, which has to be read to know it
    assert language(file).corpus().sha256 == first.sha256
    assert len(corpora(cache)) == 1


def test_a_file_that_was_just_written_is_not_trusted_to_its_time(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_SETTLED", 2 * 10**9)
    for age, noticed in ((0, True), (10**10, False)):
        monkeypatch.setattr(Source, "state", lambda self, age=age: (f"mark {age}", time.time_ns() - age))
        first = language(file).corpus()
        file.write_text(TEXT.replace("900", f"9{age % 7}1"), encoding="utf-8")  # and neither size nor time tells
        assert (language(file).corpus().sha256 != first.sha256) == noticed


def test_a_byte_makes_another_corpus_and_is_refused_where_text_is_pinned(file: Path):
    pinned = language(file).pinned()
    sha256 = pinned["sha256"]
    assert pinned == {"sha256": language(file).corpus().sha256, "text": [str(file.resolve())]}
    file.write_text(TEXT.replace("900", "901"), encoding="utf-8")
    changed = language(file).corpus().sha256
    for ask in (Language.corpus, Language.chance, lambda task: task.dataset("test", 1, seed=0)):
        said = refusal(partial(ask, language(file, sha256=sha256)))
        assert said == f"text: {file} has changed: the recorded sha256 is {sha256}, it is now {changed}."
    assert language(file, sha256=sha256).pinned() == pinned  # which asks for no text
    file.write_text(TEXT, encoding="utf-8")
    assert language(file, sha256=sha256).corpus().sha256 == sha256


def test_nothing_is_left_of_a_corpus_that_could_not_be_made(cache: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(source: Source, tokens: Any, found: Any, directory: Path) -> None:
        (directory / "train.bin").write_bytes(b"half")
        raise InputError("text: it broke.")

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "write", broken)
        with pytest.raises(InputError, match="it broke"):
            language(file).corpus()
    (place,) = corpora(cache)
    assert {path.name for path in place.iterdir()} <= {".lock"}
    assert language(file).corpus().about["bytes"]["train"]


DAMAGE = {
    "shorter tokens": lambda place: os.truncate(place / "train.bin", 100),
    "another record": lambda place: (place / "corpus.json").write_bytes(b'{"sha256": 1}'),
    "half the numbers": lambda place: os.truncate(place / "numbers.npz", 100),
    "no numbers": lambda place: os.truncate(place / "numbers.npz", 0),
    "a file": lambda place: (place / "validation.bin").unlink(),
    "no record": lambda place: (place / "corpus.json").unlink(),  # its process was killed
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corpus_that_is_not_whole_is_made_again(damage: str, cache: str, file: Path):
    whole = contents(language(file).corpus())
    (place,) = corpora(cache)
    DAMAGE[damage](place)
    for _ in range(2):
        corpus._opened.cache_clear()
        assert contents(language(file).corpus()) == whole
    assert corpora(cache) == [place]


def test_where_no_cache_can_be_written_a_corpus_lives_as_long_as_the_process(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = contents(language(file).corpus())
    corpus._temporary.cache_clear()
    monkeypatch.setenv("TOEPLENS_CACHE", "/dev/null")
    assert contents(language(file).corpus()) == whole
    monkeypatch.setattr(corpus, "scan", lambda *given: pytest.fail("the text was read again"))
    assert contents(language(file).corpus()) == whole
    corpus._temporary().cleanup()
    corpus._temporary.cache_clear()


def test_the_cache_is_where_the_environment_says(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, place in (("TOEPLENS_CACHE", "xdg"), ("XDG_CACHE_HOME", "home/.cache")):
        monkeypatch.delenv(variable)
        language(file).corpus()
        assert len(corpora(tmp_path / place)) == 1
