"""The checks behind the claims about positional and symbolic heads: from a grid study's cells to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from toeplens.studies.grid import measured as heads
from toeplens.studies.grid.claims import Evidence
from toeplens.studies.kit.results import CellResult
from toeplens.studies.kit.verdicts import Finding, above, found, interval_above, opposite, seen

INDEX, RETRIEVAL, MIX = "index", "retrieval", "mix"
ROPE, NOPE, HIGH, LOW, SCAN = "rope", "nope", "high", "low", "turn"
PURE = 0.9  # of a head's variance: what is called purely positional or symbolic
BOTH = 0.75  # both scores above it would contradict the exclusion beyond what sampling does
Check = Callable[[Evidence], list[Finding]]


def scanned(data: Evidence, task: str) -> tuple[list[float], Float[np.ndarray, "V S"]]:
    """The scanned values in order, and accuracies by value and seed, of seeds that have all values."""
    columns = sorted((c for c in data.spec.columns() if c.scan == SCAN), key=lambda column: column.value or 0.0)
    rows = [{cell.key.seed: cell.accuracy for cell in data.results.of(task, c.label)} for c in columns]
    seeds = sorted(set.intersection(*map(set, rows))) if rows else []
    table = np.array([[row[seed] for seed in seeds] for row in rows], dtype=float).reshape(len(rows), len(seeds))
    return [column.value or 0.0 for column in columns], table


def exclusion(data: Evidence) -> list[Finding]:
    both: list[bool] = []
    largest, count = 0.0, 0
    for cell in data.results.cells:
        scores = heads.measured(cell, "permutations")
        if scores is not None:
            logits = scores["logits"]
            smaller = np.fmin(heads.array(logits["positional"]), heads.array(logits["symbolic"]))
            count += int(np.isfinite(smaller).sum())
            worst = float(np.nanmax(smaller)) if np.isfinite(smaller).any() else 0.0
            largest = max(largest, worst)
            both.append(worst > BOTH)
    what = (
        f"a head whose sampled scores are both over {BOTH:g} (of {count} heads, the smaller one at most {largest:.2f})"
    )
    return [opposite(found(what, both))]


def correspondence(data: Evidence) -> list[Finding]:
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for task in data.spec.tasks:
        for cell in data.skilled(task, ROPE):
            by_seed.setdefault(cell.key.seed, []).extend(_frequency_and_behaviour(cell))
    values = [_rank_correlation(pairs) for _, pairs in sorted(by_seed.items())]
    what = "rank correlation over heads of the frequencies' centre with positional less symbolic share"
    return [above(what, values, 0.0), above(f"{what}, strong", values, 0.5)]


def _frequency_and_behaviour(cell: CellResult) -> Iterator[tuple[float, float]]:
    centres, found = heads.centres(cell), heads.behaviours(cell)
    if centres is not None and found is not None:
        for pair in zip(centres.ravel(), (found.positional - found.symbolic).ravel(), strict=True):
            if np.isfinite(pair).all():
                yield pair


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T
    varies = len(x) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0
    return float(np.corrcoef(rankdata(x), rankdata(y))[0, 1]) if varies else float("nan")


def better(task: str, first: str, second: str, bar: float = 0.0) -> Callable[[Evidence], Finding]:
    def check(data: Evidence) -> Finding:
        what = f"accuracy on {task}, {_titles(data)[first]} - {_titles(data)[second]}"
        return above(what, data.results.difference(task, first, second), bar)

    return check


def _titles(data: Evidence) -> dict[str, str]:
    """What people call the encodings; their label where the study has none of that label."""
    own = {column.label: column.title for column in data.spec.columns()}
    return {label: own.get(label, label) for label in (*own, ROPE, NOPE, HIGH, LOW)}


def every(*checks: Callable[[Evidence], Finding]) -> Check:
    return lambda data: [check(data) for check in checks]


def between(task: str, sign: int) -> Check:
    """Is an inner frequency better (sign 1) or worse (-1) than both ends of the scan?"""

    def check(data: Evidence) -> list[Finding]:
        values, table = scanned(data, task)
        kind = "best" if sign > 0 else "worst"
        inner: list[float] = []
        gaps: list[tuple[float, float]] = []
        for seed in range(table.shape[1] if len(values) > 2 else 0):
            others = np.delete(table, seed, axis=1)
            if others.shape[1] == 0:  # the only seed has to choose for itself
                others = table
            chosen = 1 + int(np.argmax(sign * others.mean(axis=1)[1:-1]))
            inner.append(values[chosen])
            gaps.append((table[chosen, seed] - table[0, seed], table[chosen, seed] - table[-1, seed]))
        where = ", ".join(f"{value:g}" for value in sorted(set(inner)))
        findings = []
        for index, end in enumerate((0, -1)):
            frequency = f"{values[end]:g}" if values else "the end"
            what = f"accuracy on {task} at the {kind} inner frequency ({where or 'none'}) less that at {frequency}"
            finding = above(what, [sign * gap[index] for gap in gaps], 0.0)
            findings.append(finding if sign > 0 else Finding(finding.verdict, f"{finding.evidence} (signs turned)"))
        return findings

    return check


def carried(task: str, sign: int) -> Callable[[Evidence], Finding]:
    def check(data: Evidence) -> Finding:
        cells = data.skilled(task, ROPE)
        gaps = [sign * (heads.carried(cell, "positional") - heads.carried(cell, "symbolic")) for cell in cells]
        more, less = ("positional", "symbolic") if sign > 0 else ("symbolic", "positional")
        return above(f"{more} less {less} share of what carries RoPE's skill on {task}", gaps, 0.0)

    return check


def turning(data: Evidence) -> list[Finding]:
    """What RoPE loses on the positional task if the faster, or the slower, half of its frequencies stops turning."""
    gaps = []
    for cell in data.skilled(INDEX, ROPE):
        bands = heads.measured(cell, "bands")
        if bands is not None:
            lost = np.nansum(heads.array(bands["drops"]), axis=(0, 1))
            half = len(lost) // 2
            gaps.append(float(lost[:half].sum() - lost[half:].sum()))
    what = "loss on index gained without the faster half of the frequencies, less that without the slower half"
    return [above(what, gaps, 0.0, unit=" nats")]


def emerges(task: str, share: str) -> Check:
    """How much of a kind the head that matters most after training is then, and was before it."""

    def check(data: Evidence) -> list[Finding]:
        gains, pure = [], []
        for cell in data.skilled(task, ROPE):
            rows = [row for row in cell.watched if row.get(share) is not None]
            if len(rows) > 1:
                first, last = heads.array(rows[0][share]), heads.array(rows[-1][share])
                head = np.unravel_index(np.argmax(heads.array(rows[-1]["drops"])), last.shape)
                gains.append(float(last[head] - first[head]))
                pure.append(bool(last[head] >= PURE))
        what = f"RoPE on {task}, {share} share of the head that matters most"
        return [above(f"{what}, end less beginning", gains, 0.0), seen(f"{what} is at least {PURE:g} at the end", pure)]

    return check


def extrapolates(data: Evidence) -> list[Finding]:
    findings = []
    for factor in (1.5, 2.0):
        kept = [
            {cell.key.seed: heads.kept(cell, factor) for cell in data.skilled(task, ROPE)}
            for task in (RETRIEVAL, INDEX)
        ]
        gaps = [kept[0][seed] - kept[1][seed] for seed in sorted(set(kept[0]) & set(kept[1]))]
        what = f"skill kept at {factor:g} times the length, RoPE, retrieval - index"
        findings.append(above(what, gaps, 0.0))
    return findings


def related(figure: str, sign: int) -> Check:
    """Does a figure of the heads go with skill kept on longer texts (sign 1), or against it (-1)?"""

    def check(data: Evidence) -> list[Finding]:
        findings = []
        for relation in data.relations:
            if (relation.figure, relation.task) == (figure, None):
                what = f"rank correlation of {figure} with skill kept at {relation.factor:g} times the length"
                if relation.value is None or relation.low is None or relation.high is None:
                    findings.append(Finding("undecided", f"{what}: too few encodings"))
                    continue
                over = f"{what} ({len(relation.points)} models, {relation.encodings} encodings)"
                finding = interval_above(over, relation.value, relation.low, relation.high, 0.0)
                findings.append(finding if sign > 0 else opposite(finding))
        return findings or [Finding("undecided", f"{figure} and longer texts: no finished run that counts")]

    return check
