"""The claims about positional and symbolic heads, on made-up studies in which each of them holds, or fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.papers.positional_symbolic.worlds import (
    CHANCE,
    SPEC,
    Model,
    World,
    cell,
    changed,
    judged,
    papers,
    scan,
    turned,
)
from tests.studies import measures

from toeplens.lens import HeadAblation
from toeplens.papers.positional_symbolic.claims import CLAIMS, Evidence
from toeplens.studies import Results, Verdict, judge_all
from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.relations import relations


def test_all_hold_where_all_is_as_the_papers_say():
    found = judged(papers())
    assert {name: entry.verdict for name, entry in found.items()} == dict.fromkeys(found, "holds")
    assert [name for name, entry in found.items() if entry.plain != "holds"] == []


OTHERWISE: dict[str, tuple[World, str, Verdict]] = {
    "both-scores": (changed(("index", "rope"), scores=(0.68, 0.68)), "exclusion", "fails"),
    "slow-and-positional": (
        changed(("index", "rope"), ("mix", "rope"), ("retrieval", "rope"), fast=False),
        "behaviour-and-frequency",
        "fails",
    ),
    "fast-and-positional-from-the-start": (
        changed(("index", "rope"), ("mix", "rope"), ("retrieval", "rope"), born=True),
        "behaviour-and-frequency",
        "holds in part",
    ),
    "index-without-high": (changed(("index", "low"), accuracy=0.95), "index-needs-high-frequencies", "fails"),
    "index-with-a-little": (changed(("index", "low"), accuracy=0.75), "index-needs-high-frequencies", "holds in part"),
    "retrieval-without-low": (
        changed(("retrieval", "high"), accuracy=0.95),
        "retrieval-needs-low-frequencies",
        "fails",
    ),
    "retrieval-with-a-little": (
        changed(("retrieval", "high"), accuracy=0.75),
        "retrieval-needs-low-frequencies",
        "holds in part",
    ),
    "mix-with-high-alone": (changed(("mix", "high"), accuracy=0.98), "mix-needs-both", "fails"),
    "mix-with-low-alone": (changed(("mix", "low"), accuracy=0.98), "mix-needs-both", "fails"),
    "a-high-band-that-is-not": (changed(("mix", "high"), slowest=0.1), "mix-needs-both", "undecided"),
    "monotone-index": (scan("index", 3.0), "index-inverted-u", "fails"),
    "monotone-mix": (scan("mix", 0.01), "mix-inverted-u", "fails"),
    "inverted-retrieval": (scan("retrieval", 0.3), "retrieval-u", "fails"),
    "symbolic-index": (changed(("index", "rope"), positional=0.05, symbolic=0.9), "canonical-heads", "fails"),
    "mixed-index": (changed(("index", "*"), positional=0.7, symbolic=0.2), "canonical-tasks-pure", "fails"),
    "mixed-retrieval": (changed(("retrieval", "*"), positional=0.2, symbolic=0.7), "canonical-tasks-pure", "fails"),
    "reversed": (changed(("reverse", "rope"), accuracy=0.8), "intricate-tasks-exceed", "fails"),
    "reversed-already": (changed(("reverse", "rope"), accuracy=0.8, settled=False), "intricate-tasks-exceed", "fails"),
    "not-reversed-yet": (changed(("dyck", "rope"), settled=False), "intricate-tasks-exceed", "undecided"),
    "nope-can": (changed(("index", "nope"), accuracy=0.9), "canonical-tasks", "fails"),
    "nope-can-nothing": (changed(("retrieval", "nope"), accuracy=0.8), "canonical-tasks", "fails"),
    "slow-bands": (changed(("index", "rope"), bands=(0.1, 1.0)), "faster-half-at-inference", "fails"),
    "bands-without-effect": (changed(("index", "rope"), bands=(0.0, 0.0)), "faster-half-at-inference", "undecided"),
    "pure-from-the-start": (changed(("index", "rope"), before=0.95), "positional-head-emerges", "fails"),
    "never-pure": (changed(("retrieval", "rope"), symbolic=0.8), "symbolic-head-emerges", "fails"),
    "position-extrapolates": (changed(("index", "rope"), kept=0.99), "symbolic-extrapolates", "fails"),
    "positional-lasts": (
        turned(lambda model: model.positional, kept=lambda x: x),
        "positional-share-against-length",
        "fails",
    ),
    "deposit-lasts": (turned(lambda model: model.peak, kept=lambda x: x), "deposit-against-length", "fails"),
    "coupling-lasts": (
        turned(lambda model: 1 - model.positional - model.symbolic, kept=lambda x: 0.5 + x),
        "coupling-against-length",
        "fails",
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_and_otherwise_where_it_is_not(case: str):
    world, claim, verdict = OTHERWISE[case]
    entry = judged(world, only=claim)[claim]
    assert entry.verdict == verdict, entry.evidence


def test_nothing_is_decided_on_nothing():
    results = Results([])
    entries = judge_all(CLAIMS, Evidence(SPEC, results, relations(SPEC, results)))
    assert {entry.verdict for entry in entries} == {"undecided"}
    assert all(entry.evidence and entry.wanting for entry in entries)


def test_few_seeds_only_lean():
    found = judged(papers(), 4)
    assert {entry.verdict for entry in found.values()} == {"leans to hold"}
    otherwise = judged(changed(("index", "low"), accuracy=0.95), 4, "index-needs-high-frequencies")
    assert otherwise["index-needs-high-frequencies"].verdict == "leans to fail"


def test_what_still_learns_does_not_count():
    found = judged(changed(("index", "high"), ("retrieval", "turn/0.1"), settled=False))
    assert found["index-needs-high-frequencies"].verdict == "undecided"
    assert "8 of 8 and 0 of 8 models left out: still learning" in found["index-needs-high-frequencies"].evidence[0]
    assert found["retrieval-u"].verdict == "undecided"
    assert found["index-inverted-u"].verdict == found["retrieval-needs-low-frequencies"].verdict == "holds"


def test_what_was_not_measured_before_training_supports_nothing():
    entry = judged(changed(*((task, "rope") for task in ("index", "mix", "retrieval")), born=None))[
        "behaviour-and-frequency"
    ]
    assert entry.verdict == "holds"  # what is essential was measured
    assert entry.evidence[1].endswith("what the models were before training was not measured")


def test_heads_without_effect_decide_nothing():
    found = judged(changed(("index", "*"), ("retrieval", "*"), sure=False))
    for name in ("canonical-heads", "canonical-tasks-pure", "positional-head-emerges", "symbolic-head-emerges"):
        assert found[name].verdict == "undecided", name
    assert "no head whose loss is told from none" in found["canonical-heads"].evidence[0]


# ---- the figures ----------------------------------------------------------------------------------------------------


def test_figures_of_a_model_by_hand():
    one = cell("index", "rope", 0, Model(accuracy=0.8, peak=0.5, kept=0.25))
    assert heads.carried(one, "positional") == pytest.approx(0.9)
    assert heads.carried(one, "symbolic") == pytest.approx(0.05)
    assert one.peak == pytest.approx(0.5)
    assert heads.skill_at(one, 1.0) == pytest.approx(one.skill) == pytest.approx(7 / 9)
    assert heads.kept(one) == pytest.approx(0.25)
    assert heads.kept(one, 2.0) == pytest.approx(0.0625)
    assert np.isnan(heads.kept(one, 4.0))
    assert np.isnan(heads.kept(replace(one, result={"test_accuracy": 0.2})))
    assert np.isnan(heads.carried(replace(one, measures={}), "positional"))
    assert cell("index", "nope", 0, Model()).measure("frequency") is None
    flat = replace(one, measures={"behaviour": measures.behaviour(*[[[None, 0.4]]] * 3)})
    assert np.isnan(heads.carried(flat, "positional"))  # the head that matters has no share
    drops = np.array([[0.2, 0.6]])
    half = HeadAblation(
        drops, drops, drops, 0.5, np.full((1, 3), np.nan), 10, CHANCE, metric="loss", intervention="zero"
    )
    assert heads.carried(replace(one, by_loss=half), "positional") == pytest.approx(0.25 * 0.9 + 0.75 * 0.05)
    assert np.isnan(heads.carried(replace(one, by_loss=None), "positional"))
