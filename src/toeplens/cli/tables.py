"""What studies and measurements print: tables, verdicts, progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.text import Text

from toeplens.cli.console import echo, out, print_details, print_page, print_table
from toeplens.engine import Extrapolation
from toeplens.lens import THRESHOLDS, HeadAblation, HeadSets, deposit
from toeplens.lens.ablation import UNCHECKED_NOTE
from toeplens.papers.deposit import AccuracyRow, Reproduction
from toeplens.studies import LedgerEntry
from toeplens.studies.decomposition import RunStructure
from toeplens.studies.grid import GridStudy, language
from toeplens.studies.kit.study import StudyState
from toeplens.studies.kit.verdicts import verdict_text
from toeplens.utils.formatting import fmt, fmt_signed, percent

_EFFECTS = {  # metric: its effect, factor of the unit, decimals
    "accuracy": ("Accuracy drop (percentage points)", 100, 1),
    "loss": ("Loss increase (nats)", 1, 3),
    "kl": ("KL divergence from the intact model (nats)", 1, 3),
}
_STATEMENT_WIDTH = 30  # columns needed to print statements
_COLOURS = {
    "holds": "green",
    "holds in part": "yellow",
    "fails": "red",
    "leans to hold": "dim green",
    "leans to fail": "dim red",
    "undecided": "dim",
}

per_cent = partial(percent, sign=False)


def print_study(state: StudyState, page: Path, *, as_json: bool) -> None:
    """Print a study's tables, claims, progress and page; or the same as JSON."""
    if not as_json:
        if isinstance(state, Reproduction):
            print_accuracies(state.table)
        elif isinstance(state, GridStudy):
            print_grid(state)
        if state.entries:
            print_claims(state.entries)
        if not state.is_complete:
            echo(f"{state.progress}. Run the same command to resume.")
    about = {"finished": state.finished, "total": state.total, **state.summary()}
    print_page(page, as_json=as_json, **about, claims=[entry.to_dict() for entry in state.entries])


def print_claims(entries: Sequence[LedgerEntry], *, full: bool = False) -> None:
    """Print the ledger: one line per claim, one column per protocol; ``full`` adds statement, rule and source."""
    protocols = list(dict.fromkeys(entry.protocol for entry in entries))
    headers = ["verdict" if protocol is None else f"{protocol} protocol" for protocol in protocols]
    verdicts = {
        (each.claim, each.protocol): Text(verdict_text(each.verdict) + "*" * each.is_sensitive, _COLOURS[each.verdict])
        for each in entries
    }
    claims = dict.fromkeys(entry.claim for entry in entries)
    rows = {claim: [verdicts.get((claim, protocol), "–") for protocol in protocols] for claim in claims}
    if full:
        for claim, row in rows.items():
            about = {name: getattr(claim, name) for name in ("statement", "rule", "source")}
            print_details([(claim.id, dict(zip(headers, row, strict=True)) | about)])
        return
    used_width = max(len(claim.id) for claim in claims) + sum(len(head) + 3 for head in headers) + 8
    with_statement = out.width - used_width >= _STATEMENT_WIDTH
    lines = [[claim.id, *row, *([claim.statement] * with_statement)] for claim, row in rows.items()]
    print_table(None, ["claim", *headers, *(["statement"] * with_statement)], lines, brief=with_statement)
    if any(entry.is_sensitive for entry in entries):
        echo("* might differ if the models that are still learning counted: toeplens claims DIR --evidence")
    echo("Rules and sources: toeplens claims DIR --full")


