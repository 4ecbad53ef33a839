"""The parts of the reproduction, the cells each needs, and its scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toeplens.ground import InputError, choose
from toeplens.ground.words import listed
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import BASES, PARTIAL, RUNGS, Label, switches_of, title
from toeplens.papers.deposit.labels import TASK as LADDER_TASK
from toeplens.studies.kit.claims import read_yaml
from toeplens.training.presets import COUNT, DISTANCE, PRESETS, Preset

Spot = tuple[str, str, str]  # protocol, task, label


@dataclass(frozen=True)
class Scale(Preset):
    """A preset of the reproduction.

    labels         the encodings of each task
    partial_heads  the numbers of RoPE heads of Fig. 5
    first_seed     first seed of weights, order and data; others follow
    most_seeds     maximum number of seeds by task or label, or by place, which takes precedence (default: no limit)
    longer         maximum number of epochs by place, for slow learners; the number of warm-up steps stays the same
    rungs          scale variants
    watched        whether heads are probed during training; at the paper's size a probe takes minutes on a CPU
    """

    labels: dict[str, tuple[str, ...]]
    partial_heads: dict[str, tuple[int, ...]]
    ablation_examples: int
    first_seed: int = 42
    most_seeds: Mapping[str | Spot, int] = field(default_factory=dict)
    longer: Mapping[Spot, int] = field(default_factory=dict)
    rungs: tuple[str, ...] = ()
    watched: bool = True

    def seeds_at(self, spot: Spot, seeds: int) -> int:
        """The number of seeds of a place, out of ``seeds``."""
        own = self.most_seeds.get(spot)
        return min(seeds, own if own is not None else min(self.most_seeds.get(name, seeds) for name in spot[1:]))

    def told(self, seeds: int) -> str:
        """The number of seeds per cell, in words."""
        return f"{'up to ' if self.fewer(seeds) else ''}{seeds} seed{'s' if seeds != 1 else ''}"

    def fewer(self, seeds: int) -> str:
        """The cells with fewer seeds than ``seeds``, in words; empty if there are none."""
        of_each: dict[int, list[str]] = {}
        alone = []
        for name, most in self.most_seeds.items():
            if isinstance(name, tuple):
                protocol, task, label = name
                where = f"Task {1 + (task == COUNT)}, {protocol}"
                if min(most, seeds) != min(self.most_seeds.get(each, seeds) for each in (task, label)):
                    alone.append(f"{min(most, seeds)} of {title(label)} ({where})")
            elif most < seeds:
                of_each.setdefault(most, []).append("Task 2" if name == COUNT else title(name))
        told = "; ".join(f"{most} seeds of {listed(names)}" for most, names in of_each.items())
        return f"{told}; except {listed(alone)}" if told and alone else told


_DATA = read_yaml(Path(__file__).with_name("questions.yaml"))


def _scale(name: str, options: dict[str, Any]) -> Scale:
    """A scale of the YAML file, where lists stand for tuples and ``a b c`` for a place."""
    for field_ in ("labels", "partial_heads"):
        options[field_] = {task: tuple(each) for task, each in options[field_].items()}
    for field_ in ("most_seeds", "longer"):
        known = options.get(field_, {}).items()
        options[field_] = {tuple(key.split()) if " " in key else key: value for key, value in known}
    options["rungs"] = tuple(RUNGS) if "rungs" in options else ()
    return Scale(**vars(PRESETS[name]), **options)


# the sizes of a reproduction, by name
SCALES: dict[str, Scale] = {name: _scale(name, options) for name, options in _DATA["scales"].items()}
Place = tuple[str, str]  # task, label


@dataclass(frozen=True)
class Part:
    """A question, and the cells that answer it.

    about     short description
    places    the cells of a protocol at a scale
    measures  measures of the trained models in addition to the head ablation (`toeplens.engine.MEASURES`)
    """

    name: str
    about: str
    places: Callable[[Scale, Protocol], list[Place]]
    measures: tuple[str, ...] = ()


def _rope_on(heads: int, variant: str = "") -> str:
    return str(Label(PARTIAL, heads, variant))


def _core(scale: Scale, protocol: Protocol) -> list[Place]:
    """Table 1, learning curves and heads; the released RoPE has a sinusoid, so RoPE without one is added there."""
    swap = {"rope-absolute": "rope-alone"} if protocol == "released" else {}
    places = []
    for task in (DISTANCE, COUNT):
        places += [(task, swap.get(label, label)) for label in scale.labels[task]]
        places += [(task, _rope_on(count)) for count in scale.partial_heads[task]]
    return places


def _others(scale: Scale, protocol: Protocol) -> list[Place]:
    every = ("rope", "nope", "mla", "alibi", "relative", "absolute", "random")
    return [
        *((DISTANCE, label) for label in ("random", "rope/dropout", "relative")),
        *((COUNT, label) for label in every),
    ]


def _partial(scale: Scale, protocol: Protocol) -> list[Place]:
    heads, layers = scale.model["num_heads"], scale.model["num_layers"]
    counts = [count for count in range(1, heads) if heads <= 8 or count in (1, 2, 3, 4, 6, 8, 12, 15)]
    few = [count for count in counts if count <= 2]
    return [
        *((DISTANCE, _rope_on(count)) for count in counts),
        *((DISTANCE, _rope_on(count, "random")) for count in few),
        *((DISTANCE, f"rope/layer-{layer}") for layer in range(1, layers + 1)),
        *((COUNT, _rope_on(count)) for count in few),
    ]


def _mla(scale: Scale, protocol: Protocol) -> list[Place]:
    variants = ["mla/input", "mla/no-norm"]
    if protocol == "released":
        variants += ["mla/padding-seen", "mla/bare", "mla/encoding", "rope/mla-program", "rope/mla-program-bare"]
    return [(DISTANCE, label) for label in variants]


def _factors(scale: Scale, protocol: Protocol) -> list[Place]:
    """The released code with one switch set as in the paper; Task 2 for Table 1's encodings."""
    if protocol == "paper":
        return []
    places = [(DISTANCE, f"{base}/{switch}") for base in FACTOR_BASES for switch in switches_of(base)]
    return places + [(COUNT, f"{base}/{switch}") for base in ("rope", "mla", "nope") for switch in switches_of(base)]


