"""The page of a reproduction: does RoPE deposit positional information in a single attention head?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import isfinite
from typing import Any, get_args

import numpy as np
from markupsafe import Markup

from toeplens import tasks
from toeplens.ground.words import fixed, percent, points, signed, spans
from toeplens.lens import THRESHOLDS, Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit import charts, measured
from toeplens.papers.deposit.charts import PROTOCOLS, TASKS, TEXTS, family, look, mla_models, models, name, ordered
from toeplens.papers.deposit.spec import PARTIAL, SCALES, SWITCH_TITLES, SWITCHES, Label, Scale, title
from toeplens.papers.deposit.study import Plan, Reproduction
from toeplens.report.page import Figure, Ledger, Page, Section, ledger, progress_rows, run_table
from toeplens.report.tables import DASH, Cell, Table, code, make_table
from toeplens.studies import ENOUGH, RULE, CellResult, Entry, Verdict
from toeplens.studies.kit.results import BySeed, estimated
from toeplens.studies.kit.study import Cell as Place
from toeplens.studies.kit.verdicts import LEVEL, SIDES, verdict_text
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT, DISTANCE

Parts = list[Any]  # figures, tables and texts of a section


def reproduction_page(state: Reproduction) -> Page:
    """The page of a reproduction."""
    pictures = _figure("heads-by-layer", charts.heads_by_layer(state)) or _sweep(state, "share")
    sections = [
        *_section("How accurate is each encoding?", "accuracy", _best(state), _accuracy(state)),
        *_section("Where does position sit?", "deposit", _concentration(state), _deposit(state)),
        *_section("What changes it?", "changes", _changes_text(state), _changes(state, pictures)),
        *_section("Why does it happen?", "why", _why_text(state), _why(state)),
        _claims(state),
        _run(state),
    ]
    return Page(
        "reproduce",
        f"Positional encodings and the single-head deposit: {state.plan.scale} scale",
        "Does RoPE deposit positional information in a single attention head?",
        answer(state),
        pictures[0] if pictures else None,
        sections,
        _notes(state),
        _warnings(state),
    )


def _figure(id: str, chart: Any, which: str = "", what: str = "") -> list[Figure]:
    """The figure of a chart with its text; ``which`` is part of its name, and ``what`` of its title."""
    heading, caption = TEXTS["figures"][id]
    title = f"{heading}: {what}" if what else heading
    return [] if chart is None else [Figure(f"{id}-{which}".strip("-"), title, chart, caption)]


def _section(title: str, id: str, text: str, groups: Mapping[str, Parts]) -> list[Section]:
    """A section that shows the first part of the first group that has any; everything else is folded."""
    there = {heading: parts for heading, parts in groups.items() if parts}
    if not there:
        return []
    first, (shown, *more) = next(iter(there.items()))
    folded = there | {first: more}
    return [Section(title, [shown, text], [Section(head, each) for head, each in folded.items() if each], id)]


def _titled(tables: Iterable[Table]) -> Parts:
    """Tables below their names."""
    return [part for each in tables for part in (Markup("<h3>{}</h3>").format(each.name), each)]


def answer(state: Reproduction) -> str:
    """Per protocol: the verdict on a deposit in the first layer, with its number, interval, seeds and threshold."""
    parts, rule = [], ""
    for entry in state.entries:
        if entry.claim.id != "deposit-first-layer" or entry.protocol is None:
            continue
        start = f"By the {PROTOCOLS[entry.protocol]}, {TEXTS['answers'][entry.verdict]}: "
        comparison = entry.findings[0].comparison
        if comparison is None:
            parts.append(f"{start}no finished RoPE model can be judged.")
            continue
        seen = comparison.seen
        interval = f"95% interval {' to '.join(map(percent, seen.interval(LEVEL)))}, " if seen.seeds > 1 else ""
        what = "it loses" if rule else "ablating the most important first-layer head of RoPE loses"
        parts.append(f"{start}{what} {percent(seen.value)} of the skill ({interval}{_count(seen.seeds, 'seed')}).")
        other = entry.findings[1].comparison
        less = f", and less than {other.high:.0%} from every other head" if other else ""
        rule = f" The claim needs more than {comparison.low:.0%}{less}."
    if not parts:
        rope = [each for each in models(state, DISTANCE, charts.ablated) if family(*each[:2]) == "rope"]
        told = [
            f"{percent(row['value'])} ({row['protocol']}, {_count(row['seeds'], 'seed')})"
            for row in charts.means(rope, measured.MEASURES["peak"])
        ]
        seen = f" In its models the most important head of RoPE carries {' and '.join(told)} of the skill." * bool(told)
        return f"This study does not judge it; the part “core” does.{seen}"
    few = f" With {_count(state.plan.seeds, 'seed')} this is only indicative: a verdict needs {ENOUGH}."
    return " ".join(parts) + rule + (few if state.plan.seeds < ENOUGH else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _notes(state: Reproduction) -> list[str]:
    sizes = [
        f"{each.model['num_layers']} layers of {each.model['num_heads']} heads, width {each.model['d_model']}, "
        f"{each.tasks[DISTANCE].paper['length']} tokens"
        for each in (SCALES[scale] for scale in dict.fromkeys((state.plan.scale, "paper")))
    ]
    theirs = f"; the paper’s {sizes[1]}, at which results can differ" if len(sizes) > 1 else ", as in the paper"
    return [f"{TEXTS['terms']} The models have {sizes[0]}{theirs}."]


def _warnings(state: Reproduction) -> list[str]:
    found = []
    if not state.complete:
        share = f"{100 * state.share:.3g}% of the steps"
        found.append(f"Not complete: {state.finished} of {state.total} cells are finished ({share}).")
    if unmeasured := len(state.results.cells) - state.finished:
        found.append(f"Some measurements of {_count(unmeasured, 'trained model')} are not finished.")
    gone = [cell.key for cell in state.results.cells if cell.status == "diverged"]
    if gone:
        named = [f"{name(k.protocol, k.label)}, {TASKS[k.task]}, {PROTOCOLS[k.protocol]}, seed {k.seed}" for k in gone]
        more = f"; and {len(gone) - 8} more, see Models" if len(gone) > 8 else ""
        what = f"{_count(len(gone), 'run')} diverged (infinite or NaN loss; no accuracy)"
        found.append(f"{what}: {'; '.join(named[:8])}{more}.")
    return found


def _accuracy(state: Reproduction) -> dict[str, Parts]:
    tables = [accuracy_table(state, task) for task in TASKS if _rows(state, task)]
    curves = [
        figure
        for task, what in TASKS.items()
        for figure in _figure("learning", charts.learning(state, task), task, what)
    ]
    shown = _figure("accuracy", charts.accuracy(state))
    return {
        "Table 1 and the paper’s numbers": [*shown, *_titled(tables)] if shown or curves else [],
        "Learning curves": curves,
    }


def _rows(state: Reproduction, task: str) -> dict[tuple[Protocol, str], measured.Row]:
    """The rows of Table 1 by protocol and encoding."""
    return {(row.protocol, family(row.protocol, row.label)): row for row in state.table if row.task == task}


def _best(state: Reproduction) -> str:
    """The best encoding of each task under each protocol."""
    told = []
    for task, protocol in product(TASKS, state.plan.protocols):
        rows = [row for (of, _), row in _rows(state, task).items() if of == protocol and row.accuracy is not None]
        if rows:
            best = max(rows, key=lambda row: row.accuracy or 0.0)
            what = f"{TASKS[task]}, {PROTOCOLS[protocol]}: {name(protocol, best.label)}"
            told.append(f"{what} ({percent(best.accuracy)})")
    return f"The best encoding by mean accuracy: {'; '.join(told)}." if told else ""


@lru_cache(maxsize=2)
def _grid(plan: Plan) -> tuple[Place, ...]:
    return tuple(plan.cells())


def accuracy_table(state: Reproduction, task: str) -> Table:
    """Accuracy and largest ablation effect by encoding and protocol, with the paper's Table 1."""
    protocols, found = state.plan.protocols, _rows(state, task)
    keys = [place.key for place in _grid(state.plan) if place.key.task == task]
    planned = {(key.protocol, family(key.protocol, key.label)) for key in keys if not Label.parse(key.label).variant}
    lines: list[list[str | Cell]] = []
    for label in ordered("paper", (label for _, label in planned | set(found))):
        line: list[str | Cell] = [
            Cell(title(label), sign=look("paper", label)),
            Cell(fixed(measured.PAPER_TABLE_1.get((task, label))), right=True),
        ]
        for protocol in protocols:
            row = found.get((protocol, label))
            if row is None or row.accuracy is None:
                why = "not finished" if (protocol, label) in planned else "not in this study"
                why = why if row is None else f"diverged ({row.diverged} of {row.seeds})"
                line.append(Cell(why, across=3, css="edge missing"))
                continue
            mean, count = percent(row.accuracy, sign=False), row.seeds - row.diverged
            span = f"{percent(row.lowest, sign=False)}–{percent(row.highest, sign=False)}" if count > 1 else ""
            seeds = _count(count, "seed") + (f", {row.diverged} diverged" if row.diverged else "")
            where = (row.where or "").replace("layer ", "L").replace(" head ", "\u00a0H")
            line.append(Cell(mean, right=True, css="edge", html=Markup("<b>{}</b>").format(mean)))
            drop = DASH if row.largest_drop is None else points(row.largest_drop)
            line += [Cell(span, (seeds,)), Cell(drop, (where,))]
        lines.append(line)
    for text, of in (("Chance", "chance"), ("Length only", "length_chance")):
        line = [Cell(text, row_css="guess"), ""]
        for protocol in protocols:
            guess = charts.baseline(state, task, protocol, of)
            line += [Cell("" if guess is None else percent(guess, sign=False), right=True, css="edge"), Cell(across=2)]
        lines.append(line)
    groups = [Cell("Encoding", down=2), Cell("Paper", down=2, right=True)]
    groups += [Cell(f"{PROTOCOLS[each].capitalize()}, ours", across=3, css="group") for each in protocols]
    return make_table(
        f"Accuracy, {TASKS[task]}",
        [Cell("Mean", right=True, css="edge"), "Range", "Largest drop"] * len(protocols),
        lines,
        groups=groups,
        note="Test accuracy in per cent; accuracy drop without the most important head in percentage points, mean over "
        "seeds. Small print: seeds; each seed’s most important head (L2 H3: layer 2, head 3).",
    )


