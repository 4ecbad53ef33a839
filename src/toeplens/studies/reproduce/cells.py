"""The grid of the reproduction: which encoding under which protocol on which task, as runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toeplens.engine import Job
from toeplens.ground import InputError, choose
from toeplens.model import Protocol, decoder_config
from toeplens.studies.reproduce.scales import COUNT, DISTANCE, SCALES, Scale
from toeplens.studies.results import Key
from toeplens.training import RunSpec, run_spec

PROTOCOLS: tuple[Protocol, ...] = ("paper", "released")

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


def title(label: str) -> str:
    """What people call a label."""
    if label.startswith("partial-"):
        count = label.removeprefix("partial-")
        return f"RoPE on {count} head{'' if count == '1' else 's'}"
    return TITLES[label]


_RELEASED_MLA = {"rotary_query": "shared", "latent_norm": False, "phase_table": "released"}


@dataclass(frozen=True)
class Cell:
    """One run of the grid, and where it stands."""

    key: Key
    job: Job


def encoding_of(protocol: Protocol, label: str) -> dict[str, Any]:
    """The model fields behind a label: the paper and its released program mean different things by the same word."""
    if label.startswith("partial-"):
        return {"encoding": "partial-rope", "encoding_options": {"heads": int(label.removeprefix("partial-"))}}
    fields: dict[str, Any]
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
            "rope-alone": {"encoding": "rope", "input_encoding": None, "input_encoding_options": {}},
            "mla": {"encoding": "mla", "encoding_options": _RELEASED_MLA},
            "relative": {"encoding": "relative-table"},
            "random": {"encoding": "random-fixed", "encoding_options": {"trainable": True}},
            "alibi": {"encoding": "alibi", "encoding_options": {"slopes": "exponential"}},
        }
    fields |= {"nope": {"encoding": "nope"}, "absolute": {"encoding": "sinusoidal"}}
    return fields[choose("label", label, fields)]


def labels_of(scale: Scale, protocol: Protocol, task: str) -> list[str]:
    """The labels of a task; the released protocol's RoPE is RoPE + sinusoid, so there RoPE alone takes that place."""
    swap = {"rope-absolute": "rope-alone"} if protocol == "released" else {}
    labels = [swap.get(label, label) for label in scale.labels[task]]
    return labels + [f"partial-{count}" for count in scale.partial_heads[task]]


def cell(scale: Scale, protocol: Protocol, task: str, label: str, seed: int) -> Cell:
    """The run of one place in the grid."""
    start = starting_spec(scale.name, protocol, task, label, seed)
    model = start["model"] | encoding_of(protocol, label)
    if protocol == "released" and label == "mla":
        head_dim = model["d_model"] // model["num_heads"]
        model["encoding_options"] = model["encoding_options"] | {"rotary_dim": head_dim}
    if scale.name == "paper" and label == "mla":  # Table 4 says "16 heads (8 in fact)"; the program runs 16, 150 epochs
        start["batch_size"] = 1024
        if protocol == "released":
            start["epochs"] = 150
        else:
            model["num_heads"] //= 2
    skips_zero = protocol == "released" and task == COUNT and label != "mla"
    spec: RunSpec = run_spec(**start | {"model": decoder_config(**model), "ignore_label": 0 if skips_zero else None})
    split = "test" if protocol == "paper" else "train+test"
    name = f"{protocol} · {'distance' if task == DISTANCE else 'count'} · {title(label)} · seed {seed}"
    return Cell(Key(protocol, task, label, seed), Job(spec, name, scale.ablation_examples, split))


def grid(scale_name: str, protocols: Sequence[Protocol], seeds: int) -> list[Cell]:
    """All cells, the most telling first: seed by seed, Table 1's before the rest."""
    if seeds < 1:
        raise InputError(f"seeds: {seeds} was given; it must be at least 1.")
    scale = SCALES[choose("scale", scale_name, SCALES)]
    for protocol in protocols:
        choose("protocol", protocol, PROTOCOLS)
    places: list[tuple[Protocol, str, str]] = [
        (protocol, task, label)
        for protocol in protocols
        for task in (DISTANCE, COUNT)
        for label in labels_of(scale, protocol, task)
    ]
    places.sort(key=lambda place: place[2] not in ("rope", "mla", "nope"))
    return [cell(scale, *place, seed) for seed in range(42, 42 + seeds) for place in places]


def starting_spec(scale_name: str, protocol_name: str, task: str, encoding: str, seed: int) -> dict[str, Any]:
    """A spec for any encoding at a scale's sizes, as plain fields: what ``toeplens train`` starts from.

    The model's protocol switches are left out, so that they follow the encoding and the protocol.
    """
    scale = SCALES[choose("scale", scale_name, SCALES)]
    protocol = choose("protocol", protocol_name, PROTOCOLS)
    size = scale.tasks[choose("task", task, scale.tasks)]
    options = size.paper if protocol == "paper" else size.released
    return {
        "task": task,
        "task_options": {"form": protocol, "vocab_size": scale.model["vocab_size"], **options},
        "model": {"protocol": protocol, "encoding": encoding, **scale.model},
        "train_examples": size.train_examples,
        "test_examples": size.test_examples,
        "epochs": size.epochs,
        "seed": seed,
        "data_seed": seed,
        **scale.optimiser,
    }
