"""Changes of some heads of a Hugging Face model's attention, and the outputs that result.

The rotation multiplies pair t at position i by m_t e^(iota (i theta_t + c_t)), c_t common to queries and keys. A
changed rotation multiplies the original pair by m_t e^(iota i theta'_t) and the band's gain, so no angle is undone: a
frozen pair is the model's own before its rotation. Positional and symbolic logits of a query i are the row and column
means of its table M_jm (`toeplens.lens.head_types.two_way`), with means over the visible keys:

    mu + P_j = Re sum_t w_t conj(mean c)_t e_jt + q'_i . mean c' + b_(i-j),    mu + S_j = Re sum_t w_t (mean e)_t
    conj(c_j)_t + q'_i . c'_j + mean b,    w = q_i e^(iota i theta), e_j = e^(-iota j theta),

with primes for dimensions that are not rotated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings import BandControl
from toeplens.ground import InputError, choose, invalid
from toeplens.ground.machine import out_of_memory
from toeplens.ground.words import spans
from toeplens.lens.kit.interventions import donors
from toeplens.lens.kit.terms import NoForm
from toeplens.sources.huggingface.attention import Attention, at_rows, blocks
from toeplens.sources.huggingface.calls import AttentionCall, Kind, Place, Side
from toeplens.sources.huggingface.capture import captured, compared
from toeplens.sources.huggingface.load import Loaded
from toeplens.sources.huggingface.model import NOBODY, OBSERVER, checked_model, of_libraries, words
from toeplens.sources.huggingface.rotation import as_complex, turn

_HELD = "toeplens_changes"  # attribute of a model's patched forward: the changes
_SEQUENCES, _TOKENS = 2, 16  # maximum size of a short pass
_DEFAULTS = {"bands": None, "speed": 1, "bias": True, "attention": None, "output": None}  # which change nothing
_FASTEST = 1_000_000  # beyond this the angles of a few tokens are rounding errors
Part = Literal["positional", "symbolic"]
Output = Literal["zero", "mean", "resample"]


class NotThere(InputError):
    """A named layer, head, group or pair does not exist; the message counts from 0, as Python does."""

    def __init__(self, field: str, given: int | list[int], count: int, where: str = "", first: int = 0) -> None:
        self.field, self.given, self.count, self.where = field, given, count, where
        several, be = ([given], "be") if isinstance(given, int) else (given, "be different numbers")
        several = [each + first for each in several]
        distinct = len(set(several)) == len(several)
        shown = (spans(several) if distinct else ", ".join(map(str, several))) if first else str(given)
        must = f"must {be} from {first} to {count - 1 + first}{f' in {where}' * bool(where)}, got {shown or 'none'}."
        super().__init__(f"{field} {must}" if count else f"{field}: the model has no {where}.")

    def for_people(self, field: str | None = None) -> NotThere:
        """The same, counted from 1; with the name that people know the field by, if it is another."""
        return type(self)(field or self.field, self.given, self.count, self.where, 1)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of some heads of one attention: ``bands``, ``speed`` and ``bias`` in any combination, or one other.

    The first three and ``attention`` change only logits: rotated values (RoFormer's ``rotary_value``) and masks chosen
    by position (sparse attention) are not changed.

    layer      from 0, counted as in `AttentionCall.layer` over the calls of a kind and side
    heads      query heads, from 0 (default: all)
    groups     instead of ``heads``: all query heads that read these key heads
    kind       ``self`` or ``cross``
    side       ``encoder`` or ``decoder``; only needed if a model has both
    bands      frequencies to freeze, drop or permute, with t = 0 the first pair of `Rotation.pairs`
               (`toeplens.encodings.BandControl`, whose own heads must not be set)
    speed      factor of the angles of all frequencies: 0 freezes the rotation (every E_t becomes J), 2 doubles the
               distances of tokens. Angles are known up to whole turns per token: for pairs faster than half a turn per
               token, a fractional speed multiplies the angle without its whole turns
    bias       ``False`` removes what is added to the logits besides the mask (ALiBi, T5)
    attention  keep only the ``positional`` or the ``symbolic`` part of the logits, from each query's two-way analysis
               of variance over the visible keys (`toeplens.lens.head_types.two_way`), each with the mean
    output     the heads' new output: ``zero``; ``mean``, over the sequences that have a token at the position; or
               ``resample``, that of another sequence of the batch, drawn by ``seed``. Padding, which the attention's
               own mask hides from all queries, is not used and not changed

    Raises `InputError` for arguments that exclude each other.
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
        for name, options in (("side", Side), ("attention", Part), ("output", Output)):
            if (value := getattr(self, name)) is not None:
                choose(name, value, get_args(options))
        if self.heads is not None and self.groups is not None:
            raise InputError("heads and groups must not both be set.")
        if self.bands is not None and self.bands.heads is not None:
            raise InputError("bands must not have heads. Set heads or groups of the change.")
        if not abs(self.speed) <= _FASTEST:
            raise invalid("speed", f"be from -{_FASTEST} to {_FASTEST}", self.speed)
        if self.seed < 0:
            raise invalid("seed", "be at least 0", self.seed)
        given = [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]
        if not given:
            raise InputError("bands, speed, bias, attention or output must be set.")
        logits = [name for name in given if name in ("bands", "speed", "bias")]
        if len(given) > max(1, len(logits)):
            first = self._turning if given[0] == "bands" else given[0]
            raise InputError(f"{first} and {given[-1]} must not both be set.")

    @property
    def turns(self) -> bool:
        """Whether the rotation is changed."""
        return self.bands is not None or self.speed != 1

    @property
    def _turning(self) -> str:
        if self.bands is None:
            return "speed"
        return next((name for name in ("still", "silent", "order") if getattr(self.bands, name)), "bands")

    def meets(self, call: AttentionCall) -> bool:
        """Whether the change applies to this call."""
        return self.layer == call.layer and self.of_side(call.kind, call.side)

    def of_side(self, kind: Kind, side: Side) -> bool:
        """Whether the change applies to calls of this kind and side."""
        return kind == self.kind and self.side in (None, side)

    def no_layer(self, count: int) -> NotThere:
        """The error if the model has only ``count`` calls of this kind and side."""
        on = f" on the side {self.side}" if self.side else ""
        return NotThere("layer", self.layer, count, f"{self.kind} attention{on}")

    def heads_of(self, call: AttentionCall) -> tuple[int, ...]:
        """The changed query heads. Raises `InputError` for heads that the call does not have."""
        heads, groups = call.q.shape[1], call.k.shape[1]
        if self.groups is not None:
            _named(self.groups, "groups", groups, call.module)
            size = heads // groups
            return tuple(head for group in self.groups for head in range(group * size, (group + 1) * size))
        if self.heads is not None:
            _named(self.heads, "heads", heads, call.module)
        return tuple(range(heads)) if self.heads is None else self.heads

    def check(self, call: AttentionCall) -> None:
        """Raise an `InputError` that names the module if the call does not have what is to be changed."""
        if self.turns:
            pairs = pairs_of(call, self._turning)
            for field in ("still", "silent"):
                if given := getattr(self.bands, field, ()):
                    _named(given, field, pairs, call.module)
            if self.bands is not None:
                try:
                    self.bands.check(pairs, call.q.shape[1])
                except InputError as error:
                    raise InputError(f"{str(error).rstrip('.')} ({call.module} has {pairs} pairs).") from None
        if not self.bias and call.encoding is not None and call.unknown is not None:
            raise InputError(f"bias: the bias of {call.module} cannot be removed: {call.unknown}")
        if not self.bias and call.bias is None:
            raise InputError(f"bias: {call.module} adds no bias to its logits.")
        if self.attention is not None:
            try:
                call.placed()
            except NoForm as error:
                raise InputError(f"attention: logits have no positional and symbolic parts: {error}") from None
        if self.output == "resample" and call.q.shape[0] < 2:
            raise InputError("output must not be 'resample' for a batch of one sequence.")


def pairs_of(call: AttentionCall, field: str) -> int:
    """Number of rotated pairs of a call. Raises `InputError`, naming the field, if it is not known."""
    if call.unknown is not None:
        raise InputError(f"{field}: the rotation of {call.module} is unknown: {call.unknown}")
    if call.rotation is None or call.unrotated is None:
        raise InputError(f"{field}: {call.module} has no rotation.")
    return len(call.rotation.frequencies)


def _named(indices: Sequence[int], field: str, count: int, where: str) -> None:
    if sorted(set(indices)) != sorted(indices) or not all(0 <= each < count for each in indices) or not indices:
        raise NotThere(field, list(indices), count, where)


def tokens_of(call: AttentionCall) -> Bool[Tensor, "B N"]:
    """Which queries of a self-attention are tokens: those whose key some query sees. The others are padding.

    Raises `InputError` if this is not known, as for XLNet, whose padding sees itself.
    """
    batch, queries, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    unknown = "so tokens cannot be resampled or averaged"
    if call.kind == "cross" or (call.visible is not None and queries != keys):
        raise InputError(f"output: padding among the queries of {call.module} is unknown, {unknown}.")
    if call.visible is None:
        return torch.ones(batch, queries, dtype=torch.bool, device=call.q.device)
    place = torch.arange(keys, device=call.q.device)
    seen, by_others = torch.zeros(2, len(call.visible), keys, dtype=torch.bool, device=place.device)
    for part in blocks(queries, len(call.visible) * call.visible.shape[1] * keys):
        later = place - place[part].unsqueeze(-1)
        visible = at_rows(call.visible, place[part]).any(1)
        if call.causal:
            visible = visible & (later <= 0)
        seen |= visible.any(1)
        by_others |= (visible & (later != 0)).any(1)
    if call.causal:  # only the last query of all, or of a chunk, sees these
        by_others |= (place == keys - 1) | ((place + 1) % (call.chunk or keys) == 0)
    if keys > 1 and bool(seen.all()) and not bool(by_others.all()):
        raise InputError(f"output: a token of {call.module} may be padding, {unknown}.")
    return seen.expand(batch, -1)


def changed_outputs(
    call: AttentionCall, change: Change, there: Bool[Tensor, "B Nq"] | None = None
) -> Float[Tensor, "B Nq H dv"]:
    """All heads' outputs with the change; in float32, or the model's own dtype if wider.

    ``there`` says which queries are tokens, not padding, which a cross-attention does not know (default: `tokens_of`).
    """
    heads = list(change.heads_of(call))
    change.check(call)
    found = call.heads.to(torch.promote_types(call.heads.dtype, torch.float32)).clone()
    if change.output == "zero":
        found[:, :, heads] = 0
    elif change.output is not None:
        found[:, :, heads] = _of_others(found[:, :, heads], change, tokens_of(call) if there is None else there)
    else:
        found[:, :, heads] = _attended(call, change, heads).to(found.dtype)
    return found


def with_changed_logits(call: AttentionCall, change: Change) -> AttentionCall:
    """The call with the queries, keys per query head, and bias that result from ``bands``, ``speed`` or ``bias``."""
    change.check(call)
    heads, count = list(change.heads_of(call)), call.q.shape[1]
    q, k = call.q.clone(), call.k.repeat_interleave(count // call.k.shape[1], 1)
    if change.turns:
        q[:, heads] = _turned(call, change, 0, heads).to(q.dtype)
        k[:, heads] = _turned(call, change, 1, _groups(call, heads)).to(k.dtype)
    bias = call.bias
    if bias is not None and not change.bias:
        bias = bias.expand(-1, count, -1, -1).clone()
        bias[:, heads] = 0
    return replace(call, q=q, k=k, bias=bias)


def _of_others(
    own: Float[Tensor, "B Nq h dv"], change: Change, there: Bool[Tensor, "B Nq"]
) -> Float[Tensor, "B Nq h dv"]:
    """Means and outputs of other sequences; padding is not used and not changed."""
    tokens = there[:, :, None, None]
    if change.output == "mean":
        mean = own.where(tokens, 0).sum(0, keepdim=True) / tokens.sum(0, keepdim=True).clamp_min(1)
        return torch.where(tokens, mean, own)
    giving = torch.from_numpy(donors(there.sum(1).cpu().numpy(), change.seed)).to(own.device)
    if bool((there & ~there[giving]).any()):
        without = "if the batch has no other sequence of at least the same length"
        raise InputError(f"output must not be 'resample' {without}.")
    return torch.where(tokens, own[giving], own)


def _attended(call: AttentionCall, change: Change, heads: list[int]) -> Float[Tensor, "B Nq h dv"]:
    own = {name: getattr(call, name) for name in ("scale", "softcap", "causal")}
    for name in ("bias", "visible", "factor"):
        x = getattr(call, name)
        own[name] = x[:, heads] if x is not None and x.shape[1] > 1 else x
    q, k, sinks = call.q[:, heads], call.k[:, _groups(call, heads)], None if call.sinks is None else call.sinks[heads]
    v = call.v[:, [head // (call.q.shape[1] // call.v.shape[1]) for head in heads]]
    parts = Attention(q=q, k=k, v=v, sinks=sinks, **own)
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    if change.turns:
        parts = replace(parts, q=_turned(call, change, 0, heads), k=_turned(call, change, 1, _groups(call, heads)))
    if not change.bias:
        parts = replace(parts, bias=None)
    logits = partial(parts.logits, dtype=dtype)
    if change.attention is not None:
        logits = _part_logits(call, heads, parts, change.attention, dtype)
    found = []
    for part in blocks(parts.q.shape[2], parts.q.shape[0] * parts.q.shape[1] * parts.k.shape[2]):
        rows = torch.arange(part.start, part.stop, device=parts.q.device)
        weights = parts.softmax(logits(rows), rows).nan_to_num(nan=0.0)
        found.append((weights @ parts.v.to(dtype)).transpose(1, 2))
    return torch.cat(found, dim=1)


def _groups(call: AttentionCall, heads: list[int]) -> list[int]:
    return [head // (call.q.shape[1] // call.k.shape[1]) for head in heads]


def _turned(call: AttentionCall, change: Change, which: int, heads: list[int]) -> Float[Tensor, "B h N d"]:
    """Queries (0) or keys (1) of these heads under the changed rotation."""
    rotation = call.rotation
    assert call.unrotated is not None
    assert rotation is not None
    before, after = call.unrotated[which][:, heads].double(), (call.q, call.k)[which][:, heads].double()
    turns = turn(change.speed * call.positions.double().unsqueeze(-1) * rotation.frequencies).unsqueeze(1)
    if change.bands is not None:
        turns = torch.complex(*change.bands.tables(turns.real, turns.imag, 1))
    made = rotation.magnitudes * turns * as_complex(before, rotation.pairs)
    after[..., rotation.after[:, 0]], after[..., rotation.after[:, 1]] = made.real, made.imag
    return after


def _part_logits(
    call: AttentionCall, heads: list[int], parts: Attention, part: Part, dtype: torch.dtype
) -> Callable[[Int[Tensor, "R"]], Float[Tensor, "B h R K"]]:
    """The logits of some queries, of one part plus the mean: with means over contents or positions instead of each."""
    rest_q, rest_k = parts.q.to(dtype), parts.k.to(dtype)  # the dimensions that are not rotated
    q = k = torch.empty(*rest_q.shape[:-1], 0, dtype=dtype.to_complex(), device=rest_q.device)
    turns = q[:, :1]
    if call.rotation is not None and call.unrotated is not None:
        rotation, before = call.rotation, (call.unrotated[0][:, heads], call.unrotated[1][:, _groups(call, heads)])
        still = torch.ones(rest_q.shape[-1], dtype=torch.bool, device=rest_q.device)
        still[rotation.after.flatten()] = False
        rest_q, rest_k = rest_q[..., still], rest_k[..., still]
        q, k = (as_complex(x.to(dtype), rotation.pairs) for x in before)
        turns = rotation.magnitudes * turn(call.positions.double().unsqueeze(-1) * rotation.frequencies)
        turns = turns.unsqueeze(1).to(q.dtype)

    def logits(rows: Int[Tensor, "R"]) -> Float[Tensor, "B h R K"]:
        own = parts.logits(rows, dtype=dtype)
        seen = own.isfinite()
        share = seen.to(dtype) / seen.sum(-1, keepdim=True).clamp_min(1)
        each, averaged = (turns, k) if part == "positional" else (k, turns)
        mean = torch.complex(share @ averaged.real, share @ averaged.imag)
        a = q.index_select(2, rows) * turns.index_select(2, rows) * mean.conj()
        made, rest = a.real @ each.real.transpose(-2, -1) + a.imag @ each.imag.transpose(-2, -1), rest_q[:, :, rows]
        if part == "positional":
            made = made + (rest * (share @ rest_k)).sum(-1, keepdim=True)
        else:
            made = made + rest @ rest_k.transpose(-2, -1)
        made = parts.scale * made
        if parts.softcap is not None:
            made = parts.softcap * (made / parts.softcap).tanh()
        if parts.bias is not None:
            bias = at_rows(parts.bias, rows).to(dtype)
            made = made + (bias if part == "positional" else (share * bias).sum(-1, keepdim=True))
        return made.masked_fill(~seen, -torch.inf)

    return logits


def without_position(
    model: Any, inputs: Mapping[str, Any], places: Collection[Place]
) -> dict[Place, Float[Tensor, "B Nq H dv"]]:
    """All heads' outputs with frozen rotation and without bias, for calls by side, kind and layer.

    Calls without rotation and bias, or with an unknown rotation, are left out. Earlier layers, and vectors added at the
    input, which belong to no head, are not changed.
    """
    found: dict[Place, Tensor] = {}

    def keep(call: AttentionCall) -> None:
        if call.place in places and call.unknown is None and (call.rotation is not None or call.bias is not None):
            speed, bias = 1.0 if call.rotation is None else 0.0, call.bias is None
            change = Change(layer=call.layer, kind=call.kind, side=call.side, speed=speed, bias=bias)
            found[call.place] = changed_outputs(call, change).to(call.heads.dtype)

    captured(model, inputs, keep)
    return found


@contextmanager
def intervened(model: Any, changes: Sequence[Change] | Change) -> Iterator[None]:
    """Context manager that changes the attention in every pass of the model, and restores the model afterwards.

    Each attention call is decomposed and verified on its own input as in an audit, and the outputs of the changed heads
    are computed from the parts (`changed_outputs`); all others are the model's own. Several changes of one call must
    affect different heads. Nested contexts combine their changes. Passes have no gradients and no key cache.

    Arguments
        model    a `transformers.PreTrainedModel`
        changes  the changes; may be empty

    A pass raises `InputError` as `captured` does, if what is to be changed does not exist (a layer, heads, a bias), for
    tokens or positions without vectors, and if it is run inside another captured or changed pass.
    """
    checked_model(model)
    held: list[tuple[Change, ...]] | None = getattr(vars(model).get("forward"), _HELD, None)
    wanted = (changes,) if isinstance(changes, Change) else tuple(changes)
    with _changing(model) if held is None else nullcontext(held) as held:
        held.append(wanted)
        try:
            yield
        finally:
            held.remove(wanted)


@contextmanager
def _changing(model: Any) -> Iterator[list[tuple[Change, ...]]]:
    """Patch the model's forward so that the changes in the returned list apply to its passes."""
    original, had = model.forward, "forward" in vars(model)
    held: list[tuple[Change, ...]] = []
    running: list[Changed] = []

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        observer = OBSERVER.get()
        if getattr(observer, "instead", None) in running:  # this pass implements a changed one
            return original(*args, **kwargs)
        if observer is not NOBODY:
            where = "inside another pass that is analyzed or changed. Give the changes to that pass"
            raise InputError(f"model: {type(model).__name__} must not run with `intervened` {where}.")
        inputs = dict(zip(inspect.signature(original).parameters, args, strict=False)) | kwargs
        changed = Changed(list(chain(*held)))
        running.append(changed)
        try:
            output = captured(model, inputs, changed.note, changed)
        except (IndexError, RuntimeError) as error:  # a position or token may have no vector
            length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
            limit = Loaded(model).vectors
            if of_libraries(error) and limit is not None and length > limit:
                must = f"have at most {limit} tokens, the positions of the model"
                raise invalid("inputs", must, length) from error
            if of_libraries(error) and isinstance(error, IndexError):
                why = f"the model has no vector for one of the tokens or positions ({words(error)})"
                raise InputError(f"inputs: {why}.") from error
            raise
        finally:
            running.remove(changed)
        changed.require_all()
        return output

    setattr(forward, _HELD, held)
    model.forward = forward
    try:
        yield held
    finally:
        if had:
            model.forward = original
        else:
            del model.forward


