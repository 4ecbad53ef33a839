"""Passes of a Hugging Face model in which some of its attention is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import chain
from typing import Any

from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.capture.calls import AttentionCall, Kind, Side
from toeplens.sources.huggingface.capture.passes import captured, compared
from toeplens.sources.huggingface.interface import NOBODY, OBSERVER
from toeplens.sources.huggingface.interventions.change import Change, changed_outputs, tokens_of
from toeplens.sources.huggingface.loading import Loaded
from toeplens.sources.huggingface.model import checked_model, of_libraries, words

_HELD = "toeplens_changes"  # of a model's forward that changes its passes: by what
_Held = list[tuple[Change, ...]]


@contextmanager
def intervened(model: Any, changes: Sequence[Change] | Change) -> Iterator[None]:
    """Every pass of the model in it has its attention changed; afterwards the model is as it was.

    A pass is taken apart call by call, each proved on its own input as in an audit, and the outputs of the heads that
    are changed are formed from the parts (`changed_outputs`); what is not changed is the model's own. Of several
    changes of one call each must be of other heads. One in another is as one with the changes of both. Passes have no
    gradients and no cache of keys.

    Arguments
        model    a `transformers.PreTrainedModel`
        changes  what is done; nothing with none

    A pass raises `InputError` as `captured` does; for a layer, heads or frequencies that the model does not have; where
    what is to be changed is not there (a rotation, a bias, a positional part); for tokens or places that it has no
    vectors for; and where it is run in another pass that is taken apart or changed.
    """
    checked_model(model)
    held: _Held | None = getattr(vars(model).get("forward"), _HELD, None)
    wanted = (changes,) if isinstance(changes, Change) else tuple(changes)
    with _changing(model) if held is None else nullcontext(held) as held:
        held.append(wanted)
        try:
            yield
        finally:
            held.remove(wanted)


@contextmanager
def _changing(model: Any) -> Iterator[_Held]:
    """Passes of the model are changed by what is in the list that is given."""
    original, had = model.forward, "forward" in vars(model)
    held: _Held = []
    running: list[Changed] = []

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        observer = OBSERVER.get()
        if getattr(observer, "instead", None) in running:  # the pass that this one is made of
            return original(*args, **kwargs)
        if observer is not NOBODY:
            raise InputError(
                f"model: {type(model).__name__}, which `intervened` changes, is run in a pass that is itself taken "
                "apart or changed; the changes must be given to that one."
            )
        inputs = dict(zip(inspect.signature(original).parameters, args, strict=False)) | kwargs
        changed = Changed(list(chain(*held)))
        running.append(changed)
        try:
            output = captured(model, inputs, changed.note, changed)
        except (IndexError, RuntimeError) as error:
            unfit = _unfit(model, inputs, error) if of_libraries(error) else None
            if unfit is None:
                raise
            raise unfit from error
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


def _unfit(model: Any, inputs: Mapping[str, Any], error: Exception) -> InputError | None:
    """What to say of a pass in which a table of vectors had no such place or token; None of one that failed else."""
    length = max((x.shape[1] for x in inputs.values() if isinstance(x, Tensor) and x.ndim > 1), default=0)
    limit = Loaded(model).longest
    if limit is not None and length > limit:
        return InputError(f"inputs: {length} tokens were given; the model has positions for {limit}.")
    if isinstance(error, IndexError):
        return InputError(f"inputs: the model has no vector for a token or a place in them ({words(error)}).")
    return None


def compared_changed(
    model: Any, inputs: Mapping[str, Any], on_layer: Callable[[AttentionCall], None], changes: Sequence[Change]
) -> float:
    """`compared` of the intact model, and a pass of the changed one, whose calls are handed over.

    Each reads what the changed ones before it put out. What a call that is changed hands over is its own, as if it were
    not. A changed model has no plain pass: the distance is the intact one's.
    """
    whole = compared(model, inputs, lambda call: None)
    changed = Changed(changes)

    def look(call: AttentionCall) -> None:
        changed.note(call)
        on_layer(call)

    captured(model, inputs, look, changed)
    changed.require_all()
    return whole


class Changed:
    """What the calls of one pass put out under the changes: the ``instead`` of `captured`."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes
        self.seen: list[tuple[Kind, Side]] = []
        self.met: set[int] = set()
        self.there: Tensor | None = None  # which tokens of the last self attention are no padding
        self.asked = any(change.kind == "cross" and change.output in ("mean", "resample") for change in changes)

    def __call__(self, call: AttentionCall) -> Tensor | None:
        if self.asked and call.kind == "self":
            self.there = tokens_of(call)
        found, taken = None, set[int]()
        for number, change in enumerate(self.changes):
            if not change.meets(call):
                continue
            self.met.add(number)
            heads = change.heads_of(call)
            again = sorted(taken & set(heads))
            if again:
                raise InputError(f"changes: head {again[0]} of {call.module} is changed twice; once is allowed.")
            taken |= set(heads)
            made = changed_outputs(call, change, self._tokens(call))
            if found is None:
                found = made
            else:
                found[:, :, list(heads)] = made[:, :, list(heads)]
        return found

    def _tokens(self, call: AttentionCall) -> Tensor | None:
        """Which queries of a cross attention are no padding: those of the self attention before it."""
        fits = call.kind == "cross" and self.there is not None and self.there.shape == call.heads.shape[:2]
        return self.there if fits else None

    def note(self, call: AttentionCall) -> None:
        """A call of the pass."""
        self.seen.append((call.kind, call.side))

    def require_all(self) -> None:
        """Refuse changes whose call was not met, and those that met one on each side of a model."""
        for number, change in enumerate(self.changes):
            if change.side is None and len({side for kind, side in self.seen if kind == change.kind}) > 1:
                raise InputError("side: it was not given; this model has an encoder and a decoder.")
            if number not in self.met:
                raise change.no_layer(sum(change.of_side(*each) for each in self.seen))
