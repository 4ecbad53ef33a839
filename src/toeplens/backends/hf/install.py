"""Replace the positional encoding of a transformers model by any encoding, and restore the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from toeplens import encodings
from toeplens.backends.hf import model as hf
from toeplens.backends.hf import patches
from toeplens.backends.hf.patches import AttentionPatch, ModelStack, StackPatch, plain_attention, replacement_forward
from toeplens.encodings.additive import NoPE
from toeplens.encodings.kit import require_indices, without_autocast
from toeplens.utils import InputError, repr_of
from toeplens.utils.machine import is_out_of_memory
from toeplens.utils.options import check_value

HOST = "toeplens_host"  # attribute of the model
ENCODINGS = "toeplens_encodings"  # name of the encodings' weights in the state dict, and of the configuration entry
MARKER = "open_this_model_with_toeplens_hosts_load"  # extra weight name, which transformers reports as unknown
_POSITION_ARGUMENTS = ("position_bias", "position_embeddings")  # arguments of an attention that contain position
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")  # their names in the supported families
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "seq_length", "max_source_positions")
_SPEECH = "wav2vec2-conformer"
ENCODER_LENGTH, DECODER_LENGTH = 5, 7  # of examples; they differ, so that each side is known by its shape


class _CallRecorder(hf.Observer):
    """Records the calls of attention and their outputs, except those of a replaced forward."""

    joins_calls = True

    def __init__(self) -> None:
        self.calls: list[hf.InterfaceCall] = []
        self.outputs: list[Tensor] = []
        self.receivers: set[nn.Module] = set()  # modules that receive arguments of their stack
        self.pairings: dict[nn.Module, str | None] = {}  # how modules' rotations pair dimensions; None if not pure

    def attend(self, call: hf.InterfaceCall) -> Any:
        output = call.run()
        if hf.INSTALLED not in vars(call.module) or hf.PREVIOUS in vars(call.module):
            self.calls.append(call)
            self.outputs.append(output[0])
        return output


def _not_installable(reason: str) -> InputError:
    return InputError(f"model: {reason}, so no encoding can be installed.")


@contextmanager
def _recording(model: Any) -> Iterator[_CallRecorder]:
    """Run the model's attention through the toeplens function: no gradients, dropout, cache or autocast."""
    patches.register_attention()
    changes = hf.implementation_entries(model, hf.IMPLEMENTATION), hf.table_entries([hf.IMPLEMENTATION])
    precise = without_autocast(next(model.parameters()))
    recorder = _CallRecorder()
    with hf.apply_patches(model, *changes), torch.no_grad(), precise, hf.observing(recorder):
        yield recorder


def _first_output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's first output. Raises `InputError` if its attention cannot be replaced by another function."""
    kind = type(model).__name__
    with hf.library_errors(str(_not_installable(f"{kind} does not run with another attention function ({{}})"))):
        try:
            return model(**inputs)[0]
        except InputError as error:
            if error.name != "attention_mask":  # only the model has formed one
                raise
            values = "values other than 0 (visible) and the lowest number of its dtype (masked)"
            raise _not_installable(f"the attention mask that {kind} forms has {values}") from None


def _example_inputs(model: Any) -> dict[str, Tensor]:
    """An example input: one sequence of a few tokens, or a third of a second of noise for speech models."""
    draw = torch.Generator().manual_seed(0)
    if model.config.model_type == _SPEECH:
        return {"input_values": torch.randn(1, 5600, generator=draw).to(hf.device_of(model), model.dtype)}
    high = max(2, int(model.config.get_text_config().vocab_size))
    names = {"input_ids": DECODER_LENGTH}
    if model.config.is_encoder_decoder:
        names = {"input_ids": ENCODER_LENGTH, "decoder_input_ids": DECODER_LENGTH}
    return {name: torch.randint(high, (1, n), generator=draw).to(hf.device_of(model)) for name, n in names.items()}


