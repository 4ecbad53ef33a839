"""Write the tables of docs/ and docs/images/deposit.svg from results/, and the package's copy of the verdicts.

    python tools/tables.py           write them
    python tools/tables.py --check   write nothing; exit code 1 if something is out of date

A table is between ``<!-- table: NAME ARGUMENTS -->`` and ``<!-- end -->``; NAME is a function in `TABLES`. The text
around the tables is written by hand.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from recorded import RESULTS, RecordedStudy, record

from toeplens.lens.kit.intervals import spearman
from toeplens.papers.deposit import SCALES
from toeplens.papers.deposit.measures import (
    END,
    end_values,
    excludes_zero,
    head_costs,
    is_in_order,
    sum_and_remainder,
    switch_effects,
)
from toeplens.papers.deposit.spec import SCALE_VARIANTS, SWEEP_BASES, SWEEP_TASK, EncodingLabel, title
from toeplens.papers.positional_symbolic.pretrained import gather
from toeplens.papers.positional_symbolic.pretrained.parts import (
    NUM_BANDS,
    NUM_DRAWS,
    ModelHeads,
    effects_of,
    retrieval_heads,
)
from toeplens.papers.positional_symbolic.pretrained.study import PretrainedStudy
from toeplens.studies import MIN_SEEDS, CellResult
from toeplens.studies.grid import language
from toeplens.studies.grid.measures import share_of_effects, skill_retained
from toeplens.studies.kit.probe_items import BY_WORDS
from toeplens.studies.kit.results import ACCURACY, ModelValue, estimate_mean
from toeplens.studies.kit.verdicts import mean_contrast, verdict_text
from toeplens.studies.probing import ProbeKind, ProbeRecord
from toeplens.training.presets import PROTOCOLS
from toeplens.utils.formatting import fmt

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
VERDICTS_FILE = ROOT / "src" / "toeplens" / "papers" / "deposit" / "recorded.json"
DEPOSIT_SVG = DOCS / "images" / "deposit.svg"
REPRODUCED = ("desk", "laptop")  # the reproduction's records, the larger scale first
Row = Iterable[str]
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def table(*rows: Row) -> Iterator[str]:
    """Lines of a Markdown table; the first row is the header."""
    for number, row in enumerate(rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"
        if not number:
            yield "|---" * len(cells) + "|"


@cache
def ledger(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / name / "claims.json").read_text("utf-8"))["claims"]


def spread(values: Iterable[float | None], digits: int = 2, *, percent: bool = False, of: int = 0) -> str:
    """Mean, lowest and highest value over models, and the number of models if it is below ``of``."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    scale, unit = (100, "%") if percent else (1, "")
    if not known:
        return fmt(None, digits)
    mean, low, high = (fmt(scale * value, digits) for value in (float(np.mean(known)), min(known), max(known)))
    models = f", {len(known)} of {of} models" if of > len(known) else ""
    return (f"{mean}{unit} ({low} to {high})" if len(known) > 1 else f"{mean}{unit}") + models


# ---- pretrained models -----------------------------------------------------------------------------------------------


def pretrained(*names: str) -> Iterator[str]:
    """A column per pretrained model, with the numbers behind its claims."""
    columns = [_pretrained_column(gather(RESULTS / name)) for name in names]
    rows = ((question, *(column[question] for column in columns)) for question in columns[0])
    yield from table(("", *names), *rows)


