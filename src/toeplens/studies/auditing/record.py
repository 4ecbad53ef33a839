"""The record of an audit: what is known of each head of a model, of each attention call, and of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toeplens.ground import InputError, reading
from toeplens.ground.errors import sentence
from toeplens.ground.records import NearlyShare, Record
from toeplens.lens import EstimateCheck
from toeplens.sources.huggingface.capture.calls import Kind, Side
from toeplens.sources.huggingface.effects.outcome import Effect
from toeplens.studies.kit.kernels import Decay, KernelEnds

Method = Literal["exact", "position", "bands", "attribution"]

Number = reading.Number | None  # None where it is not known: not measured, or not defined for this head
Part = NearlyShare | None
Size = reading.Positive | None
_Weight = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e6, le=1e6)]

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
    "half_distance": "tokens after which the mean logit is half way to its limit, by the form of decay that fits best",
    "entropy": "entropy of the attention over the log of the keys seen: 0 one key, 1 all alike",
    "first": "attention on the first token of the sequence",
    "sink": "attention that a sink takes, which gives no value",
    "previous": "attention on the token before the query",
    "current": "attention on the query's own token",
    "next": "attention on the token after the query",
    "induction": "attention on tokens that follow an earlier (elsewhere: another) copy of the query's token",
    "duplicate": "attention on earlier (elsewhere: other) copies of the query's own token",
    "retrieval": "share of the needles' tokens at whose prediction its strongest key is that token in the needle",
    "centre": "mean log2 of the rotation's frequencies (radians a position), weighed by what they do for the variance",
    "massive_q": "share of the squared norms of the queries that is in their largest dimension",
    "massive_k": "the same of the keys",
    "norm_top": "share of the mean of ||q|| ||k|| that is in the rotation's strongest pair",
    "dead": "pairs of the rotation that add to none of the head's logits: in them its queries or keys are 0",
    "offset": "how fixed the angle of queries and keys is in the rotation's pairs, weighed by norms: 1 always the same",
    "effect": "what silencing the head, or taking its position, adds to the loss, or how far it moves the last states",
    "effect_low": "lower end of the effect's interval (95 %)",
    "effect_high": "upper end",
}

# whose measure a column is, or is made after; the others are made here (docs/how-to/audit.md)
SOURCES: dict[str, str] = {
    **dict.fromkeys(("positional", "symbolic", "centre"), "after arXiv 2511.11579"),
    **dict.fromkeys(("first", "sink"), "attention sinks: Xiao et al. 2023, arXiv 2309.17453"),
    "previous": "previous-token heads: Elhage et al. 2021; Olsson et al. 2022, arXiv 2209.11895",
    "induction": "induction heads: Olsson et al. 2022, arXiv 2209.11895",
    "duplicate": "duplicate-token heads: Wang et al. 2022, arXiv 2211.00593",
    "retrieval": "retrieval heads: Wu et al. 2024, arXiv 2404.15574",
    **dict.fromkeys(("massive_q", "massive_k"), "massive values: Jin et al. 2025, arXiv 2502.01563"),
    "norm_top": "norms by frequency: Barbero et al. 2024, arXiv 2410.06205",
    "offset": "after Jonasson 2025, arXiv 2503.01832",
}


class NotThere(InputError):
    """A layer or a head was asked for that the model does not have; the sentence counts from 0, as Python does."""

    WHERE = ""

    def __init__(self, number: int, last: int, first: int = 0) -> None:
        super().__init__(self.WHERE.format(number + first, first, last + first))
        self.number, self.last = number, last

    def for_people(self) -> NotThere:
        """The same, counted from 1."""
        return type(self)(self.number, self.last, 1)


class NoSuchLayer(NotThere):
    """A layer."""

    WHERE = "layers must be from {1} to {2}, got {0}."


class NoSuchHead(NotThere):
    """A head, in any of the layers."""

    WHERE = "heads must be from {1} to {2}, got {0}."


@dataclass(frozen=True)
class HeadRecord(Record):
    """One head. The fields up to ``effect_high``, and what is made of the others below, are the table's `COLUMNS`.

    profile      attention by distance: at the query's own token, then at distances 1, 2-3, 4-7, 8-15, ... on either
                 side together; sums to 1 less what a sink takes
    norm_use     of each frequency of the layer's rotation, the share of the mean of ||q|| ||k|| in it: the first number
                 is for the dimensions that are not turned, then the frequencies in the layer's order
    variance_use the same of the logits' variance, Cov(L_t, L) / Var(L); the last number is for a bias
    decay        how the mean logit changes with distance; None where no offset is between queries and keys
    kernel       where the head has a bias by offset, what its matrix can do; else None
    """

    LATER = ("decay", "kernel", "massive_q", "massive_k", "offset", "retrieval", "duplicate")

    side: Side
    kind: Kind
    layer: reading.Count
    head: reading.Count
    positional: Part = None
    symbolic: Part = None
    interaction: Part = None
    toeplitz: Part = None
    toeplitz_variance: Part = None
    distance: Size = None
    entropy: Part = None
    first: Part = None
    sink: Part = None
    previous: Part = None
    current: Part = None
    next: Part = None
    induction: Part = None
    duplicate: Part = None
    retrieval: Part = None
    centre: Number = None
    massive_q: Part = None
    massive_k: Part = None
    offset: Part = None
    effect: Number = None
    effect_low: Number = None
    effect_high: Number = None
    profile: tuple[_Weight, ...] = ()
    norm_use: tuple[reading.Number, ...] = ()
    variance_use: tuple[reading.Number, ...] = ()
    decay: Decay | None = None
    kernel: KernelEnds | None = None

    @property
    def half_distance(self) -> Number:
        """That of the decay, where its form `explains` the mean logits."""
        return self.decay.half_distance if self.decay is not None and self.decay.explains else None

    @property
    def norm_top(self) -> Part:
        """Of the pairs, the largest share of the norms; None where they are not known."""
        return max(self.norm_use[1:], default=None)

    @property
    def dead(self) -> int | None:
        """How many pairs have no norms at all in this head; None where they are not known."""
        return sum(share == 0 for share in self.norm_use[1:]) if self.norm_use else None


@dataclass(frozen=True)
class LayerRecord(Record):
    """One attention call of the model, in the order of the pass.

    module         its name in the model, and its class
    heads, key_heads, head_dim   query heads, key heads, width of queries and keys
    scale          factor of q . k
    softcap        c of c tanh(x / c); None without
    causal         whether keys after the query are hidden
    window         keys up to its own that a query sees at most, on either side if not causal; None if all
    chunk          positions are in chunks of so many, and a query sees none of a chunk before; None if they are not
    position       what position does here, in words, such as "rotation of 8 pairs, 16 of 64 dimensions (half)"
    frequencies    of the rotation, radians a position, in the order of the pairs; empty without a known rotation
    dead           places among the frequencies of the pairs that add to no logit here: in all heads their queries are
                   0, or their keys
    tabled         places of those whose frequency is that of the model's own table of cosines, as nothing of theirs was
                   seen to turn: queries and keys are 0, or the turns too small for the model's precision
    unknown        why positional, symbolic and interaction shares (and frequency use) are not known; None if they are
    weights        largest difference of an attention weight formed again from the parts; None if the model forms none
    outputs        largest difference of a head's output, relative to the layer's largest
    tolerance      largest difference of a weight that rounding explains; of earlier records what both may be at most
    used           largest share of what rounding explains that a difference takes, of weights and outputs; None in
                   earlier records, and where it was not measured
    logit          largest absolute logit of a visible key; None likewise
    undecided      share of queries whose largest weight rounding alone may change by a half or more; None likewise
    deposit        sums of this layer's effects above and below 0, ``helps`` and ``harms``; of the clipped effects d
                   ``top_share`` max d / sum d, ``effective_heads`` (sum d)^2 / sum d^2, ``gini`` (None where the sum is
                   within its noise), ``lead`` (largest less second); empty without effects
    """

    LATER = ("deposit", "dead", "tabled", "chunk", "used", "logit", "undecided")

    side: Side
    kind: Kind
    layer: reading.Count
    module: reading.Text
    heads: reading.Count
    key_heads: reading.Count
    head_dim: reading.Count
    scale: reading.Number
    softcap: Number
    causal: reading.Truth
    window: reading.Count | None
    position: reading.Text
    frequencies: tuple[reading.Number, ...]
    unknown: reading.Text | None
    weights: Size
    outputs: reading.Positive
    tolerance: reading.Positive
    deposit: dict[str, Number] = field(default_factory=dict)
    dead: tuple[reading.Count, ...] = ()
    tabled: tuple[reading.Count, ...] = ()
    chunk: reading.Count | None = None
    used: Size = None
    logit: Size = None
    undecided: Size = None

    def check(self, heads: list[HeadRecord]) -> None:
        """Refuse heads that are not the layer's."""
        name = f"{self.side} {self.kind} layer {self.layer}"
        if [head.head for head in heads] != list(range(self.heads)):
            raise ValueError(f"heads of {name} must be 0 to {self.heads - 1}.")
        if any(pair >= len(self.frequencies) for pair in (*self.dead, *self.tabled)):
            raise ValueError(f"dead and tabled pairs of {name} must be among its {len(self.frequencies)} pairs.")
        lengths = {"norm_use": len(self.frequencies) + 1, "variance_use": len(self.frequencies) + 2}
        for head in heads:
            for field_name, wanted in lengths.items():
                count = len(getattr(head, field_name))
                if count not in (0, wanted):
                    raise ValueError(
                        f"{field_name} of {name} head {head.head} must have {wanted} numbers, got {count}."
                    )


