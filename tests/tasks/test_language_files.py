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
from tests.builders import refusal
from tests.tasks.readers import documents_of, language, written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from toeplens.ground import InputError
from toeplens.tasks import build
from toeplens.tasks import text as source
from toeplens.tasks.corpus import FEWEST, SPLITS, Corpus, assign
from toeplens.tasks.language import Language
from toeplens.tasks.text import Source, pieces, tokenizer_of

TEXTS = [f"document {number}\nähnlich wie {number % 7}\n" * (1 + number % 5) for number in range(100)]


def corpus(*text: Path, **options: Any) -> Corpus:
    return language(*text, **options).corpus()


def of(corpus: Corpus, split: Any) -> list[bytes]:
    return [document.tobytes() for document in documents_of(corpus, split)]


def found(corpus: Corpus) -> list[bytes]:
    """All documents, split by split."""
    return [document for split in SPLITS for document in of(corpus, split)]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return written(tmp_path / "plain", [text.encode() for text in TEXTS])


def test_files_and_rows_of_either_kind_give_the_same_documents(plain: Path, tmp_path: Path):
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n\n".join(json.dumps({"body": text, "n": 1}) for text in (*TEXTS, None)), encoding="utf-8")
    pq.write_table(pa.table({"n": range(101), "body": [*TEXTS, None]}), table, row_group_size=7)
    raw = tmp_path / "raw.parquet"
    pq.write_table(pa.table({"body": pa.array([text.encode() for text in TEXTS], pa.large_binary())}), raw)
    same = [corpus(plain), *(corpus(file, column="body") for file in (lines, table, raw))]
    for other in same[1:]:
        assert other.sha256 == same[0].sha256
        assert [of(other, split) for split in SPLITS] == [of(same[0], split) for split in SPLITS]
    assert set(found(same[0])) == {text.encode() for text in TEXTS}


def test_each_split_has_its_documents_in_the_order_of_the_files(plain: Path):
    made = corpus(plain)
    for split in SPLITS:
        order = [TEXTS.index(document.decode()) for document in of(made, split)]
        assert order == sorted(order)


def test_a_folder_is_read_by_name_without_what_is_hidden(tmp_path: Path):
    for name in ("b/2.txt", "b/1.md", "a.txt", ".hidden", "b/.git/x", "c/d/3", "empty"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty" else f"{name}\n", encoding="utf-8")
    source = Source((str(tmp_path),), "text")
    assert list(source.documents()) == [b"a.txt\n", b"b/1.md\n", b"b/2.txt\n", b"c/d/3\n"]
    assert len(source.files()) == 5
    alone = Source((str(tmp_path / ".hidden"), str(tmp_path / "b")), "text")
    assert list(alone.documents()) == [b".hidden\n", b"b/1.md\n", b"b/2.txt\n"]


def test_copies_of_a_document_count_once(tmp_path: Path):
    once = written(tmp_path / "once", [text.encode() for text in TEXTS[:80]])
    twice = written(tmp_path / "twice", [text.encode() for text in (*TEXTS[:80], *TEXTS[20:60])])
    assert corpus(once).sha256 == corpus(twice).sha256 == corpus(once, twice).sha256
    assert sorted(found(corpus(once, twice))) == sorted(text.encode() for text in TEXTS[:80])


def test_a_single_document_is_cut_at_ends_of_lines(tmp_path: Path):
    text, file = "".join(f"line {number}, {'x' * (number % 17)}\n" for number in range(3000)), tmp_path / "one.parquet"
    pq.write_table(pa.table({"text": [text]}), file)
    made = corpus(file)
    parts = found(made)
    assert len(parts) >= FEWEST
    assert all(part.endswith(b"\n") for part in parts)
    assert b"".join(sorted(parts, key=text.encode().index)) == text.encode()
    total = len(text)
    assert 0.1 * total <= made.bytes_of("test").sum() <= 0.12 * total
    assert 0.05 * total <= made.bytes_of("validation").sum() <= 0.07 * total
    assert made.about["cut"] is True


documents_of_lines = st.lists(st.binary(max_size=12), max_size=40).map(b"\n".join)


@given(documents_of_lines, st.integers(1, 60))
def test_parts_make_up_the_document_and_end_where_lines_do(document: bytes, most: int):
    parts = list(pieces(document, most))
    assert b"".join(parts) == document
    assert all(parts)
    assert all(part.endswith(b"\n") for part in parts[:-1])
    assert len(parts) <= -(-len(document) // most)
    longest = max(map(len, document.split(b"\n")))
    assert all(len(part) <= most + longest for part in parts)
    assert list(pieces(document, None)) == [document] * bool(document)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=120), st.integers(0, 99))