def _pretrained_column(study: PretrainedStudy) -> dict[str, str]:
    heads, random, shuffled = (study.heads(kind) for kind in ("text", "random", "shuffled"))
    assert heads is not None
    assert random is not None
    assert shuffled is not None
    first, intact = study.audits["text-0"], study.probes["intact"]
    texts = [study.audits[f"text-{number}"] for number in range(heads.texts)]
    logits = np.max([[layer.logit or np.nan for layer in audit.layers] for audit in texts], axis=0)
    pure = [fmt(float((heads.columns[name] >= 0.9).sum(1).mean()), 1) for name in ("positional", "symbolic")]
    previous, keys = heads.mean("previous") >= 0.5, heads.mean("massive_k")
    retrieval = heads.mask_of(retrieval_heads(intact))
    found = [item.right == 1 for item in intact.items_of("needle")]
    position, effects = study.audits["position"], effects_of(study.audits["position"])
    top, counts = int(np.nanargmax(effects)), effects_of(study.audits["position"], "_low") > 0

    def correlation(each: ModelHeads) -> str:
        values = (np.mean(each.correlations("positional", "centre", mask)) for mask in each.layer_groups.values())
        return ", ".join(fmt(float(value), 2) for value in values)

    def needles(probe: str) -> float:
        items = study.probes[probe].items_of("needle")
        return float(sum((item.changed_right or 0) for item, ok in zip(items, found, strict=True) if ok))

    def share(name: str, mask: np.ndarray) -> str:
        return f"{fmt(100 * float(np.nanmean(heads.mean(name)[mask])), 0)}%" if mask.any() else fmt(None)

    def band(behaviour: ProbeKind) -> str:
        by_band = [study.probes[f"still-{n}"].summary(behaviour).more_nats for n in range(NUM_BANDS)]
        values = [np.nan if increase is None else increase.value for increase in by_band]
        best = int(np.nanargmax(values))
        return f"{ORDINALS[best]} eighth, {fmt(values[best], 2)}"

    others = float(np.mean([needles(f"no-others-{draw}") for draw in range(NUM_DRAWS)]))
    top_share, gap = 100 * effects[top] / effects[counts].sum(), heads.mean("centre")
    octaves = float(np.nanmean(gap[previous]) - np.nanmean(gap[~previous])) if previous.any() else None
    return {
        "Heads, layers": f"{len(heads.layer)}, {len(first.layers)}",
        "Positional share follows frequency (rank correlation)": correlation(heads),
        "… with random weights": correlation(random),
        "… with tokens in random order": correlation(shuffled),
        "Heads at least 90% positional, 90% symbolic (mean per sequence)": ", ".join(pure),
        "Previous-token heads (at least half of their attention)": str(int(previous.sum())),
        "… octaves above the other heads": fmt(octaves, 1),
        "Largest induction of a head": fmt(float(np.nanmax(heads.mean("induction"))), 2),
        "Retrieval heads (score of 0.1 or more)": f"{int(retrieval.sum())} ({fmt(100 * retrieval.mean(), 0)}%)",
        "… symbolic share; of the others": f"{share('symbolic', retrieval)}; {share('symbolic', ~retrieval)}",
        "Needles found; without these heads; without as many others": f"{sum(found)} of {len(found)}; "
        f"{needles('no-retrieval'):.0f}; {fmt(others, 1)}",
        "Frozen frequencies that cost most on text (nats per token)": band("loss"),
        "… on needles": band("needle"),
        "… on copying": band("copying"),
        "Largest share of a head in the effect of removing position": f"{top_share:.0f}% "
        f"(layer {position.heads[top].layer + 1})",
        "Largest logit (layer)": f"{fmt(logits.max(), 0)} ({logits.argmax() + 1})"
        if np.isfinite(logits).all()
        else fmt(None),
        "Heads with half of their keys' energy in one dimension": str(int((keys >= 0.5).sum())),
    }


# ---- ledgers ---------------------------------------------------------------------------------------------------------


ABBREVIATIONS = {  # patterns in the sources of claims, to keep the tables narrow
    r"arXiv (?=\d)": "",
    r"ICLR 2026 version \(summary\): ": "ICLR 2026, ",
    r", among the related papers listed with [\d.]+": "",
}


def short_citation(source: str) -> str:
    """The source of a claim in its short form."""
    for pattern, short in ABBREVIATIONS.items():
        source = re.sub(pattern, short, source)
    return source


def learning_note(entry: Mapping[str, Any]) -> str:
    """The verdicts in the worst and the best case of the models that are still learning, if one differs."""
    cases = entry["with_learning"]
    ends = [verdict_text(cases[name]) for name in ("worst", "best")] if cases else []
    if {*ends} <= {verdict_text(entry["verdict"])}:
        return ""
    return f" (with models still learning: {' to '.join(dict.fromkeys(ends))})"


def claims(*words: str, statement: bool = True) -> Iterator[str]:
    """A row per claim, with its verdict in each record: RECORDS [: CLAIMS] (default: all claims)."""
    split = words.index(":") if ":" in words else len(words)
    names, only = words[:split], words[split + 1 :]
    verdicts: dict[str, dict[tuple[str, str | None], str]] = {}
    statements: dict[str, str] = {}
    for name in names:
        for entry in ledger(name):
            if not only or entry["id"] in only:
                source = short_citation(entry["source"])
                statements.setdefault(entry["id"], f"{entry['statement']} ({source})" if statement else source)
                verdict = verdict_text(entry["verdict"]) + learning_note(entry)
                verdicts.setdefault(entry["id"], {})[name, entry["protocol"]] = verdict
    columns = sorted(
        {at for each in verdicts.values() for at in each}, key=lambda at: (names.index(at[0]), at[1] or "")
    )
    yield from table(
        ("claim", "statement" if statement else "source", *(", ".join(filter(None, at)) for at in columns)),
        *((f"`{c}`", statements[c], *(verdicts[c].get(at, "–") for at in columns)) for c in only or verdicts),
    )


