"""Replace the positional encoding of a transformers model by any encoding, and restore the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding
from toeplens.encodings.additive import NoPE
from toeplens.encodings.kit import require_indices, without_autocast
from toeplens.ground import InputError, shown
from toeplens.ground.machine import out_of_memory
from toeplens.ground.options import must_be
from toeplens.sources.huggingface.installed import (
    BEFORE,
    CONTEXT,
    AttentionPatch,
    StackPatch,
    own_forward,
    plain_attention,
    register,
)
from toeplens.sources.huggingface.model import (
    INSTALLED,
    NAME,
    attention_modules,
    checked_model,
    configs_of,
    of_libraries,
    rotations_of,
    tolerance,
    words,
)
from toeplens.sources.huggingface.patching import Observer, asking_for, observing, patched, table_entries

HOST = "toeplens_host"  # attribute of the model
MODULES = "toeplens_encodings"  # name of the encodings' weights in the state dict, and of the configuration entry
MARK = "open_this_model_with_toeplens_hosts_load"  # extra weight name, which transformers reports as unknown
_TOLD = 3  # maximum weight names in a message
_POSITION = ("position_bias", "position_embeddings", CONTEXT)  # arguments of an attention that contain position
_TABLES = ("wpe", "embed_positions", "position_embeddings")  # names of position tables in the supported families
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_source_positions")
_SPEECH = "wav2vec2-conformer"
ENCODED, DECODED = 5, 7  # example lengths; they differ, so that each side's attention is known by its shape


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]
    out: Tensor


class _Recorder(Observer):
    """Records the calls of attention, except those of a replaced forward."""

    pieces = True

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(
        self,
        function: Any,
        from_table: bool,
        module: nn.Module,
        q: Any,
        k: Any,
        v: Any,
        attention_mask: Any,
        **how: Any,
    ) -> Any:
        made = function(module, q, k, v, attention_mask, **how)
        if INSTALLED not in vars(module) or BEFORE in vars(module):
            self.calls.append(_Call(module, q, k, v, attention_mask, how, made[0]))
        return made


@contextmanager
def _trial(model: Any) -> Iterator[list[_Call]]:
    """Run the model's attention through the toeplens function: no gradients, dropout, cache or autocast."""
    register()
    changes = asking_for(model, NAME), table_entries([NAME])
    precise = without_autocast(next(model.parameters()))
    recorder = _Recorder()
    with patched(model, *changes), torch.no_grad(), precise, observing(recorder):
        yield recorder.calls


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's first output. Raises `InputError` if its attention cannot be replaced by another function."""
    try:
        return model(**inputs)[0]
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error) or not of_libraries(error):
            raise
        raise InputError(
            f"model: {type(model).__name__} does not run with another attention function ({words(error)}), so no "
            "encoding can be installed."
        ) from error


def _example(model: Any) -> dict[str, Tensor]:
    """An example input: one sequence of a few tokens, or a third of a second of noise for speech models."""
    draw = torch.Generator().manual_seed(0)
    if model.config.model_type == _SPEECH:
        return {"input_values": torch.randn(1, 5600, generator=draw).to(model.device, model.dtype)}
    high = max(2, int(model.config.get_text_config().vocab_size))
    names = {"input_ids": DECODED}
    if model.config.is_encoder_decoder:
        names = {"input_ids": ENCODED, "decoder_input_ids": DECODED}
    made = {name: torch.randint(high, (1, length), generator=draw) for name, length in names.items()}
    return {name: x.to(model.device) for name, x in made.items()}


