"""The plan and state of a pretrained model's study: its parts, and heads as arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from toeplens.ground import InputError, reading
from toeplens.ground.machine import within
from toeplens.ground.records import AtLeast1
from toeplens.lens.kit.intervals import spearman
from toeplens.studies.auditing.record import COLUMNS, AuditRecord
from toeplens.studies.kit.options import LONGEST, SEEDS
from toeplens.studies.kit.study import Begun, State
from toeplens.studies.probing import Asked, ProbeRecord

BANDS = 8  # number of frequency bands per layer
DRAWS = 3  # random choices of heads or frequencies for comparison
TOGETHER = 32  # sequences whose mean separates position from content; 1/32 of the content's variance remains
AUDITED, PROBED = "audit", "probe"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a study, and properties of its model.

    model          its name or directory
    texts          contents by name
    sequences      number of sequences per text, all of one length
    tokens         sequence length for measuring heads
    effect_tokens  length of the prefix of the sequences for effects of single heads
    probe_tokens   length of a text with a needle, and of a copied text
    seed           seed of places in the texts, of random weights, of questions
    turns          whether the model has a rotation
    biased         whether its attention adds a bias to the logits (ALiBi, T5)
    together       number of sequences that are measured together and count as one; several if position is added to the
                   hidden states, where the mean over sequences separates it from content
    predicts       whether it predicts the next token
    dtype          dtype of its weights
    weights        digest of the names and sizes of its files, or of its commit on the hub
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
            raise InputError("text must be set at least once.")

    @property
    def places(self) -> list[tuple[str, int]]:
        """Text name and index of every sequence or group."""
        return [(name, number) for name in self.texts for number in range(self.sequences)]

    @property
    def units(self) -> str:
        """The unit of comparisons: sequences, or groups of sequences."""
        return "sequences" if self.together == 1 else "groups"

    @property
    def asked(self) -> Asked:
        """The options of the probes."""
        return Asked(lengths=(self.probe_tokens,), depths=(0.0, 0.5, 1.0), repeats=4, sequences=8, lists=4)

    def pieces(self) -> Iterator[tuple[str, str]]:
        """The name and kind (audit or probe) of each part, in order."""
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
        """The SHA-256 of each text."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.texts.items()}


@dataclass(frozen=True, kw_only=True)
class Asking(Begun):
    """study.json: the plan, with digests of the texts."""

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


@dataclass(frozen=True, kw_only=True)
class Pretrained(State):
    """The state of the study.

    audits, probes  the finished parts by name
    """

    plan: Plan
    audits: Mapping[str, AuditRecord]
    probes: Mapping[str, ProbeRecord]

    def asked(self) -> dict[str, Any]:
        """The plan."""
        return asdict(self.plan)

    def found(self) -> dict[str, Any]:
        """The finished parts."""
        return {
            "audits": {name: each.to_dict() for name, each in self.audits.items()},
            "probes": {name: each.to_dict() for name, each in self.probes.items()},
        }

    def frames(self) -> dict[str, Callable[[], pa.Table]]:
        """A table of the heads of all audits, with the audit's name as the first column; and the claims."""
        return {"heads": self._heads} | super().frames()

    def _heads(self) -> pa.Table:
        named = [
            each.frame().add_column(0, "audit", pa.array([name] * len(each.heads), pa.string()))
            for name, each in self.audits.items()
        ]
        return pa.concat_tables(named) if named else pa.table({"audit": pa.array([], pa.string())})

    def heads(self, kind: str) -> Heads | None:
        """The heads on all sequences: of the model (``text``), of random weights, or on shuffled tokens."""
        found = [self.audits.get(f"{kind}-{number}") for number in range(len(self.plan.places))]
        audits = [each for each in found if each is not None]
        return Heads.of(audits) if len(audits) == len(found) else None


_NUMBERS = [name for name in COLUMNS if name not in ("side", "kind", "layer", "head")]
FEWEST = 3  # minimum number of heads of a kind for a mean


def effects_of(audit: AuditRecord, end: Literal["", "_low", "_high"] = "") -> Float[np.ndarray, "n"]:
    """The effect of each head, or an end of its interval; NaN if unknown."""
    return np.array([np.nan if (x := getattr(head, f"effect{end}")) is None else x for head in audit.heads])


@dataclass(frozen=True)
class Heads:
    """The self-attention heads of one model's audits, in forward order.

    layer, head  [n] from 0
    local    [n] whether its layer sees a window of keys alone
    columns  by name, [T, n] of each text; NaN where it is not known
    """

    layer: Int[np.ndarray, "n"]
    head: Int[np.ndarray, "n"]
    local: Bool[np.ndarray, "n"]
    columns: dict[str, Float[np.ndarray, "T n"]]

    @classmethod
    def of(cls, audits: Sequence[AuditRecord]) -> Heads:
        """From audits of the same model on several texts."""
        first = audits[0]
        windows = {layer.layer: layer.window is not None for layer in first.layers}
        values = {
            name: np.array(
                [[np.nan if (x := getattr(head, name)) is None else x for head in audit.heads] for audit in audits],
                dtype=float,
            )
            for name in _NUMBERS
        }
        return cls(
            np.array([head.layer for head in first.heads]),
            np.array([head.head for head in first.heads]),
            np.array([windows[head.layer] for head in first.heads]),
            values,
        )

    @property
    def texts(self) -> int:
        """The number of texts."""
        return len(self.columns["positional"])

    @property
    def parts(self) -> dict[str, Bool[np.ndarray, "n"]]:
        """All heads; or full-attention and sliding-window layers separately, if a model has both."""
        if self.local.any() and not self.local.all():
            return {"full-attention layers": ~self.local, "sliding-window layers": self.local}
        return {"all heads": np.ones(len(self.local), dtype=bool)}

    def among(self, places: Collection[tuple[int, int]]) -> Bool[np.ndarray, "n"]:
        """Mask of the heads at these (layer, head) pairs."""
        return np.array([place in places for place in zip(self.layer.tolist(), self.head.tolist(), strict=True)])

    def mean(self, name: str) -> Float[np.ndarray, "n"]:
        """Mean of a column over the texts."""
        return self.columns[name].mean(0)

    def correlations(self, first: str, second: str, which: Bool[np.ndarray, "n"]) -> list[float]:
        """Rank correlation of two columns over some heads, per text; NaN with too few known values."""
        found = []
        for a, b in zip(self.columns[first][:, which], self.columns[second][:, which], strict=True):
            known = np.isfinite(a) & np.isfinite(b)
            found.append(float(spearman(np.stack((a[known], b[known])))) if known.sum() >= FEWEST else np.nan)
        return found

    def by_text(self, figure: Callable[[dict[str, Float[np.ndarray, "n"]]], float]) -> list[float]:
        """A number per text, from its columns."""
        return [
            float(figure({name: values[text] for name, values in self.columns.items()})) for text in range(self.texts)
        ]