def verdicts(*words: str) -> Iterator[str]:
    """The same without the statements."""
    yield from claims(*words, statement=False)


def counts(*names: str) -> Iterator[str]:
    """Number of claims of each record, by verdict."""
    rows = []
    for name in names:
        for protocol in dict.fromkeys(entry["protocol"] for entry in ledger(name)):
            entries = [entry for entry in ledger(name) if entry["protocol"] == protocol]
            result = [entry["verdict"] for entry in entries]
            numbers = [len(result), *(result.count(kind) for kind in ("holds", "holds in part", "fails"))]
            numbers += [sum(verdict.startswith("leans") for verdict in result), result.count("undecided")]
            numbers.append(sum(entry["uncorrected"] != entry["verdict"] for entry in entries))
            rows.append((f"`{name}`", protocol or "–", *map(str, numbers)))
    heads = "holds", "holds in part", "fails", "indicative", "undecided", "different without correction"
    yield from table(("record", "protocol", "claims", *heads), *rows)


def errors() -> Iterator[str]:
    """How often a simulated ledger is wrong."""
    content = json.loads((RESULTS / "false-verdicts.json").read_text("utf-8"))
    keys = "last_wrong", "any_wrong", "plain_any_wrong", "right"
    heads = "wrong at the last look", "at any look", "without correction", "correct decisions"
    shapes = {"as seen": "as observed"}
    effects = {"nothing there": "no effect", "at the bar": "at the threshold", "twice the bar": "twice the threshold"}
    rows = [
        (
            shapes.get(row["shape"]) or row["shape"],
            effects.get(row["effect"]) or row["effect"],
            *(f"{100 * row[key]:.1f}%" for key in keys),
        )
        for row in content["ledgers"]
    ]
    yield from table(("noise", "true effect", *heads), *rows)


# ---- encodings -------------------------------------------------------------------------------------------------------


def _skilled(name: str, value: Callable[[CellResult], float]) -> ModelValue:
    return ModelValue(name, value, lambda cell: cell.is_skilled and cell.ablation is not None)


FIGURES: Mapping[str, Mapping[str, ModelValue]] = {
    "accuracy": {"": ACCURACY},
    "largest-cost": {"": _skilled("largest ablation effect of a head", lambda cell: cell.peak)},
    "kept": {
        f", {factor:g}×": ModelValue(
            "", lambda cell, factor=factor: skill_retained(cell, factor), lambda cell: cell.is_skilled
        )
        for factor in (1.5, 2.0)
    },
    "kinds": {
        f", {share}": _skilled("", lambda cell, share=share: share_of_effects(cell, share))
        for share in ("positional", "symbolic", "interaction")
    },
}


def encodings(figure: str, protocol: str, *places: str) -> Iterator[str]:
    """A row per encoding, sorted by the first column: a figure on RECORD/TASK, ..."""
    columns = [(*place.split("/"), *each) for place in places for each in FIGURES[figure].items()]
    titles: dict[str, str] = {}
    for name, task, *_ in columns:
        titles |= (
            _plain_text(record(name)) if "spec" in record(name).content else record(name).titles_under(protocol, task)
        )
    rows = []
    for label, words in titles.items():
        cells = [_measured(name, protocol, task, label, each) for name, task, _, each in columns]
        rows.append(([-value for value, _ in cells], words, [text for _, text in cells]))
    records = dict.fromkeys(name for name, *_ in columns)
    several = len(records) > 1 or len({task for _, task, *_ in columns}) == 1
    heads = [f"`{name if several else task}`{suffix}" for name, task, suffix, _ in columns]
    rules = {row["task"]: row for name in records for row in record(name).content["table"] if "rule" in row}
    best = [f"{100 * rules[task]['rule_accuracy']:.0f} ({rules[task]['rule']})" for _, task, *_ in columns if rules]
    last = [("*best rule without a model*", *best)] if best and figure == "accuracy" else []
    yield from table(("encoding", *heads), *((words, *cells) for _, words, cells in sorted(rows)), *last)