def _find_stacks(
    model: Any, max_len: int | None, layers: Sequence[int] | None
) -> tuple[list[ModelStack], list[nn.Module]]:
    """The sides of a model, found by running it on a few tokens, and the modules that use the attention interface."""
    kind = type(model).__name__
    if model.main_input_name != "input_ids" and model.config.model_type != _SPEECH:
        problem = f"{kind} takes {model.main_input_name} instead of token ids"
        raise InputError(f"model: {problem}. Among such models, only Wav2Vec2-Conformer is supported.")
    if "mrope_section" in hf.rope_settings(model.config.get_text_config())[0]:
        raise InputError(f"model: positions of {kind} have several coordinates, which are not supported.")
    with _recording(model) as recorder:
        _first_output(model, _example_inputs(model))
    interface_modules = [call.module for call in recorder.calls]
    modules = set(interface_modules) or {module for module in model.modules() if replacement_forward(module)}
    sides = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else [model]
    stacks = [_find_trunk(side, modules & set(side.modules())) for side in sides]
    with _recording(model), _recording_arguments(stacks, recorder):
        _first_output(model, _example_inputs(model))
    return [_describe_stack(model, stack, recorder, max_len, layers) for stack in stacks], interface_modules


def _describe_stack(
    model: Any, stack: Any, recorder: _CallRecorder, max_len: int | None, layers: Sequence[int] | None
) -> ModelStack:
    stack_modules, kind = set(stack.modules()), type(model).__name__
    calls = [call for call in recorder.calls if call.module in stack_modules and call.q.shape[2] == call.k.shape[2]]
    modules = [call.module for call in calls] or [module for module in stack.modules() if replacement_forward(module)]
    if not modules or len(set(modules)) != len(modules):
        raise _not_installable(f"{kind} does not call transformers' attention interface once per layer")
    if layers is not None:
        require_indices("layers", layers, len(modules))
    chosen = [call for layer, call in enumerate(calls) if layers is None or layer in layers]
    sizes = {(call.q.shape[1], call.k.shape[1], call.q.shape[3]) for call in chosen or calls}
    if len(sizes) > 1:
        all_sizes = [(call.q.shape[1], call.q.shape[3]) for call in calls]
        allowed = [layer for layer, size in enumerate(all_sizes) if size == all_sizes[0]]
        raise InputError(f"layers must have heads of one size in {kind}, such as layers {allowed}.")
    config: Any = model.config if model.config.model_type == _SPEECH else stack.config
    config = config.get_text_config()
    first: Any = modules[0]
    heads, _, head_dim = sizes.pop() if sizes else (first.num_heads, None, first.head_dim)  # BLOOM's
    length = next((getattr(config, name) for name in _LENGTH_FIELDS if getattr(config, name, None)), 2048)
    tables = [module for name, module in stack.named_modules() if name.rsplit(".", 1)[-1] in _POSITION_TABLES]
    return ModelStack(
        stack,
        modules,
        heads,
        head_dim,
        int(config.hidden_size),
        int(length) if max_len is None else max_len,
        [module for module in tables if not any(word in type(module).__name__ for word in ("Rotary", "RelPos"))],
        [recorder.pairings.get(module) for module in modules],
        [_innermost(stack, module, recorder.receivers) for module in modules],
        causal=bool(getattr(first, "is_causal", True)),
    )


def _find_trunk(side: Any, modules: set[nn.Module]) -> nn.Module:
    """The innermost module that receives tokens or states and runs all layers."""
    parameters = {module: set(inspect.signature(module.forward).parameters) for module in side.modules()}
    outer = [x for x in parameters if parameters[x] & {"input_ids", "hidden_states"} and modules <= set(x.modules())]
    with_tokens = [x for x in outer if hasattr(x, "get_input_embeddings") and "input_ids" in parameters[x]]
    return (with_tokens if side.main_input_name == "input_ids" else outer)[-1]


def _innermost(stack: nn.Module, module: nn.Module, receivers: set[nn.Module]) -> nn.Module | None:
    """The innermost member of ``receivers`` among a module and those around it."""
    containers = [outer for outer in stack.modules() if outer in receivers and module in set(outer.modules())]
    return containers[-1] if containers else None


