"""What the record of each experiment may hold, stated field by field (see `toeplens.ground.reading`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from toeplens.ground import InputError
from toeplens.ground.reading import Count, Number, Positive, Share, Text, Truth
from toeplens.ground.records import Dims, Record

# lists of one letter go together, and so are of one length
_Some = Annotated[list[Number], Field(min_length=1)]
_S = Annotated[_Some, Dims("S")]
_T = Annotated[_Some, Dims("T")]
_Table = Annotated[list[_Some], Field(min_length=1), Dims("_ _")]


def _of(**fields: Any) -> Any:
    """A record of these fields."""
    return make_dataclass("_Part", fields.items(), bases=(Record,), frozen=True)


_Tally = _of(tried=Count, violations=Count, worst=Number)
_Symbol = _of(symbol=_Some)
_Chance = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
_Curve = _of(neighbour_error=Positive, local_rank=Positive, rank=Count)
_Tallied = _of(seed=Count, tallies=dict[Text, _Tally])
_Head = _of(stay=Number, move=Number, position_share=Number)
_Difference = Annotated[float, Field(strict=True, ge=-1, le=1)]
_Learned = _of(mirrored=_Difference, loss=Positive)
_Mean = Annotated[list[_Difference], Field(min_length=3, max_length=3)]  # of shares, with the ends of its interval


@dataclass(frozen=True)
class _Means(Record):
    LATER = ("one_angle",)

    additive: _Mean
    bound: _Mean
    gain: _Mean
    possible: _Mean
    rotary: _Mean
    one_angle: Annotated[list[_Difference], Field(max_length=3)] = field(default_factory=list)


@dataclass(frozen=True)
class _Instances(Record):
    family: Text
    size: Count
    width: Count
    constraints: Positive
    impossible: Count
    open: Count
    additive_met: Count
    means: _Means

    def verify(self) -> None:
        if self.family == "random" and not self.means.one_angle:
            raise ValueError("means.one_angle: it is missing.")


@dataclass(frozen=True)
class _Errors(Record):
    predictor: _Some
    frequencies: _Some


@dataclass(frozen=True)
class _Levinson(Record):
    sizes: _Some
    own: _Errors
    shared: _Errors
    recovered: _Some

    def verify(self) -> None:
        for errors in (self.own.predictor, self.own.frequencies, self.shared.predictor, self.shared.frequencies):
            if len(errors) != len(self.sizes):
                raise ValueError("own, shared: these are not errors of each of the sizes.")


KINDS: dict[str, type[Record]] = {
    "contraction": _of(
        seed=Count,
        free=_of(searched_sizes=_S, ratio_bound=_S, ratio_found=_S, ratio_known_positive=_S),
        sizes=_of(
            example=_of(w=_Some, mean=_Some),
            head_dims=_Some,
            lengths=_S,
            width_ratio=Annotated[list[_Some], Field(min_length=1), Dims("S _")],
        ),
        tallies=dict[Text, _Tally],
    ),
    "phases": _of(
        seed=Count,
        ranges=_of(fejer_sizes=_S, ratio_fejer=_S, sizes=_T, ratio_program=_T),
        toeplitz=_of(angles=_Some, w=_Symbol, product=_Symbol),
        tallies=dict[Text, _Tally],
    ),
    "expressiveness": _of(
        seed=Count,
        instances=Count,
        widths=list[Count],
        rows=list[_Instances],
        stated=list[_of(test=Text, size=Count, rotary=Number, relative=Number)],
    ),
    "distance": _Tallied,
    "latent": _Tallied,
    "normalising": _Tallied,
    "related": _Tallied,
    "small_norm": _of(seed=Count, models=dict[Text, dict[Text, _Learned]]),
    "filling": _of(
        seed=Count,
        tallies=dict[Text, _Tally],
        holes=_of(degrees=_S, sizes=_T, lengths=Annotated[list[_Some], Field(min_length=1), Dims("S T")]),
    ),
    "manifold": _of(
        tables=list[
            _of(encoding=Text, width=Count, length=Count, neighbour_error=Positive, local_rank=Positive, rank=Count)
        ]
    ),
    "estimators": _of(
        definite=Share,
        levinson=_Levinson,
        pair=_of(positional=_Head, content=_Head, single_gap=Positive, means_gap=Positive, extraction_gap=Positive),
        spans=list[
            _of(
                encoding=Text,
                vocabulary=Count,
                width=Count,
                least_angle=Number,
                overlap=Number,
                chance=_Chance,
                separable=Truth,
                linear_error=Positive,
                oblique_error=Positive | None,  # None where it is infinite
                lookup=Share,
            )
        ],
    ),
}
# tables of a model's heads, [layers, heads]; a layer's is left out where it is not finite
_TABLES = (
    "width",
    "norm",
    "gram",
    "bound",
    "phase_error",
    "coherence",
    "concentration",
    "modulus",
    "position_toeplitz",
)
_Model = make_dataclass(
    "_Model",
    [
        *((name, _Table | None, None) for name in _TABLES),
        ("spans", _of(least_angle=Number, overlap=Share, chance=_Chance) | None, None),
        ("curve", _Curve | None, None),
    ],
    bases=(Record,),
    frozen=True,
    namespace={"LATER": (*_TABLES, "spans", "curve")},
)
_BY_MODEL = "heads"  # a record of each model; one may have diverged, and then there is none of it


def read_records(name: str, found: Mapping[Path | str, Any]) -> list[dict[str, Any]]:
    """The records of an experiment under its seeds; one that is none, or unlike the first, raises `InputError`.

    ``found`` has their contents by the places that errors name.
    """
    records: list[dict[str, Any]] = []
    for place, record in found.items():
        read = _Model.from_named if name == _BY_MODEL else KINDS[name].from_dict
        read(record, place)
        if records and name != _BY_MODEL and _shape(record) != _shape(records[0]):
            raise InputError(f"{place} is damaged: it is not of the sizes of {next(iter(found))}.")
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
