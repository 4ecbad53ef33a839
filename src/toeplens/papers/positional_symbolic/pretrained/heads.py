"""What was measured of each head, text by text, as arrays: what claims and figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from toeplens.lens.kit.intervals import spearman
from toeplens.studies.auditing.record import COLUMNS, AuditRecord

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
