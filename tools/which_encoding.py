"""Write docs/which-encoding.md from the recorded studies: results/*/results.json.xz and claims.json.

    python tools/which_encoding.py           write the page
    python tools/which_encoding.py --check   write nothing; exit code 1 if the page is not what the records say

Every sentence with a number is made here from the records. Nothing is compared that the ledger does not compare:
tables say what was measured of each encoding by itself, and what one has over another are the ledger's verdicts.
`tests/docs/test_which_encoding.py` holds that the page is up to date.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recorded import Recorded, record_of

from toeplens.studies import ENOUGH
from toeplens.studies.grid.language import LONG, NEAR, LanguageRow, language_rows
from toeplens.studies.grid.measured import kept
from toeplens.studies.kit.contrasts import of_one
from toeplens.studies.kit.results import ACCURACY, Figure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "which-encoding.md"
TEXT = ROOT / "tools" / "which_encoding.md"  # the page's fixed words, with a place for each part
DECIDED = ("holds", "holds in part", "fails")
PLACES = ("index", "retrieval", "mix")
LONGER = (1.5, 2.0)
_KEPT: dict[float, Figure] = {
    factor: Figure("share of the skill kept", lambda cell, factor=factor: kept(cell, factor), lambda cell: cell.skilled)
    for factor in LONGER
}
_COST = Figure(
    "largest cost of a head", lambda cell: cell.peak, lambda cell: cell.skilled and cell.ablation is not None
)


NAMES = ("desk", "laptop", "canonical", "language")
RECORDS: dict[str, Recorded] = {name: record for name in NAMES if (record := record_of(name))}

ASKED = {  # question: the claims that answer it, as they are known in every record
    "Is the answer at a place that a token names?": (
        "canonical-tasks",
        "index-needs-high-frequencies",
        "mix-needs-both",
    ),
    "Is the answer beside a word that is looked up?": ("retrieval-needs-low-frequencies", "symbolic-head-emerges"),
    "Will texts be longer than in training?": (
        "symbolic-extrapolates",
        "positional-share-against-length",
        "deposit-against-length",
        "coupling-against-length",
        "mla-keeps-length",
    ),
    "Is it how far apart two words are?": (
        "task1-rope-best",
        "task1-nope-relative-fail",
        "task1-alibi-poor",
        "table1-task1-order",
        "task1-rope-fastest",
        "task1-convergence-order",
    ),
    "Is it how often something occurs?": (
        "table1-task2-order",
        "task2-rope-superior",
        "task2-positions-cost",
        "task2-alibi-worst",
        "mla-near-best",
    ),
    "Must no single head carry the work?": (
        "deposit-first-layer",
        "deposit-only-rope",
        "deposit-more-under-rope",
        "mla-removes-deposit",
        "relative-alibi-scattered",
    ),
}


def page() -> str:
    """docs/which-encoding.md."""
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "limits": _limits,
        "short": _short,
        "places": _places,
        "longer": _longer,
        "distance": _distance,
        "counting": _counting,
        "heads": _heads,
        "others": _others,
        "language": _language,
        "open": _open,
    }
    text = TEXT.read_text(encoding="utf-8")
    for name, lines in parts.items():
        text = text.replace(f"{{{{ {name} }}}}", "\n".join(lines()))
    for question in ASKED:
        text = text.replace(f"{{{{ claims: {question} }}}}", "\n".join(_claims(ASKED[question])))
    return text


def _limits() -> Iterator[str]:
    yield "| record | protocol | models | seeds | layers, heads, width | largest model | tasks |"
    yield "|---|---|---|---|---|---|---|"
    for name, record in RECORDS.items():
        cells, sizes = record.results.cells, record.sizes
        size = f"{sizes['num_layers']}, {sizes['num_heads']}, {sizes['d_model']}"
        most = max(cell.parameters for cell in cells)
        tasks = list(dict.fromkeys(cell.key.task for cell in cells))
        told = ", ".join(f"`{task}`" for task in tasks) if len(tasks) < 4 else f"{len(tasks)} tasks, listed below"
        protocols = ", ".join(dict.fromkeys(cell.key.protocol for cell in cells))
        models = len({cell.run for cell in cells})
        seeds = " to ".join(map(str, dict.fromkeys(record.seeds)))
        yield f"| `{name}` | {protocols} | {models} | {seeds} | {size} | {most:,} numbers | {told} |"
    synthetic = [record for name, record in RECORDS.items() if name != "language"]
    most = max(cell.parameters for record in synthetic for cell in record.results.cells)
    yield (
        f"\nOf these the largest model trained on a synthetic task has {most:,} learned numbers. Whether any of this "
        "holds at a larger size was not measured."
    )


def _short() -> Iterator[str]:
    """Question by question what is decided, a claim a line; what is not, by name."""
    for question, ids in ASKED.items():
        found = list(_entries(ids))
        yield f"**[{question}](#{_anchor(question)})**\n"
        decided: dict[tuple[str, str], list[str]] = {}
        for name, each in found:
            if _done(each):
                figure = re.split(r": (?=-?\d)", _deciding(each)["evidence"])[-1]
                told = f"{_where(name, each)}: {figure}{_against(each)}"
                decided.setdefault((each["id"], each["verdict"]), []).append(told)
        for (claim, verdict), places in decided.items():
            entry = next(each for _, each in found if each["id"] == claim)
            yield f"- \u201c{entry['statement']}\u201d **{verdict}** ({'; '.join(places)}). {_link(entry)}"
        rest = dict.fromkeys(_link(each) for _, each in found if not _done(each))
        some = list(dict.fromkeys(_link(each) for _, each in found if _done(each)))
        only = [link for link in rest if link not in some]
        if not decided:
            yield "- Nothing is decided."
        if only:
            yield f"- Open, or only leaning, in every record: {', '.join(only)}."
        yield ""


def _places() -> Iterator[str]:
    record = RECORDS["canonical"]
    yield from _table(record.titles_of(_plain(record)), [(f"`{t}`", record, "paper", t, ACCURACY) for t in PLACES])
    rules = {row["task"]: f"{100 * row['rule_accuracy']:.0f} ({row['rule']})" for row in record.content["table"]}
    yield f"| *the best rule without a model* | {' | '.join(rules[task] for task in PLACES)} |"


def _longer() -> Iterator[str]:
    record = RECORDS["canonical"]
    columns = [
        (f"`{task}`, {factor:g} times", record, "paper", task, figure)
        for task in PLACES[:2]
        for factor, figure in _KEPT.items()
    ]
    yield from _table(record.titles_of(_plain(record)), columns)


def _reproduced(task: str, names: Sequence[str], figure: Figure) -> Iterator[str]:
    """A table a protocol, a column a record: the same label is another encoding under the other protocol."""
    for protocol in ("paper", "released"):
        titles = {}
        for name in names:
            titles |= RECORDS[name].titles_under(protocol, task)
        yield from _table(titles, [(f"`{name}`", RECORDS[name], protocol, task, figure) for name in names], protocol)
        yield ""


def _distance() -> Iterator[str]:
    yield from _reproduced("trigger-distance", ("desk", "laptop"), ACCURACY)


def _counting() -> Iterator[str]:
    canonical = RECORDS["canonical"]
    tasks = ("trigger-count", "contextual-count")
    yield from _table(
        canonical.titles_of(_plain(canonical)),
        [(f"`{t}`, `canonical`", canonical, "paper", t, ACCURACY) for t in tasks],
    )
    yield ""
    yield from _reproduced("trigger-count", ("desk", "laptop"), ACCURACY)


def _heads() -> Iterator[str]:
    yield from _reproduced("trigger-distance", ("desk", "laptop"), _COST)


def _others() -> Iterator[str]:
    """All tasks of the grid by all its encodings, in short."""
    record = RECORDS["canonical"]
    labels = _plain(record)
    yield f"| task | {' | '.join(record.titles[label] for label in labels)} |"
    yield f"|---|{'---|' * len(labels)}"
    for task in record.spec.tasks:
        told = (_measured(record, "paper", task, label, ACCURACY)[1] for label in labels)
        yield f"| `{task}` | {' | '.join(told)} |"


def _language() -> Iterator[str]:
    record = RECORDS["language"]
    rows = language_rows(record.spec, record.results)
    yield from _language_table(rows)
    asked = {each["id"]: None for each in record.entries}
    yield ""
    yield from _claims(tuple(asked), ("language",))


def _language_table(rows: Sequence[LanguageRow]) -> Iterator[str]:
    far = f"{LONG:g} times"
    yield (
        f"| encoding | seeds | bits a byte (over seeds) | lost at {far} the length | needles found | at {far} "
        f"| a copy saves, at {NEAR:g} times | seconds of training |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        numbers = (
            f"{_number(row.bits, 3)} ({_number(row.lowest, 3)} to {_number(row.highest, 3)})",
            _number(row.lost, 3),
            _percent(row.needle),
            _percent(row.needle_long),
            _number(row.copied, 2),
            _number(row.seconds, 0),
        )
        yield f"| {row.title} | {row.seeds} | {' | '.join(numbers)} |"


def _open() -> Iterator[str]:
    yield "| record | protocol | claims | decided | lean | undecided |"
    yield "|---|---|---|---|---|---|"
    for name, record in RECORDS.items():
        for protocol in dict.fromkeys(each["protocol"] for each in record.entries):
            verdicts = [each["verdict"] for each in record.entries if each["protocol"] == protocol]
            decided, leaning = sum(v in DECIDED for v in verdicts), sum(v.startswith("leans") for v in verdicts)
            counts = len(verdicts), decided, leaning, verdicts.count("undecided")
            yield f"| `{name}` | {protocol or '–'} | {' | '.join(map(str, counts))} |"


def _entries(ids: Sequence[str], names: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each record's ledger says of these claims, claim by claim."""
    for claim in ids:
        for name in names or [each for each in RECORDS if each != "language"]:
            yield from ((name, each) for each in RECORDS[name].entries if each["id"] == claim)


