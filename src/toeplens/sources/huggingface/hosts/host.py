"""A transformers model whose position information comes from an installed encoding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import PositionalEncoding
from toeplens.encodings.absolute import NoPE
from toeplens.ground import InputError, shown
from toeplens.ground.machine import out_of_memory
from toeplens.ground.options import must_be
from toeplens.sources.huggingface.hosts.anatomy import Anatomy, Found, run, trial
from toeplens.sources.huggingface.hosts.passes import Stack
from toeplens.sources.huggingface.hosts.seat import BEFORE, Call, Seat, plain, recorded, register
from toeplens.sources.huggingface.model import NAME, checked_model, configs_of, words

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_ELSEWHERE = ("position_bias", "position_embeddings")


def prove_host(host: Any, anatomy: Anatomy) -> None:
    """Raise `InputError` unless the model without position ignores positions and its attention is unchanged.

    Three checks without an encoding in any layer. Each layer's attention, computed by toeplens, equals the module's own
    for the same queries, keys and mask. Other position ids give the same output. With one token at all positions, the
    outputs are the same at all of them (this detects tables added at the input).
    """
    model, kind = host.model, type(host.model).__name__
    with host.without_position(), trial(model), recorded() as calls:
        inputs = anatomy.example()
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        first = run(model, inputs)
        worst = max((_apart(call.out, _own(call)) for call in calls), default=0.0)
        moved = run(model, inputs | _spread(inputs)) if _reads_tokens(model) and takes_positions else first
        even = _reads_tokens(model) and all(call.kwargs.get("s_aux") is None for call in calls)  # sinks see lengths
        alike = run(model, {name: torch.full_like(x, 3) for name, x in inputs.items()}) if even else None
    allowed = TOLERANCES.get(first.dtype, 5e-2)
    if worst > allowed:
        raise InputError(
            f"model: attention of {kind} does more than queries, keys and mask say (error {worst:.1e} of the largest "
            f"output, allowed {allowed:.0e}), so no encoding can be installed."
        )
    if host.layers is not None:
        return
    told = _apart(moved, first)
    if alike is not None and alike.ndim == 3:  # one token at all positions
        told = max(told, _apart(alike, alike[:, :1].expand_as(alike)))
    if told > allowed:
        raise InputError(
            f"model: {kind} still depends on positions without its own encoding (by {told:.1e} of the largest "
            "output), so no encoding can be installed."
        )


def _own(call: Call) -> Tensor:
    """The module's own attention on the same inputs, without the part added by position."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in _ELSEWHERE}
    return plain(call.module, call.q, call.k, call.v, call.mask, **kwargs)[0]


