"""Works that are cited: in words, as BibTeX, and those that the encodings' citations name."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from toeplens import encodings
from toeplens.ground import citations
from toeplens.ground.citations import Citation, citations_of, escaped


def test_every_arxiv_number_that_encodings_cite_is_a_work_in_its_order_and_none_is_idle():
    known = json.loads(Path(citations.__file__).with_suffix(".json").read_text())
    texts = [encodings.get(name).citation for name in encodings.names()]
    assert [name for name in known if not any(name in text for text in texts)] == []
    for text in texts:
        numbers = re.findall(r"arXiv (\d{4}\.\d{5})", text)
        found = citations_of(text, "key")
        assert [work.arxiv for work in found if work.arxiv] == numbers
        assert [work.key for work in found] == ["key", "key-2"][: len(found)]
        for work in found:  # the author's and the year's are the citation's own
            if work.arxiv and f"after arXiv {work.arxiv}" not in text:
                assert f"{work.authors[0].strip('{}')}{' et al.' if len(work.authors) > 1 else ''} {work.year}" in text


def test_a_work_as_bibtex_and_in_words():
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


def test_what_names_no_known_work_is_a_note():
    (work,) = citations_of("mine", "own")
    assert work.bibtex() == "@misc{own,\n  note = {mine},\n}"
    assert work.text() == "mine."


@given(st.text(st.characters(codec="ascii", exclude_categories=("Cc",))))
def test_bibtex_has_balanced_braces_and_no_bare_specials(text: str):
    bare = re.sub(r"\\text[a-z]+\{\}|\\[{}$&#%_]", "", escaped(text))
    assert not set(bare) & set('\\{}$&#%_~^"')