@dataclass(frozen=True)
class _Side:
    """One side of a model: a stack and its self-attention, layer by layer.

    stack    the module that runs the layers
    modules  their attention
    heads, head_dim, d_model  sizes of a layer's attention
    max_len  number of positions that a table must have
    tables   modules that look up positions in a table at the input
    turns    how each layer's rotation pairs dimensions, if it is a pure rotation of queries and keys
    reached  for each attention module, itself or the module around it that receives arguments of the stack
    causal   whether attention is causal
    """

    stack: nn.Module
    modules: list[nn.Module]
    heads: int
    head_dim: int
    d_model: int
    max_len: int
    tables: list[nn.Module]
    turns: list[str | None]
    reached: list[nn.Module | None]
    causal: bool

    def build(self, name: str | Sequence[str], options: dict[str, Any]) -> PositionalEncoding:
        """The encoding for this side; ``pairing`` and ``bidirectional`` default to the model's own."""
        sizes = {"d_model": self.d_model, "num_heads": self.heads, "head_dim": self.head_dim, "max_len": self.max_len}
        parts = encodings.named(name)
        if len(parts) == 1:
            options = self._own(parts[0]) | options
        else:
            options = options | {part: self._own(part) | dict(options.get(part, {})) for part in parts}
        made = encodings.build(name, **sizes, **options)
        if isinstance(made, MLA) or made.query_dim != self.head_dim:
            raise InputError(
                f"encoding: {name!r} needs queries and keys of {made.query_dim} dimensions, but heads of "
                f"{type(self.modules[0]).__name__} have {self.head_dim}."
            )
        return made

    def _own(self, name: str) -> dict[str, Any]:
        pairing = next((each for each in self.turns if each), None)
        own = {"pairing": pairing, "bidirectional": not self.causal or None}
        return {option: value for option, value in own.items() if value and option in encodings.options(name)}


def _sides_of(model: Any, max_len: int | None, layers: Sequence[int] | None) -> tuple[list[_Side], list[nn.Module]]:
    """The sides of a model, found by running it on a few tokens, and the modules that use the attention interface.

    Raises `InputError` for models with other inputs, for positions with several coordinates, and for layers that do not
    exist or have heads of several sizes.
    """
    kind = type(model).__name__
    if model.main_input_name != "input_ids" and model.config.model_type != _SPEECH:
        raise InputError(
            f"model: {kind} takes {model.main_input_name} instead of token ids. Among such models, only "
            "Wav2Vec2-Conformer is supported."
        )
    if "mrope_section" in rotations_of(model.config.get_text_config())[0]:
        raise InputError(f"model: positions of {kind} have several coordinates, which are not supported.")
    with _trial(model) as calls:
        _run(model, _example(model))
    asking = [call.module for call in calls]
    modules = set(asking) or {module for module in model.modules() if own_forward(module)}
    sides = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else [model]
    stacks = [_trunk(side, modules & set(side.modules())) for side in sides]
    with _trial(model), _followed(stacks) as (reached, turns):
        _run(model, _example(model))
    return [_side(model, stack, calls, reached, turns, max_len, layers) for stack in stacks], asking


def _side(
    model: Any,
    stack: nn.Module,
    calls: list[_Call],
    reached: set[nn.Module],
    turns: dict[nn.Module, str | None],
    max_len: int | None,
    layers: Sequence[int] | None,
) -> _Side:
    inside, kind = set(stack.modules()), type(model).__name__
    found = [call for call in calls if call.module in inside and call.q.shape[2] == call.k.shape[2]]
    modules = [call.module for call in found] or [module for module in stack.modules() if own_forward(module)]
    if not modules or len(set(modules)) != len(modules):
        raise InputError(
            f"model: {kind} does not call transformers' attention interface once per layer, so no encoding can be "
            "installed."
        )
    if layers is not None:
        require_indices("layers", layers, len(modules))
    chosen = [call for layer, call in enumerate(found) if layers is None or layer in layers]
    sizes = {(call.q.shape[1], call.k.shape[1], call.q.shape[3]) for call in chosen or found}
    if len(sizes) > 1:
        each = [(call.q.shape[1], call.q.shape[3]) for call in found]
        some = [layer for layer, size in enumerate(each) if size == each[0]]
        raise InputError(f"layers must have heads of one size in {kind}, such as layers {some}.")
    config: Any = model.config if model.config.model_type == _SPEECH else stack.config
    config = config.get_text_config()
    first: Any = modules[0]
    heads, _, head_dim = sizes.pop() if sizes else (first.num_heads, None, first.head_dim)  # BLOOM's
    own = next((getattr(config, name) for name in _LENGTHS if getattr(config, name, None)), 2048)
    return _Side(
        stack,
        modules,
        heads,
        head_dim,
        int(config.hidden_size),
        int(own) if max_len is None else max_len,
        _tables(stack),
        [turns.get(module) for module in modules],
        [_nearest(stack, module, reached) for module in modules],
        causal=bool(getattr(first, "is_causal", True)),
    )


