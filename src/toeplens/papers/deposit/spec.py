"""The grid of the reproduction: labels with their model fields and display names; its parts, cells and scales.

``rope`` is an encoding. ``rope/readout`` is its model with one switch set as in the other protocol. Other words after
the slash are variants (`VARIANTS`) or scale variants (`SCALE_VARIANTS`). ``partial-2`` is RoPE on the first two heads,
``partial-2/random`` on two random heads, ``rope/layer-1`` in the first layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from toeplens.model import Protocol, protocol_switches
from toeplens.training.presets import COUNT, DISTANCE, PRESETS, PROTOCOLS, Preset, task_sizes
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.files import read_yaml
from toeplens.utils.formatting import join_list, plural

Fields = dict[str, Any]
PARTIAL = "partial"

_DATA = read_yaml(Path(__file__).with_name("spec.yaml"))
TITLES: dict[str, str] = _DATA["titles"]
SWITCHES: dict[str, tuple[str, ...]] = {name: tuple(entry["fields"]) for name, entry in _DATA["switches"].items()}
SWITCH_TITLES = {name: (entry["paper"], entry["released"]) for name, entry in _DATA["switches"].items()}
_MLA_RELEASED = {k: v for k, v in protocol_switches("released", "mla").items() if k not in ("causal", "dropout_on")}
# variants that are not a single difference between the protocols: title and model fields
VARIANTS: dict[str, tuple[str, Fields]] = {
    name: (entry["title"], (_MLA_RELEASED if "as" in entry else {}) | entry["fields"])
    for name, entry in _DATA["variants"].items()
}


@dataclass(frozen=True)
class EncodingLabel:
    """A parsed label.

    base     the encoding's label (a key of `TITLES`), or `PARTIAL`
    heads    number of heads with RoPE; None for an encoding on all heads
    variant  the part after the slash; empty for a plain encoding
    """

    base: str
    heads: int | None = None
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> EncodingLabel:
        """Parse a label; the inverse of `str`."""
        base, _, variant = text.partition("/")
        family, _, heads = base.partition("-")
        return cls(PARTIAL, int(heads), variant) if family == PARTIAL else cls(base, None, variant)

    def __str__(self) -> str:
        base = self.base if self.heads is None else f"{self.base}-{self.heads}"
        return f"{base}/{self.variant}" if self.variant else base

    @property
    def is_plain(self) -> bool:
        """Whether it is an encoding of the protocol, unchanged and on all heads."""
        return self.heads is None and not self.variant

    @property
    def layer(self) -> int | None:
        """The only layer (from 1) with RoPE; None if all layers have the encoding."""
        kind, _, number = self.variant.partition("-")
        return int(number) if kind == "layer" else None


def title(label: str, protocol: Protocol | None = None) -> str:
    """The display name of a label; a switch's setting depends on the protocol."""
    parsed = EncodingLabel.parse(label)
    if parsed.heads is not None:
        which = " random" if parsed.variant == "random" else ""
        return f"RoPE on {parsed.heads}{which} head{'' if parsed.heads == 1 else 's'}"
    if parsed.layer is not None:
        return f"RoPE in layer {parsed.layer} only"
    base = TITLES[parsed.base]
    return base if parsed.is_plain else f"{base}, {variant_title(parsed.variant, protocol)}"


def variant_title(variant: str, protocol: Protocol | None = None) -> str:
    """The name of a variant; for a switch, the setting of the other protocol."""
    if variant in SWITCHES:
        paper, released = SWITCH_TITLES[variant]
        return f"{paper} / {released}" if protocol is None else released if protocol == "paper" else paper
    return SCALE_VARIANTS[variant].title if variant in SCALE_VARIANTS else VARIANTS[variant][0]


def encoding_of(protocol: Protocol, label: str) -> Fields:
    """The model fields of an encoding's label, which depend on the protocol."""
    fields = _DATA["encodings"][protocol]
    return fields[choose("label", label, fields)]


