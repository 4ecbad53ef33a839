"""A page of each kind: of the published records, and of made-up results where there is no record."""

from __future__ import annotations

from pathlib import Path

from tests.report.auditing.test_page import random_audit as audit
from tests.report.decomposition.test_page import random_decomposition as structure

from toeplens.cli.studies import page_in
from toeplens.report import Page, comparison_page
from toeplens.studies.card import make_card
from toeplens.studies.kit.probe_items import BY_WORDS, HeadRetrieval
from toeplens.studies.probing.probe import ItemRecord, ProbeRecord

RESULTS = Path(__file__).parents[2] / "results"
RECORDS = ("laptop", "canonical", "language", "smollm2", "theory", "audit-smollm2")
KINDS = (*RECORDS, "compare", "card", "decompose", "probe")


def page_of(name: str) -> Page:
    """A record's page, or that of a kind of results."""
    if name == "compare":
        return comparison_page(audit(rotary=True), audit(rotary=True, seed=1), ("before", "after"))
    if name == "card":
        return make_card("rope", length=128, rounds=1).page()
    if name == "decompose":
        return structure().page()
    if name == "probe":
        return probe().page()
    return page_in(RESULTS / name)


def probe() -> ProbeRecord:
    """A probe of a changed model."""
    changed = {"changed_nats": 2.5, "changed_right": 0.25}
    ranges = [(1, 2), (2, 4), (4, 8), (8, 16)]
    items = [
        ItemRecord(behaviour="loss", item=i, length=16, start=a, stop=b, nats=3 / b + i / 9, right=0.5, **changed)
        for i in range(3)
        for a, b in ranges
    ]
    items += [
        ItemRecord(behaviour="needle", item=i, length=length, depth=depth, nats=depth + i / 4, right=1.0, **changed)
        for i, (length, depth) in enumerate((n, d) for n in (64, 128) for d in (0.0, 0.5, 1.0))
    ]
    items += [ItemRecord(behaviour="copying", item=i, length=64, nats=1.0 + i, right=0.5, **changed) for i in range(3)]
    items += [
        ItemRecord(
            behaviour=kind, item=i, length=words, nats=1.0, right=float(words < 8 or kind == "word by key"), **changed
        )
        for kind in BY_WORDS
        for i, words in enumerate((4, 4, 8, 8))
    ]
    heads = tuple(
        HeadRetrieval(layer=layer, head=head, score=(layer + head) / 8, mass=0.5)
        for layer in range(4)
        for head in range(4)
    )
    return ProbeRecord({"model": "a/model"}, ("layer 1: rotation frozen",), tuple(items), heads)
