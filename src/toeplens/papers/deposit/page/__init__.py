"""The reproduction page: one self-contained HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np

from toeplens.ground.words import percent, points
from toeplens.lens import THRESHOLDS
from toeplens.model import Protocol
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.measured import recorded
from toeplens.papers.deposit.page import accuracy, heads, style, tables
from toeplens.papers.deposit.page.style import PROTOCOL_NAMES, TASKS, name, plain, protocol_title
from toeplens.report.kit.blocks import Block, numbered
from toeplens.report.kit.page import Page, ledger, ledger_table, surroundings
from toeplens.report.kit.tables import DASH, Cell, Table, make_table
from toeplens.studies import ENOUGH, RULE, CellResult, Entry, Verdict
from toeplens.studies.kit.verdicts import LEVEL, SIDES
from toeplens.training.presets import COUNT, DISTANCE

_Maker = Callable[[Reproduction], Block]
_MAKERS: tuple[_Maker, ...] = (  # in page order
    accuracy.accuracy,
    *(partial(accuracy.learning, task=task, number=number) for task, number in ((DISTANCE, 2), (COUNT, 3))),
    *(heads.heads, heads.by_encoding, heads.by_layer, heads.cumulative),
    *(heads.position, heads.removed, heads.sizes, heads.circuit, tables.switches),
    *(accuracy.partial_accuracy, accuracy.layers, accuracy.peaks, accuracy.sinusoid, accuracy.representation),
    *(tables.variants, heads.by_rung, heads.by_moment),
    *(heads.strength, heads.exponent, heads.lead, heads.training, heads.exponents),
)
# figures of plain encodings only, without variants and the models of other parts
_PLAIN = {*_MAKERS[:7], heads.circuit, accuracy.sinusoid, heads.exponents}
# figures shown only if their part is in the plan; cells of other parts would show an incomplete figure
_PART: dict[_Maker, str] = {
    tables.switches: "factors",
    accuracy.layers: "partial",
    accuracy.peaks: "partial",
    tables.variants: "mla",
    heads.by_rung: "ladder",
    heads.by_moment: "ladder",
}
# figures of other models that appear in the sections of plain encodings
_BESIDE = {"position", "sets", "sets-size", "representation"}


def blocks(state: Reproduction) -> dict[str, Block]:
    """All non-empty figures by id, numbered in order."""
    encodings, parts = style.plain(state), state.plan.parts
    asked = [make for make in _MAKERS if _PART.get(make, parts[0]) in parts]
    return numbered(make(encodings if make in _PLAIN else state) for make in asked)


def reproduction_page(state: Reproduction) -> Page:
    """The figures and tables of the study."""
    found, encodings, scale = blocks(state), style.plain(state), SCALES[state.plan.scale]
    general = bool(style.plain_keys(state.plan) or _BESIDE & found.keys())
    claims, protocols = ledger(state.entries), {p: style.PROTOCOL_NAMES[p] for p in state.plan.protocols}
    known = recorded() if state.plan.seeds < ENOUGH else {}
    seeds = ", ".join(map(str, sorted({key.seed for key in style.planned(state.plan)})))
    deposits_shown = tables.deposit_tables(encodings) if general else []
    effects = tables.switch_tables(state) if "factors" in state.plan.parts else []
    variants = tables.variant_tables(state) if "mla" in state.plan.parts else []
    facts = [("Scale", f"{state.plan.scale}: {scale.about}"), ("Protocols", ", ".join(state.plan.protocols))]
    every = {
        "results": results_table(state),
        "encodings": tables.encodings_table(state),
        "claims": ledger_table(claims, protocols=protocols, recorded=known),
        **({f"accuracy-{task}": tables.accuracy_table(encodings, task) for task in style.TASKS} if general else {}),
        **{f"kinds-{i}": kinds for i, (_, kinds, _) in enumerate(deposits_shown)},
        **{f"deposits-{i}": each for i, (*_, each) in enumerate(deposits_shown)},
        **({"strongest": tables.strongest_table(state)} if effects else {}),
        **{f"effects-{i}": each for i, each in enumerate(effects)},
        **{f"variants-{i}": each for i, each in enumerate(variants)},
        **({"steps": tables.steps_table(state)} if variants else {}),
        "run": surroundings(state, "cells", [*facts, ("Seeds", f"{seeds} (of weights, order and data)")]),
        "settings": tables.settings_table(state),
        "models": tables.models_table(state),
    }
    return Page(
        "papers/deposit/page/page.html.j2",
        found,
        {key: table for key, table in every.items() if table.body},
        {
            "look": style,
            "state": state,
            "general": general,
            "scale": scale,
            "many_heads": scale.model["num_heads"] > 8,
            "answers": answers(state),
            "central": central(state),
            "opposite": opposite(state),
            "sizes": sizes(state),
            "unmeasured": len(state.results.cells) - state.finished,
            "tallies": tallies(state),
            "seeds_per_cell": scale.told(state.plan.seeds),
            "enough": ENOUGH,
            "largest": largest_drop((encodings if general else state).results.cells),
            "gone": diverged(state),
            "protocols": protocols,
            "claims": claims,
            "deposits": deposits_shown,
            "effects": effects,
            "variants": variants,
            "thresholds": THRESHOLDS.split("; "),
            "rule": RULE,
            "recorded": known,
        },
    )


VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


def tallies(state: Reproduction) -> dict[Protocol, Counter[Verdict]]:
    """Number of verdicts of each kind under each protocol."""
    found: dict[Protocol, Counter[Verdict]] = {}
    for protocol in state.plan.protocols:
        found[protocol] = Counter(dict.fromkeys(VERDICTS, 0))
        found[protocol].update(entry.verdict for entry in state.entries if entry.protocol == protocol)
    return found


def answers(state: Reproduction) -> list[dict[str, Any]]:
    """Per protocol: is the claim of a single-head deposit in the first layer right, and by which number?"""
    found: list[dict[str, Any]] = []
    for entry in state.entries:
        if entry.claim.id != "deposit-first-layer" or entry.protocol is None:
            continue
        part: dict[str, Any] = {
            "name": protocol_title(entry.protocol),
            "word": style.TEXTS["answers"][entry.verdict],
            "encoding": "RoPE without a sinusoid" if entry.protocol == "released" else "RoPE",
            "mean": None,
        }
        comparison = entry.findings[0].comparison
        if comparison is not None:
            seen = comparison.seen
            ends = tuple(map(percent, seen.interval(LEVEL))) if seen.seeds > 1 else ()
            part |= {"mean": percent(seen.value), "ends": ends, "seeds": seen.seeds}
            part["threshold"] = f"{comparison.low:.0%}"
        found.append(part)
    return found


def central(state: Reproduction) -> list[list[Entry]]:
    found = {entries[0].claim.id: entries for entries in ledger(state.entries)}
    return [found[each] for each in style.TEXTS["central"] if each in found]


def opposite(state: Reproduction) -> list[list[Entry]]:
    """The claims with opposite verdicts under the two protocols."""
    return [each for each in ledger(state.entries) if {-1, 1} <= {SIDES.get(entry.verdict, 0) for entry in each}]


def sizes(state: Reproduction) -> list[dict[str, int]]:
    """Sizes of this study's models, and of the paper's if they differ."""
    return [
        {
            "layers": each.model["num_layers"],
            "heads": each.model["num_heads"],
            "width": each.model["d_model"],
            "tokens": each.tasks[DISTANCE].paper["length"],
        }
        for each in (SCALES[name] for name in dict.fromkeys((state.plan.scale, "paper")))
    ]


def largest_drop(cells: Sequence[CellResult]) -> tuple[CellResult, float, int, int] | None:
    """The largest accuracy drop from ablating one head of any model: model, drop, layer, head."""
    drops = []
    for cell in cells:
        if cell.ablation is not None and cell.status == "complete":
            layer, head = np.unravel_index(cell.ablation.drops.argmax(), cell.ablation.drops.shape)
            drops.append((cell, float(cell.ablation.drops[layer, head]), int(layer), int(head)))
    return max(drops, key=lambda drop: drop[1], default=None)


def diverged(state: Reproduction) -> list[str]:
    gone = [cell.key for cell in state.results.cells if cell.status == "diverged"]
    return [
        f"{name(key.protocol, key.label)}, {TASKS[key.task]}, {PROTOCOL_NAMES[key.protocol]}, seed {key.seed}"
        for key in gone
    ]


def results_table(state: Reproduction) -> Table:
    encodings = plain(state)
    protocols = state.plan.protocols
    lines: list[list[str | Cell]] = [
        *([f"Best on {TASKS[task]}", *(_best(encodings, task, protocol) for protocol in protocols)] for task in TASKS),
        ["Largest accuracy drop from ablating one head", *(_largest(encodings, protocol) for protocol in protocols)],
        [
            f"Models with a single-head layer, {TASKS[DISTANCE]}",
            *(_single(encodings, protocol) for protocol in protocols),
        ],
    ]
    lines = [line for line in lines if any(cell != Cell(DASH) for cell in line[1:])]
    return make_table("Main results", ["Question", *map(protocol_title, protocols)], lines)


def _best(state: Reproduction, task: str, protocol: Protocol) -> Cell:
    rows = [row for row in state.table if (row.protocol, row.task) == (protocol, task) and row.accuracy is not None]
    if not rows:
        return Cell(DASH)
    first, *rest = [f"{name(protocol, row.label)} ({percent(row.accuracy)})" for row in rows[:3]]
    guess = f"length only: {percent(rows[0].length_chance)}"
    return Cell(first, (f"then {', '.join(rest)}" if rest else "", guess))


def _largest(state: Reproduction, protocol: Protocol) -> Cell:
    found = largest_drop(state.results.under(protocol).cells)
    if found is None:
        return Cell(DASH)
    cell, value, layer, head = found
    place = f"{TASKS[cell.key.task]}, layer {layer + 1}, head {head + 1}, seed {cell.key.seed}"
    return Cell(f"{points(value)} percentage points, {name(protocol, cell.key.label)}", (place,))


def _single(state: Reproduction, protocol: Protocol) -> Cell:
    cells = [c for c in state.results.under(protocol).cells if c.key.task == DISTANCE and c.deposits()]
    kinds = [{layer.kind for layer in cell.deposits()} for cell in cells]
    able = [found for found in kinds if found != {"no-skill"}]
    single = sum("single-head" in found for found in able)
    return Cell(f"{single} of {len(able)} models with skill") if cells else Cell(DASH)