def _deposit(state: Reproduction) -> dict[str, Parts]:
    maps, curves = (
        [figure for task, what in TASKS.items() for figure in _figure(id, draw(state, task), task, what)]
        for id, draw in (("heads", charts.head_maps), ("cumulative", charts.cumulative))
    )
    layers = deposit_tables(state)
    return {
        "Deposits": _figure("deposits", charts.deposits(state)),
        "Kind and concentration of each layer": [_DEPOSIT_NOTE, *_titled(layers)] if layers else [],
        "Effect of every head": maps,
        "Cumulative ablation within a layer": curves,
        "Position or content?": _figure("position", charts.position(state)),
        "Sets of heads": _figure("sets", charts.sets(state)) + _figure("set-sizes", charts.set_sizes(state)),
    }


def _concentration(state: Reproduction) -> str:
    """How many models have a single-head layer, and the largest ablation effect of all."""
    found = [cell for *_, cells in models(state, DISTANCE, charts.ablated, partial=True) for cell in cells]
    told = []
    for protocol in state.plan.protocols:
        every = [{layer.kind for layer in cell.deposits()} for cell in found if cell.key.protocol == protocol]
        able = [each for each in every if each != {"no-skill"}]
        single = sum("single-head" in each for each in able)
        told += [f"{single} of {len(able)} models with skill ({PROTOCOLS[protocol]})"] if able else []
    text = f"On Task 1, {' and '.join(told)} have a single-head layer." if told else ""
    if found:
        cell = max(found, key=lambda each: charts.drops(each).max())
        drops, protocol = charts.drops(cell), cell.key.protocol
        layer, head = np.unravel_index(drops.argmax(), drops.shape)
        where = f"{name(protocol, cell.key.label)}, layer {layer + 1}, head {head + 1}, {PROTOCOLS[protocol]}"
        text += f" The largest drop from one head is {points(drops.max())} percentage points ({where})."
    return text