# an encoding's title, and its labels under either protocol
EFFECTS = (
    ("RoPE", "rope", "rope-alone"),
    ("RoPE + sinusoid", "rope-absolute", "rope"),
    ("MLA", "mla", "mla"),
    ("ALiBi", "alibi", "alibi"),
    ("Absolute (sinusoid)", "absolute", "absolute"),
    ("NoPE", "nope", "nope"),
    ("Relative", "relative", "relative"),
)


def effects() -> Iterator[str]:
    """Largest ablation effect of a head in the reproduction's records, under the protocols of each."""
    columns = [(name, protocol) for name in ("full", *REPRODUCED) for protocol in record(name).content["protocols"]]
    rows = []
    for words, *labels in EFFECTS:
        label = dict(zip(PROTOCOLS, labels, strict=True))
        result = (
            _measured(name, protocol, SWEEP_TASK, label[protocol], FIGURES["largest-cost"][""])
            for name, protocol in columns
        )
        rows.append((words, *(text.partition(" (")[0] for _, text in result)))
    yield from table(("encoding", *(f"{name}, {protocol}" for name, protocol in columns)), *rows)


# an encoding's title, and its labels in the records `canonical`, `desk` and `language`
CHOICE = (
    ("RoPE", "rope", "rope", "rope"),
    ("p-RoPE (half)", "p-rope", "", "p-rope"),
    ("RoPE + sinusoid", "rope-absolute", "rope-absolute", ""),
    ("MLA", "mla", "mla", ""),
    ("ALiBi", "alibi", "alibi", "alibi"),
    ("T5 bias", "t5", "relative", "t5"),
    ("FIRE", "", "", "fire"),
    ("FoX", "", "", "fox"),
    ("Sinusoid", "sinusoidal", "absolute", "sinusoidal"),
    ("NoPE", "nope", "nope", "nope"),
)


def choice() -> Iterator[str]:
    """Each encoding with its main figures in three records; a star: fewer models count than were trained."""
    result = record("language")

    def text(label: str) -> list[str]:
        if not label:
            return ["–"] * 2
        cells = [cell for cell in result.results.cells_of("language", label) if language.is_language(cell)]
        return [
            fmt(float(np.mean([of(cell) for cell in cells])), 2)
            for of in (language.bits_per_byte, language.bits_increase)
        ]

    twice = FIGURES["kept"][", 2×"]
    yield from table(
        (
            "encoding",
            "`index`",
            "`index` kept at 2×",
            "`retrieval` kept at 2×",
            "`trigger-distance`",
            "LM bits per byte",
            "LM change at 4×",
        ),
        *(
            (
                title,
                _short("canonical", "index", grid, ACCURACY),
                _short("canonical", "index", grid, twice),
                _short("canonical", "retrieval", grid, twice),
                _short("desk", SWEEP_TASK, desk, ACCURACY),
                *text(words),
            )
            for title, grid, desk, words in CHOICE
        ),
    )


def tasks(name: str) -> Iterator[str]:
    """Accuracy on every task of a grid, for the encodings that were trained on all of them."""
    rows = [
        (f"`{task}`", *(_short(name, task, label, ACCURACY) for label in _plain_text(record(name))))
        for task in record(name).spec.tasks
    ]
    yield from table(("task", *_plain_text(record(name)).values()), *rows)


def groups(name: str, *tasks: str) -> Iterator[str]:
    """Accuracy of the trained models in each group of examples, mean over seeds: RECORD TASK ..."""
    rows, heads = [], dict[str, None]()
    for task in tasks:
        for label, words in _plain_text(record(name)).items():
            ends = [cell.probe_rows[-1] for cell in record(name).results.cells_of(task, label) if cell.probe_rows]
            shares = {group: [row["groups"][group] for row in ends] for group in ends[0]["groups"]} if ends else {}
            heads |= dict.fromkeys(shares)
            rows.append((f"`{task}`", words, {group: f"{100 * np.mean(each):.0f}" for group, each in shares.items()}))
    yield from table(
        ("task", "encoding", *heads), *((task, x, *(each.get(g, "–") for g in heads)) for task, x, each in rows)
    )


def _plain_text(found: RecordedStudy) -> dict[str, str]:
    return {each.label: each.title for each in found.spec.columns() if set(each.tasks) == set(found.spec.tasks)}


