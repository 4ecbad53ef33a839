"""Replace the positional encoding of a transformers model by any encoding, and restore the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings.additive import NoPE
from toeplens.encodings.kit import require_indices, without_autocast
from toeplens.ground import InputError, shown
from toeplens.ground.machine import out_of_memory
from toeplens.ground.options import must_be
from toeplens.sources.huggingface import model as hf
from toeplens.sources.huggingface.installed import (
    AttentionPatch,
    Side,
    StackPatch,
    own_forward,
    plain_attention,
    register,
)

HOST = "toeplens_host"  # attribute of the model
MODULES = "toeplens_encodings"  # name of the encodings' weights in the state dict, and of the configuration entry
MARK = "open_this_model_with_toeplens_hosts_load"  # extra weight name, which transformers reports as unknown
_POSITION = ("position_bias", "position_embeddings")  # arguments of an attention that contain position
_TABLES = ("wpe", "embed_positions", "position_embeddings")  # names of position tables in the supported families
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_source_positions")
_SPEECH = "wav2vec2-conformer"
ENCODED, DECODED = 5, 7  # example lengths; they differ, so that each side's attention is known by its shape


class _Recorder(hf.Observer):
    """Records the calls of attention and their outputs, except those of a replaced forward."""

    pieces = True

    def __init__(self) -> None:
        self.calls: list[hf.AttentionInputs] = []
        self.outputs: list[Tensor] = []
        self.reached: set[nn.Module] = set()  # modules that receive arguments of their stack
        self.turns: dict[nn.Module, str | None] = {}  # how modules' rotations pair dimensions; None if not pure

    def attend(self, call: hf.AttentionInputs) -> Any:
        made = call.run()
        if hf.INSTALLED not in vars(call.module) or hf.BEFORE in vars(call.module):
            self.calls.append(call)
            self.outputs.append(made[0])
        return made


def _not_installable(why: str) -> InputError:
    return InputError(f"model: {why}, so no encoding can be installed.")


@contextmanager
def _trial(model: Any) -> Iterator[_Recorder]:
    """Run the model's attention through the toeplens function: no gradients, dropout, cache or autocast."""
    register()
    changes = hf.asking_for(model, hf.NAME), hf.table_entries([hf.NAME])
    precise = without_autocast(next(model.parameters()))
    recorder = _Recorder()
    with hf.patched(model, *changes), torch.no_grad(), precise, hf.observing(recorder):
        yield recorder


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The model's first output. Raises `InputError` if its attention cannot be replaced by another function."""
    try:
        return model(**inputs)[0]
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error) or not hf.of_libraries(error):
            raise
        why = f"{type(model).__name__} does not run with another attention function ({hf.words(error)})"
        raise _not_installable(why) from error


def _example(model: Any) -> dict[str, Tensor]:
    """An example input: one sequence of a few tokens, or a third of a second of noise for speech models."""
    draw = torch.Generator().manual_seed(0)
    if model.config.model_type == _SPEECH:
        return {"input_values": torch.randn(1, 5600, generator=draw).to(model.device, model.dtype)}
    high = max(2, int(model.config.get_text_config().vocab_size))
    two = model.config.is_encoder_decoder
    names = {"input_ids": ENCODED, "decoder_input_ids": DECODED} if two else {"input_ids": DECODED}
    return {name: torch.randint(high, (1, n), generator=draw).to(model.device) for name, n in names.items()}


