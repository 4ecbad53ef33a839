"""Write docs/claims.md and what the package knows of the records, from results/*/claims.json.

    python tools/claims.py                 the page and the package's file
    python tools/claims.py --judge         first judge all records again, from their results
    python tools/claims.py --simulate 200  first judge the largest recorded ledger in so many simulated worlds

`tests/test_claims_page.py` holds that both are up to date.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "claims.md"
KNOWN = ROOT / "src" / "toeplens" / "papers" / "deposit" / "recorded.json"
SIMULATED = RESULTS / "false-verdicts.json"
SCALES = ("desk", "laptop")  # the reproduction's records, the more telling first
LADDER = "ladder"  # a part of the desk scale, with seeds of its own
D, C, BOTH = "trigger-distance", "trigger-count", ("paper", "released")
TEN = 10  # models of a cell that the desk record was judged by, but for these (docs/decisions/018)
_FIRST = {(each, C, name): 5 for each in BOTH for name in ("absolute", "mla", "nope", "rope")} | {
    (each, D, name): 5 for each in BOTH for name in ("partial-1", "partial-2")
}
# looked at before, as they were made: of five models each, of ten, with Task 2, with RoPE on one and on two heads
_NO_HEADS = _FIRST | {(each, D, name): 0 for each in BOTH for name in ("partial-1", "partial-2")}
_NO_COUNT = _NO_HEADS | {(each, C, name): 0 for each in BOTH for name in ("absolute", "mla", "nope", "rope")}
_FIVE = _NO_COUNT | {
    (each, D, name): 5
    for each in BOTH
    for name in ("absolute", "alibi", "mla", "nope", "relative", "rope", "rope-absolute", "rope-alone")
}
_SECOND = _FIRST | {
    ("paper", D, "mla"): 20,
    ("released", D, "mla"): 20,
    ("released", D, "absolute"): 20,
    ("paper", D, "relative"): 20,
    ("released", D, "partial-1"): 10,
    ("released", D, "partial-2"): 10,
    ("released", C, "rope"): 15,
}
_THIRD = _SECOND | {
    ("paper", D, "mla"): 30,
    ("released", D, "absolute"): 30,
    ("paper", D, "relative"): 30,
    ("paper", D, "rope"): 20,
}
_FOURTH = _THIRD | {("paper", D, "mla"): 50, ("paper", D, "absolute"): 20, ("paper", D, "alibi"): 30}
EARLIER = (_FIVE, _NO_COUNT, _NO_HEADS, _FIRST, _SECOND, _THIRD, _FOURTH)  # its looks before the last
STUDIES = {
    "arXiv 2505.13027 and its final version: models (`toeplens reproduce`)": SCALES,
    "What a deposit comes with (`toeplens reproduce --scale desk --part ladder`)": (LADDER,),
    "Positional and symbolic heads (`toeplens study canonical`)": ("canonical",),
    "Encodings in language models (`toeplens study language`)": ("language",),
    "Pretrained language models (`toeplens pretrained`)": ("smollm2", "gemma3", "minilm"),
    "The papers' mathematics (`toeplens theory`)": ("theory",),
}


def record_of(name: str) -> dict[str, Any] | None:
    """A record's ledger; None where there is none yet."""
    path = RESULTS / name / "claims.json"
    return json.loads(path.read_text()) if path.exists() else None


def known() -> str:
    """What the package says beside a small study's leanings: the verdicts of the records."""
    records = {name: record for name in SCALES if (record := record_of(name))}
    content = {
        name: {
            "seeds": _models(name, record["seeds"]),
            "verdicts": [[entry["id"], entry["protocol"], entry["verdict"]] for entry in record["claims"]],
        }
        for name, record in records.items()
    }
    return json.dumps(content, indent=1) + "\n"


def _models(name: str, seeds: int) -> str:
    """How many models of each kind a record has, in words: some scales train fewer of some."""
    from toeplens.papers.deposit import SCALES

    return SCALES[name].told(seeds) if name in SCALES else f"{seeds} seeds"


def page() -> str:
    """docs/claims.md."""
    return "\n".join(
        [*_head(), *_errors(), *(line for title, names in STUDIES.items() for line in _study(title, names))]
    )


