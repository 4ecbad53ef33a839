"""Every record is read back as it was written, and each fault in one is a sentence that names the field."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from annotated_types import Ge, Le
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import AbstractArray, Float, Int

import toeplens.engine
import toeplens.lens
import toeplens.papers.deposit
import toeplens.papers.mathematics
import toeplens.studies.auditing
import toeplens.studies.decomposition
import toeplens.studies.grid
from toeplens.utils import InputError
from toeplens.utils.records import Dims, FloatOrNaN, ItemType, NonNegativeInt, Record, Share

MODULES = (  # imported for the records in them
    toeplens.engine,
    toeplens.lens,
    toeplens.papers.deposit,
    toeplens.papers.mathematics,
    toeplens.studies.auditing,
    toeplens.studies.decomposition,
    toeplens.studies.grid,
)
Sizes = dict[str, Any]


def subclasses_of(kind: type[Record]) -> Iterator[type[Record]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses_of(inner)


# whose fields hang together in ways of their own: tried on recorded studies and real audits, with their packages
TESTED_ELSEWHERE = {"Audit", "CellResult", "_PartCache"}
RECORD_TYPES = {kind for kind in subclasses_of(Record) if kind.__module__.startswith("toeplens.")}
KINDS = sorted(
    (kind for kind in RECORD_TYPES if kind.__name__ not in TESTED_ELSEWHERE),
    key=lambda kind: kind.__qualname__ + kind.__module__,
)


# ---- records made up from what their fields say ---------------------------------------------------------------------


def size_of(dim: str, sizes: Sizes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[int, ...]:
    letter, _, more = dim.partition("+")
    if letter.isdigit():
        return (int(letter),)
    if letter.startswith("*"):
        return sizes.setdefault(letter, (2, 3))
    if letter == "_":
        return (draw(st.integers(0, 3)),)
    return (sizes.setdefault(letter, draw(st.integers(1, 3))) + int(more or 0),)


def random_number(hint: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    inner = [each for field in about for each in (*getattr(field, "metadata", ()), field)]
    low = next((each.ge for each in inner if isinstance(each, Ge)), 0)
    high = next((each.le for each in inner if isinstance(each, Le)), 1 if kind is float else 9)
    if kind is bool:
        return draw(st.booleans())
    return draw(st.integers(low, high) if kind is int else st.floats(low, high))


def random_content(hint: Any, sizes: Sizes, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """What an annotation allows, as JSON has it."""
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    dims = next((each.names for each in about if isinstance(each, Dims)), "")
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return random_content(draw(st.sampled_from(inner)), sizes, draw)
    if kind is type(None):
        return None
    if origin is Literal:
        return draw(st.sampled_from(inner))
    if isinstance(kind, type) and issubclass(kind, AbstractArray):
        element = next((each.kind for each in about if isinstance(each, ItemType)), None)
        named = next(name for name in ("bool", "int", "float") if any(name in str(d) for d in kind.dtypes))
        element = element or {"bool": bool, "int": int, "float": float}[named]
        shape = [size for dim in kind.dim_str.split() for size in size_of(dim, sizes, draw)]
        return table(
            shape, lambda: None if named == "float" and draw(st.integers(0, 5)) == 0 else random_number(element, draw)
        )
    if isinstance(kind, type) and issubclass(kind, Record):
        return random_record(kind, draw)
    if origin is dict:
        return {"a": random_content(inner[1], sizes, draw)}
    if origin in (list, tuple):
        count = size_of(dims.split()[0], sizes, draw)[0] if dims else 2
        if get_origin(inner[0]) is list:
            return table([count, int(dims.split()[1])], lambda: random_content(get_args(inner[0])[0], sizes, draw))
        return [random_content(inner[0], sizes, draw) for _ in range(count)]
    return draw(st.text("ab", min_size=1)) if kind in (str, Any) else random_number(hint, draw)


def table(shape: list[int], element: Callable[[], Any]) -> Any:
    return element() if not shape else [table(shape[1:], element) for _ in range(shape[0])]


def random_record(kind: type[Record], draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
    sizes: Sizes = {}
    content = {name: random_content(hint, sizes, draw) for name, hint in declared_fields(kind).items()}
    return content | CONSISTENT_VALUES.get(kind.__name__, lambda content: {})(content)


def declared_fields(kind: type[Record]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}  # type: ignore[arg-type]


def without_optional(content: Any) -> Any:
    """A record in a record may leave out what it has none of."""
    if isinstance(content, dict):
        return {name: without_optional(value) for name, value in content.items() if value is not None}
    return [without_optional(value) for value in content] if isinstance(content, list) else content


# what no single field can tell
CONSISTENT_VALUES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Behaviour": lambda content: {"queries": 3, "layers": [0, 1], "splits": ["none", "mean"]},
    "PermutationScores": lambda content: {"queries": [3, 2], "layers": [0, 1], "splits": ["none", "mean"]},
    "FrequencyRecord": lambda content: {"layers": [0, 1]},
    "ItemRecord": lambda content: {"start": 1, "stop": 4, "changed_nats": 0.5, "changed_right": 1.0},
    "HeadAblation": lambda content: {"metric": "accuracy", "method": "attribution"},
    "HeadSets": lambda content: {
        "order": [[0, head] for head in range(len(content["order"]))],
        "sufficient": [[0, head] for head in range(min(len(content["order"]), len(content["sufficient"])))],
    },
    "Contest": lambda content: {"timed": [{**content["timed"][0], "ours": True}, *content["timed"][1:]]},
    "LengthBits": lambda content: dict.fromkeys(("whole", "sliding", "end", "gain")) | {"texts": 0},
    "LengthResult": lambda content: (
        dict.fromkeys(("accuracy", "low", "high", "chance", "length_chance"), 0.5) | {"examples": 3}
    ),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_records_round_trip_and_damage_names_the_field(kind: type[Record], data: st.DataObject) -> None:
    content = random_record(kind, data.draw)
    actual = kind.from_dict(json.loads(json.dumps(content, allow_nan=False)))
    written = json.loads(json.dumps(actual.to_dict(), allow_nan=False))
    assert without_optional(content) == without_optional(
        {**content, **{name: written[name] for name in content if name in written}}
    )
    assert {name for name in content if name not in written} <= set(kind.ADDED_LATER)
    assert kind.from_dict(written | {"of_a_later_version": 1}).to_dict() == actual.to_dict()
    name = data.draw(st.sampled_from(sorted(content)))
    without = {key: value for key, value in content.items() if key != name}
    if name in kind.ADDED_LATER:
        kind.from_dict(without)
    else:
        with pytest.raises(InputError, match=rf"^here is damaged: {name} is missing\.$"):
            kind.from_dict(without, "here")
    with pytest.raises(InputError, match=rf"^here is damaged: ({name}|{kind.__name__})"):
        kind.from_dict(content | {name: object()}, "here")
    with pytest.raises(InputError, match=rf"^here is damaged: 1\.{name}"):
        kind.from_list([content, content | {name: object()}], "here")


# ---- each rule by itself --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner(Record):
    share: Share
    unknown: FloatOrNaN


@dataclass(frozen=True)
class ExampleRecord(Record):
    LABEL = "tried"
    ADDED_LATER = ("later",)

    a: Float[np.ndarray, "L H"]
    b: Annotated[Float[np.ndarray, "*P L+1"], ItemType(Share)]
    whole: Int[np.ndarray, "L"] | None
    places: Annotated[tuple[NonNegativeInt, ...], Dims("L")]
    inner: tuple[Inner, ...]
    named: dict[str, Inner]
    flag: bool
    later: str = "before"

    def verify(self) -> None:
        if not self.flag:
            raise ValueError("flag: it must be raised.")


GOOD: dict[str, Any] = {
    "a": [[1, None], [0.5, -3]],
    "b": [[[0, 1, None]], [[0.5, 0, 0]]],
    "whole": [1, -2],
    "places": [0, 3],
    "inner": [{"share": 1, "unknown": None}],
    "named": {"x": {"share": 0.5, "unknown": 2.0}},
    "flag": True,
}


def test_record_values_must_match_their_annotations() -> None:
    for other in ([GOOD], None, 3, "text"):
        with pytest.raises(InputError, match=r"^here is damaged: it must have named fields"):
            ExampleRecord.from_dict(other, "here")
    result = ExampleRecord.from_dict(GOOD)
    assert (result.a.dtype, result.b.shape, result.whole is not None and result.whole.dtype.kind) == (
        float,
        (2, 1, 3),
        "i",
    )
    assert np.isnan(result.a[0, 1])
    assert np.isnan(result.b[0, 0, 2])
    assert math.isnan(result.inner[0].unknown)
    assert (result.places, result.named["x"], result.later) == ((0, 3), Inner(0.5, 2.0), "before")
    assert result.to_dict() == {**GOOD, "later": "before"}
    assert ExampleRecord.from_dict({**GOOD, "whole": None}).whole is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": [[1, 2], [3]]}, "a must have rows of equal length"),
        ({"a": [[1, True], [3, 4]]}, "a.0.1 must be a valid number"),
        ({"a": [[1, float("inf")], [3, 4]]}, "a.0.1 must be a finite number"),
        ({"a": [1, 2]}, "a.0 must be a list"),
        ({"b": [[[0, 1, 2]], [[0, 0, 0]]]}, "b.0.0.2 must be at most 1"),
        ({"b": [[[0, 1]], [[0, 0]]]}, "b must have the size \\[\\*P L\\+1\\] of the other fields, got \\[2, 1, 2\\]"),
        ({"whole": [1.5, 2]}, "whole.0 must be a valid integer"),
        ({"whole": [1]}, "whole must have the size \\[L\\] of the other fields, got \\[1\\]"),
        ({"places": [1]}, "places must have the size \\[L\\] of the other fields, got \\[1\\]"),
        ({"inner": [{"share": 2, "unknown": 1.0}]}, "inner.0.share must be at most 1"),
        ({"inner": {}}, "inner must be a list"),
        ({"inner": [{"share": 10**400, "unknown": 1.0}]}, "inner.0.share must be a valid number, got 1000"),
        ({"named": {"x": 3}}, r"named.x must have named fields, got 3"),
        ({"flag": 1}, "flag must be a valid boolean"),
        ({"flag": False}, "flag: it must be raised"),
        ({"later": 3}, "later must be a valid string"),
    ],
)
def test_an_error_names_the_path_of_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"^tried: the record is damaged: {words}[^\n]*\.$"):
        ExampleRecord.from_dict({**GOOD, **change})


def test_keys_of_earlier_versions_are_read():
    """Only where the record has the new field and not the old one; the rest of the content is unchanged."""

    @dataclass(frozen=True)
    class Row(Record):
        reason: str
        whole: float

    assert Row.from_dict({"why": "too short", "whole": 1.5}) == Row("too short", 1.5)
    assert Row.from_dict({"reason": "too short", "whole": 1.5, "why": "ignored"}).whole == 1.5
    with pytest.raises(InputError, match="reason"):
        Row.from_dict({"because": "too short", "whole": 1.5})
