"""Passes of a Hugging Face model in which some of its attention is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from toeplens.ground import InputError
from toeplens.sources.huggingface.capture.calls import AttentionCall, Kind, Side
from toeplens.sources.huggingface.capture.observed_pass import captured
from toeplens.sources.huggingface.capture.observer import PassObserver
from toeplens.sources.huggingface.capture.plain_pass import compared
from toeplens.sources.huggingface.interface import OBSERVER
from toeplens.sources.huggingface.interventions.change import Change
from toeplens.sources.huggingface.interventions.outputs import changed_outputs
from toeplens.sources.huggingface.model import checked_model


@contextmanager
def intervened(model: Any, changes: Sequence[Change] | Change) -> Iterator[None]:
    """Every pass of the model in it has its attention changed; afterwards the model is as it was.

    A pass is taken apart call by call, each proved on its own input as in an audit, and the outputs of the heads that
    are changed are formed from the parts (`changed_outputs`); what is not changed is the model's own. Of several
    changes of one call each must be of other heads. Passes have no gradients and no cache of keys.

    Arguments
        model    a `transformers.PreTrainedModel`
        changes  what is done; nothing with none

    A pass raises `InputError` as `captured` does; for a layer, heads or frequencies that the model does not have; and
    where what is to be changed is not there (a rotation, a bias, a positional part).
    """
    checked_model(model)
    wanted = (changes,) if isinstance(changes, Change) else tuple(changes)
    original, had = model.forward, "forward" in vars(model)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if isinstance(OBSERVER.get(), PassObserver):  # the pass that this one is made of
            return original(*args, **kwargs)
        inputs = dict(zip(inspect.signature(original).parameters, args, strict=False)) | kwargs
        changed = Changed(wanted)
        output = captured(model, inputs, changed.note, changed)
        changed.require_all()
        return output

    model.forward = forward
    try:
        yield
    finally:
        if had:
            model.forward = original
        else:
            del model.forward


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

    def __call__(self, call: AttentionCall) -> Tensor | None:
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
            made = changed_outputs(call, change)
            if found is None:
                found = made
            else:
                found[:, :, list(heads)] = made[:, :, list(heads)]
        return found

    def note(self, call: AttentionCall) -> None:
        """A call of the pass."""
        self.seen.append((call.kind, call.side))

    def require_all(self) -> None:
        """Refuse changes whose call was not met, and those that met one on each side of a model."""
        for number, change in enumerate(self.changes):
            sides = {side for kind, side in self.seen if kind == change.kind}
            if number not in self.met:
                of = [side for kind, side in self.seen if kind == change.kind and change.side in (None, side)]
                raise InputError(
                    f"layer: {change.layer} was given; there are {len(of)} calls of {change.kind} attention"
                    f"{f' on the side {change.side}' if change.side else ''}, counted from 0."
                )
            if change.side is None and len(sides) > 1:
                raise InputError("side: it was not given; this model has an encoder and a decoder.")
