"""docs/real-models.md is written from the records, and what it makes of them is what they say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.builders import script

from toeplens.papers.positional_symbolic.pretrained import Pretrained
from toeplens.papers.positional_symbolic.pretrained.heads import effects_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return script(ROOT / "tools" / "findings.py")


@pytest.fixture(scope="module")
def found(tool: ModuleType) -> dict[str, Pretrained]:
    return tool.records()


@pytest.fixture(scope="module")
def smollm2(found: dict[str, Pretrained]) -> Pretrained:
    return found["SmolLM2"]


def more(study: Pretrained, piece: str, behaviour: str) -> float:
    values = [item for item in study.probes[piece].items if item.behaviour == behaviour]
    weights = [item.places for item in values]
    return float(np.average([(item.changed_nats or 0) - item.nats for item in values], weights=weights))


def test_its_numbers_are_the_records(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.page(), "run python tools/findings.py"


def test_numbers_are_taken_rightly(tool: ModuleType, smollm2: Pretrained) -> None:
    """Some of them another way."""
    text = tool.PAGE.read_text()
    heads = [head for head in smollm2.audits["position"].heads if head.effect is not None]
    best = max(heads, key=lambda head: head.effect or 0)
    assert f"costs most in layer {best.layer + 1} head {best.head + 1}: {best.effect:.3f} nats" in text
    assert f"text {more(smollm2, 'still-0', 'loss'):.2f}, needles {more(smollm2, 'still-0', 'needle'):.2f}" in text
    scores = [head.score for head in smollm2.probes["intact"].heads]
    assert f"{sum(score >= 0.1 for score in scores)} of {len(scores)} heads" in text


def test_the_first_page_says_what_was_found(tool: ModuleType, smollm2: Pretrained) -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "the more positional a head, the faster the frequencies it uses" in text
    heads = smollm2.heads("text")
    assert heads is not None
    assert min(heads.correlations("positional", "centre", np.ones(len(heads.layer), dtype=bool))) > 0.8
    assert "stopping the fastest four of its 32 pairs costs more than stopping any other four" in text
    for behaviour in ("loss", "needle", "copying"):
        costs = [more(smollm2, f"still-{band}", behaviour) for band in range(8)]
        assert costs[0] == max(costs)
    assert {len(layer.frequencies) for layer in smollm2.audits["text-0"].layers} == {32}
    retrieve = sum(head.score >= 0.1 for head in smollm2.probes["intact"].heads)
    assert f"{retrieve} heads of {len(heads.layer)} retrieve, and without them none of 12 needles is found" in text
    needles = [item.changed_right for item in smollm2.probes["no-retrieval"].items if item.behaviour == "needle"]
    assert (len(needles), max(each or 0 for each in needles)) == (12, 0)


def test_the_correspondence_is_nearly_as_large_in_random_order(smollm2: Pretrained) -> None:
    """ "tokens in random order show nearly as much of it, and random weights have a good part"."""
    own, random, shuffled = (
        np.mean(heads.correlations("positional", "centre", np.ones(len(heads.layer), dtype=bool)))
        for kind in ("text", "random", "shuffled")
        if (heads := smollm2.heads(kind)) is not None
    )
    assert 0.9 * own < shuffled < own
    assert 0.5 * own < random < 0.9 * own


def test_slow_pairs_are_needed_and_may_stand_still(smollm2: Pretrained) -> None:
    """ "The slow pairs of heads that retrieve are needed, but not for position .. they may stand still"."""
    assert more(smollm2, "slow-silent", "needle") > 1
    assert max(more(smollm2, f"still-{band}", "needle") for band in (6, 7)) < 0.05


def test_the_work_is_spread(smollm2: Pretrained) -> None:
    """ "spread over many heads, in the middle of the model as much as at its beginning"."""
    audit = smollm2.audits["position"]
    effects, counted = effects_of(audit), effects_of(audit, "_low") > 0
    layers = np.array([head.layer for head in audit.heads]) + 1
    assert counted.sum() > 20
    assert effects[counted].max() < effects[counted].sum() / 2
    third = len(audit.layers) / 3
    early, middle = (
        effects[counted & part].sum() for part in (layers <= third, (layers > third) & (layers <= 2 * third))
    )
    assert middle > 0.5 * early
    assert next(entry.verdict for entry in smollm2.entries if entry.claim.id == "deposit-pretrained") == "fails"
