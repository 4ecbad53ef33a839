"""The parts of the study: audits of texts, of baselines and of interventions; and probes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from toeplens.encodings import BandControl
from toeplens.ground import invalid, read_json, write_json
from toeplens.papers.positional_symbolic.pretrained.state import AUDITED, BANDS, Plan
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.install import install_same
from toeplens.sources.huggingface.load import Loaded
from toeplens.studies.auditing import audit
from toeplens.studies.auditing.record import AuditRecord, LayerRecord, Method
from toeplens.studies.kit.questions import Writer
from toeplens.studies.probing import RETRIEVES, ProbeRecord, Probing

PIECES = "pieces"
METHODS: dict[str, Method] = {"silenced": "exact", "position": "position", "bands": "bands"}
Report = Callable[[str, int, int], None]


def path_of(directory: Path, name: str) -> Path:
    """The path of a part's record."""
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
        """Run a part and write its record."""
        record = self._audit(name) if kind == AUDITED else self._probe(name)
        write_json(path_of(self.directory, name), record.to_dict())

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
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

    def _probe(self, name: str) -> ProbeRecord:
        if name == "intact":
            return self.probing.record(heads=True)
        return self.probing.record(changes_of(name, self.plan, *self._seen))

    @cached_property
    def _seen(self) -> tuple[list[AuditRecord], ProbeRecord]:
        """The records by which heads are selected: the audits of the texts and the intact probe."""
        count = len(self.plan.places)
        audits = [read(self.directory, f"text-{number}", AuditRecord) for number in range(count)]
        return audits, read(self.directory, "intact", ProbeRecord)


def read(directory: Path, name: str, kind: Any) -> Any:
    """Read a finished part's record."""
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