def _spread(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other positions in the same order, with a mask that makes them one sequence."""
    tokens = inputs["input_ids"]
    positions = 2 * torch.arange(tokens.shape[1], device=tokens.device)[None] + 1
    return {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}


def _reads_tokens(model: Any) -> bool:
    return model.main_input_name == "input_ids"


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(b.detach().double().abs().max())
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    return difference / size if size else difference


HOST = "toeplens_host"  # attribute of the model
MODULES = "toeplens_encodings"  # name of the encodings' weights in the state dict, and of the configuration entry
MARK = "open_this_model_with_toeplens_hosts_load"  # extra weight name, which transformers reports as unknown


class Host:
    """An encoding installed in a model, and the means to uninstall it.

    encodings  a module list, one per layer and side, or one shared by all; trained and saved with the model
    """

    def __init__(
        self, model: Any, name: str, layers: Sequence[int] | None, max_len: int | None, options: dict[str, Any]
    ) -> None:
        self.model, self.name, self.layers, self.max_len, self.options = model, name, layers, max_len, options
        self.encodings = nn.ModuleList()
        self.encodings.register_buffer(MARK, torch.ones(1, dtype=torch.uint8))
        self.seats: list[tuple[nn.Module, Seat]] = []
        self.stacks: list[Stack] = []
        self._asking: list[nn.Module] = []
        self._implementations = [(config, config._attn_implementation_internal) for config in configs_of(model)]

    def enter(self, anatomy: Anatomy) -> None:
        """Put the encoding into the model. Does nothing if that fails."""
        first = [found.build(self.name, self.options) for found in anatomy.sides]
        for found, encoding in zip(anatomy.sides, first, strict=True):
            self._check(found, encoding)
        register()
        self._asking = anatomy.asking
        for found, encoding in zip(anatomy.sides, first, strict=True):
            self._settle(found, encoding)
        for module in self._asking:
            module.__dict__[BEFORE] = module.config._attn_implementation_internal  # type: ignore[union-attr]
        for config, _ in self._implementations if self._asking else ():
            config._attn_implementation_internal = NAME
        self.encodings._tied_weights_keys = tied(self.encodings)  # type: ignore[assignment]
        self.model.add_module(MODULES, self.encodings.train(self.model.training).to(self.model.device))
        self.model.__dict__[HOST] = self
        setattr(self.model.config, MODULES, self.described())

    def described(self) -> dict[str, Any]:
        """The entry in the model's configuration from which the encoding is restored on loading."""
        layers = None if self.layers is None else list(self.layers)
        return {"encoding": self.name, "layers": layers, "max_len": self.max_len, **self.options}

    def _check(self, found: Found, encoding: PositionalEncoding) -> None:
        if self.layers is None:
            return
        if not self.layers:
            raise InputError("layers must have at least one layer, got []. Omit it for all layers.")
        whole = len(self.layers) == len(found.modules)
        if not whole and (encoding.overrides("embed") or found.tables):
            what = "its vectors enter" if encoding.overrides("embed") else "the model's own positions enter"
            raise InputError(f"layers must not be set: {what} at the input of all layers, got {list(self.layers)}.")

    def _settle(self, found: Found, first: PositionalEncoding) -> None:
        asks = NAME if self._asking else None
        told = {"carries": any(found.reached), "causal": found.causal, "asks": asks, "name": self.name}
        stack = Stack(found.stack, first, found.tables, **told)
        self.stacks.append(stack)
        for layer in range(len(found.modules)) if self.layers is None else self.layers:
            encoding = first.for_layer(layer).to(device=self.model.device, dtype=self.model.dtype)
            if not any(encoding is known for known in self.encodings):
                self.encodings.append(encoding)
            told = {"around": found.reached[layer], "turns": found.turns[layer]}
            self.seats.append((found.modules[layer], Seat(found.modules[layer], stack, layer, encoding, **told)))

    def leave(self) -> None:
        """Remove the encoding from the model."""
        for module, seat in self.seats:
            seat.leave(module)
        for stack in self.stacks:
            stack.leave()
        for module in self._asking:
            module.__dict__.pop(BEFORE, None)
        for config, before in self._implementations:
            config._attn_implementation_internal = before
        self.model.__dict__.pop(HOST, None)
        for holder in (self.model, self.model.config):
            with suppress(AttributeError):
                delattr(holder, MODULES)

    @contextmanager
    def without_position(self) -> Iterator[None]:
        """Temporarily without an encoding in any layer."""
        places = [*(seat for _, seat in self.seats), *self.stacks]
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
    """Replace the positional encoding of a transformers model, in memory.

    The encoding replaces the model's own rotation, bias or position table, in training and in generation, with key
    caches, padding on either side, packed sequences and beams. New parameters have the encoding's initial values, so a
    model that was trained with another encoding must be trained further.

    Arguments
        model     a `transformers.PreTrainedModel` that uses transformers' attention interface
        encoding  a name from `toeplens.encodings.names`, or several that act together
        layers    the layers in which it acts, counted from 0 over the layers with attention; the others keep their
                  encoding (default: all, including layers without position, such as every fourth layer of SmolLM3 and
                  Cohere 2)
        max_len   number of positions that a table must have (default: the model's own)
        prove     run the model on a few tokens to check that its own position has no effect any more and that its
                  attention without position is unchanged
        options   the encoding's own options; ``pairing`` and ``bidirectional`` default to the model's

    Raises `InputError` for an encoding that cannot be installed in this model, and if a check fails.
    """
    if HOST in checked_model(model).__dict__:
        raise InputError("model: an encoding is already installed. Uninstall it first.")
    must_be("prove", prove, bool)
    name = encodings.canonical(encoding)
    if any(config._attn_implementation_internal == NAME for config in configs_of(model)):
        raise InputError(
            "model: its configuration is shared with a model that has an encoding installed. Copy the configuration."
        )
    anatomy = Anatomy(model, max_len, layers)
    host = Host(model, name, layers, max_len, options)
    try:
        host.enter(anatomy)
        if prove:
            prove_host(host, anatomy)
    except BaseException:
        host.leave()
        raise
    return host


def install_same(model: Any, other: Any) -> None:
    """Install the same encoding as in another model, if any, with initial parameters.

    Arguments
        model  built from a copy of the other's configuration
    """
    host: Host | None = vars(other).get(HOST)
    if host is None:
        return
    for config, (_, before) in zip(configs_of(model), host._implementations, strict=True):
        config._attn_implementation_internal = before
    delattr(model.config, MODULES)
    install(model, host.name, layers=host.layers, max_len=host.max_len, prove=False, **host.options)


def uninstall(model: Any) -> None:
    """Restore a model to its state before `install`, with its own positional encoding."""
    host = checked_model(model).__dict__.get(HOST)
    if host is None:
        raise InputError("model: no encoding is installed.")
    host.leave()


def tied(encodings_of: nn.ModuleList) -> dict[str, str]:
    """Names of parameters that layers share, mapped to the first name, as in transformers' tied weights."""
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in encodings_of.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            found[name] = first
    return found


_TOLD = 3  # maximum weight names in a message


def reinstall(model: Any, described: Any, files: Sequence[Path], name: str) -> None:
    """Install the encoding that a configuration describes, with its weights.

    Arguments
        described  the entry ``toeplens_encodings`` of the configuration
        files      of the checkpoint with the model's own weights
        name       the model's name for messages

    Raises `InputError` for an invalid entry, for an encoding that cannot be installed in the model, and for weights
    that are not the encoding's.
    """
    entry = f"the entry {MODULES} of its configuration"
    if not isinstance(described, dict) or not _is_whole(described):
        raise InputError(f"model: {name} could not be loaded: {entry} is damaged ({shown(described)}).")
    try:
        host = install(model, prove=False, **described)
    except Exception as error:  # an encoding may fail in any way on its options
        if out_of_memory(error):
            raise
        raise InputError(
            f"model: {name} could not be loaded: {entry} does not match the model ({words(error)})."
        ) from None
    found = _weights(files)
    found.pop(MARK, None)
    known = host.encodings.state_dict()
    needed = set(known) - set(tied(host.encodings)) - {MARK}
    wrong = sorted((needed - set(found)) | (set(found) - set(known)))
    wrong += sorted(key for key, x in found.items() if key in known and not _fits(x, known[key]))
    if wrong:
        more = f" and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise InputError(
            f"model: {name} could not be loaded: its weights do not match the encoding {host.name!r}. Missing, "
            f"unexpected, of another shape or not finite: {', '.join(wrong[:_TOLD])}{more}."
        )
    host.encodings.load_state_dict(found, strict=False)


def _is_whole(described: Mapping[str, Any]) -> bool:
    """Whether an entry has the arguments of `install`."""
    name, layers, max_len = (described.get(key) for key in ("encoding", "layers", "max_len"))
    named = isinstance(name, str) or (isinstance(name, list) and all(isinstance(each, str) for each in name))
    some = layers is None or (isinstance(layers, list) and all(type(each) is int for each in layers))
    return named and some and (max_len is None or type(max_len) is int) and not {"model", "prove"} & set(described)


def _fits(x: Tensor, known: Tensor) -> bool:
    """Whether a saved tensor fits the existing one in shape and type."""
    return x.shape == known.shape and x.is_floating_point() and bool(torch.isfinite(x).all())


def _weights(files: Sequence[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = (name for name in opened.keys() if name.startswith(f"{MODULES}."))  # noqa: SIM118
            found |= {name.removeprefix(f"{MODULES}."): opened.get_tensor(name) for name in names}
    return found