def kinds_cell(counts: Mapping[str, int]) -> Cell:
    """The kinds of a layer, each with the number of models of that kind."""
    many = sum(counts.values())
    told = {kind: f"{count}/{many}" if many > 1 else "" for kind, count in counts.items()}
    pill = Markup('<span class="kind {0}">{0}</span>')
    few = Markup('<span class="kind {0}">{0} <small>{1}</small></span>')
    shown = Markup(" ").join((few if count else pill).format(kind, count) for kind, count in told.items())
    return Cell(", ".join(f"{kind} {count}".rstrip() for kind, count in told.items()), html=shown)


def deposit_tables(state: Reproduction) -> list[Table]:
    """Per task and protocol: the kind of each layer of each encoding, and how concentrated it is."""
    made = []
    for task, protocol in product(TASKS, state.plan.protocols):
        found = [each[1:] for each in models(state, task, charts.ablated, partial=True) if each[0] == protocol]
        rows = [row for label, cells in found for row in _deposit_rows(protocol, label, cells)]
        if rows:
            head = [Cell(text, right=place > 2) for place, text in enumerate(_COLUMNS)]
            where = f"Deposit by layer, {TASKS[task]}, {PROTOCOLS[protocol]}"
            made.append(Table(where, [head], rows, css="numbers small"))
    return made


