"""How toeplens is cited: the same facts on the command line, in CITATION.cff and in the package's metadata."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from tests.builders import tiny
from tests.cli.command import Toeplens

from toeplens.cli.export import AUTHORS, LICENSE, TITLE
from toeplens.papers.deposit import PAPER as DEPOSIT
from toeplens.papers.positional_symbolic import PAPER as SYMBOLIC
from toeplens.training import train
from toeplens.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_citation_file_says_the_same():
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (said["cff-version"], said["type"]) == ("1.2.0", "software")
    assert (said["title"], said["authors"], said["license"]) == (TITLE, [{"name": AUTHORS}], LICENSE)
    assert str(said["version"]) == __version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (project["name"], project["license"]) == (TITLE, LICENSE)
    for work, there in zip((DEPOSIT, SYMBOLIC), said["references"], strict=True):
        assert (work.title, work.year) == (there["title"], there["year"])
        assert f"arXiv:{work.arxiv}" == there["identifiers"][0]["value"]
        names = [f"{each['family-names']}, {each['given-names']}" for each in there["authors"]]
        assert names == [author.replace("{", "").replace("}", "") for author in work.authors]


def test_what_is_cited(toeplens: Toeplens):
    said = toeplens("cite").out
    assert f"version {__version__}" in said
    assert "arXiv:2505.13027" in said
    assert "arXiv:2511.11579" in said
    entries = re.findall(r"^@(\w+)\{([\w-]+),$", toeplens("cite", "--bibtex").out, re.MULTILINE)
    assert entries == [("software", "toeplens"), ("misc", DEPOSIT.key), ("misc", SYMBOLIC.key)]


def test_every_part_of_a_runs_encoding_is_cited_too(toeplens: Toeplens, tmp_path: Path):
    run = train(tiny("rope + fox"), tmp_path)
    said = toeplens("cite", run.directory)
    assert re.search(r"^  rope: Su et al\. 2021, arXiv 2104\.09864$", said.out, re.MULTILINE)
    assert [work["key"] for work in toeplens("cite", run.directory, "--json").json()["encodings"]] == ["rope", "fox"]


def test_a_recorded_studys_encodings_are_cited(toeplens: Toeplens):
    made = toeplens("cite", ROOT / "results" / "canonical", "--json").json()
    numbers = [re.search(r"arXiv:([\d.]+\d)", work["words"]) for work in made["encodings"]]
    known = [number[1] for number in numbers if number]
    assert "2104.09864" in known
    assert len(known) == len(set(known))
    assert "2505.13027" not in known, "it is among the papers"