@example([1] * 10, 0)  # one of ten is a tenth
def test_documents_are_assigned_by_the_order_of_their_hashes(sizes: list[int], salt: int):
    digests = [sha256(f"{salt} {number}".encode()).digest() for number in range(len(sizes))]
    splits = assign(digests, sizes)
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
    shuffled = assign([digests[place] for place in again], [sizes[place] for place in again])
    assert shuffled.tolist() == splits[again].tolist()


def test_splits_that_are_empty_or_shorter_than_a_window_are_named(tmp_path: Path):
    one = written(tmp_path / "one", [b"nothing but a line without an end " * 9])
    assert language(one, length=8).dataset("train", 2, seed=0).tokens.shape == (2, 8)
    for split in ("validation", "test"):
        said = refusal(partial(language(one, length=8).dataset, split, 1, seed=0))
        assert said == f"length must be less than the 0 tokens of the {split} split, got 8."
    two = written(tmp_path / "two", [b"one", b"another"])
    assert {split: len(of(corpus(two), split)) for split in SPLITS} == {"train": 1, "validation": 0, "test": 1}
    three = written(tmp_path / "three", [b"1" * 90, b"2", b"3"])
    assert {split: len(of(corpus(three), split)) for split in SPLITS} == {"train": 1, "validation": 1, "test": 1}


def test_text_that_changes_while_it_is_read_is_refused(plain: Path, monkeypatch: pytest.MonkeyPatch):
    read, times = source.documents_in, iter(range(10**6))

    def changing(file: Path, column: str) -> Any:
        return (text + (b"!" if next(times) >= len(TEXTS) else b"") for text in read(file, column))

    monkeypatch.setattr(source, "documents_in", changing)
    (plain / "0000.txt").write_text("another corpus than that of other tests", encoding="utf-8")
    with pytest.raises(InputError, match=r"^text: .*plain changed during reading"):
        corpus(plain)


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
def test_files_that_hold_no_text_are_refused_in_one_sentence(name: str, tmp_path: Path):
    content, message = REFUSED[name]
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert refusal(lambda: corpus(file)).startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("column", "message"), [("text", "has no 'text'; it has a, b."), ("a", "must have text in 'a', got 1")]
)
def test_a_table_without_the_column_or_with_numbers_in_it_is_refused(column: str, message: str, tmp_path: Path):
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=f"^column: .*{re.escape(message)}"):
        corpus(tmp_path / "t.parquet", column=column)


def test_what_is_neither_file_nor_folder_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for path, why in (
        (Path("/dev/null"), "^text must be a file or a folder, got '/dev/null'"),
        (tmp_path / "empty", "contains no files"),
        (tmp_path / "a\0b", "^text must be names of files or folders, got "),
    ):
        with pytest.raises(InputError, match=why) as caught:
            language(path).pinned()
        assert caught.value.name == "text"


# ---- tokens ----------------------------------------------------------------------------------------------------------

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


def tokens_of(task: Language) -> list[list[int]]:
    """The tokens of all documents."""
    return [document.tolist() for split in SPLITS for document in documents_of(task.corpus(), split)]


def test_documents_are_what_the_tokenizer_makes_of_them(folder: Path, text: Path):
    task, reader = language(text, tokenizer=str(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    corpus = task.corpus()
    assert task.vocab_size == corpus.vocab_size == reader.get_vocab_size() == 300
    assert corpus.separator == reader.token_to_id("<eos>") == 1
    assert corpus.stream("train").dtype == np.uint16
    assert not corpus.raw
    assert sorted(reader.decode(ids, skip_special_tokens=False) for ids in tokens_of(task)) == sorted(DOCUMENTS)
    reader.encode_special_tokens = True
    assert sorted(tokens_of(task)) == sorted(reader.encode(document).ids for document in DOCUMENTS)
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
    monkeypatch.setattr(source, "AT_ONCE", 100)
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
