"""Passes of a Hugging Face model in which the layers before one are not run again and heads' outputs are changed."""

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
    """Where the layers, the attention and the head of a model are.

    items      the layers: what lies in the outermost lists of modules that hold attention, and the name of the list
    written    attention modules that do not ask transformers' attention interface
    parts      what the layers, or attention outside of them, lie in, but the model itself, and what has its head beside
               such a part: the outermost of those that are called give the hidden states that the head is given
    embedding  the output embedding; None where there is none, or it is in a part or embeds the input as well
    """

    items: dict[nn.Module, str]
    written: frozenset[nn.Module]
    parts: frozenset[nn.Module]
    embedding: nn.Module | None


def anatomy_of(model: Any) -> Anatomy:
    """Where the layers, the attention and the head of a transformers model are."""
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
    """The passes in it are told, layer by layer, to the observer of their thread (`patched`)."""
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
    """What modules that ask the attention interface are given: the entries of its table, or their own eager attention.

    The entries keep their names, so that masks and whatever else goes by the name stay as they were.
    """
    if not asks_interface(*attention_modules(model)):
        return
    names = {str(getattr(config, "_attn_implementation", None)) for config in configs_of(model)}
    names |= {NAME} if is_host(model) else set()
    yield from table_entries(names & table().keys())
    yield from eager_entries(model)


_ALONE = -1  # the axis of what is the same for all copies


def layout(content: Any) -> str:
    """What two contents of equal layout have in common: how they are put together, and their tensors' shapes."""
    return str(tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__, content))


def axes_of(one: Any, two: Any) -> list[int]:
    """Along which dimension the copies lie in each leaf, from the same of one copy and of two.

    Raises `ValueError` where the two are put together otherwise.
    """
    (own, spec), (others, other) = tree_flatten(one), tree_flatten(two)
    if spec != other:
        raise ValueError("two copies of a batch differ in structure")
    return [_axis(x, y) for x, y in zip(own, others, strict=True)]


def repeated(one: Any, axes: list[int], copies: int) -> Any:
    """The content of so many copies."""
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
    """What passes of so many copies cost at least, in layers, and which neighbouring calls they are then of.

    Arguments
        left    layers from each call's on
        counts  what is changed of each
        alone   what a pass costs by itself, in copies
        intact  copies with nothing changed that passes have at least which begin at each call's layer
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


_ROWS, _WORDS = 2048, 2048  # tokens and words at once, on a processor; 16 MB of logits
_ROUNDED, _FEW = 16, 3  # roundings that a logit may differ by from the head's own; of 16 bits, where they are coarse
_LARGE = 1024.0  # to this size states are scaled, at which a cap would show


@dataclass(frozen=True)
class Readout:
    """A head whose logits are weight x + bias, of which losses are made some words of the vocabulary at a time.

    To go through all logits of a long text again and again takes more than half of the time of the product.

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
        """The output embedding as such a head, if the model's own ``head`` makes its product of some states, and of
        these made larger or smaller, which a cap of the logits would show."""
        if type(embedding) is not nn.Linear or type(embedding.weight) is not nn.Parameter or embedding.weight.is_meta:
            return None
        if states.dtype != embedding.weight.dtype:  # which a model may bring together in its own way
            return None
        if states.shape[-1] != embedding.weight.shape[1]:  # something lies between
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
        """At each position, 0 without a label, in float64; the sums over words are in float32 at least."""
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
        """The shares of all words at some positions, and what of labels there gives the gradient of their summed losses
        at the states, 0 without a label: of all labels the product of shares and weights is the same."""
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


_CACHED, _TOKENS = 4096, 12288  # of a pass at most, over its copies of the batch: on a CPU, whose cache they fill; else
_CALLS, _WORTH = 256, 10**8  # tokens that a layer's calls by themselves cost as much as, at most and over its weights
Altered = Callable[[Float[Tensor, "R N H dv"]], Float[Tensor, "R N H dv"]]


class Address(NamedTuple):
    """One call of attention in a pass: its module, in or before which call of a layer, and which of several there."""

    module: nn.Module
    item: int
    turn: int


