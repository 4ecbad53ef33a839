"""The summary's answers: what was asked, and what came out, every number computed from the study's state."""

from __future__ import annotations

from dataclasses import dataclass

from toeplens.ground.words import listed, percent
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, Row
from toeplens.papers.deposit.factors import decided, peaks_of
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page import factors as factor_blocks
from toeplens.papers.deposit.page import mla as mla_blocks
from toeplens.papers.deposit.page.look import PROTOCOL_NAMES, TASKS, interval, name, ordered, plain
from toeplens.papers.deposit.page.words import largest_drop
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE


@dataclass(frozen=True)
class Answer:
    """A thing that was asked, and what came out, a sentence a protocol."""

    question: str
    findings: list[str]


def answers(state: Reproduction) -> list[Answer]:
    """What came out on each task, where a single head carries the skill, and what makes the difference."""
    if not state.finished:
        return []
    encodings = plain(state)
    found = [Answer(f"Which encoding came first on {TASKS[task]}?", _winners(encodings, task)) for task in TASKS]
    found.append(Answer("Where was the largest loss by silencing one head?", _losses(encodings)))
    which = f"Which models of {TASKS[DISTANCE]} have a layer carried by a single head?"
    found.append(Answer(which, _deposits(encodings)))
    if state.plan.seeds > 1:
        more = f"On {TASKS[DISTANCE]}, does one head carry more of the skill under RoPE than under other encodings?"
        found.append(Answer(more, _rope_against_others(encodings)))
    if "factors" in state.plan.parts:
        question = f"Which difference between the protocols matters most for NoPE on {TASKS[DISTANCE]}?"
        found.append(Answer(question, factor_blocks.for_nope(state)))
    if "mla" in state.plan.parts:
        question = "Does MLA’s diffuse pattern come from its latent attention or from its program?"
        found.append(Answer(question, mla_blocks.whose(state)))
    return [answer for answer in found if answer.findings]


def _winners(state: Reproduction, task: str) -> list[str]:
    sentences = []
    for protocol in state.plan.protocols:
        rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task) and row.accuracy is not None]
        if rows:
            first, *rest = [f"{name(protocol, row.label)} ({percent(row.accuracy)})" for row in rows]
            then = f", then {' and '.join(rest[:2])}" if rest else ", the only one finished"
            sentences.append(f"{_under(protocol)}: {first}{then}; {_guess(rows[0])}.")
    return sentences


def _guess(row: Row) -> str:
    known = (
        f", {percent(row.length_chance)} if it knows the text’s length" if row.length_chance > row.chance * 1.02 else ""
    )
    return f"a constant guess gets {percent(row.chance)}{known}"


def _losses(state: Reproduction) -> list[str]:
    sentences = []
    for protocol in state.plan.protocols:
        drop = largest_drop(state.results.under(protocol).cells)
        if drop:
            sentences.append(f"{_under(protocol)}: {drop}.")
    return sentences


def _deposits(state: Reproduction) -> list[str]:
    sentences = []
    for protocol in state.plan.protocols:
        cells = [c for c in state.results.under(protocol).cells if c.key.task == DISTANCE and c.deposits()]
        able = [cell for cell in cells if any(layer.kind != "no-skill" for layer in cell.deposits())]
        single = [cell for cell in able if any(layer.kind == "single-head" for layer in cell.deposits())]
        if cells:
            names = listed(name(protocol, label) for label in ordered(cell.key.label for cell in single))
            rope = "rope" in {cell.key.label for cell in able} - {cell.key.label for cell in single}
            without = f" {name(protocol, 'rope')} is not among them." if rope else ""
            sentences.append(
                f"{_under(protocol)}: {names}. That is {len(single)} of the {len(able)} models with any skill.{without}"
            )
    return sentences


def _rope_against_others(state: Reproduction) -> list[str]:
    """Paired differences of the largest share of the skill that one head carries, sorted by what they decide."""
    sentences = []
    for protocol in state.plan.protocols:
        under = state.results.under(protocol)
        labels = [label for label in under.labels(DISTANCE) if Label.parse(label).heads is None]
        peaks = {label: peaks_of(under.of(DISTANCE, label)) for label in labels}
        rope = peaks.pop("rope", {})
        sorts: dict[str, list[str]] = {"more than under": [], "less than under": [], "not decided against": []}
        for label in ordered(peaks):
            change = estimated({seed: rope[seed] - peaks[label][seed] for seed in rope.keys() & peaks[label].keys()})
            if change:
                less = "less than under" if change.value < 0 else "more than under"
                sorts[less if decided(change) else "not decided against"].append(
                    f"{name(protocol, label)} ({interval(change)})"
                )
        told = [f"{what} {listed(labels)}" for what, labels in sorts.items() if labels]
        if told:
            mean = interval(estimated(rope), sign=False)
            sentences.append(f"{_under(protocol)}: {name(protocol, 'rope')} {mean} per cent; {'; '.join(told)}.")
    return sentences


def _under(protocol: Protocol) -> str:
    return PROTOCOL_NAMES[protocol].capitalize()
