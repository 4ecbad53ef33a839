"""What is asked is what it says: needles where they should be, answers that are in the text, lists that are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.studies.probing.models import TEXT, tokenizer

from toeplens.studies.kit.probe_items import BY_WORDS, ItemWriter, ProbeItem, ProbeSizes, item_batches
from toeplens.utils import InputError

ASKED = ProbeSizes(lengths=(96, 160), depths=(0.0, 0.5, 1.0), repeats=2, sequences=2, lists=12, words=(4, 8))


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer()


@pytest.fixture(scope="module")
def items(words: Any) -> list[ProbeItem]:
    return ItemWriter(words, TEXT, 0).items(ASKED)


def items_of(items: list[ProbeItem], behaviour: str) -> list[ProbeItem]:
    result = [item for item in items if item.behaviour == behaviour]
    assert result
    return result


def test_every_item_begins_with_bos_and_has_the_requested_length(items: list[ProbeItem]) -> None:
    for item in items:
        assert item.tokens[0] == 0
        assert 0 not in item.tokens[1:]
        assert list(item.positions) == sorted(set(item.positions))
        assert 1 <= item.positions[0] <= item.positions[-1] == len(item.tokens) - 1
        if item.behaviour not in BY_WORDS:
            assert len(item.tokens) in (item.length, item.length - (item.behaviour == "copying"))


def question_length(item: ProbeItem, words: Any) -> int:
    """How many tokens the question has, up to its answer."""
    question = words.decode(item.tokens[: item.positions[0]])
    return len(words(question[question.rindex("\n\nThe secret") :], add_special_tokens=False)["input_ids"])


def test_a_needle_lies_at_its_depth_and_holds_its_answer(items: list[ProbeItem], words: Any) -> None:
    for item in items_of(items, "needle"):
        first, last = item.needle
        answer = [item.tokens[place] for place in item.positions]
        inside = list(item.tokens[first:last])
        assert any(inside[at : at + len(answer)] == answer for at in range(len(inside)))
        number = words.decode(answer)
        assert len(number.strip()) == 5
        assert number.isdecimal()
        assert words.decode(item.tokens).count(number) == 2
        before, after = first - 1, item.positions[0] - last
        assert before == round(item.depth * (before + after - question_length(item, words)))


def test_without_a_needle_the_answer_is_absent(items: list[ProbeItem], words: Any) -> None:
    for item in items_of(items, "no needle"):
        assert item.needle is None
        number = words.decode([item.tokens[place] for place in item.positions])
        assert words.decode(item.tokens).count(number) == 1
        assert "secret number" in words.decode(item.tokens)


def test_copying_items_repeat_their_first_half(items: list[ProbeItem]) -> None:
    for item in items_of(items, "copying"):
        half = (len(item.tokens) - 1) // 2
        assert item.tokens[1 : 1 + half] == item.tokens[1 + half :]
        assert item.positions == tuple(range(half + 2, len(item.tokens)))


def test_list_items_have_the_right_answers(items: list[ProbeItem], words: Any) -> None:
    counts = ["one", "two", "three", "four", "five"]
    for behaviour in ("counting", "order"):
        for item in items_of(items, behaviour):
            blocks = words.decode(item.tokens, skip_special_tokens=True).strip().split("\n\n")
            assert len(blocks) == 4
            assert item.tokens[item.positions[0]] in item.choices
            assert len(set(item.choices)) == (5 if behaviour == "counting" else 6)
            for block in blocks:
                listed, question = block.removeprefix("List: ").split(". ", 1)
                actual, answer = listed.split(", "), question.rstrip(".").split("Answer: ")[1]
                if behaviour == "counting":
                    word = question.split("does ")[1].split(" occur")[0]
                    assert counts[actual.count(word) - 1] == answer
                else:
                    word = question.split("comes after ")[1].split("?")[0]
                    assert actual[actual.index(word) + 1] == answer


def test_words_are_asked_for_by_index_and_by_key(items: list[ProbeItem], words: Any) -> None:
    for behaviour in BY_WORDS:
        asked = items_of(items, behaviour)
        assert sorted(item.length for item in asked) == [4] * 12 + [8] * 12
        for item in asked:
            blocks = words.decode(item.tokens, skip_special_tokens=True).strip().split("\n\n")
            assert len(blocks) == 4
            assert item.tokens[item.positions[0]] in item.choices
            assert len(set(item.choices)) == item.length
            for block in blocks:
                listed, question = block.split("\n")
                if behaviour == "word by number":
                    query, answer = question.removeprefix("words[").split("] = ")
                    entries = listed.removeprefix("words = [").removesuffix("]").split(", ")
                    assert entries[int(query)] == answer
                else:
                    query, answer = question.split(": ")
                    entries = listed.split(", ")
                    assert dict(entry.split(": ") for entry in entries)[query] == answer
                assert len(entries) == item.length


def test_too_many_words_are_refused(words: Any) -> None:
    with pytest.raises(InputError, match=r"words must be at most \d+, the number of words that the tokenizer disting"):
        ItemWriter(words, TEXT, 0).items(ProbeSizes(lengths=(96,), words=(100,)))
    with pytest.raises(InputError, match="words must be whole numbers with commas between them, got '4,a'"):
        ProbeSizes(words="4,a")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="words must be different numbers from 2 to 100, got 1"):
        ProbeSizes(words=(1,))


def test_items_are_determined_by_the_seed(words: Any, items: list[ProbeItem]) -> None:
    assert ItemWriter(words, TEXT, 0).items(ASKED) == items
    assert ItemWriter(words, TEXT, 1).items(ASKED) != items


def test_batches_hold_each_item_once_among_similar_items(items: list[ProbeItem]) -> None:
    item_numbers: list[int] = []
    for numbers, tokens in item_batches(items, 400):
        assert tokens.size <= 400 or len(numbers) == 1
        assert len({items[number].positions for number in numbers}) == 1
        np.testing.assert_array_equal(tokens, [items[number].tokens for number in numbers])
        item_numbers += numbers
    assert sorted(item_numbers) == list(range(len(items)))


def test_impossible_probe_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"depths must be different numbers from 0 to 1, got 0\.5, 1\.5"):
        ProbeSizes(depths=(0.5, 1.5))
    with pytest.raises(InputError, match="repeats must be from 1 to 1000, got 0"):
        ProbeSizes(repeats=0)


def test_a_text_that_is_too_short_is_refused(words: Any) -> None:
    with pytest.raises(InputError, match="text must have at least 159 tokens, got 2"):
        ItemWriter(words, "apple dog", 0).items(ASKED)


def character_tokenizer(symbols: str) -> Any:
    """A tokenizer of single characters; the others are unknown to it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({each: at for at, each in enumerate(["[UNK]", *symbols])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_multi_token_answers_are_probed_by_their_first_token() -> None:
    """Of letters: words that begin alike are never in one list, and counts are digits, as two and three begin alike."""
    letters = character_tokenizer("\n" + "".join(map(chr, range(32, 127))))
    items = ItemWriter(letters, TEXT, 0).items(ASKED)
    for item in items_of(items, "counting"):
        text = letters.decode(item.tokens)
        listed, question = text[text.rindex("List: ") + 6 :].split(". ", 1)
        assert text[: item.positions[0]].endswith("Answer: "), "the blank is given, the first letter asked for"
        assert letters.decode(item.choices) == "12345"
        asked = question.split("does ")[1].split(" occur")[0]
        assert text[-1] == str(listed.split(", ").count(asked))
    for item in items_of(items, "order"):
        text = letters.decode(item.tokens)
        actual = text[text.rindex("List: ") + 6 :].split(". ", 1)[0].split(", ")
        assert letters.decode(item.choices) == "".join(word[0] for word in actual)