def print_accuracies(rows: Iterable[AccuracyRow]) -> None:
    """Accuracy by encoding, the paper's and ours: one table per protocol and task."""
    columns = ("encoding", "paper", "ours", "range over seeds", "largest head drop (points)", "head")
    tables: dict[tuple[str, str], tuple[str, list[tuple[str, ...]]]] = {}
    for row in rows:
        title = f"{row.task}, {row.protocol} protocol: test accuracy in % (chance {per_cent(row.chance)})"
        cells = (
            row.title,
            fmt(row.paper, 1),
            per_cent(row.accuracy) + (f" ({row.diverged} diverged)" if row.diverged else ""),
            f"{per_cent(row.lowest)}–{per_cent(row.highest)}" if row.seeds > 1 else "one seed",
            per_cent(row.largest_drop),
            "–" if row.where is None else row.where.replace("layer ", "L").replace(" head ", " H"),
        )
        tables.setdefault((row.protocol, row.task), (title, []))[1].append(cells)
    for title, lines in tables.values():
        print_table(title, columns, lines)


def print_grid(state: GridStudy) -> None:
    """Bits per byte of language models; accuracy by task and encoding otherwise. Scans are only on the page."""
    spec, matrix = state.spec, state.matrix()
    text_rows = language.language_rows(spec, state.results)
    for task in dict.fromkeys(row.task for row in text_rows):
        _print_language(state, task)
    columns = [column for column in spec.columns() if not column.scan]
    rows_by_cell = {(row.task, row.label): row for row in matrix}
    lines = []
    for task in spec.tasks:
        rows = [rows_by_cell.get((task, column.label)) for column in columns]
        if any(rows) and not any(row.task == task for row in text_rows):
            length_chance = max(row.length_chance for row in rows if row)
            scores = ["–" if row is None else per_cent(row.accuracy) + "*" * bool(row.learning) for row in rows]
            lines.append([spec.title_of(task), per_cent(length_chance), *scores])
    if lines or not text_rows:
        learning = any(row.learning for row in matrix)
        caption = "* some models were still learning when training ended" if learning else ""
        headers = ["task", "length-only", *(column.label for column in columns)]
        print_table("Test accuracy (%), mean over seeds", headers, lines, caption=caption)


def _print_language(state: GridStudy, task: str) -> None:
    """Bits per byte, increase on longer texts, needles; n-gram baselines below."""
    suffix = f"at {language.LONG_FACTOR:g}×"
    rows = [
        (
            row.title,
            fmt(row.bits, 3),
            f"{fmt(row.lowest, 3)}–{fmt(row.highest, 3)}" if row.seeds > 1 else "one seed",
            fmt_signed(row.lost, 3),
            per_cent(row.needle),
            per_cent(row.needle_long),
        )
        for row in language.language_rows(state.spec, state.results)
        if row.task == task
    ]
    columns = ["encoding", "bits per byte", "over seeds", f"increase {suffix}", "needles (%)", f"needles {suffix} (%)"]
    print_table(f"{state.spec.title_of(task)}: bits per byte at the training length, best first", columns, rows)
    bits = next(
        cell.measure("bits") for cell in state.results.cells if cell.key.task == task and language.is_language(cell)
    )
    if bits.ngrams:
        ngrams = ", ".join(f"{value:.3f} (context {order})" for order, value in sorted(bits.ngrams.items()))
        echo(f"n-gram baselines by context length: {ngrams}")


