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

from toeplens.backends.hf.attention import AttentionFunction, at_rows, blocks
from toeplens.backends.hf.calls import AttentionCall, AttentionKind, CallKey, Side
from toeplens.backends.hf.capture import capture_and_compare, capture_attention
from toeplens.backends.hf.load import LoadedModel
from toeplens.backends.hf.model import (
    NO_OBSERVER,
    OBSERVER,
    apply_entries,
    error_summary,
    is_library_error,
    require_pretrained,
    uncompiled_entries,
)
from toeplens.backends.hf.rotation import as_complex, phasor
from toeplens.encodings import FrequencyMask
from toeplens.lens.kit.interventions import donors
from toeplens.lens.kit.terms import NotSeparable
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.formatting import format_ranges
from toeplens.utils.machine import is_out_of_memory

_CHANGES_ATTRIBUTE = "toeplens_changes"  # attribute of a model's patched forward: the changes
_SHORT_SEQUENCES, _SHORT_TOKENS = 2, 16  # maximum size of a short pass
_DEFAULTS = {"bands": None, "speed": 1, "bias": True, "attention": None, "output": None}  # which change nothing
_MAX_SPEED = 1_000_000  # beyond this the angles of a few tokens are rounding errors
LogitPart = Literal["positional", "symbolic"]
OutputChange = Literal["zero", "mean", "resample"]


class InvalidTarget(InputError):
    """A named layer, head, group or pair does not exist; the message counts from 0, as Python does."""

    def __init__(self, field: str, value: int | list[int], count: int, where: str = "", first: int = 0) -> None:
        self.field, self.value, self.count, self.where = field, value, count, where
        indices, be = ([value], "be") if isinstance(value, int) else (value, "be different numbers")
        indices = [index + first for index in indices]
        distinct = len(set(indices)) == len(indices)
        listing = (format_ranges(indices) if distinct else ", ".join(map(str, indices))) if first else str(value)
        must = f"must {be} from {first} to {count - 1 + first}{f' in {where}' * bool(where)}, got {listing or 'none'}."
        super().__init__(f"{field} {must}" if count else f"{field}: the model has no {where}.")

    def counted_from_one(self, field: str | None = None) -> InvalidTarget:
        """The same, counted from 1; with the name that people know the field by, if it is another."""
        return type(self)(field or self.field, self.value, self.count, self.where, 1)


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
               (`toeplens.encodings.FrequencyMask`, whose own heads must not be set)
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
    kind: AttentionKind = "self"
    side: Side | None = None
    bands: FrequencyMask | None = None
    speed: float = 1.0
    bias: bool = True
    attention: LogitPart | None = None
    output: OutputChange | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        choose("kind", self.kind, get_args(AttentionKind))
        for name, options in (("side", Side), ("attention", LogitPart), ("output", OutputChange)):
            if (value := getattr(self, name)) is not None:
                choose(name, value, get_args(options))
        for name in ("heads", "groups"):
            if not isinstance(getattr(self, name), Collection | None):
                raise invalid(name, "be whole numbers in a tuple", getattr(self, name))
        if self.heads is not None and self.groups is not None:
            raise InputError("heads and groups must not both be set.")
        if self.bands is not None and self.bands.heads is not None:
            raise InputError("bands must not have heads. Set heads or groups of the change.")
        if not abs(self.speed) <= _MAX_SPEED:
            raise invalid("speed", f"be from -{_MAX_SPEED} to {_MAX_SPEED}", self.speed)
        if self.seed < 0:
            raise invalid("seed", "be at least 0", self.seed)
        set_fields = [name for name, default in _DEFAULTS.items() if getattr(self, name) != default]
        if not set_fields:
            raise InputError("bands, speed, bias, attention or output must be set.")
        logits = [name for name in set_fields if name in ("bands", "speed", "bias")]
        if len(set_fields) > max(1, len(logits)):
            first = self._rotation_field if set_fields[0] == "bands" else set_fields[0]
            raise InputError(f"{first} and {set_fields[-1]} must not both be set.")

    @property
    def changes_rotation(self) -> bool:
        """Whether the rotation is changed."""
        return self.bands is not None or self.speed != 1

    @property
    def _rotation_field(self) -> str:
        if self.bands is None:
            return "speed"
        return next((name for name in ("freeze", "drop", "permute") if getattr(self.bands, name)), "bands")

    def applies_to(self, call: AttentionCall) -> bool:
        """Whether the change applies to this call."""
        return self.layer == call.layer and self.applies_to_side(call.kind, call.side)

    def applies_to_side(self, kind: AttentionKind, side: Side) -> bool:
        """Whether the change applies to calls of this kind and side."""
        return kind == self.kind and self.side in (None, side)

    def layer_error(self, count: int) -> InvalidTarget:
        """The error if the model has only ``count`` calls of this kind and side."""
        on = f" on the side {self.side}" if self.side else ""
        return InvalidTarget("layer", self.layer, count, f"{self.kind} attention{on}")

    def heads_of(self, call: AttentionCall) -> tuple[int, ...]:
        """The changed query heads. Raises `InputError` for heads that the call does not have."""
        heads, groups = call.q.shape[1], call.k.shape[1]
        if self.groups is not None:
            _check_indices(self.groups, "groups", groups, call.module)
            size = heads // groups
            return tuple(head for group in self.groups for head in range(group * size, (group + 1) * size))
        if self.heads is not None:
            _check_indices(self.heads, "heads", heads, call.module)
        return tuple(range(heads)) if self.heads is None else self.heads

    def check(self, call: AttentionCall) -> None:
        """Raise an `InputError` that names the module if the call does not have what is to be changed."""
        if self.changes_rotation:
            pairs = pairs_of(call, self._rotation_field)
            for field in ("freeze", "drop"):
                if pair_indices := getattr(self.bands, field, ()):
                    _check_indices(pair_indices, field, pairs, call.module)
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
                call.behaviour_arguments()
            except NotSeparable as error:
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


