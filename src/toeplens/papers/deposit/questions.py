"""What is asked: the parts of the reproduction, which cells each needs, and what is trained at each preset's sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from toeplens.ground import InputError, choose
from toeplens.ground.words import listed
from toeplens.model import Protocol
from toeplens.papers.deposit.labels import BASES, PARTIAL, RUNGS, Label, switches_of, title
from toeplens.papers.deposit.labels import TASK as LADDER_TASK
from toeplens.training.presets import COUNT, DISTANCE, PRESETS, Preset

_CURVES = ("rope", "mla", "nope", "alibi", "relative", "absolute", "rope-absolute")

Spot = tuple[str, str, str]  # protocol, task, label


@dataclass(frozen=True)
class Scale(Preset):
    """A preset as the reproduction runs it.

    labels         the encodings of each task
    partial_heads  the numbers of RoPE heads of Fig. 5
    first_seed     seeds of weights, order and data are this one and those after it
    most_seeds     of the cells of a task or a label, where fewer are recorded than of the others, or of a place, whose
                   own number counts alone; as many as asked for unless given
    longer         most epochs of what needs more than the others to stop learning, by place; its warm-up takes as many
                   steps as theirs
    rungs          of the ladder
    watched        whether heads are watched in training: at the paper's size a look takes minutes on a CPU, more than a
                   short time budget allows
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
        """How many of the seeds that are asked for a place is trained with."""
        own = self.most_seeds.get(spot)
        return min(seeds, own if own is not None else min(self.most_seeds.get(name, seeds) for name in spot[1:]))

    def told(self, seeds: int) -> str:
        """How many seeds its cells are trained with where so many are asked for, in words."""
        return f"{'up to ' if self.fewer(seeds) else ''}{seeds} seed{'s' if seeds != 1 else ''}"

    def fewer(self, seeds: int) -> str:
        """Which cells are trained with fewer seeds than are asked for, in words; nothing where none are."""
        of_each: dict[int, list[str]] = {}
        alone = []
        for name, most in self.most_seeds.items():
            if isinstance(name, tuple):
                protocol, task, label = name
                where = f"Task {1 + (task == COUNT)}, {protocol}"
                if min(most, seeds) != min(self.most_seeds.get(each, seeds) for each in (task, label)):
                    alone.append(f"of {title(label)} ({where}) {min(most, seeds)}")
            elif most < seeds:
                of_each.setdefault(most, []).append("Task 2" if name == COUNT else title(name))
        told = "; ".join(f"{most} seeds of {listed(names)}" for most, names in of_each.items())
        return f"{told}; but {listed(alone)}" if told and alone else told


SMOKE = Scale(
    **vars(PRESETS["smoke"]),
    labels={DISTANCE: ("rope", "nope", "mla", "rope-absolute"), COUNT: ("rope", "nope", "mla")},
    partial_heads={DISTANCE: (1,), COUNT: ()},
    ablation_examples=512,
)

LAPTOP = Scale(
    **vars(PRESETS["laptop"]),
    labels={DISTANCE: _CURVES, COUNT: ("rope", "nope", "mla")},
    partial_heads={DISTANCE: (1, 2), COUNT: ()},
    ablation_examples=2048,
)

DESK = Scale(
    **vars(PRESETS["desk"]),
    labels={DISTANCE: _CURVES, COUNT: ("rope", "nope", "mla", "absolute")},
    partial_heads={DISTANCE: (1, 2), COUNT: ()},
    ablation_examples=384,
    most_seeds={COUNT: 5}
    | {str(Label(PARTIAL, heads)): 5 for heads in (1, 2)}
    | {label: 10 for label in (*_CURVES, "rope-alone") if label != "mla"}
    | {("released", DISTANCE, "absolute"): 30, ("paper", DISTANCE, "relative"): 30}
    | {("paper", DISTANCE, "mla"): 80, ("released", DISTANCE, "mla"): 50, ("paper", DISTANCE, "rope"): 20}
    | {("released", DISTANCE, "rope-alone"): 30}
    | {("paper", DISTANCE, "absolute"): 20, ("paper", DISTANCE, "alibi"): 30}
    | {("released", DISTANCE, str(Label(PARTIAL, heads))): 10 for heads in (1, 2)}
    | {("released", COUNT, "rope"): 15},
    longer={("released", DISTANCE, label): 12 for label in ("alibi", "relative")},
    rungs=tuple(RUNGS),
    first_seed=100,  # 3, 7 and 42 chose its sizes, and what to ask at it
)

