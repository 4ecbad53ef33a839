"""The contract of a positional encoding: what position may do to attention, and where it enters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, get_args

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.kit import require_count, require_whole, without_autocast
from toeplens.encodings.seen import Seen
from toeplens.encodings.shapes import Earlier, Keys, Notes, Pairs, Positions, Queries, ScoreMod, Stream, Turned
from toeplens.ground import invalid
from toeplens.ground.options import parameters

# where position enters attention
Coupling = Literal["none", "input", "bias", "rotation", "concatenation", "logits", "weights", "accumulated"]

SIZES = ("d_model", "num_heads", "head_dim", "max_len")
HOOKS = ("embed", "rotate", "score", "bias", "bias_product", "transform_logits", "transform_weights", "add_values")


class PositionalEncoding(nn.Module):
    """What position does to attention, through whichever of seven hooks an encoding needs.

    A subclass overrides only the hooks through which it acts; the others stay neutral. Every hook takes the
    positions explicitly, as integers of shape [N] (the same for every sequence) or [B, N] (one row a sequence),
    so offset windows, packed sequences and decoding with a key cache are all the same call. Where a position has
    several coordinates (`axes` > 1: rows and columns, the path in a tree), the last dimension holds them.

    A constructor's keywords are its options. One that ends in ``**sizes`` takes the four sizes beside its own, one that
    ends in ``**inherited`` also the options of the class that it derives from.

    Any hook but `embed`, `note` and `kernel` may ask for one more argument, ``seen``: the queries, the keys, the notes
    (see `note`) and the mask. An encoding whose position part depends on content reads it there.

    Class facts
        coupling          where position enters attention (see `Coupling`)
        also_couples      further places where it enters, for the few that have two
        data_dependent    whether the position part depends on the tokens' content: the logit of a query and a key is
                          then no fixed set of functions of position, weighted by what that query and key say
        toeplitz          whether the position part is a function of the offset i - j alone; never, if data-dependent
        bounded           whether positions must stay under ``max_len``
        length_dependent  whether the largest position seen changes what is done at all of them (dynamic scaling)
        forms_logits      whether `transform_logits` forms logits anew from queries and keys, leaving a bias out
        factorable        whether its bias has the form of `bias_product`
        scale_terms       products of vectors by whose number the published logit is divided: the factor of q . k is
                          `scale`, 1/sqrt(scale_terms * d), d the dimensions of q; 0 where it is 1
        pair_width        numbers that its hooks hold for each head, query and key; chunks are smaller by it
        axes              coordinates of a position
        shared            whether one instance serves all layers; else each layer has parameters of its own
        citation          where the scheme was published
        formula           what it does, in one line of TeX; i is the query's position, j the key's, delta = i - j
        layers            the layers on which it acts, counted from 0; None for all
    """

    coupling: Coupling = "none"
    also_couples: tuple[Coupling, ...] = ()
    data_dependent: bool = False
    toeplitz: bool = True
    bounded: bool = False
    length_dependent: bool = False
    forms_logits: bool = False
    factorable: bool = False
    scale_terms: int = 1
    pair_width: int = 1
    axes: int = 1
    shared: bool = True
    citation: str = ""
    formula: str = ""
    layers: frozenset[int] | None = None
    _seeing: frozenset[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if {"bias", "kernel"} & vars(cls).keys() and "bias_product" not in vars(cls):
            cls.factorable = False  # a product that was inherited is another bias's
        cls._seeing = frozenset(hook for hook in HOOKS if "seen" in inspect.signature(getattr(cls, hook)).parameters)

    def __init__(self, *, d_model: int, num_heads: int, head_dim: int, max_len: int) -> None:
        super().__init__()
        require_count(d_model=d_model, num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        if not {self.coupling, *self.also_couples} <= set(get_args(Coupling)):
            raise invalid("coupling", f"be one of {', '.join(get_args(Coupling))}", self.coupling)
        self.d_model, self.num_heads, self.head_dim, self.max_len = d_model, num_heads, head_dim, max_len
        self._exact: set[str] = set()
        self._starts: list[tuple[nn.Parameter, Callable[[Tensor], Any]]] = []

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The options that are taken beside the sizes, with their defaults."""
        found: dict[str, inspect.Parameter] = {}
        for kind in (kind for kind in cls.__mro__ if "__init__" in vars(kind)):
            taken = parameters(kind.__init__)
            own = {name: p for name, p in taken.items() if p.kind is p.KEYWORD_ONLY and name not in SIZES}
            found |= {name: p for name, p in own.items() if name not in found}
            if "inherited" not in taken:
                break
        return found

    # ---- the hooks ------------------------------------------------------------------------------------------------

    def embed(self, x: Stream, positions: Positions) -> Stream:
        """Add position to the token embeddings, once, before the first layer."""
        return x

    def note(self, x: Stream, before: Earlier | None = None) -> Notes | None:
        """What is kept of each token's content, a row a token beside its key; or None.

        ``x`` is what the layer's keys are made from; ``before`` the notes of earlier tokens, where there are any (a key
        cache), so that a running sum can go on.
        """
        return None

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Turned:
        """Act on queries and keys before their inner product."""
        return q, k

    def pair_factors(self, positions: Positions, dtype: torch.dtype) -> Complex[Tensor, "*B H N n"] | None:
        """What `rotate` multiplies each pair of dimensions that stand side by side by, if that is all that it does.

        The same for queries and keys, which have all of their dimensions in these n pairs: [H or 1, N, n], or
        [B, H or 1, N, n] for positions by sequence, complex in the precision that vectors of ``dtype`` are turned in.
        None if it does something else. A model can then turn vectors where they are made.
        """
        return None

    def score(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> Pairs:
        """The product of queries and keys, before its scale. Overriding it takes the explicit path."""
        return q @ k.transpose(-2, -1)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"] | None:
        """A term added to the scaled logits: [H, Nq, Nk], or [B, H, Nq, Nk] for positions by sequence; or None."""
        return None

    def bias_product(
        self, q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "*B H Nq r"], Float[Tensor, "*B H Nk r"]]:
        """The same bias as a product a_i . b_j of few dimensions, where it is `factorable`.

        For the keys up to each query's own, and up to a number of each query's (which a softmax cannot see). Taken
        relative to the first query given, so that what is near is exact and nothing later is looked at.
        Fused attention then carries it at no cost.
        """
        raise NotImplementedError

    def transform_logits(self, logits: Pairs, q_positions: Positions, k_positions: Positions) -> Pairs:
        """Change the logits before the mask and the softmax. Overriding it takes the explicit path."""
        return logits

    def transform_weights(self, weights: Pairs, q_positions: Positions, k_positions: Positions) -> Pairs:
        """Change the attention weights after the softmax. Overriding it takes the explicit path."""
        return weights

    def add_values(self, weights: Pairs, q_positions: Positions, k_positions: Positions) -> Queries | None:
        """A term added to each head's output, from its weights; or None. Overriding it takes the explicit path."""
        return None

    def score_mod(self, q_positions: Positions, k_positions: Positions, seen: Seen) -> ScoreMod | None:
        """The same bias as a function (score, batch, head, query, key) for flex attention; None if it has none."""
        return None

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"] | Complex[Tensor, "H n D"] | None:
        """The position kernel at offsets i - j: real [H, D] for a bias, complex [H or 1, n, D] for a rotation.

        None where position has no kernel that is a function of the offset alone.
        """
        return None

    # ---- how a model uses it --------------------------------------------------------------------------------------

    def for_layer(self, layer: int) -> PositionalEncoding:
        """The encoding as layer ``layer`` (from 0) sees it: itself where layers share it, else a fresh start."""
        if self.shared or layer == 0:
            return self
        own = copy.deepcopy(self)
        own.reset_parameters()
        return own

    def learned(self, shape: tuple[int, ...], start: Callable[[Tensor], Any]) -> nn.Parameter:
        """A parameter whose values ``start`` fills in, here and in `reset_parameters`."""
        parameter = nn.Parameter(torch.empty(shape))
        self._starts.append((parameter, start))
        with torch.no_grad():
            start(parameter)
        return parameter

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the starting values of all parameters again: of those `learned`, then of the modules inside."""
        for parameter, start in self._starts:
            start(parameter)
        for module in self.children():
            _start_again(module)

    def place(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        """The positions of running token numbers: themselves, or their coordinates where `axes` > 1."""
        return tokens

    def by_sequence(self, positions: Positions) -> bool:
        """Whether positions have a row a sequence."""
        return positions.ndim - (self.axes > 1) == 2

    def hook(self, name: str, *arguments: Any, seen: Seen) -> Any:
        """Call a hook, with ``seen`` if it asks for it; autocast acts on plain products of queries and keys alone."""
        with nullcontext() if name == "score" and not self.overrides(name) else without_autocast(seen.q):
            if name in self._seeing:
                return getattr(self, name)(*arguments, seen=seen)
            return getattr(self, name)(*arguments)

    def factors_at(self, q_positions: Positions, k_positions: Positions) -> bool:
        """Whether `bias_product` holds for queries at the last of these keys' positions."""
        return self.factorable

    def overrides(self, name: str) -> bool:
        """Whether the encoding acts through the hook ``name``."""
        return getattr(type(self), name) is not getattr(PositionalEncoding, name)

    @property
    def fusable(self) -> bool:
        """Whether fused attention can carry it: it is a rotation, a bias, or an input vector."""
        return not any(
            self.overrides(hook) for hook in ("score", "transform_logits", "transform_weights", "add_values")
        )

    @property
    def turns_alike(self) -> bool:
        """Whether `rotate` does the same to every head and looks at nothing else, so that it may take fewer of them."""
        return not self.overrides("rotate")

    @property
    def looks_at_keys(self) -> bool:
        """Whether a hook after `rotate` asks for what is ``seen``, keys of each head among it."""
        return bool(self._seeing - {"rotate"})

    @property
    def fixed_bias(self) -> bool:
        """Whether its bias depends on positions alone, so that it can be formed once for all who share it."""
        return self.overrides("bias") and "bias" not in self._seeing and not self.overrides("transform_logits")

    @property
    def query_dim(self) -> int:
        """Dimensions of the queries and keys that `rotate` is given."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """The published factor of q . k, for heads of this size."""
        return (self.scale_terms * self.query_dim) ** -0.5 if self.scale_terms else 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """What another encoding is built with to stand beside this one."""
        return {name: getattr(self, name) for name in SIZES}

    def check_positions(self, positions: Positions) -> None:
        """Refuse positions that a table of ``max_len`` rows does not hold."""
        if self.bounded:
            require_whole(type(self).__name__, positions)
        if not self.bounded or torch.compiler.is_compiling() or positions.numel() == 0:
            return
        if positions.is_cuda and torch.cuda.is_current_stream_capturing():  # which nothing may wait for
            return
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.max_len:
            raise invalid(
                "positions",
                f"be from 0 to {self.max_len - 1} (max_len is {self.max_len})",
                high if high >= self.max_len else low,
            )

    def register_exact(self, name: str, value: Tensor) -> Tensor:
        """Keep ``value`` as a buffer that moves between devices but never changes its dtype.

        ``model.half()`` and ``model.to(torch.bfloat16)`` must not touch what phases are made from: bfloat16 holds
        no integer over 256 exactly. The buffer is derived from the options, so it is not part of the state dict.
        """
        self.register_buffer(name, value, persistent=False)
        self._exact.add(name)
        return value

    def _apply(self, fn: Any, recurse: bool = True) -> PositionalEncoding:
        kept = {name: self._buffers[name] for name in self._exact}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            moved = self._buffers[name]
            assert value is not None
            assert moved is not None
            self._buffers[name] = value.to(moved.device)
        return self


def _start_again(module: nn.Module) -> None:
    """Draw a module's parameters again, or, where it has no way to, those of the modules inside it."""
    if callable(again := getattr(module, "reset_parameters", None)):
        again()
    else:
        for child in module.children():
            _start_again(child)
