"""Errors are one sentence that names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from toeplens.ground import InputError, choose, sentence


class Inner(BaseModel, extra="forbid"):
    width: int = Field(4, ge=1)


class Outer(BaseModel, extra="forbid"):
    rate: float = Field(0.1, ge=0)
    inner: Inner = Inner()
    needed: int

    @model_validator(mode="after")
    def _odd_is_refused(self) -> Outer:
        if self.needed % 2:
            raise ValueError(f"needed must be even, got {self.needed}.")
        return self


def refusal(**fields: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Outer(**fields)
    return sentence(caught.value)


@pytest.mark.parametrize(
    ("name", "allowed", "says"),
    [
        ("rop", ("t5", "alibi", "rope", "mla"), "no 'rop'; did you mean 'rope'? Known: alibi, mla, rope, t5."),
        (
            "trigger-coun",
            ("trigger-distance", "trigger-count"),
            "no 'trigger-coun'; did you mean 'trigger-count' or 'trigger-distance'? Known: "
            "trigger-count, trigger-distance.",
        ),
        ("ROPE", ("rope", "alibi"), "no 'ROPE'; known: alibi, rope."),
        (3, ("rope", "alibi"), "no 3; "),
    ],
)
def test_choose_refuses_what_is_not_exactly_a_name_and_lists_the_nearest_first(
    name: Any, allowed: tuple[str, ...], says: str
):
    assert choose("field", allowed[-1], iter(allowed)) == allowed[-1]
    with pytest.raises(InputError) as caught:
        choose("field", name, allowed)
    assert str(caught.value).startswith(f"field: there is {says}")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"needed": 2, "rate": -1, "rat": 1}, "rate: input should be greater than or equal to 0 (given: -1)"),
        ({"needed": 2, "inner": {"width": 0}}, "inner.width: input should be greater than or equal to 1 (given: 0)"),
        ({"rate": 0.5}, "needed: it is missing"),
        ({"needed": 3}, "needed must be even, got 3."),
    ],
)
def test_a_sentence_names_the_field_and_what_is_wrong_with_it(fields: dict[str, Any], says: str):
    assert refusal(**fields) == says


class Other(BaseModel, extra="forbid"):
    height: int = 1


class Many(BaseModel, extra="forbid"):
    outers: dict[str, list[Outer] | None] = {}
    two: Other | Inner | None = None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"outer": 1}, "outer: no such field; did you mean 'outers'? Known: outers, two"),
        ({"zzz": 1}, "zzz: no such field; known: outers, two"),
        (
            {"outers": {"a": [{"needed": 2, "rat": 1}]}},
            "outers.a.0.rat: no such field; did you mean 'rate'? Known: inner, needed, rate",
        ),
        ({"two": {"x": 1}}, "two.Other.x: no such field"),
    ],
)
def test_a_field_that_does_not_exist_is_answered_with_those_that_do(fields: dict[str, Any], says: str):
    with pytest.raises(ValidationError) as caught:
        Many(**fields)
    assert sentence(caught.value, Many) == says


def test_sentence_says_a_field_once():
    class Checked(BaseModel):
        needed: int

        @model_validator(mode="after")
        def _refuse(self) -> Checked:
            raise ValueError("needed: no.")

    class Holder(BaseModel):
        needed: Checked

    with pytest.raises(ValidationError) as caught:
        Holder(needed={"needed": 1})
    assert sentence(caught.value) == "needed: no."
