"""What each encoding does, and what each protocol means by its name."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from toeplens.model import Protocol
from toeplens.papers.deposit import Reproduction, title
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page.look import colour, glyph, ordered, planned

_SAME = "as described"
_ABSENT = "not part of it"

# label: what it does, what the paper protocol means by it, what the released one does
_MEANT: dict[str, tuple[str, str, str]] = {
    "rope": (
        "turns queries and keys by an angle that grows with position, so that their product depends on the distance",
        _SAME,
        "the same, and a sinusoid added to the input that the paper does not mention",
    ),
    "rope-alone": (
        "RoPE without the hidden sinusoid",
        "there it is simply RoPE",
        "the program’s model, less the sinusoid",
    ),
    "rope-absolute": ("RoPE, and a sinusoid added to the input", _SAME, "there it is what the program calls RoPE"),
    "partial": (
        "RoPE on some heads of every layer, nothing on the others",
        _SAME,
        "the same; the program for it adds no sinusoid",
    ),
    "mla": (
        "multi-head latent attention: compressed keys and values, and a small part of each key that is rotated",
        "in the same decoder as the others",
        "a program of its own: learned positions at the input, padding hidden, GELU, keys and values from the layer",
    ),
    "absolute": ("adds a fixed pattern of sines and cosines to the input", _SAME, _SAME),
    "relative": (
        "adds a learned number to each attention score, by distance",
        "T5’s: distances share buckets",
        "one number for every signed distance and head, no buckets",
    ),
    "alibi": (
        "subtracts from each attention score an amount that grows with distance, a fixed slope a head",
        "slopes are powers of two",
        "slopes e^(−h/H), over the distance to either side",
    ),
    "random": ("adds a random vector a position to the input", "fixed", "trained along"),
    "nope": (
        "nothing: only a causal mask can tell positions apart",
        _SAME,
        "the same, but without a causal mask, so that the model cannot see order at all",
    ),
}


@dataclass(frozen=True)
class Term:
    """An encoding's line: what it does, and what it is under each of the study's protocols."""

    title: str
    colour: str
    glyph: str
    what: str
    meant: list[str]


def terms(state: Reproduction) -> list[Term]:
    """The encodings of the study's grid; RoPE on some heads is one entry."""
    places = {(key.protocol, _family(key.label)) for key in planned(state.plan)}
    labels = ordered(key.label for key in planned(state.plan))
    families = dict.fromkeys(_family(label) for label in labels)
    return [_term(family, labels, places, state.plan.protocols) for family in families if family in _MEANT]


def _family(label: str) -> str:
    return Label.parse(label).base


def _term(
    family: str, labels: list[str], places: Container[tuple[Protocol, str]], protocols: tuple[Protocol, ...]
) -> Term:
    what, paper, released = _MEANT[family]
    label = next(label for label in labels if _family(label) == family)
    swapped = ("rope-alone", "rope-absolute")
    meant = [
        {"paper": paper, "released": released}[p] if (p, family) in places or family in swapped else _ABSENT
        for p in protocols
    ]
    return Term(
        "RoPE on some heads" if family == "partial" else title(family), colour(label), glyph(label), what, meant
    )