def _head() -> Iterator[str]:
    from toeplens.studies import RULE

    text = (ROOT / "tools" / "claims.md").read_text()
    yield text.replace("{{ rule }}", RULE)


def _study(title: str, names: tuple[str, ...]) -> Iterator[str]:
    records = {name: record for name in names if (record := record_of(name))}
    if not records:
        return
    claims: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        for entry in record["claims"]:
            claim = claims.setdefault(entry["id"], {**entry, "found": []})
            claim["found"].append((name, record.get("seeds"), entry))
    yield f"\n## {title}\n"
    yield _summary(records)
    for name, claim in claims.items():
        yield f"\n### `{name}`\n"
        yield f"{claim['statement']} *({claim['source']})*\n"
        yield f"**Rule.** {claim['rule']}\n"
        yield "| record | protocol | verdict | essential parts | supporting parts | what would decide it |"
        yield "|---|---|---|---|---|---|"
        for scale, seeds, entry in claim["found"]:
            verdict = entry["verdict"]
            if entry["plain"] != verdict:
                verdict += f" (without correction: {entry['plain']})"
            parts = [
                "<br>".join(
                    _cell(f"{part['evidence']}: *{_told(part)}*")
                    for part in entry["parts"]
                    if part["essential"] is kind
                )
                for kind in (True, False)
            ]
            where = f"{scale}, {_models(scale, seeds)}" if seeds else scale
            row = where, entry["protocol"], verdict, *parts, _cell("; ".join(entry["wanting"]))
            yield f"| {' | '.join(cell or '–' for cell in row)} |"
        for scale, _, entry in claim["found"]:
            if entry["elsewhere"]:
                told = "; ".join(f"{aside['name']}: {aside['verdict']}" for aside in entry["elsewhere"])
                yield f"\nLooked at otherwise ({scale}, {entry['protocol']}): {told}."


def _told(part: dict[str, Any]) -> str:
    """A part's verdict; that by its own interval alone beside it where it is another."""
    return part["verdict"] + (f" (alone: {part['plain']})" if part["plain"] != part["verdict"] else "")