def _factors_back(scale: Scale, protocol: Protocol) -> list[Place]:
    """The paper with one switch set as in the released code, except padding, as its sequences have none."""
    if protocol == "released":
        return []
    return [
        (DISTANCE, f"{base}/{switch}") for base in FACTOR_BASES for switch in switches_of(base) if switch != "padding"
    ]


def _mechanism(scale: Scale, protocol: Protocol) -> list[Place]:
    """Every plain encoding of the core on Task 1, which needs position."""
    return [(task, label) for task, label in _core(scale, protocol) if task == DISTANCE and Label.parse(label).plain]


def _ladder(scale: Scale, protocol: Protocol) -> list[Place]:
    """Some encodings at the unchanged scale, and with one factor changed at a time."""
    rungs = ["", *(f"/{rung}" for rung in scale.rungs)] if scale.rungs else []
    return [(LADDER_TASK, f"{base}{rung}") for rung in rungs for base in BASES[protocol]]


FACTOR_BASES = ("nope", "relative", "rope", "mla")
CORE = "core"
_PLACES = (_core, _others, _partial, _mla, _factors, _factors_back, _ladder, _mechanism)
# the parts of a reproduction, by name
PARTS: dict[str, Part] = {
    name: Part(name, each["about"], places, tuple(each.get("measures", ())))
    for (name, each), places in zip(_DATA["parts"].items(), _PLACES, strict=True)
}


def measures_of(scale: Scale, protocol: Protocol, parts: Sequence[str], place: Place) -> tuple[str, ...]:
    """The measures of a cell in the chosen parts."""
    return tuple(
        measure
        for name in chosen_parts(parts)
        for measure in PARTS[name].measures
        if place in PARTS[name].places(scale, protocol)
    )


def chosen_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Unique parts by name in the order of `PARTS`; ``all`` selects all."""
    if not names:
        raise InputError(f"part must be one of {', '.join(PARTS)}, all, got none.")
    for name in names:
        choose("part", name, (*PARTS, "all"))
    return tuple(name for name in PARTS if name in names or "all" in names)


def places_of(scale: Scale, protocol: Protocol, parts: Sequence[str]) -> dict[str, list[Place]]:
    """The cells of each part without those of earlier parts, so each cell appears once."""
    known: set[Place] = set()
    found = {}
    for name in chosen_parts(parts):
        places = [place for place in PARTS[name].places(scale, protocol) if place not in known]
        found[name] = list(dict.fromkeys(places))
        known |= set(places)
    return found
