"""The kinds of record that lie in a run's directory, by their names: head ablations, measures, what was watched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from toeplens.engine.circuit import Circuit
from toeplens.engine.extrapolation import Extrapolation
from toeplens.engine.language import Bits, Copying, Extension, HeadPatterns, Needles
from toeplens.ground import checked
from toeplens.ground.records import Record
from toeplens.lens import (
    BandAblation,
    Behaviour,
    FrequencyRecord,
    HeadAblation,
    HeadSets,
    PermutationScores,
    PositionalDrift,
    Representation,
    SeedStrength,
)
from toeplens.lens.kit.toeplitz import ToeplitzShares
from toeplens.lens.toeplitz.bias_spread import BiasSpread

WHY = "why"  # the field of a record that has no other, and says why an encoding has no such measure


@dataclass(frozen=True)
class Seed(Record):
    """At initialisation: what a batch leaves of the positional gradient, and where a step would move position."""

    strength: SeedStrength
    drift: PositionalDrift


@dataclass(frozen=True)
class Spectra(Record):
    """At initialisation: each head's spectrum with position over that without it, see `toeplens.lens.Contraction`."""

    width: Float[np.ndarray, "L H"]
    norm: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class Beginning(Record):
    """Before training: what each head follows, and the centre of the frequencies that it uses.

    As `toeplens.lens.Behaviour` and `toeplens.lens.FrequencyRecord` have them of the trained model.
    """

    positional: Float[np.ndarray, "L H"]
    symbolic: Float[np.ndarray, "L H"]
    centre: Float[np.ndarray, "L H"]


KINDS: dict[str, type[Record]] = {
    "ablation": HeadAblation,
    "ablation-loss": HeadAblation,
    "position": HeadAblation,
    "position-loss": HeadAblation,
    "sets": HeadSets,
    "position-sets": HeadSets,
    "bias": BiasSpread,
    "circuit": Circuit,
    "contraction": Spectra,
    "representation": Representation,
    "seed": Seed,
    "extrapolation": Extrapolation,
    "behaviour": Behaviour,
    "permutations": PermutationScores,
    "frequency": FrequencyRecord,
    "beginning": Beginning,
    "toeplitz": ToeplitzShares,
    "bands": BandAblation,
    "bits": Bits,
    "needles": Needles,
    "copying": Copying,
    "patterns": HeadPatterns,
    "extension": Extension,
    "extension-tuned": Extension,
}


def as_record(name: str, content: Any, where: Path | str) -> Record | str:
    """The record of this name (`KINDS`), or the reason why an encoding has no such measure.

    What is neither raises an `InputError` that names ``where`` and the field. A record that says why there is no such
    measure has nothing else in it.
    """
    if isinstance(content, dict) and content.keys() - {"asked"} == {WHY}:
        return checked(dict[str, Any], content, where)[WHY]
    return KINDS[name].from_dict(content, where)
