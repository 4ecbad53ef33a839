"""A model of transformers in which position does what one of our encodings says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from toeplens import encodings
from toeplens.encodings.absolute import NoPE
from toeplens.ground import InputError
from toeplens.hosts.anatomy import Anatomy, Found
from toeplens.hosts.interface import BEFORE, NAME, register
from toeplens.hosts.seat import Seat
from toeplens.hosts.stack import Stack
from toeplens.sources.huggingface.model import checked_model, configs_of

HOST = "toeplens_host"  # where a model carries it
MODULES = "toeplens_encodings"  # the name of our weights in its state dict, and of the entry in its configuration


class Host:
    """What `install` puts into a model, and how it is taken out.

    encodings  a module list, one a layer and side, or one for all that share it; trained and saved with the model
    """

    def __init__(self, model: Any, name: str, layers: Sequence[int] | None, options: dict[str, Any], anatomy: Anatomy):
        self.model, self.name, self.layers, self.options = model, name, layers, options
        self.encodings = nn.ModuleList()
        self._seats: list[tuple[nn.Module, Seat]] = []
        self._stacks: list[Stack] = []
        self._implementations = [(config, config._attn_implementation_internal) for config in configs_of(model)]
        self._asking = anatomy.asking
        register()
        for side in anatomy.sides:
            self._settle(side)
        for module in self._asking:
            module.__dict__[BEFORE] = module.config._attn_implementation_internal  # type: ignore[union-attr]
        for config, _ in self._implementations if self._asking else ():
            config._attn_implementation_internal = NAME
        model.add_module(MODULES, self.encodings.train(model.training))
        model.__dict__[HOST] = self
        setattr(model.config, MODULES, self.described())

    def described(self) -> dict[str, Any]:
        """What the model's configuration says of it, from which `load` makes it again."""
        return {"encoding": self.name, "layers": None if self.layers is None else list(self.layers), **self.options}

    def _settle(self, found: Found) -> None:
        chosen = range(len(found.modules)) if self.layers is None else self.layers
        first = found.build(self.name, self.options)
        whole = len(chosen) == len(found.modules)
        if not whole and (first.overrides("embed") or found.tables):
            what = "its vectors enter" if first.overrides("embed") else "the model's own positions enter"
            raise InputError(f"layers: {list(chosen)} was given; {what} at the input, for all layers: leave it out.")
        stack = Stack(found.stack, first, found.tables, carries=any(found.reached), causal=found.causal)
        self._stacks.append(stack)
        for layer in chosen:
            encoding = first.for_layer(layer).to(device=self.model.device, dtype=self.model.dtype)
            if not any(encoding is known for known in self.encodings):
                self.encodings.append(encoding)
            module, around = found.modules[layer], found.reached[layer]
            self._seats.append((module, Seat(module, stack, layer, encoding, around=around, pairing=found.pairing)))

    def leave(self) -> None:
        """Take it out of the model."""
        for module, seat in self._seats:
            seat.leave(module)
        for stack in self._stacks:
            stack.leave()
        for module in self._asking:
            module.__dict__.pop(BEFORE, None)
        for config, before in self._implementations:
            config._attn_implementation_internal = before
        delattr(self.model, MODULES)
        del self.model.__dict__[HOST]
        with suppress(AttributeError):
            delattr(self.model.config, MODULES)

    @contextmanager
    def without_position(self) -> Iterator[None]:
        """No encoding in any layer, for a while."""
        places = [*(seat for _, seat in self._seats), *self._stacks]
        before = [place.encoding for place in places]
        for place in places:
            place.encoding = NoPE(**place.encoding.sizes)
        try:
            yield
        finally:
            for place, encoding in zip(places, before, strict=True):
                place.encoding = encoding


def install(
    model: Any,
    encoding: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    max_len: int | None = None,
    prove: bool = True,
    **options: Any,
) -> Host:
    """Put an encoding in the place of what position does in a model of transformers, in memory.

    The model's own rotation, bias or table of positions no longer acts; the encoding does, in training and in
    generation, with a key cache, padding on either side, packed texts and beams. New parameters start as the
    encoding has it, so a model that was trained with another must be trained on.

    Arguments
        model     a `transformers.PreTrainedModel` whose attention goes through its attention interface
        encoding  a name of `toeplens.encodings.names`, or several that act together
        layers    the layers in which it acts, from 0; the others keep what they have. All unless given
        max_len   places that a table must hold; the model's own number unless given
        prove     run the model on a few tokens, to see that its position has no effect any more and that attention
                  without position is what it was
        options   the encoding's own options; ``pairing`` and ``bidirectional`` are the model's unless given

    Raises `InputError` for an encoding that cannot act in this model, and for a model in which the proof fails.
    """
    if HOST in checked_model(model).__dict__:
        raise InputError("model: it has an encoding installed; uninstall that one first.")
    name = encodings.canonical(encoding)
    anatomy = Anatomy(model, max_len)
    if layers is not None:
        _check_layers(layers, min(len(side.modules) for side in anatomy.sides))
    host = Host(model, name, layers, options, anatomy)
    try:
        if prove:
            from toeplens.hosts.proof import prove_host

            prove_host(host, anatomy)
    except BaseException:
        host.leave()
        raise
    return host


def uninstall(model: Any) -> None:
    """Give a model back as it was before `install`: its own position acts, nothing of ours is left."""
    host = checked_model(model).__dict__.get(HOST)
    if host is None:
        raise InputError("model: it has no encoding installed.")
    host.leave()


def _check_layers(layers: Sequence[int], count: int) -> None:
    if not layers or len(set(layers)) != len(layers) or not all(0 <= layer < count for layer in layers):
        raise InputError(f"layers: {list(layers)} was given; it must be different layers from 0 to {count - 1}.")