def _check_indices(indices: Sequence[int], field: str, count: int, where: str) -> None:
    if sorted(set(indices)) != sorted(indices) or not all(0 <= index < count for index in indices) or not indices:
        raise InvalidTarget(field, list(indices), count, where)


def token_mask(call: AttentionCall) -> Bool[Tensor, "B N"]:
    """Which queries of a self-attention are tokens: those whose key some query sees. The others are padding.

    Raises `InputError` if this is not known, as for XLNet, whose padding sees itself.
    """
    batch, queries, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    consequence = "so tokens cannot be resampled or averaged"
    if call.kind == "cross" or (call.visible is not None and queries != keys):
        raise InputError(f"output: padding among the queries of {call.module} is unknown, {consequence}.")
    if call.visible is None:
        return torch.ones(batch, queries, dtype=torch.bool, device=call.q.device)
    positions = torch.arange(keys, device=call.q.device)
    is_visible, is_seen_by_others = torch.zeros(2, len(call.visible), keys, dtype=torch.bool, device=positions.device)
    for block in blocks(queries, len(call.visible) * call.visible.shape[1] * keys):
        later = positions - positions[block].unsqueeze(-1)
        visible = at_rows(call.visible, positions[block]).any(1)
        if call.causal:
            visible = visible & (later <= 0)
        is_visible |= visible.any(1)
        is_seen_by_others |= (visible & (later != 0)).any(1)
    if call.causal:  # only the last query of all, or of a chunk, sees these
        is_seen_by_others |= (positions == keys - 1) | ((positions + 1) % (call.chunk or keys) == 0)
    if keys > 1 and bool(is_visible.all()) and not bool(is_seen_by_others.all()):
        raise InputError(f"output: a token of {call.module} may be padding, {consequence}.")
    return is_visible.expand(batch, -1)


