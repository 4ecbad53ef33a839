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

from toeplens.ground import InputError, invalid
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface import model as hf
from toeplens.sources.huggingface.outcome import Outcome, Readout, apart, losses, moved, over_labels, wide
from toeplens.sources.huggingface.trace import Followed, Products, four

_CACHED, _TOKENS = 4096, 12288  # maximum tokens of a pass over its copies: on a CPU (cache size), and elsewhere
_CALLS, _WORTH = 256, 10**8  # fixed cost of a layer's calls: 256 tokens, on a CPU at most 1e8 / its weights
NOTHING = -1  # index of an unchanged copy
Altered = Callable[[Float[Tensor, "R N H dv"]], Float[Tensor, "R N H dv"]]


@dataclass(frozen=True)
class Anatomy:
    """The layers, the attention and the head of a model.

    items      the layers: members of the outermost module lists that contain attention, with the name of the list
    written    attention modules that do not use transformers' attention interface
    parts      modules that contain the layers, or attention outside of them, except the model itself, and siblings of
               its head: the outermost of those that are called returns the hidden states for the head
    embedding  the output embedding; None if there is none, or it is inside a part or also embeds the input
    """

    items: dict[nn.Module, str]
    written: frozenset[nn.Module]
    parts: frozenset[nn.Module]
    embedding: nn.Module | None


def anatomy_of(model: Any) -> Anatomy:
    """Find the layers, the attention and the head of a transformers model."""
    attention = hf.attention_modules(model)
    named = dict(model.named_modules(remove_duplicate=False))
    items: dict[nn.Module, str] = {}
    parts: set[nn.Module] = set()
    for name in attention.values():
        words = name.split(".")
        above = [".".join(words[:count]) for count in range(1, len(words))]
        lists = next((each for each in above if isinstance(named[each], nn.ModuleList)), None)
        if lists is not None:
            items |= dict.fromkeys(named[lists].children(), lists)
            above = above[: above.index(lists)]
        parts |= {named[each] for each in above}
    written = frozenset(module for module in attention if not hf.asks_interface(module))
    embedding = model.get_output_embeddings()
    if embedding is None or embedding is hf.input_embedding(model):
        return Anatomy(items, written, frozenset(parts), None)
    whole = {part for part in parts if embedding in set(part.modules())}
    parts -= {part for part in whole if any(each in parts - whole for each in part.modules())}
    return Anatomy(items, written, frozenset(parts), None if whole & parts else embedding)


def observed(model: Any, anatomy: Anatomy) -> AbstractContextManager[None]:
    """Report the passes inside, layer by layer, to the observer of their thread (`patched`)."""
    modules = {*anatomy.items, *anatomy.written, *anatomy.parts, anatomy.embedding} - {None}
    changes = [hf.visited(modules)]
    if hf.asks_interface(*hf.attention_modules(model)):  # its table, under its own names, and its own eager attention
        names = {str(getattr(config, "_attn_implementation", None)) for config in hf.configs_of(model)}
        names |= {hf.NAME} if hf.is_host(model) else set()
        changes += [hf.table_entries(names & hf.table().keys()), hf.eager_entries(model)]
    return hf.patched(model, *changes)


class Address(NamedTuple):
    """One attention call in a pass: its module, the layer call that it is in or before, and its number there."""

    module: nn.Module
    item: int
    turn: int


class _Enough(Exception):
    """The requested layers are done."""


