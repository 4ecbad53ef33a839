"""Write what docs/ladder.md says of the recorded ladder, from results/ladder/results.json.xz.

    python tools/ladder_findings.py

Everything between a line ``<!-- found: .. -->`` and the next ``<!-- end -->`` of the page is written here, every number
of it from the record. `tests/docs/test_ladder.py` holds that the page is up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from filling import filled

from toeplens.ground.words import listed
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.looks import END, Measure, in_order, look_at
from toeplens.papers.deposit.page.look import name
from toeplens.papers.deposit.rungs import BASES, RUNGS, TASK
from toeplens.papers.deposit.study import KIND
from toeplens.report.grid.look import Spread
from toeplens.studies import CellResult
from toeplens.training.presets import PRESETS, PROTOCOLS, Protocol

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "ladder.md", ROOT / "results" / "ladder" / "results.json.xz"
SCALE = SCALES["desk"]
BATCH = SCALE.optimiser["batch_size"]
FIRST: dict[Protocol, str] = {"paper": "rope", "released": "rope-alone"}  # RoPE and nothing else
LONGER = "longer"
_COSTS = ("largest cost of a head, % of the skill", "nats", "heads whose cost is told from none")
MOMENTS = {
    "able": "first look with over 90 % right, if before the plateau",
    "plateau": "the plateau",
    "twice": "twice its steps",
    "four times": "four times",
    END: "eight times, the end",
}


def record(path: Path = RECORD) -> Reproduction:
    """The recorded study."""
    return KIND.open_record(path)


def page(study: Reproduction) -> str:
    """The page with its findings as the record has them."""
    return filled(PAGE, lambda part: _PARTS[part](study))


# ---- what the models say ---------------------------------------------------------------------------------------------


def cells(study: Reproduction, protocol: Protocol, base: str, rung: str) -> list[CellResult]:
    """The models of a place."""
    return study.results.under(protocol).of(TASK, f"{base}/{rung}" if rung else base)


def largest(found: list[CellResult], moment: str = END, measure: Measure = "accuracy") -> Spread:
    """The most that a head costs, of those models that have skill."""
    looks = (look_at(cell, moment, measure) for cell in found)
    return Spread.of(look.largest() if look else None for look in looks)


def matter(found: list[CellResult], moment: str = END) -> Spread:
    """How many heads cost any of the accuracy."""
    looks = (look_at(cell, moment) for cell in found)
    return Spread.of(look.matter if look else None for look in looks)


def to_plateau(cell: CellResult) -> float:
    """Training examples until a model had stopped learning; NaN where it had not."""
    step = cell.result.get("plateau")
    return float("nan") if step is None else float(step) * BATCH


def _plateaus(found: list[CellResult]) -> str:
    still = sum(not cell.settled for cell in found)
    told = _thousands(Spread.of(map(to_plateau, found)))
    return told if not still else f"{told}; {still} still learning" if still < len(found) else "all still learning"


def _of(spread: Spread, found: list[CellResult], digits: int = 2, *, percent: bool = False) -> str:
    """A figure, and of how many models it is where some have none."""
    told = spread.told(digits, percent=percent)
    return f"{told}, {spread.count} of {len(found)} models" if 0 < spread.count < len(found) else told


def _right(found: list[CellResult]) -> str:
    return Spread.of(cell.accuracy for cell in found).told(0, percent=True)


def _thousands(spread: Spread) -> str:
    return f"{spread.mean:,.0f} ({spread.low:,.0f} to {spread.high:,.0f})" if spread.count else "–"


# ---- the page's parts ------------------------------------------------------------------------------------------------


def _verdicts(study: Reproduction) -> Iterator[str]:
    yield f"| claim | {' | '.join(PROTOCOLS)} |"
    yield f"|---|{'---|' * len(PROTOCOLS)}"
    for claim in dict.fromkeys(entry.claim for entry in study.entries):
        told = [_entry(study, claim.id, protocol) for protocol in PROTOCOLS]
        yield f"| [{claim.statement}](claims.md#{claim.id}) | {' | '.join(told)} |"


def _entry(study: Reproduction, claim: str, protocol: Protocol) -> str:
    entry = next(each for each in study.entries if (each.claim.id, each.protocol) == (claim, protocol))
    return f"*{entry.verdict}*: " + "; ".join(entry.evidence).replace("|", "\\|")


def _rungs(study: Reproduction) -> Iterator[str]:
    for protocol, base in FIRST.items():
        yield f"{name(protocol, base)}, {protocol} protocol:"
        yield ""
        yield f"| changed | examples to the plateau | right | {' | '.join(_COSTS)} |"
        yield "|---|---|---|---|---|---|"
        for rung in ("", *SCALE.rungs):
            found = cells(study, protocol, base, rung)
            if not found or rung == LONGER:
                continue
            title = RUNGS[rung].title if rung else "nothing: the scale as it is"
            yield (
                f"| {title} | {_plateaus(found)} | {_right(found)} | "
                f"{_of(largest(found), found, 0, percent=True)} | {_of(largest(found, measure='loss'), found)} | "
                f"{_of(matter(found), found, 0)} |"
            )
        yield ""


def _lengths(study: Reproduction) -> Iterator[str]:
    rungs = sorted(["", *(rung for rung in SCALE.rungs if RUNGS[rung].tokens)], key=_tokens)
    yield f"| encoding, protocol | {' | '.join(f'{_tokens(rung)} tokens' for rung in rungs)} |"
    yield f"|---|{'---|' * len(rungs)}"
    for protocol in PROTOCOLS:
        for base in BASES[protocol]:
            found = [cells(study, protocol, base, rung) for rung in rungs]
            if all(found):
                told = [_of(largest(each), each, 0, percent=True) for each in found]
                yield f"| {name(protocol, base)}, {protocol} | {' | '.join(told)} |"

    ends = [
        " against ".join(
            f"{largest(cells(study, protocol, base, rung)).told(0, percent=True)} with {_tokens(rung)}"
            for rung in ("tokens-64", "tokens-24")
        )
        + f" tokens ({protocol})"
        for protocol, base in FIRST.items()
    ]
    yield ""
    yield (
        "Texts of 96 tokens have a vocabulary of 128 words, all others one of 64, since distances are words. With one "
        f"vocabulary RoPE's largest cost is {' and '.join(ends)}."
    )


def _tokens(rung: str) -> int:
    return (RUNGS[rung].tokens if rung else None) or SCALE.model["max_len"]


def _moments(study: Reproduction) -> Iterator[str]:
    yield f"| encoding, protocol | moment | {' | '.join(_COSTS)} |"
    yield "|---|---|---|---|---|"
    for protocol in PROTOCOLS:
        for base in BASES[protocol]:
            found = cells(study, protocol, base, LONGER)
            for moment, words in MOMENTS.items() if found else ():
                seen = [cell for cell in found if in_order(cell, moment)]
                yield (
                    f"| {name(protocol, base)}, {protocol} | {words} | "
                    f"{_of(largest(seen, moment), found, 0, percent=True)} | "
                    f"{_of(largest(seen, moment, 'loss'), found)} | {_of(matter(seen, moment), found, 0)} |"
                )


def _answers(study: Reproduction) -> Iterator[str]:
    asked = {
        "With the task's difficulty?": ("ladder-length",),
        "With unfinished learning?": ("ladder-unfinished",),
        "With the encoding?": ("ladder-encoding",),
        "With few heads, or few layers?": ("ladder-heads", "ladder-layers"),
        "With the papers' rate of learning?": ("ladder-rate",),
        "With dropout or weight decay?": ("ladder-dropout-spreads", "ladder-decay-gathers"),
    }
    for question, claims in asked.items():
        told = [f"“{_claim(study, claim)}” {listed(_leanings(study, claim))}" for claim in claims]
        yield f"- **{question}** {'; '.join(told)}."


def _verb(verdict: str) -> str:
    return "is undecided" if verdict == "undecided" else verdict


def _claim(study: Reproduction, claim: str) -> str:
    return next(entry.claim.statement for entry in study.entries if entry.claim.id == claim).rstrip(".")


def _leanings(study: Reproduction, claim: str) -> list[str]:
    """A claim's verdict by protocol, once where both have the same."""
    found = {entry.protocol: _verb(entry.verdict) for entry in study.entries if entry.claim.id == claim}
    if len(set(found.values())) == 1:
        return [f"{next(iter(found.values()))} under both protocols"]
    return [f"{verdict} under the {protocol} protocol" for protocol, verdict in found.items()]


