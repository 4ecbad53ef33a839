"""The record of an audit (values of each head, of each attention call, and of the model), and parts saved before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import torch
from pydantic import ConfigDict, Field, ValidationError, create_model

from toeplens.backends.hf.calls import AttentionKind, Side
from toeplens.backends.hf.effect_metric import MetricName
from toeplens.lens import EstimateCheck
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.kernels import KernelDecay, SpectrumRange
from toeplens.studies.kit.pages import HasPage
from toeplens.utils.cache import ResultCache
from toeplens.utils.errors import InputError, validation_message
from toeplens.utils.files import read_yaml
from toeplens.utils.records import ApproxShare, FiniteFloat, NonNegative, NonNegativeInt, Record, StrictBool, StrictStr
from toeplens.version import __version__

PARTS = ".parts"  # directory of the saved parts of an unfinished audit
Method = Literal["exact", "position", "bands", "attribution"]

Number = FiniteFloat | None  # None if unknown: not measured, or not defined for this head
MaybeShare = ApproxShare | None
Magnitude = NonNegative | None
_Weight = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e6, le=1e6)]

_COLUMNS_FILE: dict[str, Any] = read_yaml(Path(__file__).with_name("columns.yaml"))
# the columns of the table of heads, in order, with their descriptions
COLUMNS: dict[str, str] = _COLUMNS_FILE["columns"]
# the source of a column's measure; the others are defined here (docs/how-to/audit.md)
SOURCES: dict[str, str] = {name: item["source"] for item in _COLUMNS_FILE["sources"] for name in item["columns"]}

_KEY_COLUMNS = "side:text kind:text layer:count"
LAYERS = schema(
    "module:text heads:count key_heads:count head_dim:count scale softcap causal:flag window:count position:text "
    "weights outputs tolerance helps harms top_share effective_heads gini lead",
    _KEY_COLUMNS,
)
FREQUENCIES = schema("head:count pair:count frequency norm variance", _KEY_COLUMNS)
DISTANCES = schema("head:count nearest:count farthest:count attention", _KEY_COLUMNS)
BANDS = schema("first:count last:count fastest slowest effect effect_low effect_high", _KEY_COLUMNS)


@dataclass(frozen=True)
class _LayerKey(Record):
    side: Side
    kind: AttentionKind
    layer: NonNegativeInt

    @property
    def layer_key(self) -> tuple[Side, AttentionKind, int]:
        """Side, kind and index of the layer."""
        return self.side, self.kind, self.layer


@dataclass(frozen=True)
class HeadRecord(_LayerKey):
    """One head. The fields up to ``effect_high`` and the properties below are the table's `COLUMNS`."""

    ADDED_LATER = ("decay", "kernel", "massive_q", "massive_k", "offset", "retrieval", "duplicate")

    head: NonNegativeInt
    positional: MaybeShare = None
    symbolic: MaybeShare = None
    interaction: MaybeShare = None
    toeplitz: MaybeShare = None
    toeplitz_variance: MaybeShare = None
    distance: Magnitude = None
    entropy: MaybeShare = None
    first: MaybeShare = None
    sink: MaybeShare = None
    previous: MaybeShare = None
    current: MaybeShare = None
    next: MaybeShare = None
    induction: MaybeShare = None
    duplicate: MaybeShare = None
    retrieval: MaybeShare = None
    centre: Number = None
    massive_q: MaybeShare = None
    massive_k: MaybeShare = None
    offset: MaybeShare = None
    effect: Number = None
    effect_low: Number = None
    effect_high: Number = None
    # attention by distance: on the query token itself, then at distances 1, 2-3, 4-7, 8-15, ..., both sides together;
    # sums to 1 minus the attention on a sink
    profile: tuple[_Weight, ...] = ()
    # share of the mean of ||q|| ||k||: in the dimensions without rotation, then by frequency in the layer's order
    norm_use: tuple[FiniteFloat, ...] = ()
    variance_use: tuple[FiniteFloat, ...] = ()  # Cov(L_t, L) / Var(L) within queries, likewise, and last of a bias
    decay: KernelDecay | None = None  # of the mean logit with distance; None without an offset (cross attention)
    kernel: SpectrumRange | None = None  # of the head's offset bias; None without one

    @property
    def half_distance(self) -> Number:
        """The half distance of the decay, if its curve explains the mean logits."""
        return self.decay.half_distance if self.decay is not None and self.decay.is_good_fit else None

    @property
    def norm_top(self) -> MaybeShare:
        """The largest share of the norms in one pair; None if unknown."""
        return max(self.norm_use[1:], default=None)

    @property
    def dead(self) -> int | None:
        """The number of pairs with zero norms in this head; None if unknown."""
        return sum(share == 0 for share in self.norm_use[1:]) if self.norm_use else None


