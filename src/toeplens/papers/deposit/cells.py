"""The grid of the reproduction: which encoding under which protocol on which task, as runs."""

from __future__ import annotations

from collections.abc import Sequence

from toeplens.engine import Job
from toeplens.ground import choose
from toeplens.ground.machine import MOST_SEEDS, within
from toeplens.model import Protocol, decoder_config
from toeplens.papers.deposit.labels import TITLES, Label, model_fields, other_protocol, title
from toeplens.papers.deposit.questions import CORE, measures_of, places_of
from toeplens.papers.deposit.scales import SCALES, Scale
from toeplens.studies.kit.cells import Cell
from toeplens.studies.kit.results import Key
from toeplens.training import RunSpec, run_spec
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS, starting_spec


def cell(scale: Scale, protocol: Protocol, task: str, label: str, seed: int, measures: tuple[str, ...] = ()) -> Cell:
    """The run of one place in the grid, and what is measured of it; plain encodings on Task 1 may be watched."""
    at = Label.parse(label)
    data = other_protocol(protocol) if at.variant == "data" else protocol
    start = starting_spec(scale, data, task, at.base, seed)
    sizes = dict(scale.model)
    if (
        scale.name == "paper" and at.base == "mla"
    ):  # Table 4 says "16 heads (8 in fact)"; the program runs 16, 150 epochs
        start["batch_size"] = 1024
        if protocol == "released":
            start["epochs"] = 150
        else:
            sizes["num_heads"] //= 2
    model = decoder_config(**model_fields(protocol, label, sizes, seed))
    skips_zero = data == "released" and task == COUNT and at.base != "mla"
    spec: RunSpec = run_spec(**start | {"model": model, "ignore_label": 0 if skips_zero else None})
    split = "test" if protocol == "paper" else "train+test"
    what = "distance" if task == DISTANCE else "count"
    name = f"{protocol} · {what} · {title(label, protocol)} · seed {seed}"
    watch = scale.watched and task == DISTANCE and label in TITLES
    return Cell(Key(protocol, task, label, seed), Job(spec, name, scale.ablation_examples, split, measures, watch))


def grid(scale_name: str, protocols: Sequence[Protocol], seeds: int, parts: Sequence[str] = (CORE,)) -> list[Cell]:
    """All cells, the most telling first: part by part, seed by seed, Table 1's before the rest."""
    within("seeds", seeds, 1, MOST_SEEDS)
    scale = SCALES[choose("scale", scale_name, SCALES)]
    for protocol in protocols:
        choose("protocol", protocol, PROTOCOLS)
    by_protocol = {protocol: places_of(scale, protocol, parts) for protocol in protocols}
    cells = []
    for part in next(iter(by_protocol.values()), {}):
        places: list[tuple[Protocol, str, str]] = [
            (protocol, task, label)
            for protocol in protocols
            for wanted in (DISTANCE, COUNT)
            for task, label in by_protocol[protocol][part]
            if task == wanted
        ]
        places.sort(key=lambda place: place[2] not in ("rope", "mla", "nope"))
        measures = [measures_of(scale, protocol, parts, (task, label)) for protocol, task, label in places]
        cells += [
            cell(scale, *place, seed, measured)
            for seed in range(42, 42 + seeds)
            for place, measured in zip(places, measures, strict=True)
        ]
    return cells