_COLUMNS = ("Model", "Layer", "Kind", "Heads", "Peak", "Second", "Top share", "Effective heads", "Gini", "Half gone at")
_DEPOSIT_NOTE = (
    "Means over seeds. Peak, second: the two largest accuracy drops of one head, as a share of the skill (heads: which "
    "head is largest). Top share: the largest drop as a share of the sum. Effective heads: (sum of drops)² / sum of "
    f"squared drops. Half gone at: heads to ablate until half of the skill is lost. Kinds: {THRESHOLDS}."
)


def _deposit_rows(protocol: Protocol, label: str, cells: Sequence[CellResult]) -> list[list[Cell]]:
    rows = []
    for place, layers in enumerate(zip(*(cell.deposits() for cell in cells), strict=True), start=1):
        counted = dict(Counter(layer.kind for layer in layers).most_common())
        half = {layer.half_at for layer in layers}
        half_text = spans(each for each in half if each is not None) + (", never" if None in half else "")
        numbers = [spans(layer.head + 1 for layer in layers)]
        for of, digits in (("peak", 2), ("second", 2), ("top_share", 2), ("effective_heads", 1), ("gini", 2)):
            values = [value for layer in layers if isfinite(value := getattr(layer, of))]
            numbers.append(fixed(float(np.mean(values)) if values else None, digits))
        numbers.append(half_text.removeprefix(", "))
        row = [Cell(str(place)), kinds_cell(counted), *(Cell(text, right=True) for text in numbers)]
        if place == 1:
            size, small = len(cells[0].deposits()), (_count(len(cells), "seed"),)
            sign = look(protocol, label)
            row.insert(0, Cell(name(protocol, label), small, down=size, header=True, row_css="first", sign=sign))
        rows.append(row)
    return rows


