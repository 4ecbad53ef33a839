"""Options that do not fit, and lengths at which a task would be another, are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from toeplens.ground import InputError
from toeplens.tasks import build

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "addition": [
        ({"base": 1}, "base: 1 was given"),
        ({"length": 5}, "length: 5 was given; it must be a whole number of at least 6."),
        ({"length": 4, "padded": True}, "length: 4 was given; it must be a whole number of at least 5."),
        ({"min_digits": 6}, "min_digits: 6 was given; 18 tokens hold numbers of 5."),
        ({"min_digits": 0}, "min_digits: 0 was given"),
        ({"order": "first"}, "order: there is no 'first'; did you mean"),
        ({"padded": 1}, "padded: 1 was given; it must be true or false."),
    ],
    "dyck": [
        ({"ask": "deep"}, "ask: there is no 'deep'; did you mean 'depth'"),
        ({"kinds": 0}, "kinds: 0 was given"),
        ({"max_depth": 0}, "max_depth: 0 was given"),
        ({"length": 9}, "length: 9 was given; balanced texts have an even number of brackets."),
        ({"length": 1}, "length: 1 was given; it must be a whole number of at least 2."),
        ({"ask": "depth", "length": 7}, "max_depth: 8 was given; 7 brackets do not get that deep."),
        ({"ask": "depth", "min_length": 64}, "min_length: 64 was given; for every depth to occur it must be less"),
    ],
    "contextual-count": [
        ({"regions": 0}, "regions: 0 was given"),
        ({"max_count": 0}, "max_count: 0 was given"),
        ({"length": 30}, "length: 30 was given; it must be a whole number of at least 31."),
        ({"min_length": 30}, "min_length: 30 was given; it must be a whole number of at least 31."),
        ({"marks": 0}, "marks: 0 was given"),
    ],
    "parity": [
        ({"length": 0}, "length: 0 was given; it must be a whole number of at least 1."),
        ({"words": 0}, "words: 0 was given"),
        ({"min_length": 65}, "min_length: 65 was given; it must be at most length (64)."),
    ],
    "index": [
        ({"length": 1}, "length: 1 was given; it must be a whole number of at least 2."),
        ({"length": 8, "min_length": 9}, "min_length: 9 was given; it must be at most length (8)."),
        ({"min_length": 1}, "min_length: 1 was given; it must be a whole number of at least 2."),
        ({"length": 8, "positions": 8}, "positions: 8 was given; the shortest text has 7 words to ask for."),
        ({"words": 1}, "words: 1 was given"),
        ({"words": 4.0}, "words: 4.0 was given; it must be a whole number."),
        ({"from_end": "yes"}, "from_end: 'yes' was given; it must be true or false."),
        ({"from_ends": True}, "there is no 'from_ends'; did you mean 'from_end'"),
    ],
    "retrieval": [
        ({"keys": 4}, "pairs: 8 was given; there are only 4 different keys."),
        ({"values": 1}, "values: 1 was given"),
        ({"distractors": -1}, "distractors: -1 was given"),
        ({"length": 8}, "length: 8 was given; it must be a whole number of at least 9."),
        ({"distractors": 0, "min_length": 9}, "min_length: 9 was given; without distractors all texts have 9"),
    ],
    "mix": [
        ({"placed": 9}, "placed: 9 was given; there are only 8 different keys."),
        ({"min_offset": 5}, "min_offset: 5 was given; it must be at most max_offset (4)."),
        ({"min_offset": 0, "max_offset": 0}, "max_offset: 0 was given as the only offset; that is the key itself."),
        ({"max_offset": 2.5}, "max_offset: 2.5 was given; it must be a whole number."),
        ({"max_offset": 63}, "length: 64 was given; it must be a whole number of at least 66."),
    ],
    "recall": [
        ({"pairs": 33, "length": 99}, "pairs: 33 was given; there are only 32 different keys."),
        ({"queries": 9}, "queries: 9 was given; there are only 8 pairs to ask for."),
        ({"queries": 0}, "queries: 0 was given"),
        ({"values": 1}, "values: 1 was given"),
        ({"distractors": -1}, "distractors: -1 was given"),
        ({"length": 22}, "length: 22 was given; it must be a whole number of at least 23."),
    ],
    "copy": [
        ({"length": 1}, "length: 1 was given; it must be a whole number of at least 2."),
        ({"words": 1}, "words: 1 was given"),
    ],
    "reverse": [
        ({"min_items": 0}, "min_items: 0 was given"),
        ({"length": 9, "min_items": 5}, "min_items: 5 was given; 9 tokens hold 4."),
    ],
    "sort": [
        ({"words": 31, "repeats": False}, "words: 31 was given; without repeats 32 items need as many."),
        ({"repeats": 0}, "repeats: 0 was given; it must be true or false."),
    ],
    "trigger-distance": [
        ({"length": 1}, "length: 1 was given; it must be a whole number of at least 2."),
        ({"length": 12.0}, "length: 12.0 was given"),
        ({"length": True}, "length: True was given"),
        ({"num_triggers": 1}, "num_triggers: 1 was given"),
        ({"length": 8, "max_distance": 8}, "max_distance: 8 was given; two triggers in 8 tokens are 1 to 7 apart."),
        ({"length": 8, "max_distance": 0}, "max_distance: 0 was given"),
        ({"length": 8, "max_distance": 2.5}, "max_distance: 2.5 was given"),
        ({"vocab_size": 3}, "vocab_size: 3 was given; it must be a whole number of at least 4."),
        ({"vocab_size": 7, "num_triggers": 6}, "vocab_size: 7 was given"),
        ({"form": "released", "num_triggers": 3}, "num_triggers: 3 was given; the released form"),
        ({"form": "released", "vocab_size": 70}, "vocab_size: 70 was given; a segment of 70"),
        ({"form": "released", "length": 96}, "length: the triggers don't fit: 25 + 1 + 70 + 1 tokens"),
        ({"form": "released", "cut": 96}, "length: the triggers don't fit"),
        ({"form": "released", "max_side": 0}, "max_side: 0 was given"),
        ({"form": "relased"}, "form: there is no 'relased'; did you mean 'released'?"),
        ({"max_distanc": 4}, "there is no 'max_distanc'; did you mean 'max_distance'"),
        ({"words": 4}, "option of task 'trigger-distance': there is no 'words'"),
    ],
    "trigger-count": [
        ({"length": 8, "words": 9}, "words: 9 was given; it must be from 1 to length (8)."),
        ({"length": 8, "words": 0}, "words: 0 was given"),
        ({"length": 8, "words": 7.5}, "words: 7.5 was given"),
        ({"length": 8, "max_count": 9}, "max_count: 9 was given; the triggers must fit the 8 words."),
        ({"length": 8, "max_count": 0}, "max_count: 0 was given"),
        ({"length": 8, "max_count": 2.5}, "max_count: 2.5 was given"),
        ({"num_triggers": 0}, "num_triggers: 0 was given"),
        ({"vocab_size": 21}, "vocab_size: 21 was given; it must be a whole number of at least 22."),
        ({"form": "released", "vocab_size": 31}, "vocab_size: 31 was given"),
        ({"form": "papr"}, "did you mean 'paper'?"),
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


@pytest.mark.parametrize("length", [0, -3, 8.0, True, "8"])
def test_a_length_that_is_none_is_refused(length: Any):
    with pytest.raises(InputError, match=r"^length: .* was given; it must be a whole number of at least 1"):
        build("parity").at_length(length)


TOO_SHORT = [
    ("trigger-distance", {"length": 9, "vocab_size": 20, "num_triggers": 3}, 8, "max_distance: 8 was given"),
    (
        "trigger-distance",
        {"form": "released", "length": 20, "vocab_size": 40, "max_between": 6, "max_side": 4, "cut": 15},
        13,
        "max_side: 0 was given",
    ),
    ("trigger-count", {"length": 9, "vocab_size": 20, "num_triggers": 5}, 8, "max_count: 9 was given"),
    ("index", {"length": 10}, 9, "length: 9 was given; index cannot be the same there: positions: 9 was given"),
    ("retrieval", {}, 8, "length: 8 was given; it must be a whole number of at least 9."),
    ("retrieval", {"distractors": 0, "length": 9}, 10, "pairs: 9 was given; there are only 8 different keys."),
    ("mix", {}, 6, "length: 6 was given; it must be a whole number of at least 7."),
    ("recall", {}, 22, "length: 22 was given; it must be a whole number of at least 23."),
    ("recall", {"distractors": 0}, 73, "pairs: 33 was given; there are only 32 different keys."),
    ("contextual-count", {}, 30, "length: 30 was given; it must be a whole number of at least 31."),
    ("dyck", {}, 65, "length: 65 was given; balanced texts have an even number of brackets."),
    ("dyck", {"ask": "depth"}, 7, "max_depth: 8 was given; 7 brackets do not get that deep."),
    ("copy", {}, 1, "length: 1 was given; it must be a whole number of at least 2."),
    ("sort", {"repeats": False}, 66, "words: 32 was given; without repeats 33 items need as many."),
    ("addition", {}, 5, "length: 5 was given; it must be a whole number of at least 6."),
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
