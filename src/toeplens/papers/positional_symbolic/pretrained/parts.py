"""The parts of a pretrained model's study: its plan, heads as arrays, audits, baselines, interventions and probes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int

from toeplens.encodings import BandControl
from toeplens.ground import InputError, invalid, read_json, write_json
from toeplens.ground.options import within
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.kit.intervals import spearman
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.install import install_same
from toeplens.sources.huggingface.load import Loaded
from toeplens.studies.auditing import audit
from toeplens.studies.auditing.record import COLUMNS, AuditRecord, LayerRecord, Method
from toeplens.studies.kit.frames import stacked
from toeplens.studies.kit.options import LONGEST, SEEDS
from toeplens.studies.kit.questions import Writer
from toeplens.studies.kit.study import State
from toeplens.studies.kit.verdicts import RULE
from toeplens.studies.probing import RETRIEVES, Asked, ProbeRecord, Probing

BANDS = 8  # number of frequency bands per layer
DRAWS = 3  # random choices of heads or frequencies for comparison
TOGETHER = 32  # sequences whose mean separates position from content; 1/32 of the content's variance remains
AUDITED, PROBED = "audit", "probe"


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
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

    LATER = ("biased", "together")

    model: str
    texts: dict[str, str]
    sequences: int = 2
    tokens: int = 1024
    effect_tokens: int = 256
    probe_tokens: int = 512
    seed: int = 42
    turns: bool = True
    biased: bool = False
    together: AtLeast1 = 1
    predicts: bool = True
    dtype: str = "float32"
    weights: str = ""

    def checked(self) -> Self:
        """The plan; raises `InputError` for sizes that are too small or too large."""
        within("sequences", self.sequences, 1, 1000)
        within("tokens", self.tokens, 16, LONGEST)
        within("effect_tokens", self.effect_tokens, 16, self.tokens)
        within("probe_tokens", self.probe_tokens, 64, LONGEST)
        within("seed", self.seed, 0, SEEDS)
        if not self.texts:
            raise InputError("text must be set at least once.")
        return self

    @property
    def places(self) -> list[tuple[str, int]]:
        """Text name and index of every sequence or group."""
        return [(name, number) for name in self.texts for number in range(self.sequences)]

    @property
    def units(self) -> str:
        """The unit of comparisons: sequences, or groups of sequences."""
        return "sequences" if self.together == 1 else "groups"

    @property
    def asked(self) -> Asked:
        """The options of the probes."""
        return Asked(lengths=(self.probe_tokens,), depths=(0.0, 0.5, 1.0), repeats=4, sequences=8, lists=4)

    def pieces(self) -> Iterator[tuple[str, str]]:
        """The name and kind (audit or probe) of each part, in order."""
        count = range(len(self.places))
        for kind in ("text", "random", "shuffled"):
            yield from ((f"{kind}-{number}", AUDITED) for number in count)
        if self.predicts:
            yield from ((name, PROBED) for name in ("intact", "no-retrieval"))
            yield from ((f"no-others-{number}", PROBED) for number in range(DRAWS))
        if self.predicts and self.turns:
            yield from ((f"still-{band}", PROBED) for band in range(BANDS))
            yield from ((f"{name}-silent", PROBED) for name in ("slow", "fast"))
            yield from ((f"some-silent-{number}", PROBED) for number in range(DRAWS))
            yield "retrieval-still", PROBED
            yield from ((f"{name}-still", PROBED) for name in ("fast", "slow"))
        yield "silenced", AUDITED
        if self.turns or self.biased:
            yield "position", AUDITED
        if self.turns:
            yield "bands", AUDITED

    def digests(self) -> dict[str, str]:
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


@dataclass(frozen=True, kw_only=True)
class Examined(State):
    """The finished parts of the study.

    audits, probes  by name
    """

    plan: Plan
    audits: Mapping[str, AuditRecord]
    probes: Mapping[str, ProbeRecord]

    @property
    def rule(self) -> str:
        return RULE.replace("seed", self.plan.units.removesuffix("s"))

    def asked(self) -> dict[str, Any]:
        return asdict(self.plan)

    def found(self) -> dict[str, Any]:
        return {
            "audits": {name: each.to_dict() for name, each in self.audits.items()},
            "probes": {name: each.to_dict() for name, each in self.probes.items()},
        }

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        """Those of its audits and probes, with their names as a first column, and the claims."""

        def of(column: str, parts: Mapping[str, Any], rows: str) -> Callable[[], pa.Table]:
            return lambda: stacked(column, {name: each.table_makers()[rows]() for name, each in parts.items()})

        audits = {
            rows: of("audit", self.audits, rows) for rows in ("heads", "layers", "frequencies", "distances", "bands")
        }
        probes = {rows: of("probe", self.probes, rows) for rows in ("behaviours", "items")}
        return audits | probes | super().table_makers()

    def heads(self, kind: str) -> Heads | None:
        """The heads on all sequences: of the model (``text``), of random weights, or on shuffled tokens."""
        found = [self.audits.get(f"{kind}-{number}") for number in range(len(self.plan.places))]
        audits = [each for each in found if each is not None]
        return Heads.of(audits) if len(audits) == len(found) else None


_NUMBERS = [name for name in COLUMNS if name not in ("side", "kind", "layer", "head")]
FEWEST = 3  # minimum number of heads of a kind for a mean


def effects_of(audit: AuditRecord, end: Literal["", "_low", "_high"] = "") -> Float[np.ndarray, "n"]:
    """The effect of each head, or an end of its interval; NaN if unknown."""
    return np.array([np.nan if (x := getattr(head, f"effect{end}")) is None else x for head in audit.heads])


@dataclass(frozen=True)
class Heads:
    """The self-attention heads of one model's audits, in forward order.

    layer, head  [n] from 0
    local    [n] whether its layer sees a window of keys alone
    columns  by name, [T, n] of each text; NaN where it is not known
    """

    layer: Int[np.ndarray, "n"]
    head: Int[np.ndarray, "n"]
    local: Bool[np.ndarray, "n"]
    columns: dict[str, Float[np.ndarray, "T n"]]

    @classmethod
    def of(cls, audits: Sequence[AuditRecord]) -> Heads:
        """From audits of the same model on several texts."""
        first = audits[0]
        windows = {layer.layer: layer.window is not None for layer in first.layers}
        values = {
            name: np.array(
                [[np.nan if (x := getattr(head, name)) is None else x for head in audit.heads] for audit in audits],
                dtype=float,
            )
            for name in _NUMBERS
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
    def parts(self) -> dict[str, Bool[np.ndarray, "n"]]:
        """All heads; or full-attention and sliding-window layers separately, if a model has both."""
        if self.local.any() and not self.local.all():
            return {"full-attention layers": ~self.local, "sliding-window layers": self.local}
        return {"all heads": np.ones(len(self.local), dtype=bool)}

    def among(self, places: Collection[tuple[int, int]]) -> Bool[np.ndarray, "n"]:
        """Mask of the heads at these (layer, head) pairs."""
        return np.array([place in places for place in zip(self.layer.tolist(), self.head.tolist(), strict=True)])

    def mean(self, name: str) -> Float[np.ndarray, "n"]:
        return self.columns[name].mean(0)

    def correlations(self, first: str, second: str, which: Bool[np.ndarray, "n"]) -> list[float]:
        """Rank correlation of two columns over some heads, per text; NaN with too few known values."""
        found = []
        for a, b in zip(self.columns[first][:, which], self.columns[second][:, which], strict=True):
            known = np.isfinite(a) & np.isfinite(b)
            found.append(float(spearman(np.stack((a[known], b[known])))) if known.sum() >= FEWEST else np.nan)
        return found

    def by_text(self, figure: Callable[[dict[str, Float[np.ndarray, "n"]]], float]) -> list[float]:
        """A number per text, from its columns."""
        return [
            float(figure({name: values[text] for name, values in self.columns.items()})) for text in range(self.texts)
        ]


# ---- how parts are run -----------------------------------------------------------------------------------------------

PIECES = "pieces"
METHODS: dict[str, Method] = {"silenced": "exact", "position": "position", "bands": "bands"}
Report = Callable[[str, int, int], None]


def path_of(directory: Path, name: str) -> Path:
    return directory / PIECES / f"{name}.json"


@dataclass(frozen=True)
class Making:
    """Runs the parts of one study.

    loaded  the model
    report  progress callback
    """

    loaded: Loaded
    plan: Plan
    directory: Path
    report: Report

    def check(self) -> None:
        """Check texts, lengths and tokenizer before the first part."""
        assert self.windows.size
        if self.plan.predicts:
            assert self.probing.items

    def make(self, name: str, kind: str) -> None:
        if kind == AUDITED:
            record = self._audit(name)
        elif name == "intact":
            record = self.probing.record(heads=True)
        else:
            record = self.probing.record(changes_of(name, self.plan, *self._seen))
        write_json(path_of(self.directory, name), record.to_dict())

    @cached_property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer()

    @cached_property
    def windows(self) -> Int[np.ndarray, "T N"]:
        """The sequences in the order of `Plan.places`, without overlap within a text."""
        found = []
        for at, (name, text) in enumerate(self.plan.texts.items()):
            writer = Writer(self.tokenizer, text, self.plan.seed + at)
            count = self.plan.sequences * self.plan.together
            length = self.plan.tokens - len(writer.start)
            room = len(writer.text) - count * length
            if room < 0:
                raise invalid(
                    "text",
                    f"have at least {count} sequences of {length} tokens",
                    got=f"{name} with {len(writer.text)} tokens",
                )
            gaps = np.sort(writer.random.integers(0, room + 1, count))
            for number, gap in enumerate(gaps.tolist()):
                first = gap + number * length
                found.append([*writer.start, *writer.text[first : first + length].tolist()])
        return np.array(found)

    @cached_property
    def probing(self) -> Probing:
        """The questions of all texts."""
        text = "\n\n".join(self.plan.texts.values())
        seed = self.plan.seed
        return Probing.of(self.loaded, text, self.plan.asked, tokenizer=self.tokenizer, seed=seed, report=self.report)

    def _audit(self, name: str) -> AuditRecord:
        if name in METHODS:
            short = self.windows[:, : self.plan.effect_tokens]
            return self._audited(self.loaded, short, METHODS[name], name)
        kind, _, number = name.partition("-")
        count, loaded = self.plan.together, self.loaded
        tokens = self.windows[int(number) * count :][:count]
        if kind == "shuffled":
            random = np.random.Generator(np.random.Philox(key=[self.plan.seed, int(number)]))
            first = len(Writer(self.tokenizer, "so", 0).start)
            tokens = np.concatenate((tokens[:, :first], random.permuted(tokens[:, first:], axis=1)), axis=1)
        if kind == "random":
            loaded = _untrained(self.loaded, self.plan.seed + int(number))
        return self._audited(loaded, tokens, "none", name)

    def _audited(self, loaded: Loaded, tokens: Int[np.ndarray, "T N"], effects: Any, name: str) -> AuditRecord:
        return audit(
            loaded,
            tokens,
            tokenizer=self.tokenizer,
            sequences=len(tokens),
            effects=effects,
            seed=self.plan.seed,
            keep=self.directory / PIECES / f"{name}.parts" if effects != "none" else None,
            on_progress=lambda what, done, total: self.report(f"{name}, {what}", done, total),
        )

    @cached_property
    def _seen(self) -> tuple[list[AuditRecord], ProbeRecord]:
        """The records by which heads are selected: the audits of the texts and the intact probe."""
        count = len(self.plan.places)
        audits = [read(self.directory, f"text-{number}", AuditRecord) for number in range(count)]
        return audits, read(self.directory, "intact", ProbeRecord)


def read(directory: Path, name: str, kind: Any) -> Any:
    path = path_of(directory, name)
    return kind.from_dict(read_json(path), path)


def _untrained(loaded: Loaded, seed: int) -> Loaded:
    """The same architecture with randomly initialised weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(loaded.model.dtype)  # for the weights; frequency tables are always float32
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = type(loaded.model)(copy.deepcopy(loaded.model.config)).eval()
            install_same(made, loaded.model)
    finally:
        torch.set_default_dtype(before)
    return Loaded(made.to(loaded.model.device))


