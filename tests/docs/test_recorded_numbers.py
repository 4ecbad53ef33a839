"""What pages say of the canonical, the laptop and the timing records, in tables and beside them, is in the records."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builders import script

from toeplens.lens import Estimate
from toeplens.model import Protocol
from toeplens.studies.grid import measured
from toeplens.studies.kit.contrasts import difference
from toeplens.studies.kit.results import CellResult, Results, estimated
from toeplens.training.presets import DISTANCE, PROTOCOLS

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results"
DIRECTIONS: dict[str, tuple[Protocol, str]] = {
    "paper: RoPE + sinusoid": ("paper", "rope-absolute"),
    "paper: sinusoid": ("paper", "absolute"),
    "released: RoPE (with its hidden sinusoid)": ("released", "rope"),
    "released: sinusoid": ("released", "absolute"),
}
GRADIENTS = {  # under the paper's protocol, under the released program's
    "NoPE": ("nope", "nope"),
    "ALiBi": ("alibi", "alibi"),
    "relative bias": ("relative", "relative"),
    "RoPE": ("rope", "rope-alone"),
    "MLA": ("mla", "mla"),
    "sinusoid": ("absolute", "absolute"),
    "RoPE + sinusoid": ("rope-absolute", "rope"),
}
# claims of which a page says in words what became of them
OPEN = {
    "canonical": {
        "canonical-tasks": "leans to hold",
        "positional-share-against-length": "leans to hold",
        "retrieval-needs-low-frequencies": "undecided",
        "index-inverted-u": "undecided",
        "retrieval-u": "undecided",
        "mix-inverted-u": "leans to hold",
    },
    "laptop": {
        "additive-directions-displaced": "undecided",
        "rope-gradient-seed": "undecided",
        "alibi-seed-cancels": "undecided",
        "few-bands-trained": "undecided",
        "significant-angle-massive": "undecided",
    },
    "theory": {"small-norm-interpretable": "undecided"},
}


@cache
def record(name: str) -> dict[str, Any]:
    return json.loads(lzma.decompress((RECORDS / name / "results.json.xz").read_bytes()))


@cache
def models(name: str) -> Results:
    return Results(CellResult.from_dict(cell) for cell in record(name)["cells"])


def ledger(name: str) -> list[dict[str, Any]]:
    return json.loads((RECORDS / name / "claims.json").read_text())["claims"]


def missing(page: str, *phrases: str) -> list[str]:
    """Which of these a page does not say, wherever its lines are broken."""
    text = " ".join((ROOT / page).read_text().split())
    return [phrase for phrase in phrases if phrase not in text]


def row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"


def told(found: Estimate | None) -> str:
    assert found is not None
    return interval(found.value, found.low, found.high)


def interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


# ---- ledgers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPEN)
def test_what_is_said_to_be_open_is(name: str) -> None:
    verdicts = [(entry["id"], entry["verdict"]) for entry in ledger(name) if entry["id"] in OPEN[name]]
    assert {claim for claim, _ in verdicts} == set(OPEN[name])
    assert [(claim, verdict) for claim, verdict in verdicts if OPEN[name][claim] != verdict] == []


def test_the_canonical_study_s_claims() -> None:
    rows = [row(f"`{each['id']}`", each["statement"], each["verdict"]) for each in ledger("canonical")]
    assert missing("docs/study.md", *rows) == []


# ---- the canonical record --------------------------------------------------------------------------------------------


def test_longer_texts() -> None:
    related = {(each["figure"], each["factor"]): each for each in record("canonical")["relations"] if not each["task"]}
    titles = {
        "positional": "positional share of what carries the skill",
        "interaction": "interaction share",
        "deposit": "largest loss by one head (the deposit)",
    }
    rows, asked = [], []
    for figure, title in titles.items():
        found = [related[figure, factor] for factor in (1.25, 1.5, 2.0, 4.0)]
        told = (
            f"{each['value']:.2f}" if each["low"] is None else interval(each["value"], each["low"], each["high"])
            for each in found
        )
        rows.append(row(title, *told))
        asked.append(found[1])
    assert missing("docs/study.md", *rows) == []
    assert [each["low"] is None for each in asked] == [False, True, False], (
        "the interaction varies with rotations alone"
    )
    assert all(each["low"] < 0 < each["high"] for each in asked if each["low"] is not None)
    assert all(len(each["families"]) == 4 for each in asked)
    first = asked[0]
    words = f"correlation {interval(first['value'], first['low'], first['high'])} over {first['points']} models"
    assert missing("docs/behaviour.md", words) == []


def test_what_rope_keeps_of_its_skill_on_longer_texts() -> None:
    kept = {
        (task, factor): [measured.kept(cell, factor) for cell in models("canonical").of(task, "rope")]
        for task in ("index", "retrieval")
        for factor in (1.5, 2.0)
    }
    index, retrieval = (f"{100 * np.mean(kept[task, 1.5]):.0f} %" for task in ("index", "retrieval"))
    more = difference(kept["retrieval", 2.0], kept["index", 2.0], 0.02).estimate()
    points = f"{100 * more.value:.0f} points [{100 * more.low:.0f}, {100 * more.high:.0f}] more of the latter"
    words = f"keeps {index} of its skill on `index` at 1.5 times the length and {retrieval} on `retrieval`"
    assert missing("docs/study.md", words, points) == []


def test_which_heads_carry_rope_s_skill() -> None:
    shares = {
        task: [measured.carried(cell, kind) for cell in models("canonical").of(task, "rope")]
        for task, kind in (("index", "positional"), ("retrieval", "symbolic"))
    }
    assert [int(np.isfinite(found).sum()) for found in shares.values()] == [5, 5]
    place, key = (f"{np.nanmean(found):.2f}" for found in shares.values())
    assert missing("docs/behaviour.md", f"symbolic heads ({key} of", f"positional ones ({place} on `index`") == []
    words = [f"symbolic heads ({key} of", f"positional ones ({place})", f"end {place} positional"]
    assert missing("docs/study.md", *words) == []


def test_which_frequencies_rope_needs() -> None:
    known = models("canonical")
    high, low = (
        [round(100 * known.accuracy(task, label).mean()) for task in ("index", "retrieval")]
        for label in ("high", "low")
    )
    words = [
        f"has {high[0]} % on `index` and {high[1]} % on `retrieval`",
        f"its three lowest {low[0]} % and {low[1]} %",
    ]
    assert missing("docs/study.md", *words) == []
    assert not any(cell.settled for cell in known.of("retrieval", "high"))


# ---- the laptop record -----------------------------------------------------------------------------------------------


def looked_at(protocol: Protocol, label: str, measure: str) -> list[Any]:
    found = [cell.measure(measure) for cell in models("laptop").under(protocol).of(DISTANCE, label)]
    assert len(found) == 5
    return found


def test_position_in_the_residual_stream() -> None:
    rows, coefficients, alignments = [], {}, {}
    for title, where in DIRECTIONS.items():
        found = looked_at(*where, "representation")

        def after(layers: int, field: str, found: list[Any] = found) -> dict[int, float]:
            return {seed: float(getattr(each, field)[layers]) for seed, each in enumerate(found)}

        at_first, read = (np.mean(list(after(*each).values())) for each in ((0, "alignment"), (2, "decodability")))
        intervals = [told(estimated(after(*each))) for each in ((1, "alignment"), (2, "alignment"), (2, "coefficient"))]
        rows.append(row(title, f"{found[0].chance:.2f}", f"{at_first:.2f}", *intervals, f"{read:.2f}"))
        coefficients[where] = sorted(after(2, "coefficient").values())
        alignments[where] = list(after(2, "alignment").values())
        estimate = estimated(after(2, "alignment"))
        assert estimate is not None
        assert estimate.low < found[0].chance < estimate.high
    assert missing("docs/representation.md", *rows) == []
    first, *others = sorted(value for values in coefficients.values() for value in values)
    assert first == coefficients["paper", "rope-absolute"][0]
    both, alone = alignments["paper", "rope-absolute"], alignments["paper", "absolute"]
    words = [
        f"is {others[0]:.2f} or more in {len(others)} of these {1 + len(others)} models and {first:.2f} in one of",
        f"after two layers, paper's protocol: {told(difference(both, alone).estimate())}",
        f"(the lowest {min(both):.2f})",
    ]
    assert missing("docs/representation.md", *words) == []


def test_gradients_at_initialisation() -> None:
    def shares(protocol: Protocol, label: str, level: str, layer: int) -> str:
        found = [
            1000 * float(each.strength.levels[level].layers.share[layer]) for each in looked_at(protocol, label, "seed")
        ]
        if np.isnan(found).all():
            return "–"
        low, high = (f"{round(value, 1) + 0.0:.1f}" for value in (min(found), max(found)))
        return f"{low} to {high}"

    places = [(level, layer) for level in ("logits", "parameters") for layer in range(3)]
    rows = [
        row(f"{protocol}: {title}", *(shares(protocol, label, *place) for place in places))
        for number, protocol in enumerate(PROTOCOLS)
        for title, label in ((title, labels[number]) for title, labels in GRADIENTS.items())
    ]
    assert missing("docs/gradients.md", *rows) == []


# ---- timings ---------------------------------------------------------------------------------------------------------


MACHINES = ("xeon", "epyc")
bench = script(Path(__file__).parents[2] / "benchmarks" / "run.py")


@cache
def trained(machine: str) -> list[dict[str, Any]]:
    return json.loads((RECORDS / "bench" / f"training-{machine}.json").read_text())["contests"]


def beside_best(contest: dict[str, Any]) -> tuple[str, str]:
    """The fastest other program's time over ours, and over ours with equal work."""
    peer, own = bench.best_peer(contest), contest["timed"][0]
    return f"{bench.ratio(peer, own):.2f}", f"{bench.ratio(peer, bench.equal(contest) or own):.2f}"