def changed_outputs(
    call: AttentionCall, change: Change, is_token: Bool[Tensor, "B Nq"] | None = None
) -> Float[Tensor, "B Nq H dv"]:
    """All heads' outputs with the change; in float32, or the model's own dtype if wider.

    ``is_token`` says which queries are tokens, not padding; cross-attention does not know it (default: `token_mask`).
    """
    heads = list(change.heads_of(call))
    change.check(call)
    outputs = call.heads.to(torch.promote_types(call.heads.dtype, torch.float32)).clone()
    if change.output == "zero":
        outputs[:, :, heads] = 0
    elif change.output is not None:
        is_token = token_mask(call) if is_token is None else is_token
        outputs[:, :, heads] = _replaced_outputs(outputs[:, :, heads], change, is_token)
    else:
        outputs[:, :, heads] = _recomputed_outputs(call, change, heads).to(outputs.dtype)
    return outputs


def with_changed_logits(call: AttentionCall, change: Change) -> AttentionCall:
    """The call with the queries, keys per query head, and bias that result from ``bands``, ``speed`` or ``bias``."""
    change.check(call)
    heads, count = list(change.heads_of(call)), call.q.shape[1]
    q, k = call.q.clone(), call.k.repeat_interleave(count // call.k.shape[1], 1)
    if change.changes_rotation:
        q[:, heads] = _rotate_changed(call, change, 0, heads).to(q.dtype)
        k[:, heads] = _rotate_changed(call, change, 1, _key_heads(call, heads)).to(k.dtype)
    bias = call.bias
    if bias is not None and not change.bias:
        bias = bias.expand(-1, count, -1, -1).clone()
        bias[:, heads] = 0
    return replace(call, q=q, k=k, bias=bias)


def _replaced_outputs(
    outputs: Float[Tensor, "B Nq h dv"], change: Change, is_token: Bool[Tensor, "B Nq"]
) -> Float[Tensor, "B Nq h dv"]:
    """Means and outputs of other sequences; padding is not used and not changed."""
    tokens = is_token[:, :, None, None]
    if change.output == "mean":
        mean = outputs.where(tokens, 0).sum(0, keepdim=True) / tokens.sum(0, keepdim=True).clamp_min(1)
        return torch.where(tokens, mean, outputs)
    donor_rows = torch.from_numpy(donors(is_token.sum(1).cpu().numpy(), change.seed)).to(outputs.device)
    if bool((is_token & ~is_token[donor_rows]).any()):
        condition = "if the batch has no other sequence of at least the same length"
        raise InputError(f"output must not be 'resample' {condition}.")
    return torch.where(tokens, outputs[donor_rows], outputs)


def _recomputed_outputs(call: AttentionCall, change: Change, heads: list[int]) -> Float[Tensor, "B Nq h dv"]:
    options = {name: getattr(call, name) for name in ("scale", "softcap", "causal")}
    for name in ("bias", "visible", "factor"):
        x = getattr(call, name)
        options[name] = x[:, heads] if x is not None and x.shape[1] > 1 else x
    options["bias"] = options["bias"] if change.bias else None
    key_heads = _key_heads(call, heads)
    q, k, sinks = call.q[:, heads], call.k[:, key_heads], None if call.sinks is None else call.sinks[heads]
    v = call.v[:, [head // (call.q.shape[1] // call.v.shape[1]) for head in heads]]
    if change.changes_rotation:
        q, k = _rotate_changed(call, change, 0, heads), _rotate_changed(call, change, 1, key_heads)
    parts = AttentionFunction(q=q, k=k, v=v, sinks=sinks, **options)
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    logits = partial(parts.logits, dtype=dtype)
    if change.attention is not None:
        logits = _part_logits(call, heads, parts, change.attention, dtype)
    outputs = []
    for block in blocks(parts.q.shape[2], parts.q.shape[0] * parts.q.shape[1] * parts.k.shape[2]):
        rows = torch.arange(block.start, block.stop, device=parts.q.device)
        weights = parts.softmax(logits(rows), rows).nan_to_num(nan=0.0)
        outputs.append((weights @ parts.v.to(dtype)).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _key_heads(call: AttentionCall, heads: list[int]) -> list[int]:
    return [head // (call.q.shape[1] // call.k.shape[1]) for head in heads]


def _rotate_changed(call: AttentionCall, change: Change, index: int, heads: list[int]) -> Float[Tensor, "B h N d"]:
    """Queries (0) or keys (1) of these heads under the changed rotation."""
    rotation = call.rotation
    assert call.unrotated is not None
    assert rotation is not None
    before, after = call.unrotated[index][:, heads].double(), (call.q, call.k)[index][:, heads].double()
    factors = phasor(change.speed * call.positions.double().unsqueeze(-1) * rotation.frequencies).unsqueeze(1)
    if change.bands is not None:
        factors = torch.complex(*change.bands.mask_tables(factors.real, factors.imag, 1))
    rotated = rotation.magnitudes * factors * as_complex(before, rotation.pairs)
    after[..., rotation.after[:, 0]], after[..., rotation.after[:, 1]] = rotated.real, rotated.imag
    return after


def _part_logits(
    call: AttentionCall, heads: list[int], parts: AttentionFunction, part: LogitPart, dtype: torch.dtype
) -> Callable[[Int[Tensor, "R"]], Float[Tensor, "B h R K"]]:
    """The logits of some queries, of one part plus the mean: with means over contents or positions instead of each."""
    fixed_q, fixed_k = parts.q.to(dtype), parts.k.to(dtype)  # the dimensions that are not rotated
    q = k = torch.empty(*fixed_q.shape[:-1], 0, dtype=dtype.to_complex(), device=fixed_q.device)
    factors = q[:, :1]
    if call.rotation is not None and call.unrotated is not None:
        rotation, before = call.rotation, (call.unrotated[0][:, heads], call.unrotated[1][:, _key_heads(call, heads)])
        is_fixed = torch.ones(fixed_q.shape[-1], dtype=torch.bool, device=fixed_q.device)
        is_fixed[rotation.after.flatten()] = False
        fixed_q, fixed_k = fixed_q[..., is_fixed], fixed_k[..., is_fixed]
        q, k = (as_complex(x.to(dtype), rotation.pairs) for x in before)
        factors = rotation.magnitudes * phasor(call.positions.double().unsqueeze(-1) * rotation.frequencies)
        factors = factors.unsqueeze(1).to(q.dtype)

    def logits(rows: Int[Tensor, "R"]) -> Float[Tensor, "B h R K"]:
        full_logits = parts.logits(rows, dtype=dtype)
        is_visible = full_logits.isfinite()
        share = is_visible.to(dtype) / is_visible.sum(-1, keepdim=True).clamp_min(1)
        exact, averaged = (factors, k) if part == "positional" else (k, factors)
        mean = torch.complex(share @ averaged.real, share @ averaged.imag)
        a = q.index_select(2, rows) * factors.index_select(2, rows) * mean.conj()
        result = a.real @ exact.real.transpose(-2, -1) + a.imag @ exact.imag.transpose(-2, -1)
        fixed = fixed_q[:, :, rows]
        if part == "positional":
            result = result + (fixed * (share @ fixed_k)).sum(-1, keepdim=True)
        else:
            result = result + fixed @ fixed_k.transpose(-2, -1)
        result = parts.scale * result
        if parts.softcap is not None:
            result = parts.softcap * (result / parts.softcap).tanh()
        if parts.bias is not None:
            bias = at_rows(parts.bias, rows).to(dtype)
            result = result + (bias if part == "positional" else (share * bias).sum(-1, keepdim=True))
        return result.masked_fill(~is_visible, -torch.inf)

    return logits


def outputs_without_position(
    model: Any, inputs: Mapping[str, Any], keys: Collection[CallKey]
) -> dict[CallKey, Float[Tensor, "B Nq H dv"]]:
    """All heads' outputs with frozen rotation and without bias, for calls by side, kind and layer.

    Calls without rotation and bias, or with an unknown rotation, are left out. Earlier layers, and vectors added at the
    input, which belong to no head, are not changed.
    """
    outputs: dict[CallKey, Tensor] = {}

    def collect(call: AttentionCall) -> None:
        if call.key in keys and call.unknown is None and (call.rotation is not None or call.bias is not None):
            speed, bias = 1.0 if call.rotation is None else 0.0, call.bias is None
            change = Change(layer=call.layer, kind=call.kind, side=call.side, speed=speed, bias=bias)
            outputs[call.key] = changed_outputs(call, change).to(call.heads.dtype)

    capture_attention(model, inputs, collect)
    return outputs


@contextmanager
def intervene(model: Any, changes: Sequence[Change] | Change) -> Iterator[None]:
    """Context manager that changes the attention in every pass of the model, and restores the model afterwards.

    Each attention call is decomposed and verified on its own input as in an audit, and the outputs of the changed heads
    are computed from the parts (`changed_outputs`); all others are the model's own. Several changes of one call must
    affect different heads. Nested contexts combine their changes. Passes have no gradients and no key cache, return no
    attention weights, and run compiled models uncompiled.

    Arguments
        model    a `transformers.PreTrainedModel`
        changes  the changes; may be empty

    A pass raises `InputError` as `capture_attention` does, if what is to be changed does not exist (a layer, heads, a
    bias), for ``output_attentions``, for tokens or positions without vectors, and if it is run inside another captured
    or changed pass.
    """
    require_pretrained(model)
    active: list[tuple[Change, ...]] | None = getattr(vars(model).get("forward"), _CHANGES_ATTRIBUTE, None)
    new_changes = (changes,) if isinstance(changes, Change) else tuple(changes)
    with _patched_forward(model) if active is None else nullcontext(active) as active:
        active.append(new_changes)
        try:
            yield
        finally:
            active.remove(new_changes)


@contextmanager
def _patched_forward(model: Any) -> Iterator[list[tuple[Change, ...]]]:
    """Patch the model's forward so that the changes in the returned list apply to its passes."""
    original, was_patched = model.forward, "forward" in vars(model)
    active: list[tuple[Change, ...]] = []
    running: list[ChangedOutputs] = []

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        observer = OBSERVER.get()
        if getattr(observer, "replace_heads", None) in running:  # this pass implements a changed one
            return original(*args, **kwargs)
        if observer is not NO_OBSERVER:
            location = "inside another pass that is analyzed or changed. Give the changes to that pass"
            raise InputError(f"model: {type(model).__name__} must not run with `intervene` {location}.")
        inputs = dict(zip(inspect.signature(original).parameters, args, strict=False)) | kwargs
        if any(active) and inputs.get("output_attentions"):
            raise InputError("output_attentions must not be set inside `intervene`, which has no changed weights.")
        changed = ChangedOutputs(list(chain(*active)))
        running.append(changed)
        try:
            output = capture_attention(model, inputs, changed.add_call, changed)
        except (IndexError, RuntimeError) as error:  # a position or token may have no vector
            length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
            limit = LoadedModel(model).position_vectors
            if is_library_error(error) and limit is not None and length > limit:
                must = f"have at most {limit} tokens, the positions of the model"
                raise invalid("inputs", must, length) from error
            if is_library_error(error) and isinstance(error, IndexError):
                reason = f"the model has no vector for one of the tokens or positions ({error_summary(error)})"
                raise InputError(f"inputs: {reason}.") from error
            raise
        finally:
            running.remove(changed)
        changed.check_applied()
        return output

    setattr(forward, _CHANGES_ATTRIBUTE, active)
    model.forward = forward
    try:
        with apply_entries(uncompiled_entries()):
            yield active
    finally:
        if was_patched:
            model.forward = original
        else:
            del model.forward


def capture_changed(
    model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None], changes: Sequence[Change]
) -> float:
    """`capture_and_compare` of the intact model, then a pass of the changed one, with its calls to ``on_layer``.

    Each call reads the output of the changed calls before it; its own parts are passed on as before its change. A
    changed model has no plain pass to compare with, so the distance is the intact one's.
    """
    difference, changed = capture_and_compare(model, inputs, lambda call: None), ChangedOutputs(changes)

    def report(call: AttentionCall) -> None:
        changed.add_call(call)
        on_layer(call)

    capture_attention(model, inputs, report, changed)
    changed.check_applied()
    return difference


@dataclass(eq=False)
class ChangedOutputs:
    """Outputs of the calls of one pass under the changes: the argument ``replace_heads`` of `capture_attention`."""

    changes: Sequence[Change]
    call_types: list[tuple[AttentionKind, Side]] = field(default_factory=list)
    applied: set[int] = field(default_factory=set)
    is_token: Tensor | None = None  # tokens of the last self-attention that are not padding, for cross-attention

    def __call__(self, call: AttentionCall) -> Tensor | None:
        needs_tokens = any(change.kind == "cross" and change.output in ("mean", "resample") for change in self.changes)
        if needs_tokens and call.kind == "self":
            self.is_token = token_mask(call)
        has_tokens = call.kind == "cross" and self.is_token is not None and self.is_token.shape == call.heads.shape[:2]
        outputs, changed_heads = None, set[int]()
        for change in self.changes_of(call):
            heads = change.heads_of(call)
            if repeated := changed_heads & set(heads):
                raise InputError(f"changes must not change head {min(repeated)} of {call.module} twice.")
            changed_heads |= set(heads)
            new_outputs = changed_outputs(call, change, self.is_token if has_tokens else None)
            outputs = new_outputs if outputs is None else outputs
            outputs[:, :, list(heads)] = new_outputs[:, :, list(heads)]
        return outputs

    def changes_of(self, call: AttentionCall) -> Iterator[Change]:
        """The changes of a call."""
        for number, change in enumerate(self.changes):
            if change.applies_to(call):
                self.applied.add(number)
                yield change

    def add_call(self, call: AttentionCall) -> None:
        """A call of the pass."""
        self.call_types.append((call.kind, call.side))

    def check_applied(self) -> None:
        """Refuse changes whose call does not occur, or occurs on both sides of a model."""
        for number, change in enumerate(self.changes):
            if change.side is None and len({side for kind, side in self.call_types if kind == change.kind}) > 1:
                raise InputError("side must be set for a model with an encoder and a decoder.")
            if number not in self.applied:
                raise change.layer_error(sum(change.applies_to_side(*call_type) for call_type in self.call_types))


class CallInfo(NamedTuple):
    """One attention call in a pass."""

    side: Side
    kind: AttentionKind
    layer: int
    heads: int
    causal: bool


def find_calls(model: Any, inputs: Mapping[str, Tensor], changes: Sequence[Change] = ()) -> tuple[CallInfo, ...]:
    """The attention calls in a pass over the first tokens of the first inputs, each [B, N], in order.

    None if that pass fails; the full pass then reports the error. Raises `InputError` for a change of a layer, of
    heads, groups, frequencies or a bias that the model does not have.
    """
    calls: list[CallInfo] = []
    errors: list[InputError] = []
    changed = ChangedOutputs(changes)

    def record(call: AttentionCall) -> None:
        calls.append(CallInfo(call.side, call.kind, call.layer, call.q.shape[1], call.causal))
        changed.add_call(call)
        for change in changed.changes_of(call):
            try:
                change.heads_of(call)
                if call.unknown is None:  # more tokens may answer it
                    change.check(call)
            except InputError as error:
                errors.append(error)

    try:
        capture_attention(model, {name: x[:_SHORT_SEQUENCES, :_SHORT_TOKENS] for name, x in inputs.items()}, record)
    except Exception as error:  # a model may fail in any way on so few tokens
        if is_out_of_memory(error):
            raise
        calls = []
    if errors:
        raise errors[0]
    if calls:
        changed.check_applied()
    return tuple(calls)


def check_causal(loaded: LoadedModel, calls: Sequence[CallInfo], feature: str) -> None:
    """Refuse a model whose queries see later keys, by the calls of a short pass, if ``feature`` needs a causal one."""
    if any(call.kind == "self" and not call.causal for call in calls):
        but = f"but {type(loaded.model).__name__} also sees later tokens"
        raise InputError(f"model: {feature} needs causal attention, {but}.")