def _papers(study: Reproduction) -> Iterator[str]:
    """Where the papers' size and moment lie."""
    paper = PRESETS["paper"]
    size = paper.tasks[TASK]
    seen = size.train_examples * size.epochs
    steps = seen / paper.optimiser["batch_size"]
    plateaus = {
        protocol: Spread.of(map(to_plateau, cells(study, protocol, base, "rate-paper")))
        for protocol, base in FIRST.items()
    }
    told = [f"{_thousands(spread)} examples ({protocol})" for protocol, spread in plateaus.items() if spread.count]
    times = [
        f"{seen / spread.mean:.0f} times the examples, {steps * BATCH / spread.mean:.1f} times the steps ({protocol})"
        for protocol, spread in plateaus.items()
        if spread.count
    ]
    yield (
        f"- **The moment.** The papers' {size.epochs} epochs are {seen:,} examples in {steps:,.0f} steps of "
        f"{paper.optimiser['batch_size']}. With their rate and betas RoPE's models reach their plateau here after "
        f"{' and '.join(told)}, in steps of {BATCH}; theirs are {' and '.join(times)}. Their texts are three times as "
        "long and take more of either; unless it is as many times more, they looked past the plateau. They train for a "
        "number of epochs and not until something has happened, so that no paper says how far."
        if told
        else "- **The moment.** With the papers' rate and betas no model of RoPE has stopped learning here."
    )
    for protocol in PROTOCOLS:
        yield f"- **The size, {protocol} protocol.** {_direction(study, protocol)}"


def _direction(study: Reproduction, protocol: Protocol) -> str:
    """The largest cost at each step towards the papers' size."""
    base = FIRST[protocol]
    start = largest(cells(study, protocol, base, "")).told(0, percent=True)
    places = PRESETS["paper"].model["max_len"]
    steps = {
        f"texts of {_tokens('tokens-96')} tokens and 128 words (theirs have {places} places)": "tokens-96",
        "their rate and betas": "rate-paper",
        "their dropout of 0.1": "drop",
        "their width of 256": "width-256",
    }
    told = []
    for words, rung in steps.items():
        spread = largest(cells(study, protocol, base, rung))
        told.append(f"{words} {spread.told(0, percent=True)}" if spread.count else f"{words}: not recorded")
    return f"The largest cost of a head, of the skill, is {start} as the scale is; with {'; '.join(told)}."


_PARTS: dict[str, Callable[[Reproduction], Iterator[str]]] = {
    "answers": _answers,
    "verdicts": _verdicts,
    "rungs": _rungs,
    "lengths": _lengths,
    "moments": _moments,
    "papers": _papers,
}


if __name__ == "__main__":
    PAGE.write_text(page(record()), encoding="utf-8")
    print(PAGE)
