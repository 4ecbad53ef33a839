"""What is asked is what it says: needles where they should be, answers that are in the text, lists that are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.studies.probing.models import TEXT, tokenizer

from toeplens.ground import InputError
from toeplens.studies.kit.questions import Asked, Item, Writer, batches

ASKED = Asked(lengths=(96, 160), depths=(0.0, 0.5, 1.0), repeats=2, sequences=2, lists=12)


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer()


@pytest.fixture(scope="module")
def items(words: Any) -> list[Item]:
    return Writer(words, TEXT, 0).items(ASKED)


def of(items: list[Item], behaviour: str) -> list[Item]:
    found = [item for item in items if item.behaviour == behaviour]
    assert found
    return found


def test_every_item_begins_as_a_text_does_and_is_as_long_as_it_was_asked(items: list[Item]) -> None:
    for item in items:
        assert item.tokens[0] == 0
        assert 0 not in item.tokens[1:]
        assert list(item.places) == sorted(set(item.places))
        assert 1 <= item.places[0] <= item.places[-1] == len(item.tokens) - 1
        if item.behaviour != "copying":
            assert len(item.tokens) == item.length
        assert abs(len(item.tokens) - item.length) <= 1


def _question(item: Item, words: Any) -> int:
    """How many tokens the question has, up to its answer."""
    said = words.decode(item.tokens[: item.places[0]])
    return len(words(said[said.rindex("\n\nThe secret") :], add_special_tokens=False)["input_ids"])


def test_a_needle_lies_at_its_depth_and_holds_its_answer(items: list[Item], words: Any) -> None:
    for item in of(items, "needle"):
        first, last = item.needle
        answer = [item.tokens[place] for place in item.places]
        inside = list(item.tokens[first:last])
        assert any(inside[at : at + len(answer)] == answer for at in range(len(inside)))
        number = words.decode(answer)
        assert len(number.strip()) == 5
        assert number.isdecimal()
        assert words.decode(item.tokens).count(number) == 2
        before, after = first - 1, item.places[0] - last
        assert before == round(item.depth * (before + after - _question(item, words)))


def test_without_a_needle_the_number_is_nowhere_else(items: list[Item], words: Any) -> None:
    for item in of(items, "no needle"):
        assert item.needle is None
        number = words.decode([item.tokens[place] for place in item.places])
        assert words.decode(item.tokens).count(number) == 1
        assert "secret number" in words.decode(item.tokens)


def test_copies_are_halves(items: list[Item]) -> None:
    for item in of(items, "copying"):
        half = (len(item.tokens) - 1) // 2
        assert item.tokens[1 : 1 + half] == item.tokens[1 + half :]
        assert item.places == tuple(range(half + 2, len(item.tokens)))


def test_lists_have_the_answers_that_are_given(items: list[Item], words: Any) -> None:
    counts = ["one", "two", "three", "four", "five"]
    for behaviour in ("counting", "order"):
        for item in of(items, behaviour):
            blocks = words.decode(item.tokens, skip_special_tokens=True).strip().split("\n\n")
            assert len(blocks) == 4
            assert item.tokens[item.places[0]] in item.choices
            assert len(set(item.choices)) == (5 if behaviour == "counting" else 6)
            for block in blocks:
                listed, question = block.removeprefix("List: ").split(". ", 1)
                found, answer = listed.split(", "), question.rstrip(".").split("Answer: ")[1]
                if behaviour == "counting":
                    asked = question.split("does ")[1].split(" occur")[0]
                    assert counts[found.count(asked) - 1] == answer
                else:
                    asked = question.split("comes after ")[1].split("?")[0]
                    assert found[found.index(asked) + 1] == answer


def test_a_seed_gives_the_same_and_another_others(words: Any, items: list[Item]) -> None:
    assert Writer(words, TEXT, 0).items(ASKED) == items
    assert Writer(words, TEXT, 1).items(ASKED) != items


def test_batches_hold_each_item_once_with_others_like_it(items: list[Item]) -> None:
    seen: list[int] = []
    for numbers, tokens in batches(items, 400):
        assert tokens.size <= 400 or len(numbers) == 1
        assert len({items[number].places for number in numbers}) == 1
        np.testing.assert_array_equal(tokens, [items[number].tokens for number in numbers])
        seen += numbers
    assert sorted(seen) == list(range(len(items)))


def test_what_cannot_be_asked() -> None:
    with pytest.raises(InputError, match=r"depths must be different numbers from 0 to 1, got 0\.5, 1\.5"):
        Asked(depths=(0.5, 1.5))
    with pytest.raises(InputError, match="repeats must be from 1 to 1000, got 0"):
        Asked(repeats=0)


def test_a_text_that_is_too_short(words: Any) -> None:
    with pytest.raises(InputError, match="text must have at least 159 tokens, got 2"):
        Writer(words, "apple dog", 0).items(ASKED)


def _of_symbols(symbols: str) -> Any:
    """A tokenizer of single characters; the others are unknown to it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({each: at for at, each in enumerate(["[UNK]", *symbols])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def test_where_words_are_several_tokens_the_first_of_an_answer_is_asked_for() -> None:
    """Of letters: words that begin alike are never in one list, and counts are digits, as two and three begin alike."""
    letters = _of_symbols("\n" + "".join(map(chr, range(32, 127))))
    items = Writer(letters, TEXT, 0).items(ASKED)
    for item in of(items, "counting"):
        text = letters.decode(item.tokens)
        listed, question = text[text.rindex("List: ") + 6 :].split(". ", 1)
        assert text[: item.places[0]].endswith("Answer: "), "the blank is given, the first letter asked for"
        assert letters.decode(item.choices) == "12345"
        asked = question.split("does ")[1].split(" occur")[0]
        assert text[-1] == str(listed.split(", ").count(asked))
    for item in of(items, "order"):
        text = letters.decode(item.tokens)
        found = text[text.rindex("List: ") + 6 :].split(". ", 1)[0].split(", ")
        assert letters.decode(item.choices) == "".join(word[0] for word in found)
