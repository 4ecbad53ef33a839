"""Passes of a Hugging Face model in which the layers before one are not run again and heads' outputs are changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toeplens.ground import InputError
from toeplens.ground.machine import out_of_memory
from toeplens.sources.huggingface.capture.products import Followed, Products, four
from toeplens.sources.huggingface.effects.anatomy import Anatomy
from toeplens.sources.huggingface.effects.copies import axes_of, layout, repeated
from toeplens.sources.huggingface.effects.outcome import Outcome, apart, losses, moved, over_labels, wide
from toeplens.sources.huggingface.effects.plans import together
from toeplens.sources.huggingface.effects.readout import Readout
from toeplens.sources.huggingface.interface import OBSERVER, Observer
from toeplens.sources.huggingface.model import precision, tolerance

_CACHED, _TOKENS = 4096, 12288  # of a pass at most, over its copies of the batch: on a CPU, whose cache they fill; else
_CALLS, _WORTH = 256, 10**8  # tokens that a layer's calls by themselves cost as much as, at most and over its weights
Change = Callable[[Float[Tensor, "R N H dv"]], Float[Tensor, "R N H dv"]]


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
    changes: Mapping[Address, Change] = field(default_factory=dict)
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
            raise InputError(f"model: its pass has no {self.until} calls of layers that end one by one.")
        missing = [type(each.module).__name__ for each in self.changes if each not in self.order]
        if missing:
            raise InputError(
                f"model: the outputs of the heads of {missing[0]} were not seen, so they were not changed."
            )

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
        with _Altered(change, self.passes.batch * self.rows) as products:
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


class _Altered(Products):
    """Changes the product of weights and values of the attention that is written out."""

    def __init__(self, change: Change, rows: int) -> None:
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
                    f"model: the head of {self.kind} was not understood: its logits at a position are not made of the "
                    "last hidden state there alone."
                )
            if (last := int(outcome.labels.max())) >= self.vocabulary:
                raise InputError(
                    f"inputs: token {last} was given, which the head of {self.kind} cannot predict; it has logits of "
                    f"{self.vocabulary} tokens."
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
                f"model: the last hidden states of {self.kind} are {list(found.states.shape)}; of {wanted[0]} "
                f"sequences of {wanted[1]} tokens they must be one for each."
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
                f"model: {self.kind} was run again with nothing silenced, and its last hidden states are {far:.1e} "
                "apart."
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
        raise InputError(
            f"calls: {count} heads were given for {rows} sequences; the attention gives {list(heads.shape)} "
            "(sequences, queries, heads, width)."
        )
