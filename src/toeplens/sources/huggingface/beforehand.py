"""Checks of a model before anything is measured: sequence length, next-token prediction, named layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from toeplens.ground import InputError, invalid
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.calls import AttentionCall, Kind, Side
from toeplens.sources.huggingface.capture.passes import captured
from toeplens.sources.huggingface.interventions.change import Change, Changed
from toeplens.sources.huggingface.loading import Loaded

_SEQUENCES, _TOKENS = 2, 16  # maximum size of the short pass


class Called(NamedTuple):
    """One attention call in a pass."""

    side: Side
    kind: Kind
    layer: int
    heads: int
    causal: bool


def longest(loaded: Loaded) -> int | None:
    """How many tokens the model supports; None if neither a table nor its configuration says so.

    This is the length of a table of position vectors, or ``max_position_embeddings`` of the configuration. That limit
    also holds for models with rotations, whose angles beyond it are untrained. Scaled rotations extend it by their
    factor. Models with ALiBi have no limit.
    """
    return min((limit for limit, _ in _limits(loaded)), default=None)


def check_length(loaded: Loaded, field: str, tokens: int) -> None:
    """Refuse sequences of more tokens than the model supports; ``field`` is the name of the argument."""
    for limit, said in sorted(_limits(loaded)):
        if tokens > limit:
            raise invalid(field, f"be at most {limit}, {said}", tokens)


def check_decoder(loaded: Loaded, what: str) -> None:
    """Refuse a model with an encoder if ``what`` needs one that predicts the next token."""
    if loaded.model.config.is_encoder_decoder:
        raise InputError(f"model: {what} needs a decoder-only model, but {type(loaded.model).__name__} has an encoder.")


def check_predicts(loaded: Loaded, calls: Sequence[Called], what: str) -> None:
    """Refuse a model whose queries see later keys, by the calls of a short pass, if ``what`` needs a causal one."""
    if any(call.kind == "self" and not call.causal for call in calls):
        raise InputError(
            f"model: {what} needs causal attention, but {type(loaded.model).__name__} also sees later tokens."
        )


def calls_of(model: Any, inputs: Mapping[str, Tensor], changes: Sequence[Change] = ()) -> tuple[Called, ...]:
    """The attention calls in a pass over the first tokens of the first inputs, in order.

    None if that pass fails; the full pass then reports the error.

    Arguments
        inputs   arguments of ``forward``, each [B, N]
        changes  changes that will be made; this checks that the model has their targets

    Raises `InputError` for a change of a layer, of heads, groups, frequencies or a bias that the model does not have.
    """
    found: list[Called] = []
    refused: list[InputError] = []
    changed = Changed(changes)

    def look(call: AttentionCall) -> None:
        found.append(Called(call.side, call.kind, call.layer, call.q.shape[1], call.causal))
        changed.note(call)
        for number, change in enumerate(changes):
            if change.meets(call):
                changed.met.add(number)
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


def _limits(loaded: Loaded) -> Iterator[tuple[int, str]]:
    """Limits on the number of tokens, and their origin."""
    if loaded.longest is not None:
        yield loaded.longest, "the positions of the model"
    stated = _stated(loaded.model.config)
    if stated is not None:
        yield stated, "the max_position_embeddings of the model"


def _stated(config: Any) -> int | None:
    """``max_position_embeddings`` of the configuration of a model or its decoder; None if not given."""
    try:
        text = config.get_text_config()
    except ValueError:  # several parts
        text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1 or getattr(text, "alibi", False):
        return None
    return max(limit, *(_reach(each, limit) for each in _ropes(getattr(text, "rope_parameters", None))), 0)


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The rotation settings, or those of each type of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        yield from (each for each in parameters.values() if isinstance(each, Mapping))


def _reach(rope: Mapping[str, Any], limit: int) -> int:
    """The length to which scaling extends the model's training length; 0 if not given.

    ``dynamic`` scaling starts beyond the configuration's limit.
    """
    first = limit if rope.get("rope_type") == "dynamic" else rope.get("original_max_position_embeddings")
    factor = rope.get("factor")
    return int(first * factor) if isinstance(first, int) and isinstance(factor, int | float) else 0
