"""A value that is nothing of the kind that a signature states is refused in words; what kind it is in detail is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from tests.builders import refusal_message

from toeplens.utils.options import Positive, PositiveInt, Share, check_value, parameters

if TYPE_CHECKING:
    from pathlib import Path

Word = Literal["a", "b"]


def example_function(
    *,
    whole: int = 1,
    number: float = 1.0,
    yes: bool = True,
    word: str = "",
    one: Word = "a",
    some: int | Word | None = None,
    numbers: Sequence[float] = (),
    deep: Sequence[float] | Sequence[Sequence[int]] | None = None,
    flags: list[bool] | None = None,
    many: PositiveInt = 1,
    part: Share = 0.5,
    rate: Positive | None = None,
    other: dict[str, int] | None = None,
    **rest: Any,
) -> None:
    """Some options."""


KINDS = {name: parameter.annotation for name, parameter in parameters(example_function).items()}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("whole", "x", "a whole number"),
        ("whole", True, "a whole number"),
        ("number", "1", "a number"),
        ("number", None, "a number"),
        ("yes", 1, "true or false"),
        ("word", 3, "a string"),
        ("one", [1], "'a' or 'b'"),
        ("some", 1.5, "a whole number, 'a', 'b' or None"),
        ("numbers", "123", "a list of numbers"),
        ("numbers", [1, "2"], "a list of numbers"),
        ("numbers", {"a": 1}, "a list of numbers"),
        ("deep", [[1], [2.5]], "a list of numbers, a list of lists of whole numbers or None"),
        ("flags", ["x"], "a list of true and false or None"),
        ("many", 0, "at least 1"),
        ("many", 1.5, "a whole number"),
        ("part", -0.1, "from 0 to 1"),
        ("part", float("nan"), "from 0 to 1"),
        ("rate", 0.0, "finite and over 0"),
        ("rate", "x", "a number or None"),
    ],
)
def test_an_error_names_the_value_and_the_allowed_values(option: str, value: Any, allowed: str):
    assert refusal_message(lambda: check_value(option, value, KINDS[option])) == (
        f"{option} must be {allowed}, got {value!r}."
    )


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("whole", (3, np.int64(3), -1)),
        ("number", (3, 0.5, float("nan"), np.float32(1))),
        ("one", ("a", "b")),
        ("many", (1, 7)),
        ("rate", (0.1, None)),
        ("some", (None, 3, "a")),
        ("numbers", ((), [1, 2.5], np.ones(3))),
        ("deep", ([1.5], [[1], [2]], None)),
        ("other", (3, "x", None)),
    ],
)
def test_possibly_valid_values_pass_to_the_constructor(option: str, values: tuple[Any, ...]):
    for value in values:
        check_value(option, value, KINDS[option])


def test_an_unknown_choice_suggests_the_nearest():
    for hint in (Literal["half", "whole"], Literal["half", "whole"] | None):
        assert refusal_message(lambda hint=hint: check_value("pairing", "haf", hint)) == (
            "pairing must be one of half, whole, got 'haf'; did you mean 'half'?"
        )


def test_an_unresolvable_annotation_allows_any_value():
    def strange(*, place: Path, whole: NoSuchThing = 1) -> None:  # pyright: ignore
        """Takes what only a type checker knows."""

    for name, parameter in parameters(strange).items():
        check_value(name, object(), parameter.annotation)
