"""What is there of a pretrained model's study: its plan and the pieces that are finished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from toeplens.lens.kit.intervals import spearman
from toeplens.papers.positional_symbolic.pretrained.plan import Plan
from toeplens.studies.auditing.record import COLUMNS, AuditRecord
from toeplens.studies.kit.study import State
from toeplens.studies.probing import ProbeRecord


@dataclass(frozen=True, kw_only=True)
class Pretrained(State):
    """The state of the study.

    audits, probes  the pieces that are finished, by name
    """

    plan: Plan
    audits: Mapping[str, AuditRecord]
    probes: Mapping[str, ProbeRecord]

    def asked(self) -> dict[str, Any]:
        """The plan."""
        return asdict(self.plan)

    def found(self) -> dict[str, Any]:
        """The pieces."""
        return {
            "audits": {name: each.to_dict() for name, each in self.audits.items()},
            "probes": {name: each.to_dict() for name, each in self.probes.items()},
        }

    def frames(self) -> dict[str, Callable[[], pa.Table]]:
        """Heads of all its audits, with the audit's name before what an audit's table has; and claims."""
        return {"heads": self._heads} | super().frames()

    def _heads(self) -> pa.Table:
        named = [
            each.frame().add_column(0, "audit", pa.array([name] * len(each.heads), pa.string()))
            for name, each in self.audits.items()
        ]
        return pa.concat_tables(named) if named else pa.table({"audit": pa.array([], pa.string())})

    def heads(self, kind: str) -> Heads | None:
        """What was measured of each head on each of the texts (``text``), of random weights or shuffled texts."""
        found = [self.audits.get(f"{kind}-{number}") for number in range(len(self.plan.places))]
        audits = [each for each in found if each is not None]
        return Heads.of(audits) if len(audits) == len(found) else None


_NUMBERS = [name for name in COLUMNS if name not in ("side", "kind", "layer", "head")]
FEWEST = 3  # heads of a kind of which a mean says something


def effects_of(audit: AuditRecord, end: Literal["", "_low", "_high"] = "") -> Float[np.ndarray, "n"]:
    """What was done to each head cost, or an end of its interval; NaN where it is not known."""
    return np.array([np.nan if (x := getattr(head, f"effect{end}")) is None else x for head in audit.heads])


@dataclass(frozen=True)
class Heads:
    """The heads of audits of one model's self-attention, in the order of the pass.

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
        """Of audits of the same model on several texts."""
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
        """How many."""
        return len(self.columns["positional"])

    @property
    def parts(self) -> dict[str, Bool[np.ndarray, "n"]]:
        """All heads; or, where a model has both, those of layers that see a window, and those that see all."""
        if self.local.any() and not self.local.all():
            return {"layers that see all": ~self.local, "layers that see a window": self.local}
        return {"all heads": np.ones(len(self.local), dtype=bool)}

    def among(self, places: Collection[tuple[int, int]]) -> Bool[np.ndarray, "n"]:
        """Whether each head is one of these layers and heads."""
        return np.array([place in places for place in zip(self.layer.tolist(), self.head.tolist(), strict=True)])

    def mean(self, name: str) -> Float[np.ndarray, "n"]:
        """A column's mean over the texts."""
        return self.columns[name].mean(0)

    def correlations(self, first: str, second: str, which: Bool[np.ndarray, "n"]) -> list[float]:
        """Of each text, the rank correlation of two columns over some heads; NaN where too few are known."""
        found = []
        for a, b in zip(self.columns[first][:, which], self.columns[second][:, which], strict=True):
            known = np.isfinite(a) & np.isfinite(b)
            found.append(float(spearman(np.stack((a[known], b[known])))) if known.sum() >= FEWEST else np.nan)
        return found

    def by_text(self, figure: Callable[[dict[str, Float[np.ndarray, "n"]]], float]) -> list[float]:
        """A figure of each text's heads."""
        return [
            float(figure({name: values[text] for name, values in self.columns.items()})) for text in range(self.texts)
        ]
