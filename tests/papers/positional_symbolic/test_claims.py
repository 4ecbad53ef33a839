"""The claims about positional and symbolic heads on made-up studies, and what goes with keeping skill at length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from tests.studies import measures

from toeplens.engine import LengthResult
from toeplens.lens import HeadAblation
from toeplens.papers.positional_symbolic.claims import CLAIMS, ClaimData
from toeplens.studies import CellKey, CellResult, LedgerEntry, Results, Verdict, grid, judge_all
from toeplens.studies.grid import measures as heads
from toeplens.studies.grid.measures import family, relations

CHANCE = 0.1
SCAN = (0.01, 0.1, 0.3, 1.0, 3.0)
TASKS = ("index", "retrieval", "mix")
INTRICATE = ("reverse", "dyck")
SPEC = grid.grid_spec(
    {
        "tasks": dict.fromkeys((*TASKS, *INTRICATE)),
        "encodings": {
            "rope": None,
            "nope": None,
            "alibi": None,
            "t5": None,
            "sinusoidal": None,
            "cope": None,
            "high": {"encoding": "rope-bands"},
            "low": {"encoding": "rope-bands"},
            "turn": {"encoding": "rope-bands", "scan": {"frequencies": list(SCAN)}},
        },
        "claims": "positional-symbolic",
    }
)


@dataclass(frozen=True)
class SyntheticModel:
    """A made-up model of one layer of two heads, the first of which matters.

    positional, symbolic  shares of the first head; the second head has them the other way round
    before                the share of its kind that the first head has before training
    peak                  accuracy lost without the first head, as a share of the accuracy over chance
    kept                  share of the skill on longer texts, at 1.5 times the length; its square at twice
    scores                sampled scores of the first head, positional and symbolic
    fast                  whether the positional head is the one of high frequencies
    born                  whether its heads follow what their frequencies say before training, too; None: not measured
    bands                 loss without the rotation of the faster and of the slower half
    slowest               the slower one of its two frequencies, radians a token
    settled               whether it has stopped learning
    sure                  whether the first head's ablation effect differs from 0
    """

    accuracy: float = 0.9
    positional: float = 0.9
    symbolic: float = 0.05
    before: float = 0.3
    peak: float = 0.6
    kept: float = 0.5
    scores: tuple[float, float] = (0.9, 0.1)
    fast: bool = True
    born: bool | None = False
    bands: tuple[float, float] = (1.0, 0.1)
    slowest: float = 0.5
    settled: bool = True
    sure: bool = True


def cell(task: str, label: str, seed: int, model: SyntheticModel) -> CellResult:
    positional = [[model.positional, model.symbolic]]
    symbolic = [[model.symbolic, model.positional]]
    interaction = [[1 - model.positional - model.symbolic] * 2]
    drop = model.peak * (model.accuracy - CHANCE)
    drops = np.array([[drop, 0.0]])
    centres = [[0.0, -5.0]] if model.fast == (model.positional > model.symbolic) else [[-5.0, 0.0]]
    turning = label != "nope"
    symbolic_before = [[0.79, 0.8]] if model.born or task != "index" else [[0.8, 0.79]]
    start = {"positional": [[0.1, 0.1]], "symbolic": symbolic_before, "centre": [[0.0, -5.0]]}
    watched = [
        {"step": 0, "positional": [[model.before, 0.5]], "symbolic": [[model.before, 0.5]], "drops": [[0.0, 0.0]]},
        {"step": 9, "positional": positional, "symbolic": symbolic, "drops": [[drop, 0.0]]},
    ]

    def row(factor: float, kept: float) -> LengthResult:
        accuracy = CHANCE + (1 - CHANCE) * kept * (model.accuracy - CHANCE) / (1 - CHANCE)
        return measures.length_result(factor, accuracy, chance=CHANCE, length_chance=CHANCE)

    sides = model.scores if model.positional > model.symbolic else model.scores[::-1]
    result: dict[str, Any] = {
        "behaviour": measures.behaviour(positional, symbolic, interaction),
        "permutations": measures.permutations([[sides[0], 0.1]], [[sides[1], None]]),
        "frequency": measures.frequency([[[1.0, model.slowest]] * 2], centres)
        if turning
        else {"reason": "no rotation"},
        "beginning": start if turning else {"reason": "no rotation"},
        "bands": measures.bands([[model.bands, [None, None]]]) if turning else {"reason": "no rotation"},
        "extrapolation": measures.extrapolation(
            [row(1.0, 1.0), row(1.25, model.kept**0.5), row(1.5, model.kept), row(2.0, model.kept**2)]
        ),
    }
    curve = np.array([[model.accuracy, model.accuracy - drop, CHANCE]])
    low = drops if model.sure else np.zeros_like(drops)
    if model.born is None:
        del result["beginning"]
    ablation = HeadAblation(drops, low, drops, model.accuracy, curve, 1000, CHANCE, intervention="zero")
    unknown = np.full_like(curve, np.nan)
    by_loss = HeadAblation(drops, low, drops, 0.5, unknown, 1000, CHANCE, metric="loss", intervention="zero")
    return CellResult(
        key=CellKey("paper", task, label, seed),
        run=f"{task}-{label}-{seed}",
        status="complete",
        chance=CHANCE,
        length_chance=CHANCE,
        parameters=1,
        epochs=[{"test_accuracy": model.accuracy, "seconds": 1.0}],
        result={"test_accuracy": model.accuracy, "seconds": 1.0, "plateau": 1 if model.settled else None},
        ablation=ablation,
        by_loss=by_loss,
        measures=result,
        probe_rows=watched,
    )


SyntheticStudy = dict[tuple[str, str], SyntheticModel]


def papers() -> SyntheticStudy:
    """All as the papers say."""
    position = SyntheticModel(positional=0.97, symbolic=0.0, kept=0.3, peak=0.9)
    content = SyntheticModel(positional=0.04, symbolic=0.95, kept=0.9, peak=0.3)
    world: SyntheticStudy = {}
    for task, model in (("index", position), ("retrieval", content), ("mix", position)):
        sign = 1 if model is position else -0.5
        for rank, label in enumerate(("rope", "alibi", "t5", "nope", "sinusoidal", "cope", "high", "low")):
            world[task, label] = replace(  # the more positional, deposited and coupled, the less is kept
                model,
                kept=model.kept + 0.01 * rank,
                peak=model.peak - 0.02 * rank,
                positional=model.positional - 0.004 * rank,
                symbolic=model.symbolic + (0.004 + 0.001 * sign) * rank,
            )
        for value in SCAN:
            middle = value == 0.3
            best = middle if task != "retrieval" else not middle
            world[task, f"turn/{value:g}"] = replace(model, accuracy=0.9 if best else 0.4)
    world["index", "low"] = replace(world["index", "low"], accuracy=0.15)
    world["index", "nope"] = replace(world["index", "nope"], accuracy=0.15)
    world["retrieval", "high"] = replace(world["retrieval", "high"], accuracy=0.4)
    for task in INTRICATE:
        for label in ("rope", "nope"):
            world[task, label] = SyntheticModel(accuracy=0.3, kept=0.1)
    for label in ("high", "low"):
        world["mix", label] = replace(world["mix", label], accuracy=0.5)
    return world


def judged(world: SyntheticStudy, seeds: int = 8, only: str = "") -> dict[str, LedgerEntry]:
    """All claims, or one; accuracies differ a little from seed to seed, so that intervals have a width."""
    cells = [
        cell(task, label, seed, replace(model, accuracy=model.accuracy + 0.001 * seed * (1 if label < "n" else -1)))
        for (task, label), model in world.items()
        for seed in range(seeds)
    ]
    results = Results(cells)
    related = relations(SPEC, results) if not only or only.endswith("against-length") else []
    claims = [claim for claim in CLAIMS if only in ("", claim.id)]
    entries = judge_all(claims, ClaimData(SPEC, results, related))
    return {entry.claim.id: entry for entry in entries}


def with_changes(*places: tuple[str, str], **fields: Any) -> SyntheticStudy:
    """The papers' world with some models changed; a ``*`` stands for all encodings."""
    world = papers()
    for task, label in places:
        for task_and_label in world:
            if task_and_label[0] == task and label in ("*", task_and_label[1]):
                world[task_and_label] = replace(world[task_and_label], **fields)
    return world


