"""The grid of the reproduction: labels with their model fields and display names; its parts, cells and scales.

``rope`` is an encoding. ``rope/readout`` is its model with one switch set as in the other protocol. Other words after
the slash are variants (`VARIANTS`) or scale variants (`RUNGS`). ``partial-2`` is RoPE on the first two heads,
``partial-2/random`` on two random heads, ``rope/layer-1`` in the first layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from toeplens.ground import InputError, choose, invalid
from toeplens.ground.files import read_yaml
from toeplens.ground.words import listed
from toeplens.model import Protocol, protocol_switches
from toeplens.training.presets import COUNT, DISTANCE, PRESETS, PROTOCOLS, Preset, task_sizes

Fields = dict[str, Any]
PARTIAL = "partial"

_DATA = read_yaml(Path(__file__).with_name("spec.yaml"))
TITLES: dict[str, str] = _DATA["titles"]
SWITCHES: dict[str, tuple[str, ...]] = {name: tuple(each["fields"]) for name, each in _DATA["switches"].items()}
SWITCH_TITLES = {name: (each["paper"], each["released"]) for name, each in _DATA["switches"].items()}
_MLA_PROGRAM = {
    key: value for key, value in protocol_switches("released", "mla").items() if key not in ("causal", "dropout_on")
}
# variants that are not a single difference between the protocols: title and model fields
VARIANTS: dict[str, tuple[str, Fields]] = {
    name: (each["title"], (_MLA_PROGRAM if "as" in each else {}) | each["fields"])
    for name, each in _DATA["variants"].items()
}


@dataclass(frozen=True)
class Label:
    """A parsed label.

    base     the encoding's label (a key of `TITLES`), or `PARTIAL`
    heads    number of heads with RoPE; None for an encoding on all heads
    variant  the part after the slash; empty for a plain encoding
    """

    base: str
    heads: int | None = None
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Label:
        """Parse a label; the inverse of `str`."""
        base, _, variant = text.partition("/")
        family, _, heads = base.partition("-")
        return cls(PARTIAL, int(heads), variant) if family == PARTIAL else cls(base, None, variant)

    def __str__(self) -> str:
        base = self.base if self.heads is None else f"{self.base}-{self.heads}"
        return f"{base}/{self.variant}" if self.variant else base

    @property
    def plain(self) -> bool:
        """Whether it is an encoding of the protocol, unchanged and on all heads."""
        return self.heads is None and not self.variant

    @property
    def layer(self) -> int | None:
        """The only layer (from 1) with RoPE; None if all layers have the encoding."""
        kind, _, number = self.variant.partition("-")
        return int(number) if kind == "layer" else None


def title(label: str, protocol: Protocol | None = None) -> str:
    """The display name of a label; a switch's setting depends on the protocol."""
    at = Label.parse(label)
    if at.heads is not None:
        which = " random" if at.variant == "random" else ""
        return f"RoPE on {at.heads}{which} head{'' if at.heads == 1 else 's'}"
    if at.layer is not None:
        return f"RoPE in layer {at.layer} only"
    return TITLES[at.base] if at.plain else f"{TITLES[at.base]}, {variant_title(at.variant, protocol)}"


def variant_title(variant: str, protocol: Protocol | None = None) -> str:
    """The name of a variant; for a switch, the setting of the other protocol."""
    if variant in SWITCHES:
        paper, released = SWITCH_TITLES[variant]
        return f"{paper} / {released}" if protocol is None else released if protocol == "paper" else paper
    return RUNGS[variant].title if variant in RUNGS else VARIANTS[variant][0]


def encoding_of(protocol: Protocol, label: str) -> Fields:
    """The model fields of an encoding's label, which depend on the protocol."""
    fields = _DATA["encodings"][protocol]
    return fields[choose("label", label, fields)]


