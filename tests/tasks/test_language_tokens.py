"""Tokens of a real tokenizer: what it makes of each document, a token between, and tokenizers that are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from tests.builders import refusal
from tests.tasks.reading import documents_of, language, written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from toeplens.tasks import build
from toeplens.tasks import text as texts
from toeplens.tasks.corpus import SPLITS
from toeplens.tasks.language import Language
from toeplens.tasks.text import tokenizer_of

DOCUMENTS = [f"the {number}th document, <eos> and all, über {'very ' * (number % 6)}much\n" for number in range(90)]


def trained(special: list[str], size: int = 300) -> Tokenizer:
    """A small byte-level tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(DOCUMENTS, trainer)
    return made


def saved(folder: Path, special: list[str], **settings: Any) -> Path:
    folder.mkdir()
    trained(special).save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "tokenizer", ["<s>", "<eos>", "<unk>"], eos_token="<eos>", bos_token={"content": "<s>"})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return written(tmp_path / "text", [document.encode() for document in DOCUMENTS])


def of(task: Language) -> list[list[int]]:
    """The tokens of all documents."""
    return [document.tolist() for split in SPLITS for document in documents_of(task.corpus(), split)]


def test_documents_are_what_the_tokenizer_makes_of_them(folder: Path, text: Path):
    task, reader = language(text, tokenizer=str(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = task.corpus()
    assert task.vocab_size == corpus.vocab_size == reader.get_vocab_size() == 300
    assert corpus.separator == reader.token_to_id("<eos>") == 1
    assert corpus.stream("train").dtype == np.uint16
    assert not corpus.raw
    assert sorted(reader.decode(ids, skip_special_tokens=False) for ids in of(task)) == sorted(DOCUMENTS)
    reader.encode_special_tokens = True
    assert sorted(of(task)) == sorted(reader.encode(document).ids for document in DOCUMENTS)
    for split in SPLITS:
        assert (corpus.stream(split)[corpus.starts(split)[1:] - 1] == 1).all()
        assert np.count_nonzero(corpus.stream(split) == 1) == len(corpus.bytes_of(split))
    assert sum(int(corpus.bytes_of(split).sum()) for split in SPLITS) == sum(len(d.encode()) for d in DOCUMENTS)
    assert corpus.counts.sum() == len(corpus.stream("train"))
    assert corpus.separator not in corpus.frequent(1000)
    assert corpus.about["tokenizer"] == str(folder)


def test_settings_of_length_in_the_file_do_not_count(folder: Path):
    reader = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = reader.encode("the very document" * 9).ids
    reader.enable_truncation(4)
    reader.enable_padding(length=99)
    reader.save(str(folder / "tokenizer.json"))
    (ids,) = tokenizer_of(str(folder)).encode([b"the very document" * 9])
    assert ids.tolist() == plain


def test_a_long_document_is_tokenised_in_parts_that_end_where_lines_do(folder: Path, monkeypatch: pytest.MonkeyPatch):
    words, document = tokenizer_of(str(folder)), "".join(DOCUMENTS).encode()
    (whole,) = words.encode([document])
    monkeypatch.setattr(texts, "AT_ONCE", 100)
    (parts,), two = words.encode([document]), words.encode([b"the one", document])
    assert parts.tolist() == two[1].tolist() == whole.tolist()  # none of its tokens holds an end of a line and more
    assert len(two[0])


def test_another_tokenizer_makes_another_corpus_and_is_refused_where_it_is_pinned(folder: Path, text: Path):
    pinned = language(text, tokenizer=str(folder)).pinned()
    assert language(text, tokenizer=str(folder), sha256=pinned["sha256"]).corpus().sha256 == pinned["sha256"]
    trained(["<s>", "<eos>"], size=310).save(str(folder / "tokenizer.json"))
    changed = language(text, tokenizer=str(folder))
    assert changed.vocab_size == 310
    assert refusal(language(text, tokenizer=str(folder), sha256=pinned["sha256"]).corpus) == (
        f"text: {text} or its tokenizer has changed: the recorded sha256 is {pinned['sha256']}, it is now "
        f"{changed.corpus().sha256}."
    )


SEPARATORS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "eos": (["<a>", "<b>", "<c>"], {"sep_token": "<a>", "bos_token": "<b>", "eos_token": "<c>"}, "<c>"),
    "bos": (["<a>", "<b>"], {"sep_token": "<a>", "bos_token": {"content": "<b>"}, "eos_token": None}, "<b>"),
    "sep": (["<a>", "<b>"], {"sep_token": "<a>", "unk_token": "<b>"}, "<a>"),
    "known": (["<unk>", "<s>", "</s>"], {}, "</s>"),
    "none of its words": (["<|endoftext|>"], {"eos_token": "<nowhere>"}, "<|endoftext|>"),
}


@pytest.mark.parametrize("which", SEPARATORS)
def test_documents_are_separated_by_the_end_else_the_beginning_else_the_separator(which: str, tmp_path: Path):
    special, settings, expected = SEPARATORS[which]
    place = saved(tmp_path / "t", special, **settings)
    reader = Tokenizer.from_file(str(place / "tokenizer.json"))
    assert tokenizer_of(str(place)).separator == reader.token_to_id(expected)


def test_a_tokenizer_by_its_name_is_one_that_was_downloaded(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = tmp_path / "hub" / "models--somebody--words"
    shutil.copytree(folder, place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    named, here = (language(text, tokenizer=name).corpus() for name in ("somebody/words", str(folder)))
    assert named.sha256 == here.sha256
    assert "got 'somebody/else'" in refusal(language(text, tokenizer="somebody/else").corpus)


@pytest.mark.parametrize("name", ["no/such", "", "a\0b"])
def test_a_tokenizer_that_is_not_there_is_refused_with_how_to_get_it(name: str):
    said = refusal(lambda: build("language", tokenizer=name).vocab_size)
    assert said.startswith("tokenizer must be 'bytes', a tokenizer.json or its folder")
    assert "hf download NAME" in said


def test_a_file_that_is_no_tokenizer_or_has_no_token_to_separate_by_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    assert "tokenizer.json is not a valid tokenizer (" in refusal(lambda: tokenizer_of(str(tmp_path)))
    place = saved(tmp_path / "t", ["<unk>"])
    said = refusal(lambda: tokenizer_of(str(place)))
    assert said == f"tokenizer must have an end, beginning or separator token, got {str(place)!r}."
