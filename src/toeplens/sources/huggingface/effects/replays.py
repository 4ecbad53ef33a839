"""Passes of a Hugging Face model that start at a layer, with changed head outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from toeplens.ground import InputError, invalid
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.products import Followed, Products, four
from toeplens.sources.huggingface.effects.outcome import AT_ONCE, NONE, Outcome, apart, losses, moved, over_labels, wide
from toeplens.sources.huggingface.interface import (
    OBSERVER,
    Entry,
    Observer,
    eager_entries,
    patched,
    table,
    table_entries,
)
from toeplens.sources.huggingface.model import (
    NAME,
    asks_interface,
    attention_modules,
    configs_of,
    input_embedding,
    is_host,
    precision,
    tolerance,
)


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
    attention = attention_modules(model)
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
    written = frozenset(module for module in attention if not asks_interface(module))
    embedding = model.get_output_embeddings()
    if embedding is None or embedding is input_embedding(model):
        return Anatomy(items, written, frozenset(parts), None)
    whole = {part for part in parts if embedding in set(part.modules())}
    parts -= {part for part in whole if any(each in parts - whole for each in part.modules())}
    if whole & parts:
        embedding = None
    return Anatomy(items, written, frozenset(parts), embedding)


def observed(model: Any, anatomy: Anatomy) -> AbstractContextManager[None]:
    """Report the passes inside, layer by layer, to the observer of their thread (`patched`)."""
    return patched(model, _forwards(anatomy), _attention(model))


def _forwards(anatomy: Anatomy) -> Iterator[Entry]:
    modules = {*anatomy.items, *anatomy.written, *anatomy.parts}
    for module in modules | ({anatomy.embedding} if anatomy.embedding is not None else set()):
        yield vars(module), "forward", partial(_visited, module)


def _visited(module: nn.Module, _before: Any) -> Callable[..., Any]:
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return OBSERVER.get().visit(module, original, args, kwargs)

    return forward


def _attention(model: nn.Module) -> Iterator[Entry]:
    """Observed entries of the attention interface's table, or the model's own eager attention.

    The entries keep their names, so that masks and everything else that depends on the name do not change.
    """
    if not asks_interface(*attention_modules(model)):
        return
    names = {str(getattr(config, "_attn_implementation", None)) for config in configs_of(model)}
    names |= {NAME} if is_host(model) else set()
    yield from table_entries(names & table().keys())
    yield from eager_entries(model)


_ALONE = -1  # axis of tensors that are equal for all copies


def layout(content: Any) -> str:
    """The structure of a content and the shapes of its tensors."""
    return str(tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, content))


def axes_of(one: Any, two: Any) -> list[int]:
    """The dimension of the copies in each leaf, found by comparing the content for one copy and for two.

    Raises `ValueError` if the two have different structures.
    """
    (own, spec), (others, other) = tree_flatten(one), tree_flatten(two)
    if spec != other:
        raise ValueError("two copies of a batch differ in structure")
    return [_axis(x, y) for x, y in zip(own, others, strict=True)]


def repeated(one: Any, axes: list[int], copies: int) -> Any:
    """The content for ``copies`` copies."""
    leaves, spec = tree_flatten(one)
    made = [x if axis == _ALONE else torch.cat([x] * copies, dim=axis) for x, axis in zip(leaves, axes, strict=True)]
    return tree_unflatten(made, spec)


def _axis(one: Any, two: Any) -> int:
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.ndim != two.ndim:
        return _ALONE
    longer = [axis for axis, (x, y) in enumerate(zip(one.shape, two.shape, strict=True)) if y == 2 * x != x]
    return longer[0] if longer else _ALONE


def together(
    left: Sequence[int], counts: Sequence[int], width: int, alone: float, intact: Sequence[int]
) -> tuple[float, list[range]]:
    """The minimum cost, in layers, of passes with ``width`` copies, and which neighbouring calls they then combine.

    Arguments
        left    number of layers from each call's on
        counts  number of changes of each call
        alone   fixed cost of a pass, in copies
        intact  minimum number of unchanged copies in passes that start at each call's layer
    """
    best, begins = [0.0], list[int]()
    for stop in range(1, len(left) + 1):
        cost = {
            start: best[start] + left[start] * -(-(sum(counts[start:stop]) + intact[start]) // width) * (width + alone)
            for start in range(stop - 1, -1, -1)
        }
        begins.append(min(cost, key=lambda start: cost[start]))
        best.append(cost[begins[-1]])
    groups, stop = list[range](), len(left)
    while stop:
        groups.append(range(begins[stop - 1], stop))
        stop = groups[-1].start
    return best[-1], groups[::-1]


_ROWS, _WORDS = 2048, 2048  # tokens and words at once on a CPU; 16 MB of logits
_ROUNDED, _FEW = 16, 3  # allowed roundings of a logit; the second for 16-bit precision
_LARGE = 1024.0  # states are scaled up to this size, at which a softcap would show


@dataclass(frozen=True)
class Readout:
    """A head whose logits are weight x + bias, so that losses can be computed for some words at a time.

    Going through all logits of a long input repeatedly would take over half as long as the product itself.

    weight  [V, d]
    bias    [V]; None without one
    """

    weight: Float[Tensor, "V d"]
    bias: Float[Tensor, "V"] | None

    @classmethod
    def of(
        cls,
        embedding: nn.Module | None,
        states: Float[Tensor, "B n d"],
        head: Callable[[Float[Tensor, "B n d"]], Float[Tensor, "B n V"]],
    ) -> Readout | None:
        """The output embedding as such a head. None unless the model's own ``head`` computes its product, on some
        states and on scaled ones, which would reveal a softcap."""
        if type(embedding) is not nn.Linear or type(embedding.weight) is not nn.Parameter or embedding.weight.is_meta:
            return None
        if states.dtype != embedding.weight.dtype:  # models convert these in their own ways
            return None
        if states.shape[-1] != embedding.weight.shape[1]:  # there is something in between
            return None
        eps = torch.finfo(states.dtype).eps
        allowed = eps * (_ROUNDED if eps <= torch.finfo(torch.float32).eps else _FEW)
        factor = 1.0
        for _ in range(2):
            some = factor * states
            logits = wide(head(some))
            made = wide(F.linear(some.to(embedding.weight.device), embedding.weight, embedding.bias)).to(logits.device)
            size = float(logits.abs().max())
            if made.shape != logits.shape or not float((made - logits).abs().max()) <= allowed * size:
                return None
            largest = max(size, float(wide(states).abs().max()))
            factor = 2.0 ** math.floor(math.log2(_LARGE / largest)) if largest > 0 else 1.0  # exact in any dtype
        return cls(embedding.weight, embedding.bias)

    def cross_entropies(self, states: Float[Tensor, "R N d"], labels: Int[Tensor, "R N"]) -> Float[Tensor, "R N"]:
        """Cross-entropy at each position, 0 without a label, in float64; sums over words are at least float32."""
        there = labels != NONE
        each = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        if not there.any():
            return each
        rows, wanted = states[there.to(states.device)].split(_ROWS), labels[there].split(_ROWS)
        device = self.weight.device
        found = [self._of(x.to(device), y.to(device)) for x, y in zip(rows, wanted, strict=True)]
        each[there] = torch.cat(found).to(each.device)
        return each

    def slopes(
        self, states: Float[Tensor, "B n d"]
    ) -> tuple[Float[Tensor, "B n V"], Callable[[Int[Tensor, "B n"]], Float[Tensor, "B n d"]]]:
        """The probabilities of all words at some positions, and a function that returns the gradient of the labels'
        summed losses at the states, 0 without a label."""
        weight = self.weight
        shares = wide(F.linear(states.to(weight.device), weight, self.bias)).softmax(-1)
        expected = shares.to(weight.dtype) @ weight

        def slopes(labels: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
            labels = labels.to(weight.device)
            there = (labels != NONE).unsqueeze(-1)
            return torch.where(there, expected - weight[labels.clamp_min(0)], 0)

        return shares, slopes

    def _of(self, x: Float[Tensor, "n d"], labels: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        words = _WORDS if x.device.type == "cpu" else max(_WORDS, AT_ONCE // len(x))
        dtype = torch.promote_types(x.dtype, torch.float32)
        total, own = (torch.zeros(len(x), dtype=dtype, device=x.device) for _ in range(2))
        top = torch.full_like(total, torch.finfo(dtype).min)
        for start in range(0, len(self.weight), words):
            some = slice(start, start + words)
            logits = wide(F.linear(x, self.weight[some], None if self.bias is None else self.bias[some]))
            at = labels - start
            here = (at >= 0) & (at < logits.shape[1])
            own = torch.where(here, logits.gather(1, at.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1), own)
            higher = torch.maximum(top, logits.amax(-1))
            total = total * (top - higher).exp() + logits.sub_(higher.unsqueeze(-1)).exp_().sum(-1)
            top = higher
        return (top + total.log() - own).double()


_CACHED, _TOKENS = 4096, 12288  # maximum tokens of a pass over its copies: on a CPU (cache size), and elsewhere
_CALLS, _WORTH = 256, 10**8  # fixed cost of a layer's calls: 256 tokens, on a CPU at most 1e8 / its weights
Altered = Callable[[Float[Tensor, "R N H dv"]], Float[Tensor, "R N H dv"]]


class Address(NamedTuple):
    """One attention call in a pass: its module, the layer call that it is in or before, and its number there."""

    module: nn.Module
    item: int
    turn: int


@dataclass(eq=False)
class Replay(Observer):
    """One pass over some copies of a batch, which may skip layers, change head outputs, and keep outputs.

    rows     number of copies of the batch, one after the other
    changes  functions of the heads' outputs, by address
    start    layer calls before this one, from 0 in the order of the pass, are skipped: they return what is held
    held     by list of layers, the output of its last layer before ``start`` in a pass of as many copies
    until    the pass ends before this layer call, and ``kept`` has the outputs so far; 0 for a whole pass
    kept     by list of layers, the output of its last layer so far; empty for a whole pass
    order    the addresses encountered
    states   the output of the part that ran last: the last hidden states, before the head
    output   the model's output, with logits only at the last position
    """

    passes: Passes
    rows: int = 1
    changes: Mapping[Address, Altered] = field(default_factory=dict)
    start: int = 0
    held: Mapping[str, Any] = field(default_factory=dict)
    until: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    order: list[Address] = field(default_factory=list)
    output: Any = None
    _parts: dict[nn.Module, Any] = field(default_factory=dict)
    _fed: Tensor | None = None
    _items: int = 0
    _inside: int | None = None
    _seen: Counter[tuple[nn.Module, int]] = field(default_factory=Counter)
    _aside: bool = False
    _within: bool = False

    def run(self) -> None:
        """Run the model, within `observed`. Raises `InputError` if an address of a change was not encountered."""
        self.kept = dict(self.held) if self.until else {}
        self.held = tree_map(_fresh, dict(self.held))  # layers may modify their inputs
        inputs = self.passes.outcome.inputs
        try:
            self.output = self._forward({name: self._copied(each) for name, each in inputs.items()})
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
            return logits_in(self._forward(self.passes.outcome.inputs))
        finally:
            self._fed = None

    @property
    def states(self) -> Float[Tensor, "R N d"]:
        found = getattr(self.output, "last_hidden_state", None)
        return _first(next(reversed(self._parts.values()), self.output)) if found is None else found

    def _forward(self, inputs: Mapping[str, Any]) -> Any:
        token = OBSERVER.set(self)
        try:
            return self.passes.model(**inputs)
        finally:
            OBSERVER.reset(token)

    def visit(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module of the anatomy is called."""
        anatomy = self.passes.anatomy
        roles = (
            (anatomy.written, self._attention),
            (anatomy.items, self._item),
            (anatomy.parts, self._part),
            ((anatomy.embedding,), self._embedding),
        )
        for modules, role in roles:
            if module in modules:
                forward = partial(role, module, forward)
        return forward(*args, **kwargs)

    def attend(self, function: Callable[..., Any], from_table: bool, module: nn.Module, *args: Any, **more: Any) -> Any:
        """A module uses the attention interface; ``function`` is the attention that it would run."""
        if self._aside:
            return function(module, *args, **more)
        self._aside = True
        try:
            heads, *rest = function(module, *args, **more)
        finally:
            self._aside = False
        change = self.changes.get(self._address(module))
        return (heads if change is None else change(heads), *rest)

    def _copied(self, content: Any) -> Any:
        """New tensors with every sequence ``rows`` times, copy after copy; tensors without a batch are cloned."""
        if self.rows == 1:
            return content

        def copy(x: Any) -> Any:
            batched = isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == self.passes.batch
            return x.repeat(self.rows, *(1,) * (x.ndim - 1)) if batched else _fresh(x)

        return tree_map(copy, content)

    def _address(self, module: nn.Module) -> Address:
        item = self._items if self._inside is None else self._inside
        self.order.append(Address(module, item, self._seen[module, item]))
        self._seen[module, item] += 1
        return self.order[-1]

    def _attention(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        address = self._address(module)
        change = self.changes.get(address)
        if change is None:
            return forward(*args, **kwargs)
        with _AlteredProducts(change, self.passes.batch * self.rows) as products:
            output = forward(*args, **kwargs)
        products.forget()
        if products.count != 1:
            self.order.remove(address)
        return output

    def _item(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number, self._items = self._items, self._items + 1
        where = self.passes.anatomy.items[module]
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


class _Enough(Exception):
    """The requested layers are done."""


class _AlteredProducts(Products):
    """Changes the product of weights and values in attention written in the module's own code."""

    def __init__(self, change: Altered, rows: int) -> None:
        super().__init__(lambda: True, self._change)
        self._heads, self._rows = change, rows
        self.count = 0

    def _change(self, followed: Followed, values: Tensor, out: Tensor) -> Tensor:
        self.count += 1
        return self._heads(four(out, self._rows).transpose(1, 2)).transpose(1, 2).reshape(out.shape)


def _fresh(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def logits_in(output: Any) -> Tensor:
    """The logits in the output of a language model."""
    found = getattr(output, "logits", None)
    return _first(output) if found is None else found


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


class Passes:
    """Passes of one model over one batch, starting with the intact one; within `observed`.

    batch       number of sequences
    kind        the model's class
    width       maximum number of copies of the batch per pass: some thousand tokens together
    same        allowed distance of equal states, relative to their size, due to rounding
    states      [B, N, d] of the intact pass
    order       the addresses encountered in it
    baseline    [B, K] its losses; None without a loss
    vocabulary  number of logits per position; 0 without a loss
    readout     the model's head, if it is one matrix product

    Raises `InputError` for a head that is not supported.
    """

    @torch.no_grad()
    def __init__(self, model: Any, anatomy: Anatomy, outcome: Outcome) -> None:
        self.model, self.anatomy, self.outcome = model, anatomy, outcome
        self.batch = len(outcome.counted)
        tokens = _CACHED if outcome.counted.device.type == "cpu" else _TOKENS
        self.width = max(1, tokens // (self.batch * outcome.tokens)) if outcome.copies else 1
        self.kind = type(model).__name__
        self._axes: dict[str, list[int]] = {}
        self.readout: Readout | None = None
        self.same = tolerance(precision(model), "states")
        intact = self.run()
        self.states, self.order, self.baseline, self.vocabulary = intact.states, intact.order, None, 0
        if outcome.labels is not None:
            own = logits_in(intact.output)[:, -1:]
            again = intact.logits(self.states[:, -1:])
            self.vocabulary = again.shape[-1]
            far = float((wide(again) - wide(own)).abs().max()) if again.shape == own.shape else torch.inf
            if not far <= self.same * float(wide(own).abs().max().clamp_min(1)):
                raise InputError(
                    f"model: the head of {self.kind} was not understood: logits at a position depend on more than the "
                    "last hidden state there."
                )
            if (last := int(outcome.labels.max())) >= self.vocabulary:
                raise InputError(
                    f"inputs must have tokens under {self.vocabulary}, the logits of {self.kind}, got {last}."
                )
            self.readout = Readout.of(anatomy.embedding, self.states[:, -1:], intact.logits)
            self.baseline = self.losses(intact)

    def run(self, rows: int = 1, **parts: Any) -> Replay:
        """One pass up to the head. Raises `InputError` unless it has one last hidden state per token."""
        found = Replay(self, rows, **parts)
        found.run()
        wanted = (self.batch * rows, self.outcome.counted.shape[1])
        if found.states.ndim != 3 or found.states.shape[:2] != wanted:
            raise InputError(
                f"model: the last hidden states of {self.kind} must start with shape {list(wanted)}, one per token, "
                f"got {list(found.states.shape)}."
            )
        return found

    def before(self, item: int, **parts: Any) -> dict[str, Any]:
        """The outputs of the layers before this layer call, for one copy of the batch."""
        found = Replay(self, until=item, **parts)
        found.run()
        return found.kept

    def copied(self, item: int, held: dict[str, Any], copies: int) -> dict[str, Any]:
        """The result of `before` for this many copies; a pass of two copies shows the dimension of the copies."""
        if copies == 1:
            return held
        layouts = {name: layout(each) for name, each in held.items()}
        unknown = [name for name in held if layouts[name] not in self._axes]
        if unknown:
            two = Replay(self, 2, until=item)
            two.run()
            self._axes |= {layouts[name]: axes_of(held[name], two.kept[name]) for name in unknown}
        return {name: repeated(each, self._axes[layouts[name]], copies) for name, each in held.items()}

    def plan(
        self, items: Sequence[int], counts: Sequence[int], intact: Sequence[int], alike: bool = False
    ) -> tuple[int, list[range]]:
        """Number of copies per pass, and which neighbouring calls share passes, so that few layers are run.

        Passes of several calls start at the first one's layer. One copy if copies are not independent.

        Arguments
            items   for each call in order, the layer call that it is in or before
            counts  number of changes of each call
            intact  minimum number of unchanged copies in passes that start at each call's layer
            alike   whether copies are known to be independent; otherwise a pass of two is run
        """
        layers = 1 + max(each.item for each in self.order)
        left, alone = [layers - item for item in items], self._alone(layers)
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

    def _alone(self, layers: int) -> float:
        """The fixed cost of a pass, in copies of the batch: each layer's calls cost as much as some tokens, on a CPU
        fewer for larger weights."""
        tokens = _CALLS
        if self.outcome.counted.device.type == "cpu":
            weights = sum(weight.numel() for layer in self.anatomy.items for weight in layer.parameters())
            tokens = min(tokens, _WORTH * layers // max(1, weights))
        return tokens / (self.batch * self.outcome.tokens)

    def require_same(self, found: Replay, first: int = 0) -> None:
        """Refuse a pass in which the copies of the batch from ``first`` on differ from the intact states."""
        copies = found.states[first * self.batch :].split(self.batch)
        far = max(apart(states, self.states, self.outcome.counted) for states in copies)
        if not far <= self.same:
            raise InputError(
                f"model: {self.kind} is not deterministic: two runs without ablation differ by {far:.1e} in the last "
                "hidden states."
            )

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


def fits(heads: Tensor, rows: int, count: int) -> None:
    """Refuse head outputs that do not have this many sequences and heads."""
    if heads.ndim != 4 or heads.shape[0] != rows or heads.shape[2] != count:
        raise invalid(
            "calls",
            f"have {rows} sequences and {count} heads",
            got=f"shape {list(heads.shape)} (sequences, queries, heads, width)",
        )


NOTHING = -1  # index of an unchanged copy


@torch.no_grad()
def one_by_one(
    passes: Passes,
    places: Sequence[Address],
    counts: Sequence[int],
    chosen: Sequence[Sequence[int]],
    change: Callable[[int, Sequence[int]], Altered],
    on_call: Callable[[int, Float[np.ndarray, "B K _H"]], None],
    on_progress: Callable[[int, int], None],
    known: Collection[int] = (),
) -> tuple[list[Float[np.ndarray, "B K _H"]], int]:
    """Each call's effects, NaN for what is not chosen; and the number of calls that were replayed from their layer.

    The changes of a call, one head or band each, are copies of the batch in a few passes with equally many copies.
    Neighbouring calls are combined if that runs fewer layers in all (`Passes.plan`). A pass of two unchanged copies,
    both of which must give the intact states, tests whether copies are independent (not needed for calls known to give
    them); if not, passes have one copy. The output of the layers before a call is computed once, for one unchanged
    copy, and repeated along the dimension of the copies. In the first pass from each layer, some copies are unchanged
    and must give the intact states; if a replay fails, whole passes are run from there on. For calls known to give
    these states (`intact_from`), only the first pass of all is checked, and others if they have copies to spare.
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
    held: dict[str, Any] = {}
    reached = done = replayed = 0

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
            replays, width = ways[0]
            first = len(heads) % width  # later passes are full
            try:
                if replays and reached < begin:
                    held, reached = passes.before(begin, start=reached, held=held), begin
                parts = {"start": begin, "held": passes.copied(begin, held, width)} if replays else {}
                values = list[Float[Tensor, "R K"]]()
                if first or intact[group.start]:
                    found = run([*heads[:first], *[(calls[0], NOTHING)] * (width - first)], **parts)
                    passes.require_same(found, first)
                    values = [passes.effects(found, first)] if first else []
                break
            except Exception as error:
                if len(ways) == 1 or out_of_memory(error):
                    raise
            ways.pop(0)
        if replays and begin > 0:
            replayed += len(calls)
        on_progress(done + first, total)
        for start in range(first, len(heads), width):
            found = run(heads[start : start + width], **parts)
            values.append(passes.effects(found, width))
            on_progress(done + start + width, total)
        split = torch.cat(values).unflatten(0, (-1, passes.batch)).permute(1, 2, 0).cpu().numpy()
        for column, (index, head) in enumerate(heads):
            effects[index][:, :, head] = split[:, :, column]
        for index in calls:
            on_call(index, effects[index])
        done += len(heads)
    return effects, replayed


@torch.no_grad()
def intact_from(passes: Passes, places: Sequence[Address]) -> frozenset[int]:
    """The calls from whose layer on a replay of two unchanged copies gives the intact states; none if any fails."""
    held: dict[str, Any] = {}
    found, reached = set[int](), 0
    for index in sorted(range(len(places)), key=lambda index: places[index].item):
        begin = places[index].item
        if begin == 0:
            continue
        try:
            if reached < begin:
                held, reached = passes.before(begin, start=reached, held=held), begin
            passes.require_same(passes.run(2, start=begin, held=passes.copied(begin, held, 2)))
        except Exception as error:
            if out_of_memory(error):
                raise
            return frozenset()
        found.add(index)
    return frozenset(found)