def with_fields(figure: Callable[[SyntheticModel], float], **of: Callable[[float], float]) -> SyntheticStudy:
    """The papers' world with fields made from a figure of each model."""
    return {
        place: replace(model, **{name: make(figure(model)) for name, make in of.items()})
        for place, model in papers().items()
    }


def scan(task: str, best: float) -> SyntheticStudy:
    """Accuracy falls on both sides of the best frequency."""
    world = papers()
    for rank, value in enumerate(SCAN):
        accuracy = 0.9 - 0.1 * abs(rank - SCAN.index(best))
        world[task, f"turn/{value:g}"] = replace(world[task, f"turn/{value:g}"], accuracy=accuracy)
    return world


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_all_claims_hold_on_the_papers_results():
    actual = judged(papers())
    assert {name: entry.verdict for name, entry in actual.items()} == dict.fromkeys(actual, "holds")
    assert [name for name, entry in actual.items() if entry.uncorrected != "holds"] == []


OTHER_CASES: dict[str, tuple[SyntheticStudy, str, Verdict]] = {
    "both-scores": (with_changes(("index", "rope"), scores=(0.68, 0.68)), "exclusion", "fails"),
    "slow-and-positional": (
        with_changes(("index", "rope"), ("mix", "rope"), ("retrieval", "rope"), fast=False),
        "behaviour-and-frequency",
        "fails",
    ),
    "fast-and-positional-from-the-start": (
        with_changes(("index", "rope"), ("mix", "rope"), ("retrieval", "rope"), born=True),
        "behaviour-and-frequency",
        "holds in part",
    ),
    "a-high-band-that-is-not": (with_changes(("mix", "high"), slowest=0.1), "mix-needs-both", "undecided"),
    "monotone-index": (scan("index", 3.0), "index-inverted-u", "fails"),
    "inverted-retrieval": (scan("retrieval", 0.3), "retrieval-u", "fails"),
    "mixed-index": (with_changes(("index", "*"), positional=0.7, symbolic=0.2), "canonical-tasks-pure", "fails"),
    "reversed": (with_changes(("reverse", "rope"), accuracy=0.8), "intricate-tasks-exceed", "fails"),
    "not-reversed-yet": (with_changes(("dyck", "rope"), settled=False), "intricate-tasks-exceed", "undecided"),
    "slow-bands": (with_changes(("index", "rope"), bands=(0.1, 1.0)), "faster-half-at-inference", "fails"),
    "pure-from-the-start": (with_changes(("index", "rope"), before=0.95), "positional-head-emerges", "fails"),
    "never-pure": (with_changes(("retrieval", "rope"), symbolic=0.8), "symbolic-head-emerges", "fails"),
    "position-extrapolates": (with_changes(("index", "rope"), kept=0.99), "symbolic-extrapolates", "fails"),
    "positional-lasts": (
        with_fields(lambda model: model.positional, kept=lambda x: x),
        "positional-share-against-length",
        "fails",
    ),
    "deposit-lasts": (with_fields(lambda model: model.peak, kept=lambda x: x), "deposit-against-length", "fails"),
    "coupling-lasts": (
        with_fields(lambda model: 1 - model.positional - model.symbolic, kept=lambda x: 0.5 + x),
        "coupling-against-length",
        "fails",
    ),
}