def model_fields(protocol: Protocol, label: str, sizes: Fields, seed: int) -> Fields:
    """All fields of a label's model: sizes, encoding, and all switches if the label changes one."""
    parsed = EncodingLabel.parse(label)
    # the papers' scale of q . k for all labels, as in the recorded runs (docs/decisions/07-encoding-contract.md)
    common: Fields = {"protocol": protocol, "attention_scale": None, **sizes}
    if parsed.heads is not None:
        heads = random_heads(sizes["num_heads"], parsed.heads, seed) if parsed.variant == "random" else parsed.heads
        return {**common, "encoding": "partial-rope", "encoding_options": {"heads": heads}}
    if parsed.layer is not None:
        return {**common, "encoding": "partial-rope", "encoding_options": {"layers": [parsed.layer - 1]}}
    fields = {**common, **encoding_of(protocol, parsed.base)}
    if protocol == "released" and parsed.base == "mla":
        head_dim = sizes["d_model"] // sizes["num_heads"]
        fields["encoding_options"] = fields["encoding_options"] | {"rotary_dim": head_dim}
    if parsed.variant in VARIANTS:
        return fields | VARIANTS[parsed.variant][1]
    if parsed.variant and parsed.variant not in SCALE_VARIANTS:  # a scale variant changes the scale, not these fields
        choose("variant", parsed.variant, SWITCHES)
        other = _with_defaults(model_fields(other_protocol(protocol), parsed.base, sizes, seed))
        fields = _with_defaults(fields) | {name: other[name] for name in SWITCHES[parsed.variant]}
    return fields


def switches_of(base: str) -> list[str]:
    """The switches in which the two protocols differ for an encoding."""
    sizes: Fields = {"d_model": 32, "num_heads": 2}
    paper, released = (_with_defaults(model_fields(protocol, base, sizes, 0)) for protocol in PROTOCOLS)
    return [switch for switch, names in SWITCHES.items() if not names or any(paper[n] != released[n] for n in names)]


def random_heads(count: int, size: int, seed: int) -> list[int]:
    """``size`` of ``count`` heads, random by seed, sorted."""
    if not 0 <= size <= count:
        raise invalid("heads", f"be from 0 to {count}", size)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, size))))
    return sorted(int(head) for head in rng.permutation(count)[:size])


def other_protocol(protocol: Protocol) -> Protocol:
    """The other of the two protocols."""
    return "released" if protocol == "paper" else "paper"


def _with_defaults(fields: Fields) -> Fields:
    """The fields, with the protocol's default of every switch."""
    return {"encoding_options": {}} | protocol_switches(fields["protocol"], fields["encoding"]) | fields


PresetT = TypeVar("PresetT", bound=Preset)


@dataclass(frozen=True)
class ScaleVariant:
    """One change of a scale (a scale variant).

    axis       the changed quantity
    value      its value, in words
    model, optimiser  fields of the model and of the training that it sets
    tokens     sequence length
    distance   largest distance of the two words, under the paper protocol only
    epochs     maximum number of epochs
    """

    axis: str
    value: str
    model: dict[str, Any] = field(default_factory=dict)
    optimiser: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    distance: int | None = None
    epochs: int | None = None

    @property
    def title(self) -> str:
        """The display name."""
        return f"{self.axis}: {self.value}"

    def apply_to(self, scale: PresetT) -> PresetT:
        """The scale with this change."""
        sizes = scale.tasks
        if self.tokens is not None:
            sizes = task_sizes(sizes, self.tokens)
        if self.distance is not None:
            paper = sizes[DISTANCE].paper | {"max_distance": self.distance}
            sizes = sizes | {DISTANCE: replace(sizes[DISTANCE], paper=paper)}
        if self.epochs is not None:
            sizes = {task: replace(size, epochs=self.epochs) for task, size in sizes.items()}
        model = scale.model | self.model | ({} if self.tokens is None else {"max_len": self.tokens})
        return replace(scale, model=model, optimiser=scale.optimiser | self.optimiser, tasks=sizes)


SCALE_VARIANTS: dict[str, ScaleVariant] = {name: ScaleVariant(**entry) for name, entry in _DATA["rungs"].items()}
SWEEP_BASES: dict[Protocol, tuple[str, ...]] = {
    "paper": ("rope", "mla", "absolute", "nope"),
    "released": ("rope-alone", "rope"),
}
SWEEP_TASK = DISTANCE


# ---- the parts of the reproduction, the cells each needs, and its scales ---------------------------------------------


GroupKey = tuple[str, str, str]  # protocol, task, label