@contextmanager
def _recording_arguments(stacks: list[nn.Module], recorder: _CallRecorder) -> Iterator[None]:
    """Record in a pass which modules receive arguments of their stack, and how rotations pair dimensions."""
    receivers, pairings = recorder.receivers, recorder.pairings
    attentions = {module for stack in stacks for module in hf.attention_modules(stack)}

    def add_context(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, hf.CONTEXT: receivers}

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(hf.CONTEXT) is receivers:
            receivers.add(module)
        if module not in attentions:
            return args, kwargs
        kwargs = {name: value for name, value in kwargs.items() if name != hf.CONTEXT}
        if "position_embeddings" in kwargs and module not in pairings:
            pairings[module] = None  # so that the module can be called in here
            pairings[module] = _find_pairing(module, args, kwargs)
        return args, kwargs

    hooks = []
    for stack in stacks:
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(stack.forward).parameters.values()):
            hooks.append(stack.register_forward_pre_hook(add_context, with_kwargs=True))
        submodules = [module for module in stack.modules() if module is not stack]
        hooks += [module.register_forward_pre_hook(record, with_kwargs=True) for module in submodules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _find_pairing(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> str | None:
    """How a module's rotation pairs dimensions, found by a quarter turn; None if it is not a pure rotation (a layer
    without position, a norm after the rotation)."""
    tables = kwargs["position_embeddings"]
    is_pair = isinstance(tables, tuple) and len(tables) == 2
    if not is_pair or tables[0].shape != tables[1].shape or tables[0].is_complex():
        raise _not_installable(f"{type(module).__name__} does not get its rotation as cosines and sines")
    outputs = []
    for cos, sin in ((1.0, 0.0), (0.0, 1.0)):
        rotated = torch.full_like(tables[0], cos), torch.full_like(tables[1], sin)
        recorder = _CallRecorder()
        with hf.observing(recorder):
            module(*args, **{**kwargs, "position_embeddings": rotated})
        if not recorder.calls:
            return None
        outputs.append((recorder.calls[0].q, recorder.calls[0].k))
    pairs = list(zip(*outputs, strict=True))
    for width in {tables[0].shape[-1], 2 * tables[0].shape[-1]}:
        for pairing in ("half", "interleaved"):
            if all(_is_quarter_turn(plain, rotated, width, pairing) for plain, rotated in pairs):
                return pairing
    return None


def _is_quarter_turn(plain: Tensor, rotated: Tensor, width: int, pairing: str) -> bool:
    pairs = (2, width // 2) if pairing == "half" else (width // 2, 2)
    if width > plain.shape[-1] or width % 2:
        return False
    a, b = plain[..., :width].unflatten(-1, pairs).unbind(-2 if pairing == "half" else -1)
    expected = torch.stack((-b, a), dim=-2 if pairing == "half" else -1).flatten(-2)
    return torch.allclose(expected, rotated[..., :width], rtol=1e-3, atol=1e-6)


class PatchedModel:
    """An encoding installed in a model, and the means to uninstall it. ``encodings`` is a module list, one per layer
    and side, or one shared by all; trained and saved with the model."""

    def __init__(
        self, model: Any, name: str, layers: Sequence[int] | None, max_len: int | None, options: dict[str, Any]
    ) -> None:
        self.model, self.name, self.layers, self.max_len, self.options = model, name, layers, max_len, options
        self.encodings = nn.ModuleList()
        self.encodings.register_buffer(MARKER, torch.ones(1, dtype=torch.uint8))
        self._patches: list[StackPatch | AttentionPatch] = []
        self._interface_modules: list[nn.Module] = []
        self._implementations = [(config, config._attn_implementation_internal) for config in hf.configs_of(model)]

    def install(self) -> None:
        """Put the encoding into the model."""
        sides, interface_modules = _find_stacks(self.model, self.max_len, self.layers)
        first = [side.build(self.name, self.options) for side in sides]
        if self.layers is not None and not self.layers:
            raise InputError("layers must have at least one layer, got []. Omit it for all layers.")
        for side, encoding in zip(sides, first, strict=True):
            count = len(side.modules) if self.layers is None else len(self.layers)
            if count < len(side.modules) and (encoding.overrides("embed") or side.position_tables):
                reason = "its vectors enter" if encoding.overrides("embed") else "the model's own positions enter"
                chosen = list(self.layers or ())
                raise InputError(f"layers must not be set: {reason} at the input of all layers, got {chosen}.")
        self._interface_modules = interface_modules
        for side, shared in zip(sides, first, strict=True):
            stack = StackPatch(side, shared, bool(interface_modules), self.name)
            self._patches.append(stack)
            for layer in range(len(side.modules)) if self.layers is None else self.layers:
                encoding = shared.for_layer(layer).to(device=hf.device_of(self.model), dtype=self.model.dtype)
                if not any(encoding is other for other in self.encodings):
                    self.encodings.append(encoding)
                self._patches.append(AttentionPatch(stack, layer, encoding))
        for module in interface_modules:
            module.__dict__[hf.PREVIOUS] = module.config._attn_implementation_internal  # type: ignore[union-attr]
        for config, _ in self._implementations if interface_modules else ():
            config._attn_implementation_internal = hf.IMPLEMENTATION
        self.encodings._tied_weights_keys = _tied_parameters(self.encodings)  # type: ignore[assignment]
        self.model.add_module(ENCODINGS, self.encodings.train(self.model.training).to(hf.device_of(self.model)))
        self.model.__dict__[HOST] = self
        layers = None if self.layers is None else list(self.layers)
        entry = {"encoding": self.name, "layers": layers, "max_len": self.max_len, **self.options}
        setattr(self.model.config, ENCODINGS, entry)  # from which the encoding is restored on loading

    def uninstall(self) -> None:
        """Remove the encoding from the model."""
        for patch in self._patches:
            patch.remove()
        for module in self._interface_modules:
            module.__dict__.pop(hf.PREVIOUS, None)
        for config, before in self._implementations:
            config._attn_implementation_internal = before
        self.model.__dict__.pop(HOST, None)
        for holder in (self.model, self.model.config):
            with suppress(AttributeError):
                delattr(holder, ENCODINGS)

    @contextmanager
    def _without_position(self) -> Iterator[None]:
        before = [(patch, patch.encoding) for patch in self._patches]
        for patch, encoding in before:
            patch.encoding = NoPE(**encoding.sizes)
        try:
            yield
        finally:
            for patch, encoding in before:
                patch.encoding = encoding

    def prove(self) -> None:
        """Raise `InputError` unless without an encoding each layer's attention, computed by toeplens, equals the
        module's own, other position ids give the same output, and one token at all positions gives equal outputs."""
        model, kind, equal_tokens = self.model, type(self.model).__name__, None
        reads_tokens = model.main_input_name == "input_ids"
        with self._without_position(), _recording(model) as recorder:
            inputs = _example_inputs(model)
            first = shifted = _first_output(model, inputs)
            worst, calls = 0.0, recorder.calls
            for call, output in zip(calls, recorder.outputs, strict=True):  # without the part added by position
                options = {name: value for name, value in call.options.items() if name not in _POSITION_ARGUMENTS}
                worst = max(worst, hf.relative_difference(output, plain_attention(replace(call, options=options))[0]))
            if reads_tokens and "position_ids" in inspect.signature(model.forward).parameters:
                tokens = inputs["input_ids"]  # other positions in the same order, with a mask that makes them one
                positions = 2 * torch.arange(tokens.shape[1], device=tokens.device)[None] + 1
                shifted_inputs = {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}
                shifted = _first_output(model, inputs | shifted_inputs)
            if reads_tokens and all(call.options.get("s_aux") is None for call in calls):  # sinks see lengths
                equal_tokens = _first_output(model, {name: torch.full_like(x, 3) for name, x in inputs.items()})
        allowed = hf.tolerance(first.dtype, "installed")
        if worst > allowed:
            error = f"(error {worst:.1e} of the largest output, allowed {allowed:.0e})"
            raise _not_installable(f"attention of {kind} does more than queries, keys and mask say {error}")
        if self.layers is not None:
            return
        difference = hf.relative_difference(shifted, first)
        if equal_tokens is not None and equal_tokens.ndim == 3:  # one token at all positions
            first = equal_tokens[:, :1].expand_as(equal_tokens)
            difference = max(difference, hf.relative_difference(equal_tokens, first))
        if difference > allowed:
            amount = f"(by {difference:.1e} of the largest output)"
            raise _not_installable(f"{kind} still depends on positions without its own encoding {amount}")


def _tied_parameters(encodings_of: nn.ModuleList) -> dict[str, str]:
    """Names of parameters that layers share, mapped to the first name, as in transformers' tied weights."""
    names: dict[nn.Parameter, str] = {}
    first_names = {name: names.setdefault(x, name) for name, x in encodings_of.named_parameters(remove_duplicate=False)}
    return {name: first for name, first in first_names.items() if first != name}


def install(
    model: Any,
    encoding: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    max_len: int | None = None,
    prove: bool = True,
    **options: Any,
) -> PatchedModel:
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
    if HOST in hf.require_pretrained(model).__dict__:
        raise InputError("model: an encoding is already installed. Uninstall it first.")
    check_value("prove", prove, bool)
    name = encodings.canonical_name(encoding)
    if any(config._attn_implementation_internal == hf.IMPLEMENTATION for config in hf.configs_of(model)):
        shared = "is shared with a model that has an encoding installed"
        raise InputError(f"model: its configuration {shared}. Copy the configuration.")
    host = PatchedModel(model, name, layers, _plain_numbers(max_len), _plain_numbers(options))
    try:
        host.install()
        if prove:
            host.prove()
    except BaseException:
        host.uninstall()
        raise
    return host


def _plain_numbers(value: Any) -> Any:
    """Numbers of NumPy as Python's, which a configuration can be saved with."""
    if isinstance(value, Mapping):
        return {key: _plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain_numbers, value))
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def install_like(model: Any, other: Any) -> None:
    """Install the same encoding as in another model, if any, with initial parameters, in a model built from a copy of
    its configuration."""
    if (host := vars(other).get(HOST)) is None:
        return
    for config, (_, before) in zip(hf.configs_of(model), host._implementations, strict=True):
        config._attn_implementation_internal = before
    delattr(model.config, ENCODINGS)
    install(model, host.name, layers=host.layers, max_len=host.max_len, prove=False, **host.options)


def uninstall(model: Any) -> None:
    """Restore a model to its state before `install`, with its own positional encoding."""
    if (host := hf.require_pretrained(model).__dict__.get(HOST)) is None:
        raise InputError("model: no encoding is installed.")
    host.uninstall()


def reinstall(model: Any, options: Any, files: Sequence[Path], name: str) -> None:
    """Install the encoding that the entry ``toeplens_encodings`` of a configuration describes, with its weights from
    the files of the checkpoint. Raises `InputError` if they do not fit."""
    entry = f"the entry {ENCODINGS} of its configuration"
    if not isinstance(options, dict) or "encoding" not in options or {"model", "prove"} & set(options):
        raise hf.load_error(name, f"{entry} is damaged ({repr_of(options)})")
    try:
        host = install(model, prove=False, **options)
    except Exception as error:  # an encoding may fail in any way on its options
        if is_out_of_memory(error):
            raise
        raise hf.load_error(name, f"{entry} does not match the model ({hf.error_summary(error)})") from None
    weights, prefix = dict[str, Tensor](), f"{ENCODINGS}."
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = (key for key in opened.keys() if key.startswith(prefix))  # noqa: SIM118
            weights |= {key.removeprefix(prefix): opened.get_tensor(key) for key in names}
    weights.pop(MARKER, None)
    expected = host.encodings.state_dict()
    needed = set(expected) - set(_tied_parameters(host.encodings)) - {MARKER}
    mismatched = sorted((needed - set(weights)) | (set(weights) - set(expected)))
    mismatched += sorted(
        key
        for key, x in weights.items()
        if key in expected and (x.shape != expected[key].shape or not (x.is_floating_point() and x.isfinite().all()))
    )
    if mismatched:
        details = f"Missing, unexpected, of another shape or not finite: {hf.format_names(mismatched)}"
        raise hf.load_error(name, f"its weights do not match the encoding {host.name!r}. {details}")
    host.encodings.load_state_dict(weights, strict=False)