@pytest.mark.parametrize("case", OTHER_CASES)
def test_claims_fail_on_changed_results(case: str):
    world, claim, verdict = OTHER_CASES[case]
    entry = judged(world, only=claim)[claim]
    assert entry.verdict == verdict, entry.evidence


def test_unfinished_models_do_not_count():
    actual = judged(with_changes(("index", "high"), ("retrieval", "turn/0.1"), settled=False))
    assert actual["index-needs-high-frequencies"].verdict == "undecided"
    assert "8 of 8 and 0 of 8 models" in actual["index-needs-high-frequencies"].evidence[0]
    assert actual["retrieval-u"].verdict == "undecided"
    assert actual["index-inverted-u"].verdict == actual["retrieval-needs-low-frequencies"].verdict == "holds"
    assert actual["index-needs-high-frequencies"].extremes == ("holds", "holds"), "wherever they end"
    assert actual["retrieval-u"].extremes == ("holds", "holds")
    assert actual["index-inverted-u"].extremes is None


@pytest.mark.parametrize(("task", "name", "sign"), [("index", "index-inverted-u", 1), ("retrieval", "retrieval-u", -1)])
def test_scans_are_also_judged_at_the_ends_of_unfinished_models(task: str, name: str, sign: int):
    labels = {True: [f"turn/{value:g}" for value in (SCAN[0], SCAN[-1])], False: [f"turn/{x:g}" for x in SCAN[1:-1]]}
    places = {outer: [(task, label) for label in group] for outer, group in labels.items()}
    entry = judged(with_changes(*places[True], *places[False], settled=False))[name]
    assert entry.verdict == "undecided"
    assert "no seed has a complete scan" in entry.evidence[0]
    verdicts = [judged(with_changes(*places[outer], accuracy=1.0), only=name)[name].verdict for outer in (True, False)]
    assert entry.extremes == tuple(verdicts[::sign])
    assert set(verdicts) == {"holds", "fails"}