def model_fields(protocol: Protocol, label: str, sizes: Fields, seed: int) -> Fields:
    """All fields of a label's model: sizes, encoding, and all switches if the label changes one."""
    at = Label.parse(label)
    # the papers' scale of q . k for all labels, as in the recorded runs (docs/decisions/07-encoding-contract.md)
    common: Fields = {"protocol": protocol, "attention_scale": None, **sizes}
    if at.heads is not None:
        heads = random_heads(sizes["num_heads"], at.heads, seed) if at.variant == "random" else at.heads
        return {**common, "encoding": "partial-rope", "encoding_options": {"heads": heads}}
    if at.layer is not None:
        return {**common, "encoding": "partial-rope", "encoding_options": {"layers": [at.layer - 1]}}
    fields = {**common, **encoding_of(protocol, at.base)}
    if protocol == "released" and at.base == "mla":
        head_dim = sizes["d_model"] // sizes["num_heads"]
        fields["encoding_options"] = fields["encoding_options"] | {"rotary_dim": head_dim}
    if at.variant in VARIANTS:
        return fields | VARIANTS[at.variant][1]
    if at.variant and at.variant not in RUNGS:  # a scale variant changes the scale, not these fields
        choose("variant", at.variant, SWITCHES)
        other = _written_out(model_fields(other_protocol(protocol), at.base, sizes, seed))
        fields = _written_out(fields) | {name: other[name] for name in SWITCHES[at.variant]}
    return fields


def switches_of(base: str) -> list[str]:
    """The switches in which the two protocols differ for an encoding."""
    sizes: Fields = {"d_model": 32, "num_heads": 2}
    paper, released = (_written_out(model_fields(protocol, base, sizes, 0)) for protocol in PROTOCOLS)
    return [
        switch
        for switch, names in SWITCHES.items()
        if not names or any(paper[name] != released[name] for name in names)
    ]


def random_heads(count: int, chosen: int, seed: int) -> list[int]:
    """``chosen`` of ``count`` heads, random by seed, sorted."""
    if not 0 <= chosen <= count:
        raise invalid("heads", f"be from 0 to {count}", chosen)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, chosen))))
    return sorted(int(head) for head in rng.permutation(count)[:chosen])


def other_protocol(protocol: Protocol) -> Protocol:
    """The other of the two protocols."""
    return "released" if protocol == "paper" else "paper"


def _written_out(fields: Fields) -> Fields:
    """The fields, with the protocol's default of every switch."""
    return {"encoding_options": {}} | protocol_switches(fields["protocol"], fields["encoding"]) | fields


Sized = TypeVar("Sized", bound=Preset)


@dataclass(frozen=True)
class Rung:
    """One change of a scale (a scale variant).

    axis       the changed quantity
    value      its value, in words
    model, optimiser  fields of the model and of the training that it sets
    tokens     sequence length
    epochs     maximum number of epochs
    """

    axis: str
    value: str
    model: dict[str, Any] = field(default_factory=dict)
    optimiser: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    epochs: int | None = None

    @property
    def title(self) -> str:
        """The display name."""
        return f"{self.axis}: {self.value}"

    def applied(self, scale: Sized) -> Sized:
        """The scale with this change."""
        sizes = scale.tasks
        if self.tokens is not None:
            sizes = task_sizes(sizes, self.tokens)
        if self.epochs is not None:
            sizes = {task: replace(size, epochs=self.epochs) for task, size in sizes.items()}
        model = scale.model | self.model | ({} if self.tokens is None else {"max_len": self.tokens})
        return replace(scale, model=model, optimiser=scale.optimiser | self.optimiser, tasks=sizes)


RUNGS: dict[str, Rung] = {name: Rung(**each) for name, each in _DATA["rungs"].items()}
BASES: dict[Protocol, tuple[str, ...]] = {
    "paper": ("rope", "mla", "absolute", "nope"),
    "released": ("rope-alone", "rope"),
}
TASK = DISTANCE


# ---- the parts of the reproduction, the cells each needs, and its scales ---------------------------------------------


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
    return [(TASK, f"{base}{rung}") for rung in rungs for base in BASES[protocol]]


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