@dataclass(frozen=True)
class ReproductionScale(Preset):
    """A preset of the reproduction.

    labels          the encodings of each task; those of ``PROTOCOL TASK``, if there are, under one protocol
    partial_heads   the numbers of RoPE heads of Fig. 5
    first_seed      first seed of weights, order and data; others follow
    most_seeds      maximum number of seeds by task or label, or by place, which takes precedence (default: no limit)
    longer          maximum number of epochs by place, for slow learners; the number of warm-up steps stays the same
    scale_variants  variants of one size
    watched         whether heads are probed during training; at the paper's size a probe takes minutes on a CPU
    """

    labels: dict[str, tuple[str, ...]]
    partial_heads: dict[str, tuple[int, ...]]
    ablation_examples: int
    first_seed: int = 42
    most_seeds: Mapping[str | GroupKey, int] = field(default_factory=dict)
    longer: Mapping[GroupKey, int] = field(default_factory=dict)
    scale_variants: tuple[str, ...] = ()
    watched: bool = True

    def num_seeds(self, group: GroupKey, seeds: int) -> int:
        """The number of seeds of a place, out of ``seeds``."""
        limit = self.most_seeds.get(group)
        return min(seeds, limit if limit is not None else min(self.most_seeds.get(name, seeds) for name in group[1:]))

    def seeds_text(self, seeds: int) -> str:
        """The number of seeds per cell, in words."""
        return f"{'up to ' if self.fewer_seeds_text(seeds) else ''}{plural(seeds, 'seed')}"

    def fewer_seeds_text(self, seeds: int) -> str:
        """The cells with fewer seeds than ``seeds``, in words; empty if there are none."""
        by_limit: dict[int, list[str]] = {}
        exceptions = []
        for name, limit in self.most_seeds.items():
            if isinstance(name, tuple):
                protocol, task, label = name
                where = f"Task {1 + (task == COUNT)}, {protocol}"
                if min(limit, seeds) != min(self.most_seeds.get(key, seeds) for key in (task, label)):
                    exceptions.append(f"{min(limit, seeds)} of {title(label)} ({where})")
            elif limit < seeds:
                by_limit.setdefault(limit, []).append("Task 2" if name == COUNT else title(name))
        text = "; ".join(f"{limit} seeds of {join_list(names)}" for limit, names in by_limit.items())
        return f"{text}; except {join_list(exceptions)}" if text and exceptions else text


def _scale(name: str, options: dict[str, Any]) -> ReproductionScale:
    """A scale of the YAML file, where lists stand for tuples and ``a b c`` for a place."""
    for field_ in ("labels", "partial_heads"):
        options[field_] = {task: tuple(values) for task, values in options[field_].items()}
    for field_ in ("most_seeds", "longer"):
        items = options.get(field_, {}).items()
        options[field_] = {tuple(key.split()) if " " in key else key: value for key, value in items}
    options["scale_variants"] = tuple(options.pop("rungs", ()))
    return ReproductionScale(**vars(PRESETS[name]), **options)


# the sizes of a reproduction, by name
SCALES: dict[str, ReproductionScale] = {name: _scale(name, options) for name, options in _DATA["scales"].items()}
TaskLabel = tuple[str, str]  # task, label


@dataclass(frozen=True)
class StudyPart:
    """A question, and the cells that answer it.

    about        short description
    task_labels  the cells of a protocol at a scale
    measures     measures of the trained models in addition to the head ablation (`toeplens.engine.MEASURES`)
    """

    name: str
    about: str
    task_labels: Callable[[ReproductionScale, Protocol], list[TaskLabel]]
    measures: tuple[str, ...] = ()


def _partial_label(heads: int, variant: str = "") -> str:
    return str(EncodingLabel(PARTIAL, heads, variant))