def _short(name: str, task: str, label: str, figure: ModelValue) -> str:
    """Mean of a figure in per cent; with a star if fewer models count than were trained."""
    cells = [cell for cell in record(name).results.cells_of(task, label) if cell.key.protocol == "paper"]
    values = [value for value in figure.by_seed(cells).values() if math.isfinite(value)]
    if not values:
        return "–"
    star = "*" if len(values) < len(cells) else ""
    return f"{100 * mean_contrast(values, figure.grain).estimate().value:.0f}{star}"


def _measured(name: str, protocol: str, task: str, label: str, figure: ModelValue) -> tuple[float, str]:
    """Mean of a figure; and as text: in per cent, with its interval over seeds and the number of models."""
    cells = [cell for cell in record(name).results.cells_of(task, label) if cell.key.protocol == protocol]
    values = [value for value in figure.by_seed(cells).values() if math.isfinite(value)]
    if not values:
        return -math.inf, f"– ({len(values)} of {len(cells)})" if cells else "–"
    result, models = mean_contrast(values, figure.grain).estimate(), f"({len(values)} of {len(cells)})"
    if len(values) < MIN_SEEDS:
        return result.value, f"{100 * result.value:.0f} {models}"
    low, high = result.low, result.high
    if figure in (ACCURACY, *FIGURES["kinds"].values()):
        low, high = max(low, 0.0), min(high, 1.0)
    return result.value, f"{100 * result.value:.0f} [{100 * low:.0f}, {100 * high:.0f}] {models}"


def records(*names: str) -> Iterator[str]:
    """Models trained for each record."""
    rows = []
    for name in names:
        result = record(name)
        cells = result.results.cells
        sizes = ", ".join(str(result.sizes[key]) for key in ("num_layers", "num_heads", "d_model"))
        each = list(dict.fromkeys(cell.key.task for cell in cells))
        told = ", ".join(f"`{task}`" for task in each) if len(each) < 4 else f"{len(each)} tasks"
        protocols, seeds = dict.fromkeys(cell.key.protocol for cell in cells), dict.fromkeys(result.seeds)
        models, most = len({cell.run for cell in cells}), max(cell.parameters for cell in cells)
        numbers = str(models), " to ".join(map(str, seeds)), sizes, f"{most:,}"
        rows.append((f"`{name}`", ", ".join(protocols), *numbers, told))
    heads = "models", "seeds", "layers, heads, width", "parameters (largest)", "tasks"
    yield from table(("record", "protocol", *heads), *rows)


def languages() -> Iterator[str]:
    """The language models by encoding: mean over seeds, with the lowest and highest value."""
    result = record("language")
    rows = []
    for row in language.language_rows(result.spec, result.results):
        cells = [cell for cell in result.results.cells_of("language", row.label) if language.is_language(cell)]
        values: list[tuple[Callable[[CellResult], float], bool]] = [
            (language.bits_per_byte, False),
            (language.bits_increase, False),
            (lambda cell: language.needle_accuracy(cell, 1.0), True),
            (lambda cell: language.copy_gain(cell, language.NEAR_FACTOR), False),
            (language.deposit, True),
        ]
        told = (spread(map(of, cells), 0 if percent else 2, percent=percent) for of, percent in values)
        rows.append((row.title, *told, f"{row.seconds:.0f}"))
    heads = [
        "bits per byte",
        f"change at {language.LONG_FACTOR:g}× the length",
        "needles found",
        "gain from an earlier copy",
    ]
    yield from table(("encoding", *heads, "largest head's share", "training seconds"), *rows)


def switches() -> Iterator[str]:
    """Effect of each protocol switch on the skill, in points."""
    names = {
        "data": "sequences",
        "encoding": "encoding",
        "input": "no input vectors",
        "mask": "causal mask",
        "padding": "padding masked",
        "keys": "keys and values from the layer",
        "readout": "readout at the last token",
        "norm": "final norm",
        "activation": "ReLU",
    }
    result, bases = record("laptop").results, ("nope", "relative", "rope", "mla")
    rows = [row for row in switch_effects(result, PROTOCOLS) if (row.task, row.end) == (SWEEP_TASK, "released")]
    effects = {(row.base, row.switch): row.effect("skill") for row in rows}
    ends = {base: end_values(result, SWEEP_TASK, base) for base in bases}
    wholes = {base: by_end["paper"]["skill"] - by_end["released"]["skill"] for base, by_end in ends.items()}
    together = {base: estimate_mean(whole) for base, whole in wholes.items()}
    left = {base: sum_and_remainder(wholes[base], [r for r in rows if r.base == base], "skill")[1] for base in bases}

    def told(estimate: Any) -> str:
        if estimate is None:
            return "no difference"
        words = f"{100 * estimate.value:+.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
        return f"**{words}**" if excludes_zero(estimate) else words

    yield from table(
        ("switch set to the paper's value", "NoPE", "relative", "RoPE", "MLA"),
        *((words, *(told(effects.get((base, switch))) for base in bases)) for switch, words in names.items()),
        ("all switches together", *(told(together[base]) for base in bases)),
        ("remainder: interactions of switches", *(told(estimate_mean(left[base])) for base in bases)),
    )


