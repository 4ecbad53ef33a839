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
from toeplens.lens import THRESHOLDS, Estimate
from toeplens.model import Protocol
from toeplens.papers.deposit import charts, measures
from toeplens.papers.deposit.charts import (
    PROTOCOLS,
    TASKS,
    TEXTS,
    display_name,
    family,
    mark_style,
    mla_models,
    model_groups,
    sort_labels,
)
from toeplens.papers.deposit.spec import PARTIAL, SCALES, SWITCH_TITLES, EncodingLabel, ReproductionScale, title
from toeplens.papers.deposit.study import Reproduction, ReproductionPlan
from toeplens.report.page import (
    Figure,
    Ledger,
    Page,
    Section,
    entries_by_claim,
    progress_rows,
    progress_warnings,
    run_table,
)
from toeplens.report.tables import DASH, Table, TableCell, code, make_table
from toeplens.studies import MIN_SEEDS, RULE, CellResult, LedgerEntry, Verdict
from toeplens.studies.kit.results import CellKey, SeedValues, estimate_mean
from toeplens.studies.kit.study import Cell as Place
from toeplens.studies.kit.verdicts import LEVEL, SIGNS, verdict_text
from toeplens.training import RunSpec
from toeplens.training.presets import COUNT, DISTANCE
from toeplens.utils.formatting import fmt, fmt_signed, format_ranges, percent, percentage_points, plural

Blocks = list[Any]  # figures, tables and texts of a section


