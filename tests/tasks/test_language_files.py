"""Documents from files of every kind, cut and split by rules that hold for any, and what a tokenizer makes of them."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from hypothesis import example, given
from hypothesis import strategies as st
from tests.builders import refusal_message
from tests.tasks.readers import documents_of, language, write_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from toeplens.tasks import build
from toeplens.tasks import text as source
from toeplens.tasks.corpus import MIN_DOCUMENTS, SPLITS, Corpus, assign_splits
from toeplens.tasks.language import Language
from toeplens.tasks.text import TextSource, cut_text, load_tokenizer
from toeplens.utils import InputError

TEXTS = [f"document {number}\nähnlich wie {number % 7}\n" * (1 + number % 5) for number in range(100)]


def corpus(*text: Path, **options: Any) -> Corpus:
    return language(*text, **options).corpus()


def documents_of_split(corpus: Corpus, split: Any) -> list[bytes]:
    return [document.tobytes() for document in documents_of(corpus, split)]


def all_documents(corpus: Corpus) -> list[bytes]:
    """All documents, split by split."""
    return [document for split in SPLITS for document in documents_of_split(corpus, split)]


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "plain", [text.encode() for text in TEXTS])


def test_text_jsonl_and_parquet_give_the_same_documents(text_folder: Path, tmp_path: Path):
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n\n".join(json.dumps({"body": text, "n": 1}) for text in (*TEXTS, None)), encoding="utf-8")
    pq.write_table(pa.table({"n": range(101), "body": [*TEXTS, None]}), table, row_group_size=7)
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"body": pa.array([text.encode() for text in TEXTS], pa.large_binary())}), raw)
    same = [corpus(text_folder), *(corpus(file, column="body") for file in (lines, table, raw))]
    for other in same[1:]:
        assert other.sha256 == same[0].sha256
        assert [documents_of_split(other, split) for split in SPLITS] == [
            documents_of_split(same[0], split) for split in SPLITS
        ]
    assert set(all_documents(same[0])) == {text.encode() for text in TEXTS}


def test_each_split_has_its_documents_in_the_order_of_the_files(text_folder: Path):
    made = corpus(text_folder)
    for split in SPLITS:
        order = [TEXTS.index(document.decode()) for document in documents_of_split(made, split)]
        assert order == sorted(order)


def test_a_folder_is_read_by_name_without_hidden_files(tmp_path: Path):
    for name in ("b/2.txt", "b/1.md", "a.txt", ".hidden", "b/.git/x", "c/d/3", "empty"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else f"{name}\n", encoding="utf-8")
    source = TextSource((str(tmp_path),), "text")
    assert list(source.documents()) == [b"a.txt\n", b"b/1.md\n", b"b/2.txt\n", b"c/d/3\n"]
    assert len(source.files()) == 5
    alone = TextSource((str(tmp_path / ".hidden"), str(tmp_path / "b")), "text")
    assert list(alone.documents()) == [b".hidden\n", b"b/1.md\n", b"b/2.txt\n"]


def test_duplicate_documents_count_once(tmp_path: Path):
    once = write_folder(tmp_path / "once", [text.encode() for text in TEXTS[:80]])
    twice = write_folder(tmp_path / "twice", [text.encode() for text in (*TEXTS[:80], *TEXTS[20:60])])
    assert corpus(once).sha256 == corpus(twice).sha256 == corpus(once, twice).sha256
    assert sorted(all_documents(corpus(once, twice))) == sorted(text.encode() for text in TEXTS[:80])


def test_a_single_document_is_split_at_line_ends(tmp_path: Path):
    text, file = "".join(f"line {number}, {'x' * (number % 17)}\n" for number in range(3000)), tmp_path / "one.parquet"
    pq.write_table(pa.table({"text": [text]}), file)
    documents = corpus(file)
    parts = all_documents(documents)
    assert len(parts) >= MIN_DOCUMENTS
    assert all(part.endswith(b"\n") for part in parts)
    assert b"".join(sorted(parts, key=text.encode().index)) == text.encode()
    total = len(text)
    assert 0.1 * total <= documents.splits["test"].bytes.sum() <= 0.12 * total
    assert 0.05 * total <= documents.splits["validation"].bytes.sum() <= 0.07 * total
    assert documents.metadata["cut"] is True


documents_of_lines = st.lists(st.binary(max_size=12), max_size=40).map(b"\n".join)


@given(documents_of_lines, st.integers(1, 60))
def test_document_parts_join_to_the_whole_and_end_at_line_ends(document: bytes, most: int):
    parts = list(cut_text(document, most))
    assert b"".join(parts) == document
    assert all(parts)
    assert all(part.endswith(b"\n") for part in parts[:-1])
    assert len(parts) <= -(-len(document) // most)
    longest = max(map(len, document.split(b"\n")))
    assert all(len(part) <= most + longest for part in parts)
    assert list(cut_text(document, None)) == [document] * bool(document)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=120), st.integers(0, 99))
@example([1] * 10, 0)  # one of ten is a tenth
def test_documents_are_split_in_hash_order(sizes: list[int], salt: int):
    digests = [sha256(f"{salt} {number}".encode()).digest() for number in range(len(sizes))]
    splits = assign_splits(digests, sizes)
    ordered = [SPLITS[splits[place]] for place in sorted(range(len(sizes)), key=digests.__getitem__)]
    assert ordered == sorted(ordered, key=("test", "validation", "train").index)
    assert "train" in ordered
    assert ("test" in ordered) == (len(sizes) > 1)
    assert ("validation" in ordered) == (len(sizes) > 2)
    total = sum(sizes)
    by_hash = [sizes[place] for place in sorted(range(len(sizes)), key=digests.__getitem__)]
    for split, share, kept in (("test", 0.1, 2), ("validation", 0.05, 1)):
        have = [size for size, at in zip(by_hash, ordered, strict=True) if at == split]
        assert sum(have[:-1]) < share * total
        if len(sizes) > 2:  # enough, unless one document must be left for each split that comes after
            left = len(by_hash) - (len(have) if split == "test" else ordered.index("train"))
            assert sum(have) >= share * total or left == kept
    again = sorted(range(len(sizes)), key=lambda place: -place)
    shuffled = assign_splits([digests[place] for place in again], [sizes[place] for place in again])
    assert shuffled.tolist() == splits[again].tolist()


def test_empty_or_too_short_splits_are_named(tmp_path: Path):
    single_document = write_folder(tmp_path / "one", [b"nothing but a line without an end " * 9])
    assert language(single_document, length=8).dataset("train", 2, seed=0).tokens.shape == (2, 8)
    for split in ("validation", "test"):
        said = refusal_message(partial(language(single_document, length=8).dataset, split, 1, seed=0))
        assert said == f"length must be less than the 0 tokens of the {split} split, got 8."
    two = write_folder(tmp_path / "two", [b"one", b"another"])
    assert {split: len(documents_of_split(corpus(two), split)) for split in SPLITS} == {
        "train": 1,
        "validation": 0,
        "test": 1,
    }
    three = write_folder(tmp_path / "three", [b"1" * 90, b"2", b"3"])
    assert {split: len(documents_of_split(corpus(three), split)) for split in SPLITS} == {
        "train": 1,
        "validation": 1,
        "test": 1,
    }


def test_text_that_changes_during_reading_is_refused(text_folder: Path, monkeypatch: pytest.MonkeyPatch):
    read, times = source.documents_in, iter(range(10**6))

    def changing(file: Path, column: str) -> Any:
        return (text + (b"!" if next(times) >= len(TEXTS) else b"") for text in read(file, column))

    monkeypatch.setattr(source, "documents_in", changing)
    (text_folder / "0000.txt").write_text("another corpus than that of other tests", encoding="utf-8")
    with pytest.raises(InputError, match=r"^text: .*plain changed during reading"):
        corpus(text_folder)


def jsonl(*lines: str) -> bytes:
    return "\n".join(lines).encode()


REFUSED: dict[str, tuple[bytes | None, str]] = {
    "missing.txt": (None, "text: {file} does not exist."),
    "half.jsonl": (jsonl('{"text": "a"}', '{"text": '), "text: {file}, line 2, is not JSON ("),
    "other.jsonl": (
        b'{"b": 1, "a": 2}',
        "column: {file}, line 1, has no 'text'; it has a, b.",
    ),
    "number.jsonl": (b'{"text": 3}', "column: {file}, line 1, must have text in 'text', got 3."),
    "text.parquet": (b"not one", "text: {file} is not a valid Parquet file ("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_without_text_are_refused_in_one_sentence(name: str, tmp_path: Path):
    content, message = REFUSED[name]
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert refusal_message(lambda: corpus(file)).startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("column", "message"), [("text", "has no 'text'; it has a, b."), ("a", "must have text in 'a', got 1")]
)
def test_a_missing_or_numeric_column_is_refused(column: str, message: str, tmp_path: Path):
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=f"^column: .*{re.escape(message)}"):
        corpus(tmp_path / "t.parquet", column=column)


def test_a_path_that_is_neither_file_nor_folder_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for path, why in (
        (Path("/dev/null"), "^text must be a file or a folder, got '/dev/null'"),
        (tmp_path / "empty", "contains no files"),
        (tmp_path / "a\0b", "^text must be names of files or folders, got "),
    ):
        with pytest.raises(InputError, match=why) as caught:
            language(path).pinned_options()
        assert caught.value.name == "text"


# ---- tokens ----------------------------------------------------------------------------------------------------------

DOCUMENTS = [f"the {number}th document, <eos> and all, über {'very ' * (number % 6)}much\n" for number in range(90)]


def train_tokenizer(special: list[str], size: int = 300) -> Tokenizer:
    """A small byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    return tokenizer


