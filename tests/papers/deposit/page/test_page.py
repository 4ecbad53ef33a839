"""The report renders in every state a study can be in, says what the state says, and needs nothing but itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from tests.papers.deposit.worlds import make_study
from tests.report.reading import Text, figures, without_plotly

from toeplens.lens import over_seeds
from toeplens.papers.deposit import SCALES, Reproduction, claims_of
from toeplens.papers.deposit.measured import concentrated, factor_table
from toeplens.papers.deposit.page import blocks, reproduction_page
from toeplens.papers.deposit.page.accuracy import convergence, partial_rope, rotated_heads
from toeplens.papers.deposit.page.style import colour, glyph, interval, marker, name
from toeplens.papers.deposit.spec import PARTS, Label
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.page import Page, write_report
from toeplens.report.kit.tables import Table
from toeplens.studies import RULE, Finding, Key
from toeplens.studies.kit.verdicts import verdict_text
from toeplens.training.presets import DISTANCE, PROTOCOLS

CLAIMS = claims_of(["core"])
HOSTILE = "<script>alert(1)<&\"'><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def page(study: Reproduction) -> str:
    return without_plotly(reproduction_page(study).html())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    """Every part, two seeds, all measures."""
    return make_study(tmp_path_factory.mktemp("whole"), seeds=2, parts=("all",), measured=True)


@pytest.fixture(scope="module")
def shown(whole: Reproduction) -> Page:
    return reproduction_page(whole)


def panels(block: Block) -> list[Any]:
    return [panel.figure for _, panel in block.places]


def rows(table: Table) -> dict[str, list[str]]:
    return {row[0].plain: [cell.whole for cell in row[1:]] for row in table.body}


# ---- states ----------------------------------------------------------------------------------------------------------


def test_a_complete_study(study: Reproduction, page: str) -> None:
    path = write_report(study.directory, reproduction_page(study))
    assert [child.name for child in study.directory.iterdir()] == ["report.html"], "no temporary file is left"
    assert path.read_text() == reproduction_page(study).html(), "the same state gives the same page"
    path.unlink()
    assert "Not complete" not in page
    assert "default-src 'none'" in page, "the browser is told to refuse any request"
    reader = Text(page)
    links = [value or "" for _, key, value in reader.attributes if key in ("src", "href", "action", "data", "poster")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert all(" ".join(claim.rule.split()) in reader.text for claim in CLAIMS)
    assert all(" ".join(line.split()) in reader.text for entry in study.entries for line in entry.evidence)
    for claim, row in zip(CLAIMS, reader.tables["Claims ledger"][1:], strict=True):
        verdicts = [entry.verdict for entry in study.entries if entry.claim.id == claim.id]
        assert all(cell.strip().startswith(verdict_text(each)) for cell, each in zip(row[-2:], verdicts, strict=True))
    assert RULE in reader.text
    plots = {value for tag, key, value in reader.attributes if (tag, key) == ("div", "id") and value in figures(page)}
    assert plots == set(figures(page)) == {place for block in blocks(study).values() for place, _ in block.places}
    for part in ("factors", "mla", "seeds", "training"):
        assert f'id="{part}"' not in page


def test_an_empty_and_an_unfinished_study(tmp_path: Path) -> None:
    state = make_study(tmp_path, finished=0, parts=("all",))
    text = Text(without_plotly(reproduction_page(state).html())).text
    assert f"0 of {state.total} cells are finished (0% of the steps)" in text
    assert "Paper protocol: not decided. No finished RoPE model can be judged." in text
    assert "Nothing to show: this figure needs finished models." in text
    some = make_study(tmp_path, finished=5)
    text = Text(without_plotly(reproduction_page(some).html())).text
    assert f"5 of {some.total} cells are finished ({100 * some.share:.3g}% of the steps)" in text
    assert "Not finished yet" in text


def test_diverged_runs_have_no_accuracy(tmp_path: Path) -> None:
    state = make_study(tmp_path, diverged={Key("paper", DISTANCE, "rope", 42)})
    reader = Text(without_plotly(reproduction_page(state).html()))
    assert "1 run diverged" in reader.text
    assert "diverged (1 of 1)" in reader.tables["Accuracy, Task 1 (distance)"][2]
    (row,) = [row for row in reader.tables["Models"] if row[0] == "RoPE" and row[4] == "diverged"]
    assert row[6:8] == ["–", "–"]
    keys = {cell.key for cell in make_study(tmp_path).plan.cells()}
    assert "runs diverged" in Text(reproduction_page(make_study(tmp_path, diverged=keys)).html()).text


def test_a_study_of_the_ladder_alone_has_no_empty_sections(tmp_path: Path) -> None:
    page = reproduction_page(make_study(tmp_path, scale="desk", protocols=("paper",), parts=("ladder",))).html()
    assert 'id="ladder"' in page
    for id in ("accuracy", "heads", "deposit", "partial", "sinusoid"):
        assert f'id="{id}"' not in page
        assert f'href="#{id}"' not in page


def test_hostile_text_is_escaped_everywhere(tmp_path: Path) -> None:
    state = make_study(tmp_path / HOSTILE.replace("/", ""), finished=3)
    entries = [replace(entry, findings=(Finding("holds", HOSTILE),)) for entry in state.entries]
    environment = dict.fromkeys(state.environment, HOSTILE + "</script>") | {"seconds": 1.0}
    page = without_plotly(reproduction_page(replace(state, entries=entries, environment=environment)).html())
    assert HOSTILE not in page
    assert "<img" not in page
    assert str(escape(HOSTILE)) in page
    assert not [value for _, key, value in Text(page).attributes if key.startswith("on")]


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_the_settings_of_every_scale_are_told_beside_the_papers(tmp_path: Path, scale: str) -> None:
    state = make_study(tmp_path, scale=scale, protocols=("released",), finished=3)
    found = rows(reproduction_page(state).tables["settings"])
    assert found["learning rate schedule after warm-up"][0] == "cosine"
    assert all(paper == ours for paper, ours, _ in found.values()) == (scale == "paper")
    assert [differs for *_, differs in found.values()] == ["yes" if a != b else "–" for a, b, _ in found.values()]
    chance, length = convergence(state.results, "released", DISTANCE, "test").layout.annotations
    assert length.y - chance.y or length.yshift - chance.yshift, "labels of guesses do not run into each other"


def test_the_tables_cells_are_the_factor_studys(whole: Reproduction, shown: Page) -> None:
    effects = {table.name: table for key, table in shown.tables.items() if key.startswith("effects-")}
    table = effects["Effects, Task 1 (distance), test accuracy, all other switches as in the released code"]
    every = factor_table(whole.results, whole.plan.protocols)
    row = next(r for r in every if (r.task, r.base, r.switch, r.end) == (DISTANCE, "rope", "readout", "released"))
    assert rows(table)["readout from the last token"][table.columns().index("RoPE") - 1] == interval(
        row.effect("accuracy")
    )
    assert list(rows(table))[-1].startswith("remainder")
    assert interval(over_seeds(np.array([-0.1, 0.0, 0.04]))) == "−2.0 [−19.9, 15.9]"
    assert interval(over_seeds(np.array([0.123]))) == "+12.3 (one seed)"


# ---- names and figures -----------------------------------------------------------------------------------------------


def test_every_label_has_a_name_of_its_own_and_the_look_of_its_encoding() -> None:
    for scale in SCALES.values():
        for protocol in PROTOCOLS:
            labels = {label for part in PARTS.values() for _, label in part.places(scale, protocol)}
            assert len({name(protocol, label) for label in labels}) == len(labels)
            for label in labels:
                base = str(replace(Label.parse(label), variant="")) if Label.parse(label).variant else label
                assert (colour(label), marker(label), glyph(label)) == (colour(base), marker(base), glyph(base))


def test_partial_rope_ends_in_nope_and_in_rope_without_sinusoid(study: Reproduction) -> None:
    ends = {p: rotated_heads(study.results, p, DISTANCE, 4) for p in study.plan.protocols}
    assert ends["paper"] == [(0, "nope"), (1, "partial-1"), (4, "rope")]
    assert ends["released"] == [(0, "nope"), (1, "partial-1"), (4, "rope-alone")]
    line = partial_rope(study.results, "released", DISTANCE, 4).data[0]
    assert line.y[-1] == study.results.under("released").accuracy(DISTANCE, "rope-alone")[0]


def test_figures_are_of_the_measures(whole: Reproduction, shown: Page) -> None:
    """One number of each figure of a part against the state; every plot is described."""
    assert all(len(panel.alternative) > 20 for block in shown.blocks.values() for _, panel in block.places)
    cells = whole.results.under("paper").of(DISTANCE, "rope")
    violin = panels(shown.blocks["deposit-encodings"])[0].data[0]
    assert list(violin.y) == [layer[1].peak for cell in cells if (layer := concentrated(cell))]
    factors = panels(shown.blocks["factors"])[0]
    mine = [r for r in factor_table(whole.results, PROTOCOLS) if (r.task, r.base) == (DISTANCE, "nope")]
    for end in PROTOCOLS:
        effects = [effect for row in mine if row.end == end and (effect := row.effect("accuracy"))]
        means = next(trace for trace in factors.data if trace.meta == end and trace.error_x.array is not None)
        np.testing.assert_allclose(means.x, [100 * effect.value for effect in effects])
        np.testing.assert_allclose(means.error_x.array, [100 * (effect.high - effect.value) for effect in effects])
    peaks = panels(shown.blocks["partial-peaks"])[0]
    drawn = [c for c in whole.results.under("paper").of(DISTANCE, "partial-2/random") if concentrated(c)]
    expected = np.mean([[layer.peak for layer in cell.deposits()] for cell in drawn], axis=0)
    np.testing.assert_allclose(peaks.data[0].z[list(peaks.layout.yaxis.ticktext).index("2 at random")], expected)
    training = panels(shown.blocks["training"])[0].data
    watched = [row for row in cells[0].watched if row.get("drops")]
    assert list(training[0].y) == [round(row["accuracy"], 4) for row in watched]
    np.testing.assert_allclose(training[1].y[: len(watched)], [row["drops"][0][0] for row in watched], atol=1e-4)
    exponents = panels(shown.blocks["seed-training"])[0]
    mean = [trace for trace in exponents.data if trace.meta == "layer-2"][2]
    by_seed = [[np.mean(row["exponent"][1]) for row in cell.watched] for cell in cells]
    np.testing.assert_allclose(mean.y, np.mean(by_seed, axis=0), atol=1e-4)
    ablation = cells[0].ablation
    assert ablation is not None
    place = (100 * ablation.drops[1, 2], 100 * cells[0].measures["position"]["drops"][1][2])
    points = [p for trace in panels(shown.blocks["position"])[0].data for p in zip(trace.x, trace.y, strict=True)]
    assert tuple(round(each, 2) for each in place) in points