def _trunk(side: Any, modules: set[nn.Module]) -> nn.Module:
    """The innermost module that receives tokens or states and runs all layers."""
    inputs = {"input_ids", "hidden_states"}
    around = [
        module
        for module in side.modules()
        if inputs & set(inspect.signature(module.forward).parameters) and modules <= set(module.modules())
    ]
    tokens = [module for module in around if hasattr(module, "get_input_embeddings")]
    own = [module for module in tokens if "input_ids" in inspect.signature(module.forward).parameters]
    return (own if side.main_input_name == "input_ids" else around)[-1]


def _nearest(stack: nn.Module, module: nn.Module, reached: set[nn.Module]) -> nn.Module | None:
    """The innermost member of ``reached`` among a module and those around it."""
    name = next(name for name, each in stack.named_modules() if each is module)
    while name:
        if (around := stack.get_submodule(name)) in reached:
            return around
        name = name.rpartition(".")[0]
    return None


def _tables(stack: nn.Module) -> list[nn.Module]:
    named = [module for name, module in stack.named_modules() if name.rsplit(".", 1)[-1] in _TABLES]
    return [module for module in named if not any(word in type(module).__name__ for word in ("Rotary", "RelPos"))]


@contextmanager
def _followed(stacks: list[nn.Module]) -> Iterator[tuple[set[nn.Module], dict[nn.Module, str | None]]]:
    """Which modules receive arguments of their stack in a pass, and how rotations passed to a module pair dimensions
    (None if it is not a pure rotation)."""
    reached, turns = set[nn.Module](), dict[nn.Module, str | None]()
    ours = {module for stack in stacks for module in attention_modules(stack)}

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, CONTEXT: reached}

    def see(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(CONTEXT) is reached:
            reached.add(module)
        if module not in ours:
            return args, kwargs
        kwargs = {name: value for name, value in kwargs.items() if name != CONTEXT}
        if "position_embeddings" in kwargs and module not in turns:
            turns[module] = None  # so that the module can be called in here
            turns[module] = _pairing(module, args, kwargs)
        return args, kwargs

    hooks = []
    for stack in stacks:
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(stack.forward).parameters.values()):
            hooks.append(stack.register_forward_pre_hook(give, with_kwargs=True))
        inside = [module for module in stack.modules() if module is not stack]
        hooks += [module.register_forward_pre_hook(see, with_kwargs=True) for module in inside]
    try:
        yield reached, turns
    finally:
        for hook in hooks:
            hook.remove()