@dataclass(frozen=True)
class LayerRecord(_LayerKey):
    """One attention call of the model, in the order of the forward pass."""

    ADDED_LATER = ("deposit", "dead", "tabled", "chunk", "used", "logit", "undecided")

    module: StrictStr  # name of the module in the model, and its class
    heads: NonNegativeInt  # query heads
    key_heads: NonNegativeInt
    head_dim: NonNegativeInt  # width of queries and keys
    scale: FiniteFloat  # factor of q . k
    softcap: Number  # c of c tanh(x / c); None without
    causal: StrictBool  # whether keys after the query are masked
    # maximum number of visible keys up to and including the query's own, on either side if not causal; None: all
    window: NonNegativeInt | None
    position: StrictStr  # how it enters, such as "rotation of 8 pairs, 16 of 64 dimensions (half)"
    frequencies: tuple[FiniteFloat, ...]  # of RoPE, in rad per position, by pair; empty without a known rotation
    unknown: StrictStr | None  # why positional, symbolic and interaction shares and frequency use are; None if known
    weights: Magnitude  # largest difference of a recomputed attention weight; None if the model does not expose weights
    outputs: NonNegative  # largest difference of a head's output, relative to the layer's largest
    tolerance: NonNegative  # largest weight difference that rounding explains; earlier: the limit of both
    # ``helps`` and ``harms``: sums of the layer's positive and negative effects; from the effects d clipped at 0:
    # ``top_share`` max d / sum d, ``effective_heads`` (sum d)^2 / sum d^2, ``gini`` (None if the sum is within its
    # noise), ``lead`` (largest minus second largest); empty without effects
    deposit: dict[str, Number] = field(default_factory=dict)
    dead: tuple[NonNegativeInt, ...] = ()  # frequencies that contribute to no logit: queries or keys of all heads are 0
    # frequencies from the model's own table of cosines because no rotation was measurable: queries and keys are 0, or
    # the angles are too small for the model's precision
    tabled: tuple[NonNegativeInt, ...] = ()
    chunk: NonNegativeInt | None = None  # size of the chunks if queries only see keys of their own
    # None in earlier records, and if not measured
    used: Magnitude = None  # largest difference of weights or outputs, as a share of what rounding explains
    logit: Magnitude = None  # largest absolute logit of a visible key
    undecided: Magnitude = None  # share of queries whose largest weight may change by 0.5 or more due to rounding


@dataclass(frozen=True)
class BandRecord(_LayerKey):
    """A frequency band of a layer's rotation, and the effect of freezing it in all of the layer's heads."""

    LABEL = "audit"

    first: NonNegativeInt  # pair, from 0
    last: NonNegativeInt
    fastest: NonNegative  # largest absolute frequency, in rad per position
    slowest: NonNegative
    effect: Number  # as for a head, with its 95 % interval
    effect_low: Number
    effect_high: Number


@dataclass(frozen=True)
class CallRecords(Record):
    """The records of one attention call and of its heads, without effects."""

    layer: LayerRecord
    heads: tuple[HeadRecord, ...]


