"""Citations of papers and code, as text and as BibTeX."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "{}$&#%_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    '"': "''",
}


@dataclass(frozen=True)
class Citation:
    """A cited paper or software.

    key      BibTeX key
    authors  in BibTeX format; "others" for unlisted ones; empty if unknown
    title    empty if unknown
    year     0 if unknown or without a year
    arxiv    arXiv number
    version  of software
    note     any further information
    """

    key: str
    authors: Sequence[str]
    title: str = ""
    year: int = 0
    arxiv: str = ""
    version: str = ""
    license: str = ""
    note: str = ""

    def text(self) -> str:
        """A line of a reference list."""
        if not self.authors:
            return f"{self.note}."
        authors = (author.replace("{", "").replace("}", "") for author in self.authors)
        *others, last = [" ".join(reversed(author.split(", ", 1))) for author in authors]
        names = f"{', '.join(others)} {'et al.' if last == 'others' else f'and {last}'}" if others else last
        parts = [
            f"{names} ({self.year})" if self.year else names,
            self.title,
            self.version and f"version {self.version}",
            self.arxiv and f"arXiv:{self.arxiv}",
            self.note,
        ]
        return f"{'. '.join(part for part in parts if part)}."

    def bibtex(self) -> str:
        """A BibTeX entry; software is ``@software``, which BibTeX treats as misc."""
        fields = {
            "author": " and ".join(self.authors),
            "title": f"{{{escape_bibtex(self.title)}}}" if self.title else "",
            "year": str(self.year or ""),
            "eprint": self.arxiv,
            "archiveprefix": "arXiv" if self.arxiv else "",
            "version": escape_bibtex(self.version),
            "license": escape_bibtex(self.license),
            "note": escape_bibtex(self.note),
        }
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
        return "\n".join([f"@{'software' if self.version else 'misc'}{{{self.key},", *lines, "}"])


def escape_bibtex(text: str) -> str:
    """A text with BibTeX's special characters escaped."""
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def citations_of(text: str, key: str) -> list[Citation]:
    """The works named in an encoding's citation, in order; if there are none, the citation's text as a note.

    citations.json contains the works, by arXiv number or by name. The first work gets the ``key``, later ones the key
    with a number.
    """
    works = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    matches = sorted(filter(text.__contains__, works), key=text.index)
    citations = [Citation(key, **works[name]) for name in matches] or [Citation(key, (), note=text)]
    return [replace(citation, key=f"{key}-{n}" if n > 1 else key) for n, citation in enumerate(citations, 1)]