def _changes(state: Reproduction, pictures: Parts) -> dict[str, Parts]:
    parts = state.plan.parts
    switches: Parts = []
    sweep: Parts = []
    for task, measure in product(TASKS, ("accuracy", "peak")):
        what = f"{TEXTS['measures'][measure]}, {TASKS[task]}"
        switches += _figure("switches", charts.switches(state, task, measure), f"{measure}-{task}", what)
    for which in TEXTS["sweep"] if "ladder" in parts else ():
        sweep += _sweep(state, which) + _sweep(state, which, moments=True)
    partial = _figure("partial", charts.partial(state))
    if "partial" in parts:
        partial += _figure("partial-layers", charts.layers(state)) + _figure("partial-peaks", charts.peaks(state))
    variants: Parts = []
    if "mla" in parts:
        variants = [*_figure("mla", charts.mla(state)), *_titled([*variant_tables(state), *steps_table(state)])]
    return {
        "Differences between the protocols": [*switches, *_titled(switch_tables(state))],
        "RoPE on some of the heads": partial,
        "MLA: latent attention or its released code?": variants,
        "RoPE with a sinusoid: does it persist?": _figure("representation", charts.representation(state)),
        "Scale sweep: when does a deposit occur?": [each for each in sweep if each.id not in {p.id for p in pictures}],
    }


def _sweep(state: Reproduction, which: str, *, moments: bool = False) -> Parts:
    chart = charts.sweep(state, which, moments=moments) if "ladder" in state.plan.parts else None
    return _figure("moments" if moments else "sweep", chart, which, TEXTS["sweep"][which])


def _changes_text(state: Reproduction) -> str:
    """The strongest switch of RoPE, and accuracy with RoPE on one head; what there is of both."""
    told, few = [], []
    for end in measured.ENDS[DISTANCE]:
        rows = [r for r in charts.factor_rows(state) if (r.task, r.base, r.end) == (DISTANCE, "rope", end)]
        if row := measured.strongest(rows, "accuracy"):
            to, instead = SWITCH_TITLES[row.switch]
            change = f"{_interval(row.effect('accuracy'))} percentage points of accuracy"
            told.append(f"In the {PROTOCOLS[end]}, {to} instead of {instead} changes RoPE most (Task 1): {change}.")
    for protocol, rows in product(state.plan.protocols, [_rows(state, DISTANCE)]):
        one, whole = (rows.get((protocol, label)) for label in (f"{PARTIAL}-1", "rope"))
        if one and whole and None not in (one.accuracy, whole.accuracy):
            few.append(f"{percent(one.accuracy)}, on all {percent(whole.accuracy)} ({PROTOCOLS[protocol]})")
    return " ".join([*told, *([f"RoPE on one head per layer reaches {'; on one '.join(few)}."] if few else [])])


def _interval(estimate: Estimate | None, *, sign: bool = True) -> str:
    """A mean over seeds in percentage points, with its interval, or a dash."""
    if estimate is None:
        return DASH
    value = signed(100 * estimate.value, 1) if sign else points(estimate.value)
    if not isfinite(estimate.low):
        return f"{value} (one seed)"
    return f"{value} [{points(estimate.low)}, {points(estimate.high)}]"


def _effect(effect: Estimate | None) -> Cell:
    """An effect in percentage points, bold if its interval excludes 0."""
    text = _interval(effect)
    return Cell(text, html=Markup("<b>{}</b>").format(text) if effect and measured.decided(effect) else None)


def switch_tables(state: Reproduction) -> list[Table]:
    """The effects on each measure, one table per task and starting protocol, with the unexplained remainder."""
    rows, found = charts.factor_rows(state), []
    for task, measure in product(measured.BASES, measured.MEASURES):
        for end in measured.ENDS[task]:
            here = [row for row in rows if (row.task, row.end) == (task, end)]
            if any(row.values[measure] for row in here):
                found.append(_switch_table(state, here, measure))
    return found


