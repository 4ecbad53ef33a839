"""MLA's variants on the page: whether its latent attention or the program around it spreads the heads' work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toeplens.ground.words import fixed, percent
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.factors import MEASURES, Values, concentrated, decided, kinds
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import (
    PROTOCOL_NAMES,
    Drawn,
    accuracy_top,
    beside,
    colour,
    interval,
    name,
    protocol_title,
)
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.dots import Series, dots, told_means
from toeplens.studies import CellResult
from toeplens.studies.kit.results import estimated
from toeplens.training.presets import DISTANCE

# what each protocol's models are, in the order of the table: MLA as it is, less and less of its program, RoPE beside it
_ROWS: dict[Protocol, dict[str, str]] = {
    "released": {
        "mla": "MLA in its program",
        "mla/input": "MLA, no input positions",
        "mla/padding-seen": "MLA, padding attended",
        "mla/no-norm": "MLA, no final norm",
        "mla/bare": "MLA, none of the three",
        "mla/encoding": "MLA as the paper has it, in the program",
        "rope/mla-program": "RoPE in MLA’s program",
        "rope/mla-program-bare": "RoPE in MLA’s program, no input positions",
        "rope": "RoPE in its own program (with sinusoid)",
        "rope-alone": "RoPE in its own program, no sinusoid",
    },
    "paper": {
        "mla": "MLA",
        "mla/input": "MLA, positions added at the input",
        "mla/no-norm": "MLA, no final norm",
        "mla/encoding": "MLA as the program has it",
        "rope": "RoPE",
        "rope-absolute": "RoPE + sinusoid",
    },
}


def _effective(cell: CellResult) -> float:
    found = concentrated(cell)
    return found[1].effective_heads if found else float("nan")


@dataclass(frozen=True)
class _Shown:
    """A figure of a model: how it is told, and on which axis."""

    title: str
    of: Callable[[CellResult], float]
    scale: float
    axis: str


_SHOWN = (
    _Shown("share of the skill that one head carries", MEASURES["peak"], 100, "share of the skill, per cent"),
    _Shown("effective heads of that layer", _effective, 1, "effective heads"),
    _Shown("test accuracy", MEASURES["accuracy"], 100, "test accuracy, per cent"),
)


@dataclass(frozen=True)
class VariantRow:
    """A line of the table: figures in words, and kinds with how many seeds have each."""

    label: str
    title: str
    accuracy: str
    peak: str
    heads: str
    kinds: list[tuple[str, str]]


def figure(state: Reproduction) -> Block:
    """How concentrated each variant is."""

    def draw(protocol: Protocol, shown: _Shown) -> Drawn | None:
        found = _models(state, protocol)
        if not found:
            return None
        values = [_values(cells, shown) for _, _, cells in found]
        texts = [text for _, text, _ in found]
        series = [Series("", "", "circle", values, [colour(label) for label, _, _ in found])]
        biggest = max((shown.scale * v for one in values for v in one.values()), default=1.0)
        end = 100 * accuracy_top(state, DISTANCE) if shown.title == "test accuracy" else biggest
        drawn = dots(texts, series, shown.axis, scale=shown.scale, span=(0, 1.05 * end))
        return drawn, f"{shown.axis}, mean over seeds: {told_means(texts, values, shown.scale)}."

    views = [
        beside(state, lambda protocol, shown=shown: draw(protocol, shown), shown.title.capitalize()) for shown in _SHOWN
    ]
    caption = (
        "Task 1. MLA, MLA with parts of its program taken away, and RoPE put into MLA’s program. Rings are seeds, the "
        "bar is the 95% interval of the mean. If MLA’s latent attention spread the work, MLA would be low everywhere; "
        "if its program did, RoPE in that program would be low too. Models without skill have no share."
    )
    return Block("mla", "MLA, and RoPE in MLA’s program", caption, views)


def tables(state: Reproduction) -> list[tuple[str, list[VariantRow]]]:
    """Accuracy and deposit of each variant, a table a protocol."""
    found = [(PROTOCOL_NAMES[protocol], _models(state, protocol)) for protocol in state.plan.protocols]
    return [(name_, [_row(*model) for model in models]) for name_, models in found if models]


def _row(label: str, text: str, cells: list[CellResult]) -> VariantRow:
    peak, heads, accuracy = (estimated(_values(cells, shown)) for shown in _SHOWN)
    many = fixed(heads.value if heads else None, 1)
    counted = [(kind, f"{n}/{len(cells)}" if len(cells) > 1 else "") for kind, n in kinds(cells).items()]
    shown = (interval(accuracy, sign=False), interval(peak, sign=False), many)
    return VariantRow(label, text, *shown, counted)


def _models(state: Reproduction, protocol: Protocol) -> list[tuple[str, str, list[CellResult]]]:
    """Label, name and models of what is compared; nothing where there is no variant."""
    under = state.results.under(protocol)
    found = [(label, text, under.of(DISTANCE, label)) for label, text in _ROWS[protocol].items()]
    found = [(label, text, cells) for label, text, cells in found if cells]
    return found if any(Label.parse(label).variant for label, _, _ in found) else []


def _values(cells: list[CellResult], shown: _Shown) -> Values:
    values = {cell.key.seed: shown.of(cell) for cell in cells}
    return {seed: value for seed, value in values.items() if value == value}  # NaN is no value


def whose(state: Reproduction) -> list[str]:
    """Whether MLA's diffuse pattern comes from MLA or from its program: two paired differences, in sentences."""
    found = []
    for protocol in state.plan.protocols:
        under = state.results.under(protocol)
        of = {label: _values(cells, _SHOWN[0]) for label in _ROWS[protocol] if (cells := under.of(DISTANCE, label))}
        steps = []
        if protocol == "released":
            steps += [("rope", "rope/mla-program", f"putting {name('released', 'rope')} into MLA’s program")]
            steps += [("rope/mla-program", "mla", "putting MLA in RoPE’s place inside that program")]
            steps += [("mla", "mla/bare", "taking input positions, padding mask and final norm away from MLA")]
        else:
            steps += [("rope", "mla", "putting MLA in RoPE’s place in the same decoder")]
        said = [f"{what} {text}" for first, second, what in steps if (text := _changed(of, first, second))]
        if said:
            lead = f"{protocol_title(protocol)}, share of the skill that one head carries: "
            found.append(f"{lead}{'; '.join(said)}.")
    return found


def _changed(of: dict[str, Values], first: str, second: str) -> str:
    if first not in of or second not in of:
        return ""
    start, end = of[first], of[second]
    change = estimated({seed: end[seed] - start[seed] for seed in start.keys() & end.keys()})
    levels = (estimated(start), estimated(end))
    if change is None or None in levels:
        return ""
    before, after = (percent(level.value if level else None) for level in levels)
    verdict = ("lowers it" if change.value < 0 else "raises it") if decided(change) else "changes it (not decided)"
    return f"{verdict} from {before} to {after}, by {interval(change)} points"
