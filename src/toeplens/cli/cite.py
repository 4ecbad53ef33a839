"""The command that prints citations: toeplens, the papers it reproduces, the encodings of a study."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from toeplens.cli.options import Json, argument, option
from toeplens.version import __version__

TITLE, AUTHORS, LICENSE = "toeplens", "The toeplens authors", "Apache-2.0"  # as CITATION.cff has them
ABOUT = "A laboratory for positional information in Transformers"


def cite(
    directory: Path | None = argument(None, "Also cite the encodings of this study or run.", is_path=True),
    bibtex: bool = option(False, "Print BibTeX.", flag="--bibtex"),
    as_json: Json = False,
) -> None:
    """Print citations of toeplens, the papers and encodings."""
    from toeplens import encodings
    from toeplens.cli import console
    from toeplens.ground.citations import Citation, citations_of
    from toeplens.papers.deposit import PAPER as DEPOSIT
    from toeplens.papers.positional_symbolic import PAPER as SYMBOLIC

    program = Citation(TITLE, (f"{{{AUTHORS}}}",), f"{TITLE}: {ABOUT}", version=__version__, license=LICENSE)
    works = {"program": [program], "papers": [DEPOSIT, SYMBOLIC]}
    known = {work.arxiv for work in works["papers"]}
    cited = {name: encodings.get(name).citation for name in ([] if directory is None else _encodings(directory))}
    new: dict[str, Citation] = {}  # a paper of several encodings is one entry
    for work in chain.from_iterable(citations_of(text, name) for name, text in cited.items()):
        if work.arxiv not in known:
            new.setdefault(work.arxiv or work.key, work)
    works["encodings"] = list(new.values())
    if as_json:
        told = {
            kind: [{"key": work.key, "words": work.text(), "bibtex": work.bibtex()} for work in found]
            for kind, found in works.items()
        }
        console.print_json(told)
    elif bibtex:
        console.say("\n\n".join(work.bibtex() for found in works.values() for work in found))
        if not all(work.title for work in new.values()):
            console.say("Some entries lack a title; look them up on arXiv by number.", aside=True)
    else:
        console.say("toeplens:")
        console.say(f"  {program.text()}")
        console.say("the papers that it reproduces:")
        for work in works["papers"]:
            console.say(f"  {work.text()}")
        if cited:
            console.say(f"the encodings in {directory}:")
        for name, text in cited.items():
            console.say(f"  {name}: {text}")
        console.say("as BibTeX: toeplens cite --bibtex")


def _encodings(directory: Path) -> list[str]:
    """The encodings of a run's or a study's models, each once, in order."""
    from toeplens import encodings
    from toeplens.cli.studies import kind_of
    from toeplens.papers import deposit, mathematics
    from toeplens.studies import grid
    from toeplens.training import Run

    specs: list[Any] = []  # none of a pretrained model's
    if (directory / "spec.json").is_file():
        specs = [Run.open(directory).spec]
    elif isinstance(state := kind_of(directory)[0].gather(directory), grid.Grid):
        specs = [cell.job.spec for cell in grid.cells(state.spec)]
    elif isinstance(state, deposit.Reproduction):
        specs = [cell.job.spec for cell in state.plan.cells()]
    elif isinstance(state, mathematics.Theory):
        specs = [job.spec for job in mathematics.jobs(state.scale, state.seeds)]
    names: dict[str, None] = {}
    for spec in specs:
        for each in filter(None, (spec.model.encoding, spec.model.input_encoding)):
            names |= dict.fromkeys(encodings.named(each))
    return list(names)