def compared_changed(
    model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None], changes: Sequence[Change]
) -> float:
    """`compared` of the intact model, then a pass of the changed one, whose calls are passed to ``on_layer``.

    Each call reads the output of the changed calls before it; its own parts are passed on as before its change. A
    changed model has no plain pass to compare with, so the distance is the intact one's.
    """
    whole, changed = compared(model, inputs, lambda call: None), Changed(changes)

    def look(call: AttentionCall) -> None:
        changed.note(call)
        on_layer(call)

    captured(model, inputs, look, changed)
    changed.require_all()
    return whole


@dataclass(eq=False)
class Changed:
    """Outputs of the calls of one pass under the changes: the ``instead`` argument of `captured`."""

    changes: Sequence[Change]
    seen: list[tuple[Kind, Side]] = field(default_factory=list)
    met: set[int] = field(default_factory=set)
    there: Tensor | None = None  # tokens of the last self-attention that are not padding, for cross-attention

    def __call__(self, call: AttentionCall) -> Tensor | None:
        others = any(change.kind == "cross" and change.output in ("mean", "resample") for change in self.changes)
        if others and call.kind == "self":
            self.there = tokens_of(call)
        known = call.kind == "cross" and self.there is not None and self.there.shape == call.heads.shape[:2]
        found, taken = None, set[int]()
        for change in self.of(call):
            heads = change.heads_of(call)
            if again := taken & set(heads):
                raise InputError(f"changes must not change head {min(again)} of {call.module} twice.")
            taken |= set(heads)
            made = changed_outputs(call, change, self.there if known else None)
            found = made if found is None else found
            found[:, :, list(heads)] = made[:, :, list(heads)]
        return found

    def of(self, call: AttentionCall) -> Iterator[Change]:
        """The changes of a call."""
        for number, change in enumerate(self.changes):
            if change.meets(call):
                self.met.add(number)
                yield change

    def note(self, call: AttentionCall) -> None:
        """A call of the pass."""
        self.seen.append((call.kind, call.side))

    def require_all(self) -> None:
        """Refuse changes whose call does not occur, or occurs on both sides of a model."""
        for number, change in enumerate(self.changes):
            if change.side is None and len({side for kind, side in self.seen if kind == change.kind}) > 1:
                raise InputError("side must be set for a model with an encoder and a decoder.")
            if number not in self.met:
                raise change.no_layer(sum(change.of_side(*each) for each in self.seen))