def _pairing(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> str | None:
    """How a module's rotation pairs dimensions, found by rotating its queries and keys by a quarter turn.

    None if it is not a pure rotation (a layer without position, a norm after the rotation). Raises `InputError` for a
    rotation that is not passed as cosines and sines.
    """
    given = kwargs["position_embeddings"]
    if not isinstance(given, tuple) or len(given) != 2 or given[0].shape != given[1].shape or given[0].is_complex():
        raise InputError(
            f"model: {type(module).__name__} does not get its rotation as cosines and sines, so no encoding can be "
            "installed."
        )
    made = []
    for cos, sin in ((1.0, 0.0), (0.0, 1.0)):
        turned = torch.full_like(given[0], cos), torch.full_like(given[1], sin)
        recorder = _Recorder()
        with observing(recorder):
            module(*args, **{**kwargs, "position_embeddings": turned})
        if not recorder.calls:
            return None
        made.append((recorder.calls[0].q, recorder.calls[0].k))
    pairs = list(zip(*made, strict=True))
    for width in {given[0].shape[-1], 2 * given[0].shape[-1]}:
        for pairing in ("half", "interleaved"):
            if all(_is_quarter(plain, turned, width, pairing) for plain, turned in pairs):
                return pairing
    return None


def _is_quarter(plain: Tensor, turned: Tensor, width: int, pairing: str) -> bool:
    if width > plain.shape[-1]:
        return False
    x = plain[..., :width]
    a, b = x.chunk(2, dim=-1) if pairing == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    made = torch.cat((-b, a), dim=-1) if pairing == "half" else torch.stack((-b, a), dim=-1).flatten(-2)
    return torch.allclose(made, turned[..., :width], rtol=1e-3, atol=1e-6)


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
        self._patches: list[StackPatch | AttentionPatch] = []
        self._asking: list[nn.Module] = []
        self._implementations = [(config, config._attn_implementation_internal) for config in configs_of(model)]

    def enter(self) -> None:
        """Put the encoding into the model."""
        sides, asking = _sides_of(self.model, self.max_len, self.layers)
        first = [side.build(self.name, self.options) for side in sides]
        if self.layers is not None and not self.layers:
            raise InputError("layers must have at least one layer, got []. Omit it for all layers.")
        for side, encoding in zip(sides, first, strict=True):
            some = len(side.modules) if self.layers is None else len(self.layers)
            if some < len(side.modules) and (encoding.overrides("embed") or side.tables):
                what = "its vectors enter" if encoding.overrides("embed") else "the model's own positions enter"
                raise InputError(
                    f"layers must not be set: {what} at the input of all layers, got {list(self.layers or ())}."
                )
        self._asking = asking
        for side, encoding in zip(sides, first, strict=True):
            self._patch(side, encoding)
        for module in asking:
            module.__dict__[BEFORE] = module.config._attn_implementation_internal  # type: ignore[union-attr]
        for config, _ in self._implementations if asking else ():
            config._attn_implementation_internal = NAME
        self.encodings._tied_weights_keys = _tied(self.encodings)  # type: ignore[assignment]
        self.model.add_module(MODULES, self.encodings.train(self.model.training).to(self.model.device))
        self.model.__dict__[HOST] = self
        layers = None if self.layers is None else list(self.layers)
        described = {"encoding": self.name, "layers": layers, "max_len": self.max_len, **self.options}
        setattr(self.model.config, MODULES, described)  # from which the encoding is restored on loading

    def _patch(self, side: _Side, first: PositionalEncoding) -> None:
        asks = NAME if self._asking else None
        told = {"carries": any(side.reached), "causal": side.causal, "asks": asks, "name": self.name}
        stack = StackPatch(side.stack, first, side.tables, **told)
        self._patches.append(stack)
        for layer in range(len(side.modules)) if self.layers is None else self.layers:
            encoding = first.for_layer(layer).to(device=self.model.device, dtype=self.model.dtype)
            if not any(encoding is known for known in self.encodings):
                self.encodings.append(encoding)
            told = {"around": side.reached[layer], "turns": side.turns[layer]}
            self._patches.append(AttentionPatch(side.modules[layer], stack, layer, encoding, **told))

    def leave(self) -> None:
        """Remove the encoding from the model."""
        for patch in self._patches:
            patch.remove()
        for module in self._asking:
            module.__dict__.pop(BEFORE, None)
        for config, before in self._implementations:
            config._attn_implementation_internal = before
        self.model.__dict__.pop(HOST, None)
        for holder in (self.model, self.model.config):
            with suppress(AttributeError):
                delattr(holder, MODULES)

    @contextmanager
    def _without_position(self) -> Iterator[None]:
        before = [patch.encoding for patch in self._patches]
        for patch in self._patches:
            patch.encoding = NoPE(**patch.encoding.sizes)
        try:
            yield
        finally:
            for patch, encoding in zip(self._patches, before, strict=True):
                patch.encoding = encoding

    def prove(self) -> None:
        """Raise `InputError` unless the model without position ignores positions and its attention is unchanged.

        Three checks without an encoding in any layer. Each layer's attention, computed by toeplens, equals the module's
        own for the same queries, keys and mask. Other position ids give the same output. With one token at all
        positions, the outputs are the same at all of them (this detects tables added at the input).
        """
        model, kind, alike = self.model, type(self.model).__name__, None
        reads_tokens = model.main_input_name == "input_ids"
        with self._without_position(), _trial(model) as calls:
            inputs = _example(model)
            first = moved = _run(model, inputs)
            worst = 0.0
            for call in calls:  # the module's own attention on the same inputs, without the part added by position
                kwargs = {name: value for name, value in call.kwargs.items() if name not in _POSITION}
                own = plain_attention(call.module, call.q, call.k, call.v, call.mask, **kwargs)[0]
                worst = max(worst, _apart(call.out, own))
            if reads_tokens and "position_ids" in inspect.signature(model.forward).parameters:
                tokens = inputs["input_ids"]  # other positions in the same order, with a mask that makes them one
                positions = 2 * torch.arange(tokens.shape[1], device=tokens.device)[None] + 1
                moved = _run(model, inputs | {"position_ids": positions, "attention_mask": torch.ones_like(tokens)})
            if reads_tokens and all(call.kwargs.get("s_aux") is None for call in calls):  # sinks see lengths
                alike = _run(model, {name: torch.full_like(x, 3) for name, x in inputs.items()})
        allowed = tolerance(first.dtype, "installed")
        if worst > allowed:
            raise InputError(
                f"model: attention of {kind} does more than queries, keys and mask say (error {worst:.1e} of the "
                f"largest output, allowed {allowed:.0e}), so no encoding can be installed."
            )
        if self.layers is not None:
            return
        told = _apart(moved, first)
        if alike is not None and alike.ndim == 3:  # one token at all positions
            told = max(told, _apart(alike, alike[:, :1].expand_as(alike)))
        if told > allowed:
            raise InputError(
                f"model: {kind} still depends on positions without its own encoding (by {told:.1e} of the largest "
                "output), so no encoding can be installed."
            )


def _apart(a: Tensor, b: Tensor) -> float:
    size = float(b.detach().double().abs().max())
    difference = float((a.detach().double() - b.detach().double()).abs().max())
    return difference / size if size else difference


def _tied(encodings_of: nn.ModuleList) -> dict[str, str]:
    """Names of parameters that layers share, mapped to the first name, as in transformers' tied weights."""
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in encodings_of.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            found[name] = first
    return found


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
    host = Host(model, name, layers, max_len, options)
    try:
        host.enter()
        if prove:
            host.prove()
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
    if not isinstance(described, dict) or "encoding" not in described or {"model", "prove"} & set(described):
        raise InputError(f"model: {name} could not be loaded: {entry} is damaged ({shown(described)}).")
    try:
        host = install(model, prove=False, **described)
    except Exception as error:  # an encoding may fail in any way on its options
        if out_of_memory(error):
            raise
        raise InputError(
            f"model: {name} could not be loaded: {entry} does not match the model ({words(error)})."
        ) from None
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = (key for key in opened.keys() if key.startswith(f"{MODULES}."))  # noqa: SIM118
            found |= {key.removeprefix(f"{MODULES}."): opened.get_tensor(key) for key in names}
    found.pop(MARK, None)
    known = host.encodings.state_dict()
    needed = set(known) - set(_tied(host.encodings)) - {MARK}
    wrong = sorted((needed - set(found)) | (set(found) - set(known)))
    wrong += sorted(
        key
        for key, x in found.items()
        if key in known and not (x.shape == known[key].shape and x.is_floating_point() and bool(x.isfinite().all()))
    )
    if wrong:
        more = f" and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        raise InputError(
            f"model: {name} could not be loaded: its weights do not match the encoding {host.name!r}. Missing, "
            f"unexpected, of another shape or not finite: {', '.join(wrong[:_TOLD])}{more}."
        )
    host.encodings.load_state_dict(found, strict=False)