# ---- the scale sweep -------------------------------------------------------------------------------------------------

COSTS = ("% of the skill", "nats")
LEARNED = 0.9  # accuracy
_ROPE = dict(zip(PROTOCOLS, ("rope", "rope-alone"), strict=True))
CHECKPOINTS = {
    "able": "first above 90% accuracy, if before the plateau",
    "plateau": "plateau",
    "twice": "2× its steps",
    "four times": "4×",
    END: "8× (end)",
}


def _cells(protocol: Any, base: str, rung: str) -> list[CellResult]:
    return record("ladder").results.for_protocol(protocol).cells_of(SWEEP_TASK, f"{base}/{rung}" if rung else base)


def _label_of(protocol: Any, base: str) -> str:
    name = title(base, protocol)
    return name.replace("RoPE", "RoPE (with sinusoid)", 1) if (protocol, base) == ("released", "rope") else name


def _costs(cells: list[CellResult], asked: int, moment: str = END) -> tuple[str, str]:
    looks, nats = ([head_costs(c, moment, by) for c in cells] for by in ("accuracy", "loss"))
    return (
        spread((look and look.largest() for look in looks), 0, percent=True, of=asked),
        spread((look and look.largest() for look in nats), of=asked),
    )


def rungs() -> Iterator[str]:
    """One setting changed at a time: RoPE, under both protocols."""
    rows = []
    for rung in (
        "",
        *(rung for rung in SCALES["desk"].scale_variants if rung != "longer" and not SCALE_VARIANTS[rung].tokens),
    ):
        result = [_cells(protocol, base, rung) for protocol, base in _ROPE.items()]
        if any(result):
            changed = SCALE_VARIANTS[rung].title if rung else "nothing (baseline)"
            needed = spread((_examples_needed(cell) / 1000 for cell in result[0]), 0)
            rows.append((changed, needed, *(words for cells in result for words in _costs(cells, len(cells)))))
    heads = "changed", "paper, thousand examples until 90%"
    yield from table((*heads, *(f"{protocol}, {unit}" for protocol in _ROPE for unit in COSTS)), *rows)


def lengths() -> Iterator[str]:
    """Largest ablation effect of a head, by length and encoding."""
    tokens = {
        rung: (SCALE_VARIANTS[rung].tokens if rung else None) or SCALES["desk"].model["max_len"] for rung in _lengths()
    }
    rows = []
    for protocol in PROTOCOLS:
        for base in SWEEP_BASES[protocol]:
            cells = [_cells(protocol, base, rung) for rung in sorted(tokens, key=lambda rung: tokens[rung])]
            if all(cells):
                rows.append(
                    (f"{_label_of(protocol, base)}, {protocol}", *(_costs(each, len(each))[0] for each in cells))
                )
    yield from table(("encoding, protocol", *(f"{count} tokens" for count in sorted(tokens.values()))), *rows)


def _lengths() -> list[str]:
    return ["", *(rung for rung in SCALES["desk"].scale_variants if SCALE_VARIANTS[rung].tokens)]


def paper_size() -> Iterator[str]:
    """The models of the papers' width and vocabulary: when each learned Task 1, and what the heads of a layer cost."""
    scale, models = SCALES["full"], []
    for cell in (cell for cell in record("full").results.cells if cell.key.task == SWEEP_TASK):
        label, sizes = EncodingLabel.parse(cell.key.label), scale.tasks[SWEEP_TASK].paper
        variant = SCALE_VARIANTS.get(label.variant or "")
        place = (variant.tokens, variant.distance) if variant else (sizes["length"], sizes["max_distance"])
        steps = next((row["step"] for row in cell.epochs if row["test_accuracy"] >= LEARNED), None)
        examples = "–" if steps is None else f"{steps * scale.optimiser['batch_size']:,}"
        costs = head_costs(cell, END, "accuracy")
        layers = [fmt(None)] * 6 if costs is None else [f"{100 * cost:.0f}" for cost in costs.effects.max(axis=1)]
        words = title(label.base, "paper"), str(cell.key.seed), f"{100 * cell.result['test_accuracy']:.1f}", examples
        models.append((place, label.base, (*map(str, place), *words, *layers)))
    order = SWEEP_BASES["paper"]
    models.sort(key=lambda model: (model[0], order.index(model[1]) if model[1] in order else len(order)))
    heads = "tokens", "largest distance", "encoding", "seed", "accuracy", "examples until 90%"
    yield from table((*heads, *(f"layer {number}" for number in range(1, 7))), *(row for *_, row in models))


