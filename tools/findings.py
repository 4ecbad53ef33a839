"""Write what docs/real-models.md says of the recorded language models, from results/*/results.json.xz.

    python tools/findings.py

Everything between a line ``<!-- found: .. -->`` and the next ``<!-- end -->`` of the page is written here, every number
of it from the records. `tests/docs/test_real_models.py` holds that the page is up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from filling import filled

from toeplens.papers.positional_symbolic.pretrained import Pretrained, open_record
from toeplens.papers.positional_symbolic.pretrained.changes import PREVIOUS, previous, retrieving
from toeplens.papers.positional_symbolic.pretrained.clustered import ByText, by_text
from toeplens.papers.positional_symbolic.pretrained.heads import Heads, effects_of
from toeplens.studies.kit.verdicts import told_of
from toeplens.studies.probing import RETRIEVES, Behaviour

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "real-models.md"
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
ENCODERS = {"minilm": "MiniLM"}
_NULLS = {"random": "the same architecture with random weights", "shuffled": "the same tokens in random order"}


def records(names: Mapping[str, str] = NAMES) -> dict[str, Pretrained]:
    """The models that are recorded, by their names for people; language models unless others are named."""
    paths = {title: ROOT / "results" / name / "results.json.xz" for name, title in names.items()}
    return {title: open_record(path) for title, path in paths.items() if path.exists()}


def page() -> str:
    """The page with its findings as the records have them."""
    found, encoders = records(), records(ENCODERS)
    return filled(PAGE, lambda part: _PARTS[part](encoders if part == "an encoder" else found))


def _verdicts(found: dict[str, Pretrained]) -> Iterator[str]:
    yield f"| claim | {' | '.join(found)} |"
    yield f"|---|{'---|' * len(found)}"
    entries = [study.entries for study in found.values()]
    for row in zip(*entries, strict=True):
        yield f"| {row[0].claim.statement} ({row[0].claim.source}) | {' | '.join(entry.verdict for entry in row)} |"


def _each(say: Callable[[Pretrained], Iterator[str]]) -> Callable[[dict[str, Pretrained]], Iterator[str]]:
    """What is said of every model, one after the other."""

    def both(found: dict[str, Pretrained]) -> Iterator[str]:
        for title, study in found.items():
            yield f"- **{title}.** " + " ".join(say(study))

    return both


def _frequencies(study: Pretrained) -> Iterator[str]:
    heads = _heads(study)
    for part, which in heads.parts.items():
        own = heads.correlations("positional", "centre", which)
        others = [
            f"{np.mean(_heads(study, kind).correlations('positional', 'centre', which)):.2f} in {words}"
            for kind, words in _NULLS.items()
        ]
        yield (
            f"Over {_these(part, which)} the rank correlation of the positional share with the frequency used is "
            f"{np.mean(own):.2f} ({min(own):.2f} to {max(own):.2f} over {len(own)} sequences); it is "
            f"{' and '.join(others)}."
        )
    over = {kind: [_many(_heads(study, kind), name, 0.5) for name in ("positional", "symbolic")] for kind in _ALL}
    yield (
        f"Of {len(heads.layer)} heads {over['text'][0]} are over half positional and {over['text'][1]} over half "
        f"symbolic, with random weights {over['random'][0]} and {over['random'][1]}."
    )
    pure = [np.mean(heads.by_text(lambda c, name=name: (c[name] >= 0.9).sum())) for name in ("positional", "symbolic")]
    yield f"On the mean sequence {pure[0]:.1f} are 90 % positional or more, and {pure[1]:.1f} are 90 % symbolic."


def _before(study: Pretrained) -> Iterator[str]:
    heads = _heads(study)
    audits = [study.audits[f"text-{number}"] for number in range(len(study.plan.places))]
    chosen = previous(audits)
    which = heads.among(chosen)
    own = "its" if len(chosen) == 1 else "their"
    yield f"{_heads_are(len(chosen))} the token before {PREVIOUS:.0%} of {own} attention or more{_listed(chosen)}."
    if not chosen:
        return
    share, one = heads.mean("positional")[which], len(chosen) == 1
    away = np.mean(heads.by_text(lambda c: np.nanmean(c["centre"][which]) - np.nanmean(c["centre"][~which])))
    yield (
        f"{'It is' if one else 'They are'} {_span(share.tolist())} positional, and "
        f"{'uses' if one else 'use'} pairs {away:.1f} octaves faster than others."
    )
    fast, slow = (_more(study, name, "copying") for name in ("fast-still", "slow-still"))
    whose = "its" if one else "their"
    yield f"Stopping {whose} fastest quarter costs copying {_nats(fast)} nats a token, {whose} slowest {_nats(slow)}."


def _retrieval(study: Pretrained) -> Iterator[str]:
    intact, heads = study.probes["intact"], _heads(study)
    chosen = retrieving(intact)
    best = max(intact.heads, key=lambda each: each.score)
    needles = intact.summary("needle")
    right, many = round(needles.right.value * needles.count), len(intact.heads)
    yield (
        f"The intact model finds {right} of {needles.count} needles; {len(chosen)} of {many} heads "
        f"({len(chosen) / many:.1%}) have a retrieval score of {RETRIEVES} or more, layer {best.layer + 1} head "
        f"{best.head + 1} the largest, {best.score:.2f}."
    )
    if not chosen:
        return
    which = heads.among(chosen)
    symbolic = [heads.mean("symbolic")[each].mean() for each in (which, ~which)]
    yield f"They are {symbolic[0]:.0%} symbolic, the others {symbolic[1]:.0%}."
    others = [_kept(study, f"no-others-{draw}") for draw in range(3)]
    left = _kept(study, "no-retrieval")
    yield f"Silenced, they leave {left:.0%} of the needles; as many others leave {_span(others)}."
    drawn = [_more(study, f"some-silent-{draw}", "needle") for draw in range(3)]
    slow, fast = (_more(study, f"{speed}-silent", "needle") for speed in ("slow", "fast"))
    yield (
        f"The slowest quarter of their pairs silenced costs the number {_nats(slow)} nats a token, the fastest "
        f"{_nats(fast)}, quarters that were drawn {min(drawn):.2f} to {max(drawn):.2f}."
    )
    still, found = study.probes["retrieval-still"], _more(study, "retrieval-still", "needle")
    yield (
        f"Standing still instead, the slowest quarter costs it {_nats(found)} nats, and "
        f"{round(_kept(study, 'retrieval-still') * len(still.of('needle')))} of {len(still.of('needle'))} needles are "
        "found."
    )


def _bands(study: Pretrained) -> Iterator[str]:
    more = {name: [_more(study, f"still-{band}", name) for band in range(8)] for name in ("loss", "needle", "copying")}
    yield "Stopping an eighth of all pairs costs most, in nats a token:"
    yield "; ".join(f"{words}, {_largest(more[name])}" for name, words in _COSTS.items()) + "."
    last = max(max(values[6:]) for values in more.values())
    yield f"Of the two slowest eighths neither, stopped by itself, costs any of them more than {last:.2f}."
    bands = sorted(study.audits["bands"].bands, key=lambda band: -(band.effect or 0))
    top = ", ".join(
        f"layer {band.layer + 1} (pairs {band.first + 1} to {band.last + 1}) {band.effect:.3f}" for band in bands[:3]
    )
    total = sum(band.effect or 0 for band in bands)
    most = sorted(_by_eighth(study).items(), key=lambda each: -each[1])[:2]
    parts = " eighth, ".join(f"{effect / total:.0%} in the {_PLACES[eighth]}" for eighth, effect in most)
    yield (
        f"Stopped in one layer at a time, the costliest are {top}, of {len(bands)} that add up to {total:.2f}: {parts}."
    )


def _by_eighth(study: Pretrained) -> dict[int, float]:
    """What stopping each eighth of a layer costs the text, added up over the layers."""
    bands = study.audits["bands"].bands
    found = dict.fromkeys(range(8), 0.0)
    for layer in {band.layer for band in bands}:
        own = sorted((band for band in bands if band.layer == layer), key=lambda band: -band.fastest)
        for eighth, band in enumerate(own):
            found[eighth] += band.effect or 0
    return found


def _position(study: Pretrained) -> Iterator[str]:
    heads, audit = _heads(study), study.audits["position"]
    effects, low = effects_of(audit), effects_of(audit, "_low")
    at, most = int(np.argmax(effects)), int(np.argmax(heads.mean("positional")))
    counted = low > 0
    yield (
        f"Taking position from one head at a time costs most in layer {heads.layer[at] + 1} head {heads.head[at] + 1}: "
        f"{effects[at]:.3f} nats a token, {effects[at] / effects[counted].sum():.0%} of what it costs in the "
        f"{int(counted.sum())} heads whose interval lies above 0."
    )
    yield (
        f"The most positional head is layer {heads.layer[most] + 1} head {heads.head[most] + 1} "
        f"({heads.mean('positional')[most]:.0%}), and costs {effects[most]:.3f}; the median head costs "
        f"{np.median(effects):.4f}."
    )
    thirds = [
        f"{effects[counted & (heads.layer * 3 // len(audit.layers) == third)].sum() / effects[counted].sum():.0%}"
        for third in range(3)
    ]
    yield f"Of what it costs in those heads {', '.join(thirds)} are in the first, second and last third of the layers."
    silenced = effects_of(study.audits["silenced"])
    best = int(np.argmax(silenced))
    yield (
        f"Silencing a head costs most in layer {heads.layer[best] + 1} head {heads.head[best] + 1}: "
        f"{silenced[best]:.3f}."
    )


def _lists(study: Pretrained) -> Iterator[str]:
    right = {name: [item.right for item in study.probes["intact"].of(name)] for name in ("counting", "order")}
    yield "; ".join(f"{name}: {sum(values):.0f} of {len(values)} right" for name, values in right.items()) + "."


def _texts(study: Pretrained) -> Iterator[str]:
    found = list(by_text(study))
    others = [each for each in found if each.differs]
    many = len(found) - len(others)
    yield f"Of {len(found)} comparisons over sequences {many} come out the same."
    yield (
        "Otherwise: "
        + "; ".join(
            f"`{each.entry.claim.id}`{'' if each.part.essential else ' (a supporting part)'}, "
            f"{each.part.evidence.split(': ')[0]}: {each.value:.3f} [{each.low:.3f}, {each.high:.3f}], "
            f"bar {_bar(each)}, *{each.verdict}*, over sequences {each.part.verdict}{_corrected(each)}"
            for each in others
        )
        + "."
    )


def _corrected(each: ByText) -> str:
    """What the ledger says of the part over sequences, where its correction makes it another verdict."""
    told = told_of(each.entry.findings, each.entry.error)[each.entry.findings.index(each.part)]
    return "" if told == each.part.verdict else f" ({told} with the correction)"


def _bar(each: ByText) -> str:
    assert each.part.comparison is not None
    return " to ".join(f"{bar:g}" for bar in (each.part.comparison.low, each.part.comparison.high) if np.isfinite(bar))


def _encoder(study: Pretrained) -> Iterator[str]:
    heads = _heads(study)
    over = {kind: [_many(_heads(study, kind), name, 0.5) for name in ("positional", "symbolic")] for kind in _ALL}
    yield (
        f"Of {len(heads.layer)} heads {over['text'][0]} are over half positional and {over['text'][1]} over half "
        f"symbolic, with random weights {over['random'][0]} and {over['random'][1]}, with tokens in random order "
        f"{over['shuffled'][0]} and {over['shuffled'][1]}."
    )
    by_layer = [heads.mean("positional")[heads.layer == layer].mean() for layer in sorted(set(heads.layer.tolist()))]
    yield f"The mean positional share of its layers is {', '.join(f'{share:.0%}' for share in by_layer)}."
    pure = next(entry for entry in study.entries if entry.claim.id == "pure-heads")
    yield f"That purely positional and purely symbolic heads exist: {pure.verdict} ({'; '.join(pure.evidence)})."
    silenced = effects_of(study.audits["silenced"])
    best = int(np.argmax(silenced))
    yield (
        f"Silencing a head moves the last states most in layer {heads.layer[best] + 1} head {heads.head[best] + 1}, by "
        f"{silenced[best]:.3f} of their variance over tokens."
    )
    reasons: dict[str, list[str]] = {}
    for entry in study.entries:
        if not any(part.known for part in entry.findings):
            reasons.setdefault(entry.evidence[0].split(": ")[-1], []).append(f"`{entry.claim.id}`")
    yield (
        "Undecided, as they do not apply: "
        + "; ".join(f"{', '.join(ids)} ({why})" for why, ids in reasons.items())
        + "."
    )


_ALL = ("text", "random", "shuffled")
_PLACES = ("fastest", "second", "third", "fourth", "fifth", "sixth", "seventh", "slowest")
_COSTS = {"loss": "text", "needle": "needles", "copying": "copying"}
_PARTS: dict[str, Callable[[dict[str, Pretrained]], Iterator[str]]] = {
    "verdicts": _verdicts,
    "frequencies": _each(_frequencies),
    "the token before": _each(_before),
    "retrieval": _each(_retrieval),
    "bands": _each(_bands),
    "position": _each(_position),
    "lists": _each(_lists),
    "texts": _each(_texts),
    "an encoder": _each(_encoder),
}


def _heads(study: Pretrained, kind: str = "text") -> Heads:
    found = study.heads(kind)
    assert found is not None
    return found


def _many(heads: Heads, name: str, bar: float) -> int:
    return int((heads.mean(name) > bar).sum())


def _these(part: str, which: np.ndarray) -> str:
    return f"all {len(which)} heads" if part == "all heads" else f"the {int(which.sum())} heads of {part}"


def _heads_are(count: int) -> str:
    return "No head gives" if not count else "One head gives" if count == 1 else f"{count} heads give"


def _listed(chosen: list[tuple[int, int]]) -> str:
    return (
        f" (layer and head {', '.join(f'{layer + 1}.{head + 1}' for layer, head in sorted(chosen))})" if chosen else ""
    )


def _nats(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # no -0.00


def _largest(values: list[float]) -> str:
    """Which eighths cost most, and what."""
    first, second, *_ = np.argsort(values)[::-1]
    return f"the {_PLACES[first]} {values[first]:.2f}, then the {_PLACES[second]} {values[second]:.2f}"


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"


def _more(study: Pretrained, piece: str, behaviour: Behaviour) -> float:
    more = study.probes[piece].summary(behaviour).more_nats
    assert more is not None
    return more.value


def _kept(study: Pretrained, piece: str) -> float:
    kept = study.probes[piece].summary("needle").changed_right
    assert kept is not None
    return kept.value


if __name__ == "__main__":
    PAGE.write_text(page())