def _core(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    """Table 1, learning curves and heads; the released RoPE has a sinusoid, so RoPE without one is added there."""
    swap = {"rope-absolute": "rope-alone"} if protocol == "released" else {}
    task_labels = []
    for task in (DISTANCE, COUNT):
        labels = scale.labels.get(f"{protocol} {task}", scale.labels[task])
        task_labels += [(task, swap.get(label, label)) for label in labels]
        task_labels += [(task, _partial_label(count)) for count in scale.partial_heads[task]]
    return task_labels


def _other_encodings(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    on_distance = ("random", "rope/dropout", "relative")
    on_counting = ("rope", "nope", "mla", "alibi", "relative", "absolute", "random")
    return [*((DISTANCE, label) for label in on_distance), *((COUNT, label) for label in on_counting)]


def _partial(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    heads, layers = scale.model["num_heads"], scale.model["num_layers"]
    counts = [count for count in range(1, heads) if heads <= 8 or count in (1, 2, 3, 4, 6, 8, 12, 15)]
    small_counts = [count for count in counts if count <= 2]
    return [
        *((DISTANCE, _partial_label(count)) for count in counts),
        *((DISTANCE, _partial_label(count, "random")) for count in small_counts),
        *((DISTANCE, f"rope/layer-{layer}") for layer in range(1, layers + 1)),
        *((COUNT, _partial_label(count)) for count in small_counts),
    ]


def _mla(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    variants = ["mla/input", "mla/no-norm"]
    if protocol == "released":
        variants += ["mla/padding-seen", "mla/bare", "mla/encoding", "rope/mla-program", "rope/mla-program-bare"]
    return [(DISTANCE, label) for label in variants]


def _switch_labels(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    """The released code with one switch set as in the paper; Task 2 for Table 1's encodings."""
    if protocol == "paper":
        return []
    bases = [*((DISTANCE, base) for base in SWITCH_BASES), *((COUNT, base) for base in ("rope", "mla", "nope"))]
    return [(task, f"{base}/{switch}") for task, base in bases for switch in switches_of(base)]


def _switch_back_labels(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    """The paper with one switch set as in the released code, except padding, as its sequences have none."""
    if protocol == "released":
        return []
    labels = ((base, switch) for base in SWITCH_BASES for switch in switches_of(base))
    return [(DISTANCE, f"{base}/{switch}") for base, switch in labels if switch != "padding"]


def _mechanism(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    """Every plain encoding of the core on Task 1, which needs position."""
    core = (label for task, label in _core(scale, protocol) if task == DISTANCE)
    return [(DISTANCE, label) for label in core if EncodingLabel.parse(label).is_plain]


def _scale_sweep(scale: ReproductionScale, protocol: Protocol) -> list[TaskLabel]:
    """Some encodings at the unchanged scale, and with one factor changed at a time."""
    variants = [name for name in scale.scale_variants if protocol == "paper" or not SCALE_VARIANTS[name].distance]
    suffixes = ["", *(f"/{variant}" for variant in variants)] if variants else []
    return [(SWEEP_TASK, f"{base}{suffix}") for suffix in suffixes for base in SWEEP_BASES[protocol]]


SWITCH_BASES = ("nope", "relative", "rope", "mla")
CORE = "core"
_PART_LABELS = (_core, _other_encodings, _partial, _mla, _switch_labels, _switch_back_labels, _scale_sweep, _mechanism)
# the parts of a reproduction, by name
PARTS: dict[str, StudyPart] = {
    name: StudyPart(name, entry["about"], labels, tuple(entry.get("measures", ())))
    for (name, entry), labels in zip(_DATA["parts"].items(), _PART_LABELS, strict=True)
}


def measures_of(
    scale: ReproductionScale, protocol: Protocol, parts: Sequence[str], task_label: TaskLabel
) -> tuple[str, ...]:
    """The measures of a cell in the chosen parts."""
    return tuple(
        measure
        for name in select_parts(parts)
        for measure in PARTS[name].measures
        if task_label in PARTS[name].task_labels(scale, protocol)
    )


def select_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Unique parts by name in the order of `PARTS`; ``all`` selects all."""
    if not names:
        raise InputError(f"part must be one of {', '.join(PARTS)}, all, got none.")
    for name in names:
        choose("part", name, (*PARTS, "all"))
    return tuple(name for name in PARTS if name in names or "all" in names)


def labels_by_part(scale: ReproductionScale, protocol: Protocol, parts: Sequence[str]) -> dict[str, list[TaskLabel]]:
    """The cells of each part without those of earlier parts, so each cell appears once."""
    known: set[TaskLabel] = set()
    by_part = {}
    for name in select_parts(parts):
        task_labels = [task_label for task_label in PARTS[name].task_labels(scale, protocol) if task_label not in known]
        by_part[name] = list(dict.fromkeys(task_labels))
        known |= set(task_labels)
    return by_part