def _switch_table(state: Reproduction, rows: Sequence[measured.FactorRow], measure: measured.FactorMeasure) -> Table:
    task, end = rows[0].task, rows[0].end
    bases = list(dict.fromkeys(row.base for row in rows))
    wholes = measured.factor_wholes(state.results, state.plan.protocols)
    of = {whole.base: whole for whole in wholes if whole.task == task}
    lines: list[list[str | Cell]] = []
    for switch in SWITCHES:
        mine = {row.base: row for row in rows if row.switch == switch}
        if mine:
            to, instead = SWITCH_TITLES[switch]
            lines.append([Cell(to, (f"instead of {instead}",)), *(_switch_cell(mine.get(b), measure) for b in bases)])
    for place, (unchanged, text) in enumerate(TEXTS["unchanged"].items()):
        values = [estimated(of[b].ends[unchanged][measure]) if unchanged in of[b].ends else None for b in bases]
        first = Cell(text, row_css="guess" if place else "guess first")
        lines.append([first, *(_interval(value, sign=False) for value in values)])
    sums = [measured.left_over(of[base], [row for row in rows if row.base == base], measure) for base in bases]
    changes: dict[str, list[BySeed]] = {
        "all switches together": [of[base].difference(measure) for base in bases],
        "sum of the single effects": [total for total, _ in sums],
        "remainder: interactions of switches": [rest for _, rest in sums],
    }
    for text, each in changes.items():
        lines.append([Cell(text, row_css="guess"), *(_effect(estimated(value)) for value in each)])
    return make_table(
        f"Effects, {TASKS[task]}, {TEXTS['measures'][measure]}, {TEXTS['ends'][end]}",
        ["The paper’s setting", *(Cell(title(base), sign=look("paper", base)) for base in bases)],
        lines,
        note="Percentage points, mean over seeds with 95% interval, bold if it excludes 0. Small print: the released "
        "code’s setting; number of models with a single-head layer before and after.",
    )


def _switch_cell(row: measured.FactorRow | None, measure: measured.FactorMeasure) -> Cell:
    if row is None:
        return Cell(small=("no difference",))
    effect = row.effect(measure)
    if row.absent or effect is None:
        return Cell(DASH, (row.absent or ("not finished" if not row.before else "no skill"),))
    before, after = (counts.get("single-head", 0) for counts in (row.before, row.after))
    below = (f"single-head: {before} → {after} of {sum(row.after.values())}",) if measure in ("drop", "peak") else ()
    made = _effect(effect)
    return Cell(made.text, below, html=made.html)


def variant_tables(state: Reproduction) -> list[Table]:
    """Accuracy and concentration of MLA, its variants and RoPE, per protocol."""
    made = []
    for protocol in state.plan.protocols:
        lines: list[list[str | Cell]] = []
        for text, [(_, label, cells)] in mla_models(state, protocol):
            able = [found[1].effective_heads for cell in cells if (found := measured.concentrated(cell))]
            shares = (_interval(estimated(_values(cells, each)), sign=False) for each in ("accuracy", "peak"))
            heads = fixed(float(np.mean(able)) if able else None, 1)
            lines.append([Cell(text, sign=look(protocol, label)), *shares, heads, kinds_cell(measured.kinds(cells))])
        if lines:
            names = ["Model", "Test accuracy, %", "Share of the skill lost by ablating one head, %"]
            names += ["Effective heads of its layer", "Kind of that layer"]
            made.append(make_table(f"Variants of MLA, {PROTOCOLS[protocol]}", names, lines))
    return made


def _values(cells: Iterable[CellResult], measure: measured.FactorMeasure) -> BySeed:
    return BySeed({cell.key.seed: value for cell in cells if isfinite(value := measured.MEASURES[measure](cell))})


def steps_table(state: Reproduction) -> list[Table]:
    """Paired differences of one head's share: is the diffuse pattern due to MLA or to its released code?"""
    lines: list[list[str | Cell]] = []
    for protocol in state.plan.protocols:
        for step in TEXTS["steps"][protocol]:
            cells = (state.results.under(protocol).of(DISTANCE, step[label]) for label in ("from", "to"))
            start, end = (_values(each, "peak") for each in cells)
            levels, change = [estimated(start), estimated(end)], estimated(end - start)
            if change is not None:
                first = Cell(step["text"], (PROTOCOLS[protocol],))
                shares = (percent(level.value if level else None) for level in levels)
                what = "interval excludes 0" if measured.decided(change) else "interval includes 0"
                lines.append([first, *shares, Cell(_interval(change), (what,))])
    names = ["Change", "Before", "After", "Difference, percentage points"]
    note = "Share of the skill lost by ablating one head. Differences are paired by seed, with 95% intervals."
    return [make_table("MLA or its released code", names, lines, note=note)] if lines else []