def test_missing_initial_measures_give_no_support():
    entry = judged(with_changes(*((task, "rope") for task in ("index", "mix", "retrieval")), born=None))[
        "behaviour-and-frequency"
    ]
    assert entry.verdict == "holds"  # what is essential was measured
    assert entry.evidence[1].endswith("the models were not measured before training")


def test_heads_without_effect_are_not_used():
    actual = judged(with_changes(("index", "*"), ("retrieval", "*"), sure=False))
    for name in ("canonical-heads", "canonical-tasks-pure", "positional-head-emerges", "symbolic-head-emerges"):
        assert actual[name].verdict == "undecided", name
    assert "no head with a significant ablation effect" in actual["canonical-heads"].evidence[0]


# ---- the figures ----------------------------------------------------------------------------------------------------


def test_figures_of_a_model_by_hand():
    made_cell = cell("index", "rope", 0, SyntheticModel(accuracy=0.8, peak=0.5, kept=0.25))
    assert heads.weighted_share(made_cell, "positional") == pytest.approx(0.9)
    assert heads.weighted_share(made_cell, "symbolic") == pytest.approx(0.05)
    assert made_cell.peak == pytest.approx(0.5)
    assert heads.skill_at(made_cell, 1.0) == pytest.approx(made_cell.skill) == pytest.approx(7 / 9)
    assert heads.skill_retained(made_cell) == pytest.approx(0.25)
    assert heads.skill_retained(made_cell, 2.0) == pytest.approx(0.0625)
    assert np.isnan(heads.skill_retained(made_cell, 4.0))
    longer = made_cell.measures["extrapolation"]
    own = longer | {"rows": [row | {"length_chance": 0.3} for row in longer["rows"]]}
    actual = heads.skill_at(replace(made_cell, measures={"extrapolation": own}), 1.5)
    assert actual == pytest.approx((CHANCE + 0.25 * 0.7 - 0.3) / 0.7), "over the guess of that length"
    assert np.isnan(heads.skill_retained(replace(made_cell, result={"test_accuracy": 0.2})))
    assert np.isnan(heads.weighted_share(replace(made_cell, measures={}), "positional"))
    assert cell("index", "nope", 0, SyntheticModel()).measure("frequency") is None
    flat = replace(made_cell, measures={"behaviour": measures.behaviour(*[[[None, 0.4]]] * 3)})
    assert np.isnan(heads.weighted_share(flat, "positional"))  # the head that matters has no share
    drops = np.array([[0.2, 0.6]])
    half = HeadAblation(
        drops, drops, drops, 0.5, np.full((1, 3), np.nan), 10, CHANCE, metric="loss", intervention="zero"
    )
    assert heads.weighted_share(replace(made_cell, by_loss=half), "positional") == pytest.approx(
        0.25 * 0.9 + 0.75 * 0.05
    )
    assert np.isnan(heads.weighted_share(replace(made_cell, by_loss=None), "positional"))


def related(points: dict[tuple[str, str], tuple[float, float]], seeds: int = 2) -> list[grid.RankRelation]:
    """Relations of models by their deposit and what they keep."""
    rng = np.random.Generator(np.random.Philox(3))
    cells = [
        cell(
            task,
            label,
            seed,
            SyntheticModel(peak=float(peak + 0.01 * rng.random()), kept=float(kept + 0.01 * rng.random())),
        )
        for (task, label), (peak, kept) in points.items()
        for seed in range(seeds)
    ]
    return [each for each in relations(SPEC, Results(cells)) if each.figure == "deposit"]


def interval(relation: grid.RankRelation) -> tuple[float, float]:
    assert relation.low is not None
    assert relation.high is not None
    return relation.low, relation.high


LABELS = ("rope", "nope", "alibi", "t5", "sinusoidal", "cope")