@dataclass(frozen=True)
class BandRecord(Record):
    """A band of a layer's rotation: its pairs, and what is lost when it stands still in all of the layer's heads.

    first, last       of its pairs, from 0 in the rotation's order
    fastest, slowest  of its frequencies, radians a position, without their sign
    effect            as of a head; effect_low, effect_high  the ends of its 95 % interval
    """

    WORDS = "audit"

    layer: reading.Count
    kind: Kind
    side: Side
    first: reading.Count
    last: reading.Count
    fastest: reading.Positive
    slowest: reading.Positive
    effect: Number
    effect_low: Number
    effect_high: Number

    def of(self, layer: LayerRecord) -> bool:
        """Whether it is of this layer."""
        return (self.side, self.kind, self.layer) == (layer.side, layer.kind, layer.layer)


@dataclass(frozen=True)
class Measured(Record):
    """One attention call: its record, and those of its heads, effects apart."""

    layer: LayerRecord
    heads: tuple[HeadRecord, ...]


class _About(BaseModel):
    """What is read of an audit's ``about``."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    model: reading.Text | None = None
    text: reading.Text | None = None
    dtype: reading.Text | None = None
    weights: reading.Text | None = None
    model_type: reading.Text | None = None
    parameters: reading.Count | None = None
    sequences: reading.Count | None = None
    tokens: reading.Count | None = None
    seconds: Size = None
    needles: reading.Count | None = None
    changes: list[reading.Text] = []
    texts: list[reading.Text] = []
    lengths: list[reading.Count] = []
    random_weights: list[reading.Text] = []
    unused_weights: list[reading.Text] = []
    unused_bos: reading.Text | None = None
    no_effects: reading.Text | None = None
    intervals: reading.Text | None = None
    race: reading.Text | None = None


@dataclass(frozen=True)
class AuditRecord(Record):
    """What an audit found.

    about        the model and how it was audited, as names and values: model, class, model_type, parameters, dtype,
                 weights (how a GGUF file kept them), device, text (where the tokens came from), random_weights (that
                 the checkpoint lacks), unused_weights (that the model has no place for), unused_bos (the token
                 for the beginning of a text, if the tokenizer has one and does not add it), no_effects (why there are
                 none), sequences, tokens (of each, or of the longest), lengths (of the sequences, where they differ),
                 texts (that each sequence is of, where there are several), needles (that retrieval was measured on),
                 changes (of the model, in words), request (a digest, of an audit among many), seed, intervals (what
                 those of effects are over), race (which heads were left out of it), torch, transformers, python,
                 seconds
    layers       every attention call, in the order of the pass
    heads        every head, in the same order
    effect       what the heads' effects are of: ``loss`` (nats a token) or ``states`` (the squared distance of the last
                 states from the intact ones, relative to their variance over tokens); None if heads were not silenced
    method       ``exact`` (each head silenced), ``position`` (position taken from each), ``bands`` (each band of each
                 layer's frequencies stopped) or ``attribution`` (an estimate of silencing); None likewise
    baseline     the intact model's loss; None for states and without effects
    whole        largest difference of the model's output in the captured pass from that of a plain pass, relative to
                 the largest output
    words        the tokens of the first sequence as text, where a tokenizer was there; else empty
    check        of estimates: how they compare with the exact effects of a sample of the heads, whose
                 layers are counted as in ``layers``. Where it does not hold there are no effects
    bands        of ``bands``, each band of each layer that has a rotation; else none
    """

    WORDS = "audit"
    LATER = ("words", "check", "bands")

    about: dict[str, Any]
    layers: tuple[LayerRecord, ...]
    heads: tuple[HeadRecord, ...]
    effect: Effect | None
    method: Method | None
    baseline: Number
    whole: reading.Positive
    words: tuple[reading.Text, ...] = ()
    check: EstimateCheck | None = None
    bands: tuple[BandRecord, ...] = ()

    def table(self) -> dict[str, list[Any]]:
        """The heads as columns (`COLUMNS`), one number or word a head; None where it is not known."""
        return {name: [getattr(head, name) for head in self.heads] for name in COLUMNS}

    def frame(self) -> pa.Table:
        """The same as an Arrow table, which pandas and polars take as it is; null where a number is not known."""
        kinds = {"side": pa.string(), "kind": pa.string(), "layer": pa.int32(), "head": pa.int32()}
        return pa.table(self.table(), schema=pa.schema([(name, kinds.get(name, pa.float64())) for name in COLUMNS]))

    def of(self, layer: LayerRecord) -> Iterator[HeadRecord]:
        """The heads of one layer."""
        place = (layer.side, layer.kind, layer.layer)
        return (head for head in self.heads if (head.side, head.kind, head.layer) == place)

    def bands_of(self, layer: LayerRecord) -> list[BandRecord]:
        """The bands of one layer."""
        return [band for band in self.bands if band.of(layer)]

    def layer_of(self, band: BandRecord) -> LayerRecord:
        """The layer of a band."""
        return next(layer for layer in self.layers if band.of(layer))

    def summary(self) -> dict[str, Any]:
        """What there is to print: all but the tokens and the heads' lists of numbers, for JSON."""
        lists = ("profile", "norm_use", "variance_use")
        content = self.to_dict()
        heads = [{name: value for name, value in head.items() if name not in lists} for head in content["heads"]]
        return {name: value for name, value in content.items() if name != "words"} | {"heads": heads}

    def verify(self) -> None:
        try:
            _About.model_validate(self.about)
        except ValidationError as error:
            raise ValueError(sentence(error)) from None
        for layer in self.layers:
            layer.check(list(self.of(layer)))
        if sum(layer.heads for layer in self.layers) != len(self.heads):
            raise ValueError("heads must belong to the layers.")