def checkpoints() -> Iterator[str]:
    """The models that were trained on, at checkpoints."""
    cells = [_cells(protocol, base, "longer") for protocol, base in _ROPE.items()]
    rows = (
        (words, *(_costs([cell for cell in each if is_in_order(cell, moment)], len(each), moment)[0] for each in cells))
        for moment, words in CHECKPOINTS.items()
    )
    yield from table(("checkpoint", *_ROPE), *rows)


# ---- learning time ---------------------------------------------------------------------------------------------------


def _examples_needed(cell: CellResult) -> float:
    """Examples until `LEARNED` for a model of `desk` or `ladder`, interpolated linearly; NaN if never."""
    steps, accuracies = ([0, *(row[name] for row in cell.epochs)] for name in ("step", "test_accuracy"))
    after = next((place for place, accuracy in enumerate(accuracies) if accuracy >= LEARNED), None)
    if after is None:
        return math.nan
    around = slice(after - 1, after + 1)
    return float(np.interp(LEARNED, accuracies[around], steps[around])) * SCALES["desk"].optimiser["batch_size"]


def late_learners() -> Iterator[str]:
    """By encoding of `desk`: examples until models have learned Task 1, and whether heads of late ones matter more."""
    rows = []
    for words, label, _ in EFFECTS:
        cells = record("desk").results.for_protocol("paper").cells_of(SWEEP_TASK, label)
        pairs = np.array([(_examples_needed(cell), cell.peak) for cell in cells if cell.is_skilled])
        pairs = pairs[np.isfinite(pairs).all(1)]
        correlation = float(spearman(pairs.T))
        error = math.sqrt((1 + correlation**2 / 2) / (len(pairs) - 3))  # Bonett and Wright 2000, of its Fisher z
        low, high = (fmt(math.tanh(math.atanh(correlation) + side * 1.96 * error), 2) for side in (-1, 1))
        told = spread(pairs[:, 0] / 1000, 0), spread(pairs[:, 1], 0, percent=True)
        rows.append((words, str(len(pairs)), *told, f"{fmt(correlation, 2)} [{low}, {high}]"))
    heads = "models", "thousand examples until 90%", "largest effect of a head", "rank correlation of the two"
    yield from table(("encoding", *heads), *rows)