# the fields of an audit's ``about`` that are read
_ABOUT_FIELDS: dict[Any, tuple[str, ...]] = {
    StrictStr: ("model", "text", "dtype", "weights", "model_type", "unused_bos", "no_effects", "intervals", "race"),
    NonNegativeInt: ("parameters", "sequences", "tokens", "needles"),
    NonNegative: ("seconds",),
    list[StrictStr]: ("changes", "texts", "random_weights", "unused_weights"),
    list[NonNegativeInt]: ("lengths",),
}
_ABOUT_TYPES: dict[str, Any] = {name: (kind | None, None) for kind, names in _ABOUT_FIELDS.items() for name in names}
_About = create_model("_About", __config__=ConfigDict(extra="allow", protected_namespaces=()), **_ABOUT_TYPES)


@dataclass(frozen=True)
class Audit(HasPage, Record):
    """The result of `audit`; a notebook shows its map of heads.

    about        the model and the settings of the audit, by name: model, class, model_type, parameters, dtype,
                 weights (quantisation of a GGUF file), device, text (where the tokens came from), random_weights
                 (missing from the checkpoint), unused_weights (in the checkpoint but not in the model), unused_bos (a
                 beginning-of-text token that the tokenizer has but does not add), no_effects (why there are
                 none), sequences, tokens (length of the longest sequence), lengths (of the sequences, if they differ),
                 texts (name of each sequence's text, if there are several), needles (number of needles for
                 retrieval), changes (of the model), request (a digest, in an audit of many models), seed, intervals
                 (what the intervals of effects are taken over), race (which heads were dropped early), torch,
                 transformers, python, seconds
    effect       ``loss`` (nats per token) or ``states`` (squared distance of the last hidden states from the intact
                 ones, relative to their variance over tokens); None if effects were not measured
    method       ``exact`` (ablate each head), ``position`` (remove position from each head), ``bands`` (freeze each
                 frequency band of each layer) or ``attribution`` (estimate of ablation); None likewise
    """

    LABEL = "audit"
    ADDED_LATER = ("words", "check", "bands")
    PAGE = "toeplens.report.audit:audit_page"

    about: dict[str, Any]
    layers: tuple[LayerRecord, ...]  # every attention call, in the order of the forward pass
    heads: tuple[HeadRecord, ...]  # every head, in the same order
    effect: MetricName | None
    method: Method | None
    baseline: Number  # loss of the intact model; None for states and without effects
    max_difference: NonNegative  # largest difference of a plain pass's output, relative to the largest output
    words: tuple[StrictStr, ...] = ()  # tokens of the first sequence as text; empty without a tokenizer
    check: EstimateCheck | None = None  # of estimates for a sample of heads; if it fails, there are no effects
    bands: tuple[BandRecord, ...] = ()  # for the method ``bands``, those of each layer that has a rotation

    def table(self) -> dict[str, list[Any]]:
        """The heads as columns (`COLUMNS`), one value per head; None if unknown."""
        return {name: [getattr(head, name) for head in self.heads] for name in COLUMNS}

    def frame(self) -> pa.Table:
        """The heads as an Arrow table, which pandas and polars accept; null if unknown."""
        types = {"side": pa.string(), "kind": pa.string(), "layer": pa.int32(), "head": pa.int32()}
        return pa.table(self.table(), schema=pa.schema([(name, types.get(name, pa.float64())) for name in COLUMNS]))

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        """Functions that make its tables, by what a row is."""
        return {
            "heads": self.frame,
            "layers": lambda: table(LAYERS, ({**vars(layer), **layer.deposit} for layer in self.layers)),
            "frequencies": lambda: table(FREQUENCIES, self._frequency_rows()),
            "distances": lambda: table(DISTANCES, self._distance_rows()),
            "bands": lambda: table(BANDS, map(vars, self.bands)),
        }

    def _frequency_rows(self) -> Iterator[dict[str, Any]]:
        for layer in self.layers:
            for head in self.heads_of(layer):
                for pair, frequency in enumerate(layer.frequencies):
                    norm = head.norm_use[pair + 1] if head.norm_use else None
                    variance = head.variance_use[pair + 1] if head.variance_use else None
                    yield {**vars(head), "pair": pair, "frequency": frequency, "norm": norm, "variance": variance}

    def _distance_rows(self) -> Iterator[dict[str, Any]]:
        for head in self.heads:
            for octave, attention in enumerate(head.profile):
                ends = {"nearest": 1 << octave >> 1, "farthest": (1 << octave) - 1}
                yield {**vars(head), **ends, "attention": attention}

    def heads_of(self, layer: LayerRecord) -> Iterator[HeadRecord]:
        """The heads of one layer."""
        return (head for head in self.heads if head.layer_key == layer.layer_key)

    def layer_of(self, band: BandRecord) -> LayerRecord:
        """The layer that a band belongs to."""
        return next(layer for layer in self.layers if layer.layer_key == band.layer_key)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        chart = self.charts().get("map")
        return {"text/plain": repr(self)} if chart is None else chart._repr_mimebundle_(include, exclude)

    def summary(self) -> dict[str, Any]:
        """The record for JSON output, without the tokens and the heads' lists of numbers."""
        content = self.to_dict()
        del content["words"]
        for head in content["heads"]:
            del head["profile"], head["norm_use"], head["variance_use"]
        return content

    def verify(self) -> None:
        try:
            _About.model_validate(self.about)
        except ValidationError as error:
            raise ValueError(validation_message(error)) from None
        for layer in self.layers:
            name, pairs = f"{layer.side} {layer.kind} layer {layer.layer}", len(layer.frequencies)
            if [head.head for head in self.heads_of(layer)] != list(range(layer.heads)):
                raise ValueError(f"heads of {name} must be 0 to {layer.heads - 1}.")
            if any(pair >= pairs for pair in (*layer.dead, *layer.tabled)):
                raise ValueError(f"dead and tabled pairs of {name} must be among its {pairs} pairs.")
            for head in self.heads_of(layer):
                for use, expected in (("norm_use", pairs + 1), ("variance_use", pairs + 2)):
                    if (count := len(getattr(head, use))) not in (0, expected):
                        raise ValueError(f"{use} of {name} head {head.head} must have {expected} numbers, got {count}.")
        if sum(layer.heads for layer in self.layers) != len(self.heads):
            raise ValueError("heads must belong to the layers.")


