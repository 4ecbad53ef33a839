"""Passes of a Hugging Face model that start at a layer, with changed head outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toeplens.backends.hf import effect_metric
from toeplens.backends.hf import model as hf
from toeplens.backends.hf.effect_metric import EffectMetric, Readout, over_labels, upcast
from toeplens.backends.hf.trace import ProductTracer, TracedTensor, split_heads
from toeplens.utils import InputError, invalid
from toeplens.utils.machine import is_out_of_memory

_CPU_TOKENS, _MAX_TOKENS = 4096, 12288  # maximum tokens of a pass over its copies: on a CPU (cache size), and elsewhere
_CALL_COST, _CPU_CALL_COST = 256, 10**8  # fixed cost of a layer's calls: 256 tokens, on a CPU at most 1e8 / its weights
UNCHANGED = -1  # index of an unchanged copy
HeadChange = Callable[[Float[Tensor, "R N H dv"]], Float[Tensor, "R N H dv"]]


@dataclass(frozen=True)
class ModelLayout:
    """The layers, the attention and the head of a model.

    layers            members of the outermost module lists that contain attention, with the name of the list
    custom_attention  attention modules that do not use transformers' attention interface
    containers        modules that contain the layers, or attention outside of them, except the model itself, and
                      siblings of its head: the outermost of those called returns the hidden states for the head
    output_embedding  None if there is none, or it is inside a container or also embeds the input
    """

    layers: dict[nn.Module, str]
    custom_attention: frozenset[nn.Module]
    containers: frozenset[nn.Module]
    output_embedding: nn.Module | None


def layout_of(model: Any) -> ModelLayout:
    """Find the layers, the attention and the head of a transformers model."""
    attention = hf.attention_modules(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[nn.Module, str] = {}
    containers: set[nn.Module] = set()
    for name in attention.values():
        name_parts = name.split(".")
        parents = [".".join(name_parts[:count]) for count in range(1, len(name_parts))]
        layer_list = next((parent for parent in parents if isinstance(modules[parent], nn.ModuleList)), None)
        if layer_list is not None:
            layers |= dict.fromkeys(modules[layer_list].children(), layer_list)
            parents = parents[: parents.index(layer_list)]
        containers |= {modules[parent] for parent in parents}
    custom_attention = frozenset(module for module in attention if not hf.uses_interface(module))
    embedding = model.get_output_embeddings()
    if embedding is None or embedding is hf.input_embedding(model):
        return ModelLayout(layers, custom_attention, frozenset(containers), None)
    around_head = {container for container in containers if embedding in set(container.modules())}
    others = containers - around_head
    containers -= {container for container in around_head if any(x in others for x in container.modules())}
    return ModelLayout(layers, custom_attention, frozenset(containers), None if around_head & containers else embedding)


def observe_passes(model: Any, layout: ModelLayout) -> AbstractContextManager[None]:
    """Report the passes inside, layer by layer, to the observer of their thread (`model.apply_patches`)."""
    modules = {*layout.layers, *layout.custom_attention, *layout.containers, layout.output_embedding} - {None}
    changes = [hf.module_entries(modules)]
    if hf.uses_interface(*hf.attention_modules(model)):  # its table, under its own names, and its own eager attention
        names = {str(getattr(config, "_attn_implementation", None)) for config in hf.configs_of(model)}
        names |= {hf.IMPLEMENTATION} if hf.has_installed_encoding(model) else set()
        changes += [hf.table_entries(names & hf.interface_table().keys()), hf.eager_entries(model)]
    return hf.apply_patches(model, *changes)


class CallAddress(NamedTuple):
    """One attention call in a pass: its module, the layer call that it is in or before, and its number there."""

    module: nn.Module
    layer: int
    number: int


class _LayersDone(Exception):
    """The requested layers are done."""


@dataclass(eq=False)
class Replay(hf.Observer):
    """One pass over some copies of a batch, which may skip layers, change head outputs, and keep outputs."""

    may_skip = True

    passes: ReplayedPasses
    copies: int = 1  # number of copies of the batch, one after the other
    changes: Mapping[CallAddress, HeadChange] = field(default_factory=dict)  # of the heads' outputs
    start: int = 0  # layer calls before this one, from 0 in the order of the pass, return the outputs at the start
    start_outputs: Mapping[str, Any] = field(default_factory=dict)  # by list of layers, of its last one before start
    stop: int = 0  # the pass ends before this layer call, and `layer_outputs` are those so far; 0 for a whole pass
    layer_outputs: dict[str, Any] = field(default_factory=dict)  # by list of layers, of its last one so far
    addresses: list[CallAddress] = field(default_factory=list)  # the addresses encountered
    output: Any = None  # the model's output, with logits only at the last position
    _container_outputs: dict[nn.Module, Any] = field(default_factory=dict)
    _given_states: Tensor | None = None
    _layer_calls: int = 0
    _current_layer: int | None = None
    _call_counts: Counter[tuple[nn.Module, int]] = field(default_factory=Counter)
    _in_container: bool = False

    def run(self) -> None:
        """Run the model, within `observe_passes`. Raises `InputError` if an address of a change was not encountered."""
        self.layer_outputs = dict(self.start_outputs) if self.stop else {}
        self.start_outputs = tree_map(_clone, dict(self.start_outputs))  # layers may modify their inputs
        try:
            inputs = self._repeat_batch(self.passes.metric.inputs)
            with hf.observing(self):
                self.output = self.passes.model(**inputs)
        except _LayersDone:
            return
        finally:
            self.start_outputs = {}
        if self.stop:
            raise InputError(f"model: its forward pass has no {self.stop} calls of layers that end one by one.")
        missing = [type(address.module).__name__ for address in self.changes if address not in self.addresses]
        if missing:
            raise InputError(f"model: head outputs of {missing[0]} did not occur, so they were not changed.")

    def logits(self, states: Float[Tensor, "R n d"]) -> Float[Tensor, "R n V"]:
        """Logits of some of the last hidden states, from the model's own head only."""
        self._given_states = states
        try:
            with hf.observing(self):
                return _named_tensor(self.passes.model(**self.passes.metric.inputs), "logits")
        finally:
            self._given_states = None

    @property
    def states(self) -> Float[Tensor, "R N d"]:
        """The output of the part that ran last: the last hidden states, before the head."""
        last = getattr(self.output, "last_hidden_state", None)
        output = next(reversed(self._container_outputs.values()), self.output) if last is None else last
        return output if isinstance(output, Tensor) else output[0]

    def _repeat_batch(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """New tensors with every sequence ``copies`` times, copy after copy; tensors without a batch are cloned."""

        def copy(x: Any) -> Any:
            has_batch = isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == self.passes.batch
            return x.repeat(self.copies, *(1,) * (x.ndim - 1)) if has_batch else _clone(x)

        return inputs if self.copies == 1 else tree_map(copy, inputs)

    def run_module(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module of the layout is called."""
        layout = self.passes.layout
        groups = layout.custom_attention, layout.layers, layout.containers, (layout.output_embedding,)
        runs = self._run_attention, self._run_layer, self._run_container, self._run_embedding
        for modules, run in zip(groups, runs, strict=True):
            if module in modules:
                forward = partial(run, module, forward)
        return forward(*args, **kwargs)

    def attend(self, call: hf.InterfaceCall) -> Any:
        """A module uses the attention interface."""
        with hf.observing(hf.NO_OBSERVER):
            heads, *rest = call.run()
        change = self.changes.get(self._next_address(call.module))
        return (heads if change is None else change(heads), *rest)

    def _next_address(self, module: nn.Module) -> CallAddress:
        layer = self._layer_calls if self._current_layer is None else self._current_layer
        self.addresses.append(CallAddress(module, layer, self._call_counts[module, layer]))
        self._call_counts[module, layer] += 1
        return self.addresses[-1]

    def _run_attention(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Attention written in the module's own code: change the product of weights and values."""
        address = self._next_address(module)
        if (change := self.changes.get(address)) is None:
            return forward(*args, **kwargs)
        count = 0

        def change_traced(traced: TracedTensor, values: Tensor, out: Tensor) -> Tensor:
            nonlocal count
            count += 1
            heads = split_heads(out, self.passes.batch * self.copies).transpose(1, 2)
            return change(heads).transpose(1, 2).reshape(out.shape)

        with ProductTracer(lambda: True, change_traced):
            output = forward(*args, **kwargs)
        if count != 1:
            self.addresses.remove(address)
        return output

    def _run_layer(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number, list_name = self._layer_calls, self.passes.layout.layers[module]
        self._layer_calls += 1
        if number < self.start:
            return self.start_outputs[list_name]
        before, self._current_layer = self._current_layer, number
        output = forward(*args, **kwargs)
        self._current_layer = before
        if number < self.stop:
            self.layer_outputs[list_name] = tree_map(_clone, output)
            if number == self.stop - 1:
                raise _LayersDone
        return output

    def _run_container(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._in_container:
            return forward(*args, **kwargs)
        if self._given_states is None:
            self._in_container = True
            self._container_outputs.pop(module, None)
            self._container_outputs[module] = forward(*args, **kwargs)
            self._in_container = False
            return self._container_outputs[module]
        output = self._container_outputs[module]
        if module is not next(reversed(self._container_outputs)):
            return output
        if isinstance(output, Tensor):
            return self._given_states
        if isinstance(output, tuple):
            return (self._given_states, *output[1:])
        return type(output)(**{**output, next(iter(output)): self._given_states})

    def _run_embedding(self, module: nn.Module, forward: Callable[..., Any], states: Tensor) -> Any:
        return forward(states[:, -1:] if self._given_states is None and states.ndim == 3 else states)


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _named_tensor(output: Any, name: str) -> Tensor:
    """The tensor of this name in an output; the first one if there is none."""
    tensor = getattr(output, name, None)
    return (output if isinstance(output, Tensor) else output[0]) if tensor is None else tensor


class ReplayedPasses:
    """Passes of one model over one batch, starting with the intact one; within `observe_passes`.

    The intact pass has ``states`` [B, N, d], ``addresses`` in order and, with a loss, a ``baseline`` [B, K] and a
    ``vocabulary``; ``readout`` is the model's head if it is one matrix product. At most ``max_copies`` share a pass.
    Equal states differ by at most ``tolerance`` of their size. Raises `InputError` for a head that is not supported.
    """

    @torch.no_grad()
    def __init__(self, model: Any, layout: ModelLayout, metric: EffectMetric) -> None:
        self.model, self.layout, self.metric = model, layout, metric
        self.batch = len(metric.token_mask)
        tokens = _CPU_TOKENS if metric.token_mask.device.type == "cpu" else _MAX_TOKENS
        self.max_copies = max(1, tokens // (self.batch * metric.tokens)) if metric.allows_copies else 1
        self.class_name = type(model).__name__
        self.readout: Readout | None = None
        self.tolerance = hf.tolerance(hf.precision(model), "states")
        self._starts: dict[int, tuple[int, dict[str, Any]]] = {}  # by copies, a layer call and the outputs before it
        intact = self.run()
        self.states, self.addresses, self.baseline, self.vocabulary = intact.states, intact.addresses, None, 0
        if metric.labels is not None:
            logits = _named_tensor(intact.output, "logits")[:, -1:]
            repeated = intact.logits(self.states[:, -1:])
            self.vocabulary = repeated.shape[-1]
            same_shape, logits, repeated = repeated.shape == logits.shape, upcast(logits), upcast(repeated)
            difference = float((repeated - logits).abs().max()) if same_shape else torch.inf
            if not difference <= self.tolerance * float(logits.abs().max().clamp_min(1)):
                reason = "logits at a position depend on more than the last hidden state there"
                raise InputError(f"model: the head of {self.class_name} was not understood: {reason}.")
            if (top := int(metric.labels.max())) >= self.vocabulary:
                raise invalid("inputs", f"have tokens under {self.vocabulary}, the logits of {self.class_name}", top)
            self.readout = Readout.of(layout.output_embedding, self.states[:, -1:], intact.logits)
            self.baseline = self.losses(intact)

    @property
    def intact_loss(self) -> Float[np.ndarray, "B"] | None:
        """The intact loss of each sequence; None without a loss."""
        return None if self.baseline is None else self.baseline.mean(1).cpu().numpy()

    def run(self, copies: int = 1, **parts: Any) -> Replay:
        """One pass up to the head. Raises `InputError` unless it has one last hidden state per token."""
        replay = Replay(self, copies, **parts)
        replay.run()
        expected, shape = [self.batch * copies, self.metric.token_mask.shape[1]], list(replay.states.shape)
        if len(shape) != 3 or shape[:2] != expected:
            must = f"start with shape {expected}, one per token"
            raise invalid(f"model: the last hidden states of {self.class_name}", must, got=str(shape))
        return replay

    def start(self, layer: int, copies: int) -> dict[str, Any]:
        """Arguments of `run` for passes of this many copies that start at a layer call, which must not descend."""
        cached_layer, outputs = self._starts.get(copies, (0, {}))
        if cached_layer < layer:
            replay = Replay(self, copies, start=cached_layer, start_outputs=outputs, stop=layer)
            replay.run()
            outputs = replay.layer_outputs
            self._starts[copies] = layer, outputs
        return {"start": layer, "start_outputs": outputs}

    def plan(
        self, layer_calls: Sequence[int], counts: Sequence[int], intact: Sequence[int], is_verified: bool = False
    ) -> tuple[int, list[range]]:
        """Number of copies per pass, and which neighbouring calls share passes, so that few layers are run.

        Calls are in or before ``layer_calls``, in order, and have ``counts`` of changes; passes that start at their
        layer have at least ``intact`` unchanged copies. Passes of several calls start at the first one's layer. One
        copy if copies are not independent, which a pass of two tests unless this ``is_verified``.
        """
        layers = 1 + max(address.layer for address in self.addresses)
        call_cost = _CALL_COST  # a layer's calls cost as much as some tokens, on a CPU fewer for larger weights
        if self.metric.token_mask.device.type == "cpu":
            weights = sum(weight.numel() for layer in self.layout.layers for weight in layer.parameters())
            call_cost = min(call_cost, _CPU_CALL_COST * layers // max(1, weights))
        overhead, remaining = call_cost / (self.batch * self.metric.tokens), [layers - item for item in layer_calls]
        widths = range(1, min(max(counts) + 1, self.max_copies) + 1)
        plans = {width: group_calls(remaining, counts, width, overhead, intact) for width in widths}
        width = min(widths, key=lambda width: plans[width][0])
        try:
            if width > 1 and not is_verified:
                self.check_intact(self.run(2))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            width = 1
        return width, plans[width][1]

    def check_intact(self, replay: Replay, first: int = 0) -> None:
        """Refuse a pass in which the copies of the batch from ``first`` on differ from the intact states."""
        copies = replay.states[first * self.batch :].split(self.batch)
        mask = self.metric.token_mask
        difference = max(effect_metric.state_distance(states, self.states, mask) for states in copies)
        if not difference <= self.tolerance:
            by = f"{difference:.1e} in the last hidden states"
            raise InputError(
                f"model: {self.class_name} is not deterministic: two runs without ablation differ by {by}."
            )

    def effects(self, replay: Replay, copies: int) -> Float[Tensor, "R K"]:
        """The effect in each row of a pass's first copies, split over the metric's blocks."""
        if self.baseline is None:
            states = replay.states[: copies * self.batch]
            return effect_metric.state_change(states, self.states, self.metric.token_mask, self.metric.blocks)
        return self.losses(replay, copies) - self.baseline.repeat(copies, 1)

    def losses(self, replay: Replay, copies: int = 1) -> Float[Tensor, "R K"]:
        """The loss of each row of a pass's first copies, split over the metric's blocks of tokens."""
        assert self.metric.labels is not None
        x = replay.states[: copies * self.batch]
        labels = self.metric.labels.to(x.device).repeat(copies, 1)
        blocks = self.metric.blocks
        if self.readout is not None:
            return over_labels(self.readout.cross_entropies(x, labels), labels, blocks)
        return effect_metric.losses(labels, lambda at: replay.logits(x[:, at]), self.vocabulary, blocks)


def group_calls(
    remaining: Sequence[int], counts: Sequence[int], width: int, overhead: float, intact: Sequence[int]
) -> tuple[float, list[range]]:
    """The minimum cost, in layers, of passes with ``width`` copies, and which neighbouring calls they then combine.

    Calls have ``remaining`` layers from theirs on; a pass has a fixed cost, ``overhead``, in copies: see
    `ReplayedPasses.plan`.
    """
    best: list[tuple[float, list[range]]] = [(0.0, [])]
    for stop in range(1, len(remaining) + 1):
        options = []
        for start in range(stop - 1, -1, -1):
            passes = -(-(sum(counts[start:stop]) + intact[start]) // width)
            cost = best[start][0] + remaining[start] * passes * (width + overhead)
            options.append((cost, [*best[start][1], range(start, stop)]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1]


def check_shape(heads: Tensor, rows: int, count: int) -> None:
    """Refuse head outputs that do not have this many sequences and heads."""
    if heads.ndim != 4 or heads.shape[::2] != (rows, count):
        shape = f"shape {list(heads.shape)} (sequences, queries, heads, width)"
        raise invalid("calls", f"have {rows} sequences and {count} heads", got=shape)


@torch.no_grad()
def measure_effects(
    passes: ReplayedPasses,
    addresses: Sequence[CallAddress],
    counts: Sequence[int],
    chosen: Sequence[Sequence[int]],
    change: Callable[[int, Sequence[int]], HeadChange],
    on_call: Callable[[int, Float[np.ndarray, "B K _H"]], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    verified: Collection[int] = (),
) -> tuple[list[Float[np.ndarray, "B K _H"]], int]:
    """Each call's effects, NaN for what is not chosen; and the number of calls that were replayed from their layer.

    The changes of a call, one head or band each, are copies of the batch in a few passes with equally many copies;
    neighbouring calls may share them (`ReplayedPasses.plan`). The output of the layers before a call is computed once.
    In the last pass from each layer, some copies are unchanged and must give the intact states; if a replay fails,
    whole passes are run from that layer on. For ``verified`` calls (`verified_calls`), only the passes from the first
    layer are checked, and others if they have copies to spare.
    """
    effects = [np.full((passes.batch, passes.metric.blocks, count), np.nan) for count in counts]
    total = sum(map(len, chosen))
    if not total:
        return effects, 0
    order = sorted((i for i, selected in enumerate(chosen) if len(selected)), key=lambda index: addresses[index].layer)
    intact = [int(position == 0 or index not in verified) for position, index in enumerate(order)]
    layers, sizes = [addresses[index].layer for index in order], [len(chosen[index]) for index in order]
    width, groups = passes.plan(layers, sizes, intact, is_verified=bool(verified))
    attempts = [(True, width), (False, width), *([(False, 1)] if width > 1 else [])]
    finished = replayed = 0

    def run(batch: Sequence[tuple[int, int]], **options: Any) -> Replay:
        calls = dict.fromkeys(index for index, _ in batch)
        changed = {index: [head if target == index else UNCHANGED for target, head in batch] for index in calls}
        changes = {addresses[index]: change(index, heads) for index, heads in changed.items()}
        return passes.run(len(batch), changes=changes, **options)

    for group in groups:
        calls = [order[position] for position in group]
        layer = addresses[calls[0]].layer
        heads = [(index, head) for index in calls for head in chosen[index]]
        while True:
            (from_layer, width), values = attempts[0], list[Float[Tensor, "R K"]]()
            for start in range(0, len(heads) + intact[group.start], width):
                batch = heads[start : start + width]
                try:
                    options = passes.start(layer, width) if from_layer else {}
                    replay = run([*batch, *[(calls[0], UNCHANGED)] * (width - len(batch))], **options)
                    if len(batch) < width:
                        passes.check_intact(replay, len(batch))
                except Exception as error:
                    if len(attempts) == 1 or is_out_of_memory(error):
                        raise
                    break
                if batch:
                    values.append(passes.effects(replay, len(batch)))
                if on_progress is not None:
                    on_progress(finished + start + len(batch), total)
            else:
                break
            attempts.pop(0)
        if from_layer and layer > 0:
            replayed += len(calls)
        split = torch.cat(values).unflatten(0, (-1, passes.batch)).permute(1, 2, 0).cpu().numpy()
        for column, (index, head) in enumerate(heads):
            effects[index][:, :, head] = split[:, :, column]
            if on_call is not None and head == chosen[index][-1]:  # the last one
                on_call(index, effects[index])
        finished += len(heads)
    return effects, replayed


@torch.no_grad()
def verified_calls(passes: ReplayedPasses, addresses: Sequence[CallAddress]) -> frozenset[int]:
    """The calls of a long input for which a replay of two copies of its first tokens gives the intact states; none if
    these cannot be run separately, or attention is custom code, which may depend on the length."""
    short_metric = None if passes.layout.custom_attention else passes.metric.shortened()
    if short_metric is None:
        return frozenset()
    later_calls = [index for index, address in enumerate(addresses) if address.layer]
    later_calls.sort(key=lambda index: addresses[index].layer)
    try:
        short = ReplayedPasses(passes.model, passes.layout, short_metric)
        for index in later_calls:
            options = short.start(addresses[index].layer, 2)
            short.start(addresses[index].layer, 1)  # so that what these layers leave elsewhere is not of two copies
            short.check_intact(short.run(2, **options))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return frozenset()
    return frozenset(later_calls)