def test_on_one_task_the_relation_is_spearmans_correlation():
    """To 1e-12; the interval holds it."""
    drawn = np.random.Generator(np.random.Philox(1)).random((6, 2)).tolist()
    points = {("index", label): (peak, kept) for label, (peak, kept) in zip(LABELS, drawn, strict=True)}
    actual = related(points)
    assert actual == related(points)
    index_relation = next(each for each in actual if each.task == "index")
    expected: Any = spearmanr([p.figure for p in index_relation.points], [p.retained for p in index_relation.points])
    assert index_relation.value == pytest.approx(expected.statistic, abs=1e-12)
    low, high = interval(index_relation)
    assert -1 <= low <= expected.statistic <= high <= 1
    assert (index_relation.encodings, len(index_relation.points), index_relation.factor) == (6, 12, heads.LONGER_FACTOR)
    assert index_relation.families == ("bias", "input", "logits", "none", "rotation")
    assert index_relation.chance is not None
    assert (index_relation.chance < 0.025, index_relation.chance > 0.975) == (low > 0, high < 0)
    together = next(each for each in actual if each.task is None and each.factor == heads.LONGER_FACTOR)
    assert together.value == pytest.approx(index_relation.value)
    assert index_relation.to_dict()["points"] == 12


def test_tasks_are_compared_within_themselves():
    """Two tasks, each with a falling relation, the second higher in both: together it is falling, not rising."""
    points = {("index", label): (0.1 + 0.02 * rank, 0.3 - 0.03 * rank) for rank, label in enumerate(LABELS)}
    points |= {("mix", label): (0.7 + 0.02 * rank, 0.9 - 0.03 * rank) for rank, label in enumerate(LABELS)}
    actual = related(points)
    together = next(each for each in actual if each.task is None and each.factor == heads.LONGER_FACTOR)
    assert together.value == pytest.approx(-0.97, abs=0.03)
    assert interval(together)[1] < 0


def test_seeds_do_not_count_as_separate_models():
    """Twenty seeds of five encodings make no narrower interval than two, where seeds of an encoding are alike."""
    points = {
        ("index", label): pair
        for label, pair in zip(LABELS[:5], [(0.1, 0.2), (0.3, 0.9), (0.5, 0.4), (0.7, 0.5), (0.9, 0.6)], strict=True)
    }
    few, many = (next(each for each in related(points, seeds) if each.task == "index") for seeds in (2, 20))
    assert np.diff(interval(many)) > 0.8 * np.diff(interval(few))


def test_related_encodings_do_not_count_separately():
    """Two more encodings of RoPE's family, just like RoPE, make no narrower interval."""
    pairs = [(0.1, 0.9), (0.3, 0.5), (0.5, 0.7), (0.6, 0.6), (0.7, 0.2), (0.8, 0.4)]
    points = {("index", label): pair for label, pair in zip(LABELS, pairs, strict=True)}
    more = points | {("index", label): points["index", "rope"] for label in ("high", "low")}
    few, many = (next(each for each in related(these) if each.task == "index") for these in (points, more))
    assert (few.encodings, many.encodings) == (6, 8)
    assert few.families == many.families
    assert np.diff(interval(many)) > 0.8 * np.diff(interval(few))


def test_families_are_defined_by_where_position_enters():
    columns = grid.read_spec("canonical").columns()
    assert {column.label: family(column) for column in columns if not column.scan} == {
        "nope": "none",
        "sinusoidal": "input",
        "alibi": "bias",
        "t5": "bias",
        **dict.fromkeys(("rope", "p-rope", "rope-absolute", "mla", "high", "low"), "rotation"),
    }


@pytest.mark.parametrize("more", [{"t5": 0.4}, {"t5": 0.4, "sinusoidal": 0.35}])
def test_two_or_three_families_give_no_interval(more: dict[str, float]):
    """Three leave out one third of them at a time, and miss too often."""
    points = {("index", label): (0.1 * rank, 0.9 - 0.1 * rank) for rank, label in enumerate(("rope", "high", "alibi"))}
    some = {("index", label): (value, 0.3) for label, value in more.items()}
    actual = next(each for each in related(points | some) if each.task == "index")
    assert actual.value is not None
    assert (actual.low, actual.high, actual.chance) == (None, None, None)


def test_few_or_equal_encodings_give_no_relation():
    few = related({("index", label): (0.1 * rank, 0.5) for rank, label in enumerate(LABELS[:3])})
    assert {(each.value, each.low, each.high) for each in few} == {(None, None, None)}
    cells = [cell("index", label, 0, SyntheticModel()) for label in LABELS]
    assert {each.value for each in relations(SPEC, Results(cells))} == {None}
