"""Labels of the grid: the model fields under either protocol, and the display name.

``rope`` is an encoding. ``rope/readout`` is its model with one switch set as in the other protocol. Other words after
the slash are variants (`VARIANTS`) or scale variants (`RUNGS`). ``partial-2`` is RoPE on the first two heads,
``partial-2/random`` on two random heads, ``rope/layer-1`` in the first layer only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from toeplens.ground import choose, invalid
from toeplens.model import Protocol, protocol_switches
from toeplens.studies.kit.claims import read_yaml
from toeplens.training.presets import DISTANCE, PROTOCOLS, Preset, task_sizes

Fields = dict[str, Any]
PARTIAL = "partial"

_DATA = read_yaml(Path(__file__).with_name("labels.yaml"))
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
