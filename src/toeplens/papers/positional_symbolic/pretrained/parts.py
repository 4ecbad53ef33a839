"""The parts of a pretrained model's study: its plan, heads as arrays, audits, baselines, interventions and probes."""

from __future__ import annotations

import copy
import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from toeplens.backends.hf import Change
from toeplens.backends.hf.install import install_like
from toeplens.backends.hf.load import LoadedModel
from toeplens.encodings import FrequencyMask
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.auditing import audit
from toeplens.studies.auditing.record import COLUMNS, Audit, LayerRecord, Method
from toeplens.studies.kit.options import MAX_SEED, MAX_TOKENS
from toeplens.studies.kit.probe_items import ItemWriter
from toeplens.studies.probing import MIN_RETRIEVAL, ModelProbe, ProbeRecord, ProbeSizes
from toeplens.utils import InputError, invalid, read_json, write_json
from toeplens.utils.options import check_range
from toeplens.utils.records import PositiveInt, Record

NUM_BANDS = 8  # number of frequency bands per layer
NUM_DRAWS = 3  # random choices of heads or frequencies for comparison
GROUP_SIZE = 32  # sequences whose mean separates position from content; 1/32 of the content's variance remains
AUDIT, PROBE = "audit", "probe"


@dataclass(frozen=True, kw_only=True)
class PretrainedPlan(Record):
    """The options of a study and properties of its model, as in study.json.

    model          its name or directory
    texts          contents by name; in study.json and in what is read from it, their digests
    sequences      number of sequences per text, all of one length
    tokens         sequence length for measuring heads
    effect_tokens  length of the prefix of the sequences for effects of single heads
    probe_tokens   length of a text with a needle, and of a copied text
    seed           seed of places in the texts, of random weights, of questions
    turns          whether the model has a rotation
    biased         whether its attention adds a bias to the logits (ALiBi, T5)
    together       number of sequences that are measured together and count as one; several if position is added to the
                   hidden states, where the mean over sequences separates it from content
    predicts       whether it predicts the next token
    dtype          dtype of its weights
    weights        digest of the names and sizes of its files, or of its commit on the hub
    """

    ADDED_LATER = ("biased", "together")

    model: str
    texts: dict[str, str]
    sequences: int = 2
    tokens: int = 1024
    effect_tokens: int = 256
    probe_tokens: int = 512
    seed: int = 42
    turns: bool = True
    biased: bool = False
    together: PositiveInt = 1
    predicts: bool = True
    dtype: str = "float32"
    weights: str = ""

    def validate(self) -> Self:
        """The plan; raises `InputError` for sizes that are too small or too large."""
        check_range("sequences", self.sequences, 1, 1000)
        check_range("tokens", self.tokens, 16, MAX_TOKENS)
        check_range("effect_tokens", self.effect_tokens, 16, self.tokens)
        check_range("probe_tokens", self.probe_tokens, 64, MAX_TOKENS)
        check_range("seed", self.seed, 0, MAX_SEED)
        if not self.texts:
            raise InputError("text must be set at least once.")
        return self

    @property
    def sequence_keys(self) -> list[tuple[str, int]]:
        """Text name and index of every sequence or group."""
        return [(name, number) for name in self.texts for number in range(self.sequences)]

    @property
    def units(self) -> str:
        """The unit of comparisons: sequences, or groups of sequences."""
        return "sequences" if self.together == 1 else "groups"

    @property
    def probe_sizes(self) -> ProbeSizes:
        """The options of the probes."""
        return ProbeSizes(lengths=(self.probe_tokens,), depths=(0.0, 0.5, 1.0), repeats=4, sequences=8, lists=4)

    def iter_parts(self) -> Iterator[tuple[str, str]]:
        """The name and kind (audit or probe) of each part, in order."""
        count = range(len(self.sequence_keys))
        for kind in ("text", "random", "shuffled"):
            yield from ((f"{kind}-{number}", AUDIT) for number in count)
        if self.predicts:
            yield from ((name, PROBE) for name in ("intact", "no-retrieval"))
            yield from ((f"no-others-{number}", PROBE) for number in range(NUM_DRAWS))
        if self.predicts and self.turns:
            yield from ((f"still-{band}", PROBE) for band in range(NUM_BANDS))
            yield from ((f"{name}-silent", PROBE) for name in ("slow", "fast"))
            yield from ((f"some-silent-{number}", PROBE) for number in range(NUM_DRAWS))
            yield "retrieval-still", PROBE
            yield from ((f"{name}-still", PROBE) for name in ("fast", "slow"))
        yield "silenced", AUDIT
        if self.turns or self.biased:
            yield "position", AUDIT
        if self.turns:
            yield "bands", AUDIT

    def digests(self) -> dict[str, str]:
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


