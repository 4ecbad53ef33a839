"""The decoder's configuration: every difference between the paper and its released program is a field of its own."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from toeplens import encodings
from toeplens.ground import InputError, choose, invalid, plain, sentence
from toeplens.ground.machine import must_fit
from toeplens.ground.reading import refuse_truths

Protocol = Literal["paper", "released"]  # the model of the paper's text, or that of its program
DropoutPlace = Literal["weights", "attention", "ffn-hidden", "ffn"]
_SIZES, _LAYERS = 10**9, 1000

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
    """A decoder, from its sizes, its encoding and its switches. Frozen, and validated on construction.

    A switch that is not given takes its value from ``protocol``: ``paper`` is what the text of arXiv 2505.13027
    describes, ``released`` what its program runs (its RoPE and MLA models have switches of their own). A protocol does
    not touch the encoding's own options: `toeplens.papers.deposit` says which ones each protocol uses.

    Sizes
        vocab_size, num_classes  input tokens and output classes (num_classes: vocab_size unless given, as in both)
        d_model, d_ff, num_layers (to 1000), num_heads, max_len; what has no room in the machine's memory is refused
    Encoding
        encoding, encoding_options              see `toeplens.encodings.names` and `options`. Several at once as a list
                                                or as ``rope+alibi``, kept as ``rope + alibi``; then options are those
                                                of each by its name, ``{"rope": {"base": 500}}``
        input_encoding, input_encoding_options  another encoding, added at the input alone
    Switches
        causal            keys after the query are hidden
        pad_mask          padding is hidden from attention
        key_value_source  keys and values from the ``layer``'s own normalised input, or, in every layer, from the raw
                          input ``embeddings``
        readout           the ``last`` token's state, the ``mean`` over all positions (padding included), the
                          ``masked-mean`` over tokens, or ``each`` position's own state: an answer at every token
        final_norm        LayerNorm before the readout
        activation        ``relu`` or ``gelu``
        dropout           rate; ``dropout_on`` says where: attention ``weights``, the ``attention`` branch's output,
                          the FFN's hidden layer (``ffn-hidden``), the ``ffn`` branch's output
        attention_scale   factor of q . k: a number; None for 1/sqrt(dimensions of q); or ``published``, the default:
                          the encoding's own `scale`, written out as the number, or as None where it is that
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    protocol: Protocol = "paper"
    vocab_size: int = Field(574, ge=2, le=_SIZES)
    num_classes: int = Field(0, ge=0, le=_SIZES, validate_default=True)
    d_model: int = Field(256, ge=1, le=_SIZES)
    d_ff: int = Field(512, ge=1, le=_SIZES)
    num_layers: int = Field(6, ge=1, le=_LAYERS)
    num_heads: int = Field(16, ge=1, le=_SIZES)
    max_len: int = Field(128, ge=1, le=_SIZES, validate_default=True)
    encoding: str = "rope"
    encoding_options: dict[str, Any] = {}
    input_encoding: str | None
    input_encoding_options: dict[str, Any]
    causal: bool
    pad_mask: bool
    key_value_source: Literal["layer", "embeddings"]
    readout: Literal["last", "mean", "masked-mean", "each"]
    final_norm: bool
    activation: Literal["relu", "gelu"]
    dropout: float = Field(0.1, ge=0, lt=1)
    dropout_on: tuple[DropoutPlace, ...]
    attention_scale: float | None = Field("published", gt=0, validate_default=True)  # the last: it looks at all others

    @model_validator(mode="before")
    @classmethod
    def _switches_of_protocol(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        refuse_truths(given, cls.model_fields)
        protocol, encoding = given.get("protocol", "paper"), given.get("encoding", "rope")
        try:
            encoding = _named(encoding)
        except InputError:
            return given  # what is wrong with it is said where it is looked at
        if protocol in get_args(Protocol) and isinstance(encoding, str):
            return protocol_switches(protocol, encoding) | given
        return given

    @field_validator("encoding_options", "input_encoding_options", mode="after")
    @classmethod
    def _options_are_json(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:
        return plain(value, str(info.field_name))

    @field_validator("encoding", "input_encoding", mode="before")
    @classmethod
    def _written_in_one_way(cls, value: Any) -> Any:
        try:
            return _named(value)
        except InputError as error:
            raise ValueError(str(error).removeprefix("encoding: ").removeprefix("encoding ")) from None

    @field_validator("num_classes")
    @classmethod
    def _as_many_classes_as_tokens(cls, value: int, info: Any) -> int:
        return value or info.data.get("vocab_size", 0)

    @field_validator("max_len")
    @classmethod
    def _there_is_room(cls, value: int, info: Any) -> int:
        """Before anything is built: an encoding may be a table of as many rows as a text has tokens."""
        if {"vocab_size", "num_classes", "d_model", "d_ff", "num_layers"} <= info.data.keys():
            must_fit("model: these sizes need", 4 * (_weights_at_least(**info.data) + value * info.data["d_model"]))
        return value

    @field_validator("attention_scale", mode="before")
    @classmethod
    def _written_out(cls, value: Any, info: Any) -> Any:
        """A configuration says which scale it has, so that it means the same should an encoding's ever be corrected."""
        if value != "published":
            return value
        try:
            return _facts(info.data, info.data["encoding"], info.data["encoding_options"]).scale
        except (InputError, KeyError):
            return None  # what is wrong with the other fields is said where they are looked at

    @model_validator(mode="after")
    def _sizes_fit(self) -> DecoderConfig:
        if self.d_model % self.num_heads:
            raise invalid("d_model", f"be divisible by num_heads ({self.num_heads})", self.d_model)
        encoding = _facts(dict(self), self.encoding, self.encoding_options)
        name, options = self.input_encoding, self.input_encoding_options
        added = None if name is None else _facts(dict(self), name, options)
        if encoding.layers is not None and max(encoding.layers, default=0) >= self.num_layers:
            raise invalid("encoding_options", f"have layers from 0 to {self.num_layers - 1}", max(encoding.layers))
        if added is not None and added.coupling != "input":
            raise invalid("input_encoding", "be an encoding that is added at the input", self.input_encoding)
        if self.encoding_is_latent and self.key_value_source == "embeddings":
            raise ValueError("key_value_source must be 'layer' for latent attention, got 'embeddings'.")
        return self

    @property
    def weights_at_least(self) -> int:
        """A number of weights that the model has at least, known before it is built."""
        return _weights_at_least(**dict(self))

    @property
    def head_dim(self) -> int:
        """Dimensions of one head (of its content part, for latent attention)."""
        return self.d_model // self.num_heads

    @property
    def encoding_is_latent(self) -> bool:
        """Whether the encoding is (a kind of) `MLA`, which asks for latent attention."""
        return issubclass(encodings.get(self.encoding), encodings.MLA)

    def build_encoding(self) -> encodings.PositionalEncoding:
        """A new instance of the encoding."""
        return self._build(self.encoding, self.encoding_options)

    def build_input_encoding(self) -> encodings.PositionalEncoding | None:
        """A new instance of the encoding added at the input, or None."""
        return None if self.input_encoding is None else self._build(self.input_encoding, self.input_encoding_options)

    def _build(self, name: str, options: dict[str, Any]) -> encodings.PositionalEncoding:
        return _encoding(dict(self), name, options)


def _named(given: Any) -> Any:
    """The one way in which several encodings are written; what is no list and has no plus stays as it is."""
    if isinstance(given, (list, tuple)) and not all(isinstance(part, str) for part in given):
        raise invalid("encoding", "be a name or a list of names", given)
    several = isinstance(given, (list, tuple)) or (isinstance(given, str) and "+" in given)
    return encodings.canonical(given) if several else given


class _Facts(NamedTuple):
    """What a configuration asks of an encoding: a scale, None where it is 1/sqrt(dimensions of q); layers it names."""

    scale: float | None
    layers: frozenset[int] | None
    coupling: encodings.Coupling


def _facts(sizes: dict[str, Any], name: str, options: dict[str, Any]) -> _Facts:
    """From an encoding that is built once to look at it, however often a configuration of these options is made."""
    three = tuple(sizes[field] for field in ("d_model", "num_heads", "max_len"))
    return _looked_at(encodings.get(name), name, three, json.dumps(options))


@lru_cache(maxsize=256)
def _looked_at(kind: type, name: str, sizes: tuple[int, ...], options: str) -> _Facts:
    with torch.random.fork_rng(devices=[]):
        made = _encoding(dict(zip(("d_model", "num_heads", "max_len"), sizes, strict=True)), name, json.loads(options))
    parts = made.each() if isinstance(made, encodings.Composed) else [made]
    layers = [part.layers for part in parts if part.layers is not None]
    named = frozenset().union(*layers) if layers else None
    return _Facts(None if made.scale == made.query_dim**-0.5 else made.scale, named, made.coupling)


def _encoding(sizes: dict[str, Any], name: str, options: dict[str, Any]) -> encodings.PositionalEncoding:
    d_model, num_heads, max_len = (sizes[field] for field in ("d_model", "num_heads", "max_len"))
    head_dim = d_model // num_heads
    return encodings.build(name, d_model=d_model, num_heads=num_heads, head_dim=head_dim, max_len=max_len, **options)


def scale_left_open(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration's fields, without the scale where it is the encoding's published one, so that it follows changes.

    What was written out says its scale as a number, which is not that of another encoding or of other sizes. A scale
    that is not the published one was chosen, and stays.
    """
    open_ = {name: value for name, value in fields.items() if name != "attention_scale"}
    if fields.get("attention_scale", "published") == "published":
        return open_
    try:
        return open_ if decoder_config(**open_).attention_scale == fields["attention_scale"] else fields
    except InputError:
        return fields  # what is wrong with them is said where they are used


def _weights_at_least(vocab_size: int, num_classes: int, d_model: int, d_ff: int, num_layers: int, **_: Any) -> int:
    """Embeddings, readout, and of each layer the feed-forward part and one of attention's four maps."""
    return d_model * (vocab_size + num_classes + num_layers * (2 * d_ff + d_model))


def decoder_config(**fields: Any) -> DecoderConfig:
    """A `DecoderConfig`; wrong fields raise an `InputError` of one sentence."""
    try:
        return DecoderConfig(**fields)
    except ValidationError as error:
        raise InputError(sentence(error, DecoderConfig)) from None