def reproduction_page(state: Reproduction) -> Page:
    """The page of a reproduction."""
    pictures = _figure("heads-by-layer", charts.heads_by_layer_chart(state)) or _sweep_figures(state, "share")
    sections = [
        *_section("How accurate is each encoding?", "accuracy", _best_text(state), _accuracy_blocks(state)),
        *_section("Where does position sit?", "deposit", _concentration_text(state), _deposit_blocks(state)),
        *_section("What changes it?", "changes", _changes_text(state), _changes_blocks(state, pictures)),
        *_section("Why does it happen?", "why", _mechanism_text(state), _mechanism_blocks(state)),
        _claims_section(state),
        _run_section(state),
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


def _figure(id: str, chart: Any, suffix: str = "", subtitle: str = "") -> list[Figure]:
    """The figure of a chart with its text; ``suffix`` is part of its name, and ``subtitle`` of its title."""
    heading, caption = TEXTS["figures"][id]
    title = f"{heading}: {subtitle}" if subtitle else heading
    return [] if chart is None else [Figure(f"{id}-{suffix}".strip("-"), title, chart, caption)]


def _section(title: str, id: str, text: str, groups: Mapping[str, Blocks]) -> list[Section]:
    """A section that shows the first part of the first group that has any; everything else is folded."""
    nonempty = {heading: parts for heading, parts in groups.items() if parts}
    if not nonempty:
        return []
    first, (shown, *others) = next(iter(nonempty.items()))
    details = nonempty | {first: others}
    return [Section(title, [shown, text], [Section(head, blocks) for head, blocks in details.items() if blocks], id)]


def _with_headings(tables: Iterable[Table]) -> Blocks:
    """Tables below their names."""
    return [part for table in tables for part in (Markup("<h3>{}</h3>").format(table.name), table)]


def answer(state: Reproduction) -> str:
    """Per protocol: the verdict on a deposit in the first layer, with its number, interval, seeds and threshold."""
    sentences, rule = [], ""
    for entry in state.entries:
        if entry.claim.id != "deposit-first-layer" or entry.protocol is None:
            continue
        start = f"By the {PROTOCOLS[entry.protocol]}, {TEXTS['answers'][entry.verdict]}: "
        comparison = entry.findings[0].comparison
        if comparison is None:
            sentences.append(f"{start}no finished RoPE model can be judged.")
            continue
        mean = comparison.mean
        interval = f"95% interval {' to '.join(map(percent, mean.interval(LEVEL)))}, " if mean.seeds > 1 else ""
        subject = "it loses" if rule else "ablating the most important first-layer head of RoPE loses"
        seeds = plural(mean.seeds, "seed")
        sentences.append(f"{start}{subject} {percent(mean.value)} of the skill ({interval}{seeds}).")
        other = entry.findings[1].comparison
        less = f", and less than {other.high:.0%} from every other head" if other else ""
        rule = f" The claim needs more than {comparison.low:.0%}{less}."
    if not sentences:
        rope = [group for group in model_groups(state, DISTANCE, charts.has_ablation) if family(*group[:2]) == "rope"]
        shares = [
            f"{percent(row['value'])} ({row['protocol']}, {plural(row['seeds'], 'seed')})"
            for row in charts.mean_rows(rope, measures.MEASURES["peak"])
        ]
        text = f" In its models the most important head of RoPE carries {' and '.join(shares)} of the skill."
        return f"This study does not judge it; the part “core” does.{text if shares else ''}"
    caveat = f" With {plural(state.plan.seeds, 'seed')} this is only indicative: a verdict needs {MIN_SEEDS}."
    return " ".join(sentences) + rule + (caveat if state.plan.seeds < MIN_SEEDS else "")


def _notes(state: Reproduction) -> list[str]:
    sizes = [
        f"{preset.model['num_layers']} layers of {preset.model['num_heads']} heads, width {preset.model['d_model']}, "
        f"{preset.tasks[DISTANCE].paper['length']} tokens"
        for preset in (SCALES[scale] for scale in (state.plan.scale, "paper"))
    ]
    theirs = f"; the paper’s {sizes[1]}, at which results can differ" if sizes[0] != sizes[1] else ", as in the paper"
    return [f"{TEXTS['terms']} The models have {sizes[0]}{theirs}."]


def _warnings(state: Reproduction) -> list[str]:
    def name_of(key: CellKey) -> str:
        return f"{display_name(key.protocol, key.label)}, {TASKS[key.task]}, {PROTOCOLS[key.protocol]}, seed {key.seed}"

    warnings = progress_warnings(state, "cells", name_of)
    if unmeasured := len(state.results.cells) - state.finished:
        warnings.append(f"Some measurements of {plural(unmeasured, 'trained model')} are not finished.")
    return warnings


def _accuracy_blocks(state: Reproduction) -> dict[str, Blocks]:
    tables = [accuracy_table(state, task) for task in TASKS if _accuracy_rows(state, task)]
    curves = [
        figure
        for task, task_title in TASKS.items()
        for figure in _figure("learning", charts.learning_chart(state, task), task, task_title)
    ]
    overview = _figure("accuracy", charts.accuracy_chart(state))
    return {
        "Table 1 and the paper’s numbers": [*overview, *_with_headings(tables)] if overview or curves else [],
        "Learning curves": curves,
    }


def _accuracy_rows(state: Reproduction, task: str) -> dict[tuple[Protocol, str], measures.AccuracyRow]:
    """The rows of Table 1 by protocol and encoding."""
    return {(row.protocol, family(row.protocol, row.label)): row for row in state.table if row.task == task}


def _best_text(state: Reproduction) -> str:
    """The best encoding of each task under each protocol."""
    entries = []
    for task, protocol in product(TASKS, state.plan.protocols):
        rows = [
            row
            for (row_protocol, _), row in _accuracy_rows(state, task).items()
            if row_protocol == protocol and row.accuracy is not None
        ]
        if rows:
            best = max(rows, key=lambda row: row.accuracy or 0.0)
            prefix = f"{TASKS[task]}, {PROTOCOLS[protocol]}: {display_name(protocol, best.label)}"
            entries.append(f"{prefix} ({percent(best.accuracy)})")
    return f"The best encoding by mean accuracy: {'; '.join(entries)}." if entries else ""


@lru_cache(maxsize=2)
def _cells(plan: ReproductionPlan) -> tuple[Place, ...]:
    return tuple(plan.cells())


def accuracy_table(state: Reproduction, task: str) -> Table:
    """Accuracy and largest ablation effect by encoding and protocol, with the paper's Table 1."""
    protocols, by_label = state.plan.protocols, _accuracy_rows(state, task)
    keys = [cell.key for cell in _cells(state.plan) if cell.key.task == task]
    keys = [key for key in keys if not EncodingLabel.parse(key.label).variant]
    planned = {(key.protocol, family(key.protocol, key.label)) for key in keys}
    lines: list[list[str | TableCell]] = []
    for label in sort_labels("paper", (label for _, label in planned | set(by_label))):
        line: list[str | TableCell] = [
            TableCell(title(label), marker=mark_style("paper", label)),
            TableCell(fmt(measures.PAPER_TABLE_1.get((task, label))), right=True),
        ]
        for protocol in protocols:
            row = by_label.get((protocol, label))
            if row is None or row.accuracy is None:
                reason = "not finished" if (protocol, label) in planned else "not in this study"
                reason = reason if row is None else f"diverged ({row.diverged} of {row.seeds})"
                line.append(TableCell(reason, colspan=3, css="edge missing"))
                continue
            mean, count = percent(row.accuracy, sign=False), row.seeds - row.diverged
            range_text = f"{percent(row.lowest, sign=False)}–{percent(row.highest, sign=False)}" if count > 1 else ""
            seeds = plural(count, "seed") + (f", {row.diverged} diverged" if row.diverged else "")
            where = (row.where or "").replace("layer ", "L").replace(" head ", "\u00a0H")
            line.append(TableCell(mean, right=True, css="edge", html=Markup("<b>{}</b>").format(mean)))
            drop = DASH if row.largest_drop is None else percentage_points(row.largest_drop)
            line += [TableCell(range_text, (seeds,)), TableCell(drop, (where,))]
        lines.append(line)
    for text, field in (("Chance", "chance"), ("Length only", "length_chance")):
        line = [TableCell(text, row_css="guess"), ""]
        for protocol in protocols:
            guess = charts.baseline(state, task, protocol, field)
            percentage = "" if guess is None else percent(guess, sign=False)
            line += [TableCell(percentage, right=True, css="edge"), TableCell(colspan=2)]
        lines.append(line)
    groups = [TableCell("Encoding", rowspan=2), TableCell("Paper", rowspan=2, right=True)]
    groups += [TableCell(f"{PROTOCOLS[p].capitalize()}, ours", colspan=3, css="group") for p in protocols]
    return make_table(
        f"Accuracy, {TASKS[task]}",
        [TableCell("Mean", right=True, css="edge"), "Range", "Largest drop"] * len(protocols),
        lines,
        groups=groups,
        note="Test accuracy in per cent; accuracy drop without the most important head in percentage points, mean over "
        "seeds. Small print: seeds; each seed’s most important head (L2 H3: layer 2, head 3).",
    )


def _deposit_blocks(state: Reproduction) -> dict[str, Blocks]:
    maps, curves = (
        [figure for task, task_title in TASKS.items() for figure in _figure(id, draw(state, task), task, task_title)]
        for id, draw in (("heads", charts.head_map_chart), ("cumulative", charts.cumulative_chart))
    )
    layers, sets = deposit_tables(state), _figure("sets", charts.head_sets_chart(state))
    return {
        "Deposits": _figure("deposits", charts.deposits_chart(state)),
        "Kind and concentration of each layer": [_DEPOSIT_NOTE, *_with_headings(layers)] if layers else [],
        "Effect of every head": maps,
        "Cumulative ablation within a layer": curves,
        "Position or content?": _figure("position", charts.position_chart(state)),
        "Sets of heads": sets + _figure("set-sizes", charts.set_sizes_chart(state)),
    }


def _concentration_text(state: Reproduction) -> str:
    """How many models have a single-head layer, and the largest ablation effect of all."""
    groups = model_groups(state, DISTANCE, charts.has_ablation, partial=True)
    ablated_cells = [cell for *_, cells in groups for cell in cells]
    counts = []
    for protocol in state.plan.protocols:
        kinds = [{layer.kind for layer in cell.deposits()} for cell in ablated_cells if cell.key.protocol == protocol]
        with_skill = [item for item in kinds if item != {"no-skill"}]
        single = sum("single-head" in item for item in with_skill)
        counts += [f"{single} of {len(with_skill)} models with skill ({PROTOCOLS[protocol]})"] if with_skill else []
    text = f"On Task 1, {' and '.join(counts)} have a single-head layer." if counts else ""
    if ablated_cells:
        cell = max(ablated_cells, key=lambda item: charts.accuracy_drops(item).max())
        drops, protocol = charts.accuracy_drops(cell), cell.key.protocol
        layer, head = np.unravel_index(drops.argmax(), drops.shape)
        where = f"{display_name(protocol, cell.key.label)}, layer {layer + 1}, head {head + 1}, {PROTOCOLS[protocol]}"
        text += f" The largest drop from one head is {percentage_points(drops.max())} percentage points ({where})."
    return text


def kinds_cell(counts: Mapping[str, int]) -> TableCell:
    """The kinds of a layer, each with the number of models of that kind."""
    total = sum(counts.values())
    labels = {kind: f"{count}/{total}" if total > 1 else "" for kind, count in counts.items()}
    pill = Markup('<span class="kind {0}">{0}</span>')
    pill_with_count = Markup('<span class="kind {0}">{0} <small>{1}</small></span>')
    html = Markup(" ").join((pill_with_count if count else pill).format(kind, count) for kind, count in labels.items())
    return TableCell(", ".join(f"{kind} {count}".rstrip() for kind, count in labels.items()), html=html)


def deposit_tables(state: Reproduction) -> list[Table]:
    """Per task and protocol: the kind of each layer of each encoding, and how concentrated it is."""
    tables = []
    for task, protocol in product(TASKS, state.plan.protocols):
        groups = [g[1:] for g in model_groups(state, task, charts.has_ablation, partial=True) if g[0] == protocol]
        rows = [row for label, cells in groups for row in _deposit_rows(protocol, label, cells)]
        if rows:
            header = [TableCell(text, right=column > 2) for column, text in enumerate(_COLUMNS)]
            where = f"Deposit by layer, {TASKS[task]}, {PROTOCOLS[protocol]}"
            tables.append(Table(where, [header], rows, css="numbers small"))
    return tables


_COLUMNS = ("Model", "Layer", "Kind", "Heads", "Peak", "Second", "Top share", "Effective heads", "Gini", "Half gone at")
_DEPOSIT_NOTE = (
    "Means over seeds. Peak, second: the two largest accuracy drops of one head, as a share of the skill (heads: which "
    "head is largest). Top share: the largest drop as a share of the sum. Effective heads: (sum of drops)² / sum of "
    f"squared drops. Half gone at: heads to ablate until half of the skill is lost. Kinds: {THRESHOLDS}."
)


def _deposit_rows(protocol: Protocol, label: str, cells: Sequence[CellResult]) -> list[list[TableCell]]:
    rows = []
    for layer_number, layers in enumerate(zip(*(cell.deposits() for cell in cells), strict=True), start=1):
        counts = dict(Counter(layer.kind for layer in layers).most_common())
        half = {layer.half_at for layer in layers}
        half_text = format_ranges(count for count in half if count is not None) + (", never" if None in half else "")
        numbers = [format_ranges(layer.head + 1 for layer in layers)]
        for field, digits in (("peak", 2), ("second", 2), ("top_share", 2), ("effective_heads", 1), ("gini", 2)):
            values = [value for layer in layers if isfinite(value := getattr(layer, field))]
            numbers.append(fmt(float(np.mean(values)) if values else None, digits))
        numbers.append(half_text.removeprefix(", "))
        row = [TableCell(str(layer_number)), kinds_cell(counts), *(TableCell(text, right=True) for text in numbers)]
        if layer_number == 1:
            size, small = len(cells[0].deposits()), (plural(len(cells), "seed"),)
            name, sign = display_name(protocol, label), mark_style(protocol, label)
            row.insert(0, TableCell(name, small, rowspan=size, header=True, row_css="first", marker=sign))
        rows.append(row)
    return rows


def _changes_blocks(state: Reproduction, pictures: Blocks) -> dict[str, Blocks]:
    parts = state.plan.parts
    switches: Blocks = []
    sweep: Blocks = []
    for task, measure in product(TASKS, ("accuracy", "peak")):
        subtitle = f"{TEXTS['measures'][measure]}, {TASKS[task]}"
        switches += _figure("switches", charts.switches_chart(state, task, measure), f"{measure}-{task}", subtitle)
    for which in TEXTS["sweep"] if "ladder" in parts else ():
        sweep += _sweep_figures(state, which) + _sweep_figures(state, which, by_checkpoint=True)
    partial = _figure("partial", charts.partial_chart(state))
    if "partial" in parts:
        partial += _figure("partial-layers", charts.layers_chart(state))
        partial += _figure("partial-peaks", charts.peaks_chart(state))
    variants: Blocks = []
    if "mla" in parts:
        tables = _with_headings([*variant_tables(state), *steps_table(state)])
        variants = [*_figure("mla", charts.mla_chart(state)), *tables]
    return {
        "Differences between the protocols": [*switches, *_with_headings(switch_tables(state))],
        "RoPE on some of the heads": partial,
        "MLA: latent attention or its released code?": variants,
        "RoPE with a sinusoid: does it persist?": _figure("representation", charts.representation_chart(state)),
        "Scale sweep: when does a deposit occur?": [fig for fig in sweep if fig.id not in {p.id for p in pictures}],
    }


def _sweep_figures(state: Reproduction, which: str, *, by_checkpoint: bool = False) -> Blocks:
    chart = charts.sweep_chart(state, which, by_checkpoint=by_checkpoint) if "ladder" in state.plan.parts else None
    return _figure("moments" if by_checkpoint else "sweep", chart, which, TEXTS["sweep"][which])


def _changes_text(state: Reproduction) -> str:
    """The strongest switch of RoPE, and accuracy with RoPE on one head; what there is of both."""
    sentences, texts = [], []
    for end in measures.ENDS[DISTANCE]:
        rows = [r for r in charts.planned_switch_effects(state) if (r.task, r.base, r.end) == (DISTANCE, "rope", end)]
        if row := measures.strongest_switch(rows, "accuracy"):
            setting, instead = SWITCH_TITLES[row.switch]
            change = f"{_interval_text(row.effect('accuracy'))} percentage points of accuracy"
            text = f"{setting} instead of {instead} changes RoPE most (Task 1): {change}."
            sentences.append(f"In the {PROTOCOLS[end]}, {text}")
    for protocol, rows in product(state.plan.protocols, [_accuracy_rows(state, DISTANCE)]):
        one, every = (rows.get((protocol, label)) for label in (f"{PARTIAL}-1", "rope"))
        if one and every and None not in (one.accuracy, every.accuracy):
            texts.append(f"{percent(one.accuracy)}, on all {percent(every.accuracy)} ({PROTOCOLS[protocol]})")
    partial = [f"RoPE on one head per layer reaches {'; on one '.join(texts)}."] if texts else []
    return " ".join([*sentences, *partial])


def _interval_text(estimate: Estimate | None, *, sign: bool = True) -> str:
    """A mean over seeds in percentage points, with its interval, or a dash."""
    if estimate is None:
        return DASH
    value = fmt_signed(100 * estimate.value, 1) if sign else percentage_points(estimate.value)
    if not isfinite(estimate.low):
        return f"{value} (one seed)"
    return f"{value} [{percentage_points(estimate.low)}, {percentage_points(estimate.high)}]"


def _effect_cell(effect: Estimate | None) -> TableCell:
    """An effect in percentage points, bold if its interval excludes 0."""
    text = _interval_text(effect)
    return TableCell(text, html=Markup("<b>{}</b>").format(text) if effect and measures.excludes_zero(effect) else None)


def switch_tables(state: Reproduction) -> list[Table]:
    """The effects on each measure, one table per task and starting protocol, with the unexplained remainder."""
    rows, tables = charts.planned_switch_effects(state), []
    for task, measure in product(measures.TASK_BASES, measures.MEASURES):
        for end in measures.ENDS[task]:
            selected = [row for row in rows if (row.task, row.end) == (task, end)]
            if any(row.values[measure] for row in selected):
                tables.append(_switch_table(state, selected, measure))
    return tables


def _switch_table(state: Reproduction, rows: Sequence[measures.SwitchEffect], measure: measures.SwitchMeasure) -> Table:
    task, end = rows[0].task, rows[0].end
    bases = list(dict.fromkeys(row.base for row in rows))
    ends = {base: measures.end_values(state.results, task, base) for base in bases}
    wholes = {base: by_end["paper"][measure] - by_end["released"][measure] for base, by_end in ends.items()}
    lines: list[list[str | TableCell]] = []
    for switch, (setting, instead) in SWITCH_TITLES.items():
        by_base = {row.base: row for row in rows if row.switch == switch}
        if by_base:
            cells = (_switch_cell(by_base.get(base), measure) for base in bases)
            lines.append([TableCell(setting, (f"instead of {instead}",)), *cells])
    for index, (protocol, text) in enumerate(TEXTS["unchanged"].items()):
        values = [estimate_mean(ends[base][protocol][measure]) for base in bases]
        label_cell = TableCell(text, row_css="guess" if index else "guess first")
        lines.append([label_cell, *(_interval_text(value, sign=False) for value in values)])
    sums = [measures.sum_and_remainder(wholes[b], [row for row in rows if row.base == b], measure) for b in bases]
    changes: dict[str, list[SeedValues]] = {
        "all switches together": list(wholes.values()),
        "sum of the single effects": [total for total, _ in sums],
        "remainder: interactions of switches": [remainder for _, remainder in sums],
    }
    for text, seed_values in changes.items():
        lines.append([TableCell(text, row_css="guess"), *(_effect_cell(estimate_mean(value)) for value in seed_values)])
    return make_table(
        f"Effects, {TASKS[task]}, {TEXTS['measures'][measure]}, {TEXTS['ends'][end]}",
        ["The paper’s setting", *(TableCell(title(base), marker=mark_style("paper", base)) for base in bases)],
        lines,
        note="Percentage points, mean over seeds with 95% interval, bold if it excludes 0. Small print: the released "
        "code’s setting; number of models with a single-head layer before and after.",
    )


def _switch_cell(row: measures.SwitchEffect | None, measure: measures.SwitchMeasure) -> TableCell:
    if row is None:
        return TableCell(small=("no difference",))
    effect = row.effect(measure)
    if row.no_effect_reason or effect is None:
        return TableCell(DASH, (row.no_effect_reason or ("not finished" if not row.before else "no skill"),))
    before, after = (counts.get("single-head", 0) for counts in (row.before, row.after))
    small = (f"single-head: {before} → {after} of {sum(row.after.values())}",) if measure in ("drop", "peak") else ()
    cell = _effect_cell(effect)
    return TableCell(cell.text, small, html=cell.html)


def variant_tables(state: Reproduction) -> list[Table]:
    """Accuracy and concentration of MLA, its variants and RoPE, per protocol."""
    tables = []
    for protocol in state.plan.protocols:
        lines: list[list[str | TableCell]] = []
        for text, [(_, label, cells)] in mla_models(state, protocol):
            effective = [peak[1].effective_heads for cell in cells if (peak := measures.peak_layer(cell))]
            values = measures.values_by_seed(cells)
            means = (estimate_mean(values[measure]) for measure in ("accuracy", "peak"))
            row = [_interval_text(mean, sign=False) for mean in means]
            row.append(fmt(float(np.mean(effective)) if effective else None, 1))
            name, kinds = TableCell(text, marker=mark_style(protocol, label)), measures.count_kinds(cells)
            lines.append([name, *row, kinds_cell(kinds)])
        if lines:
            names = ["Model", "Test accuracy, %", "Share of the skill lost by ablating one head, %"]
            names += ["Effective heads of its layer", "Kind of that layer"]
            tables.append(make_table(f"Variants of MLA, {PROTOCOLS[protocol]}", names, lines))
    return tables


def steps_table(state: Reproduction) -> list[Table]:
    """Paired differences of one head's share: is the diffuse pattern due to MLA or to its released code?"""
    lines: list[list[str | TableCell]] = []
    for protocol in state.plan.protocols:
        for step in TEXTS["steps"][protocol]:
            cells = (state.results.for_protocol(protocol).cells_of(DISTANCE, step[label]) for label in ("from", "to"))
            start, end = (measures.values_by_seed(group)["peak"] for group in cells)
            levels, change = [estimate_mean(start), estimate_mean(end)], estimate_mean(end - start)
            if change is not None:
                label_cell = TableCell(step["text"], (PROTOCOLS[protocol],))
                shares = (percent(level.value if level else None) for level in levels)
                small = "interval excludes 0" if measures.excludes_zero(change) else "interval includes 0"
                lines.append([label_cell, *shares, TableCell(_interval_text(change), (small,))])
    names = ["Change", "Before", "After", "Difference, percentage points"]
    note = "Share of the skill lost by ablating one head. Differences are paired by seed, with 95% intervals."
    return [make_table("MLA or its released code", names, lines, note=note)] if lines else []


def _mechanism_blocks(state: Reproduction) -> dict[str, Blocks]:
    gradients = _figure("strength", charts.strength_chart(state))
    for which in ("exponent", "lead", "growth"):
        gradients += _figure(which, charts.gradient_chart(state, which))
    circuit: Blocks = []
    for key in TEXTS["circuit"]:
        circuit += _figure("circuit", charts.circuit_chart(state, key), key, key)
    training = _figure("training", charts.training_chart(state)) + _figure("exponents", charts.exponents_chart(state))
    return {"Gradient seeds: a possible origin": gradients, "During training": training, "Circuit": circuit}


def _mechanism_text(state: Reproduction) -> str:
    """Whether positional gradients cancel in the first layer of RoPE, where that was measured."""
    groups = model_groups(state, DISTANCE, charts.has_measure("seed"))
    rope = [group for group in groups if family(*group[:2]) == "rope"]
    estimates = []
    for row in charts.mean_rows(rope, lambda cell: cell.measure("seed").strength.levels["logits"].layers.exponent[0]):
        interval = f" [{fmt(row['low'])}, {fmt(row['high'])}]" if row["seeds"] > 1 else ""
        estimates.append(f"{fmt(row['value'])}{interval} ({row['protocol']}, {plural(row['seeds'], 'seed')})")
    if not estimates:
        return ""
    return (
        f"In the first layer of RoPE, the exponent of the positional gradient at the logits is {'; '.join(estimates)}. "
        "At −1/2 it cancels over a batch like noise, at 0 not at all."
    )


def _claims_section(state: Reproduction) -> Section:
    claims = entries_by_claim(state.entries)
    tallies = []
    for protocol in state.plan.protocols:
        counts = Counter(entry.verdict for entry in state.entries if entry.protocol == protocol)
        count_texts = (f"{verdict_text(key)} {counts[key]}" for key in get_args(Verdict) if counts[key])
        tallies.append(f"{PROTOCOLS[protocol].capitalize()}: {', '.join(count_texts)}.")
    text = " ".join(tallies) + _opposite_text(claims)
    recorded = measures.recorded_verdicts() if state.plan.seeds < MIN_SEEDS else {}
    parts = [Ledger(claims, {key: PROTOCOLS[key] for key in state.plan.protocols}, recorded), text]
    rules = (
        "The rules were written after the laptop record was known and before any desk model was trained; some were "
        "amended after the desk record was known. In the evidence for the released protocol, “RoPE” is the code’s "
        "model with its sinusoid, and “RoPE, no sinusoid” is RoPE."
    )
    num_changed = sum(entry.uncorrected != entry.verdict for entry in state.entries)
    difference = f"Without the correction, {num_changed} of {len(state.entries)} verdicts would differ."
    rules_section = Section("How verdicts are decided", [f"{RULE} {difference}", rules])
    return Section("Which of the papers’ claims hold?", parts, [rules_section], "claims")


def _opposite_text(claims: Sequence[Sequence[LedgerEntry]]) -> str:
    """How many claims have opposite verdicts under the two protocols."""
    count = sum({-1, 1} <= {SIGNS.get(entry.verdict, 0) for entry in entries} for entries in claims)
    return f" Opposite verdicts under the two protocols: {count}." if any(len(e) > 1 for e in claims) else ""


def _run_section(state: Reproduction) -> Section:
    scale = SCALES[state.plan.scale]
    seeds = sorted({cell.key.seed for cell in _cells(state.plan)})
    protocols, per_cell = [PROTOCOLS[key] for key in state.plan.protocols], scale.seeds_text(state.plan.seeds)
    facts = [
        ("Scale", f"{state.plan.scale}: {scale.about}"),
        ("Parts", f"{', '.join(state.plan.parts)}; {' and '.join(protocols)}"),
        ("Seeds", f"{per_cell} per cell: {format_ranges(seeds)} (of weights, order and data)"),
        *([("Set-ups", str(state.environment["setups"]))] if state.environment.get("setups") else []),
    ]
    details = [
        Section("Encodings in each protocol", [encodings_table(state)]),
        Section("Settings, ours and the paper’s", [_SETTINGS, settings_table(state)]),
        Section("Models", [models_table(state)]),
    ]
    rows = progress_rows(state, "cells", facts)
    return Section("How was it run?", [run_table(state.environment, rows)], details, "run")


_SETTINGS = "A claim that fails at this size may hold at the paper’s, and vice versa."
_TRAINING_FIELDS = ("weight_decay", "warmup", "schedule", "evaluations", "plateau")


def settings_table(state: Reproduction) -> Table:
    """The study's settings and the paper's."""
    paper, ours = (_scale_settings(scale, state) for scale in (SCALES["paper"], SCALES[state.plan.scale]))
    lines: list[list[str | TableCell]] = []
    for text in {**paper, **ours}:
        paper_text, our_text = (_format_setting(settings.get(text)) for settings in (paper, ours))
        bold = Markup("<b>{}</b>").format(our_text) if paper_text != our_text else None
        lines.append([text, paper_text, TableCell(our_text, right=True, html=bold), "yes" if bold else DASH])
    return make_table("Settings", ["Setting", "Paper", "This study", "Differs"], lines, right=(1, 2))


def _scale_settings(scale: ReproductionScale, state: Reproduction) -> dict[str, Any]:
    defaults = {field: RunSpec.model_fields[field].default for field in _TRAINING_FIELDS}
    settings: dict[str, Any] = {**scale.model, **defaults, **scale.optimiser}
    for task, size in scale.tasks.items():
        for protocol in state.plan.protocols:
            sizes = size.paper if protocol == "paper" else size.released
            built_task = tasks.build(task, form=protocol, vocab_size=scale.model["vocab_size"], **sizes)
            distance = ("length", "max_distance") if protocol == "paper" else ("length", "max_between", "max_side")
            for option in ("length", "num_triggers", "max_count") if task == COUNT else distance:
                settings[f"{TASKS[task]}, {PROTOCOLS[protocol]}: {option}"] = getattr(built_task, option)
        for field in ("train_examples", "test_examples", "epochs"):
            settings[f"{TASKS[task]}: {field}"] = getattr(size, field)
        settings[f"{TASKS[task]}: encodings"] = len(scale.labels[task])
    settings["examples per ablation"] = scale.ablation_examples
    return {text.replace("_", " "): value for text, value in settings.items()}


def _format_setting(value: Any) -> str:
    """A setting's value, or a dash."""
    if value is None or isinstance(value, str):
        return value or DASH
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_setting(item)}" for name, item in value.items())
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


