"""Find a model's attention and its use of position, by running it on a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import MLA, PositionalEncoding
from toeplens.encodings.kit import require_indices, without_autocast
from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.hosts.passes import PASS
from toeplens.sources.huggingface.hosts.seat import Call, forward_of, recorded, register
from toeplens.sources.huggingface.interface import asking_for, patched
from toeplens.sources.huggingface.model import NAME, attention_modules, of_libraries, words

_TABLES = ("wpe", "embed_positions", "position_embeddings")  # names of position tables in the supported families
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_source_positions")
_SPEECH = "wav2vec2-conformer"
ENCODED, DECODED = 5, 7  # example lengths; they differ, so that each side's attention is known by its shape


@dataclass(frozen=True)
class Found:
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
        """Options of an encoding that are known from the model."""
        pairing = next((each for each in self.turns if each), None)
        own = {"pairing": pairing, "bidirectional": not self.causal or None}
        return {option: value for option, value in own.items() if value and option in encodings.options(name)}


class Anatomy:
    """The sides of a model and the layers in which an encoding is to act (default: all)."""

    def __init__(self, model: Any, max_len: int | None, layers: Sequence[int] | None = None) -> None:
        self.model, self._max_len, self._layers = model, max_len, layers
        self._speech = model.config.model_type == _SPEECH
        self._refuse()
        with trial(model), recorded() as calls:
            run(model, self.example())
        self.asking = [call.module for call in calls]
        modules = set(self.asking) or {module for module in model.modules() if forward_of(module)}
        sides = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else [model]
        stacks = [_trunk(side, modules & set(side.modules())) for side in sides]
        with trial(model), told(stacks) as found:
            run(model, self.example())
        self.sides = [self._side(stack, calls, found) for stack in stacks]

    def _refuse(self) -> None:
        """Raise `InputError` for models with other inputs, and for positions with several coordinates."""
        kind = type(self.model).__name__
        if self.model.main_input_name != "input_ids" and not self._speech:
            raise InputError(
                f"model: {kind} takes {self.model.main_input_name} instead of token ids. Among such models, only "
                "Wav2Vec2-Conformer is supported."
            )
        parameters = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        if "mrope_section" in parameters:
            raise InputError(f"model: positions of {kind} have several coordinates, which are not supported.")

    def example(self, seed: int = 0) -> dict[str, Tensor]:
        """An example input: one sequence of a few tokens, or a third of a second of noise for speech models."""
        draw = torch.Generator().manual_seed(seed)
        if self._speech:
            return {"input_values": torch.randn(1, 5600, generator=draw).to(self.model.device, self.model.dtype)}
        high = max(2, int(self.model.config.get_text_config().vocab_size))
        names = {"input_ids": DECODED}
        if self.model.config.is_encoder_decoder:
            names = {"input_ids": ENCODED, "decoder_input_ids": DECODED}
        made = {name: torch.randint(high, (1, length), generator=draw) for name, length in names.items()}
        return {name: x.to(self.model.device) for name, x in made.items()}

    def _side(self, stack: nn.Module, calls: list[Call], told: Told) -> Found:
        inside = set(stack.modules())
        found = [call for call in calls if call.module in inside and call.q.shape[2] == call.k.shape[2]]
        modules = [call.module for call in found]
        modules += [module for module in stack.modules() if forward_of(module)] if not modules else []
        kind = type(self.model).__name__
        if not modules or len(set(modules)) != len(modules):
            raise InputError(
                f"model: {kind} does not call transformers' attention interface once per layer, so no encoding can be "
                "installed."
            )
        if self._layers is not None:
            require_indices("layers", self._layers, len(modules))
        chosen = [call for layer, call in enumerate(found) if self._layers is None or layer in self._layers]
        sizes = {(call.q.shape[1], call.k.shape[1], call.q.shape[3]) for call in chosen or found}
        if len(sizes) > 1:
            each = [(call.q.shape[1], call.q.shape[3]) for call in found]
            some = [layer for layer, size in enumerate(each) if size == each[0]]
            raise InputError(f"layers must have heads of one size in {kind}, such as layers {some}.")
        config: Any = self.model.config if self._speech else stack.config
        config = config.get_text_config()
        first: Any = modules[0]
        heads, _, head_dim = sizes.pop() if sizes else (first.num_heads, None, first.head_dim)  # BLOOM's
        causal = bool(getattr(modules[0], "is_causal", True))
        own = next((getattr(config, name) for name in _LENGTHS if getattr(config, name, None)), 2048)
        return Found(
            stack,
            modules,
            heads,
            head_dim,
            int(config.hidden_size),
            int(own) if self._max_len is None else self._max_len,
            _tables(stack),
            [told.turns.get(module) for module in modules],
            [_nearest(stack, module, told.reached) for module in modules],
            causal,
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
    found = ((name.rsplit(".", 1)[-1], module) for name, module in stack.named_modules())
    named = [module for name, module in found if name in _TABLES]
    return [module for module in named if not any(word in type(module).__name__ for word in ("Rotary", "RelPos"))]


@contextmanager
def trial(model: Any) -> Iterator[None]:
    """Run the model's attention through the toeplens function: no gradients, dropout, cache or autocast."""
    register()
    with patched(model, asking_for(model, NAME)), torch.no_grad(), without_autocast(next(model.parameters())):
        yield


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
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


@dataclass
class Told:
    """Facts observed in a pass of a model.

    reached  the modules that receive arguments of their stack
    turns    how the rotation passed to a module pairs dimensions; None if it is not a pure rotation
    """

    reached: set[nn.Module]
    turns: dict[nn.Module, str | None]


@contextmanager
def told(stacks: list[nn.Module]) -> Iterator[Told]:
    """Observe the passes run inside."""
    found = Told(set(), {})
    ours = {module for stack in stacks for module in attention_modules(stack)}

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, PASS: found}

    def see(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(PASS) is found:
            found.reached.add(module)
        if module not in ours:
            return args, kwargs
        kwargs = {name: value for name, value in kwargs.items() if name != PASS}
        if "position_embeddings" in kwargs and module not in found.turns:
            found.turns[module] = None  # so that the module can be called in here
            found.turns[module] = turns(module, args, kwargs)
        return args, kwargs

    hooks = []
    for stack in stacks:
        takes = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(stack.forward).parameters.values())
        hooks += [stack.register_forward_pre_hook(give, with_kwargs=True)] if takes else []
        inside = [module for module in stack.modules() if module is not stack]
        hooks += [module.register_forward_pre_hook(see, with_kwargs=True) for module in inside]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def turns(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> str | None:
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
        turned = tuple(torch.full_like(x, value) for x, value in zip(given, (cos, sin), strict=True))
        with recorded() as calls:
            module(*args, **{**kwargs, "position_embeddings": turned})
        if not calls:
            return None
        made.append((calls[0].q, calls[0].k))
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
