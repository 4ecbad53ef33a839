"""The record of a survey: what became of each model type, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from toeplens.ground.reading import Count, Positive, Text
from toeplens.ground.records import Record

Outcome = Literal["proved", "refused", "none", "failed", "other"]
OUTCOMES: dict[Outcome, str] = {
    "proved": "audited: every attention call, formed again from its parts, is the model's own",
    "refused": "an attention was not understood; the sentence names it",
    "none": "the model has no attention",
    "failed": "no small model could be built from its configuration, or it could not be run",
    "other": "its input is not text alone, or it is no model by itself",
}
COLUMNS: dict[str, str] = {
    "name": "model type of transformers, and after a + what differs from its default configuration",
    "model": "class of the model that was built",
    "outcome": "proved, refused, none (no attention), failed (not built or not run) or other (no text model)",
    "parameters": "of the small model",
    "calls": "attention calls of a pass, all proved",
    "heads": "heads that were audited",
    "effect": "what their effects are of: loss or states; None where heads could not be silenced",
    "placed": "calls whose positional, symbolic and interaction shares are known",
    "returned": "calls whose weights are among the attentions that the model returns; None where it returns none",
    "weights": "largest difference of an attention weight formed again from its parts; None where the model forms none",
    "outputs": "largest difference of a head's output, relative to the layer's largest",
    "whole": "largest difference of the model's output from that of its own plain pass, relative to the largest",
    "why": "why it is not proved; of a proved model, why shares or effects are not known",
}


@dataclass(frozen=True)
class Surveyed(Record):
    """One model type. The fields are the columns of the table (`COLUMNS`), and two more.

    seconds   that it took
    unplaced  why calls have no shares, and of each reason which calls: their side and kind, and their layers from 0
    """

    WORDS = "survey"
    LATER = ("returned", "unplaced")

    name: Text
    outcome: Outcome
    model: Text | None = None
    parameters: Count | None = None
    calls: Count | None = None
    heads: Count | None = None
    effect: Text | None = None
    placed: Count | None = None
    weights: Positive | None = None
    outputs: Positive | None = None
    whole: Positive | None = None
    why: Text | None = None
    seconds: Positive | None = None
    returned: Count | None = None
    unplaced: dict[Text, dict[Text, list[Count]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Survey(Record):
    """What became of the model types of the installed transformers.

    about    versions of transformers, torch and python
    found    the types that were gone through, by name
    missing  names of those that were not yet
    """

    WORDS = "survey"

    about: dict[Text, Any]
    found: tuple[Surveyed, ...]
    missing: tuple[Text, ...] = ()

    def of(self, *outcomes: Outcome) -> list[Surveyed]:
        """Those with one of these outcomes, in the order of their names."""
        return [each for each in self.found if each.outcome in outcomes]

    def totals(self) -> dict[Outcome, int]:
        """How many had each outcome."""
        counts = Counter(each.outcome for each in self.found)
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def largest(self) -> dict[str, float | None]:
        """The largest ``weights``, ``outputs`` and ``whole`` over all that are proved; None without one."""
        return {name: _most(getattr(each, name) for each in self.of("proved")) for name in _DIFFERENCES}

    def table(self, *outcomes: Outcome) -> dict[str, list[Any]]:
        """Those with one of these outcomes, all unless given, as columns (`COLUMNS`)."""
        rows = self.of(*(outcomes or get_args(Outcome)))
        return {name: [getattr(row, name) for row in rows] for name in COLUMNS}

    def markdown(self, *outcomes: Outcome) -> str:
        """A table for people: of proved types what was found, of others why they are not."""
        proved = outcomes == ("proved",)
        heading = ("type", "class", "calls", "shares known", "effects", "returned", "weights", "outputs", "whole pass")
        lines: list[tuple[str, ...]] = [heading if proved else ("type", "class", "why")]
        for row in self.of(*outcomes):
            numbers = (_power(value) for value in (row.weights, row.outputs, row.whole))
            shares, returned = (_of(count, row.calls) for count in (row.placed, row.returned))
            rest = (str(row.calls), shares, row.effect or "–", returned, *numbers) if proved else (_cell(row.why),)
            lines.append((f"`{row.name}`", f"{row.model or '–'}", *rest))
        lines.insert(1, ("---",) * len(lines[0]))
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def without_shares(self) -> str:
        """A table for people: why calls of proved types have no shares, and which calls of which types."""
        found: dict[str, list[str]] = {}
        for row in self.of("proved"):
            for why, calls in row.unplaced.items():
                each = (f"{where} {', '.join(str(layer + 1) for layer in layers)}" for where, layers in calls.items())
                found.setdefault(why, []).append(f"`{row.name}` ({'; '.join(each)})")
        lines = [("why", "types (their calls, counted from 1)"), ("---", "---")]
        lines += [(_cell(why.rstrip(".")), ", ".join(types)) for why, types in sorted(found.items())]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON; the totals with them."""
        counted = {"about": self.about, "totals": self.totals(), "missing": list(self.missing)}
        return counted | super().to_dict()


_DIFFERENCES = ("weights", "outputs", "whole")


def _of(count: int | None, calls: int | None) -> str:
    return "–" if count is None else "all" if count == calls else f"{count} of {calls}"


def _power(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "/").replace("_", "\\_")


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