def _summary(records: dict[str, Any]) -> str:
    rows = [
        "| record | protocol | claims | hold | in part | fail | lean | undecided | decided only without correction |",
        "|---|" + "---|" * 8,
    ]
    for name, record in records.items():
        for protocol in dict.fromkeys(entry["protocol"] for entry in record["claims"]):
            found = [entry for entry in record["claims"] if entry["protocol"] == protocol]
            verdicts = [entry["verdict"] for entry in found]
            counts = [verdicts.count(kind) for kind in ("holds", "holds in part", "fails")]
            leaning, lost = sum(v.startswith("leans") for v in verdicts), sum(e["plain"] != e["verdict"] for e in found)
            numbers = [len(found), *counts, leaning, verdicts.count("undecided"), lost]
            rows.append(f"| {name} | {protocol or '–'} | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _errors() -> Iterator[str]:
    if not SIMULATED.exists():
        return
    content = json.loads(SIMULATED.read_text())
    yield "\n## How often a verdict is wrong\n"
    looked = ""
    if content["looks"] > 1:
        looked = (
            f" It is looked at as often as it was ({content['looks']} times), by the models that each cell had each "
            "time (decisions [018](decisions/018-desk-scale.md), [030](decisions/030-amended-rules.md)): what is read "
            "is the last, and beside it stands what is wrong at any of them. Noise as seen is what the models "
            "themselves are off their mean: where a rare one fails, a few that do not are surer than they should be."
        )
    yield (
        f"The whole ledger of `results/{content['record']}` was judged in {content['worlds']} worlds whose truth is "
        "known: every comparison keeps its number of models and its spread, and its mean is 0, its bar, or twice its "
        f"bar. At the bar any decision is wrong. A ledger is wrong if any of its claims is.{looked}\n"
    )
    heads = "ledgers with a wrong verdict", "at any look", "and without correction", "claims decided as they are"
    yield f"| noise | truth | {' | '.join(heads)} |"
    yield "|---|---|---|---|---|---|"
    for row in content["ledgers"]:
        rates = [_share(row[key], content["worlds"]) for key in ("last_wrong", "any_wrong", "plain_any_wrong")]
        yield f"| {row['shape']} | {row['effect']} | {' | '.join(rates)} | {100 * row['right']:.1f} % |"
    yield "\nPer rule, normal noise, share of worlds in which it wrongly holds / wrongly fails:\n"
    effects = content["effects"]
    yield f"| rule | protocol | {' | '.join(effects)} |"
    yield "|---|---|" + "---|" * len(effects)
    for row in content["rules"]:
        told = [f"{100 * holds:.1f} / {100 * fails:.1f} %" for holds, fails in row["wrong"]]
        yield f"| `{row['id']}` | {row['protocol']} | {' | '.join(told)} |"


def _share(share: float, worlds: int) -> str:
    """With Wilson's interval."""
    from toeplens.lens.kit.intervals import wilson

    low, high = wilson(round(share * worlds), worlds)
    return f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def judged(name: str) -> tuple[Mapping[str, Any], Any, list[Any]]:
    """A record of the reproduction, its cells, and its ledger by the rules as they are now."""
    import recorded

    from toeplens.papers.deposit import claims_of
    from toeplens.studies import judge

    record = recorded.record_of(name)
    assert record is not None
    content, results = record.content, record.results
    return content, results, judge(claims_of(content["parts"]), results, content["protocols"])


def judge_again(name: str) -> None:
    """Write a record's claims.json by the rules as they are now, if there is such a record."""
    from toeplens.cli.studies import kind_of
    from toeplens.ground import write_json

    record = record_of(name)
    if record:
        study = kind_of(RESULTS / name)[0].gather(RESULTS / name)
        write_json(RESULTS / name / "claims.json", {**record, "claims": [entry.to_dict() for entry in study.entries]})


def as_judged_before(name: str, content: Mapping[str, Any], results: Any) -> list[list[Any]]:
    """A record's ledger at each look before the last, by the models that it had then and the rules as they are now."""
    from toeplens.papers.deposit import claims_of
    from toeplens.studies import Results, judge

    if name != "desk":
        return []
    found, cells = [], results.cells
    for look in EARLIER:
        count: Counter[tuple[str, str, str]] = Counter()
        had = []
        for cell in cells:
            place = cell.key.protocol, cell.key.task, cell.key.label
            count[place] += 1
            if count[place] <= look.get(place, TEN):
                had.append(cell)
        if len(had) < len(cells):
            found.append(judge(claims_of(content["parts"]), Results(had), content["protocols"]))
    return found


def simulated(worlds: int) -> dict[str, Any]:
    """What results/false-verdicts.json holds."""
    from simulated import EFFECTS, Shape, simulate

    name = next(name for name in SCALES if record_of(name))
    content, results, entries = judged(name)
    earlier = as_judged_before(name, content, results)
    found = {
        (shape, effect): simulate(entries, worlds=worlds, effect=effect, shape=shape, earlier=earlier)
        for shape in get_args(Shape)
        for effect in EFFECTS
    }
    ledgers = [
        {
            "shape": shape,
            "effect": effect,
            "any_wrong": each.any_wrong,
            "last_wrong": each.last_wrong,
            "plain_any_wrong": each.plain_any_wrong,
            "right": round(sum(error.right for error in each.errors) / len(each.errors), 4),
        }
        for (shape, effect), each in found.items()
    ]
    normal = [found["normal", effect].errors for effect in EFFECTS]
    rules = [
        {"id": row[0].claim, "protocol": row[0].protocol, "wrong": [[e.wrong_holds, e.wrong_fails] for e in row]}
        for row in zip(*normal, strict=True)
    ]
    return {
        "record": name,
        "worlds": worlds,
        "looks": 1 + len(earlier),
        "effects": list(EFFECTS),
        "ledgers": ledgers,
        "rules": rules,
    }


def main() -> None:
    """Write what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--simulate", type=int, metavar="WORLDS", help="judge the ledger in so many simulated worlds first"
    )
    parser.add_argument("--judge", action="store_true", help="judge all records again first")
    asked = parser.parse_args()
    for name in [name for names in STUDIES.values() for name in names] if asked.judge else ():
        judge_again(name)
    if asked.simulate:
        SIMULATED.write_text(json.dumps(simulated(asked.simulate), indent=1) + "\n")
    KNOWN.write_text(known())
    PAGE.write_text(page() + "\n")


if __name__ == "__main__":
    main()