_NUMERIC_COLUMNS = [name for name in COLUMNS if name not in ("side", "kind", "layer", "head")]
MIN_HEADS = 3  # minimum number of heads of a kind for a mean


def effects_of(audit: Audit, end: Literal["", "_low", "_high"] = "") -> Float[np.ndarray, "n"]:
    """The effect of each head, or an end of its interval; NaN if unknown."""
    return np.array([np.nan if (x := getattr(head, f"effect{end}")) is None else x for head in audit.heads])


def effect_unit(audit: Audit) -> str:
    """What an effect of this audit is, as a label."""
    return "loss increase (nats)" if audit.effect == "loss" else "relative change of the last hidden states"


@dataclass(frozen=True)
class ModelHeads:
    """The self-attention heads of one model's audits, in forward order.

    layer, head  [n] from 0
    is_local     [n] whether its layer sees a window of keys alone
    columns      by name, [T, n] of each text; NaN where it is not known
    """

    layer: Int[np.ndarray, "n"]
    head: Int[np.ndarray, "n"]
    is_local: Bool[np.ndarray, "n"]
    columns: dict[str, Float[np.ndarray, "T n"]]

    @classmethod
    def from_audits(cls, audits: Sequence[Audit]) -> ModelHeads:
        """From audits of the same model on several texts."""
        first = audits[0]
        windows = {layer.layer: layer.window is not None for layer in first.layers}
        values = {
            name: np.array(
                [[np.nan if (x := getattr(head, name)) is None else x for head in audit.heads] for audit in audits],
                dtype=float,
            )
            for name in _NUMERIC_COLUMNS
        }
        return cls(
            np.array([head.layer for head in first.heads]),
            np.array([head.head for head in first.heads]),
            np.array([windows[head.layer] for head in first.heads]),
            values,
        )

    @property
    def texts(self) -> int:
        return len(self.columns["positional"])

    @property
    def layer_groups(self) -> dict[str, Bool[np.ndarray, "n"]]:
        """All heads; or full-attention and sliding-window layers separately, if a model has both."""
        if self.is_local.any() and not self.is_local.all():
            return {"full-attention layers": ~self.is_local, "sliding-window layers": self.is_local}
        return {"all heads": np.ones(len(self.is_local), dtype=bool)}

    def mask_of(self, heads: Collection[tuple[int, int]]) -> Bool[np.ndarray, "n"]:
        """Mask of the heads at these (layer, head) pairs."""
        return np.array([key in heads for key in zip(self.layer.tolist(), self.head.tolist(), strict=True)])

    def mean(self, name: str) -> Float[np.ndarray, "n"]:
        return self.columns[name].mean(0)

    def correlations(self, first: str, second: str, mask: Bool[np.ndarray, "n"]) -> list[float]:
        """Rank correlation of two columns over some heads, per text; NaN with too few known values."""
        values = []
        for a, b in zip(self.columns[first][:, mask], self.columns[second][:, mask], strict=True):
            known = np.isfinite(a) & np.isfinite(b)
            values.append(float(spearman(np.stack((a[known], b[known])))) if known.sum() >= MIN_HEADS else np.nan)
        return values

    def by_text(self, figure: Callable[[dict[str, Float[np.ndarray, "n"]]], float]) -> list[float]:
        """A number per text, from its columns."""
        return [
            float(figure({name: values[text] for name, values in self.columns.items()})) for text in range(self.texts)
        ]


# ---- how parts are run -----------------------------------------------------------------------------------------------

PARTS_DIR = "pieces"
METHODS: dict[str, Method] = {"silenced": "exact", "position": "position", "bands": "bands"}
Report = Callable[[str, int, int], None]


def part_path(directory: Path, name: str) -> Path:
    return directory / PARTS_DIR / f"{name}.json"


