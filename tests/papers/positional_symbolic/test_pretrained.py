"""The study of a pretrained model: every piece is what it says, a stop loses nothing, claims find what is planted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.studies.probing.models import TEXT, save_model

from toeplens.backends.hf import load_model
from toeplens.engine import ExecutionOptions
from toeplens.papers.positional_symbolic.pretrained import (
    PretrainedPlan,
    PretrainedStudy,
    examine,
    gather,
    is_pretrained,
    open_record,
)
from toeplens.papers.positional_symbolic.pretrained.parts import (
    PartRunner,
    changes_of,
    previous_token_heads,
    retrieval_heads,
)
from toeplens.papers.positional_symbolic.pretrained.study import compare_by_text
from toeplens.studies.auditing.record import Audit, HeadRecord
from toeplens.utils import InputError

TEXTS = {"one": TEXT, "other": TEXT[::-1]}
SIZES: dict[str, Any] = {"sequences": 3, "tokens": 96, "effect_tokens": 24, "probe_tokens": 96}

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def study(model: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainedStudy:
    return examine(str(model), TEXTS, tmp_path_factory.mktemp("study"), device="cpu", **SIZES)


def test_every_part_is_present_and_round_trips(study: PretrainedStudy) -> None:
    assert study.is_complete
    assert study.total == study.finished == len(list(study.plan.iter_parts()))
    assert is_pretrained(study.directory)
    assert gather(study.directory) == replace(study, environment=gather(study.directory).environment)
    assert len(study.entries) == 10
    results = json.loads((study.directory / "results.json").read_text())
    assert set(results["audits"]) == set(study.audits)
    assert set(results["probes"]) == set(study.probes)
    assert list((study.directory / "pieces").glob("*.parts")) == []


def test_a_published_record_has_the_same_page(study: PretrainedStudy, tmp_path: Path) -> None:
    """results.json.gz and claims.json alone, as `results/` holds them."""
    assert not is_pretrained(tmp_path)
    (tmp_path / "results.json.gz").write_bytes(gzip.compress((study.directory / "results.json").read_bytes()))
    assert not is_pretrained(tmp_path)
    (tmp_path / "claims.json").write_bytes((study.directory / "claims.json").read_bytes())
    assert is_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    for restored in (open_record(study.directory / "results.json"), gather(tmp_path)):
        assert (restored.audits, restored.probes, restored.plan) == (study.audits, study.probes, study.plan)
        assert [entry.to_dict() for entry in restored.entries] == [entry.to_dict() for entry in study.entries]
    assert sorted(tmp_path.iterdir()) == before, "nothing is written beside a record"
    assert gather(tmp_path).page().html() == gather(study.directory).page().html()


def test_an_interrupted_study_is_resumed(study: PretrainedStudy, model: Path, tmp_path: Path) -> None:
    done: list[str] = []

    def note(name: str, at: int, count: int) -> None:
        done.append(name)

    def go_on(**how: Any) -> PretrainedStudy:
        return examine(str(model), TEXTS, tmp_path, device="cpu", on_part=note, **how, **SIZES)

    requested: list[str] = []
    begun = go_on(
        execution=ExecutionOptions(should_stop=lambda: bool(requested)), on_progress=lambda *_: requested.append("stop")
    )
    assert begun.finished == 0, "the first piece was left between two passes"
    half = go_on(execution=ExecutionOptions(should_stop=lambda: len(done) >= 20))
    assert not half.is_complete
    assert half.finished == len(done) == 20
    uninterrupted = go_on()
    assert len(done) == uninterrupted.total, "nothing was made twice"
    for name, audit in study.audits.items():
        assert (uninterrupted.audits[name].heads, uninterrupted.audits[name].bands) == (audit.heads, audit.bands)
    for name, probe in study.probes.items():
        assert uninterrupted.probes[name].items == probe.items
        assert uninterrupted.probes[name].about | {"seconds": 0} == probe.about | {"seconds": 0}


def test_a_random_weight_baseline_is_distinguished_from_the_model(study: PretrainedStudy) -> None:
    text_heads, random, shuffled = (study.heads(kind) for kind in ("text", "random", "shuffled"))
    assert text_heads is not None
    assert random is not None
    assert shuffled is not None
    assert text_heads.texts == random.texts == shuffled.texts == 6
    for one, other in ((text_heads, random), (text_heads, shuffled), (random, shuffled)):
        assert not np.allclose(one.columns["symbolic"], other.columns["symbolic"])
    assert len({tuple(row) for row in random.columns["symbolic"].round(9)}) == 6, "each text has weights of its own"


def test_a_page_is_made_whichever_parts_are_missing(study: PretrainedStudy) -> None:
    names = [*study.audits, *study.probes]
    for gone in ({"text-0"}, {name for name in names if name.startswith("text")}, set(names[::2]), set(names[1::2])):
        left = {
            field: {name: each for name, each in getattr(study, field).items() if name not in gone}
            for field in ("audits", "probes")
        }
        assert "</html>" in replace(study, **left).with_verdicts().page().html()


@pytest.mark.parametrize(
    ("texts", "sizes", "sentence"),
    [
        (TEXTS, {"seed": 7}, "^seed must be .*, as in the study in"),
        ({"one": TEXT}, {}, "^texts must be the same as in the study in"),
        (TEXTS, {"tokens": 80}, "^tokens must be .*, as in the study in"),
        (TEXTS, {"tokens": 8}, "tokens must be .*, got 8"),
        (TEXTS, {"effect_tokens": 97}, "effect_tokens must be .*, got 97"),
        (TEXTS, {"sequences": 0}, "sequences must be .*, got 0"),
        ({}, {}, "text must be set at least once"),
    ],
)
def test_impossible_options_are_refused(
    texts: dict[str, str], sizes: dict[str, Any], sentence: str, study: PretrainedStudy, model: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        examine(str(model), texts, study.directory, device="cpu", **(SIZES | sizes))


# ---- what is done, and what claims make of it ------------------------------------------------------------------------


def with_head_values(
    study: PretrainedStudy, change: Callable[[HeadRecord, int], dict[str, Any]], kind: str = "text"
) -> PretrainedStudy:
    """The study with other numbers of its heads on the texts."""
    audits = dict(study.audits)
    for text in range(6):
        audit = audits[f"{kind}-{text}"]
        heads = tuple(replace(head, **change(head, text)) for head in audit.heads)
        audits[f"{kind}-{text}"] = Audit.from_dict(replace(audit, heads=heads).to_dict())
    return replace(study, audits=audits)


def number(head: HeadRecord) -> int:
    return 4 * head.layer + head.head


def with_retrieval(
    study: PretrainedStudy, scores: dict[int, float], lost: dict[str, float], times: int = 1
) -> PretrainedStudy:
    """The study whose heads retrieve so well and whose needles, asked so many times, are lost to such a share."""
    probes = dict(study.probes)
    heads = tuple(replace(each, score=scores.get(4 * each.layer + each.head, 0.0)) for each in probes["intact"].heads)
    result = [replace(item, right=1.0 if item.behaviour == "needle" else item.right) for item in probes["intact"].items]
    probes["intact"] = replace(probes["intact"], heads=heads, items=tuple(result))
    for name, share in lost.items():
        items = [
            replace(item, right=1.0, changed_right=float(at / 12 >= share), changed_nats=share + 0.01 * at)
            for at, item in enumerate(probes["intact"].items_of("needle"))
        ] * times
        probes[name] = replace(probes["intact"], items=tuple(items), changes=("something",))
    return replace(study, probes=probes)


def with_effects(study: PretrainedStudy, effects: list[float], spread: float) -> PretrainedStudy:
    audit = study.audits["position"]
    heads = tuple(
        replace(head, effect=value, effect_low=value - spread, effect_high=value + spread)
        for head, value in zip(audit.heads, effects, strict=True)
    )
    return replace(study, audits=dict(study.audits) | {"position": replace(audit, heads=heads)})


def with_some_effects(study: PretrainedStudy, known: Callable[[HeadRecord], bool]) -> PretrainedStudy:
    """A deposit in the first head, where only the effects of these heads are known: others have no rotation."""
    result = with_effects(study, ONE, 0.05)
    audit = result.audits["position"]
    none = dict.fromkeys(("effect", "effect_low", "effect_high"))
    heads = tuple(head if known(head) else replace(head, **none) for head in audit.heads)
    return replace(result, audits=result.audits | {"position": replace(audit, heads=heads)})


def rising_centre(head: HeadRecord, text: int) -> dict[str, Any]:
    return {"positional": 0.1 * number(head), "centre": number(head) + 0.1 * text}


def falling_centre(head: HeadRecord, text: int) -> dict[str, Any]:
    return {"positional": 0.1 * number(head), "centre": -float(number(head))}


def pure_heads(head: HeadRecord, text: int) -> dict[str, Any]:
    return {"positional": 0.95 * (number(head) == 0), "symbolic": 0.95 * (number(head) == 1)}


def mostly_positional(head: HeadRecord, text: int) -> dict[str, Any]:
    return {"positional": 0.9 if number(head) == 2 else 0.1}


def pure_or_missing(head: HeadRecord, text: int) -> dict[str, Any]:
    return dict.fromkeys(("positional", "symbolic"), 0.95 if number(head) else None)


def without_scores(study: PretrainedStudy, *names: str) -> PretrainedStudy:
    return with_head_values(study, lambda head, text: dict.fromkeys(names))


SHARES = ("positional", "symbolic", "interaction")
ONE = [1.0, *[0.05] * 7]
NOISE = np.random.default_rng(0).normal(0, 0.002, 7).tolist()
THREE_HEADS = dict.fromkeys((0, 3, 5), 0.5)
KEPT_SHARES, LOST_SHARES = ({f"no-others-{draw}": share for draw in range(3)} for share in (0.0, 1.0))
RANDOM_ABLATIONS = {f"some-silent-{draw}": 0.2 for draw in range(3)}
Change = Callable[[PretrainedStudy], PretrainedStudy]


def with_opposite_baselines(study: PretrainedStudy) -> PretrainedStudy:
    return with_head_values(
        with_head_values(with_head_values(study, rising_centre), falling_centre, "random"), falling_centre, "shuffled"
    )


CASES: list[tuple[str, str, Change]] = [
    ("positional-frequency", "holds", with_opposite_baselines),
    ("positional-frequency", "fails", lambda study: with_head_values(study, falling_centre)),
    ("positional-frequency", "undecided", lambda study: without_scores(study, "centre")),
    ("positional-frequency", "undecided", lambda study: without_scores(study, *SHARES)),
    ("correspondence-learned", "holds", with_opposite_baselines),
    (
        "correspondence-learned",
        "fails",
        lambda study: with_head_values(with_head_values(study, rising_centre), rising_centre, "random"),
    ),
    ("correspondence-learned", "undecided", lambda study: without_scores(study, *SHARES)),
    ("previous-token-fast", "undecided", lambda study: without_scores(study, "previous")),
    ("pure-heads", "holds", lambda study: with_head_values(study, pure_heads)),
    ("pure-heads", "holds", lambda study: with_head_values(study, pure_or_missing)),  # those that are known count
    (
        "pure-heads",
        "holds in part",
        lambda study: with_head_values(with_head_values(study, pure_heads), pure_heads, "random"),
    ),
    ("pure-heads", "fails", lambda study: study),
    ("pure-heads", "undecided", lambda study: without_scores(study, *SHARES)),
    (
        "retrieval-causal",
        "holds",
        lambda study: with_retrieval(study, {0: 0.5}, KEPT_SHARES | {"no-retrieval": 1.0}, times=4),
    ),
    (
        "retrieval-causal",
        "undecided",
        lambda study: with_retrieval(study, {0: 0.5}, KEPT_SHARES | {"no-retrieval": 1.0}),
    ),
    ("retrieval-causal", "fails", lambda study: with_retrieval(study, {0: 0.5}, LOST_SHARES | {"no-retrieval": 1.0})),
    ("retrieval-causal", "undecided", lambda study: study),
    ("retrieval-slow", "holds", lambda study: with_retrieval(study, {0: 0.5}, RANDOM_ABLATIONS | {"slow-silent": 0.9})),
    ("retrieval-slow", "fails", lambda study: with_retrieval(study, {0: 0.5}, RANDOM_ABLATIONS | {"slow-silent": 0.2})),
    ("retrieval-sparse", "undecided", lambda study: study),  # the model finds no needle
    ("retrieval-sparse", "fails", lambda study: with_retrieval(study, {}, {})),
    ("retrieval-sparse", "fails", lambda study: with_retrieval(study, {0: 0.5}, {})),  # one of eight is no small share
    ("retrieval-symbolic", "undecided", lambda study: with_retrieval(without_scores(study, *SHARES), THREE_HEADS, {})),
    ("deposit-pretrained", "holds", lambda study: with_effects(study, ONE, 0.05)),
    (
        "deposit-pretrained",
        "holds",
        lambda study: with_effects(study, [0.2, *NOISE], 0.006),
    ),  # a noise floor is no rest
    ("deposit-pretrained", "holds", lambda study: with_some_effects(study, lambda head: not head.layer)),
    ("deposit-pretrained", "fails", lambda study: with_effects(study, ONE[::-1], 0.05)),
    ("deposit-pretrained", "fails", lambda study: with_effects(study, [0.1] * 8, 0.01)),
    ("deposit-pretrained", "undecided", lambda study: with_effects(study, [0.0] * 8, 0.0)),
    ("deposit-pretrained", "undecided", lambda study: with_some_effects(study, lambda head: False)),
    (
        "position-worth",
        "holds",
        lambda study: with_effects(with_head_values(study, mostly_positional), [0.05, 0.05, 0.9, *[0.05] * 5], 0.1),
    ),
    (
        "position-worth",
        "fails",
        lambda study: with_effects(with_head_values(study, mostly_positional), [0.5, 0.5, 0.0, *[0.5] * 5], 0.1),
    ),
    ("position-worth", "undecided", lambda study: without_scores(study, *SHARES)),
]


@pytest.mark.parametrize(("claim", "expected", "change"), CASES)
def test_a_claim_recovers_planted_effects(study: PretrainedStudy, claim: str, expected: str, change: Change) -> None:
    actual = {entry.claim.id: entry.uncorrected for entry in change(study).with_verdicts().entries}
    assert actual[claim] == expected


def test_differing_texts_leave_a_claim_undecided(study: PretrainedStudy) -> None:
    """Three sequences of one text have no pure head, those of the other have: six numbers, but two texts."""

    def pure(head: HeadRecord, text: int) -> dict[str, Any]:
        return {"positional": 0.95 * (text < 3 or number(head) < 2), "symbolic": 0.95}

    actual = [
        each
        for each in compare_by_text(with_head_values(study, pure).with_verdicts())
        if each.entry.claim.id == "pure-heads"
    ]
    seen = [(each.finding.essential, each.finding.verdict, each.verdict) for each in actual]
    assert seen == [(kind, "holds", verdict) for kind in (True, False) for verdict in ("undecided", "holds")]
    assert [each.value for each in actual[:2]] == [5.0, 8.0]
    one = replace(study, plan=replace(study.plan, sequences=1, texts=dict.fromkeys("abcdef", "")))
    assert list(compare_by_text(one.with_verdicts())) == [], (
        "of one sequence a text there is nothing to be drawn together"
    )


def test_changes_target_the_named_heads_and_frequencies(study: PretrainedStudy) -> None:
    def looks(head: HeadRecord, text: int) -> dict[str, Any]:
        return {"previous": 0.8 if number(head) in (1, 6) else 0.1}

    chosen = with_retrieval(with_head_values(study, looks), {2: 0.5, 3: 0.2, 5: 0.1, 7: 0.09}, {})
    audits = [chosen.audits[f"text-{text}"] for text in range(6)]
    plan = replace(chosen.plan, texts=TEXTS)
    intact = chosen.probes["intact"]
    assert retrieval_heads(intact) == [(0, 2), (0, 3), (1, 1)]
    assert previous_token_heads(audits) == [(0, 1), (1, 2)]
    zero = changes_of("no-retrieval", plan, audits, intact)
    assert [(c.layer, c.heads, c.output) for c in zero] == [(0, (2, 3), "zero"), (1, (1,), "zero")]
    draws = [changes_of(f"no-others-{draw}", plan, audits, intact) for draw in range(3)]
    for draw in draws:
        heads = {(c.layer, head) for c in draw for head in c.heads or ()}
        assert len(heads) == 3
        assert not heads & set(retrieval_heads(intact))
        assert [len(c.heads or ()) for c in draw] == [2, 1]
    quarter = changes_of("slow-silent", plan, audits, intact)
    assert [(c.layer, c.heads) for c in quarter] == [(0, (2, 3)), (1, (1,))]
    assert all(c.bands is not None and c.bands.drop == (3,) for c in quarter), "the slowest of four pairs"
    still = changes_of("retrieval-still", plan, audits, intact)
    assert [(c.layer, c.heads) for c in still] == [(c.layer, c.heads) for c in quarter], "the heads that retrieve"
    assert all(c.bands is not None and (c.bands.freeze, c.bands.drop) == ((3,), ()) for c in still)
    fast = changes_of("fast-still", plan, audits, intact)
    assert [(c.layer, c.heads, c.bands.freeze if c.bands else ()) for c in fast] == [(0, (1,), (0,)), (1, (2,), (0,))]
    first = changes_of("still-0", plan, audits, intact)
    assert [(c.layer, c.heads, c.bands.freeze if c.bands else ()) for c in first] == [(0, None, (0,)), (1, None, (0,))]
    assert changes_of("still-7", plan, audits, intact) == [], "there are four pairs for eight bands"
    assert changes_of("intact", plan, audits, intact) == []


def test_text_order_and_overlap_do_not_matter(study: PretrainedStudy, model: Path) -> None:
    again = examine(str(model), dict(reversed(TEXTS.items())), study.directory, device="cpu", **SIZES)
    assert again.audits == study.audits
    loaded = load_model(str(model), device="cpu")
    plan = replace(study.plan, texts=TEXTS)
    windows = PartRunner(loaded, plan, study.directory, lambda what, done, total: None).token_sequences
    for text, rows in zip(TEXTS.values(), (windows[:3], windows[3:]), strict=True):
        whole = loaded.tokenizer()(text, add_special_tokens=False)["input_ids"]
        rest = list(whole)
        for row in rows.tolist():
            at = next(i for i in range(len(rest)) if rest[i : i + 95] == row[1:])
            rest = rest[at + 95 :]  # the next one begins after it


def test_models_without_rotation_or_prediction_have_fewer_parts() -> None:
    plan = PretrainedPlan(model="m", texts=TEXTS, sequences=3)
    names = [name for name, _ in plan.iter_parts()]
    assert len(names) == len(set(names)) == 42
    still = [name for name, _ in replace(plan, turns=False).iter_parts()]
    assert set(names) - set(still) >= {"still-0", "slow-silent", "position", "bands"}
    assert "intact" in still
    assert [name for name, _ in replace(plan, turns=False, biased=True).iter_parts()] == [*still, "position"]
    assert [name for name, _ in replace(plan, turns=False, predicts=False).iter_parts()][18:] == ["silenced"]
