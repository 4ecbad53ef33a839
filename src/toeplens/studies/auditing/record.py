"""The record of an audit: what is known of each head of a model, of each attention call, and of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from toeplens.ground import InputError

Number = float | None  # None where it is not known: not measured, or not defined for this head
Effect = Literal["loss", "states"]  # what an ablation changes: see `Audit`

# the columns of the table, in order, and what each says
COLUMNS: dict[str, str] = {
    "side": "encoder or decoder",
    "kind": "self or cross attention",
    "layer": "from 0, counted over the attention of its kind and side",
    "head": "from 0",
    "positional": "share of the variance of the logits that comes from where a key stands",
    "symbolic": "share that comes from what a key holds",
    "interaction": "share that is neither alone",
    "toeplitz": "share of the logits' energy that depends on the offset alone",
    "toeplitz_variance": "share of the logits' variance that the offset alone explains",
    "distance": "mean distance of query and key, in tokens, weighed by the attention",
    "entropy": "entropy of the attention over the log of the keys seen: 0 one key, 1 all alike",
    "first": "attention on the first token of the sequence",
    "sink": "attention that a sink takes, which gives no value",
    "previous": "attention on the token before the query",
    "current": "attention on the query's own token",
    "next": "attention on the token after the query",
    "induction": "attention on tokens that follow an earlier (elsewhere: another) copy of the query's token",
    "centre": "mean log2 of the rotation's frequencies (radians a position), weighed by what they do for the variance",
    "effect": "what silencing the head adds to the loss, or how far it moves the last states",
    "effect_low": "lower end of the effect's interval (95 %)",
    "effect_high": "upper end",
}


@dataclass(frozen=True)
class HeadRecord:
    """One head. The fields up to ``effect_high`` are the columns of the table (`COLUMNS`).

    profile      attention by distance: at the query's own token, then at distances 1, 2-3, 4-7, 8-15, ... on either
                 side together; sums to 1 less what a sink takes
    norm_use     of each frequency of the layer's rotation, the share of the mean of ||q|| ||k|| in it: the first number
                 is for the dimensions that are not turned, then the frequencies in the layer's order
    variance_use the same of the logits' variance, Cov(L_t, L) / Var(L); the last number is for a bias
    """

    side: str
    kind: str
    layer: int
    head: int
    positional: Number = None
    symbolic: Number = None
    interaction: Number = None
    toeplitz: Number = None
    toeplitz_variance: Number = None
    distance: Number = None
    entropy: Number = None
    first: Number = None
    sink: Number = None
    previous: Number = None
    current: Number = None
    next: Number = None
    induction: Number = None
    centre: Number = None
    effect: Number = None
    effect_low: Number = None
    effect_high: Number = None
    profile: tuple[float, ...] = ()
    norm_use: tuple[float, ...] = ()
    variance_use: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerRecord:
    """One attention call of the model, in the order of the pass.

    module         its name in the model, and its class
    heads, key_heads, head_dim   query heads, key heads, width of queries and keys
    scale          factor of q . k
    softcap        c of c tanh(x / c); None without
    causal         whether keys after the query are hidden
    window         keys that a query of causal attention sees at most, its own and those before; None if all
    position       what position does here, in words, such as "rotation of 8 pairs, 16 of 64 dimensions (half)"
    frequencies    of the rotation, radians a position, in the order of the pairs; empty without a known rotation
    dead           places among the frequencies of the pairs that add to no logit here: in all heads their queries are
                   0, or their keys
    tabled         places of those whose frequency is that of the model's own table of cosines, as nothing of theirs was
                   seen to turn: queries and keys are 0, or the turns too small for the model's precision
    unknown        why positional, symbolic and interaction shares (and frequency use) are not known; None if they are
    weights        largest difference of an attention weight formed again from the parts; None if the model forms none
    outputs        largest difference of a head's output, relative to the layer's largest
    tolerance      what those may be at most
    deposit        of the clipped effects d of this layer's heads: ``top_share`` max d / sum d, ``effective_heads``
                   (sum d)^2 / sum d^2, ``gini``, ``lead`` (largest less second); empty without effects
    """

    side: str
    kind: str
    layer: int
    module: str
    heads: int
    key_heads: int
    head_dim: int
    scale: float
    softcap: Number
    causal: bool
    window: int | None
    position: str
    frequencies: tuple[float, ...]
    unknown: str | None
    weights: Number
    outputs: float
    tolerance: float
    deposit: dict[str, Number] = field(default_factory=dict)
    dead: tuple[int, ...] = ()
    tabled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    about        the model and how it was audited, as names and values: model, class, model_type, parameters, dtype,
                 device, text (where the tokens came from), sequences, tokens (of each), seed, intervals (what those of
                 effects are over), torch, transformers, python, seconds
    layers       every attention call, in the order of the pass
    heads        every head, in the same order
    effect       what the heads' effects are of: ``loss`` (nats a token) or ``states`` (the squared distance of the last
                 states from the intact ones, relative to their variance over tokens); None if heads were not silenced
    method       ``exact`` (each head silenced) or ``attribution`` (first order); None likewise
    baseline     the intact model's loss; None for states and without effects
    whole        largest difference of the model's output in the captured pass from that of a plain pass, relative to
                 the largest output
    words        the tokens of the first sequence as text, where a tokenizer was there; else empty
    """

    about: dict[str, Any]
    layers: tuple[LayerRecord, ...]
    heads: tuple[HeadRecord, ...]
    effect: Effect | None
    method: str | None
    baseline: Number
    whole: float
    words: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from toeplens.report.audit_notebook import notebook_html  # its floor is above this one: decision 014

        return notebook_html(self)

    def table(self) -> dict[str, list[Any]]:
        """The heads as columns (`COLUMNS`), one number or word a head; None where it is not known."""
        return {name: [getattr(head, name) for head in self.heads] for name in COLUMNS}

    def of(self, layer: LayerRecord) -> Iterator[HeadRecord]:
        """The heads of one layer."""
        place = (layer.side, layer.kind, layer.layer)
        return (head for head in self.heads if (head.side, head.kind, head.layer) == place)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Any) -> Audit:
        """The inverse of `to_dict`; what is no such record raises `InputError`."""
        try:
            lists = {"frequencies", "dead", "tabled", "profile", "norm_use", "variance_use"}
            fields: dict[str, list[dict[str, Any]]] = {
                name: [{k: tuple(v) if k in lists else v for k, v in one.items()} for one in content[name]]
                for name in ("layers", "heads")
            }
            layers = tuple(LayerRecord(**each) for each in fields["layers"])
            heads = tuple(HeadRecord(**each) for each in fields["heads"])
            numbers = (getattr(head, name) for head in heads for name in list(COLUMNS)[2:])
            if not all(value is None or isinstance(value, int | float) for value in numbers):
                raise TypeError("a head has a number that is none")
            rest = {key: content[key] for key in ("about", "effect", "method", "baseline", "whole")}
            return cls(layers=layers, heads=heads, words=tuple(content["words"]), **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"audit: the record is damaged ({error}).") from None


def known(value: float) -> Number:
    """The number, or None where it is none (NaN, infinite)."""
    return float(value) if math.isfinite(value) else None