@dataclass(eq=False)
class Replay(hf.Observer):
    """One pass over some copies of a batch, which may skip layers, change head outputs, and keep outputs."""

    skips = True

    passes: Passes
    rows: int = 1  # number of copies of the batch, one after the other
    changes: Mapping[Address, Altered] = field(default_factory=dict)  # of the heads' outputs
    start: int = (
        0  # layer calls before this one, from 0 in the order of the pass, are skipped: they return what is held
    )
    held: Mapping[str, Any] = field(
        default_factory=dict
    )  # by list of layers, the output of its last layer before start
    until: int = 0  # the pass ends before this layer call, and `kept` has the outputs so far; 0 for a whole pass
    kept: dict[str, Any] = field(default_factory=dict)  # by list of layers, the output of its last layer so far
    order: list[Address] = field(default_factory=list)  # the addresses encountered
    output: Any = None  # the model's output, with logits only at the last position
    _parts: dict[nn.Module, Any] = field(default_factory=dict)
    _fed: Tensor | None = None
    _items: int = 0
    _inside: int | None = None
    _seen: Counter[tuple[nn.Module, int]] = field(default_factory=Counter)
    _within: bool = False

    def run(self) -> None:
        """Run the model, within `observed`. Raises `InputError` if an address of a change was not encountered."""
        self.kept = dict(self.held) if self.until else {}
        self.held = tree_map(_fresh, dict(self.held))  # layers may modify their inputs
        try:
            inputs = self._copied(self.passes.outcome.inputs)
            with hf.observing(self):
                self.output = self.passes.model(**inputs)
        except _Enough:
            return
        finally:
            self.held = {}
        if self.until:
            raise InputError(f"model: its forward pass has no {self.until} calls of layers that end one by one.")
        missing = [type(each.module).__name__ for each in self.changes if each not in self.order]
        if missing:
            raise InputError(f"model: head outputs of {missing[0]} did not occur, so they were not changed.")

    def logits(self, states: Float[Tensor, "R n d"]) -> Float[Tensor, "R n V"]:
        """Logits of some of the last hidden states, from the model's own head only."""
        self._fed = states
        try:
            with hf.observing(self):
                return _first(self.passes.model(**self.passes.outcome.inputs), "logits")
        finally:
            self._fed = None

    @property
    def states(self) -> Float[Tensor, "R N d"]:
        """The output of the part that ran last: the last hidden states, before the head."""
        found = getattr(self.output, "last_hidden_state", None)
        part = next(reversed(self._parts.values()), self.output) if found is None else found
        return part if isinstance(part, Tensor) else part[0]

    def _copied(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """New tensors with every sequence ``rows`` times, copy after copy; tensors without a batch are cloned."""

        def copy(x: Any) -> Any:
            batched = isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == self.passes.batch
            return x.repeat(self.rows, *(1,) * (x.ndim - 1)) if batched else _fresh(x)

        return inputs if self.rows == 1 else tree_map(copy, inputs)

    def visit(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module of the anatomy is called."""
        anatomy = self.passes.anatomy
        groups = anatomy.written, anatomy.items, anatomy.parts, (anatomy.embedding,)
        for modules, role in zip(groups, (self._attention, self._item, self._part, self._embedding), strict=True):
            if module in modules:
                forward = partial(role, module, forward)
        return forward(*args, **kwargs)

    def attend(self, call: hf.AttentionInputs) -> Any:
        """A module uses the attention interface."""
        with hf.observing(hf.NOBODY):
            heads, *rest = call.run()
        change = self.changes.get(self._address(call.module))
        return (heads if change is None else change(heads), *rest)

    def _address(self, module: nn.Module) -> Address:
        item = self._items if self._inside is None else self._inside
        self.order.append(Address(module, item, self._seen[module, item]))
        self._seen[module, item] += 1
        return self.order[-1]

    def _attention(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Attention written in the module's own code: change the product of weights and values."""
        address = self._address(module)
        if (change := self.changes.get(address)) is None:
            return forward(*args, **kwargs)
        count = 0

        def changed(followed: Followed, values: Tensor, out: Tensor) -> Tensor:
            nonlocal count
            count += 1
            heads = four(out, self.passes.batch * self.rows).transpose(1, 2)
            return change(heads).transpose(1, 2).reshape(out.shape)

        with Products(lambda: True, changed):
            output = forward(*args, **kwargs)
        if count != 1:
            self.order.remove(address)
        return output

    def _item(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number, where = self._items, self.passes.anatomy.items[module]
        self._items += 1
        if number < self.start:
            return self.held[where]
        before, self._inside = self._inside, number
        output = forward(*args, **kwargs)
        self._inside = before
        if number < self.until:
            self.kept[where] = tree_map(_fresh, output)
            if number == self.until - 1:
                raise _Enough
        return output

    def _part(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._within:
            return forward(*args, **kwargs)
        if self._fed is None:
            self._within = True
            self._parts.pop(module, None)
            self._parts[module] = forward(*args, **kwargs)
            self._within = False
            return self._parts[module]
        output = self._parts[module]
        if module is not next(reversed(self._parts)):
            return output
        if isinstance(output, Tensor):
            return self._fed
        if isinstance(output, tuple):
            return (self._fed, *output[1:])
        return type(output)(**{**output, next(iter(output)): self._fed})

    def _embedding(self, module: nn.Module, forward: Callable[..., Any], states: Tensor) -> Any:
        return forward(states[:, -1:] if self._fed is None and states.ndim == 3 else states)


def _fresh(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _first(output: Any, name: str) -> Tensor:
    """The tensor of this name in an output; the first one if there is none."""
    found = getattr(output, name, None)
    return (output if isinstance(output, Tensor) else output[0]) if found is None else found


class Passes:
    """Passes of one model over one batch, starting with the intact one; within `observed`.

    The intact pass has ``states`` [B, N, d], an ``order`` of addresses and, with a loss, a ``baseline`` [B, K] and a
    ``vocabulary``; ``readout`` is the model's head if it is one matrix product. At most ``width`` copies share a pass.
    Equal states differ by at most ``same`` of their size. Raises `InputError` for a head that is not supported.
    """

    @torch.no_grad()
    def __init__(self, model: Any, anatomy: Anatomy, outcome: Outcome) -> None:
        self.model, self.anatomy, self.outcome = model, anatomy, outcome
        self.batch = len(outcome.counted)
        tokens = _CACHED if outcome.counted.device.type == "cpu" else _TOKENS
        self.width = max(1, tokens // (self.batch * outcome.tokens)) if outcome.copies else 1
        self.kind = type(model).__name__
        self.readout: Readout | None = None
        self.same = hf.tolerance(hf.precision(model), "states")
        self._starts: dict[int, tuple[int, dict[str, Any]]] = {}  # by copies, a layer call and the outputs before it
        intact = self.run()
        self.states, self.order, self.baseline, self.vocabulary = intact.states, intact.order, None, 0
        if outcome.labels is not None:
            own = _first(intact.output, "logits")[:, -1:]
            again = intact.logits(self.states[:, -1:])
            self.vocabulary = again.shape[-1]
            far = float((wide(again) - wide(own)).abs().max()) if again.shape == own.shape else torch.inf
            if not far <= self.same * float(wide(own).abs().max().clamp_min(1)):
                why = "logits at a position depend on more than the last hidden state there"
                raise InputError(f"model: the head of {self.kind} was not understood: {why}.")
            if (last := int(outcome.labels.max())) >= self.vocabulary:
                raise invalid("inputs", f"have tokens under {self.vocabulary}, the logits of {self.kind}", last)
            self.readout = Readout.of(anatomy.embedding, self.states[:, -1:], intact.logits)
            self.baseline = self.losses(intact)

    @property
    def intact_loss(self) -> Float[np.ndarray, "B"] | None:
        """The intact loss of each sequence; None without a loss."""
        return None if self.baseline is None else self.baseline.mean(1).cpu().numpy()

    def run(self, rows: int = 1, **parts: Any) -> Replay:
        """One pass up to the head. Raises `InputError` unless it has one last hidden state per token."""
        found = Replay(self, rows, **parts)
        found.run()
        wanted, shape = [self.batch * rows, self.outcome.counted.shape[1]], list(found.states.shape)
        if len(shape) != 3 or shape[:2] != wanted:
            must = f"start with shape {wanted}, one per token"
            raise invalid(f"model: the last hidden states of {self.kind}", must, got=str(shape))
        return found

    def start(self, item: int, copies: int) -> dict[str, Any]:
        """Arguments of `run` for passes of this many copies that start at a layer call, which must not descend."""
        reached, held = self._starts.get(copies, (0, {}))
        if reached < item:
            found = Replay(self, copies, start=reached, held=held, until=item)
            found.run()
            held = found.kept
            self._starts[copies] = item, held
        return {"start": item, "held": held}

    def plan(
        self, items: Sequence[int], counts: Sequence[int], intact: Sequence[int], alike: bool = False
    ) -> tuple[int, list[range]]:
        """Number of copies per pass, and which neighbouring calls share passes, so that few layers are run.

        Calls are in or before the layer calls ``items``, in order, and have ``counts`` of changes; passes that start at
        their layer have at least ``intact`` unchanged copies. Passes of several calls start at the first one's layer.
        One copy if copies are not independent, which a pass of two tests unless they are known to be ``alike``.
        """
        layers = 1 + max(each.item for each in self.order)
        fixed = _CALLS  # a layer's calls cost as much as some tokens, on a CPU fewer for larger weights
        if self.outcome.counted.device.type == "cpu":
            weights = sum(weight.numel() for layer in self.anatomy.items for weight in layer.parameters())
            fixed = min(fixed, _WORTH * layers // max(1, weights))
        alone, left = fixed / (self.batch * self.outcome.tokens), [layers - item for item in items]
        widths = range(1, min(max(counts) + 1, self.width) + 1)
        found = {width: together(left, counts, width, alone, intact) for width in widths}
        width = min(widths, key=lambda width: found[width][0])
        try:
            if width > 1 and not alike:
                self.require_same(self.run(2))
        except Exception as error:
            if out_of_memory(error):
                raise
            width = 1
        return width, found[width][1]

    def require_same(self, found: Replay, first: int = 0) -> None:
        """Refuse a pass in which the copies of the batch from ``first`` on differ from the intact states."""
        copies = found.states[first * self.batch :].split(self.batch)
        far = max(apart(states, self.states, self.outcome.counted) for states in copies)
        if not far <= self.same:
            by = f"{far:.1e} in the last hidden states"
            raise InputError(f"model: {self.kind} is not deterministic: two runs without ablation differ by {by}.")

    def effects(self, found: Replay, copies: int) -> Float[Tensor, "R K"]:
        """The effect in each row of a pass's first copies, split over the outcome's blocks."""
        if self.baseline is None:
            states = found.states[: copies * self.batch]
            return moved(states, self.states, self.outcome.counted, self.outcome.blocks)
        return self.losses(found, copies) - self.baseline.repeat(copies, 1)

    def losses(self, found: Replay, copies: int = 1) -> Float[Tensor, "R K"]:
        """The loss of each row of a pass's first copies, split over the outcome's blocks of tokens."""
        assert self.outcome.labels is not None
        states = found.states[: copies * self.batch]
        labels = self.outcome.labels.to(states.device).repeat(copies, 1)
        blocks = self.outcome.blocks
        if self.readout is not None:
            return over_labels(self.readout.cross_entropies(states, labels), labels, blocks)
        return losses(labels, lambda at: found.logits(states[:, at]), self.vocabulary, blocks)


def together(
    left: Sequence[int], counts: Sequence[int], width: int, alone: float, intact: Sequence[int]
) -> tuple[float, list[range]]:
    """The minimum cost, in layers, of passes with ``width`` copies, and which neighbouring calls they then combine.

    Calls have ``left`` layers from theirs on; a pass has a fixed cost, ``alone``, in copies. See `Passes.plan`.
    """
    best: list[tuple[float, list[range]]] = [(0.0, [])]
    for stop in range(1, len(left) + 1):
        found = []
        for start in range(stop - 1, -1, -1):
            passes = -(-(sum(counts[start:stop]) + intact[start]) // width)
            cost = best[start][0] + left[start] * passes * (width + alone)
            found.append((cost, [*best[start][1], range(start, stop)]))
        best.append(min(found, key=lambda each: each[0]))
    return best[-1]


def fits(heads: Tensor, rows: int, count: int) -> None:
    """Refuse head outputs that do not have this many sequences and heads."""
    if heads.ndim != 4 or heads.shape[::2] != (rows, count):
        shape = f"shape {list(heads.shape)} (sequences, queries, heads, width)"
        raise invalid("calls", f"have {rows} sequences and {count} heads", got=shape)


@torch.no_grad()
def one_by_one(
    passes: Passes,
    places: Sequence[Address],
    counts: Sequence[int],
    chosen: Sequence[Sequence[int]],
    change: Callable[[int, Sequence[int]], Altered],
    on_call: Callable[[int, Float[np.ndarray, "B K _H"]], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    known: Collection[int] = (),
) -> tuple[list[Float[np.ndarray, "B K _H"]], int]:
    """Each call's effects, NaN for what is not chosen; and the number of calls that were replayed from their layer.

    The changes of a call, one head or band each, are copies of the batch in a few passes with equally many copies;
    neighbouring calls may share them (`Passes.plan`). The output of the layers before a call is computed once. In the
    last pass from each layer, some copies are unchanged and must give the intact states; if a replay fails, whole
    passes are run from that layer on. For calls known to give these states (`intact_from`), only the passes from the
    first layer are checked, and others if they have copies to spare.
    """
    effects = [np.full((passes.batch, passes.outcome.blocks, count), np.nan) for count in counts]
    total = sum(map(len, chosen))
    if not total:
        return effects, 0
    order = sorted((i for i, each in enumerate(chosen) if len(each)), key=lambda index: places[index].item)
    intact = [int(place == 0 or index not in known) for place, index in enumerate(order)]
    begins, sizes = [places[index].item for index in order], [len(chosen[index]) for index in order]
    width, groups = passes.plan(begins, sizes, intact, alike=bool(known))
    ways = [(True, width), (False, width), *([(False, 1)] if width > 1 else [])]
    done = replayed = 0

    def run(some: Sequence[tuple[int, int]], **parts: Any) -> Replay:
        calls = dict.fromkeys(index for index, _ in some)
        changed = {index: [head if own == index else NOTHING for own, head in some] for index in calls}
        changes = {places[index]: change(index, heads) for index, heads in changed.items()}
        return passes.run(len(some), changes=changes, **parts)

    for group in groups:
        calls = [order[place] for place in group]
        begin = places[calls[0]].item
        heads = [(index, head) for index in calls for head in chosen[index]]
        while True:
            (replays, width), values = ways[0], list[Float[Tensor, "R K"]]()
            for start in range(0, len(heads) + intact[group.start], width):
                some = heads[start : start + width]
                try:
                    parts = passes.start(begin, width) if replays else {}
                    found = run([*some, *[(calls[0], NOTHING)] * (width - len(some))], **parts)
                    if len(some) < width:
                        passes.require_same(found, len(some))
                except Exception as error:
                    if len(ways) == 1 or out_of_memory(error):
                        raise
                    break
                if some:
                    values.append(passes.effects(found, len(some)))
                if on_progress is not None:
                    on_progress(done + start + len(some), total)
            else:
                break
            ways.pop(0)
        if replays and begin > 0:
            replayed += len(calls)
        split = torch.cat(values).unflatten(0, (-1, passes.batch)).permute(1, 2, 0).cpu().numpy()
        for column, (index, head) in enumerate(heads):
            effects[index][:, :, head] = split[:, :, column]
            if on_call is not None and head == chosen[index][-1]:  # the last one
                on_call(index, effects[index])
        done += len(heads)
    return effects, replayed


@torch.no_grad()
def intact_from(passes: Passes, places: Sequence[Address]) -> frozenset[int]:
    """The calls of a long input for which a replay of two copies of its first tokens gives the intact states; none if
    these cannot be run separately, or attention is custom code, which may depend on the length."""
    few = None if passes.anatomy.written else passes.outcome.shortened()
    if few is None:
        return frozenset()
    late = sorted((index for index, place in enumerate(places) if place.item), key=lambda index: places[index].item)
    try:
        short = Passes(passes.model, passes.anatomy, few)
        for index in late:
            parts = short.start(places[index].item, 2)
            short.start(places[index].item, 1)  # so that what these layers leave elsewhere is not of two copies
            short.require_same(short.run(2, **parts))
    except Exception as error:
        if out_of_memory(error):
            raise
        return frozenset()
    return frozenset(late)
