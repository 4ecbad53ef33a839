"""The report says what the study's state says, for every state a study can be in, and needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from tests.report.reading import Text, without_plotly

from toeplens.ground.words import percent, points
from toeplens.papers.deposit import PAPER_TABLE_1, SCALES, Reproduction, claims_of
from toeplens.papers.deposit.page import render, write_page
from toeplens.papers.deposit.page.accuracy import convergence
from toeplens.papers.deposit.page.look import TASKS, name
from toeplens.papers.deposit.page.page import blocks
from toeplens.papers.deposit.page.partial import partial_rope, rotated_heads
from toeplens.papers.deposit.page.tables import settings
from toeplens.papers.deposit.page.words import headline, largest_drop
from toeplens.papers.deposit.recorded import recorded
from toeplens.report.kit.packing import unpack
from toeplens.studies import RULE, Finding, Key
from toeplens.training.presets import DISTANCE

Make = Callable[..., Reproduction]
CLAIMS = claims_of(["core"])


@pytest.fixture(scope="module")
def study(make_study: Make, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return make_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def page(study: Reproduction) -> str:
    return without_plotly(render(study))


def test_the_page_is_written_whole_into_the_studys_directory(study: Reproduction) -> None:
    path = write_page(study)
    assert path == study.directory / "report.html"
    assert [child.name for child in study.directory.iterdir()] == ["report.html"], "no temporary file is left"
    assert path.read_text() == render(study), "the same state gives the same page"
    path.unlink()


def test_nothing_outside_the_page_is_referred_to(page: str) -> None:
    plain = re.sub(r'(?m)^\s*//.*$|(?<=id="figures">)[^<]*|"http://www.w3.org/2000/svg"', "", page)  # a namespace
    assert not re.search(r"(https?:)?//[a-z]", plain), "no address anywhere"
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    for tag, key, value in Text(page).attributes:
        if key in ("src", "href", "srcset", "action", "data", "poster"):
            assert (value or "").startswith(("#", "data:")), f"<{tag} {key}={value!r}>"
    assert "default-src 'none'" in page, "the browser is told to refuse any request"


def test_every_claim_is_there_with_rule_verdicts_and_evidence(study: Reproduction, page: str) -> None:
    text = Text(page).text
    for claim in CLAIMS:
        assert claim.id in text
        assert " ".join(claim.statement.split()) in text
        assert " ".join(claim.rule.split()) in text
    for entry in study.entries:
        assert all(" ".join(line.split()) in text for line in entry.evidence)
    rows = Text(page).tables["Claims ledger"][1:]
    assert len(rows) == len(CLAIMS)
    for claim, row in zip(CLAIMS, rows, strict=True):
        verdicts = [entry.verdict for entry in study.entries if entry.claim.id == claim.id]
        places = [(claim.id, protocol) for protocol in study.plan.protocols]
        told = [[f"{found[0]}, {found[1]}: {found[2]}" for found in recorded().get(at, ())[:1]] for at in places]
        assert [cell.strip() for cell in row[-2:]] == [
            "".join([v, *more]) for v, more in zip(verdicts, told, strict=True)
        ]
    assert RULE in text


def test_the_headline_counts_the_verdicts(study: Reproduction) -> None:
    said = headline(study)
    assert f"Of the {len(CLAIMS)} claims" in said
    for protocol in study.plan.protocols:
        held = sum(entry.verdict == "leans to hold" for entry in study.entries if entry.protocol == protocol)
        assert re.search(rf"{protocol} protocol {held or 'none'} leans? to hold\b", said)
    assert said.endswith(
        "It takes 5 seeds to decide; beside a claim stands what the records found, where they have it."
    )
    assert recorded().keys() & {(entry.claim.id, entry.protocol) for entry in study.entries}
    ours = [replace(entry, claim=replace(entry.claim, id="ours")) for entry in study.entries]
    assert headline(replace(study, entries=ours)).endswith("It takes 5 seeds to decide.")
    assert headline(replace(study, entries=[])) == "No claim is asked of what was trained here."
    five = headline(replace(study, plan=replace(study.plan, seeds=5)))
    assert re.search(r"paper protocol (\d+|none) holds? and (\d+|none) fails?;", five)


def test_the_summary_names_the_winners_and_the_largest_drop(study: Reproduction, page: str) -> None:
    text = Text(page).text
    for protocol in study.plan.protocols:
        for task in TASKS:
            rows = [row for row in study.table if (row.protocol, row.task) == (protocol, task)]
            best = max(rows, key=lambda row: row.accuracy or 0)
            assert f"{protocol.capitalize()} protocol: {name(protocol, best.label)} ({percent(best.accuracy)})" in text
    largest = max(float(cell.ablation.drops.max()) for cell in study.results.cells if cell.ablation)
    found = largest_drop(study.results.cells)
    assert found is not None
    assert found.value == largest
    assert f"{points(largest)} points" in text


def test_table_one_has_the_states_numbers_beside_the_papers(study: Reproduction, page: str) -> None:
    tables = Text(page).tables
    for task, heading in TASKS.items():
        rows = {row[0].split(" ", 1)[1].removesuffix("a").strip(): row for row in tables[f"Accuracy, {heading}"][2:-2]}
        assert len(rows) == len({row.label for row in study.table if row.task == task})
        for row in (row for row in study.table if row.task == task):
            printed = rows[row.title]
            told = PAPER_TABLE_1.get((task, row.label))
            assert printed[1] == ("–" if told is None else f"{told:.2f}")
            assert f"{100 * (row.accuracy or 0):.1f}" in printed
            assert any(cell.startswith(points(row.largest_drop or 0)) for cell in printed)
        guesses = tables[f"Accuracy, {heading}"][-2:]
        plain = [row for row in study.table if row.task == task and row.label != "mla"]  # of whose program more counts
        under = [next(row for row in plain if row.protocol == protocol) for protocol in study.plan.protocols]
        assert [cell for cell in guesses[0] if cell][1:] == [f"{100 * row.chance:.1f}" for row in under]
        assert [cell for cell in guesses[1] if cell][1:] == [f"{100 * row.length_chance:.1f}" for row in under]


def test_deposits_are_the_lenses(study: Reproduction, page: str) -> None:
    tables = Text(page).tables
    cell = study.results.under("paper").of(DISTANCE, "rope")[0]
    kinds = tables["Kinds of layers, Task 1 (distance), paper protocol"][1]
    assert [kind.strip() for kind in kinds[1:]] == [layer.kind for layer in cell.deposits()]
    printed = tables["Deposit figures, Task 1 (distance), paper protocol"][1][-9:]
    first = cell.deposits()[0]
    assert printed[:4] == ["1", first.kind, str(first.head + 1), f"{first.peak:.2f}"]


def test_settings_that_differ_from_the_papers_are_marked(page: str) -> None:
    rows = {row[0]: row[1:] for row in Text(page).tables["Settings"][1:]}
    assert rows["width of the model (d_model)"] == ["256", "32", "yes"]
    assert rows["learning rate (lr)"] == ["0.0001", "0.003", "yes"]
    assert rows["dropout"] == ["0.1", "0", "yes"]
    assert rows["weight decay"][-1] == "–"


def test_a_complete_study_has_no_banner(page: str) -> None:
    assert "Not complete" not in page


def test_a_part_that_is_not_asked_for_has_no_section(page: str) -> None:
    for part in ("factors", "mla", "seeds", "training"):
        assert f'id="{part}"' not in page
        assert f'href="#{part}"' not in page
    assert 'id="figure-deposit-encodings"' in page
    assert "partial-peaks" not in page


def test_an_unfinished_study_says_so_and_shows_what_there_is(make_study: Make, tmp_path: Path) -> None:
    state = make_study(tmp_path, finished=5)
    text = Text(without_plotly(render(state))).text
    assert f"5 of {state.total} cells are finished ({100 * state.share:.3g}% of the steps)" in text
    assert "not finished" in text
    assert "Not finished yet" in text


@pytest.mark.parametrize("protocols", [("paper",), ("released",), ("paper", "released")])
def test_an_empty_study_renders(make_study: Make, tmp_path: Path, protocols: tuple[str, ...]) -> None:
    state = make_study(tmp_path, finished=0, protocols=protocols)
    text = Text(without_plotly(render(state))).text
    assert f"0 of {state.total} cells are finished (0% of the steps)" in text
    assert "nothing has come out so far" in text
    assert all(claim.id in text for claim in CLAIMS), "every claim is there, undecided"


def test_a_diverged_run_is_shown_as_such(make_study: Make, tmp_path: Path) -> None:
    gone = Key("paper", DISTANCE, "rope", 42)
    page = without_plotly(render(make_study(tmp_path, diverged={gone})))
    reader = Text(page)
    assert "1 run diverged" in reader.text
    assert "diverged (1 of 1)" in reader.tables["Accuracy, Task 1 (distance)"][2]
    assert "Diverged: RoPE (seed 42)" in reader.text
    models = [row for row in reader.tables["Models"] if row[0] == "RoPE" and row[4] == "diverged"]
    assert len(models) == 1
    assert models[0][6:8] == ["–", "–"], "no accuracy is claimed for it"


def test_only_diverged_runs_render(make_study: Make, tmp_path: Path) -> None:
    keys = {cell.key for cell in make_study(tmp_path).plan.cells()}
    state = make_study(tmp_path, diverged=keys)
    assert f"{state.total} runs diverged" in Text(render(state)).text


HOSTILE = "<script>alert(1)<&\"'><img src=x onerror=alert(2)>"


def test_hostile_text_is_escaped_everywhere(make_study: Make, tmp_path: Path) -> None:
    state = make_study(tmp_path / HOSTILE.replace("/", ""), finished=3)
    entries = [replace(entry, findings=(Finding("holds", HOSTILE),)) for entry in state.entries]
    environment = dict.fromkeys(state.environment, HOSTILE + "</script>") | {"seconds": 1.0}
    page = without_plotly(render(replace(state, entries=entries, environment=environment)))
    assert HOSTILE not in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert str(escape(HOSTILE)) in page
    assert not [value for _, key, value in Text(page).attributes if key.startswith("on")]


def test_the_plots_data_cannot_leave_its_element(study: Reproduction, page: str) -> None:
    data = re.search(r'<script type="text/plain" id="figures">(.*?)</script>', page, re.DOTALL)
    assert data
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", data[1])
    plots = json.loads(unpack(data[1]))
    wanted = {place for block in blocks(study).values() for place, _ in block.places}
    assert set(plots) == wanted
    drawn = {value for tag, key, value in Text(page).attributes if (tag, key) == ("div", "id") and value in plots}
    assert drawn == wanted, "every plot has its place"


def test_every_plot_has_its_words(page: str) -> None:
    reader = Text(page)
    places_with_words = [v for t, k, v in reader.attributes if t == "div" and k == "aria-label" and v and len(v) > 30]
    plots = [value for tag, key, value in reader.attributes if (tag, key, value) == ("div", "class", "plot")]
    assert len(places_with_words) >= len(plots)


# --- the figures ---


def _traces(figure: Any, kind: str) -> list[Any]:
    return [trace for trace in figure.data if trace.type == kind]


def test_all_heat_maps_share_one_scale(study: Reproduction) -> None:
    shown = blocks(study)
    panels = [panel.figure for block in (shown["heads"], shown["sinusoid"]) for _, panel in block.places]
    limits = {figure.layout.coloraxis.cmax for figure in panels if _traces(figure, "heatmap")}
    assert len(limits) == 1
    assert limits.pop() >= max(float(abs(c.ablation.drops).max()) for c in study.results.cells if c.ablation)


def test_partial_rope_ends_in_nope_and_in_rope_without_sinusoid(study: Reproduction) -> None:
    ends = {p: rotated_heads(study.results, p, DISTANCE, 4) for p in study.plan.protocols}
    assert ends["paper"] == [(0, "nope"), (1, "partial-1"), (4, "rope")]
    assert ends["released"] == [(0, "nope"), (1, "partial-1"), (4, "rope-alone")]
    line = partial_rope(study.results, "released", DISTANCE, 4).data[0]
    assert line.y[-1] == study.results.under("released").accuracy(DISTANCE, "rope-alone")[0]


@pytest.mark.parametrize("scale", SCALES)
def test_labels_of_guesses_do_not_run_into_each_other(make_study: Make, tmp_path: Path, scale: str) -> None:
    state = make_study(tmp_path, scale=scale, protocols=("released",), finished=3)
    figure = convergence(state.results, "released", DISTANCE, "test")
    chance, length = figure.layout.annotations
    pixels = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    low, high = (note.y * pixels / 1.05 + note.yshift for note in (chance, length))
    assert high - low >= 12


@pytest.mark.parametrize("scale", SCALES)
def test_the_settings_of_every_scale_are_told_beside_the_papers(make_study: Make, tmp_path: Path, scale: str) -> None:
    told = {text: (paper, ours) for text, paper, ours in settings(make_study(tmp_path, scale=scale, finished=3))}
    assert told["learning rate after the warm-up"][0] == "cosine"
    assert all(paper == ours for paper, ours in told.values()) == (scale == "paper")
    plateau = told["training ends at the plateau"]
    assert plateau == ("–", "gain 0.05, patience 3" if scale == "desk" else "–")