@dataclass(frozen=True)
class PartRunner:
    """Runs the parts of one study.

    loaded  the model
    report  progress callback
    """

    loaded: LoadedModel
    plan: PretrainedPlan
    directory: Path
    report: Report

    def check(self) -> None:
        """Check texts, lengths and tokenizer before the first part."""
        assert self.token_sequences.size
        if self.plan.predicts:
            assert self.model_probe.items

    def run(self, name: str, kind: str) -> None:
        if kind == AUDIT:
            record = self._audit_part(name)
            gc.collect()  # models with random weights, which refer to themselves
        elif name == "intact":
            record = self.model_probe.record(heads=True)
        else:
            record = self.model_probe.record(changes_of(name, self.plan, *self._selection_records))
        write_json(part_path(self.directory, name), record.to_dict())

    @cached_property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer()

    @cached_property
    def token_sequences(self) -> Int[np.ndarray, "T N"]:
        """The sequences in the order of `PretrainedPlan.sequence_keys`, without overlap within a text."""
        rows = []
        for index, (name, text) in enumerate(self.plan.texts.items()):
            writer = ItemWriter(self.tokenizer, text, self.plan.seed + index)
            count = self.plan.sequences * self.plan.together
            length = self.plan.tokens - len(writer.prefix)
            spare = len(writer.text) - count * length
            if spare < 0:
                must = f"have at least {count} sequences of {length} tokens"
                raise invalid("text", must, got=f"{name} with {len(writer.text)} tokens")
            gaps = np.sort(writer.rng.integers(0, spare + 1, count))
            for number, gap in enumerate(gaps.tolist()):
                first = gap + number * length
                rows.append([*writer.prefix, *writer.text[first : first + length].tolist()])
        return np.array(rows)

    @cached_property
    def model_probe(self) -> ModelProbe:
        """The questions of all texts."""
        text = "\n\n".join(self.plan.texts.values())
        seed = self.plan.seed
        return ModelProbe.from_data(
            self.loaded, text, self.plan.probe_sizes, tokenizer=self.tokenizer, seed=seed, report=self.report
        )

    def _audit_part(self, name: str) -> Audit:
        if name in METHODS:
            prefix = self.token_sequences[:, : self.plan.effect_tokens]
            return self._run_audit(self.loaded, prefix, METHODS[name], name)
        kind, _, number = name.partition("-")
        count, loaded = self.plan.together, self.loaded
        tokens = self.token_sequences[int(number) * count :][:count]
        if kind == "shuffled":
            rng = np.random.Generator(np.random.Philox(key=[self.plan.seed, int(number)]))
            num_special = len(ItemWriter(self.tokenizer, "so", 0).prefix)
            tokens = np.concatenate((tokens[:, :num_special], rng.permuted(tokens[:, num_special:], axis=1)), axis=1)
        if kind == "random":
            loaded = _random_model(self.loaded, self.plan.seed + int(number))
        return self._run_audit(loaded, tokens, "none", name)

    def _run_audit(self, loaded: LoadedModel, tokens: Int[np.ndarray, "T N"], effects: Any, name: str) -> Audit:
        return audit(
            loaded,
            tokens,
            tokenizer=self.tokenizer,
            sequences=len(tokens),
            effects=effects,
            seed=self.plan.seed,
            keep=self.directory / PARTS_DIR / f"{name}.parts" if effects != "none" else None,
            on_progress=lambda what, done, total: self.report(f"{name}, {what}", done, total),
        )

    @cached_property
    def _selection_records(self) -> tuple[list[Audit], ProbeRecord]:
        """The records by which heads are selected: the audits of the texts and the intact probe."""
        count = len(self.plan.sequence_keys)
        audits = [read_part(self.directory, f"text-{number}", Audit) for number in range(count)]
        return audits, read_part(self.directory, "intact", ProbeRecord)


def read_part(directory: Path, name: str, kind: Any) -> Any:
    path = part_path(directory, name)
    return kind.from_dict(read_json(path), path)