def _why(state: Reproduction) -> dict[str, Parts]:
    gradients = _figure("strength", charts.strength(state))
    for which in ("exponent", "lead", "growth"):
        gradients += _figure(which, charts.gradient(state, which))
    circuit = [each for w in TEXTS["circuit"] for each in _figure("circuit", charts.circuit(state, w), w, w)]
    training = _figure("training", charts.training(state)) + _figure("exponents", charts.exponents(state))
    return {"Gradient seeds: a possible origin": gradients, "During training": training, "Circuit": circuit}


def _why_text(state: Reproduction) -> str:
    """Whether positional gradients cancel in the first layer of RoPE, where that was measured."""
    found = models(state, DISTANCE, charts.has("seed"))
    rope = [each for each in found if family(*each[:2]) == "rope"]
    told = []
    for row in charts.means(rope, lambda cell: cell.measure("seed").strength.levels["logits"].layers.exponent[0]):
        span = f" [{fixed(row['low'])}, {fixed(row['high'])}]" if row["seeds"] > 1 else ""
        told.append(f"{fixed(row['value'])}{span} ({row['protocol']}, {_count(row['seeds'], 'seed')})")
    if not told:
        return ""
    return (
        f"In the first layer of RoPE, the exponent of the positional gradient at the logits is {'; '.join(told)}. "
        "At −1/2 it cancels over a batch like noise, at 0 not at all."
    )


def _claims(state: Reproduction) -> Section:
    claims = ledger(state.entries)
    tallies = []
    for protocol in state.plan.protocols:
        counts = Counter(entry.verdict for entry in state.entries if entry.protocol == protocol)
        told = (f"{verdict_text(each)} {counts[each]}" for each in get_args(Verdict) if counts[each])
        tallies.append(f"{PROTOCOLS[protocol].capitalize()}: {', '.join(told)}.")
    text = " ".join(tallies) + _opposite(claims)
    known = measured.recorded() if state.plan.seeds < ENOUGH else {}
    parts = [Ledger(claims, {each: PROTOCOLS[each] for each in state.plan.protocols}, known), text]
    rules = (
        "The rules were written after the laptop record was known and before any desk model was trained; some were "
        "amended after the desk record was known. In the evidence for the released protocol, “RoPE” is the code’s "
        "model with its sinusoid, and “RoPE, no sinusoid” is RoPE."
    )
    changed = sum(entry.plain != entry.verdict for entry in state.entries)
    differ = f"Without the correction, {changed} of {len(state.entries)} verdicts would differ."
    decided_by = Section("How verdicts are decided", [f"{RULE} {differ}", rules])
    return Section("Which of the papers’ claims hold?", parts, [decided_by], "claims")


def _opposite(claims: Sequence[Sequence[Entry]]) -> str:
    """How many claims have opposite verdicts under the two protocols."""
    count = sum({-1, 1} <= {SIDES.get(entry.verdict, 0) for entry in each} for each in claims)
    return f" Opposite verdicts under the two protocols: {count}." if any(len(each) > 1 for each in claims) else ""


def _run(state: Reproduction) -> Section:
    scale = SCALES[state.plan.scale]
    used = sorted({place.key.seed for place in _grid(state.plan)})
    facts = [
        ("Scale", f"{state.plan.scale}: {scale.about}"),
        ("Parts", f"{', '.join(state.plan.parts)}; {' and '.join(PROTOCOLS[each] for each in state.plan.protocols)}"),
        ("Seeds", f"{scale.told(state.plan.seeds)} per cell: {spans(used)} (of weights, order and data)"),
        *([("Set-ups", str(state.environment["setups"]))] if state.environment.get("setups") else []),
    ]
    details = [
        Section("Encodings in each protocol", [encodings_table(state)]),
        Section("Settings, ours and the paper’s", [_SETTINGS, settings_table(state)]),
        Section("Models", [models_table(state)]),
    ]
    return Section(
        "How was it run?", [run_table(state.environment, progress_rows(state, "cells", facts))], details, "run"
    )


_SETTINGS = "A claim that fails at this size may hold at the paper’s, and vice versa."
_TRAINED = ("weight_decay", "warmup", "schedule", "evaluations", "plateau")


