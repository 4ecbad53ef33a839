"""Labels of the grid: the model fields under either protocol, and the display name.

``rope`` is an encoding. ``rope/readout`` is its model with one switch set as in the other protocol. Other words after
the slash are variants (`VARIANTS`) or scale variants (`RUNGS`). ``partial-2`` is RoPE on the first two heads,
``partial-2/random`` on two random heads, ``rope/layer-1`` in the first layer only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from toeplens.ground import choose, invalid
from toeplens.model import Protocol, protocol_switches
from toeplens.training.presets import DISTANCE, PROTOCOLS, Preset, task_sizes

Fields = dict[str, Any]
PARTIAL = "partial"

TITLES = {
    "rope": "RoPE",
    "rope-alone": "RoPE, no sinusoid",
    "rope-absolute": "RoPE + sinusoid",
    "mla": "MLA",
    "nope": "NoPE",
    "alibi": "ALiBi",
    "relative": "Relative",
    "absolute": "Absolute (sinusoid)",
    "random": "Random",
}

_RELEASED_MLA = {"rotary_query": "shared", "latent_norm": False, "phase_table": "released"}

# one difference between the protocols each: the model fields that it sets (none: fields of the run), and its name with
# the paper's setting and with the released code's
_SWITCHES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "data": ((), "sequences as in the paper", "sequences as in the released code"),
    "encoding": (("encoding", "encoding_options"), "encoding as in the paper", "encoding as in the released code"),
    "input": (
        ("input_encoding", "input_encoding_options"),
        "nothing added at the input",
        "positions added at the input",
    ),
    "mask": (("causal",), "causal", "bidirectional"),
    "padding": (("pad_mask",), "padding masked", "padding attended"),
    "keys": (("key_value_source",), "keys and values from the layer", "keys and values from the embeddings"),
    "readout": (("readout",), "readout from the last token", "readout from the mean"),
    "norm": (("final_norm",), "final norm", "no final norm"),
    "activation": (("activation",), "ReLU", "GELU"),
}
SWITCHES = {switch: fields for switch, (fields, *_) in _SWITCHES.items()}
SWITCH_TITLES = {switch: titles for switch, (_, *titles) in _SWITCHES.items()}

_MLA_PROGRAM = {
    key: value for key, value in protocol_switches("released", "mla").items() if key not in ("causal", "dropout_on")
}
_NO_POSITIONS: Fields = {"input_encoding": None, "input_encoding_options": {}}
# variants that are not a single difference between the protocols
VARIANTS: dict[str, tuple[str, Fields]] = {
    "dropout": ("dropout 0.1", {"dropout": 0.1}),
    "padding-seen": ("padding attended", {"pad_mask": False}),
    "no-norm": ("no final norm", {"final_norm": False}),
    "bare": (
        "no input positions, padding attended, no final norm",
        {"pad_mask": False, "final_norm": False, **_NO_POSITIONS},
    ),
    "mla-program": ("in MLA's code", {**_MLA_PROGRAM}),
    "mla-program-bare": ("in MLA's code, no input positions", {**_MLA_PROGRAM, **_NO_POSITIONS}),
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
    fields: Fields
    if protocol == "paper":
        fields = {
            "rope": {"encoding": "rope"},
            "rope-absolute": {"encoding": "rope-absolute"},
            "mla": {"encoding": "mla"},
            "relative": {"encoding": "t5"},
            "random": {"encoding": "random-fixed"},
            "alibi": {"encoding": "alibi"},
        }
    else:
        fields = {
            "rope": {"encoding": "rope"},
            "rope-alone": {"encoding": "rope", **_NO_POSITIONS},
            "mla": {"encoding": "mla", "encoding_options": _RELEASED_MLA},
            "relative": {"encoding": "relative-table"},
            "random": {"encoding": "random-fixed", "encoding_options": {"trainable": True}},
            "alibi": {"encoding": "alibi", "encoding_options": {"slopes": "exponential"}},
        }
    fields |= {"nope": {"encoding": "nope"}, "absolute": {"encoding": "sinusoidal"}}
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


LENGTH, HEADS, LAYERS, WIDTH = "tokens", "heads", "layers", "width"
RATE, REGULARISED, TRAINED = "learning rate", "regularisation", "training"
_PLATEAU = {"gain": 0.05, "patience": 3}
# at a tenth of the rate, a plateau needs five times as many evaluations
_SLOW = {"lr": 1e-4, "betas": (0.98, 0.9), "plateau": {"gain": 0.05, "patience": 15}, "warmup": 0.006}

RUNGS: dict[str, Rung] = {
    **{f"tokens-{count}": Rung(LENGTH, str(count), tokens=count) for count in (24, 32, 48, 64)},
    "tokens-96": Rung(LENGTH, "96, vocabulary 128", model={"vocab_size": 128}, tokens=96),  # as many as labels
    **{f"heads-{count}": Rung(HEADS, str(count), model={"num_heads": count}) for count in (4, 8)},
    **{f"layers-{count}": Rung(LAYERS, str(count), model={"num_layers": count}) for count in (2, 4)},
    "width-256": Rung(WIDTH, "256", model={"d_model": 256, "d_ff": 512}),
    "rate-paper": Rung(RATE, "the papers' 1e-4 and betas", optimiser=_SLOW, epochs=20),
    "cosine": Rung(RATE, "1e-3 with cosine decay", optimiser={"schedule": "cosine", "average": None, "plateau": None}),
    "drop": Rung(REGULARISED, "dropout 0.1", model={"dropout": 0.1}),
    "decay": Rung(REGULARISED, "weight decay 0.1", optimiser={"weight_decay": 0.1}),
    # same number of warm-up steps as without the change
    "longer": Rung(
        TRAINED,
        "8 times the plateau's steps",
        optimiser={"plateau": _PLATEAU | {"beyond": 8.0}, "warmup": 0.004},
        epochs=30,
    ),
}
BASES: dict[Protocol, tuple[str, ...]] = {
    "paper": ("rope", "mla", "absolute", "nope"),
    "released": ("rope-alone", "rope"),
}
TASK = DISTANCE
