"""What the page says in sentences: what came out, what was asked, what each encoding means; all from the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from toeplens.ground.words import listed, percent, points
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction, Row, Scale, title
from toeplens.papers.deposit.factors import factor_wholes
from toeplens.papers.deposit.page import factors as factor_blocks
from toeplens.papers.deposit.page import mla as mla_blocks
from toeplens.papers.deposit.page.look import (
    PROTOCOL_NAMES,
    TASKS,
    interval,
    name,
    ordered,
    plain,
    protocol_title,
)
from toeplens.papers.deposit.recorded import recorded
from toeplens.report.kit.page import ledger
from toeplens.studies import ENOUGH, CellResult, Claim, Entry, Verdict
from toeplens.studies.kit.results import estimated
from toeplens.studies.kit.verdicts import SIDES
from toeplens.training.presets import DISTANCE

_MORE = "deposit-more-under-rope"
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
    if not state.begun:
        return "No model is finished yet, so nothing has come out so far."
    counted, few = tallies(state), state.plan.seeds < ENOUGH
    shown: tuple[Verdict, Verdict] = ("leans to hold", "leans to fail") if few else ("holds", "fails")
    parts = [
        f"under the {PROTOCOL_NAMES[protocol]} {' and '.join(_count(counts, each) for each in shown)}"
        for protocol, counts in counted.items()
    ]
    total = max(counts.total() for counts in counted.values())
    if not total:
        return "No claim is asked of what was trained here."
    rest = (
        f"It takes {ENOUGH} seeds to decide"
        if few
        else "The others hold in part, only lean to a side, or are undecided"
    )
    if few and recorded().keys() & {(entry.claim.id, entry.protocol) for entry in state.entries}:
        rest += "; beside a claim stands what the records found, where they have it"
    return f"Of the {total} claims checked, {'; '.join(parts)}. {rest}."


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
    many = SCALES[state.plan.scale].told(count).removesuffix(" seeds")
    return f"Each encoding was trained as {many} models with different seeds."


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


# ---- the story: what the papers say, what was measured, where they part ----------------------------------------------

# what the papers are known for, in the order in which they tell it
_CENTRAL = (
    "task1-rope-best",
    "task1-nope-relative-fail",
    "deposit-first-layer",
    "deposit-only-rope",
    "mla-removes-deposit",
)
_MEANT_BY: dict[Protocol, str] = {
    "paper": "as the papers’ text describes it (paper protocol)",
    "released": "as the authors’ program does it (released protocol)",
}
_FEW = 2  # claims that are written out where protocols part


@dataclass(frozen=True)
class Parting:
    """Where results part from the papers, or protocols from each other; ``claims`` with what came out of each."""

    text: str
    claims: Sequence[tuple[Claim, str]] = ()


def central(state: Reproduction) -> list[list[Entry]]:
    """What the papers are known for: the entries of these claims, one a protocol."""
    found = {entries[0].claim.id: entries for entries in ledger(state.entries)}
    return [found[each] for each in _CENTRAL if each in found]


def measured(state: Reproduction) -> list[str]:
    """At which scale: sizes beside the papers', models, seeds, protocols."""
    ours, theirs = SCALES[state.plan.scale], SCALES["paper"]
    layers, heads, width, length = _sizes(ours)
    said = f"{layers} layers of {heads} heads, {width} wide, on texts of {length} tokens"
    their_layers, their_heads, their_width, their_length = _sizes(theirs)
    beside = f" (the papers’: {their_layers} of {their_heads}, {their_width} wide, {their_length} tokens)"
    same = ", the papers’ own sizes"
    protocols = [_MEANT_BY[protocol] for protocol in state.plan.protocols]
    there, models = len(state.results.cells), len(state.models)
    counted = f"{there:,} of {state.total:,} models"
    if models < there:  # one run may stand in two
        counted = f"{models:,} models in {there:,} of {state.total:,} places of the study"
    if state.finished < there:
        counted += f" ({there - state.finished:,} of them not measured in full)"
    return [
        f"{said}{same if ours is theirs else beside}.",
        f"{counted}, {ours.told(state.plan.seeds)} of each; trained {' and '.join(protocols)}; then every head "
        "silenced in turn.",
    ]


def _sizes(scale: Scale) -> tuple[int, int, int, int]:
    model = scale.model
    return model["num_layers"], model["num_heads"], model["d_model"], scale.tasks[DISTANCE].paper["length"]