# ---- saved parts, so that an interrupted audit can be resumed -----------------------------------------------------


class AuditCache(ResultCache):
    """The cache of an audit's directory; the versions of torch and toeplens are part of the key."""

    def __init__(self, directory: Path | None, key: Mapping[str, Any]) -> None:
        versions = {"toeplens": __version__, "torch": torch.__version__}
        super().__init__(None if directory is None else directory / PARTS, {**key, **versions})

    def load_layer(self, number: int) -> CallRecords | None:
        """The measures of a call, by its index in the forward pass."""
        saved = self.get(f"layer-{number}")
        return None if saved is None else CallRecords.from_dict(saved, "part")

    def save_layer(self, number: int, measured: CallRecords) -> None:
        """Save the measures of a call."""
        self.put(f"layer-{number}", measured.to_dict())


def model_identity(model: Any, name: str | None) -> Any:
    """An identity of the model's weights: its files with sizes and times, or a digest of the weights.

    Arguments
        name  directory or file it was loaded from, or its name on the hub; None for a model object
    """
    if name is not None and Path(name).exists():
        return files_of(Path(name))
    commit = getattr(model.config, "_commit_hash", None)
    if name is not None and commit is not None:
        return [name, commit]
    digest = hashlib.sha256(repr(model.config).encode())
    for key, x in sorted(model.state_dict().items()):
        try:
            digest.update(f"{key} {x.dtype} {list(x.shape)}".encode())
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        except (AttributeError, RuntimeError, TypeError):
            must = "not be set for a model whose weights cannot be read (quantised or offloaded)"
            raise InputError(f"keep must {must}. Give the model's directory instead of the model.") from None
    return digest.hexdigest()


def files_of(directory: Path) -> list[list[Any]]:
    """Name, size and modification time of each file in a directory, or of one file."""
    paths = [directory] if directory.is_file() else sorted(directory.iterdir())
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return [[path.name, stat.st_size, stat.st_mtime_ns] for path, stat in files]
