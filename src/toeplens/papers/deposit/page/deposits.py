"""The figures of the deposit by encoding, with every seed."""

from __future__ import annotations

from toeplens.lens import LayerDeposit
from toeplens.lens.ablation.deposit import PEAK
from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.factors import concentrated
from toeplens.papers.deposit.page import deposit_figures as figures
from toeplens.papers.deposit.page.deposit_figures import Encodings
from toeplens.papers.deposit.page.look import TASKS, interval, name, ordered
from toeplens.papers.deposit.page.parts import protocol_title
from toeplens.report.kit.blocks import Block, Group, Panel, Ramp, View
from toeplens.studies.kit.results import estimated

SHARE = Ramp("0%", "100% of the skill", half=True)


def by_encoding(state: Reproduction) -> Block:
    """Violins of the most that one head carries, and of the effective heads of its layer."""
    found = {(task, p): _encodings(state, task, p) for task in TASKS for p in state.plan.protocols}
    layers = [layer[1] for group in found.values() for _, cells in group for c in cells if (layer := concentrated(c))]
    peak = max([1.0, *(layer.peak for layer in layers)]) * 1.05
    heads = max([2.0, *(layer.effective_heads for layer in layers)]) * 1.05
    views = []
    for task, what in TASKS.items():
        shares, spreads = [], []
        for protocol in state.plan.protocols:
            encodings = found[task, protocol]
            if encodings:
                title = protocol_title(protocol)
                drawn = figures.by_encoding(encodings, _peak, "share of the skill", top=peak, percent=True, mark=PEAK)
                shares.append(Panel(title, drawn, _words("Share of the skill that one head carries", encodings)))
                drawn = figures.by_encoding(encodings, _heads, "effective heads", top=heads)
                spreads.append(Panel(title, drawn, _words("Effective heads of that layer", encodings, heads=True)))
        views.append(View(f"{what}: share of the skill that one head carries", [Group("", shares)]))
        views.append(View(f"{what}: effective heads of that layer", [Group("", spreads)]))
    caption = (
        "Of each model the layer whose first head carries most. A point is a seed, the bar their mean, the violin "
        "their density (with few seeds, trust the points). Share: what is lost when that head is silenced, as a "
        f"share of the accuracy over chance; the dashed line, {PEAK:.0%}, is what a layer needs to count as "
        "single-head. Effective heads: how many equal heads would make the sum of that layer’s losses."
    )
    return Block("deposit-encodings", "Deposit by encoding", caption, views)


def by_layer(state: Reproduction) -> Block:
    """Heat maps of encoding by layer, a row a seed."""
    views = []
    for task in TASKS:
        panels = []
        for protocol in state.plan.protocols:
            encodings = _encodings(state, task, protocol)
            if encodings:
                words = f"Heat map, encodings by layer, a row a seed. Most concentrated layer: {_where(encodings)}."
                panels.append(Panel(protocol_title(protocol), figures.by_layer(encodings), words))
        views.append(View(TASKS[task], [Group("", panels)]))
    caption = (
        "The share of the skill that the first head of each layer carries; a thin row is a seed, in order, so that "
        "rows of one encoding that look alike are a deposit that comes back. Rows without colour: models without skill."
    )
    return Block("deposit-layers", "In which layer the deposit is", caption, views, ramp=SHARE)


def _encodings(state: Reproduction, task: str, protocol: Protocol) -> Encodings:
    under = state.results.under(protocol)
    found = (
        (label, [cell for cell in under.of(task, label) if cell.deposits()]) for label in ordered(under.labels(task))
    )
    return [(label, cells) for label, cells in found if cells]


def _peak(layer: LayerDeposit) -> float:
    return layer.peak


def _heads(layer: LayerDeposit) -> float:
    return layer.effective_heads


def _words(what: str, encodings: Encodings, *, heads: bool = False) -> str:
    parts = []
    for label, cells in encodings:
        layers = [layer[1] for cell in cells if (layer := concentrated(cell))]
        text = "no skill"
        if layers and heads:
            text = f"{sum(map(_heads, layers)) / len(layers):.1f}"
        elif layers:
            mean = estimated({index: layer.peak for index, layer in enumerate(layers)})
            text = f"{interval(mean, sign=False)} per cent"
        parts.append(f"{name(cells[0].key.protocol, label)} {text}")
    return f"{what}, mean over seeds: {'; '.join(parts)}."


def _where(encodings: Encodings) -> str:
    parts = []
    for label, cells in encodings:
        places = [str(layer[0] + 1) for cell in cells if (layer := concentrated(cell))]
        parts.append(f"{name(cells[0].key.protocol, label)} {', '.join(places) or 'no skill'}")
    return "; ".join(parts)