def partings(state: Reproduction) -> list[Parting]:
    """Where results part from the papers, where the two protocols part, and what of their differences does it."""
    if not state.begun:
        return []
    few, both = state.plan.seeds < ENOUGH, len(state.plan.protocols) > 1
    claims = ledger(state.entries)
    verdicts = ("fails", "leans to fail") if few else ("fails",)
    theirs = [entries for entries in claims if not entries[0].claim.ours]
    gone = [entries for entries in theirs if all(entry.verdict in verdicts for entry in entries)]
    where = "both protocols" if both else f"the {PROTOCOL_NAMES[state.plan.protocols[0]]}"
    verb = ("leans to fail" if len(gone) == 1 else "lean to fail") if few else "fails" if len(gone) == 1 else "fail"
    apart = Parting(f"From the papers: {len(gone) or 'none'} of their {len(theirs)} claims {verb} under {where}.")
    found = [apart] if theirs else []
    return [*found, *_between_protocols(state, claims)] if both else found


def _between_protocols(state: Reproduction, claims: Sequence[Sequence[Entry]]) -> list[Parting]:
    """Claims that come out on opposite sides, the encoding whose accuracy differs most, and why it does."""
    opposite = [each for each in claims if {-1, 1} <= {SIDES.get(entry.verdict, 0) for entry in each}]
    told = [(each[0].claim, ", ".join(f"{entry.verdict} ({entry.protocol})" for entry in each)) for each in opposite]
    count = len(opposite)
    apart = f"{count or 'no'} claim{'s' if count > 1 else ''} come{'s' if count < 2 else ''} out on opposite sides"
    found = [Parting(f"The text from the program: {apart}{':' if count else '.'}", told[:_FEW])]
    wholes = [whole for whole in factor_wholes(state.results, state.plan.protocols) if whole.task == DISTANCE]
    differing = [(whole, change) for whole in wholes if (change := estimated(whole.difference("accuracy")))]
    if differing:
        whole, change = max(differing, key=lambda each: abs(each[1].value))
        ends = [f"{percent(_mean(values['accuracy']))} ({end})" for end, values in whole.ends.items()]
        among = f"of {listed(title(each.base) for each, _ in differing)}, " if len(differing) > 1 else ""
        most = f"{title(whole.base)} differs{' most' if among else ''}"
        text = f"On {TASKS[DISTANCE]}, {among}{most}: {' against '.join(ends)}, "
        found.append(Parting(f"{text}{interval(change)} points. {_why(state, whole.base)}"))
    return found


def _why(state: Reproduction, base: str) -> str:
    if not {"factors", "factors-back"} & set(state.plan.parts):
        return "Which of the protocols’ differences does it was not asked here; the part “factors” asks."
    return factor_blocks.why(state, base) or "Which of the protocols’ differences does it is not known yet."


def _mean(values: Mapping[int, float]) -> float | None:
    found = estimated(dict(values))
    return found.value if found else None


# ---- what was asked ------------------------------------------------------------------------------------------------


def answers(state: Reproduction) -> dict[str, list[str]]:
    """What was asked, and what came out of it, a sentence a protocol.

    Of each task, of where a single head carries the skill, and of what makes the difference.
    """
    if not state.begun:
        return {}
    encodings = plain(state)
    found = {f"Which encoding came first on {TASKS[task]}?": _winners(encodings, task) for task in TASKS}
    found["Where was the largest loss by silencing one head?"] = _losses(encodings)
    found[f"Which models of {TASKS[DISTANCE]} have a layer carried by a single head?"] = _deposits(encodings)
    if state.plan.seeds > 1:
        more = f"On {TASKS[DISTANCE]}, does one head carry more of the skill under RoPE than under other encodings?"
        found[more] = _rope_against_others(state)
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
    """What the ledger finds, by the same rule."""

    def say(protocol: Protocol) -> str:
        entries = (each for each in state.entries if each.claim.id == _MORE and each.protocol == protocol)
        entry = next(entries, None)
        found = [part for part in entry.findings if part.essential and part.known] if entry else []
        told = "; ".join(part.evidence for part in found)
        if entry is None or not told:
            return ""
        return f"that it does {'is undecided' if entry.verdict == 'undecided' else entry.verdict}. {told}."

    return _each(state, say)


def _each(state: Reproduction, say: Callable[[Protocol], str]) -> list[str]:
    """A sentence a protocol, where there is anything to say."""
    said = [(protocol_title(protocol), say(protocol)) for protocol in state.plan.protocols]
    return [f"{name_}: {text}" for name_, text in said if text]
