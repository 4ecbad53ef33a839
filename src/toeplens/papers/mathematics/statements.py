"""What the record of each experiment may hold, stated field by field (see `toeplens.ground.reading`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from toeplens.ground import InputError, read_json
from toeplens.ground.reading import Count, Number, Positive, Share, Text, Truth, checked

_Numbers = list[Number]
_Some = Annotated[_Numbers, Field(min_length=1)]


def _even(table: list[list[float]]) -> list[list[float]]:
    if len({len(row) for row in table}) > 1:
        raise ValueError("its rows are not equally long.")
    return table


_Table = Annotated[list[_Some], Field(min_length=1), AfterValidator(_even)]


class _Record(BaseModel):
    def columns(self) -> Sequence[Sequence[str]]:
        """Names of lists that go together, and so are of one length."""
        return ()

    @model_validator(mode="after")
    def _together(self) -> Any:
        for names in self.columns():
            if len({len(getattr(self, name)) for name in names}) > 1:
                raise ValueError(f"{', '.join(names)} are not of one length.")
        return self


class _Tally(_Record):
    tried: Count
    violations: Count
    worst: Number


class _Example(_Record):
    w: _Some
    mean: _Some


class _Sizes(_Record):
    example: _Example
    head_dims: _Some
    lengths: _Some
    width_ratio: _Table

    def columns(self) -> Sequence[Sequence[str]]:
        return (("lengths", "width_ratio"),)


class _Free(_Record):
    searched_sizes: _Some
    ratio_bound: _Some
    ratio_found: _Some
    ratio_known_positive: _Some

    def columns(self) -> Sequence[Sequence[str]]:
        return (("searched_sizes", "ratio_bound", "ratio_found", "ratio_known_positive"),)


class _Contraction(_Record):
    seed: Count
    free: _Free
    sizes: _Sizes
    tallies: dict[Text, _Tally]


class _Ranges(_Record):
    fejer_sizes: _Some
    ratio_fejer: _Some
    sizes: _Some
    ratio_program: _Some

    def columns(self) -> Sequence[Sequence[str]]:
        return ("fejer_sizes", "ratio_fejer"), ("sizes", "ratio_program")


class _Symbol(_Record):
    symbol: _Some


class _Toeplitz(_Record):
    angles: _Some
    w: _Symbol
    product: _Symbol


class _Phases(_Record):
    seed: Count
    ranges: _Ranges
    toeplitz: _Toeplitz
    tallies: dict[Text, _Tally]


_Difference = Annotated[float, Field(strict=True, ge=-1, le=1)]
_Mean = Annotated[list[_Difference], Field(min_length=3, max_length=3)]  # of shares, with the ends of its interval


class _Means(_Record):
    additive: _Mean
    bound: _Mean
    gain: _Mean
    one_angle: _Mean = []
    possible: _Mean
    rotary: _Mean


class _Instances(_Record):
    family: Text
    size: Count
    width: Count
    constraints: Positive
    impossible: Count
    open: Count
    additive_met: Count
    means: _Means

    @model_validator(mode="after")
    def _drawn(self) -> Any:
        if self.family == "random" and not self.means.one_angle:
            raise ValueError("means.one_angle: it is missing.")
        return self


class _Stated(_Record):
    test: Text
    size: Count
    rotary: Number
    relative: Number


class _Expressiveness(_Record):
    seed: Count
    instances: Count
    widths: list[Count]
    rows: list[_Instances]
    stated: list[_Stated]


class _Span(_Record):
    encoding: Text
    vocabulary: Count
    width: Count
    least_angle: Number
    overlap: Number
    chance: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
    separable: Truth
    linear_error: Positive
    oblique_error: Positive | None  # None where it is infinite
    lookup: Share


class _Errors(_Record):
    predictor: _Some
    frequencies: _Some


class _Levinson(_Record):
    sizes: _Some
    own: _Errors
    shared: _Errors
    recovered: _Some

    @model_validator(mode="after")
    def _of_each_size(self) -> Any:
        for errors in (self.own.predictor, self.own.frequencies, self.shared.predictor, self.shared.frequencies):
            if len(errors) != len(self.sizes):
                raise ValueError("own, shared: these are not errors of each of the sizes.")
        return self


class _Head(_Record):
    stay: Number
    move: Number
    position_share: Number


class _Pair(_Record):
    positional: _Head
    content: _Head
    single_gap: Positive
    means_gap: Positive
    extraction_gap: Positive


class _Estimators(_Record):
    definite: Share
    levinson: _Levinson
    pair: _Pair
    spans: list[_Span]


class _Angles(_Record):
    least_angle: Number


class _Model(_Record):
    """Tables of a model's heads, [layers, heads]; a layer's is left out where it is not finite."""

    width: _Table = []
    norm: _Table = []
    gram: _Table = []
    bound: _Table = []
    phase_error: _Table = []
    coherence: _Table = []
    concentration: _Table = []
    modulus: _Table = []
    position_toeplitz: _Table = []
    spans: _Angles = _Angles(least_angle=0.0)


KINDS: dict[str, Any] = {
    "contraction": _Contraction,
    "phases": _Phases,
    "expressiveness": _Expressiveness,
    "estimators": _Estimators,
    "heads": dict[Text, _Model],
}
_UNEVEN = ("heads",)  # a model may have diverged, and then a record has none of it


def read_records(name: str, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of an experiment under its seeds; one that is none, or unlike the first, raises `InputError`."""
    records: list[dict[str, Any]] = []
    for path in paths:
        record = read_json(path)
        checked(KINDS[name], record, path)
        if records and name not in _UNEVEN and _shape(record) != _shape(records[0]):
            raise InputError(f"{path} is damaged: it is not of the sizes of {paths[0]}.")
        records.append(record)
    return records


def _shape(content: Any) -> Any:
    """The same without its numbers: names, and how long each list is."""
    if isinstance(content, dict):
        return {name: _shape(value) for name, value in content.items()}
    if isinstance(content, list):
        return (
            [_shape(value) for value in content] if content and isinstance(content[0], (dict, list)) else len(content)
        )
    return None
