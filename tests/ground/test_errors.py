"""Errors are one sentence that names the field, the value and what is allowed."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, choose, sentence


class Inner(BaseModel, extra="forbid"):
    width: int = Field(4, ge=1)


class Outer(BaseModel, extra="forbid"):
    rate: float = Field(0.1, ge=0)
    inner: Inner = Inner()
    needed: int

    @model_validator(mode="after")
    def _odd_is_refused(self) -> Outer:
        if self.needed % 2:
            raise ValueError(f"needed: {self.needed} was given; it must be even.")
        return self


def refusal(**fields: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Outer(**fields)
    return sentence(caught.value)


def test_exit_codes_tell_input_from_machine():
    assert InputError("x").exit_code == 2
    assert EnvironmentFailure("x").exit_code == 3


def test_every_error_is_one_of_ours_and_a_wrong_input_is_a_value_error():
    assert issubclass(InputError, ToeplensError)
    assert issubclass(InputError, ValueError)
    assert issubclass(EnvironmentFailure, ToeplensError)
    assert not issubclass(EnvironmentFailure, ValueError)


def test_choose_returns_an_allowed_name():
    assert choose("encoding", "rope", ("alibi", "rope")) == "rope"


def test_choose_takes_any_iterable_once():
    assert choose("encoding", "rope", iter(["alibi", "rope"])) == "rope"


def test_choose_lists_the_nearest_names_before_all_names():
    with pytest.raises(InputError) as caught:
        choose("encoding", "rop", ("t5", "alibi", "rope", "mla"))
    assert str(caught.value) == "encoding: there is no 'rop'; did you mean 'rope'? Known: alibi, mla, rope, t5."


def test_choose_names_the_nearest_first():
    with pytest.raises(InputError, match="did you mean 'trigger-count' or 'trigger-distance'"):
        choose("task", "trigger-coun", ("trigger-distance", "trigger-count"))


def test_choose_makes_no_guess_where_nothing_is_near():
    with pytest.raises(InputError) as caught:
        choose("form", "zzz", ("paper", "released"))
    assert str(caught.value) == "form: there is no 'zzz'; known: paper, released."


@pytest.mark.parametrize("name", ["", "ROPE", None, 3])
def test_choose_refuses_what_is_not_exactly_a_name(name: object):
    with pytest.raises(InputError, match="encoding: there is no"):
        choose("encoding", name, ("rope", "alibi"))


def test_sentence_names_the_field_and_the_value_out_of_range():
    assert refusal(needed=2, rate=-1) == "rate: input should be greater than or equal to 0 (given: -1)"


def test_sentence_names_a_nested_field_by_its_path():
    assert refusal(needed=2, inner={"width": 0}).startswith("inner.width: ")


def test_sentence_names_a_field_that_does_not_exist():
    assert refusal(needed=2, rat=0.2) == "rat: no such field"


def test_sentence_names_a_missing_field_without_the_whole_input():
    assert refusal(rate=0.5) == "needed: it is missing"


def test_sentence_names_a_value_of_a_wrong_type():
    assert refusal(needed="many").startswith("needed: input should be a valid integer")
    assert refusal(needed="many").endswith("(given: 'many')")


def test_sentence_keeps_the_words_of_a_validator():
    assert refusal(needed=3) == "needed: 3 was given; it must be even."


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


def test_sentence_tells_one_problem_of_many():
    assert "\n" not in refusal(rate=-1, rat=1)