def _claims(ids: Sequence[str], names: Sequence[str] = ()) -> Iterator[str]:
    """A claim a bullet, and under it what each record says of it, with what that rests on first."""
    told = ""
    for name, each in _entries(ids, names):
        if each["id"] != told:
            told = each["id"]
            yield f"- \u201c{each['statement']}\u201d ({each['source']}) {_link(each)}"
        verdict = f"**{each['verdict']}**" if _done(each) else each["verdict"]
        parts = sum(part["essential"] for part in each["parts"])
        more = f" (one of {parts} parts)" if parts > 1 else ""
        seen = f"{_deciding(each)['evidence']}{more}{_against(each)}"
        yield f"    - {_where(name, each)}, {_seeds(name)}: {verdict}. {seen}"


def _seeds(name: str) -> str:
    fewest, most = RECORDS[name].seeds
    return f"{'up to ' if fewest < most else ''}{most} seeds"


def _deciding(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a claim that its verdict rests on; the first of them, where there are several."""
    return min(entry["parts"], key=lambda part: (not part["essential"], part["verdict"] != entry["verdict"]))


def _against(entry: Mapping[str, Any]) -> str:
    """Which supporting part a claim that holds in part lacks; the first of them, where there are several."""
    lost = [part for part in entry["parts"] if not part["essential"] and "fails" in (part["verdict"], part["plain"])]
    return f", but not: {lost[0]['evidence']}" if entry["verdict"] == "holds in part" else ""


Column = tuple[str, Recorded, str, str, Figure]  # heading, record, protocol, task, figure


def _table(titles: Mapping[str, str], columns: Sequence[Column], corner: str = "") -> Iterator[str]:
    """Each encoding by itself: figures' means with their intervals over seeds, by the first column's mean."""
    rows = []
    for label, title in titles.items():
        told = [_measured(record, protocol, task, label, figure) for _, record, protocol, task, figure in columns]
        rows.append(([-value for value, _ in told], title, [words for _, words in told]))
    yield f"| {f'{corner} protocol' if corner else 'encoding'} | {' | '.join(heading for heading, *_ in columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    yield from (f"| {title} | {' | '.join(told)} |" for _, title, told in sorted(rows))


def _measured(record: Recorded, protocol: str, task: str, label: str, figure: Figure) -> tuple[float, str]:
    """A figure's mean, and it with its interval in per cent and how many models count."""
    cells = [cell for cell in record.results.of(task, label) if cell.key.protocol == protocol]
    values = [value for value in figure.by_seed(cells).values() if math.isfinite(value)]
    if not cells:
        return -math.inf, "–"
    count = f"{len(values)} of {len(cells)}"
    if not values:
        return -math.inf, f"– ({count}: {figure.without})"
    found = of_one(values, figure.grain).estimate()
    if len(values) < ENOUGH:
        return found.value, f"{100 * found.value:.0f} ({count})"
    low, high = found.low, min(found.high, 1.0) if figure is ACCURACY else found.high
    return found.value, f"{100 * found.value:.0f} [{100 * low:.0f}, {100 * high:.0f}] ({count})"


def _plain(record: Recorded) -> list[str]:
    """The encodings of a grid that are on all its tasks."""
    return [column.label for column in record.spec.columns() if set(column.tasks) == set(record.spec.tasks)]


def _done(entry: Mapping[str, Any]) -> bool:
    return entry["verdict"] in DECIDED


def _where(name: str, entry: Mapping[str, Any]) -> str:
    protocol = f", {entry['protocol']} protocol" if entry["protocol"] else ""
    return f"`{name}`{protocol}"


def _link(entry: Mapping[str, Any]) -> str:
    return f"[`{entry['id']}`](claims.md#{entry['id']})"


def _anchor(question: str) -> str:
    kept_ = "".join(letter for letter in question.lower() if letter.isalnum() or letter in " -")
    return kept_.replace(" ", "-")


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def main() -> None:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the records say: run python tools/which_encoding.py")


if __name__ == "__main__":
    main()