PREVIOUS = 0.5  # minimum mean attention on the previous token of a previous-token head
QUARTER = 4
Head = tuple[int, int]  # layer and head


def retrieving(intact: ProbeRecord) -> list[Head]:
    """The retrieval heads."""
    return [(each.layer, each.head) for each in intact.heads if each.score >= RETRIEVES]


def previous(audits: Sequence[AuditRecord]) -> list[Head]:
    """The previous-token heads, by the mean over the texts."""
    rows = [[head.previous or 0.0 for head in audit.heads] for audit in audits]
    means = np.mean(rows, axis=0)
    return [(head.layer, head.head) for head, mean in zip(audits[0].heads, means, strict=True) if mean >= PREVIOUS]


def by_speed(layer: LayerRecord) -> list[int]:
    """The pairs of a layer's rotation, fastest first."""
    return np.argsort(-np.abs(layer.frequencies), kind="stable").tolist()


def changes_of(piece: str, plan: Plan, audits: Sequence[AuditRecord], intact: ProbeRecord | None) -> list[Change]:
    """The interventions of a part; empty if the model has no such heads."""
    layers = {layer.layer: layer for layer in audits[0].layers}
    name, _, number = piece.rpartition("-")
    if name == "still":
        bands = [(layer, np.array_split(by_speed(layer), BANDS)[int(number)]) for layer in audits[0].layers]
        return [_bands(layer, "still", pairs) for layer, pairs in bands if len(pairs)]
    if piece in ("fast-still", "slow-still"):
        return _of_heads(previous(audits), layers, "still", piece == "fast-still")
    if intact is None:
        return []
    found = retrieving(intact)
    if piece == "no-retrieval":
        return _silenced(found)
    if piece == "retrieval-still":
        return _of_heads(found, layers, "still", which=False)
    random = np.random.Generator(np.random.Philox(key=[plan.seed, int(number) if number.isdecimal() else 0]))
    if name == "no-others":
        return _silenced(_others(found, layers, random))
    if name == "some-silent":
        return _of_heads(found, layers, "silent", random)
    return _of_heads(found, layers, "silent", piece == "fast-silent") if piece != "intact" else []


