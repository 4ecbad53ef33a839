"""What a run's records may hold, stated field by field: head ablations, measures, what `HeadWatch` saw.

`check_record` looks at one by its name. Tables of numbers have the dimensions that are written beside them, None where
a number is not defined; accuracies are shares, and counts are whole. What a later version adds is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from toeplens.ground import checked
from toeplens.ground.reading import Count, Number, Positive, Share, Text, Truth
from toeplens.lens.ablation.ablate import Method
from toeplens.lens.kit.interventions import Intervention
from toeplens.lens.kit.outcomes import Metric

WHY = "why"  # the field of a record that has no other, and says why an encoding has no such measure

Row = list[Number | None]
Grid = list[list[Number | None]]
Cube = list[list[list[Number | None]]]
_Part = Annotated[float, Field(strict=True, ge=-0.01, le=1.01)]  # a share, but for rounding
_Parts = list[list[_Part | None]]
_AtLeast1 = Annotated[Count, Field(ge=1)]
_Curve = list[Share | None]


class Dims:
    """The dimensions of a table, as in ``L H``, ``L H+1`` or ``M 2``; a letter is one number in all of a record."""

    def __init__(self, names: str) -> None:
        self.names = names.split()


class Tables(BaseModel):
    """A record whose tables go together."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Tables:
        sizes: dict[str, int] = {}
        for name, wanted, size in sorted(self._sizes(), key=lambda found: "+" in found[1]):
            letter, _, more = wanted.partition("+")
            least = int(letter) if letter.isdigit() else sizes.setdefault(letter, size - int(more or 0))
            if size != least + int(more or 0):
                raise ValueError(f"{name}: {size} were given along {wanted}; {least + int(more or 0)} are needed.")
        return self

    def _sizes(self) -> Iterator[tuple[str, str, int]]:
        """Each table's name, and its dimensions with their sizes."""
        for name, field in type(self).model_fields.items():
            for dims in field.metadata:
                if isinstance(dims, Dims):
                    try:
                        shape = _shape(getattr(self, name), len(dims.names))
                    except ValueError:
                        raise ValueError(f"{name}: its rows are not equally long.") from None
                    yield from ((name, *pair) for pair in zip(dims.names, shape, strict=False))


def _shape(table: Any, depth: int) -> tuple[int, ...]:
    """The sizes of nested lists, ``depth`` of them at most; uneven ones raise ValueError."""
    if depth == 0 or not isinstance(table, list):
        return ()
    inner = {_shape(row, depth - 1) for row in table}
    if len(inner) > 1:
        raise ValueError
    return (len(table), *(inner.pop() if inner else ()))


class Ablation(Tables):
    """See `toeplens.lens.HeadAblation`."""

    drops: Annotated[Grid, Dims("L H"), Field(min_length=1)]
    low: Annotated[Grid, Dims("L H")]
    high: Annotated[Grid, Dims("L H")]
    cumulative: Annotated[Grid, Dims("L H+1")]
    baseline: Number
    examples: _AtLeast1
    chance: Share
    metric: Metric
    intervention: Intervention
    method: Method = "exact"
    check: dict[str, Any] | None = None  # it looks at itself, see `toeplens.lens.ablation.estimate_check`

    @model_validator(mode="after")
    def _accuracies_are_shares(self) -> Ablation:
        for name, least in (("drops", -1), ("low", -1), ("high", -1), ("cumulative", 0)):
            numbers = [value for row in getattr(self, name) for value in row if value is not None]
            if self.metric == "accuracy" and not all(least <= value <= 1 for value in numbers):
                raise ValueError(f"{name}: of accuracies only numbers from {least} to 1 can come.")
        if self.metric == "accuracy" and not 0 <= self.baseline <= 1:
            raise ValueError(f"baseline: {self.baseline} was given; an accuracy is from 0 to 1.")
        return self