def settings_table(state: Reproduction) -> Table:
    """The study's settings and the paper's."""
    paper, ours = (_settings(scale, state) for scale in (SCALES["paper"], SCALES[state.plan.scale]))
    lines: list[list[str | Cell]] = []
    for text in {**paper, **ours}:
        theirs, mine = (_shown(found.get(text)) for found in (paper, ours))
        bold = Markup("<b>{}</b>").format(mine) if theirs != mine else None
        lines.append([text, theirs, Cell(mine, right=True, html=bold), "yes" if bold else DASH])
    return make_table("Settings", ["Setting", "Paper", "This study", "Differs"], lines, right=(1, 2))


def _settings(scale: Scale, state: Reproduction) -> dict[str, Any]:
    usual = {field: RunSpec.model_fields[field].default for field in _TRAINED}
    found: dict[str, Any] = {**scale.model, **usual, **scale.optimiser}
    for task, size in scale.tasks.items():
        for protocol in state.plan.protocols:
            sizes = size.paper if protocol == "paper" else size.released
            made = tasks.build(task, form=protocol, vocab_size=scale.model["vocab_size"], **sizes)
            distance = ("length", "max_distance") if protocol == "paper" else ("length", "max_between", "max_side")
            for option in ("length", "num_triggers", "max_count") if task == COUNT else distance:
                found[f"{TASKS[task]}, {PROTOCOLS[protocol]}: {option}"] = getattr(made, option)
        for field in ("train_examples", "test_examples", "epochs"):
            found[f"{TASKS[task]}: {field}"] = getattr(size, field)
        found[f"{TASKS[task]}: encodings"] = len(scale.labels[task])
    found["examples per ablation"] = scale.ablation_examples
    return {text.replace("_", " "): value for text, value in found.items()}


def _shown(value: Any) -> str:
    """A setting's value, or a dash."""
    if value is None or isinstance(value, str):
        return value or DASH
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def models_table(state: Reproduction) -> Table:
    """All models of the plan, including unfinished ones."""
    found, lines = {cell.key: cell for cell in state.results.cells}, []
    for place in _grid(state.plan):
        key, cell = place.key, found.get(place.key)
        there = cell is not None and cell.status != "diverged"
        scores = [cell.result.get(f"{split}_accuracy") if cell and there else None for split in ("train", "test")]
        lines.append(
            [
                *(name(key.protocol, key.label), TASKS[key.task], key.protocol, str(key.seed)),
                cell.status if cell else "not finished",
                _shown(cell.parameters if cell else None),
                *(percent(score, sign=False) for score in scores),
                fixed(cell.result.get("seconds") if cell else None, 0),
                code(f"runs/{place.job.spec.name}"),
            ]
        )
    names = ["Model", "Task", "Protocol", "Seed", "Status", "Parameters", "Train, %", "Test, %", "Seconds", "Run"]
    return make_table("Models", names, lines, right=(3, 5, 6, 7, 8), css="numbers small")


def encodings_table(state: Reproduction) -> Table:
    """The encodings of the study's grid, and how each protocol defines them; RoPE on some heads is one entry."""
    keys, protocols = [place.key for place in _grid(state.plan)], state.plan.protocols
    places = {(key.protocol, family(key.protocol, Label.parse(key.label).base)) for key in keys}
    lines: list[list[str | Cell]] = []
    for label, (does, *meant) in TEXTS["encodings"].items():
        if any((protocol, label) in places for protocol in protocols):
            both = dict(zip(PROTOCOLS, meant, strict=True))
            there = [both[each] if (each, label) in places else "not in this study" for each in protocols]
            text = "RoPE on some heads" if label == PARTIAL else title(label)
            sign = look("paper", "partial-1" if label == PARTIAL else label)
            lines.append([Cell(text, sign=sign), does, *there])
    names = ["Encoding", "What it does", *(f"In the {PROTOCOLS[protocol]}" for protocol in protocols)]
    return make_table("The encodings", names, lines, css="glossary")
