"""What is done to some heads of an attention of a Hugging Face model, and whether that attention has what it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from toeplens.encodings import BandControl
from toeplens.ground import InputError, choose
from toeplens.ground.words import spans
from toeplens.lens.kit.terms import NoForm
from toeplens.sources.huggingface.capture.calls import AttentionCall, Kind, Side

_FASTEST = 1_000_000  # beyond that angles of a few tokens are roundings
Part = Literal["positional", "symbolic"]
Output = Literal["zero", "mean", "resample"]


class NotThere(InputError):
    """A layer, heads, groups or pairs were named that are not there; the sentence counts from 0, as Python does."""

    def __init__(self, field: str, given: int | list[int], there: str, first: int = 0) -> None:
        self.field, self.given, self.there = field, given, there
        several, once = ([given], "") if isinstance(given, int) else (given, ", each to be named once")
        shown = spans(each + first for each in several) if first else str(given)
        verb = "was" if shown.isdecimal() else "were"
        super().__init__(f"{field}: {shown} {verb} given; {there}, counted from {first}{once}.")

    def for_people(self, field: str | None = None) -> NotThere:
        """The same, counted from 1; with the name that people know the field by, if it is another."""
        return type(self)(field or self.field, self.given, self.there, 1)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is done to some heads of one attention; of ``bands``, ``speed``, ``bias`` one or more, or one other.

    The first three and ``attention`` are of the logits: values that are rotated as well (RoFormer's ``rotary_value``)
    stay so, and a mask that was chosen by position (sparse attention) stays as it is.

    layer      from 0, as `AttentionCall.layer` counts the calls of a kind and side
    heads      query heads, from 0; all unless given
    groups     instead of ``heads``: all query heads that read these keys
    kind       ``self`` or ``cross``
    side       ``encoder`` or ``decoder``; only needed where a model has both
    bands      frequencies stopped, silenced or exchanged, t = 0 being the first pair of `Rotation.pairs`
               (`toeplens.encodings.BandControl`, whose own heads are not given)
    speed      what the angles of all frequencies are multiplied by: 0 stops the rotation (every E_t becomes J), 2 puts
               the tokens twice as far apart. Angles are known up to whole turns a token: of pairs that are faster than
               half a turn, a speed that is no whole number is that of the angle less its whole turns
    bias       ``False`` takes away what is added to the logits beside the mask (ALiBi, T5)
    attention  the logits' ``positional`` part alone, or the ``symbolic`` one, of each query's two-way analysis of
               variance over the keys that it sees (`toeplens.lens.following.two_way`), each with the mean
    output     what the heads put out: ``zero``, their ``mean`` at each place over the sequences that have a token
               there, or those of another sequence of the batch, drawn by ``seed`` (``resample``). Padding, which is
               what the attention's own mask hides from all queries, gives nothing and is left as it is

    Raises `InputError` for what does not go together.
    """

    layer: int
    heads: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    kind: Kind = "self"
    side: Side | None = None
    bands: BandControl | None = None
    speed: float = 1.0
    bias: bool = True
    attention: Part | None = None
    output: Output | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        choose("kind", self.kind, get_args(Kind))
        for field, options in (("side", Side), ("attention", Part), ("output", Output)):
            value = getattr(self, field)
            if value is not None:
                choose(field, value, get_args(options))
        if self.heads is not None and self.groups is not None:
            raise InputError("groups: they were given beside heads; one of the two is allowed.")
        if self.bands is not None and self.bands.heads is not None:
            raise InputError("bands: heads were given in them; the change's own heads or groups are meant.")
        if not abs(self.speed) <= _FASTEST:
            raise InputError(f"speed: {self.speed} was given; it must be from -{_FASTEST} to {_FASTEST}.")
        if self.seed < 0:
            raise InputError(f"seed: {self.seed} was given; it must be at least 0.")
        given = [name for name, value in self._ways().items() if value]
        if not given:
            raise InputError(
                "bands: none were given, nor a speed other than 1, bias, attention or output; one is needed."
            )
        logits = [name for name in given if name in ("bands", "speed", "bias")]
        if len(given) > max(1, len(logits)):
            first = self._turning if given[0] == "bands" else given[0]
            raise InputError(f"{given[-1]}: it was given beside {first}; the two cannot be had together.")

    def _ways(self) -> dict[str, bool]:
        return {
            "bands": self.bands is not None,
            "speed": self.speed != 1,
            "bias": not self.bias,
            "attention": self.attention is not None,
            "output": self.output is not None,
        }

    @property
    def turns(self) -> bool:
        """Whether the rotation is changed."""
        return self.bands is not None or self.speed != 1

    @property
    def _turning(self) -> str:
        """The field by which it is."""
        if self.bands is None:
            return "speed"
        return next((name for name in ("still", "silent", "order") if getattr(self.bands, name)), "bands")

    def meets(self, call: AttentionCall) -> bool:
        """Whether it is of this call."""
        return self.layer == call.layer and self.of_side(call.kind, call.side)

    def of_side(self, kind: Kind, side: Side) -> bool:
        """Whether it is of calls of this kind and side."""
        return kind == self.kind and self.side in (None, side)

    def no_layer(self, count: int) -> NotThere:
        """What to raise where the model has so many calls of its kind and side, and not that of its layer."""
        on = f" on the side {self.side}" if self.side else ""
        return NotThere("layer", self.layer, f"there are {count} calls of {self.kind} attention{on}")

    def heads_of(self, call: AttentionCall) -> tuple[int, ...]:
        """The query heads that are changed. Raises `InputError` for those that the call does not have."""
        heads, groups = call.q.shape[1], call.k.shape[1]
        if self.groups is not None:
            _named(self.groups, "groups", groups, f"{call.module} has {groups}")
            size = heads // groups
            return tuple(head for group in self.groups for head in range(group * size, (group + 1) * size))
        if self.heads is None:
            return tuple(range(heads))
        _named(self.heads, "heads", heads, f"{call.module} has {heads}")
        return self.heads

    def check(self, call: AttentionCall) -> None:
        """Raise an `InputError` that names the module where the call does not have what is to be changed."""
        if self.turns:
            pairs = pairs_of(call, self._turning)
            for field in ("still", "silent"):
                given = getattr(self.bands, field, ())
                if given:
                    _named(given, field, pairs, f"{call.module} turns {pairs} pairs")
            if self.bands is not None:
                try:
                    self.bands.check(pairs, call.q.shape[1])
                except InputError as error:
                    raise InputError(f"{str(error).rstrip('.')} ({call.module} turns {pairs} pairs).") from None
        if not self.bias and call.encoding is not None and call.unknown is not None:
            raise InputError(f"bias: that of {call.module} cannot be taken away by itself: {call.unknown}")
        if not self.bias and call.bias is None:
            raise InputError(f"bias: {call.module} adds nothing to its logits that could be taken away.")
        if self.attention is not None:
            try:
                call.placed()
            except NoForm as error:
                raise InputError(f"attention: it has no positional and symbolic part there: {error}") from None
        if self.output == "resample" and call.q.shape[0] < 2:
            raise InputError("output: resample was given for a batch of one sequence; it needs another to draw from.")


def pairs_of(call: AttentionCall, field: str) -> int:
    """How many pairs a call's rotation turns. Raises `InputError`, naming the field, where that is not known."""
    if call.unknown is not None:
        raise InputError(f"{field}: the rotation of {call.module} is not known: {call.unknown}")
    if call.rotation is None or call.unrotated is None:
        raise InputError(f"{field}: {call.module} has no rotation that could be stopped or changed.")
    return len(call.rotation.frequencies)


def _named(indices: Sequence[int], field: str, count: int, there: str) -> None:
    if sorted(set(indices)) != sorted(indices) or not all(0 <= each < count for each in indices) or not indices:
        raise NotThere(field, list(indices), there)
