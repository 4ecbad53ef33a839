"""Options that do not fit, and lengths at which a task would be another, are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from toeplens.ground import InputError
from toeplens.tasks import build

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "addition": [
        ({"length": 4, "padded": True}, "length must be a whole number of at least 5, got 4."),
        ({"min_digits": 6}, "min_digits: 6 was given; 18 tokens hold numbers of 5."),
    ],
    "dyck": [
        ({"length": 9}, "length: 9 was given; balanced texts have an even number of brackets."),
        ({"ask": "depth", "length": 7}, "max_depth: 8 was given; 7 brackets do not get that deep."),
        ({"ask": "depth", "min_length": 64}, "min_length: 64 was given; for every depth to occur it must be less"),
    ],
    "contextual-count": [
        ({"length": 30}, "length must be a whole number of at least 31, got 30."),
    ],
    "parity": [
        ({"min_length": 65}, "min_length must be at most length (64), got 65."),
    ],
    "index": [
        ({"length": 8, "positions": 8}, "positions: 8 was given; the shortest text has 7 words to ask for."),
        ({"from_end": "yes"}, "from_end must be true or false, got 'yes'."),
    ],
    "retrieval": [
        ({"keys": 4}, "pairs: 8 was given; there are only 4 different keys."),
        ({"distractors": 0, "min_length": 9}, "min_length: 9 was given; without distractors all texts have 9"),
    ],
    "mix": [
        ({"placed": 9}, "placed: 9 was given; there are only 8 different keys."),
        ({"min_offset": 5}, "min_offset must be at most max_offset (4), got 5."),
        ({"min_offset": 0, "max_offset": 0}, "max_offset: 0 was given as the only offset; that is the key itself."),
        ({"max_offset": 63}, "length must be a whole number of at least 66, got 64."),
    ],
    "recall": [
        ({"pairs": 33, "length": 99}, "pairs: 33 was given; there are only 32 different keys."),
        ({"queries": 9}, "queries: 9 was given; there are only 8 pairs to ask for."),
        ({"length": 22}, "length must be a whole number of at least 23, got 22."),
    ],
    "reverse": [
        ({"length": 9, "min_items": 5}, "min_items: 5 was given; 9 tokens hold 4."),
    ],
    "sort": [
        ({"words": 31, "repeats": False}, "words: 31 was given; without repeats 32 items need as many."),
    ],
    "trigger-distance": [
        ({"length": 8, "max_distance": 8}, "max_distance: 8 was given; two triggers in 8 tokens are 1 to 7 apart."),
        ({"vocab_size": 3}, "vocab_size must be a whole number of at least 4, got 3."),
        ({"form": "released", "num_triggers": 3}, "num_triggers: 3 was given; the released form"),
        ({"form": "released", "vocab_size": 70}, "vocab_size: 70 was given; a segment of 70"),
        ({"form": "released", "length": 96}, "length: the triggers don't fit: 25 + 1 + 70 + 1 tokens"),
    ],
    "trigger-count": [
        ({"length": 8, "words": 9}, "words must be from 1 to length (8), got 9."),
        ({"length": 8, "max_count": 9}, "max_count: 9 was given; the triggers must fit the 8 words."),
        ({"vocab_size": 21}, "vocab_size must be a whole number of at least 22, got 21."),
    ],
    "trigger-distanse": [
        ({}, "task: there is no 'trigger-distanse'; did you mean 'trigger-distance'"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_options_that_do_not_fit_are_refused_in_one_sentence(name: str, options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        build(name, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 8.0, "8"])
def test_a_length_that_is_none_is_refused(length: Any):
    with pytest.raises(InputError, match=r"^length must be a whole number of at least 1, got .*"):
        build("parity").at_length(length)


TOO_SHORT = [
    ("trigger-distance", {"length": 9, "vocab_size": 20, "num_triggers": 3}, 8, "max_distance: 8 was given"),
    ("index", {"length": 10}, 9, "length: 9 was given; index cannot be the same there: positions: 9 was given"),
    ("recall", {"distractors": 0}, 73, "pairs: 33 was given; there are only 32 different keys."),
    ("dyck", {"ask": "depth"}, 7, "max_depth: 8 was given; 7 brackets do not get that deep."),
    ("sort", {"repeats": False}, 66, "words: 32 was given; without repeats 33 items need as many."),
]


@pytest.mark.parametrize(("name", "options", "length", "message"), TOO_SHORT)
def test_a_length_at_which_it_would_be_another_task_is_refused(
    name: str, options: dict[str, Any], length: int, message: str
):
    with pytest.raises(InputError) as caught:
        build(name, **options).at_length(length)
    assert str(caught.value).startswith(f"length: {length} was given; {name} cannot be the same there: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
