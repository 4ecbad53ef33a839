"""Write what docs/language.md says of the recorded language models, from results/language/results.json.xz.

    python tools/language_findings.py

Everything between a line ``<!-- found: .. -->`` and the next ``<!-- end -->`` of the page is written here, every number
of it from the record. `tests/docs/test_language.py` holds that the page is up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from filling import filled

from toeplens.ground.words import signed
from toeplens.report.grid.look import Spread
from toeplens.studies import CellResult
from toeplens.studies.grid import Grid, language
from toeplens.studies.grid.study import KIND

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "language.md", ROOT / "results" / "language" / "results.json.xz"
TASK = "language"
FAR = language.LONG
_METHODS = {
    "ntk": "NTK-aware",
    "yarn": "YaRN",
    "longrope": "LongRoPE",
    "interpolation": "position interpolation",
    "p-rope": "p-RoPE",
    "self-extend": "Self-Extend",
    "rerope": "ReRoPE",
}
_PUBLISHED = ["YaRN", "NTK-aware", "position interpolation"]  # untuned, best first


def record(path: Path = RECORD) -> Grid:
    """The recorded study."""
    return KIND.open_record(path)


def page(study: Grid) -> str:
    """The page with its findings as the record has them."""
    return filled(PAGE, lambda part: _PARTS[part](study))


def _table(study: Grid) -> Iterator[str]:
    spec = study.spec
    models = len(study.results.cells)
    steps = {cell.epochs[-1]["step"] for cell in study.results.cells}
    gone = sum(cell.status == "diverged" for cell in study.results.cells)
    yield (
        f"{models} models, seeds {spec.first_seed} to {spec.first_seed + spec.seeds - 1}, {max(steps):,} steps each; "
        f"{gone or 'none'} diverged. Means over the seeds, with the lowest and the highest of them:"
    )
    yield ""
    heads = ("encoding", "bits a byte", f"lost at {FAR:g} times the length", "needles found", "an earlier copy saves")
    yield f"| {' | '.join(heads)} | largest head's share |"
    yield "|---|---|---|---|---|---|"
    for row in language.language_rows(spec, study.results):
        cells = _cells(study, row.label)
        yield (
            f"| {row.title} | {_span(cells, language.bits)} | {_span(cells, language.lost)} | "
            f"{_span(cells, lambda cell: language.retrieved(cell, 1.0), percent=True)} | "
            f"{_span(cells, lambda cell: language.copied(cell, language.NEAR))} | "
            f"{_span(cells, language.deposit, percent=True)} |"
        )


def _verdicts(study: Grid) -> Iterator[str]:
    yield "| claim | verdict |"
    yield "|---|---|"
    for entry in study.entries:
        yield f"| {entry.claim.statement} ({entry.claim.source}) | {entry.verdict} |"


def _lengths(study: Grid) -> Iterator[str]:
    alibi, rope, nope = (_each(study, label, language.lost) for label in ("alibi", "rope", "nope"))
    yield (
        f"- **ALiBi reads on.** At {FAR:g} times the training length it loses {_told(alibi)} bits a byte. "
        "Press et al. 2022 ([2108.12409](https://arxiv.org/abs/2108.12409), abstract): trained on 1,024 tokens it "
        "reads 2,048 as well as the sinusoid does that was trained on 2,048. That was not asked here, where nothing "
        f"was trained on longer texts; by itself it {'does not lose' if max(alibi) < 0.01 else 'loses'}."
    )
    yield (
        f"- **RoPE does not.** It loses {_told(rope)} bits a byte there. Chen et al. 2023 "
        "([2306.15595](https://arxiv.org/abs/2306.15595), section 2.2) see perplexities above 1,000 where LLaMA reads "
        "beyond its length." + _agree(min(rope) > 0.05)
    )
    yield (
        f"- **NoPE does not either.** It loses {_told(nope)}. Kazemnejad et al. 2023 "
        "([2305.19466](https://arxiv.org/abs/2305.19466), abstract) have it generalise to longer texts, on small tasks "
        "of reasoning, not on language." + _agree(max(nope) < 0.01)
    )


def _short(study: Grid) -> Iterator[str]:
    bits = {label: _each(study, label, language.bits) for label in study.spec.encodings}
    gap = np.mean(bits["nope"]) - np.mean(bits["rope"])
    yield (
        f"- **NoPE is {gap:.2f} bits a byte worse than RoPE** at the training length. Haviv et al. 2022 "
        "([2203.16634](https://arxiv.org/abs/2203.16634)) call models without encoding competitive, with gaps that "
        "shrink as models grow." + _agree(gap < 0.05) + " Theirs have 125 million parameters and more, and see "
        "thousands of times as much text; these have 0.9 million in 4 layers, and stand where a gap is largest. What "
        "NoPE lacks may come with more of both: it is not asked here."
    )
    best = min(bits, key=lambda label: float(np.mean(bits[label])))
    absolute = np.mean(bits["sinusoidal"]) - np.mean(bits["rope"])
    yield (
        f"- **The sinusoid is {signed(float(absolute))} bits a byte against RoPE**; Su et al. 2021 "
        "([2104.09864](https://arxiv.org/abs/2104.09864), section 4) have RoPE ahead." + _agree(absolute > 0.01)
    )
    yield f"- The fewest bits a byte has {_title(study, best)}, {_told(bits[best])}."


def _extension(study: Grid) -> Iterator[str]:
    for tuned, words in ((False, "as they were trained"), (True, "after a short tuning, both")):
        gains = {
            name: [
                language.extended(cell, "none", tuned=tuned) - language.extended(cell, method, tuned=tuned)
                for cell in _cells(study, "rope")
            ]
            for method, name in _METHODS.items()
        }
        known = {name: values for name, values in gains.items() if np.isfinite(values).all() and values}
        ordered = sorted(known, key=lambda name: -float(np.mean(known[name])))
        told = ", ".join(f"{name} {_told(known[name])}" for name in ordered)
        over = f"bits a byte gained at {FAR:g} times the length over leaving the rotation"
        order = [name for name in ordered if name in _PUBLISHED]
        yield f"- RoPE's models {words}, {over}: {told}." + ("" if tuned else _agree(order == _PUBLISHED))
    yield from _tuned(study)


def _tuned(study: Grid) -> Iterator[str]:
    """What a tuning does to the rotation as it is, and to the interpolated one."""
    cells = _cells(study, "rope")
    (plain, tuned), (untouched, interpolated) = (
        [
            [value for cell in cells if np.isfinite(value := language.extended(cell, method, tuned=how))]
            for how in (False, True)
        ]
        for method in ("none", "interpolation")
    )
    lower, ahead = np.mean(interpolated) - np.mean(untouched), np.mean(tuned) - np.mean(interpolated)
    told = (
        "- **Interpolation after a tuning.** It goes from "
        f"{_told(untouched)} to {_told(interpolated)} bits a byte, the "
        f"rotation as it is from {_told(plain)} to {_told(tuned)}. Chen et al. 2023 "
        "([2306.15595](https://arxiv.org/abs/2306.15595), abstract and section 3) have a thousand steps suffice for "
        "interpolation and ten times as many change little for the rotation as it is." + _agree(bool(ahead > 0))
    )
    if lower < 0 and ahead < 0:
        told += (
            f" Interpolation gains here too ({signed(float(lower))}), but the rotation as it is ends "
            f"{abs(ahead):.2f} lower. What may be the reason, not tested: the tuning is of 3 % of the training's "
            "steps, and near distances, which most of the loss of a model this small hangs on, are those it was "
            f"trained with if the rotation is left alone, and {FAR:g} times closer together if not."
        )
    yield told


def _heads(study: Grid) -> Iterator[str]:
    cells = _cells(study, "rope")
    frequency = [language.positional_by_frequency(cell) for cell in cells]
    untrained = [language.positional_by_frequency(cell, untrained=True) for cell in cells]
    deposit = [language.deposit(cell) for cell in cells]
    first = [language.deposit(cell, 0) for cell in cells]
    previous = [language.kind_share(cell, "previous", "positional") for cell in cells]
    yield (
        f"- **No head of RoPE's carries half.** Position taken from each of its 16 heads alone: the largest head's "
        f"part of what is lost is {_told(deposit, percent=True)}, that of the first layer's heads "
        f"{_told(first, percent=True)}; the bar was half."
        if max(deposit) < 0.5
        else f"- The largest head's part of what is lost without position is {_told(deposit, percent=True)}."
    )
    yield (
        f"- Heads that look at the token before are {_told(previous, percent=True)} positional; over all heads the "
        f"rank correlation of the positional share with the frequency used is {_told(frequency)}, before training "
        f"{_told(untrained)}."
    )
    alone = {
        _title(study, label): values
        for label in study.spec.encodings
        if (values := _each(study, label, language.deposit)) and label != "rope"
    }
    told = ", ".join(f"{name} {_told(values, percent=True)}" for name, values in alone.items())
    yield f"- The largest head's part in models with other encodings: {told}."
    copying = {
        _title(study, label): _each(study, label, lambda cell: language.copied(cell, language.NEAR))
        for label in study.spec.encodings
    }
    found = [
        f"{name} ({_told(values)})" for name, values in copying.items() if values and float(np.mean(values)) > 0.25
    ]
    yield (
        f"- Bits a token that an earlier copy saves, {language.NEAR:g} of a training length away, are over 0.25 for "
        f"{', '.join(found) or 'none'}; whether the others would learn it with more training was not asked."
    )


def _agree(yes: bool) -> str:
    return " *Here too.*" if yes else " *Not here.*"


def _cells(study: Grid, label: str) -> list[CellResult]:
    return [cell for cell in study.results.of(TASK, label) if language.is_language(cell)]


def _each(study: Grid, label: str, figure: Callable[[CellResult], float]) -> list[float]:
    return [value for cell in _cells(study, label) if np.isfinite(value := figure(cell))]


def _title(study: Grid, label: str) -> str:
    return next(column.title for column in study.spec.columns() if column.label == label)


def _span(cells: list[CellResult], figure: Callable[[CellResult], float], **how: bool) -> str:
    return _told([value for cell in cells if np.isfinite(value := figure(cell))], **how)


def _told(values: list[float], *, percent: bool = False) -> str:
    return Spread.of(values).told(0 if percent else 2, percent=percent)


_PARTS: dict[str, Callable[[Grid], Iterator[str]]] = {
    "table": _table,
    "verdicts": _verdicts,
    "lengths": _lengths,
    "short": _short,
    "extension": _extension,
    "heads": _heads,
}


if __name__ == "__main__":
    PAGE.write_text(page(record()), encoding="utf-8")
    print(PAGE)
