"""Errors are one sentence that names the field, the value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, model_validator

from toeplens.utils import InputError, choose, invalid, validation_message


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


@pytest.mark.parametrize(
    ("name", "allowed", "says"),
    [
        ("rop", ("t5", "alibi", "rope", "mla"), "one of alibi, mla, rope, t5, got 'rop'; did you mean 'rope'?"),
        (
            "trigger-coun",
            ("trigger-distance", "trigger-count"),
            "one of trigger-count, trigger-distance, got 'trigger-coun'; did you mean 'trigger-count' or "
            "'trigger-distance'?",
        ),
        ("ROPE", ("rope", "alibi"), "one of alibi, rope, got 'ROPE'."),
        (3, ("rope", "alibi"), "one of alibi, rope, got 3."),
    ],
)
def test_choose_refuses_unknown_names_and_lists_the_nearest_first(name: Any, allowed: tuple[str, ...], says: str):
    assert choose("field", allowed[-1], iter(allowed)) == allowed[-1]
    with pytest.raises(InputError) as caught:
        choose("field", name, allowed)
    assert str(caught.value).startswith(f"field must be {says}")
    with pytest.raises(InputError, match=r"^field must not be set: there are none to choose from, got"):
        choose("field", name, ())


class Other(BaseModel, extra="forbid"):
    height: int = 1


class Many(BaseModel, extra="forbid"):
    outers: dict[str, list[Outer] | None] = {}
    two: Other | Inner | None = None


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (Outer, {"needed": 2, "rate": -1, "rat": 1}, "rate must be at least 0, got -1."),
        (Outer, {"needed": 2, "inner": {"width": 0}}, "inner.width must be at least 1, got 0."),
        (Outer, {"rate": 0.5}, "needed is missing."),
        (Outer, {"needed": 3}, "needed must be even, got 3."),
        (Many, {"outer": 1}, "outer is not a field; did you mean 'outers'? Fields: outers, two."),
        (Many, {"zzz": 1}, "zzz is not a field. Fields: outers, two."),
        (
            Many,
            {"outers": {"a": [{"needed": 2, "rat": 1}]}},
            "outers.a.0.rat is not a field; did you mean 'rate'? Fields: inner, needed, rate.",
        ),
        (Many, {"two": {"x": 1}}, "two.Other.x is not a field."),
    ],
)
def test_a_sentence_names_the_field_and_the_fault_or_the_known_fields(
    kind: type[BaseModel], fields: dict[str, Any], says: str
):
    with pytest.raises(ValidationError) as caught:
        kind(**fields)
    assert validation_message(caught.value, kind) == says


def test_a_sentence_names_a_field_once():
    class Checked(BaseModel):
        needed: int

        @model_validator(mode="after")
        def _refuse(self) -> Checked:
            raise ValueError("needed: no.")

    class Holder(BaseModel):
        needed: Checked

    with pytest.raises(ValidationError) as caught:
        Holder(needed={"needed": 1})
    assert validation_message(caught.value) == "needed: no."


@given(
    st.from_regex(r"[a-z]\w*(\.[a-z]\w*)?", fullmatch=True),
    st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.text()), st.sampled_from([np.ones(3)])),
)
def test_an_invalid_value_gives_one_line_with_the_value_and_the_rule(name: str, value: Any):
    error = invalid(name, "be at least 1", value)
    assert error.name == name
    assert re.fullmatch(rf"{re.escape(name)} must be at least 1, got .+\.", str(error))
    assert str(invalid(name, "be at least 1")) == f"{name} must be at least 1."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Path("a/b"), "'a/b'"),
        (np.float32(0.5), "0.5"),
        (np.ones((2, 3)), "float64 of shape [2, 3]"),
        (torch.ones(2), "float32 of shape [2]"),
        (torch.tensor(3), "3"),
        (torch.bfloat16, "bfloat16"),
        ("x" * 100, f"'{'x' * 75} ..."),
    ],
)
def test_values_are_shown_as_users_write_them(value: Any, text: str):
    assert str(invalid("x", "be y", value)) == f"x must be y, got {text}."
