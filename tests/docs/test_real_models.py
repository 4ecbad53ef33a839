"""docs/real-models.md is written from the records, and what it makes of them is what they say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats
from tests.builders import script
from tests.studies.probing.models import TEXT, tokenizer

from toeplens.papers.positional_symbolic.pretrained import Pretrained
from toeplens.papers.positional_symbolic.pretrained.clustered import by_text
from toeplens.papers.positional_symbolic.pretrained.heads import effects_of
from toeplens.studies.kit.questions import Writer
from toeplens.studies.kit.verdicts import ENOUGH, within

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
    """ "The slowest pairs of the heads that retrieve are needed .. they take all needles .. they may stand still"."""
    silent, still = either.probes["slow-silent"], either.probes["retrieval-still"]
    assert more(either, "slow-silent", "needle") > 1
    assert {item.changed_right for item in silent.of("needle")} == {0}
    assert abs(more(either, "retrieval-still", "needle")) < 0.01, "next to nothing"
    assert [item.changed_right for item in still.of("needle")] == [item.right for item in still.of("needle")]
    assert [line.replace("are silent", "stand still") for line in silent.changes] == list(still.changes)
    assert len(either.probes["intact"].of("needle")) == 12
    assert {item.length for item in still.of("needle")} == {512}


def test_each_of_the_two_slowest_eighths_by_itself(tool: ModuleType, either: Pretrained) -> None:
    """ "Of the two slowest eighths neither, stopped by itself, costs any of them more than"."""
    worst = max(more(either, f"still-{band}", name) for band in (6, 7) for name in ("loss", "needle", "copying"))
    assert f"stopped by itself, costs any of them more than {worst:.2f}" in tool.PAGE.read_text()
    assert worst < 0.05


def test_what_the_models_are(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "30 layers of 9 heads of 64 dimensions on 3 key heads, RoPE with base 100,000 .." and Gemma's."""
    for study, sizes, kinds in (
        (smollm2, (30, 9, 64, 3), {(None, 100_000): 30}),
        (gemma3, (18, 4, 256, 1), {(None, 1_000_000): 3, (512, 10_000): 15}),
    ):
        layers = study.audits["text-0"].layers
        assert (len(layers), layers[0].heads, layers[0].head_dim, layers[0].key_heads) == sizes
        assert len({(one.heads, one.head_dim, one.key_heads) for one in layers}) == 1
        found: Counter[tuple[int | None, int]] = Counter()
        for one in layers:
            fast = np.abs(one.frequencies)
            base = (fast[0] / fast[1]) ** (one.head_dim / 2)
            found[one.window, 100 * round(float(base) / 100)] += 1
            assert len(fast) == one.head_dim / 2
        assert found == kinds
    sizes = [round(study.audits["text-0"].about["parameters"] / 1e6) for study in (smollm2, gemma3)]
    assert sizes == [135, 268], "SmolLM2-135M, Gemma 3 270M"


def test_they_come_from_four_bits_a_weight() -> None:
    models = script(ROOT / "tools" / "real_models.py").MODELS
    names = {name: "".join(models[name].pieces).lower() for name in ("smollm2", "gemma3")}
    assert all(kind in names[name] for name, kind in (("smollm2", "q4_1"), ("gemma3", "q4_k_m")))


def test_what_was_asked(either: Pretrained) -> None:
    """ "Six sequences of 1,024 tokens, two of each .. twelve needles in 512 tokens .. the first 256 tokens of six"."""
    plan = either.plan
    assert (set(plan.texts), plan.sequences, plan.together) == ({"novel", "code", "documentation"}, 2, 1)
    assert (plan.tokens, plan.probe_tokens, plan.effect_tokens) == (1024, 512, 256)
    for number in range(6):
        about = either.audits[f"text-{number}"].about
        assert (about["sequences"], about["tokens"]) == (1, 1024)
    for name in ("silenced", "position", "bands"):
        assert (either.audits[name].about["sequences"], either.audits[name].about["tokens"]) == (6, 256)
    for name in ("still-0", "retrieval-still", "no-retrieval"):
        assert len(either.probes[name].of("needle")) == 12
        assert {item.length for item in either.probes[name].of("needle")} == {512}
    layers = either.audits["text-0"].layers
    pairs = len(layers[0].frequencies) // 8
    for eighth in range(8):
        stands = f"pairs {eighth * pairs + 1}–{(eighth + 1) * pairs} stand still"
        assert either.probes[f"still-{eighth}"].changes == (f"layers 1–{len(layers)}: {stands}",), "in all heads"