def _random_model(loaded: LoadedModel, seed: int) -> LoadedModel:
    """The same architecture with randomly initialised weights."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(loaded.model.dtype)  # for the weights; frequency tables are always float32
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = type(loaded.model)(copy.deepcopy(loaded.model.config)).eval()
            install_like(model, loaded.model)
    finally:
        torch.set_default_dtype(default_dtype)
    return LoadedModel(model.to(loaded.device))


MIN_PREVIOUS = 0.5  # minimum mean attention on the previous token of a previous-token head
QUARTER = 4
Head = tuple[int, int]  # layer and head


def retrieval_heads(intact: ProbeRecord) -> list[Head]:
    """The retrieval heads."""
    return [(head.layer, head.head) for head in intact.heads if head.score >= MIN_RETRIEVAL]


def previous_token_heads(audits: Sequence[Audit]) -> list[Head]:
    """The previous-token heads, by the mean over the texts."""
    rows = [[head.previous or 0.0 for head in audit.heads] for audit in audits]
    means = np.mean(rows, axis=0)
    return [(head.layer, head.head) for head, mean in zip(audits[0].heads, means, strict=True) if mean >= MIN_PREVIOUS]


def fastest_first(layer: LayerRecord) -> list[int]:
    """The pairs of a layer's rotation, fastest first."""
    return np.argsort(-np.abs(layer.frequencies), kind="stable").tolist()


def changes_of(part: str, plan: PretrainedPlan, audits: Sequence[Audit], intact: ProbeRecord | None) -> list[Change]:
    """The interventions of a part; empty if the model has no such heads."""
    layers = {layer.layer: layer for layer in audits[0].layers}
    name, _, number = part.rpartition("-")
    if name == "still":
        bands = [(layer, np.array_split(fastest_first(layer), NUM_BANDS)[int(number)]) for layer in audits[0].layers]
        return [_mask_change(layer, "freeze", pairs) for layer, pairs in bands if len(pairs)]
    if part in ("fast-still", "slow-still"):
        return _frequency_changes(previous_token_heads(audits), layers, "freeze", part == "fast-still")
    if intact is None:
        return []
    heads = retrieval_heads(intact)
    if part == "no-retrieval":
        return _ablations(heads)
    if part == "retrieval-still":
        return _frequency_changes(heads, layers, "freeze", choice=False)
    rng = np.random.Generator(np.random.Philox(key=[plan.seed, int(number) if number.isdecimal() else 0]))
    if name == "no-others":
        return _ablations(_random_others(heads, layers, rng))
    if name == "some-silent":
        return _frequency_changes(heads, layers, "drop", rng)
    return _frequency_changes(heads, layers, "drop", part == "fast-silent") if part != "intact" else []


def _ablations(heads: Iterable[Head]) -> list[Change]:
    return [Change(layer=layer, heads=tuple(indices), output="zero") for layer, indices in _by_layer(heads).items()]


def _by_layer(heads: Iterable[Head]) -> dict[int, list[int]]:
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        by_layer.setdefault(layer, []).append(head)
    return by_layer


def _random_others(heads: Sequence[Head], layers: dict[int, LayerRecord], rng: np.random.Generator) -> list[Head]:
    """The same number of random other heads, in the same layers if possible, otherwise in any."""
    excluded: set[Head] = set(heads)
    chosen: list[Head] = []
    all_heads = [(layer, head) for layer, record in layers.items() for head in range(record.heads)]
    for layer, layer_heads in _by_layer(heads).items():
        others = [candidate for candidate in all_heads if candidate[0] == layer and candidate not in excluded]
        chosen += [others[index] for index in rng.permutation(len(others))[: len(layer_heads)]]
    remaining = [candidate for candidate in all_heads if candidate not in excluded and candidate not in chosen]
    missing = min(len(heads) - len(chosen), len(remaining))
    return chosen + [remaining[index] for index in rng.permutation(len(remaining))[:missing]]


def _frequency_changes(
    heads: Sequence[Head], layers: dict[int, LayerRecord], mode: str, choice: bool | np.random.Generator
) -> list[Change]:
    """Interventions on a quarter of some heads' frequencies: the fastest, the slowest, or random ones."""
    changes = []
    for layer, layer_heads in _by_layer(heads).items():
        pairs = fastest_first(layers[layer])
        count = len(pairs) // QUARTER
        if not count:
            continue
        if isinstance(choice, bool):
            selected = pairs[:count] if choice else pairs[-count:]
        else:
            selected = choice.permutation(pairs)[:count].tolist()
        changes.append(_mask_change(layers[layer], mode, selected, tuple(layer_heads)))
    return changes


def _mask_change(layer: LayerRecord, mode: str, pairs: Iterable[int], heads: tuple[int, ...] | None = None) -> Change:
    control = FrequencyMask(**{mode: tuple(sorted(int(pair) for pair in pairs))})
    return Change(layer=layer.layer, heads=heads, bands=control)