@pytest.mark.parametrize("machine", MACHINES)
def test_steps_of_training(machine: str) -> None:
    rows = []
    for contest in trained(machine):
        own, peers = contest["timed"][0], {row["name"]: row for row in contest["timed"] if not row["ours"]}
        names = ("transformers Llama", "x-transformers", "torch.nn.TransformerEncoder")
        llama, other, encoder = (f"{bench.ratio(peers[name], own):.2f}" for name in names)
        more = " times as long" if contest["work"].startswith("laptop") else ""
        figures = f"{llama}{more} | {other} | {encoder} | {beside_best(contest)[1]}"
        rows.append(f"| {bench.speed(contest, own):,.0f} | {figures} |")
    assert missing("docs/scale.md", *rows) == []


def test_what_the_contests_come_to() -> None:
    """ "So by the last two records, Xeon and EPYC .."; and what a language model's step is beside Llama's."""
    ratios: dict[str, list[str]] = {}
    for machine in MACHINES:
        laptop, paper, language = trained(machine)
        for name, contest in (("laptop", laptop), ("paper", paper)):
            for key, figure in zip((name, f"{name} equal"), beside_best(contest), strict=True):
                ratios.setdefault(key, []).append(figure)
        (dropout,) = (row for row in paper["timed"] if row["work"] == "trained")
        ratios.setdefault("dropout", []).append(f"{bench.ratio(dropout, paper['timed'][0]):.2f}")
        ratios.setdefault("hours", []).append(f"{bench.table_1_hours(trained(machine)):,.0f}")
        (llama,) = (row for row in language["timed"] if row["name"] == "transformers Llama")
        ratios.setdefault("language", []).append(f"{bench.speed(language, language['timed'][0]):,.0f}")
        ratios.setdefault("llama", []).append(f"{bench.ratio(llama, language['timed'][0]):.2f} times as many")
    told = {name: " and ".join(pair) for name, pair in ratios.items()}
    words = [
        f"it is {told['laptop']} times as fast as the fastest other at the laptop shape, and {told['paper']} times at",
        f"with equal work {told['laptop equal']}, and {told['paper equal']} times",
        f"takes {told['dropout']} times as long, and Table 1's 80 models {told['hours']} hours",
    ]
    assert missing("docs/scale.md", *words) == []
    (xeon, epyc), (first, second) = ratios["language"], ratios["llama"]
    words = [f"{xeon} tokens a second on two idle cores of a Xeon, {first}", f"{epyc} on two of an AMD EPYC, {second}"]
    assert missing("docs/language.md", *words) == []
