"""Works that are cited: in words, as BibTeX, and those that the encodings' citations name."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from toeplens import encodings
from toeplens.utils import citations
from toeplens.utils.citations import Citation, citations_of, escape_bibtex


def test_citations_match_the_arxiv_numbers_in_encodings():
    known = json.loads(Path(citations.__file__).with_suffix(".json").read_text())
    texts = [encodings.get(name).citation for name in encodings.names()]
    assert [name for name in known if not any(name in text for text in texts)] == []
    for text in texts:
        numbers = re.findall(r"arXiv (\d{4}\.\d{5})", text)
        actual = citations_of(text, "key")
        assert [work.arxiv for work in actual if work.arxiv] == numbers
        assert [work.key for work in actual] == ["key", "key-2"][: len(actual)]
        for work in actual:  # the author's and the year's are the citation's own
            if work.arxiv and f"after arXiv {work.arxiv}" not in text:
                assert f"{work.authors[0].strip('{}')}{' et al.' if len(work.authors) > 1 else ''} {work.year}" in text


def test_a_citation_as_bibtex_and_as_text():
    (work,) = citations_of("Su et al. 2021, arXiv 2104.09864", "rope")
    assert work.bibtex() == (
        "@misc{rope,\n  author = {Su and others},\n"
        "  title = {{RoFormer: Enhanced Transformer with Rotary Position Embedding}},\n"
        "  year = {2021},\n  eprint = {2104.09864},\n  archiveprefix = {arXiv},\n}"
    )
    work = Citation("k", ("Last, First", "{Two Words}, Ann", "others"), "A title", 2025, "2501.00001")
    assert work.text() == "First Last, Ann Two Words et al. (2025). A title. arXiv:2501.00001."
    program = Citation("p", ("{The authors}",), "p & q", version="1")
    assert program.text() == "The authors. p & q. version 1."
    assert r"@software{p,\n  author = {{The authors}},\n  title = {{p \& q}},".replace(r"\n", "\n") in program.bibtex()


def test_an_unknown_citation_becomes_a_note():
    (work,) = citations_of("mine", "own")
    assert work.bibtex() == "@misc{own,\n  note = {mine},\n}"
    assert work.text() == "mine."


@given(st.text(st.characters(codec="ascii", exclude_categories=("Cc",))))
def test_bibtex_has_balanced_braces_and_escaped_characters(text: str):
    bare = re.sub(r"\\text[a-z]+\{\}|\\[{}$&#%_]", "", escape_bibtex(text))
    assert not set(bare) & set('\\{}$&#%_~^"')
