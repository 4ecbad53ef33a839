"""What is done to a model's heads and frequencies: by what its own audits and its intact probe say of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from toeplens.encodings import BandControl
from toeplens.papers.positional_symbolic.pretrained.plan import BANDS, Plan
from toeplens.sources.huggingface import Change
from toeplens.studies.auditing.record import AuditRecord, LayerRecord
from toeplens.studies.probing import RETRIEVES, ProbeRecord

PREVIOUS = 0.5  # mean attention on the token before, from which on a head is a previous-token head
QUARTER = 4
Head = tuple[int, int]  # layer and head


def retrieving(intact: ProbeRecord) -> list[Head]:
    """The heads that retrieve."""
    return [(each.layer, each.head) for each in intact.heads if each.score >= RETRIEVES]


def previous(audits: Sequence[AuditRecord]) -> list[Head]:
    """The heads that look at the token before, by their mean over the texts."""
    rows = [[head.previous or 0.0 for head in audit.heads] for audit in audits]
    means = np.mean(rows, axis=0)
    return [(head.layer, head.head) for head, mean in zip(audits[0].heads, means, strict=True) if mean >= PREVIOUS]


def by_speed(layer: LayerRecord) -> list[int]:
    """The pairs of a layer's rotation, the fastest first."""
    return np.argsort(-np.abs(layer.frequencies), kind="stable").tolist()


def changes_of(piece: str, plan: Plan, audits: Sequence[AuditRecord], intact: ProbeRecord | None) -> list[Change]:
    """What a piece does to the model; nothing where it has no such heads."""
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
    """As many heads, in the same layers where there are enough others, else in any."""
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
    """A quarter of the frequencies of some heads: the fastest, the slowest, or drawn."""
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
