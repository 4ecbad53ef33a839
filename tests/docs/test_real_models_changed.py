"""docs/real-models.md: what models lose without heads, frequencies and position is what the records say."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
from tests.docs.answers import more, verdict
from tests.studies.probing.models import TEXT, tokenizer

from toeplens.papers.positional_symbolic.pretrained import Pretrained
from toeplens.papers.positional_symbolic.pretrained.changes import changes_of
from toeplens.papers.positional_symbolic.pretrained.heads import effects_of
from toeplens.studies.kit.changes import told
from toeplens.studies.kit.questions import Writer

ROOT = Path(__file__).parents[2]
OTHERS = ("no-others-0", "no-others-1", "no-others-2")


def test_a_tenth_of_the_tokens_is_a_tenth(smollm2: Pretrained) -> None:
    """Of twelve needles' sixty tokens six; as a sum of floats that may be less than a tenth."""
    for head in smollm2.probes["intact"].heads:
        tokens = 60 * head.score
        assert abs(tokens - round(tokens)) < 1e-6
        assert (head.score >= 0.1) == (round(tokens) >= 6)


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


def test_one_head_that_looks_at_the_token_before_is_too_few(gemma3: Pretrained) -> None:
    (entry,) = (entry for entry in gemma3.entries if entry.claim.id == "previous-token-fast")
    assert entry.verdict == "undecided"
    assert "1 heads look at the token before; 3 are needed" in entry.evidence[0]
    assert abs(more(gemma3, "fast-still", "copying")) < 0.02


def test_what_silencing_the_heads_that_retrieve_breaks_besides(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "the text costs it 7.9 nats .. All four heads of its sixth layer .. four come from layers where none .."."""
    for study, own, least, most in ((gemma3, 7.9, 0.6, 0.9), (smollm2, 0.36, 0.17, 0.24)):
        digits = 1 if study is gemma3 else 2
        others = [round(more(study, f"no-others-{draw}", "loss"), digits) for draw in range(3)]
        assert round(more(study, "no-retrieval", "loss"), digits) == own
        assert (min(others), max(others)) == (least, most)
    audits = [gemma3.audits[f"text-{number}"] for number in range(6)]
    chosen = {
        each: changes_of(each, gemma3.plan, audits, gemma3.probes["intact"]) for each in ("no-retrieval", *OTHERS)
    }
    for name, changes in chosen.items():
        assert tuple(told(changes)) == gemma3.probes[name].changes
    heads = {each.layer: each.heads for each in chosen["no-retrieval"]}
    assert heads[5] == (0, 1, 2, 3)
    for name in OTHERS:
        elsewhere = [each.heads for each in chosen[name] if each.layer not in heads]
        assert sum(len(each or ()) for each in elsewhere) == 4


def test_quarters_that_are_drawn(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "one leaves SmolLM2 nine of twelve needles and two leave none .. Gemma keeps four to nine"."""
    for study, wanted in ((smollm2, [0, 0, 9]), (gemma3, [4, 9, 9])):
        left = [
            sum(item.changed_right or 0 for item in study.probes[f"some-silent-{draw}"].of("needle"))
            for draw in range(3)
        ]
        assert sorted(left) == wanted


def test_how_far_the_slowest_quarter_turns(smollm2: Pretrained, gemma3: Pretrained) -> None:
    """ "over 512 tokens .. 0.09 radians at most in SmolLM2, in Gemma by 0.02 in layers that see all and by 0.51"."""
    for study, wanted in ((smollm2, {False: 0.09}), (gemma3, {False: 0.02, True: 0.51})):
        found: dict[bool, float] = {}
        for layer in study.audits["text-0"].layers:
            slow = np.sort(np.abs(layer.frequencies))[: len(layer.frequencies) // 4].max()
            local = layer.window is not None
            found[local] = max(found.get(local, 0.0), 512 * float(slow))
        assert {local: round(turn, 2) for local, turn in found.items()} == wanted


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
        short = [item for item in study.probes["still-0"].of("loss") if (item.start or 0) < study.plan.effect_tokens]
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
    """ "spread over many heads, least of it in the last third .. in SmolLM2 most .. in Gemma .. about as much"."""
    audit = either.audits["position"]
    effects, counted = effects_of(audit), effects_of(audit, "_low") > 0
    layers = np.array([head.layer for head in audit.heads]) + 1
    assert counted.sum() > 20
    assert effects[counted].max() < effects[counted].sum() / 2
    third = len(audit.layers) / 3
    parts = (layers <= third, (layers > third) & (layers <= 2 * third), layers > 2 * third)
    early, middle, late = (effects[counted & part].sum() / effects[counted].sum() for part in parts)
    assert late < min(early, middle)
    if len(audit.layers) == 30:
        assert middle > 2 * early
    else:
        assert abs(middle - early) < 0.06
        others = counted & (effects < effects[counted].max())
        assert effects[others & parts[0]].sum() > effects[others & parts[1]].sum()
    said = f"{early:.0%}, {middle:.0%}, {late:.0%} are in the first, second and last third of the layers"
    assert said in tool.PAGE.read_text()
    assert verdict(either, "deposit-pretrained") == "fails"