class Sets(Tables):
    """See `toeplens.lens.HeadSets`."""

    baseline: Share
    chance: Share
    examples: _AtLeast1
    order: Annotated[list[list[Count]], Dims("M 2"), Field(min_length=1)]
    sufficient: Annotated[list[list[Count]], Dims("S 2")]
    greedy: Annotated[_Curve, Dims("M+1")]
    importance: Annotated[_Curve, Dims("M+1")]
    random: Annotated[list[_Curve], Dims("R M+1"), Field(min_length=1)]
    keep: Share
    kept: Share

    @model_validator(mode="after")
    def _heads_are_the_models(self) -> Sets:
        order, few = ([tuple(head) for head in heads] for heads in (self.order, self.sufficient))
        if len(set(order)) < len(order) or len(set(few)) < len(few) or not set(few) <= set(order):
            raise ValueError("order: each head of the model is needed once, and the sufficient ones are among them.")
        return self


class BehaviourRecord(Tables):
    """See `toeplens.lens.Behaviour`."""

    positional: Annotated[_Parts, Dims("L H")]
    symbolic: Annotated[_Parts, Dims("L H")]
    interaction: Annotated[_Parts, Dims("L H")]
    variance: Annotated[list[list[Positive | None]], Dims("L H")]
    flat: Annotated[list[list[Truth]], Dims("L H")]
    queries: Annotated[list[Count] | Count, Dims("L")]  # older records have one number
    layers: Annotated[list[Count], Dims("L")]
    splits: Annotated[list[Text], Dims("L")]


class _Scores(Tables):
    positional: Annotated[Grid, Dims("L H")]
    symbolic: Annotated[Grid, Dims("L H")]
    positional_error: Annotated[Grid, Dims("L H")]
    symbolic_error: Annotated[Grid, Dims("L H")]


class Permutations(Tables):
    """See `toeplens.lens.PermutationScores`."""

    logits: _Scores
    weights: _Scores
    queries: list[Count] | Count  # older records have one number
    permutations: _AtLeast1
    seed: Count
    layers: list[Count]
    splits: list[Text]


class Frequency(Tables):
    """See `toeplens.lens.FrequencyUse`."""

    layers: Annotated[list[Count], Dims("L")]
    frequencies: Annotated[Cube, Dims("L H F")]
    norms: Annotated[Cube, Dims("L H F+1")]
    logits: Annotated[Cube, Dims("L H F+2")]
    softmax: Annotated[Cube, Dims("L H F+2")]
    variance: Annotated[Grid, Dims("L H")]
    centre: Annotated[Grid, Dims("L H")]
    massive: Annotated[Cube, Dims("2 L H")]


class Toeplitz(Tables):
    """Toeplitz shares of logits, see `toeplens.engine.attention_measures`."""

    share: Annotated[Grid, Dims("L H")]
    variance_explained: Annotated[Grid, Dims("L H")]


class Bands(Tables):
    """See `toeplens.lens.BandAblation`."""

    drops: Annotated[Cube, Dims("L H F")]
    low: Annotated[Cube, Dims("L H F")]
    high: Annotated[Cube, Dims("L H F")]
    baseline: Number
    examples: _AtLeast1
    metric: Metric
    off: Text


class RepresentationRecord(Tables):
    """See `toeplens.lens.Representation`."""

    layers: Annotated[list[Count], Dims("L")]
    sequences: _AtLeast1
    positions: list[Count]
    energy: Share
    reference_rank: Count
    chance: Share | None
    rank: Annotated[list[Count], Dims("L")]
    angles: Annotated[list[list[Number]], Dims("L")]  # as many as the smaller rank, layer by layer
    variance: Annotated[Row, Dims("L")]
    variance_share: Annotated[Row, Dims("L")]
    low: Annotated[Row, Dims("L")]
    high: Annotated[Row, Dims("L")]
    alignment: Annotated[Row, Dims("L")]
    alignment_low: Annotated[Row, Dims("L")]
    alignment_high: Annotated[Row, Dims("L")]
    displaced: Annotated[Row, Dims("L")]
    mean_cosine: Annotated[Row, Dims("L")]
    coefficient: Annotated[Row, Dims("L")]
    cosine: Annotated[Row, Dims("L")]
    decodability: Annotated[Row, Dims("L")]