def models_table(state: Reproduction) -> Table:
    """All models of the plan, including unfinished ones."""
    by_key, lines = {cell.key: cell for cell in state.results.cells}, []
    for grid_cell in _cells(state.plan):
        key, cell = grid_cell.key, by_key.get(grid_cell.key)
        has_scores = cell is not None and cell.status != "diverged"
        scores = [cell.result.get(f"{split}_accuracy") if cell and has_scores else None for split in ("train", "test")]
        lines.append(
            [
                *(display_name(key.protocol, key.label), TASKS[key.task], key.protocol, str(key.seed)),
                cell.status if cell else "not finished",
                _format_setting(cell.parameters if cell else None),
                *(percent(score, sign=False) for score in scores),
                fmt(cell.result.get("seconds") if cell else None, 0),
                code(f"runs/{grid_cell.job.spec.name}"),
            ]
        )
    names = ["Model", "Task", "Protocol", "Seed", "Status", "Parameters", "Train, %", "Test, %", "Seconds", "Run"]
    return make_table("Models", names, lines, right=(3, 5, 6, 7, 8), css="numbers small")


def encodings_table(state: Reproduction) -> Table:
    """The encodings of the study's grid, and how each protocol defines them; RoPE on some heads is one entry."""
    keys, protocols = [cell.key for cell in _cells(state.plan)], state.plan.protocols
    present = {(key.protocol, family(key.protocol, EncodingLabel.parse(key.label).base)) for key in keys}
    lines: list[list[str | TableCell]] = []
    for label, (description, *definitions) in TEXTS["encodings"].items():
        if any((protocol, label) in present for protocol in protocols):
            by_protocol = dict(zip(PROTOCOLS, definitions, strict=True))
            texts = [by_protocol[p] if (p, label) in present else "not in this study" for p in protocols]
            text = "RoPE on some heads" if label == PARTIAL else title(label)
            sign = mark_style("paper", "partial-1" if label == PARTIAL else label)
            lines.append([TableCell(text, marker=sign), description, *texts])
    names = ["Encoding", "What it does", *(f"In the {PROTOCOLS[protocol]}" for protocol in protocols)]
    return make_table("The encodings", names, lines, css="glossary")