def save_tokenizer(folder: Path, special: list[str], **settings: Any) -> Path:
    folder.mkdir()
    train_tokenizer(special).save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tokenizer(
        tmp_path / "tokenizer", ["<s>", "<eos>", "<unk>"], eos_token="<eos>", bos_token={"content": "<s>"}
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "text", [document.encode() for document in DOCUMENTS])


def tokens_of(task: Language) -> list[list[int]]:
    """The tokens of all documents."""
    return [document.tolist() for split in SPLITS for document in documents_of(task.corpus(), split)]


def test_documents_match_the_tokenizer(folder: Path, text: Path):
    task, reader = language(text, tokenizer=str(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = task.corpus()
    assert task.vocab_size == corpus.vocab_size == reader.get_vocab_size() == 300
    assert corpus.separator == reader.token_to_id("<eos>") == 1
    assert corpus.stream("train").dtype == np.uint16
    assert not corpus.is_bytes
    assert sorted(reader.decode(ids, skip_special_tokens=False) for ids in tokens_of(task)) == sorted(DOCUMENTS)
    reader.encode_special_tokens = True
    assert sorted(tokens_of(task)) == sorted(reader.encode(document).ids for document in DOCUMENTS)
    for split in SPLITS:
        assert (corpus.stream(split)[corpus.splits[split].starts[1:] - 1] == 1).all()
        assert np.count_nonzero(corpus.stream(split) == 1) == len(corpus.splits[split].bytes)
    assert sum(int(corpus.splits[split].bytes.sum()) for split in SPLITS) == sum(len(d.encode()) for d in DOCUMENTS)
    assert corpus.counts.sum() == len(corpus.stream("train"))
    assert corpus.separator not in corpus.frequent_tokens(1000)
    assert corpus.metadata["tokenizer"] == str(folder)


def test_length_settings_of_the_tokenizer_file_are_ignored(folder: Path):
    reader = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = reader.encode("the very document" * 9).ids
    reader.enable_truncation(4)
    reader.enable_padding(length=99)
    reader.save(str(folder / "tokenizer.json"))
    (ids,) = load_tokenizer(str(folder)).encode([b"the very document" * 9])
    assert ids.tolist() == plain


def test_a_long_document_is_tokenized_in_line_aligned_parts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    words, document = load_tokenizer(str(folder)), "".join(DOCUMENTS).encode()
    (whole,) = words.encode([document])
    monkeypatch.setattr(source, "BYTES_PER_CALL", 100)
    (parts,), two = words.encode([document]), words.encode([b"the one", document])
    assert parts.tolist() == two[1].tolist() == whole.tolist()  # none of its tokens holds an end of a line and more
    assert len(two[0])


def test_another_tokenizer_makes_another_corpus_and_a_pin_refuses_it(folder: Path, text: Path):
    pinned = language(text, tokenizer=str(folder)).pinned_options()
    assert language(text, tokenizer=str(folder), sha256=pinned["sha256"]).corpus().sha256 == pinned["sha256"]
    train_tokenizer(["<s>", "<eos>"], size=310).save(str(folder / "tokenizer.json"))
    changed = language(text, tokenizer=str(folder))
    assert changed.vocab_size == 310
    assert refusal_message(language(text, tokenizer=str(folder), sha256=pinned["sha256"]).corpus) == (
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
def test_the_separator_is_eos_else_bos_else_sep(which: str, tmp_path: Path):
    special, settings, expected = SEPARATORS[which]
    tokenizer_dir = save_tokenizer(tmp_path / "t", special, **settings)
    reader = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert load_tokenizer(str(tokenizer_dir)).separator == reader.token_to_id(expected)


def test_a_tokenizer_name_refers_to_a_downloaded_tokenizer(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub_dir = tmp_path / "hub" / "models--somebody--words"
    shutil.copytree(folder, hub_dir / "snapshots" / "abc")
    (hub_dir / "refs").mkdir()
    (hub_dir / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    named, here = (language(text, tokenizer=name).corpus() for name in ("somebody/words", str(folder)))
    assert named.sha256 == here.sha256
    assert "got 'somebody/else'" in refusal_message(language(text, tokenizer="somebody/else").corpus)


@pytest.mark.parametrize("name", ["no/such", "", "a\0b"])
def test_a_missing_tokenizer_is_refused_with_download_instructions(name: str):
    message = refusal_message(lambda: build("language", tokenizer=name).vocab_size)
    assert message.startswith("tokenizer must be 'bytes', a tokenizer.json or its folder")
    assert "hf download NAME" in message


def test_an_invalid_tokenizer_or_one_without_separator_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    assert "tokenizer.json is not a valid tokenizer (" in refusal_message(lambda: load_tokenizer(str(tmp_path)))
    tokenizer_dir = save_tokenizer(tmp_path / "t", ["<unk>"])
    said = refusal_message(lambda: load_tokenizer(str(tokenizer_dir)))
    assert said == f"tokenizer must have an end, beginning or separator token, got {str(tokenizer_dir)!r}."
