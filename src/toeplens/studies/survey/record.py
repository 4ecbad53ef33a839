"""The record of a survey: what became of each model type, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from toeplens.ground import InputError

Outcome = Literal["proved", "refused", "none", "failed", "other"]
OUTCOMES: dict[Outcome, str] = {
    "proved": "audited: every attention call, formed again from its parts, is the model's own",
    "refused": "an attention was not understood; the sentence names it",
    "none": "the model has no attention",
    "failed": "no small model could be built from its configuration, or it could not be run",
    "other": "its input is not text alone",
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
    "weights": "largest difference of an attention weight formed again from its parts; None where the model forms none",
    "outputs": "largest difference of a head's output, relative to the layer's largest",
    "whole": "largest difference of the model's output from that of its own plain pass, relative to the largest",
    "why": "why it is not proved; of a proved model, why shares or effects are not known",
}


@dataclass(frozen=True)
class Surveyed:
    """One model type. The fields are the columns of the table (`COLUMNS`), and ``seconds`` that it took."""

    name: str
    outcome: Outcome
    model: str | None = None
    parameters: int | None = None
    calls: int | None = None
    heads: int | None = None
    effect: str | None = None
    placed: int | None = None
    weights: float | None = None
    outputs: float | None = None
    whole: float | None = None
    why: str | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Any) -> Surveyed:
        """The inverse of `to_dict`; what is no such record raises `InputError`."""
        try:
            made = cls(**content)
        except TypeError as error:
            raise InputError(f"survey: the record is damaged ({error}).") from None
        if not isinstance(made.name, str) or made.outcome not in get_args(Outcome):
            raise InputError(f"survey: the record is damaged (name {made.name!r}, outcome {made.outcome!r}).")
        return made


@dataclass(frozen=True)
class Survey:
    """What became of the model types of the installed transformers.

    about    versions of transformers, torch and python
    found    the types that were gone through, by name
    missing  names of those that were not yet
    """

    about: dict[str, Any]
    found: tuple[Surveyed, ...]
    missing: tuple[str, ...] = ()

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
        heading = ("type", "class", "calls", "shares known", "effects", "weights", "outputs", "whole pass")
        lines: list[tuple[str, ...]] = [heading if proved else ("type", "class", "why")]
        for row in self.of(*outcomes):
            numbers = (_power(value) for value in (row.weights, row.outputs, row.whole))
            shares = "all" if row.placed == row.calls else f"{row.placed} of {row.calls}"
            rest = (str(row.calls), shares, row.effect or "–", *numbers) if proved else (_cell(row.why),)
            lines.append((f"`{row.name}`", f"{row.model or '–'}", *rest))
        lines.insert(1, ("---",) * len(lines[0]))
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {
            "about": self.about,
            "totals": self.totals(),
            "missing": list(self.missing),
            "found": [each.to_dict() for each in self.found],
        }

    @classmethod
    def from_dict(cls, content: Any) -> Survey:
        """The inverse of `to_dict`; what is no such record raises `InputError`."""
        try:
            found = tuple(Surveyed.from_dict(each) for each in content["found"])
            return cls(dict(content["about"]), found, tuple(content["missing"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"survey: the record is damaged ({error}).") from None


_DIFFERENCES = ("weights", "outputs", "whole")


def _power(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "/").replace("_", "\\_")


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
