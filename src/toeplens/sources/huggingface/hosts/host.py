"""A model of transformers in which position does what one of our encodings says."""

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
    """Raise `InputError` unless the model without position is blind to positions, and its attention what it was.

    With no encoding in any layer: each layer's attention, formed by ours, is what the module's own gives for the same
    queries, keys and mask; with other position ids the model says the same; and with one token in all places it says
    the same in all of them (whatever a table adds at the input shows there).
    """
    model, kind = host.model, type(host.model).__name__
    with host.without_position(), trial(model), recorded() as calls:
        inputs = anatomy.example()
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        first = run(model, inputs)
        worst = max((_apart(call.out, _own(call)) for call in calls), default=0.0)
        moved = run(model, inputs | _spread(inputs)) if _reads_tokens(model) and takes_positions else first
        even = _reads_tokens(model) and all(call.kwargs.get("s_aux") is None for call in calls)  # sinks count the keys
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
    if alike is not None and alike.ndim == 3:  # one token in all places
        told = max(told, _apart(alike, alike[:, :1].expand_as(alike)))
    if told > allowed:
        raise InputError(
            f"model: {kind} still depends on positions without its own encoding (by {told:.1e} of the largest "
            "output), so no encoding can be installed."
        )


def _own(call: Call) -> Tensor:
    """The module's own attention of the same, without what position adds."""
    kwargs = {name: value for name, value in call.kwargs.items() if name not in _ELSEWHERE}
    return plain(call.module, call.q, call.k, call.v, call.mask, **kwargs)[0]


def _spread(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other positions, in the same order; a mask says that they are of one text."""
    tokens = inputs["input_ids"]
    positions = 2 * torch.arange(tokens.shape[1], device=tokens.device)[None] + 1
    return {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}


def _reads_tokens(model: Any) -> bool:
    return model.main_input_name == "input_ids"


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(b.detach().double().abs().max())
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    return difference / size if size else difference


HOST = "toeplens_host"  # where a model carries it
MODULES = "toeplens_encodings"  # the name of our weights in its state dict, and of the entry in its configuration
MARK = "open_this_model_with_toeplens_hosts_load"  # beside our weights: transformers tells names that it does not know


class Host:
    """What `install` puts into a model, and how it is taken out.

    encodings  a module list, one a layer and side, or one for all that share it; trained and saved with the model
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
        """Put it into the model. Nothing is done where it cannot be."""
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
        """What the model's configuration says of it, from which it is made again when the model is loaded."""
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
        """Take it out of the model."""
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
        """No encoding in any layer, for a while."""
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
    """Put an encoding in the place of what position does in a model of transformers, in memory.

    The model's own rotation, bias or table of positions no longer acts; the encoding does, in training and in
    generation, with a key cache, padding on either side, packed texts and beams. New parameters start as the
    encoding has it, so a model that was trained with another must be trained on.

    Arguments
        model     a `transformers.PreTrainedModel` whose attention goes through its attention interface
        encoding  a name of `toeplens.encodings.names`, or several that act together
        layers    the layers in which it acts, from 0, those without attention not counted; the others keep what they
                  have. All unless given, also those without any position of their own (every fourth layer of SmolLM3
                  and of Cohere 2)
        max_len   places that a table must hold; the model's own number unless given
        prove     run the model on a few tokens, to see that its position has no effect any more and that attention
                  without position is what it was
        options   the encoding's own options; ``pairing`` and ``bidirectional`` are the model's unless given

    Raises `InputError` for an encoding that cannot act in this model, and for a model in which the proof fails.
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
    """Install what is installed in another model, if anything is, with parameters as they start.

    Arguments
        model  made of a copy of the other's configuration
    """
    host: Host | None = vars(other).get(HOST)
    if host is None:
        return
    for config, (_, before) in zip(configs_of(model), host._implementations, strict=True):
        config._attn_implementation_internal = before
    delattr(model.config, MODULES)
    install(model, host.name, layers=host.layers, max_len=host.max_len, prove=False, **host.options)


def uninstall(model: Any) -> None:
    """Give a model back as it was before `install`: its own position acts, nothing of ours is left."""
    host = checked_model(model).__dict__.get(HOST)
    if host is None:
        raise InputError("model: no encoding is installed.")
    host.leave()


def tied(encodings_of: nn.ModuleList) -> dict[str, str]:
    """Of parameters that layers share in part: each name but the first, and the first, as transformers has it."""
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in encodings_of.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            found[name] = first
    return found


_TOLD = 3  # names of weights that are told


def reinstall(model: Any, described: Any, files: Sequence[Path], name: str) -> None:
    """Install the encoding that a configuration describes, with its weights.

    Arguments
        described  the entry ``toeplens_encodings`` of the configuration
        files      of the checkpoint that the model's own weights are from
        name       of the model, in sentences

    Raises `InputError` for an entry that is damaged, for an encoding that cannot act in the model, and for weights that
    are not the encoding's.
    """
    entry = f"the entry {MODULES} of its configuration"
    if not isinstance(described, dict) or not _is_whole(described):
        raise InputError(f"model: {name} could not be loaded: {entry} is damaged ({shown(described)}).")
    try:
        host = install(model, prove=False, **described)
    except Exception as error:  # whatever its options make of an encoding
        if out_of_memory(error):
            raise
        raise InputError(f"model: {name} could not be loaded: {entry} does not match it ({words(error)}).") from None
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
    """Whether an entry has what `install` takes."""
    name, layers, max_len = (described.get(key) for key in ("encoding", "layers", "max_len"))
    named = isinstance(name, str) or (isinstance(name, list) and all(isinstance(each, str) for each in name))
    some = layers is None or (isinstance(layers, list) and all(type(each) is int for each in layers))
    return named and some and (max_len is None or type(max_len) is int) and not {"model", "prove"} & set(described)


def _fits(x: Tensor, known: Tensor) -> bool:
    """Whether a saved tensor can be the values of one that is there."""
    return x.shape == known.shape and x.is_floating_point() and bool(torch.isfinite(x).all())


def _weights(files: Sequence[Path]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = (name for name in opened.keys() if name.startswith(f"{MODULES}."))  # noqa: SIM118
            found |= {name.removeprefix(f"{MODULES}."): opened.get_tensor(name) for name in names}
    return found