def test_needles_are_five_digits() -> None:
    writer = Writer(tokenizer(), TEXT, 0)
    for _ in range(9):
        item = writer.needle(96, 0.5)
        said = writer.tokenizer.decode([item.tokens[place] for place in item.places]).replace(" ", "")
        assert re.fullmatch(r"\d{5}", said)


def test_lists_say_nothing(tool: ModuleType, either: Pretrained) -> None:
    """ "four questions of each kind .. too few to say anything, and no claim rests on them"."""
    for name in ("counting", "order"):
        items = either.probes["intact"].of(name)
        assert len(items) == 4
        assert f"{name}: {sum(item.right for item in items):.0f} of 4 right" in tool.PAGE.read_text()
    told = " ".join(line for entry in either.entries for line in entry.evidence)
    assert "counting" not in told
    assert "order" not in told.replace("tokens in random order", "")


def test_single_heads_have_intervals_over_blocks_and_no_correction(either: Pretrained) -> None:
    for name in ("silenced", "position", "bands"):
        assert either.audits[name].about["intervals"].startswith("over blocks of about")
    for claim in ("position-worth", "deposit-pretrained"):
        (entry,) = (entry for entry in either.entries if entry.claim.id == claim)
        assert all(part.holds is None for part in entry.findings)


def test_what_three_texts_leave_open(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "it is not sure that either model has 0.1 more .. of Gemma's layers .. nor that SmolLM2 has a purely .."."""
    text = (ROOT / "docs" / "real-models.md").read_text()
    decision = " ".join((ROOT / "docs" / "decisions" / "020-one-model-many-texts.md").read_text().split())
    for study, open_parts in (
        (smollm2, {"correspondence-learned": ["all heads"], "pure-heads": ["heads whose positional share"]}),
        (gemma3, {"correspondence-learned": ["layers that see all"]}),
    ):
        found = list(by_text(study))
        others = [each for each in found if each.differs and each.part.essential]
        assert {each.entry.claim.id for each in others} == set(open_parts)
        for each in others:
            assert any(words in each.part.evidence for words in open_parts[each.entry.claim.id])
            assert (each.part.verdict, each.verdict, each.texts) == ("holds", "undecided", 3)
            assert f"{each.value:.3f} [{each.low:.3f}, {each.high:.3f}]" in text
        kept = len(found) - sum(each.differs for each in found)
        assert f"Of {len(found)} comparisons over sequences {kept} come out the same" in text
        assert {each.part.verdict for each in found if not each.differs} <= {"holds", "fails"}
        assert all(each.part.comparison and len(each.part.comparison.seen.terms[0][1]) == 6 for each in found)
    assert "6 of SmolLM2's 8 comparisons over sequences come out the same and 7 of Gemma's 10" in decision
    assert "(0.25, from 0.03 to 0.47, and in Gemma's layers that see all 0.50, from -0.03 to 1.02" in decision
    assert "(2.8, from -0.3 to 6.0, at a bar of 0.5)" in decision
    supporting = [
        [each.part.evidence for each in by_text(study) if each.differs and not each.part.essential]
        for study in (smollm2, gemma3)
    ]
    assert supporting[0] == []
    assert len(supporting[1]) == 2
    assert all("less that of tokens in random order" in evidence for evidence in supporting[1])
    (window,) = (
        each
        for each in by_text(gemma3)
        if each.entry.claim.id == "correspondence-learned"
        and each.part.essential
        and "see a window" in each.part.evidence
    )
    assert (window.part.verdict, window.verdict) == ("holds", "holds")
    spreads = stats.t.ppf(0.975, [2, 5])
    np.testing.assert_allclose(spreads, [4.3, 2.6], atol=0.05)


def test_three_texts_would_only_lean(either: Pretrained) -> None:
    """ "By the rule, which asks for five, over three texts nothing would hold or fail"."""
    assert ENOUGH == 5
    for each in by_text(either):
        comparison = each.part.comparison
        assert comparison is not None
        texts = np.reshape(comparison.seen.terms[0][1], (3, 2)).mean(1)
        assert within("of texts", texts.tolist(), comparison.low, comparison.high).verdict.startswith("leans")


def test_an_encoder(tool: ModuleType) -> None:
    """ "6 layers of 12 heads .. learned positions .. 32 at a time (2 groups from each text, 46 tokens a sequence)"."""
    (study,) = tool.records(tool.ENCODERS).values()
    plan, audit = study.plan, study.audits["text-0"]
    assert (len(audit.layers), {one.heads for one in audit.layers}) == (6, {12})
    assert not any(one.causal or one.frequencies for one in audit.layers)
    assert (plan.turns, plan.biased, plan.predicts) == (False, False, False)
    assert (plan.together, plan.sequences, plan.tokens, len(plan.texts)) == (32, 2, 46, 3)
    assert (audit.about["sequences"], audit.about["tokens"]) == (32, 46)
    assert round(100 * (1 - 1 / plan.together)) == 97
    heads = study.heads("text")
    assert heads is not None
    assert max(np.max(row) for row in heads.columns["symbolic"]) <= 1 - 1 / plan.together
    known = {entry.claim.id for entry in study.entries if any(part.known for part in entry.findings)}
    assert known == {"pure-heads"}
    assert {entry.verdict for entry in study.entries if entry.claim.id not in known} == {"undecided"}


def test_what_the_models_live_on(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "its fastest pairs, Gemma on .. the fastest and the fifth .. more than half .. only when several layers .."."""
    for study, eighths in ((smollm2, [0]), (gemma3, [0, 4])):
        for behaviour in ("loss", "needle", "copying"):
            costs = np.array([more(study, f"still-{band}", behaviour) for band in range(8)])
            assert sorted(np.argsort(-costs)[: len(eighths)].tolist()) == eighths
            assert costs[eighths].min() > 2 * np.delete(costs, eighths).max()
        bands = study.audits["bands"].bands
        fastest = [
            max((band for band in bands if band.layer == layer), key=lambda band: band.fastest)
            for layer in {band.layer for band in bands}
        ]
        short = [item for item in study.probes["still-0"].of("loss") if item.start < study.plan.effect_tokens]
        costs = [(item.changed_nats or 0) - item.nats for item in short]
        everywhere = np.average(costs, weights=[item.places for item in short])
        assert sum(band.effect or 0 for band in fastest) < everywhere / 2


def test_the_most_positional_head(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "is also the one whose position is worth most .. in SmolLM2 and not in Gemma"."""
    for study, same in ((smollm2, True), (gemma3, False)):
        heads = study.heads("text")
        assert heads is not None
        assert (np.argmax(heads.mean("positional")) == np.argmax(effects_of(study.audits["position"]))) == same


def test_the_work_is_spread(tool: ModuleType, either: Pretrained) -> None:
    """ "spread over many heads, more of it in the middle third .. than in the first, and least in the last"."""
    audit = either.audits["position"]
    effects, counted = effects_of(audit), effects_of(audit, "_low") > 0
    layers = np.array([head.layer for head in audit.heads]) + 1
    assert counted.sum() > 20
    assert effects[counted].max() < effects[counted].sum() / 2
    third = len(audit.layers) / 3
    parts = (layers <= third, (layers > third) & (layers <= 2 * third), layers > 2 * third)
    early, middle, late = (effects[counted & part].sum() / effects[counted].sum() for part in parts)
    assert middle > early > late
    said = f"{early:.0%}, {middle:.0%}, {late:.0%} are in the first, second and last third of the layers"
    assert said in tool.PAGE.read_text()
    assert verdict(either, "deposit-pretrained") == "fails"
