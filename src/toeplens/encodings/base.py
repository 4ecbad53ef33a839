"""The interface of a positional encoding: where position enters attention, and how."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from toeplens.encodings.kit import is_readable, require_between, require_count, require_integers, without_autocast
from toeplens.encodings.shapes import Keys, PairMatrix, Positions, Queries, RotatedQK, ScoreMod, Stream
from toeplens.utils import InputError, invalid
from toeplens.utils.options import check_keywords, parameters
from toeplens.utils.renamed import rename_overrides, renamed

KeyFeatures = Float[Tensor, "B H N c"]  # of the keys, from `PositionalEncoding.key_features`
CachedFeatures = Float[Tensor, "B H M c"]  # those of earlier tokens


@renamed
@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one attention call, as a hook sees them.

    q, k          [B, H, Nq, d], [B, H, Nk, d]: as projected in `rotate`; as they enter the inner product in later hooks
    rows          index of each query's own token among the keys: [Nq], or [B, Nq]
    key_features  [B, H, Nk, c], from `PositionalEncoding.key_features`, one row per key; or None
    mask          True where a key may be seen, broadcastable to [B, H, Nq, Nk]; None for all
    causal        whether keys after a query's own are masked
    window        sliding window: the number of keys that a query sees, including its own and without padding; None for
                  no limit
    scale         the factor of q . k
    document_ids  [B, Nk], id of the packed document that each key belongs to; None if each row is one document
    padding       [B, Nk], True where a key's token is padding, which is masked and skipped by cumulative sums; or None
    """

    q: Float[Tensor, "B H Nq _"]
    k: Float[Tensor, "B H Nk _"]
    rows: Int[Tensor, "*B Nq"]
    key_features: Float[Tensor, "B H Nk c"] | None = None
    mask: Bool[Tensor, "*_B _H _Nq Nk"] | None = None
    causal: bool = True
    scale: float = 1.0
    window: int | None = None
    document_ids: Int[Tensor, "B Nk"] | None = None
    padding: Bool[Tensor, "B Nk"] | None = None

    @staticmethod
    def with_defaults(q: Queries, k: Keys, rows: Int[Tensor, "*B Nq"] | None = None, **options: Any) -> AttentionInputs:
        """Build it with defaults: without ``rows``, the queries are the last tokens of the keys.

        Keys that the mask hides from all queries and heads count as padding.
        """
        mask, padding = options.get("mask"), options.get("padding")
        if mask is not None and all(size == 1 for size in mask.shape[-3:-1]):
            hidden_keys = ~mask.reshape(-1, mask.shape[-1]).expand(len(q), -1)
            options |= {"mask": None, "padding": hidden_keys if padding is None else hidden_keys | padding}
        if rows is None:
            queries, keys = q.shape[-2], k.shape[-2]
            if options.get("causal", True) and queries > keys:
                must = (
                    f"have at most as many queries as there are keys ({keys}) in causal attention, unless rows is set"
                )
                raise invalid("q", must, queries)
            rows = torch.arange(keys - queries, keys, device=q.device)
        return AttentionInputs(q, k, rows, **options)

    @property
    def is_masked(self) -> bool:
        """Whether any mask other than the causal one hides keys."""
        return self.mask is not None or self.padding is not None or self.document_ids is not None

    def has_inner_padding(self) -> bool:
        """Whether padding lies between tokens; reads it. True for padding that must not be read (in a compiler)."""
        if self.padding is None or not is_readable(self.padding):
            return self.padding is not None
        count = (~self.padding).long().cumsum(-1)
        return bool((self.padding & (count > 0) & (count < count[:, -1:])).any())

    def is_scattered(self) -> bool:
        """Whether a query sees anything but one contiguous run of tokens, apart from padding; reads the mask.

        True for masks that must not be read (in a compiler). A query that sees no token counts as padding.
        """
        if self.mask is None:
            return False
        if not is_readable(self.mask):
            return True
        visible = self.visible_mask()
        assert visible is not None
        visible = visible[(None,) * (4 - visible.ndim)]
        tokens = self.k.new_ones(len(self.k), self.k.shape[2]) if self.padding is None else ~self.padding
        ordinals = tokens.long().cumsum(-1)[:, None, None, :].masked_fill(~visible, 0)  # from 1
        first_seen = ordinals.masked_fill(~visible, ordinals.shape[-1] + 1).amin(-1)
        return bool((visible.any(-1) & (ordinals.amax(-1) - first_seen + 1 != visible.sum(-1))).any())

    def require_contiguous_keys(self, encoding: Any) -> None:
        """Raise `InputError` for a mask under which cumulative sums between two tokens would be wrong."""
        if self.mask is not None and is_readable(self.mask) and self.is_scattered():
            raise InputError(f"mask: each query must see one contiguous run of tokens for {type(encoding).__name__}.")

    def row_index(self) -> Int[Tensor, "_B 1 Nq 1"]:
        """The rows as indices of keys, for `torch.take_along_dim`."""
        return self.rows.reshape(-1, 1, self.rows.shape[-1], 1)

    @property
    def features(self) -> KeyFeatures:
        """The key features, for encodings that have some."""
        assert self.key_features is not None
        return self.key_features

    def query_features(self) -> Float[Tensor, "B H Nq c"]:
        """The key features of the queries' own tokens."""
        if self.rows.ndim == 1:
            return self.features.index_select(2, self.rows)
        return self.features.take_along_dim(self.row_index(), dim=2)

    def cumulative_sums(self, steps: Float[Tensor, "B H N c"]) -> Float[Tensor, "B H N c"]:
        """Cumulative sums over the tokens, without padding."""
        return (steps if self.padding is None else steps.masked_fill(self.padding[:, None, :, None], 0.0)).cumsum(-2)

    def visible_mask(self) -> Bool[Tensor, "*B Nq Nk"] | None:
        """True where a query sees a key, computed on request; None if every query sees every key."""
        visible = self.mask
        if self.document_ids is not None:
            own = self.document_ids.gather(1, self.rows.expand(len(self.document_ids), -1))
            same_document = own.unsqueeze(2) == self.document_ids.unsqueeze(1)
            visible = same_document.unsqueeze(1) if visible is None else same_document.unsqueeze(1) & visible
        if self.padding is not None:
            real = ~self.padding[:, None, None, :]
            visible = real if visible is None else real & visible
        if not self.causal:
            return visible
        past = self.causal_mask()
        if self.window is not None:
            past = past & self._window_mask(self.window)
        return past if visible is None else past & visible

    def _window_mask(self, window: int) -> Bool[Tensor, "*B Nq Nk"]:
        """True for each query's last ``window`` keys, without padding, and those after it."""
        if self.padding is None:
            return ~replace(self, rows=self.rows - window).causal_mask()
        count = (~self.padding).long().cumsum(-1)  # tokens up to each key
        own_count = count.gather(1, self.rows.expand(len(count), -1))
        return (own_count.unsqueeze(-1) - count.unsqueeze(-2) < window).unsqueeze(1)

    def causal_mask(self) -> Bool[Tensor, "*B Nq Nk"]:
        """True for each query's own key and those before it, without any mask."""
        past = torch.arange(self.k.shape[-2], device=self.k.device) <= self.rows.unsqueeze(-1)
        return past if past.ndim == 2 else past.unsqueeze(1)

    def select(self, queries: slice, keys: slice) -> AttentionInputs:
        """A slice of the queries and keys."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., queries if mask.shape[-2] > 1 else slice(None), keys]
        rows = self.rows[..., queries]
        by_key = {name: x[..., keys] for name in ("document_ids", "padding") if (x := getattr(self, name)) is not None}
        return replace(
            self,
            q=self.q[..., queries, :],
            k=self.k[..., keys, :],
            rows=rows - keys.start if keys.start else rows,
            key_features=None if self.key_features is None else self.key_features[..., keys, :],
            mask=mask,
            **by_key,
        )


# where position enters attention
Coupling = Literal["none", "input", "bias", "rotation", "concatenation", "logits", "weights", "accumulated"]

SIZES = ("d_model", "num_heads", "head_dim", "max_len")
HOOKS = ("embed", "rotate", "score", "bias", "bias_product", "transform_logits", "transform_weights", "add_values")


@renamed
class PositionalEncoding(nn.Module):
    """Base class of positional encodings: the hooks through which position can act on attention.

    A subclass overrides the hooks that it needs; the others do nothing. Every hook takes positions explicitly: [N] (the
    same for all sequences) or [B, N], so offset windows, packed sequences and key caches use the same calls. If a
    position has several coordinates (`axes` > 1), they are the last dimension.

    The constructor's keywords are the encoding's options, and values must match their annotations. A constructor that
    ends in ``**sizes`` takes the four sizes in addition; one that ends in ``**inherited`` also takes the options of its
    parent class.

    Any hook except `embed`, `key_features` and `kernel` may declare one more argument, ``inputs`` (`AttentionInputs`),
    for encodings that depend on content.

    Class attributes
        coupling          where position enters attention (see `Coupling`)
        also_couples      further places where it enters, for the few encodings that have two
        data_dependent    whether the position part depends on content, so that the logit of a query and a key is not a
                          fixed set of functions of position, weighted by that query and key
        toeplitz          whether the position part is a function of the offset i - j only; False if data-dependent
        bounded           whether positions must be below ``max_len``
        length_dependent  whether the largest position changes the result at all positions (dynamic scaling)
        forms_logits      whether `transform_logits` computes logits from queries and keys and so drops a bias
        factorable        whether the bias is low-rank, as given by `bias_product`
        scale_terms       number of vector products in the published scale 1/sqrt(scale_terms * d) of q . k, with d the
                          dimensions of q (see `scale`); 0 for a scale of 1
        pair_width        values that the hooks hold per head, query and key; chunks are smaller by this factor
        axes              number of coordinates of a position
        shared            whether one instance serves all layers; otherwise each layer has its own parameters
        citation          where the scheme was published
        formula           one line of TeX; i is the query's position, j the key's, delta = i - j
        layers            the layers on which it acts, counted from 0; None for all
        unused_hooks      hooks that the class overrides but this instance does not use
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
    unused_hooks: Set[str] = frozenset()
    _inputs_argument: Mapping[str, str] = {}  # its name in the hooks that take the attention inputs
    _registered_name: str = ""

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any) -> None:
        """``name``: the name under which this package provides the class (`toeplens.encodings.names`)."""
        super().__init_subclass__(**kwargs)
        cls._registered_name = name
        rename_overrides(cls, "PositionalEncoding")
        if cls.data_dependent:
            cls.toeplitz = False
        if "__init__" in vars(cls):
            cls.__init__ = _name_initialised(check_keywords(cls.__init__))
        if {"bias", "kernel"} & vars(cls).keys() and "bias_product" not in vars(cls):
            cls.factorable = False  # an inherited product belongs to another bias
        arguments = {hook: inspect.signature(getattr(cls, hook)).parameters for hook in HOOKS}
        cls._inputs_argument = {hook: name for hook in HOOKS for name in ("inputs", "seen") if name in arguments[hook]}

    def __init__(self, *, d_model: int, num_heads: int, head_dim: int, max_len: int) -> None:
        super().__init__()
        require_count(d_model=d_model, num_heads=num_heads, head_dim=head_dim, max_len=max_len)
        if not {self.coupling, *self.also_couples} <= set(get_args(Coupling)):
            raise invalid("coupling", f"be one of {', '.join(get_args(Coupling))}", self.coupling)
        self.d_model, self.num_heads, self.head_dim, self.max_len = d_model, num_heads, head_dim, max_len
        self._exact_buffers: set[str] = set()
        self._initialisers: list[tuple[Tensor | str, Callable[[Tensor], Any]]] = []  # names once they are known

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The encoding's options (constructor arguments other than the sizes), with their defaults."""
        result: dict[str, inspect.Parameter] = {}
        for kind in (kind for kind in cls.__mro__ if "__init__" in vars(kind)):
            arguments = parameters(kind.__init__)
            class_options = {name: p for name, p in arguments.items() if p.kind is p.KEYWORD_ONLY and name not in SIZES}
            result |= {name: p for name, p in class_options.items() if name not in result}
            if "inherited" not in arguments:
                break
        return result

    # ---- the hooks ------------------------------------------------------------------------------------------------

    def embed(self, x: Stream, positions: Positions) -> Stream:
        """Add position to the token embeddings, once, before the first layer."""
        return x

    def key_features(self, x: Stream, cached: CachedFeatures | None = None) -> KeyFeatures | None:
        """Per-token features that are cached with the keys, from the input of the layer's keys; or None.

        ``cached`` holds the features of earlier tokens from a key cache, so that cumulative sums can continue.
        """
        return None

    def rotate(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> RotatedQK:
        """Transform queries and keys before their inner product."""
        return q, k

    def pair_factors(self, positions: Positions, dtype: torch.dtype) -> Complex[Tensor, "*B H N n"] | None:
        """The complex factors by which `rotate` multiplies all adjacent pairs of dimensions; None if it does otherwise.

        They are the same for queries and keys, in the precision used to rotate vectors of ``dtype``. A model can use
        them to rotate vectors right after the projection.
        """
        return None

    def score(self, q: Queries, k: Keys, q_positions: Positions, k_positions: Positions) -> PairMatrix:
        """The product of queries and keys, before scaling. Overriding it disables fused attention."""
        return q @ k.transpose(-2, -1)

    def bias(self, q_positions: Positions, k_positions: Positions) -> Float[Tensor, "*H_Nq_Nk"] | None:
        """A term added to the scaled logits: [H, Nq, Nk], or [B, H, Nq, Nk] for positions per sequence; or None."""
        return None

    def bias_product(
        self, q_positions: Positions, k_positions: Positions
    ) -> tuple[Float[Tensor, "*B H Nq r"], Float[Tensor, "*B H Nk r"]]:
        """The bias as a low-rank product a_i . b_j, if `factorable`, which fused attention can carry at no cost.

        It holds for the keys up to each query's own and up to a constant per query (to which the softmax is invariant).
        It is relative to the first query, so that nearby keys are exact.
        """
        raise NotImplementedError

    def transform_logits(self, logits: PairMatrix, q_positions: Positions, k_positions: Positions) -> PairMatrix:
        """Change the logits before the mask and the softmax. Overriding it disables fused attention."""
        return logits

    def transform_weights(self, weights: PairMatrix, q_positions: Positions, k_positions: Positions) -> PairMatrix:
        """Change the attention weights after the softmax. Overriding it disables fused attention."""
        return weights

    def add_values(self, weights: PairMatrix, q_positions: Positions, k_positions: Positions) -> Queries | None:
        """A term added to each head's output, from its weights; or None. Overriding it disables fused attention."""
        return None

    def score_mod(self, q_positions: Positions, k_positions: Positions, inputs: AttentionInputs) -> ScoreMod | None:
        """The bias as a function (score, batch, head, query, key) for flex attention; None if there is none."""
        return None

    def kernel(self, offsets: Int[Tensor, "D"]) -> Float[Tensor, "H D"] | Complex[Tensor, "H n D"] | None:
        """The position kernel at offsets i - j: real [H, D] for a bias, complex [H or 1, n, D] for a rotation.

        None if position has no kernel that is a function of the offset only.
        """
        return None

    # ---- how a model uses it --------------------------------------------------------------------------------------

    def for_layer(self, layer: int) -> PositionalEncoding:
        """The encoding for layer ``layer`` (from 0): itself if layers share it, otherwise a newly initialised copy."""
        if self.shared or layer == 0:
            return self
        layer_copy = copy.deepcopy(self)
        layer_copy.reset_parameters()
        return layer_copy

    def new_parameter(self, shape: tuple[int, ...], init: Callable[[Tensor], Any]) -> nn.Parameter:
        """Create a parameter that ``init`` initialises, here and in `reset_parameters`."""
        parameter = nn.Parameter(torch.empty(shape))
        self.initialise(init, parameter)
        return parameter

    @torch.no_grad()
    def initialise(self, init: Callable[[Tensor], Any], *parameters: Tensor) -> None:
        """Initialise parameters, such as those of a linear layer, by ``init``, here and in `reset_parameters`."""
        for parameter in parameters:
            self._initialisers.append((parameter, init))
            init(parameter)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Re-initialise all parameters: those with an initialiser, then submodules that have others."""
        tensors = dict(chain(self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False)))
        initialised = set()
        for name, init in self._initialisers:
            parameter = tensors[name] if isinstance(name, str) else name
            init(parameter)
            initialised.add(id(parameter))
        for module in self.children():
            parameter_ids = {id(parameter) for parameter in module.parameters()}
            if not parameter_ids or parameter_ids - initialised:
                _reset_module(module)

    def to_positions(self, tokens: Int[Tensor, "*B N"]) -> Positions:
        """Convert token indices to positions: unchanged, or to coordinates if `axes` > 1."""
        return tokens

    def is_per_sequence(self, positions: Positions) -> bool:
        """Whether positions have one row per sequence."""
        return positions.ndim - (self.axes > 1) == 2

    def call_hook(self, name: str, *arguments: Any, inputs: AttentionInputs) -> Any:
        """Call a hook, with ``inputs`` if it declares it. Autocast stays on only for the plain product q . k."""
        keywords = {self._inputs_argument[name]: inputs} if name in self._inputs_argument else {}
        with nullcontext() if name == "score" and not self.overrides(name) else without_autocast(inputs.q):
            return getattr(self, name)(*arguments, **keywords)

    def has_low_rank_bias(self, q_positions: Positions, k_positions: Positions) -> bool:
        """Whether `bias_product` holds for queries at the last of these keys' positions."""
        return self.factorable

    def overrides(self, name: str) -> bool:
        """Whether the encoding overrides the hook ``name``."""
        return name not in self.unused_hooks and getattr(type(self), name) is not getattr(PositionalEncoding, name)

    @property
    def fusable(self) -> bool:
        """Whether fused attention supports it: it acts only through a rotation, a bias, or input vectors."""
        return not any(map(self.overrides, ("score", "transform_logits", "transform_weights", "add_values")))

    @property
    def rotation_is_shared(self) -> bool:
        """Whether `rotate` treats all heads alike and reads no content; it then accepts fewer (grouped) heads."""
        return not self.overrides("rotate")

    @property
    def needs_per_head_keys(self) -> bool:
        """Whether a hook after `rotate` reads ``inputs``, which includes the keys of each head."""
        return bool(self._inputs_argument.keys() - {"rotate"})

    @property
    def has_fixed_bias(self) -> bool:
        """Whether its bias depends on positions only, so that layers can share one computation."""
        return self.overrides("bias") and "bias" not in self._inputs_argument and not self.overrides("transform_logits")

    @property
    def query_dim(self) -> int:
        """Dimensions of the queries and keys that `rotate` takes."""
        return self.head_dim

    @property
    def scale(self) -> float:
        """The published factor of q . k, for heads of this size."""
        return (self.scale_terms * self.query_dim) ** -0.5 if self.scale_terms else 1.0

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes, as keyword arguments for building another encoding of the same shape."""
        return {name: getattr(self, name) for name in SIZES}

    def check_positions(self, positions: Positions) -> None:
        """Raise `InputError` for positions that a table of ``max_len`` rows does not contain."""
        if self.bounded:
            require_integers(type(self).__name__, positions)
            limit = f"{self.max_len - 1} (max_len is {self.max_len})"
            require_between(f"be from 0 to {limit}", positions, self.max_len - 1)

    def register_exact(self, name: str, value: Tensor) -> Tensor:
        """Register ``value`` as a buffer that moves between devices but keeps its dtype; not in the state dict.

        Phases are computed from it, so ``model.half()`` must not round it.
        """
        self.register_buffer(name, value, persistent=False)
        self._exact_buffers.add(name)
        return value

    def _apply(self, fn: Any, recurse: bool = True) -> PositionalEncoding:
        exact = {name: self.get_buffer(name) for name in self._exact_buffers}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            device = self.get_buffer(name).device
            if value.is_meta and device.type != "meta":
                must = f"be built on its device, as {name} cannot be restored from the meta device"
                raise invalid(type(self).__name__, must)
            self._buffers[name] = value.to(device)
        return self


def _name_initialised(construct: Callable[..., None]) -> Callable[..., None]:
    """The constructor, which then refers to initialised parameters by name: loading a model may replace the tensors."""

    @wraps(construct)
    def named(self: PositionalEncoding, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        names = {id(tensor): name for name, tensor in chain(self.named_parameters(), self.named_buffers())}
        self._initialisers = [(names.get(id(x), x), init) for x, init in self._initialisers]

    return named


def _reset_module(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    else:
        for child in module.children():
            _reset_module(child)