class Called(NamedTuple):
    """One attention call in a pass."""

    side: Side
    kind: Kind
    layer: int
    heads: int
    causal: bool


def calls_of(model: Any, inputs: Mapping[str, Tensor], changes: Sequence[Change] = ()) -> tuple[Called, ...]:
    """The attention calls in a pass over the first tokens of the first inputs, each [B, N], in order.

    None if that pass fails; the full pass then reports the error. Raises `InputError` for a change of a layer, of
    heads, groups, frequencies or a bias that the model does not have.
    """
    found: list[Called] = []
    refused: list[InputError] = []
    changed = Changed(changes)

    def look(call: AttentionCall) -> None:
        found.append(Called(call.side, call.kind, call.layer, call.q.shape[1], call.causal))
        changed.note(call)
        for change in changed.of(call):
            try:
                change.heads_of(call)
                if call.unknown is None:  # more tokens may answer it
                    change.check(call)
            except InputError as error:
                refused.append(error)

    try:
        captured(model, {name: x[:_SEQUENCES, :_TOKENS] for name, x in inputs.items()}, look)
    except Exception as error:  # a model may fail in any way on so few tokens
        if out_of_memory(error):
            raise
        found = []
    if refused:
        raise refused[0]
    if found:
        changed.require_all()
    return tuple(found)


def check_predicts(loaded: Loaded, calls: Sequence[Called], what: str) -> None:
    """Refuse a model whose queries see later keys, by the calls of a short pass, if ``what`` needs a causal one."""
    if any(call.kind == "self" and not call.causal for call in calls):
        but = f"but {type(loaded.model).__name__} also sees later tokens"
        raise InputError(f"model: {what} needs causal attention, {but}.")