def learning_time() -> Iterator[str]:
    """Examples until 90 % of the answers are right, by setting and encoding, one number per seed."""
    examples: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for line in (RESULTS / "learning-time" / "runs.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        farthest = run["max_distance"] or run["length"] - 1
        setting = (run["length"], farthest, *(run[name] for name in ("words", "width", "batch", "lr")))
        count = "over 500,000" if run["examples"] is None else f"{run['examples']:,}"
        examples.setdefault(setting, {}).setdefault(run["encoding"], []).append(count)
    rows = (
        (
            *(f"{number:g}" for number in setting),
            *("; ".join(counts.get(name, ["–"])) for name in ("rope", "sinusoidal")),
        )
        for setting, counts in sorted(examples.items())
    )
    heads = ("tokens", "largest distance", "words", "width", "batch", "learning rate", "RoPE", "sinusoid")
    yield from table(heads, *rows)


def words(*names: str) -> Iterator[str]:
    """Words of lists found by pretrained models, in per cent with intervals, by number of words."""
    rows, counts = [], (2, 4, 8, 16)
    for name in names:
        content = lzma.decompress((RESULTS / "words" / f"{name}.json.xz").read_bytes())
        summaries = ProbeRecord.from_dict(json.loads(content)).overview()
        found = {(each.behaviour, each.length): each.right for each in summaries}
        for behaviour in BY_WORDS:
            rights = (found[behaviour, count] for count in counts)
            shares = ([fmt(100 * x, 0) for x in (each.value, each.low, each.high)] for each in rights)
            rows.append((name, behaviour, *(f"{value} [{low}, {high}]" for value, low, high in shares)))
    yield from table(("model", "list", *(f"{count} words" for count in counts)), *rows)


# ---- a picture -------------------------------------------------------------------------------------------------------


def deposit() -> str:
    """The largest ablation effect of a head by encoding, as SVG: mean and 95 % interval over seeds (`desk`)."""
    left, wide, row, top, gap = 140, 300, 26, 62, 170
    figure = FIGURES["largest-cost"][""]
    items, most = [], 0
    for number, protocol in enumerate(PROTOCOLS):
        x0 = left + number * (wide + gap)
        items.append(f'<text x="{x0}" y="{top - 18}" font-weight="bold">Protocol: {protocol}</text>')
        rows = []
        for label, words in record("desk").titles_under(protocol, SWEEP_TASK).items():
            cells = [
                cell for cell in record("desk").results.cells_of(SWEEP_TASK, label) if cell.key.protocol == protocol
            ]
            values = [value for value in figure.by_seed(cells).values() if math.isfinite(value)]
            if values:
                words = "RoPE + sinusoid" if (protocol, label) == ("released", "rope") else words
                rows.append(
                    (mean_contrast(values, figure.grain).estimate(), "RoPE" if label == "rope-alone" else words)
                )
        most = max(most, len(rows))
        items += [
            f'<line x1="{x0 + share * wide / 100:.0f}" x2="{x0 + share * wide / 100:.0f}" y1="{top - 8}" '
            f'y2="{top + row * len(rows)}" stroke="#ddd"/><text x="{x0 + share * wide / 100:.0f}" '
            f'y="{top + row * len(rows) + 16}" text-anchor="middle" fill="#666">{share}%</text>'
            for share in (0, 25, 50, 75, 100)
        ]
        for place, (result, words) in enumerate(sorted(rows, key=lambda each: -each[0].value)):
            y = top + row * place + row // 2
            colour = "#2f6fe0" if "RoPE" in words else "#b5482f"
            low, mid, high = (x0 + wide * each for each in (result.low, result.value, result.high))
            items += [
                f'<text x="{x0 - 10}" y="{y + 4}" text-anchor="end">{words}</text>',
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>',
                f'<circle cx="{mid:.1f}" cy="{y}" r="5" fill="{colour}"/>',
            ]
    size = f"{left + 2 * wide + gap + 20} {top + row * most + 30}"
    title = "Skill lost when the most important head is ablated (Task 1, 6 layers × 16 heads)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n<text x="10" y="20" font-size="15">{title}</text>\n'
        + "\n".join(items)
        + "\n</svg>\n"
    )


# ---- all of it -------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[..., Iterator[str]]] = {
    each.__name__: each
    for each in (
        claims,
        verdicts,
        counts,
        errors,
        encodings,
        effects,
        choice,
        tasks,
        groups,
        records,
        languages,
        pretrained,
        switches,
        rungs,
        lengths,
        paper_size,
        checkpoints,
        learning_time,
        late_learners,
        words,
    )
}


def fill_page(page: Path) -> str:
    """A page with its tables filled from the records."""

    def written(match: re.Match[str]) -> str:
        name, *words = match[2].split()
        return f"{match[1]}\n" + "\n".join(TABLES[name](*words)) + "\n<!-- end -->"

    return re.sub(r"(<!-- table: (.+?) -->)\n.*?<!-- end -->", written, page.read_text("utf-8"), flags=re.DOTALL)


def packaged_verdicts() -> str:
    """The records' verdicts, which the package shows next to those of a small study."""
    content = {}
    for name in REPRODUCED:
        seeds = json.loads((RESULTS / name / "claims.json").read_text("utf-8"))["seeds"]
        verdicts: dict[str, dict[str, str]] = {}
        for entry in ledger(name):
            verdicts.setdefault(entry["protocol"], {})[entry["id"]] = entry["verdict"]
        content[name] = {"seeds": SCALES[name].seeds_text(seeds), "verdicts": verdicts}
    return json.dumps(content, indent=1) + "\n"


def outdated() -> dict[Path, str]:
    """Files that differ from what the records say, with their new content."""
    made = {page: fill_page(page) for page in sorted(DOCS.rglob("*.md"))} | {
        VERDICTS_FILE: packaged_verdicts(),
        DEPOSIT_SVG: deposit(),
    }
    return {path: text for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text}


if __name__ == "__main__":
    changed = outdated()
    for path, text in changed.items():
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(text, "utf-8")
    sys.exit("--check" in sys.argv and bool(changed))
