"""Works that are cited: papers and programs, in words and as BibTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toeplens.ground.titles import TITLES

_CITED = re.compile(
    r"(?P<authors>[^\d,;]+?) (?P<year>\d{4}), (?:arXiv (?P<eprint>\d{4}\.\d{5})(?:, | |$))?(?P<note>.*)"
)
_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "{}$&#%_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "''",
}


@dataclass(frozen=True)
class Work:
    """A work that is cited.

    key      its name in a bibliography
    authors  as the work has them; "others" for those that are not known here; none where no author is known
    title    empty where it is not known here
    year     0 where it is not known, or there is none
    eprint   its number on arXiv
    version  of a program
    note     what else there is to say
    """

    key: str
    authors: Sequence[str]
    title: str = ""
    year: int = 0
    eprint: str = ""
    version: str = ""
    license: str = ""
    note: str = ""

    def words(self) -> str:
        """A line of a list of references."""
        if not self.authors:
            return f"{self.note}."
        plain = (author.replace("{", "").replace("}", "") for author in self.authors)
        *before, last = [" ".join(reversed(author.split(", ", 1))) for author in plain]
        names = f"{', '.join(before)} {'et al.' if last == 'others' else f'and {last}'}" if before else last
        year = f" ({self.year})" if self.year else ""
        parts = [
            f"{names}{year}",
            self.title,
            self.version and f"version {self.version}",
            self.eprint and f"arXiv:{self.eprint}",
            self.note,
        ]
        return f"{'. '.join(part for part in parts if part)}."

    def bibtex(self) -> str:
        """An entry of a bibliography; one of a program is ``@software``, to BibTeX the same as misc."""
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{bib(self.title)}}}" if self.title else "",
            "year": str(self.year or ""),
            "eprint": self.eprint,
            "archiveprefix": "arXiv" if self.eprint else "",
            "version": bib(self.version),
            "license": bib(self.license),
            "note": bib(self.note),
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        return "\n".join([f"@{'software' if self.version else 'misc'}{{{self.key},", *lines, "}"])


def bib(text: str) -> str:
    """A text as BibTeX takes it, between braces."""
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def works_in(citation: str, key: str) -> list[Work]:
    """The works that a citation in words names: authors, a year, and arXiv's number or what else is said.

    What names no authors is a note, of the work before it if there is one. The first work has the ``key``, those after
    it the key with a number.
    """
    works: list[Work] = []
    for part in citation.split("; "):
        found = _CITED.fullmatch(part)
        if found is None and works:
            works[-1] = replace(works[-1], note="; ".join(filter(None, (works[-1].note, part))))
            continue
        name = f"{key}-{len(works) + 1}" if works else key
        if found is None:
            works.append(Work(name, (), note=part))
            continue
        authors, eprint, note = _authors(found["authors"]), found["eprint"] or "", found["note"].strip("()")
        works.append(Work(name, authors, TITLES.get(eprint, ""), int(found["year"]), eprint, note=note))
    return works


def _authors(text: str) -> tuple[str, ...]:
    if text.endswith(" et al."):
        return bib(text.removesuffix(" et al.")), "others"
    return tuple(f"{{{bib(name)}}}" if " " in name or "-" in name else bib(name) for name in text.split(" and "))
