"""What holds for every language: windows that tile a stream, splits by document, sets that begin larger ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.builders import refusal_message
from tests.tasks.readers import assert_well_formed, rows, same

from toeplens import tasks
from toeplens.tasks import Split, build
from toeplens.tasks.corpus import SPLITS
from toeplens.tasks.language import LanguageTask

# Small, with every option away from its default somewhere; `language` is read from files that `text` writes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "files": ("language", {"length": 20}),
    "markov": (
        "markov-language",
        {"length": 24, "words": 9, "branches": 3, "documents": 90, "document": 70, "span": 8},
    ),
    "markov-one": (  # more words than a byte holds
        "markov-language",
        {"length": 7, "words": 300, "order": 1, "documents": 99, "document": 40, "span": 5},
    ),
    "nested-deep": (
        "nested-language",
        {"length": 10, "opens": 0.5, "closes": 0.5, "max_depth": 50, "documents": 200, "document": 64, "text_seed": 3},
    ),
}
each_case = pytest.mark.parametrize("which", CASES)


@pytest.fixture(scope="module", autouse=True)
def text(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Files of words by chance; one of them is there twice."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.Generator(np.random.Philox(0))
    words = [bytes(rng.integers(97, 123, size).tolist()) for size in rng.integers(1, 9, 300)]
    for number in range(80):
        lines = [b" ".join(rng.choice(words, 8)) for _ in range(rng.integers(1, 9))]
        (folder / f"{number:02}.txt").write_bytes(b"\n".join(lines))
    (folder / "99.txt").write_bytes((folder / "07.txt").read_bytes())
    CASES["files"][1]["text"] = [str(folder)]


@cache
def task_of(which: str) -> LanguageTask:
    name, options = CASES[which]
    task = build(name, **options)
    assert isinstance(task, LanguageTask)
    return task


def test_every_language_has_a_test_case():
    assert {name for name, _ in CASES.values()} == {name for name in tasks.names() if tasks.get(name).per_token}


@each_case
@pytest.mark.parametrize("split", ["train", "validation"])
def test_windows_tile_the_stream(which: str, split: Split):
    task = task_of(which)
    assert (task.per_token, task.eval_split, task.answer) == (True, "validation", "both")
    stream = np.asarray(task.corpus().stream(split)).astype(np.int64)
    many = task.windows(split)
    assert many == (len(stream) - 1) // task.length
    examples = task.dataset(split, many, seed=1)
    assert_well_formed(task, examples)
    pieces = np.concatenate((examples.tokens, examples.labels[:, -1:]), axis=1)
    cut = np.stack([stream[n * task.length : (n + 1) * task.length + 1] for n in range(many)])
    assert sorted(pieces.tolist()) == sorted(cut.tolist())  # each window once
    assert np.array_equal(np.concatenate((stream[:1], cut[:, 1:].ravel())), stream[: many * task.length + 1])
    assert len(stream) - (many * task.length + 1) < task.length


@each_case
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_stream_is_documents_with_a_separator_after_each(which: str, split: Split):
    corpus = task_of(which).corpus()
    stream, starts, sizes = corpus.stream(split), corpus.splits[split].starts, corpus.splits[split].bytes
    assert (starts[0], starts[-1], len(starts)) == (0, len(stream), len(sizes) + 1)
    assert starts.dtype == sizes.dtype == np.int64
    assert (stream[starts[1:] - 1] == corpus.separator).all()
    assert (np.diff(starts) - 1 == sizes).all()  # a token a byte in all of these
    assert np.count_nonzero(stream == corpus.separator) == len(sizes)
    assert int(stream.max()) < corpus.vocab_size == task_of(which).vocab_size
    assert stream.dtype == (np.uint8 if corpus.vocab_size <= 256 else np.uint16)


@each_case
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_set_is_determined_by_its_seed_and_is_a_prefix_of_larger_ones(which: str, split: Split):
    task, again = task_of(which), build(CASES[which][0], **CASES[which][1])
    many = task.windows(split)
    full = task.dataset(split, many, seed=3)
    assert same(full, again.dataset(split, many, seed=3))
    assert same(full[:3], task.dataset(split, 3, seed=3))
    streamed = list(task.stream(split, 3))
    assert same(full, tasks.Examples.join(streamed))
    other_seed = task.dataset(split, many, seed=4)
    assert rows(other_seed.tokens) == rows(full.tokens)
    assert not np.array_equal(other_seed.tokens, full.tokens)


@each_case
def test_zero_or_too_many_windows_are_refused(which: str):
    task = task_of(which)
    many = task.windows("validation")
    assert refusal_message(lambda: task.dataset("validation", many + 1, seed=0)).startswith(
        f"test_examples must be at most {many}, the windows of {task.length} tokens in the validation split"
    )
    assert refusal_message(lambda: task.dataset("test", 0, seed=0)).startswith(
        "test_examples must be at least 1, got 0"
    )
    long = task.at_length(10**7)
    for ask in (lambda: long.dataset("test", 1, seed=0), lambda: next(long.stream("test", 0))):
        assert " tokens of the test split, got 10000000" in refusal_message(ask)


@each_case
def test_chance_is_the_share_of_the_most_frequent_token(which: str):
    task = task_of(which)
    stream = np.asarray(task.corpus().stream("train"))
    shares = np.bincount(stream, minlength=task.vocab_size) / len(stream)
    best = int(shares.argmax())
    assert np.array_equal(task.corpus().counts, np.bincount(stream, minlength=task.vocab_size))
    assert task.chance() == task.length_chance() == pytest.approx(shares.max(), rel=1e-12)
    shares[best] = 0
    assert task.chance(best) == pytest.approx(shares.max() / shares.sum(), rel=1e-12)


@each_case
@pytest.mark.parametrize("length", [5, 37])
def test_at_another_length_the_text_is_the_same(which: str, length: int):
    task = task_of(which)
    longer = task.at_length(length)
    assert type(longer) is type(task)
    assert (longer.length, longer.labels, longer.vocab_size) == (length, task.labels, task.vocab_size)
    assert longer.corpus().sha256 == task.corpus().sha256
    assert_well_formed(longer, longer.dataset("train", 4, seed=0))
    assert longer.at_length(task.length) == task


@each_case
def test_frequent_tokens_are_ranked_by_training_count(which: str):
    task = task_of(which)
    corpus = task.corpus()
    actual = corpus.frequent_tokens(4)
    tokens = [token for token in range(task.vocab_size) if token != corpus.separator and corpus.counts[token]]
    if corpus.is_bytes:
        tokens = [token for token in tokens if chr(token).isalpha()]
    assert actual.tolist() == sorted(tokens, key=lambda token: (-corpus.counts[token], token))[:4]
    assert sorted(corpus.frequent_tokens(10**6).tolist()) == tokens
    assert len(corpus.frequent_tokens(0)) == 0


def test_the_default_text_is_the_python_standard_library():
    task = build("language")
    assert isinstance(task, LanguageTask)
    corpus = task.corpus()
    assert corpus.metadata["source"] == "the standard library of Python"
    assert corpus.metadata["python"].startswith("3.")
    assert sum(corpus.metadata["bytes"].values()) > 5e6
    code = b"".join(np.asarray(corpus.stream(split)).tobytes() for split in SPLITS)
    assert code.count(b"def ") > 10_000
    assert b"assertRaises(" in code  # of unittest, which is no test
    assert bytes(corpus.frequent_tokens(2).tolist()) in (b"et", b"te")
