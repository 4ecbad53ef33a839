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


@pytest.fixture(scope="module")
def gemma3(found: dict[str, Pretrained]) -> Pretrained:
    return found["Gemma 3"]


@pytest.fixture(params=["SmolLM2", "Gemma 3"])
def either(request: pytest.FixtureRequest, found: dict[str, Pretrained]) -> Pretrained:
    return found[request.param]


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
    assert f"text, the fastest {more(smollm2, 'still-0', 'loss'):.2f}, then" in text
    assert f"needles, the fastest {more(smollm2, 'still-0', 'needle'):.2f}, then" in text
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


def verdict(study: Pretrained, claim: str) -> str:
    return next(entry.verdict for entry in study.entries if entry.claim.id == claim)


def test_the_correspondence_is_nearly_as_large_in_random_order(either: Pretrained) -> None:
    """ "in both models and in both kinds of Gemma's layers .. random weights have about half or more"."""
    of_text = either.heads("text")
    assert of_text is not None
    for which in of_text.parts.values():
        own, random, shuffled = (
            np.mean(heads.correlations("positional", "centre", which))
            for kind in ("text", "random", "shuffled")
            if (heads := either.heads(kind)) is not None
        )
        assert own > 0.5
        assert 0.9 * own < shuffled < own
        assert 0.45 * own < random < 0.9 * own


def test_purely_positional_heads_are_smollm2s_alone(smollm2: Pretrained, gemma3: Pretrained) -> None:
    for study, some in ((smollm2, True), (gemma3, False)):
        heads = study.heads("text")
        assert heads is not None
        assert (max(heads.by_text(lambda c: (c["positional"] >= 0.9).sum())) > 0) == some
        assert min(heads.by_text(lambda c: (c["symbolic"] >= 0.9).sum())) > 0


def test_more_heads_retrieve_than_the_sources(either: Pretrained) -> None:
    scores = [head.score for head in either.probes["intact"].heads]
    assert sum(score >= 0.1 for score in scores) / len(scores) > 0.05


def test_slow_pairs_are_needed_and_may_stand_still(either: Pretrained) -> None:
    """ "The slow pairs of heads that retrieve are needed .. but not for position .. they may stand still"."""
    assert more(either, "slow-silent", "needle") > 1
    assert abs(more(either, "slow-still", "needle")) < 0.05
    assert max(more(either, f"still-{band}", "needle") for band in (6, 7)) < 0.05


def test_what_the_models_live_on(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "its fastest pairs, Gemma on .. the fastest and the fifth .. more than half .. only when several layers .."."""
    for study, eighths in ((smollm2, [0]), (gemma3, [0, 4])):
        for behaviour in ("loss", "needle", "copying"):
            costs = np.array([more(study, f"still-{band}", behaviour) for band in range(8)])
            assert sorted(np.argsort(-costs)[: len(eighths)].tolist()) == eighths
            assert costs[eighths].min() > 2 * np.delete(costs, eighths).max()
        bands = study.audits["bands"].bands
        for eighth in eighths:
            own = [
                sorted((band for band in bands if band.layer == layer), key=lambda band: -band.fastest)[eighth]
                for layer in {band.layer for band in bands}
            ]
            assert sum(band.effect or 0 for band in own) < more(study, f"still-{eighth}", "loss") / 2


def test_the_most_positional_head(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "is also the one whose position is worth most .. in SmolLM2 and not in Gemma"."""
    for study, same in ((smollm2, True), (gemma3, False)):
        heads = study.heads("text")
        assert heads is not None
        assert (np.argmax(heads.mean("positional")) == np.argmax(effects_of(study.audits["position"]))) == same


def test_the_work_is_spread(either: Pretrained) -> None:
    """ "spread over many heads, in the middle of the model as much as at its beginning"."""
    audit = either.audits["position"]
    effects, counted = effects_of(audit), effects_of(audit, "_low") > 0
    layers = np.array([head.layer for head in audit.heads]) + 1
    assert counted.sum() > 20
    assert effects[counted].max() < effects[counted].sum() / 2
    third = len(audit.layers) / 3
    early, middle = (
        effects[counted & part].sum() for part in (layers <= third, (layers > third) & (layers <= 2 * third))
    )
    assert middle > 0.5 * early
    assert verdict(either, "deposit-pretrained") == "fails"