def _sides_of(model: Any, max_len: int | None, layers: Sequence[int] | None) -> tuple[list[Side], list[nn.Module]]:
    """The sides of a model, found by running it on a few tokens, and the modules that use the attention interface."""
    kind = type(model).__name__
    if model.main_input_name != "input_ids" and model.config.model_type != _SPEECH:
        takes = f"{kind} takes {model.main_input_name} instead of token ids"
        raise InputError(f"model: {takes}. Among such models, only Wav2Vec2-Conformer is supported.")
    if "mrope_section" in hf.rotations_of(model.config.get_text_config())[0]:
        raise InputError(f"model: positions of {kind} have several coordinates, which are not supported.")
    with _trial(model) as recorder:
        _run(model, _example(model))
    asking = [call.module for call in recorder.calls]
    modules = set(asking) or {module for module in model.modules() if own_forward(module)}
    sides = [model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else [model]
    stacks = [_trunk(side, modules & set(side.modules())) for side in sides]
    with _trial(model), _followed(stacks, recorder):
        _run(model, _example(model))
    return [_side(model, stack, recorder, max_len, layers) for stack in stacks], asking


def _side(model: Any, stack: Any, recorder: _Recorder, max_len: int | None, layers: Sequence[int] | None) -> Side:
    inside, kind = set(stack.modules()), type(model).__name__
    found = [call for call in recorder.calls if call.module in inside and call.q.shape[2] == call.k.shape[2]]
    modules = [call.module for call in found] or [module for module in stack.modules() if own_forward(module)]
    if not modules or len(set(modules)) != len(modules):
        raise _not_installable(f"{kind} does not call transformers' attention interface once per layer")
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
    tables = [module for name, module in stack.named_modules() if name.rsplit(".", 1)[-1] in _TABLES]
    return Side(
        stack,
        modules,
        heads,
        head_dim,
        int(config.hidden_size),
        int(own) if max_len is None else max_len,
        [module for module in tables if not any(word in type(module).__name__ for word in ("Rotary", "RelPos"))],
        [recorder.turns.get(module) for module in modules],
        [_nearest(stack, module, recorder.reached) for module in modules],
        causal=bool(getattr(first, "is_causal", True)),
    )


def _trunk(side: Any, modules: set[nn.Module]) -> nn.Module:
    """The innermost module that receives tokens or states and runs all layers."""
    taken = {each: set(inspect.signature(each.forward).parameters) for each in side.modules()}
    around = [each for each in taken if taken[each] & {"input_ids", "hidden_states"} and modules <= set(each.modules())]
    own = [each for each in around if hasattr(each, "get_input_embeddings") and "input_ids" in taken[each]]
    return (own if side.main_input_name == "input_ids" else around)[-1]


def _nearest(stack: nn.Module, module: nn.Module, reached: set[nn.Module]) -> nn.Module | None:
    """The innermost member of ``reached`` among a module and those around it."""
    around = [each for each in stack.modules() if each in reached and module in set(each.modules())]
    return around[-1] if around else None


@contextmanager
def _followed(stacks: list[nn.Module], recorder: _Recorder) -> Iterator[None]:
    """Record in a pass which modules receive arguments of their stack, and how rotations pair dimensions."""
    reached, turns = recorder.reached, recorder.turns
    ours = {module for stack in stacks for module in hf.attention_modules(stack)}

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, hf.CONTEXT: reached}

    def see(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get(hf.CONTEXT) is reached:
            reached.add(module)
        if module not in ours:
            return args, kwargs
        kwargs = {name: value for name, value in kwargs.items() if name != hf.CONTEXT}
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
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _pairing(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> str | None:
    """How a module's rotation pairs dimensions, found by a quarter turn; None if it is not a pure rotation (a layer
    without position, a norm after the rotation)."""
    given = kwargs["position_embeddings"]
    if not isinstance(given, tuple) or len(given) != 2 or given[0].shape != given[1].shape or given[0].is_complex():
        raise _not_installable(f"{type(module).__name__} does not get its rotation as cosines and sines")
    made = []
    for cos, sin in ((1.0, 0.0), (0.0, 1.0)):
        turned = torch.full_like(given[0], cos), torch.full_like(given[1], sin)
        recorder = _Recorder()
        with hf.observing(recorder):
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
    pairs = (2, width // 2) if pairing == "half" else (width // 2, 2)
    if width > plain.shape[-1] or width % 2:
        return False
    a, b = plain[..., :width].unflatten(-1, pairs).unbind(-2 if pairing == "half" else -1)
    made = torch.stack((-b, a), dim=-2 if pairing == "half" else -1).flatten(-2)
    return torch.allclose(made, turned[..., :width], rtol=1e-3, atol=1e-6)


class Host:
    """An encoding installed in a model, and the means to uninstall it. ``encodings`` is a module list, one per layer
    and side, or one shared by all; trained and saved with the model."""

    def __init__(
        self, model: Any, name: str, layers: Sequence[int] | None, max_len: int | None, options: dict[str, Any]
    ) -> None:
        self.model, self.name, self.layers, self.max_len, self.options = model, name, layers, max_len, options
        self.encodings = nn.ModuleList()
        self.encodings.register_buffer(MARK, torch.ones(1, dtype=torch.uint8))
        self._patches: list[StackPatch | AttentionPatch] = []
        self._asking: list[nn.Module] = []
        self._implementations = [(config, config._attn_implementation_internal) for config in hf.configs_of(model)]

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
                got = list(self.layers or ())
                raise InputError(f"layers must not be set: {what} at the input of all layers, got {got}.")
        self._asking = asking
        for side, shared in zip(sides, first, strict=True):
            stack = StackPatch(side, shared, bool(asking), self.name)
            self._patches.append(stack)
            for layer in range(len(side.modules)) if self.layers is None else self.layers:
                encoding = shared.for_layer(layer).to(device=self.model.device, dtype=self.model.dtype)
                if not any(encoding is known for known in self.encodings):
                    self.encodings.append(encoding)
                self._patches.append(AttentionPatch(stack, layer, encoding))
        for module in asking:
            module.__dict__[hf.BEFORE] = module.config._attn_implementation_internal  # type: ignore[union-attr]
        for config, _ in self._implementations if asking else ():
            config._attn_implementation_internal = hf.NAME
        self.encodings._tied_weights_keys = _tied(self.encodings)  # type: ignore[assignment]
        self.model.add_module(MODULES, self.encodings.train(self.model.training).to(self.model.device))
        self.model.__dict__[HOST] = self
        layers = None if self.layers is None else list(self.layers)
        described = {"encoding": self.name, "layers": layers, "max_len": self.max_len, **self.options}
        setattr(self.model.config, MODULES, described)  # from which the encoding is restored on loading

    def leave(self) -> None:
        """Remove the encoding from the model."""
        for patch in self._patches:
            patch.remove()
        for module in self._asking:
            module.__dict__.pop(hf.BEFORE, None)
        for config, before in self._implementations:
            config._attn_implementation_internal = before
        self.model.__dict__.pop(HOST, None)
        for holder in (self.model, self.model.config):
            with suppress(AttributeError):
                delattr(holder, MODULES)

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
        model, kind, alike = self.model, type(self.model).__name__, None
        reads_tokens = model.main_input_name == "input_ids"
        with self._without_position(), _trial(model) as recorder:
            inputs = _example(model)
            first = moved = _run(model, inputs)
            worst, calls = 0.0, recorder.calls
            for call, made in zip(calls, recorder.outputs, strict=True):  # without the part added by position
                how = {name: value for name, value in call.how.items() if name not in _POSITION}
                worst = max(worst, hf.apart(made, plain_attention(replace(call, how=how))[0]))
            if reads_tokens and "position_ids" in inspect.signature(model.forward).parameters:
                tokens = inputs["input_ids"]  # other positions in the same order, with a mask that makes them one
                positions = 2 * torch.arange(tokens.shape[1], device=tokens.device)[None] + 1
                moved = _run(model, inputs | {"position_ids": positions, "attention_mask": torch.ones_like(tokens)})
            if reads_tokens and all(call.how.get("s_aux") is None for call in calls):  # sinks see lengths
                alike = _run(model, {name: torch.full_like(x, 3) for name, x in inputs.items()})
        allowed = hf.tolerance(first.dtype, "installed")
        if worst > allowed:
            error = f"(error {worst:.1e} of the largest output, allowed {allowed:.0e})"
            raise _not_installable(f"attention of {kind} does more than queries, keys and mask say {error}")
        if self.layers is not None:
            return
        told = hf.apart(moved, first)
        if alike is not None and alike.ndim == 3:  # one token at all positions
            told = max(told, hf.apart(alike, alike[:, :1].expand_as(alike)))
        if told > allowed:
            by = f"(by {told:.1e} of the largest output)"
            raise _not_installable(f"{kind} still depends on positions without its own encoding {by}")


def _tied(encodings_of: nn.ModuleList) -> dict[str, str]:
    """Names of parameters that layers share, mapped to the first name, as in transformers' tied weights."""
    names: dict[nn.Parameter, str] = {}
    every = {name: names.setdefault(x, name) for name, x in encodings_of.named_parameters(remove_duplicate=False)}
    return {name: first for name, first in every.items() if first != name}


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
    if HOST in hf.checked_model(model).__dict__:
        raise InputError("model: an encoding is already installed. Uninstall it first.")
    must_be("prove", prove, bool)
    name = encodings.canonical(encoding)
    if any(config._attn_implementation_internal == hf.NAME for config in hf.configs_of(model)):
        shared = "is shared with a model that has an encoding installed"
        raise InputError(f"model: its configuration {shared}. Copy the configuration.")
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
    """Install the same encoding as in another model, if any, with initial parameters, in a model built from a copy of
    its configuration."""
    if (host := vars(other).get(HOST)) is None:
        return
    for config, (_, before) in zip(hf.configs_of(model), host._implementations, strict=True):
        config._attn_implementation_internal = before
    delattr(model.config, MODULES)
    install(model, host.name, layers=host.layers, max_len=host.max_len, prove=False, **host.options)


def uninstall(model: Any) -> None:
    """Restore a model to its state before `install`, with its own positional encoding."""
    if (host := hf.checked_model(model).__dict__.get(HOST)) is None:
        raise InputError("model: no encoding is installed.")
    host.leave()


def reinstall(model: Any, described: Any, files: Sequence[Path], name: str) -> None:
    """Install the encoding that the entry ``toeplens_encodings`` of a configuration describes, with its weights from
    the files of the checkpoint. Raises `InputError` if they do not fit."""
    entry = f"the entry {MODULES} of its configuration"
    if not isinstance(described, dict) or "encoding" not in described or {"model", "prove"} & set(described):
        raise hf.not_loaded(name, f"{entry} is damaged ({shown(described)})")
    try:
        host = install(model, prove=False, **described)
    except Exception as error:  # an encoding may fail in any way on its options
        if out_of_memory(error):
            raise
        raise hf.not_loaded(name, f"{entry} does not match the model ({hf.words(error)})") from None
    found, start = dict[str, Tensor](), f"{MODULES}."
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = (key for key in opened.keys() if key.startswith(start))  # noqa: SIM118
            found |= {key.removeprefix(start): opened.get_tensor(key) for key in names}
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
        what = f"Missing, unexpected, of another shape or not finite: {hf.listed(wrong)}"
        raise hf.not_loaded(name, f"its weights do not match the encoding {host.name!r}. {what}")
    host.encodings.load_state_dict(found, strict=False)
