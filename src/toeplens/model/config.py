"""The decoder's configuration: every difference between the paper and its released code is a field."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from toeplens import encodings
from toeplens.utils import InputError, choose, invalid, to_json_types, validation_message
from toeplens.utils.files import refuse_booleans
from toeplens.utils.machine import check_memory

Protocol = Literal["paper", "released"]  # the model of the paper's text, or that of its released code
DropoutPlace = Literal["weights", "attention", "ffn-hidden", "ffn"]
_MAX_SIZE, _MAX_LAYERS = 10**9, 1000
_ENCODING_SIZES = ("d_model", "num_heads", "max_len")  # sizes

_PAPER: dict[str, Any] = {
    "causal": True,
    "pad_mask": True,
    "key_value_source": "layer",
    "input_encoding": None,
    "input_encoding_options": {},
    "readout": "last",
    "final_norm": True,
    "activation": "relu",
    "dropout_on": ("weights", "attention", "ffn"),
}
_RELEASED: dict[str, Any] = {
    **_PAPER,
    "causal": False,
    "pad_mask": False,
    "key_value_source": "embeddings",
    "readout": "mean",
    "final_norm": False,
}
_RELEASED_ROPE = {**_RELEASED, "input_encoding": "sinusoidal", "input_encoding_options": {"layout": "halves"}}
_RELEASED_MLA: dict[str, Any] = {
    **_RELEASED,
    "pad_mask": True,
    "key_value_source": "layer",
    "input_encoding": "learned",
    "input_encoding_options": {"init_std": 0.0},
    "readout": "masked-mean",
    "final_norm": True,
    "activation": "gelu",
    "dropout_on": ("ffn-hidden", "ffn"),
}


def protocol_switches(protocol: Protocol, encoding: str) -> dict[str, Any]:
    """The switches that ``protocol`` sets for a model with ``encoding`` (protocols of arXiv 2505.13027)."""
    if choose("protocol", protocol, get_args(Protocol)) == "paper":
        return dict(_PAPER)
    return dict({"rope": _RELEASED_ROPE, "mla": _RELEASED_MLA}.get(encoding, _RELEASED))


class DecoderConfig(BaseModel):
    """Configuration of a decoder: sizes, encoding and switches. Frozen, and validated on construction.

    Switches that are not given are set by ``protocol``: ``paper`` follows the text of arXiv 2505.13027,
    ``released`` its released code (whose RoPE and MLA models have their own switches). A protocol does
    not change the encoding's options: `toeplens.papers.deposit` lists those of each protocol.

    Sizes
        vocab_size, num_classes  number of token ids and output classes (num_classes default: vocab_size, as in both)
        d_model, d_ff, num_layers (at most 1000), num_heads, max_len; sizes that exceed the memory raise an error
    Encoding
        encoding, encoding_options              see `toeplens.encodings.names` and `options`. For several encodings, a
                                                list or ``rope+alibi`` (stored as ``rope + alibi``), with each one's
                                                options under its name, ``{"rope": {"base": 500}}``
        input_encoding, input_encoding_options  another encoding, which only adds vectors to the token embeddings
    Switches
        causal            mask keys after the query
        pad_mask          mask padding in attention
        key_value_source  compute keys and values from the ``layer``'s own normalised input or, in every layer, from the
                          raw input ``embeddings``
        readout           the ``last`` token's state; the ``mean`` over all positions (including padding); the
                          ``masked-mean`` over tokens; or ``each`` position's own state, for one prediction per token
        final_norm        LayerNorm before the readout
        parallel          attention and FFN of a layer read the same normalised input and are added together, as in
                          GPT-J (default: False)
        activation        ``relu`` or ``gelu``
        dropout           rate; ``dropout_on`` lists where: attention ``weights``, the ``attention`` branch's output,
                          the FFN's hidden layer (``ffn-hidden``), the ``ffn`` branch's output
        attention_scale   factor of q . k: a number; None for 1/sqrt(dimensions of q); or ``published`` (default):
                          the encoding's own `scale`, stored as a number, or as None if it equals that
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    protocol: Protocol = "paper"
    vocab_size: int = Field(574, ge=2, le=_MAX_SIZE)
    num_classes: int = Field(0, ge=0, le=_MAX_SIZE, validate_default=True)
    d_model: int = Field(256, ge=1, le=_MAX_SIZE)
    d_ff: int = Field(512, ge=1, le=_MAX_SIZE)
    num_layers: int = Field(6, ge=1, le=_MAX_LAYERS)
    num_heads: int = Field(16, ge=1, le=_MAX_SIZE)
    max_len: int = Field(128, ge=1, le=_MAX_SIZE, validate_default=True)
    encoding: str = "rope"
    encoding_options: dict[str, Any] = {}
    input_encoding: str | None
    input_encoding_options: dict[str, Any]
    causal: bool
    pad_mask: bool
    key_value_source: Literal["layer", "embeddings"]
    readout: Literal["last", "mean", "masked-mean", "each"]
    final_norm: bool
    parallel: StrictBool = False
    activation: Literal["relu", "gelu"]
    dropout: float = Field(0.1, ge=0, lt=1)
    dropout_on: tuple[DropoutPlace, ...]
    attention_scale: float | None = Field("published", gt=0, validate_default=True)  # last: reads the others

    @model_serializer(mode="wrap")
    def _without_added_field(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Without ``parallel`` if it is False, so that the names of runs are those before it was added."""
        return {name: value for name, value in handler(self).items() if name != "parallel" or value}

    @model_validator(mode="before")
    @classmethod
    def _fill_switches(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refuse_booleans(data, cls.model_fields)
        protocol = data.get("protocol", "paper")
        try:
            encoding = _canonical_name(data.get("encoding", "rope"))
        except InputError:
            return data  # errors are raised where it is used
        is_known = protocol in get_args(Protocol) and isinstance(encoding, str)
        return protocol_switches(protocol, encoding) | data if is_known else data

    @field_validator("encoding_options", "input_encoding_options", mode="after")
    @classmethod
    def _options_are_json(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:
        return to_json_types(value, str(info.field_name))

    @field_validator("encoding", "input_encoding", mode="before")
    @classmethod
    def _canonical_encoding(cls, value: Any) -> Any:
        try:
            return _canonical_name(value)
        except InputError as error:
            raise ValueError(str(error).removeprefix("encoding: ").removeprefix("encoding ")) from None

    @field_validator("num_classes")
    @classmethod
    def _default_num_classes(cls, value: int, info: Any) -> int:
        return value or info.data.get("vocab_size", 0)

    @field_validator("max_len")
    @classmethod
    def _fits_in_memory(cls, value: int, info: Any) -> int:
        """Check memory before anything is built: an encoding may be a table with one row per token."""
        if {"vocab_size", "num_classes", "d_model", "d_ff", "num_layers"} <= info.data.keys():
            check_memory("model: these sizes need", 4 * (_min_parameters(**info.data) + value * info.data["d_model"]))
        return value

    @field_validator("attention_scale", mode="before")
    @classmethod
    def _resolve_scale(cls, value: Any, info: Any) -> Any:
        """Store the published scale explicitly, so that old configurations keep it if it is ever corrected."""
        if value != "published":
            return value
        try:
            return _encoding_needs(info.data, info.data["encoding"], info.data["encoding_options"]).scale
        except (InputError, KeyError):
            return None  # errors of other fields are raised where they are used

    @model_validator(mode="after")
    def _sizes_fit(self) -> DecoderConfig:
        if self.d_model % self.num_heads:
            raise invalid("d_model", f"be divisible by num_heads ({self.num_heads})", self.d_model)
        needs = _encoding_needs(dict(self), self.encoding, self.encoding_options)
        name, options = self.input_encoding, self.input_encoding_options
        input_needs = None if name is None else _encoding_needs(dict(self), name, options)
        if needs.layers is not None and max(needs.layers, default=0) >= self.num_layers:
            raise invalid("encoding_options", f"have layers from 0 to {self.num_layers - 1}", max(needs.layers))
        if input_needs is not None and input_needs.coupling != "input":
            must = "be an encoding that is added at the input, such as 'sinusoidal'"
            raise invalid("input_encoding", must, got=f"{name!r}, with coupling {input_needs.coupling!r}")
        if input_needs is not None and needs.coordinates is not None:
            theirs = input_needs.coordinates
            if theirs is None or not torch.equal(needs.coordinates, theirs):
                raise invalid("input_encoding", f"use the coordinates of encoding {self.encoding!r}", name)
        if self.encoding_is_latent and self.key_value_source == "embeddings":
            raise ValueError("key_value_source must be 'layer' for latent attention, got 'embeddings'.")
        return self

    @property
    def min_parameters(self) -> int:
        """A lower bound of the number of weights, without building the model."""
        return _min_parameters(**dict(self))

    @property
    def head_dim(self) -> int:
        """Dimensions of one head (of its content part, for latent attention)."""
        return self.d_model // self.num_heads

    @property
    def encoding_is_latent(self) -> bool:
        """Whether the encoding is `MLA` or a subclass, which needs latent attention."""
        return issubclass(encodings.get(self.encoding), encodings.MLA)

    def build_encoding(self) -> encodings.PositionalEncoding:
        """A new instance of the encoding."""
        return _build_encoding(dict(self), self.encoding, self.encoding_options)

    def build_input_encoding(self) -> encodings.PositionalEncoding | None:
        """A new instance of the input encoding, or None."""
        name = self.input_encoding
        return None if name is None else _build_encoding(dict(self), name, self.input_encoding_options)


def _canonical_name(value: Any) -> Any:
    """The canonical name of several encodings; other values are unchanged."""
    if isinstance(value, (list, tuple)) and not all(isinstance(part, str) for part in value):
        raise invalid("encoding", "be a name or a list of names", value)
    is_combined = isinstance(value, (list, tuple)) or (isinstance(value, str) and "+" in value)
    return encodings.canonical_name(value) if is_combined else value


class _EncodingNeeds(NamedTuple):
    """What a configuration needs of an encoding: scale (None for 1/sqrt(dimensions of q)), layers, coordinates."""

    scale: float | None
    layers: frozenset[int] | None
    coupling: encodings.Coupling
    coordinates: torch.Tensor | None  # of all tokens; None for token indices


def _encoding_needs(sizes: dict[str, Any], name: str, options: dict[str, Any]) -> _EncodingNeeds:
    """Facts of an encoding; it is built only once for each set of options."""
    encoding_sizes = tuple(sizes[field] for field in _ENCODING_SIZES)
    return _cached_needs(encodings.get(name), name, encoding_sizes, json.dumps(options))


@lru_cache(maxsize=256)
def _cached_needs(encoding_class: type, name: str, sizes: tuple[int, ...], options: str) -> _EncodingNeeds:
    with torch.random.fork_rng(devices=[]):
        built = _build_encoding(dict(zip(_ENCODING_SIZES, sizes, strict=True)), name, json.loads(options))
    parts = built.encodings() if isinstance(built, encodings.Composed) else [built]
    layers = [part.layers for part in parts if part.layers is not None]
    used_layers = frozenset().union(*layers) if layers else None
    scale = None if built.scale == built.query_dim**-0.5 else built.scale
    coordinates = None if built.axes == 1 else built.to_positions(torch.arange(built.max_len))
    return _EncodingNeeds(scale, used_layers, built.coupling, coordinates)


def _build_encoding(sizes: dict[str, Any], name: str, options: dict[str, Any]) -> encodings.PositionalEncoding:
    encoding_sizes = {field: sizes[field] for field in _ENCODING_SIZES}
    head_dim = sizes["d_model"] // sizes["num_heads"]
    return encodings.build(name, **encoding_sizes, head_dim=head_dim, **options)


def without_published_scale(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration's fields, without the scale if it is the encoding's published one, so that it follows changes.

    A stored scale is a number, which would be wrong for another encoding or other sizes. A scale other than the
    published one was chosen explicitly and is kept.
    """
    unscaled = {name: value for name, value in fields.items() if name != "attention_scale"}
    if fields.get("attention_scale", "published") == "published":
        return unscaled
    try:
        return unscaled if decoder_config(**unscaled).attention_scale == fields["attention_scale"] else fields
    except InputError:
        return fields  # errors are raised where they are used


def _min_parameters(vocab_size: int, num_classes: int, d_model: int, d_ff: int, num_layers: int, **_: Any) -> int:
    """Embeddings, readout, and per layer the FFN and one of the four attention matrices."""
    return d_model * (vocab_size + num_classes + num_layers * (2 * d_ff + d_model))


def decoder_config(**fields: Any) -> DecoderConfig:
    """Build a `DecoderConfig`; invalid fields raise an `InputError`."""
    try:
        return DecoderConfig(**fields)
    except ValidationError as error:
        raise InputError(validation_message(error, DecoderConfig)) from None