@dataclass(eq=False)
class Replay(Observer):
    """One pass over some copies of a batch: what it leaves out, what it changes, and what it leaves behind.

    rows     copies of the batch in the pass, one after the other
    changes  what is made of the heads' outputs at an address
    start    calls of layers before this one, from 0 in the order of the pass, are not run: they give what is held
    held     by list of layers, what its last layer before ``start`` gave in a pass of as many copies
    until    the pass ends before this call of a layer, and what was given by then is in ``kept``; 0 for a whole pass
    kept     by list of layers, what its last layer so far gave; of a whole pass nothing
    order    the addresses that were met
    states   what the part that ran last gave: the last hidden states, before the head
    output   what the model returned; its logits are of the last position alone
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
        """Run the model, within `observed`. Raises `InputError` where an address of a change was not met."""
        self.kept = dict(self.held) if self.until else {}
        self.held = tree_map(_fresh, dict(self.held))  # layers may change what they are given
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
        """Those of some of the last hidden states: the model's own head, without what is before it."""
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
        """A module asked the attention interface, and this is the function it was given."""
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
        """Fresh tensors with every sequence ``rows`` times, copy after copy; those without a batch are copied alone."""
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
    """The layers that were asked for are done."""


class _AlteredProducts(Products):
    """Changes the product of weights and values of the attention that is written out."""

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
    """The logits of what a language model returns."""
    found = getattr(output, "logits", None)
    return _first(output) if found is None else found


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


class Passes:
    """Passes of one model over one batch, beginning with the intact one; within `observed`.

    batch       sequences
    kind        the model's class
    width       copies of the batch that one pass takes at most: some thousand tokens together
    same        how far apart states may be, relative to their size, that are equal but for the model's rounding
    states      [B, N, d] of the intact pass
    order       the addresses that it met
    baseline    [B, K] its losses; None without a loss
    vocabulary  logits of a position; 0 without a loss
    readout     the model's head, where it is one product of matrices

    Raises `InputError` for a head that is not understood.
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
        """One pass up to the head. Raises `InputError` where its last hidden states are not one for each token."""
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
        """What the layers before this call of a layer hand on, of one copy of the batch."""
        found = Replay(self, until=item, **parts)
        found.run()
        return found.kept

    def copied(self, item: int, held: dict[str, Any], copies: int) -> dict[str, Any]:
        """What `before` gave, as the layers before that call hand it on of so many copies: where these lie in it is
        seen in a pass of two."""
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
        """Copies of a pass, and which neighbouring calls passes are of, so that layers are run as seldom as can be.

        Passes of several calls begin at the first one's layer. One copy, if two are not alike.

        Arguments
            items   in or before which call of a layer each call is that something is changed of, in order
            counts  what is changed of each
            intact  copies in which nothing is changed that passes have at least which begin at each call's layer
            alike   whether it is known that copies are; else a pass of two is run
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
        """What a pass costs by itself, in copies of the batch: a layer's calls of some tokens, on a CPU of fewer the
        more its weights are."""
        tokens = _CALLS
        if self.outcome.counted.device.type == "cpu":
            weights = sum(weight.numel() for layer in self.anatomy.items for weight in layer.parameters())
            tokens = min(tokens, _WORTH * layers // max(1, weights))
        return tokens / (self.batch * self.outcome.tokens)

    def require_same(self, found: Replay, first: int = 0) -> None:
        """Refuse a pass in which the copies of the batch from ``first`` on are not as they were."""
        copies = found.states[first * self.batch :].split(self.batch)
        far = max(apart(states, self.states, self.outcome.counted) for states in copies)
        if not far <= self.same:
            raise InputError(
                f"model: {self.kind} is not deterministic: two runs without ablation differ by {far:.1e} in the last "
                "hidden states."
            )

    def effects(self, found: Replay, copies: int) -> Float[Tensor, "R K"]:
        """How far each row of a pass's first copies is from the intact one, split over the outcome's blocks."""
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
    """Refuse heads' outputs that are not of so many sequences and heads."""
    if heads.ndim != 4 or heads.shape[0] != rows or heads.shape[2] != count:
        raise invalid(
            "calls",
            f"have {rows} sequences and {count} heads",
            got=f"shape {list(heads.shape)} (sequences, queries, heads, width)",
        )


NOTHING = -1  # in place of what is changed


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
    """Each call's effects, NaN for what is not chosen; and how many calls were replayed from their layer.

    What is changed of a call, one head or band after the other, are copies of the batch in a few passes of equally many
    copies; of neighbouring calls together, where that takes fewer layers in all (`Passes.plan`). Whether copies of the
    batch are independent is seen in a pass of two with nothing silenced, both of which have to give the intact states
    (where calls are known to give these, it was seen there); where they are not, passes have one. What the layers
    before a call's hand over is run once, in one copy with nothing silenced, and repeated where its copies would lie.
    In the first pass from each layer some copies have nothing silenced and have to give the intact states; where a
    replay fails in that, whole passes are run from there on. From the layers of calls of which it is known that they
    give these states (`intact_from`), that is asked of the first pass of all, and else where there are copies to spare.
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
            first = len(heads) % width  # passes after the first are full
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
    """The calls from whose layer on a replay of two copies, in which nothing is changed, gives the intact states; none
    where one does not."""
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
