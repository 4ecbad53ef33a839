"""Options that do not fit, and lengths at which a task would be another, are refused in one sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.builders import refusal_message

from toeplens.tasks import build

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "addition": [
        ({"length": 4, "padded": True}, "length must be at least 5, got 4."),
        ({"min_digits": 6}, "min_digits must be at most 5, which 18 tokens can hold, got 6."),
    ],
    "dyck": [
        ({"length": 9}, "length must be even, got 9."),
        ({"ask": "depth", "length": 7}, "max_depth must be at most length (7), got 8."),
        ({"ask": "depth", "min_length": 64}, "min_length must be less than length (64)"),
    ],
    "parity": [
        ({"min_length": 65}, "min_length must be at most length (64), got 65."),
    ],
    "index": [
        ({"length": 8, "positions": 8}, "positions must be at most 7, the words of the shortest sequences, got 8."),
        ({"from_end": "yes"}, "from_end must be true or false, got 'yes'."),
    ],
    "retrieval": [
        ({"keys": 4}, "pairs must be at most 4, the number of different keys, got 8."),
        ({"distractors": 0, "min_length": 9}, "min_length must not be set without distractors: all sequences have 9"),
    ],
    "mix": [
        ({"min_offset": 5}, "min_offset must be at most max_offset (4), got 5."),
        ({"min_offset": 0, "max_offset": 0}, "max_offset must not be 0 if min_offset is 0."),
        ({"max_offset": 63}, "length must be at least 66, got 64."),
    ],
    "recall": [
        ({"queries": 9}, "queries must be at most 8, the number of pairs, got 9."),
    ],
    "number-hops": [
        ({"hops": 8}, "hops must be at most 7, less than the number of links, got 8."),
        ({"min_hops": 5}, "min_hops must be at most hops (4), got 5."),
        ({"length": 9, "min_hops": 2}, "length must be at least 10, got 9."),
    ],
    "sort": [
        ({"words": 31, "repeats": False}, "words must be at least 32, the number of items, without repeats, got 31."),
    ],
    "trigger-distance": [
        ({"length": 8, "max_distance": 8}, "max_distance must be from 1 to 7 in 8 tokens, got 8."),
        ({"form": "released", "num_triggers": 3}, "num_triggers must be 2 in the released form, got 3"),
        ({"form": "released", "vocab_size": 70}, "vocab_size must be at least 71"),
        ({"form": "released", "length": 96}, "length: the triggers do not fit. The second one ends after 97 tokens"),
    ],
    "trigger-count": [
        ({"length": 8, "words": 9}, "words must be from 1 to length (8), got 9."),
        ({"length": 8, "max_count": 9}, "max_count must be small enough to fit in 8 words, got 9."),
    ],
    "language": [
        ({"text": "a.txt"}, "text must be a list of strings, got 'a.txt'."),
        ({"text": ["a", ""]}, "text must be names of files or folders, got ['a', '']."),
        ({"sha256": "12"}, "sha256 must be 64 digits of 0-9 and a-f, got '12'."),
    ],
    "markov-language": [
        ({"words": 1}, "words must be from 2 to 8192, got 1."),
        ({"order": 4}, "order must be at most 3 with 64 words, got 4."),
        ({"branches": 65}, "branches must be at most words (64), got 65."),
        ({"copy_rate": math.nan}, "copy_rate must be from 0 to 1, got nan."),
        ({"documents": 10**14}, "documents: they need at least"),
    ],
    "nested-language": [
        ({"kinds": 10**9}, "kinds must be from 1 to 1024, got 1000000000."),
        ({"closes": 0.9}, "closes must be at most 0.88, as opens and closes add up to 1 at most, got 0.9."),
    ],
    "trigger-distanse": [
        ({}, "got 'trigger-distanse'; did you mean 'trigger-distance'"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_invalid_options_are_refused_in_one_sentence(name: str, options: dict[str, Any], message: str):
    assert message in refusal_message(lambda: build(name, **options))


TOO_SHORT: list[tuple[str, dict[str, Any], Any, str]] = [
    ("parity", {}, 0, "length must be at least 1, got "),
    *(("parity", {}, length, "length must be a whole number, got ") for length in (8.0, "8")),
    ("trigger-distance", {"length": 9, "vocab_size": 20, "num_triggers": 3}, 8, "max_distance must be from 1 to 7"),
    ("index", {"length": 10}, 9, "positions must be at most 8"),
    ("sort", {"repeats": False}, 66, "words must be at least 33, the number of items, without repeats, got 32."),
]


@pytest.mark.parametrize(("name", "options", "length", "message"), TOO_SHORT)
def test_a_length_that_would_change_the_task_is_refused(name: str, options: dict[str, Any], length: int, message: str):
    said = refusal_message(lambda: build(name, **options).at_length(length))
    assert said.removeprefix(f"length: {name} cannot be built with length {length}: ").startswith(message)
