"""Works that are cited: in words, as BibTeX, and out of the citations of encodings."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from toeplens import encodings
from toeplens.ground.titles import TITLES
from toeplens.ground.works import Work, bib, works_in


def test_a_citation_in_words_is_taken_apart():
    first, second = works_in("Black et al. 2022, arXiv 2204.06745; Shiv and Quirk 2019, Novel & new (NeurIPS)", "both")
    assert (first.key, first.authors, first.year, first.eprint) == ("both", ("Black", "others"), 2022, "2204.06745")
    assert (second.key, second.authors, second.eprint) == ("both-2", ("Shiv", "Quirk"), "")
    assert second.note == "Novel & new (NeurIPS)".strip("()")
    assert r"Novel \& new" in second.bibtex()


def test_every_encodings_citation_is_an_entry_with_its_number():
    for name in encodings.names():
        citation = encodings.get(name).citation
        works = works_in(citation, name)
        assert works
        numbers = re.findall(r"(?:^|; )[^,;]+ \d{4}, arXiv (\d{4}\.\d{5})", citation)
        assert [work.eprint for work in works if work.eprint] == numbers, name
        for work in works:
            first = "author" if re.match(r"\D+ \d{4},", citation) else "note"
            assert re.match(rf"@misc{{{re.escape(work.key)},\n  {first} = ", work.bibtex())


def test_titles_are_of_papers_that_encodings_cite():
    cited = " ".join(encodings.get(name).citation for name in encodings.names())
    assert [number for number in TITLES if number not in cited] == []
    (work,) = works_in(encodings.get("rope").citation, "rope")
    assert "title = {{RoFormer: Enhanced Transformer with Rotary Position Embedding}}" in work.bibtex()


def test_a_citation_that_names_no_authors_is_a_note():
    (work,) = works_in("mine", "own")
    assert work.bibtex() == "@misc{own,\n  note = {mine},\n}"
    assert work.words() == "mine."
    (work,) = works_in("Black et al. 2022, arXiv 2204.06745; gains are ours", "own")
    assert (work.eprint, work.note) == ("2204.06745", "gains are ours")


def test_a_work_in_words():
    work = Work("k", ("Last, First", "{Two Words}, Ann", "others"), "A title", 2025, "2501.00001")
    assert work.words() == "First Last, Ann Two Words et al. (2025). A title. arXiv:2501.00001."
    assert Work("p", ("{The authors}",), "p", version="1").words() == "The authors. p. version 1."


@given(st.text(st.characters(codec="ascii", exclude_categories=("Cc",))))
def test_bibtex_has_balanced_braces_and_no_bare_specials(text: str):
    made = bib(text)
    bare = re.sub(r"\\text[a-z]+\{\}|\\[{}$&#%_]", "", made)
    assert not set(bare) & set('\\{}$&#%_~^"')