def _silenced(heads: Iterable[Head]) -> list[Change]:
    return [Change(layer=layer, heads=tuple(each), output="zero") for layer, each in _by_layer(heads).items()]


def _by_layer(heads: Iterable[Head]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        found.setdefault(layer, []).append(head)
    return found


def _others(heads: Sequence[Head], layers: dict[int, LayerRecord], random: np.random.Generator) -> list[Head]:
    """The same number of random other heads, in the same layers if possible, otherwise in any."""
    taken: set[Head] = set(heads)
    chosen: list[Head] = []
    everywhere = [(layer, head) for layer, record in layers.items() for head in range(record.heads)]
    for layer, own in _by_layer(heads).items():
        others = [each for each in everywhere if each[0] == layer and each not in taken]
        chosen += [others[at] for at in random.permutation(len(others))[: len(own)]]
    left = [each for each in everywhere if each not in taken and each not in chosen]
    missing = min(len(heads) - len(chosen), len(left))
    return chosen + [left[at] for at in random.permutation(len(left))[:missing]]


def _of_heads(
    heads: Sequence[Head], layers: dict[int, LayerRecord], way: str, which: bool | np.random.Generator
) -> list[Change]:
    """Interventions on a quarter of some heads' frequencies: the fastest, the slowest, or random ones."""
    found = []
    for layer, own in _by_layer(heads).items():
        pairs = by_speed(layers[layer])
        count = len(pairs) // QUARTER
        if not count:
            continue
        if isinstance(which, bool):
            some = pairs[:count] if which else pairs[-count:]
        else:
            some = which.permutation(pairs)[:count].tolist()
        found.append(_bands(layers[layer], way, some, tuple(own)))
    return found


def _bands(layer: LayerRecord, way: str, pairs: Iterable[int], heads: tuple[int, ...] | None = None) -> Change:
    control = BandControl(**{way: tuple(sorted(int(pair) for pair in pairs))})
    return Change(layer=layer.layer, heads=heads, bands=control)