def print_ablation(ablation: HeadAblation, sets: HeadSets | None) -> None:
    """Effect of each head with its interval and, for accuracy, each layer's deposit; then the sets of heads."""
    echo(
        f"intact model: {ablation.metric} {ablation.baseline:.4f} on {ablation.examples} examples, "
        f"length-only baseline {ablation.chance:.4f}"
    )
    effect, factor, digits = _EFFECTS[ablation.metric]
    ablated = "head's position is ablated"
    if ablation.intervention != "position":
        ablated = f"head is {ablation.intervention}-ablated"
    title = f"{effect} when the {ablated}, with 95% interval"
    if ablation.method == "attribution":
        is_checked = ablation.check is not None and ablation.check.is_reliable
        title += ", first order" if is_checked else ": first-order estimates, not effects"
    rows = []
    for layer, drops in enumerate(zip(ablation.drops, ablation.low, ablation.high, strict=True), start=1):
        cells = zip(*([fmt(factor * x, digits) for x in row] for row in drops), strict=True)
        rows.append([str(layer), *(Text.assemble(x, (f" {low}..{high}", "dim")) for x, low, high in cells)])
    print_table(title, ["layer", *(f"head {h + 1}" for h in range(ablation.drops.shape[1]))], rows)
    if ablation.method == "attribution":
        echo(ablation.check.summary if ablation.check else UNCHECKED_NOTE)
    if ablation.metric == "accuracy":
        columns = ("layer", "kind", "peak", "second", "top share", "effective heads", "Gini")
        rows = [
            [str(n), x.kind, *map(fmt, (x.peak, x.second, x.top_share, x.effective_heads, x.gini))]
            for n, x in enumerate(deposit(ablation), start=1)
        ]
        print_table("Deposit: how the drops are spread over the heads of a layer", columns, rows)
        echo(THRESHOLDS)
    if sets is None:
        return
    rows = []
    for size in np.flatnonzero(~np.isnan(sets.greedy)):
        row = (sets.greedy[size], sets.importance[size], sets.random[:, size].mean(), sets.random[:, size].min())
        rows.append((str(size), *map(per_cent, row)))
    columns = ("heads ablated", "greedy order", "by single effect", "random, mean", "random, lowest")
    print_table("Accuracy as more heads are ablated (%)", columns, rows)
    heads = ", ".join(f"L{layer + 1} H{head + 1}" for layer, head in sets.sufficient) or "none"
    echo(
        f"{len(sets.sufficient)} of {len(sets.order)} heads keep {100 * sets.keep:.0f}% of the skill "
        f"when all others are ablated (accuracy {sets.kept:.4f}, intact {sets.baseline:.4f}): {heads}"
    )


def print_extrapolation(result: Extrapolation) -> None:
    """Accuracy by sequence length, with the baselines' accuracy; why a length was not tested."""
    columns = ("tokens", "times training", "accuracy", "95% interval", "chance", "length-only", "best simple rule")
    rows = []
    for row in result.rows:
        numbers = ["–"] * 5
        if row.accuracy is not None:
            rule, best = max(row.baselines.items(), key=lambda item: item[1])
            interval = f"{per_cent(row.low)} to {per_cent(row.high)}"
            chances = (per_cent(row.chance), per_cent(row.length_chance), f"{per_cent(best)} ({rule})")
            numbers = [per_cent(row.accuracy), interval, *chances]
        rows.append((str(row.length), f"{row.factor:g}", *numbers))
    print_table(f"Accuracy beyond the training length of {result.trained_length} tokens (%)", columns, rows)
    for row in result.rows:
        if row.reason:
            echo(f"{row.length} tokens: {row.reason}")


def print_structure(structure: RunStructure) -> None:
    """Each head's kind and shares of logit variance, how Toeplitz its logits are, and the position's relevance."""
    columns = ("head", "kind", "position", "content", "coupled", "Toeplitz share", "explained by distance")
    rows = []
    for layer in structure.layers:
        for head, (share, explained) in enumerate(zip(layer.toeplitz, layer.explained, strict=True)):
            kinds = ["–"] * 4
            if layer.parts is not None:
                kinds = [layer.parts.named[head], *map(fmt, layer.parts.kinds["softmax"][head])]
            rows.append((f"L{layer.layer + 1} H{head + 1}", *kinds, fmt(share), fmt(explained)))
    print_table("Decomposition of each head's logits (shares of variance, row means removed)", columns, rows)
    for reason in dict.fromkeys(layer.reason for layer in structure.layers if layer.reason):
        echo(f"not decomposed: {reason}")
    if structure.origins is None:
        echo(f"relevance not computed: {structure.no_origins}")
    else:
        share, error = percent(structure.origins.share), structure.origins.error
        echo(f"position: {share} of the relevance, in absolute values; the parts sum to the logits within {error:.0e}")