class _HeadStrength(Tables):
    strength: Annotated[Cube, Dims("L H n")]
    exponent: Annotated[Grid, Dims("L H")]
    exponent_low: Annotated[Grid, Dims("L H")]
    exponent_high: Annotated[Grid, Dims("L H")]
    share: Annotated[Grid, Dims("L H")]
    share_low: Annotated[Grid, Dims("L H")]
    share_high: Annotated[Grid, Dims("L H")]


class _LayerStrength(Tables):
    strength: Annotated[Grid, Dims("L n")]
    exponent: Annotated[Row, Dims("L")]
    exponent_low: Annotated[Row, Dims("L")]
    exponent_high: Annotated[Row, Dims("L")]
    share: Annotated[Row, Dims("L")]
    share_low: Annotated[Row, Dims("L")]
    share_high: Annotated[Row, Dims("L")]


class _Level(Tables):
    heads: _HeadStrength
    layers: _LayerStrength
    mean: Annotated[Cube, Dims("L H C")]


class _Strength(BaseModel):
    sizes: list[_AtLeast1]
    examples: _AtLeast1
    loss: Number
    levels: Annotated[dict[str, _Level], Field(min_length=1)]


class _Drift(Tables):
    effect: Annotated[Grid, Dims("L H")]
    drift: Annotated[Grid, Dims("L H")]
    gradient_norm: Positive
    parameter_norm: Positive
    examples: _AtLeast1


class Seed(BaseModel):
    """See `toeplens.lens.SeedStrength` and `toeplens.lens.PositionalDrift`."""

    strength: _Strength
    drift: _Drift


class _Length(BaseModel):
    length: _AtLeast1
    factor: Positive
    examples: Count
    accuracy: Share | None
    low: Share | None
    high: Share | None
    loss: Number | None
    chance: Share | None
    length_chance: Share | None
    baselines: dict[str, Share]
    why: Text

    @model_validator(mode="after")
    def _examples_have_an_accuracy(self) -> _Length:
        figures = (self.accuracy, self.low, self.high, self.chance, self.length_chance)
        if any((figure is None) != (self.examples == 0) for figure in figures):
            raise ValueError(f"examples: {self.examples} were given; there are figures of examples, and of no others.")
        return self


class ExtrapolationRecord(BaseModel):
    """See `toeplens.engine.Extrapolation`."""

    run: Text
    trained_length: _AtLeast1
    rows: list[_Length]


class Watched(Tables):
    """A row of `toeplens.engine.HeadWatch`; its shares are None where an encoding has none."""

    step: Count
    seconds: Positive
    accuracy: Share
    loss: Number | None
    drops: Annotated[Grid, Dims("L H")]
    signal: Annotated[Grid, Dims("L H")]
    exponent: Annotated[Grid, Dims("L H")]
    positional: Annotated[_Parts | None, Dims("L H")] = None
    symbolic: Annotated[_Parts | None, Dims("L H")] = None
    interaction: Annotated[_Parts | None, Dims("L H")] = None
    variance: Annotated[Grid | None, Dims("L H")] = None


class _Why(BaseModel):
    why: Text


KINDS: dict[str, type[BaseModel]] = {
    "ablation": Ablation,
    "position": Ablation,
    "sets": Sets,
    "representation": RepresentationRecord,
    "seed": Seed,
    "extrapolation": ExtrapolationRecord,
    "behaviour": BehaviourRecord,
    "permutations": Permutations,
    "frequency": Frequency,
    "toeplitz": Toeplitz,
    "bands": Bands,
}


def check_record(name: str, content: Any, where: Path | str) -> None:
    """Raise an `InputError` that names ``where`` and the field if ``content`` is no record of this name (`KINDS`).

    A record that says why there is no such measure has nothing else in it.
    """
    says_why = isinstance(content, dict) and content.keys() - {"asked"} == {WHY}
    checked(_Why if says_why else KINDS[name], content, where)


def check_watched(rows: Any, where: Path | str) -> None:
    """Likewise for the rows that `HeadWatch` has seen of a run."""
    checked(list[Watched], rows, where)
