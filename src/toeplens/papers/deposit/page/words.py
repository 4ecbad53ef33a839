"""What the page says in sentences: what came out, what was asked, what each encoding means; all from the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from toeplens.ground.words import listed, percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, Row, title
from toeplens.papers.deposit.factors import decided, peaks_of
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page import factors as factor_blocks
from toeplens.papers.deposit.page import mla as mla_blocks
from toeplens.papers.deposit.page.look import (
    PROTOCOL_NAMES,
    TASKS,
    interval,
    name,
    ordered,
    plain,
    planned,
    protocol_title,
)
from toeplens.studies import ENOUGH, CellResult, Verdict
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Drop:
    """The largest loss by silencing one head."""

    cell: CellResult
    value: float
    layer: int
    head: int

    def __str__(self) -> str:
        key, ablation = self.cell.key, self.cell.ablation
        assert ablation is not None
        low, high = (float(end[self.layer, self.head]) for end in (ablation.low, ablation.high))
        return (
            f"{points(self.value)} points [{points(low)}, {points(high)}], by silencing head {self.head + 1} of layer "
            f"{self.layer + 1} in {name(key.protocol, key.label)} (seed {key.seed}, {TASKS[key.task]}; intact accuracy "
            f"{percent(ablation.baseline)})"
        )


def tallies(state: Reproduction) -> dict[Protocol, Counter[Verdict]]:
    """The verdicts under each protocol, counted."""
    found: dict[Protocol, Counter[Verdict]] = {}
    for protocol in state.plan.protocols:
        found[protocol] = Counter(dict.fromkeys(VERDICTS, 0))
        found[protocol].update(entry.verdict for entry in state.entries if entry.protocol == protocol)
    return found


def headline(state: Reproduction) -> str:
    """The answer in one sentence."""
    if not state.finished:
        return "No model is finished yet, so nothing has come out so far."
    counted, few = tallies(state), state.plan.seeds < ENOUGH
    shown: tuple[Verdict, Verdict] = ("leans to hold", "leans to fail") if few else ("holds", "fails")
    parts = [
        f"under the {PROTOCOL_NAMES[protocol]} {' and '.join(_count(counts, each) for each in shown)}"
        for protocol, counts in counted.items()
    ]
    total = max(counts.total() for counts in counted.values())
    rest = (
        f"It takes {ENOUGH} seeds to decide; beside each claim stands what the records found."
        if few
        else "The others hold in part, only lean to a side, or are undecided."
    )
    return f"Of the {total} claims checked, {'; '.join(parts)}. {rest}"


def _count(counts: Counter[Verdict], verdict: Verdict) -> str:
    count, (verb, *rest) = counts[verdict], verdict.split()
    return " ".join([str(count or "none"), verb if count in (0, 1) else verb.removesuffix("s"), *rest])


def largest_drop(cells: Sequence[CellResult]) -> Drop | None:
    """The largest drop of any head of any of the models."""
    drops = []
    for cell in cells:
        if cell.ablation is not None and cell.status == "complete":
            layer, head = np.unravel_index(cell.ablation.drops.argmax(), cell.ablation.drops.shape)
            drops.append(Drop(cell, float(cell.ablation.drops[layer, head]), int(layer), int(head)))
    return max(drops, key=lambda drop: drop.value, default=None)


def diverged(state: Reproduction) -> list[str]:
    """The models that diverged, by name."""
    gone = [cell.key for cell in state.results.cells if cell.status == "diverged"]
    return [
        f"{name(key.protocol, key.label)}, {TASKS[key.task]}, {PROTOCOL_NAMES[key.protocol]}, seed {key.seed}"
        for key in gone
    ]


def seeds_note(state: Reproduction) -> str:
    """How far the number of seeds carries."""
    count = state.plan.seeds
    if count < ENOUGH:
        many = "one model" if count == 1 else f"{count} models"
        return f"Each encoding was trained as {many}: what comes out only leans: {ENOUGH} decide."
    return f"Each encoding was trained as {count} models with different seeds."


def describe_drops(cell: CellResult) -> str:
    """A heat map, for someone who does not see it."""
    drop = largest_drop([cell])
    return (
        f"No ablation of {name(cell.key.protocol, cell.key.label)}."
        if drop is None
        else f"Heat map of losses, layer by head. Largest: {drop}."
    )


def describe_rows(rows: Sequence[Row]) -> str:
    """Accuracies, for someone who does not see the figure."""
    told = ["diverged" if row.accuracy is None else percent(row.accuracy) for row in rows]
    named = [f"{name(row.protocol, row.label)} {text}" for row, text in zip(rows, told, strict=True)]
    return f"Test accuracy: {', '.join(named)}."


# ---- what was asked ------------------------------------------------------------------------------------------------


def answers(state: Reproduction) -> dict[str, list[str]]:
    """What was asked, and what came out of it, a sentence a protocol.

    Of each task, of where a single head carries the skill, and of what makes the difference.
    """
    if not state.finished:
        return {}
    encodings = plain(state)
    found = {f"Which encoding came first on {TASKS[task]}?": _winners(encodings, task) for task in TASKS}
    found["Where was the largest loss by silencing one head?"] = _losses(encodings)
    found[f"Which models of {TASKS[DISTANCE]} have a layer carried by a single head?"] = _deposits(encodings)
    if state.plan.seeds > 1:
        more = f"On {TASKS[DISTANCE]}, does one head carry more of the skill under RoPE than under other encodings?"
        found[more] = _rope_against_others(encodings)
    if "factors" in state.plan.parts:
        matters = f"Which difference between the protocols matters most for NoPE on {TASKS[DISTANCE]}?"
        found[matters] = factor_blocks.for_nope(state)
    if "mla" in state.plan.parts:
        whose = "Does MLA’s diffuse pattern come from its latent attention or from its program?"
        found[whose] = mla_blocks.whose(state)
    return {question: findings for question, findings in found.items() if findings}


def _winners(state: Reproduction, task: str) -> list[str]:
    def say(protocol: Protocol) -> str:
        rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task) and row.accuracy is not None]
        if not rows:
            return ""
        first, *rest = [f"{name(protocol, row.label)} ({percent(row.accuracy)})" for row in rows]
        then = f", then {' and '.join(rest[:2])}" if rest else ", the only one finished"
        return f"{first}{then}; {_guess(rows[0])}."

    return _each(state, say)


def _guess(row: Row) -> str:
    known = (
        f", {percent(row.length_chance)} if it knows the text’s length" if row.length_chance > row.chance * 1.02 else ""
    )
    return f"a constant guess gets {percent(row.chance)}{known}"


def _losses(state: Reproduction) -> list[str]:
    drops = {protocol: largest_drop(state.results.under(protocol).cells) for protocol in state.plan.protocols}
    return _each(state, lambda protocol: f"{drop}." if (drop := drops[protocol]) else "")


def _deposits(state: Reproduction) -> list[str]:
    def say(protocol: Protocol) -> str:
        cells = [c for c in state.results.under(protocol).cells if c.key.task == DISTANCE and c.deposits()]
        able = [cell for cell in cells if any(layer.kind != "no-skill" for layer in cell.deposits())]
        single = [cell for cell in able if any(layer.kind == "single-head" for layer in cell.deposits())]
        names = listed(name(protocol, label) for label in ordered(cell.key.label for cell in single))
        rope = "rope" in {cell.key.label for cell in able} - {cell.key.label for cell in single}
        without = f" {name(protocol, 'rope')} is not among them." if rope else ""
        return f"{names}. That is {len(single)} of the {len(able)} models with any skill.{without}" if cells else ""

    return _each(state, say)


def _rope_against_others(state: Reproduction) -> list[str]:
    """Differences of the largest share of the skill that one head carries, sorted by what they decide."""

    def say(protocol: Protocol) -> str:
        under = state.results.under(protocol)
        labels = [label for label in under.labels(DISTANCE) if Label.parse(label).heads is None]
        peaks = {label: peaks_of(under.of(DISTANCE, label)) for label in labels}
        rope = peaks.pop("rope", {})
        sorts: dict[str, list[str]] = {"more than under": [], "less than under": [], "not decided against": []}
        for label in ordered(peaks):
            if rope and peaks[label]:
                change = difference(rope, peaks[label]).estimate()
                less = "less than under" if change.value < 0 else "more than under"
                sorts[less if decided(change) else "not decided against"].append(
                    f"{name(protocol, label)} ({interval(change)})"
                )
        told = [f"{what} {listed(labels)}" for what, labels in sorts.items() if labels]
        mean = interval(estimated(rope), sign=False)
        return f"{name(protocol, 'rope')} {mean} per cent; {'; '.join(told)}." if told else ""

    return _each(state, say)


def _each(state: Reproduction, say: Callable[[Protocol], str]) -> list[str]:
    """A sentence a protocol, where there is anything to say."""
    said = [(protocol_title(protocol), say(protocol)) for protocol in state.plan.protocols]
    return [f"{name_}: {text}" for name_, text in said if text]


# ---- what each encoding does, and what each protocol means by its name -----------------------------------------------

_SAME = "as described"
_ABSENT = "not part of it"

# label: what it does, what the paper protocol means by it, what the released one does
_MEANT: dict[str, tuple[str, str, str]] = {
    "rope": (
        "turns queries and keys by an angle that grows with position, so that their product depends on the distance",
        _SAME,
        "the same, and a sinusoid added to the input that the paper does not mention",
    ),
    "rope-alone": (
        "RoPE without the hidden sinusoid",
        "there it is simply RoPE",
        "the program’s model, less the sinusoid",
    ),
    "rope-absolute": ("RoPE, and a sinusoid added to the input", _SAME, "there it is what the program calls RoPE"),
    "partial": (
        "RoPE on some heads of every layer, nothing on the others",
        _SAME,
        "the same; the program for it adds no sinusoid",
    ),
    "mla": (
        "multi-head latent attention: compressed keys and values, and a small part of each key that is rotated",
        "in the same decoder as the others",
        "a program of its own: learned positions at the input, padding hidden, GELU, keys and values from the layer",
    ),
    "absolute": ("adds a fixed pattern of sines and cosines to the input", _SAME, _SAME),
    "relative": (
        "adds a learned number to each attention score, by distance",
        "T5’s: distances share buckets",
        "one number for every signed distance and head, no buckets",
    ),
    "alibi": (
        "subtracts from each attention score an amount that grows with distance, a fixed slope a head",
        "slopes are powers of two",
        "slopes e^(−h/H), over the distance to either side",
    ),
    "random": ("adds a random vector a position to the input", "fixed", "trained along"),
    "nope": (
        "nothing: only a causal mask can tell positions apart",
        _SAME,
        "the same, but without a causal mask, so that the model cannot see order at all",
    ),
}


@dataclass(frozen=True)
class Term:
    """An encoding's line: what it does, and what it is under each of the study's protocols."""

    label: str
    title: str
    what: str
    meant: list[str]


def terms(state: Reproduction) -> list[Term]:
    """The encodings of the study's grid; RoPE on some heads is one entry."""
    places = {(key.protocol, _family(key.label)) for key in planned(state.plan)}
    labels = ordered(key.label for key in planned(state.plan))
    families = dict.fromkeys(_family(label) for label in labels)
    return [_term(family, labels, places, state.plan.protocols) for family in families if family in _MEANT]


def _family(label: str) -> str:
    return Label.parse(label).base


def _term(
    family: str, labels: list[str], places: Container[tuple[Protocol, str]], protocols: tuple[Protocol, ...]
) -> Term:
    what, paper, released = _MEANT[family]
    label = next(label for label in labels if _family(label) == family)
    swapped = ("rope-alone", "rope-absolute")
    meant = [
        {"paper": paper, "released": released}[p] if (p, family) in places or family in swapped else _ABSENT
        for p in protocols
    ]
    return Term(label, "RoPE on some heads" if family == "partial" else title(family), what, meant)
