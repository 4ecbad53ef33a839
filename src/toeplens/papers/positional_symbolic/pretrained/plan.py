"""What the study of a pretrained model asks: of which texts, how long, and piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from toeplens.ground import InputError, reading
from toeplens.ground.machine import within
from toeplens.ground.records import AtLeast1
from toeplens.studies.kit.questions import LONGEST, SEEDS
from toeplens.studies.kit.study import Begun
from toeplens.studies.probing import Asked

BANDS = 8  # into which each layer's frequencies are parted, by their speed
DRAWS = 3  # of heads, or of frequencies, that are there for comparison
TOGETHER = 32  # sequences whose mean tells position from content: 1/32 of what keys hold is left in that mean
AUDITED, PROBED = "audit", "probe"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked of a model.

    model          its name or directory
    texts          by name, their contents
    sequences      taken from each text; all of one length
    tokens         of a sequence whose heads are measured
    effect_tokens  of the same sequences, from their beginning, for what is silenced or stopped head by head
    probe_tokens   of a text with a needle in it, and of what is copied
    seed           of places in the texts, of random weights, of questions
    turns          whether the model has a rotation
    biased         whether its attention adds a bias to the logits (ALiBi, T5)
    together       sequences that are measured at once and count as one: several where position is in what the heads
                   read, which the mean over sequences tells from content
    predicts       whether it predicts the next token
    dtype          of its weights
    weights        names and sizes of its files, or its commit on the hub, as a digest
    """

    model: str
    texts: Mapping[str, str]
    sequences: int = 2
    tokens: int = 1024
    effect_tokens: int = 256
    probe_tokens: int = 512
    seed: int = 42
    turns: bool = True
    biased: bool = False
    together: int = 1
    predicts: bool = True
    dtype: str = "float32"
    weights: str = ""

    def __post_init__(self) -> None:
        within("sequences", self.sequences, 1, 1000)
        within("tokens", self.tokens, 16, LONGEST)
        within("effect_tokens", self.effect_tokens, 16, self.tokens)
        within("probe_tokens", self.probe_tokens, 64, LONGEST)
        within("seed", self.seed, 0, SEEDS)
        if not self.texts:
            raise InputError("text: none was given; at least one is needed.")

    @property
    def places(self) -> list[tuple[str, int]]:
        """Every sequence, or every group that counts as one: its text's name, and which of that text it is."""
        return [(name, number) for name in self.texts for number in range(self.sequences)]

    @property
    def units(self) -> str:
        """What claims about heads are judged over: sequences, or groups of sequences that are measured at once."""
        return "sequences" if self.together == 1 else "groups"

    @property
    def asked(self) -> Asked:
        """What probes ask."""
        return Asked(lengths=(self.probe_tokens,), depths=(0.0, 0.5, 1.0), repeats=4, sequences=8, lists=4)

    def pieces(self) -> Iterator[tuple[str, str]]:
        """The name of each piece and its kind, an audit or a probe, in the order in which they are made."""
        count = range(len(self.places))
        for kind in ("text", "random", "shuffled"):
            yield from ((f"{kind}-{number}", AUDITED) for number in count)
        if self.predicts:
            yield from ((name, PROBED) for name in ("intact", "no-retrieval"))
            yield from ((f"no-others-{number}", PROBED) for number in range(DRAWS))
        if self.predicts and self.turns:
            yield from ((f"still-{band}", PROBED) for band in range(BANDS))
            yield from ((f"{name}-silent", PROBED) for name in ("slow", "fast"))
            yield from ((f"some-silent-{number}", PROBED) for number in range(DRAWS))
            yield "retrieval-still", PROBED
            yield from ((f"{name}-still", PROBED) for name in ("fast", "slow"))
        yield "silenced", AUDITED
        if self.turns or self.biased:
            yield "position", AUDITED
        if self.turns:
            yield "bands", AUDITED

    def digests(self) -> dict[str, str]:
        """Of each text, its SHA-256."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


@dataclass(frozen=True, kw_only=True)
class Asking(Begun):
    """study.json: the plan, each text by its digest."""

    LATER = ("study", "seconds", "biased", "together")

    model: reading.Text
    texts: dict[str, reading.Text]
    sequences: AtLeast1
    tokens: AtLeast1
    effect_tokens: AtLeast1
    probe_tokens: AtLeast1
    seed: reading.Count
    turns: reading.Truth
    biased: reading.Truth = False
    together: AtLeast1 = 1
    predicts: reading.Truth
    dtype: reading.Text
    weights: reading.Text

    def plan(self) -> Plan:
        """The plan without the contents of its texts."""
        return Plan(**{field.name: getattr(self, field.name) for field in fields(Plan)})