PAPER = Scale(
    **vars(PRESETS["paper"]),
    labels={DISTANCE: (*_CURVES, "random"), COUNT: (*_CURVES, "random")},
    partial_heads={DISTANCE: (1, 2, 4, 8), COUNT: (1, 2, 4, 8)},
    ablation_examples=8192,
    watched=False,
)

# the sizes of a reproduction, by name
SCALES: dict[str, Scale] = {scale.name: scale for scale in (SMOKE, LAPTOP, DESK, PAPER)}
Place = tuple[str, str]  # task, label


@dataclass(frozen=True)
class Part:
    """A question, and the cells that answer it.

    about     what it asks, in a few words
    places    the cells of a protocol at a scale
    measures  what is measured of their trained models beside the head ablation (`toeplens.engine.MEASURES`)
    """

    name: str
    about: str
    places: Callable[[Scale, Protocol], list[Place]]
    measures: tuple[str, ...] = ()


def _rope_on(heads: int, variant: str = "") -> str:
    return str(Label(PARTIAL, heads, variant))


def _core(scale: Scale, protocol: Protocol) -> list[Place]:
    """Table 1, the curves and the heads; the released RoPE is RoPE + sinusoid, so there RoPE alone takes its place."""
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
    """The program with one switch set as in the paper; Task 2 for Table 1's encodings."""
    if protocol == "paper":
        return []
    places = [(DISTANCE, f"{base}/{switch}") for base in FACTOR_BASES for switch in switches_of(base)]
    return places + [(COUNT, f"{base}/{switch}") for base in ("rope", "mla", "nope") for switch in switches_of(base)]


def _factors_back(scale: Scale, protocol: Protocol) -> list[Place]:
    """The paper with one switch set as in the program; its texts have no padding, so that switch is left out."""
    if protocol == "released":
        return []
    return [
        (DISTANCE, f"{base}/{switch}") for base in FACTOR_BASES for switch in switches_of(base) if switch != "padding"
    ]


def _mechanism(scale: Scale, protocol: Protocol) -> list[Place]:
    """Every encoding of the core on Task 1, where position is needed."""
    return [(task, label) for task, label in _core(scale, protocol) if task == DISTANCE and Label.parse(label).plain]


def _ladder(scale: Scale, protocol: Protocol) -> list[Place]:
    """Some encodings as the scale has them, and with one thing changed at a time."""
    rungs = ["", *(f"/{rung}" for rung in scale.rungs)] if scale.rungs else []
    return [(LADDER_TASK, f"{base}{rung}") for rung in rungs for base in BASES[protocol]]


FACTOR_BASES = ("nope", "relative", "rope", "mla")
CORE = "core"
# the parts of a reproduction, by name
PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(CORE, "Table 1, the learning curves, and every head silenced", _core),
        Part("others", "the other encodings on counting, a random table, and dropout", _others, ("bias",)),
        Part("partial", "RoPE on some heads, on heads drawn at random, on one layer", _partial),
        Part("mla", "what in MLA's program spreads its heads' work", _mla),
        Part("factors", "from the released program towards the paper, one switch at a time", _factors),
        Part("factors-back", "from the paper back towards the program, one switch at a time", _factors_back),
        Part("ladder", "what a deposit comes with: length, size, learning rate, how long is trained", _ladder),
        Part(
            "mechanism",
            "where the deposit comes from: gradient seeds, positional directions, position taken from single heads",
            _mechanism,
            (
                "position",
                "sets",
                "position-sets",
                "representation",
                "seed",
                "contraction",
                "frequency",
                "extrapolation",
                "circuit",
            ),
        ),
    )
}


def measures_of(scale: Scale, protocol: Protocol, parts: Sequence[str], place: Place) -> tuple[str, ...]:
    """What the chosen parts measure of a cell."""
    return tuple(
        measure
        for name in chosen_parts(parts)
        for measure in PARTS[name].measures
        if place in PARTS[name].places(scale, protocol)
    )


def chosen_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Parts by name, ``all`` for all, in the order of `PARTS`; each once."""
    if not names:
        raise InputError(f"part must be one of {', '.join(PARTS)}, all, got none.")
    for name in names:
        choose("part", name, (*PARTS, "all"))
    return tuple(name for name in PARTS if name in names or "all" in names)


def places_of(scale: Scale, protocol: Protocol, parts: Sequence[str]) -> dict[str, list[Place]]:
    """The cells of each part that no earlier part has, so that all together name every cell once."""
    known: set[Place] = set()
    found = {}
    for name in chosen_parts(parts):
        places = [place for place in PARTS[name].places(scale, protocol) if place not in known]
        found[name] = list(dict.fromkeys(places))
        known |= set(places)
    return found
