"""The page of a study with all its parts: variants do not crowd the encodings, and each part has its own figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toeplens.lens import over_seeds
from toeplens.lens.gradients.signal import margins
from toeplens.papers.deposit import SCALES, Reproduction
from toeplens.papers.deposit.factors import concentrated, factor_table
from toeplens.papers.deposit.labels import Label
from toeplens.papers.deposit.page import look, render
from toeplens.papers.deposit.page.deposits import by_encoding
from toeplens.papers.deposit.page.factors import sentences, tables
from toeplens.papers.deposit.page.look import TASKS, colour, glyph, interval, marker, name, ordered, plain
from toeplens.papers.deposit.page.mla import tables as variant_tables
from toeplens.papers.deposit.page.page import blocks
from toeplens.papers.deposit.page.partial import rotated_heads
from toeplens.papers.deposit.page.seeds import strength_of
from toeplens.papers.deposit.page.training import moments
from toeplens.papers.deposit.page.words import answers
from toeplens.papers.deposit.questions import PARTS
from toeplens.report.kit.blocks import Block
from toeplens.report.kit.dots import told_mean
from toeplens.studies import CellResult, Results
from toeplens.training.presets import COUNT, DISTANCE, PROTOCOLS

Make = Callable[..., Reproduction]


@pytest.fixture(scope="module")
def whole(make_study: Make, tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    """Every part, two seeds, all measures."""
    return make_study(tmp_path_factory.mktemp("whole"), seeds=2, parts=("all",), measured=True)


@pytest.fixture(scope="module")
def shown(whole: Reproduction) -> dict[str, Block]:
    return blocks(whole)


def panels(block: Block) -> list[Any]:
    return [panel.figure for _, panel in block.places]


def points_of(figure: Any, kind: str = "scatter") -> list[tuple[float, float]]:
    """All points of a figure's traces of a kind."""
    traces = [trace for trace in figure.data if trace.type == kind and trace.x is not None]
    return [point for trace in traces for point in zip(trace.x, trace.y, strict=True)]


# --- names and looks ---


def test_every_label_of_every_grid_has_a_name_and_the_look_of_its_encoding() -> None:
    for scale in SCALES.values():
        for protocol in PROTOCOLS:
            labels = {label for part in PARTS.values() for _, label in part.places(scale, protocol)}
            names = [name(protocol, label) for label in labels]
            assert len(set(names)) == len(names), "no two labels share a name"
            for label in labels:
                look_of = (colour(label), marker(label), glyph(label))
                assert all(look_of)
                if Label.parse(label).variant:
                    base = str(replace(Label.parse(label), variant=""))
                    assert look_of == (colour(base), marker(base), glyph(base))


def test_a_variant_is_named_by_what_it_sets_under_its_protocol() -> None:
    assert name("paper", "nope/mask") == "NoPE, bidirectional"
    assert name("released", "nope/mask") == "NoPE, causal"
    assert name("released", "rope/mask") == "RoPE (with sinusoid), causal"
    assert name("released", "rope/input") == "RoPE, nothing added at the input"
    assert name("released", "rope/layer-2") == "RoPE in layer 2 alone"


def test_labels_are_in_order_with_variants_after_their_encoding() -> None:
    labels = ["nope", "nope/mask", "partial-15", "partial-3", "rope/mask", "rope", "mla", "partial-2/random"]
    expected = ["rope", "rope/mask", "partial-2/random", "partial-3", "partial-15", "mla", "nope", "nope/mask"]
    assert ordered(labels) == expected


# --- variants and the general figures ---


def test_the_general_figures_are_those_of_the_core_and_the_others(whole: Reproduction, shown: dict[str, Block]) -> None:
    keys = look.plain_keys(whole.plan)
    assert {cell.key for cell in plain(whole).results.cells} == set(keys)
    assert {(row.protocol, row.task, row.label) for row in plain(whole).table} == {astuple(key)[:3] for key in keys}
    core = {"rope", "nope", "mla", "rope-absolute", "rope-alone", "partial-1"}
    assert {key.label for key in keys} == core | {"random", "alibi", "relative", "absolute"}
    names = {name(key.protocol, key.label) for key in keys}
    assert {panel.title for id in ("heads", "violins", "cumulative") for _, panel in shown[id].places} == names
    for id in ("accuracy", "skill", f"convergence-{DISTANCE}"):
        assert {trace.meta for figure in panels(shown[id]) for trace in figure.data} <= {None, *(k.label for k in keys)}


def test_each_part_has_a_section_and_an_entry_in_the_contents(make_study: Make, tmp_path: Path) -> None:
    state = make_study(tmp_path, protocols=("released",), parts=("all",), measured=True)
    page = render(state)
    for id in ("deposit", "factors", "partial", "sinusoid", "mla", "seeds", "training"):
        assert f'<section id="{id}">' in page
        assert f'<a href="#{id}">' in page
    numbers = re.findall(r"<figcaption><b>Figure (\d+)\.", page)
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1)), "numbered in the order of the page"
    models = re.search(r"All (\d+) models", page)
    assert models
    assert int(models[1]) == state.total, "the list at the end has every model"


def test_a_study_of_the_ladder_alone_has_no_empty_sections(make_study: Make, tmp_path: Path) -> None:
    state = make_study(tmp_path, scale="desk", protocols=("paper",), parts=("ladder",))
    page = render(state)
    assert 'id="ladder"' in page
    for id in ("accuracy", "heads", "deposit", "partial", "sinusoid"):
        assert f'id="{id}"' not in page
        assert f'href="#{id}"' not in page
    for nothing in (
        "No finished model shows anything",
        "no head silenced yet",
        "What the papers say",
        "From the papers",
    ):
        assert nothing not in page


def test_a_study_of_parts_without_models_renders(make_study: Make, tmp_path: Path) -> None:
    state = make_study(tmp_path, parts=("all",), finished=0)
    page = render(state)
    assert "No finished model shows anything for this figure yet" in page
    assert sentences(state) == []
    assert tables(state) == []


# --- the deposit by encoding ---


def test_a_violin_has_the_peak_of_every_seed(whole: Reproduction, shown: dict[str, Block]) -> None:
    figure = panels(shown["deposit-encodings"])[0]
    under = plain(whole).results.under("paper")
    violins = [trace for trace in figure.data if trace.type == "violin"]
    for place, label in enumerate(ordered(under.labels(DISTANCE))):
        layers = [found[1] for cell in under.of(DISTANCE, label) if (found := concentrated(cell))]
        assert list(violins[place].y) == [layer.peak for layer in layers]
        assert figure.layout.xaxis.ticktext[place] == name("paper", label)
    spread = next(f for f in panels(shown["deposit-encodings"])[1:] if f.layout.yaxis.title.text == "effective heads")
    assert len([trace for trace in spread.data if trace.type == "violin"]) == len(violins)


def test_models_without_skill_are_told_and_not_drawn(whole: Reproduction) -> None:
    cells = [cell for cell in whole.results.under("paper").cells if cell.key.label in ("rope", "nope")]
    flat = Results(_without_skill(cell) if cell.key.label == "nope" else cell for cell in cells)
    figure = panels(by_encoding(replace(whole, results=flat)))[0]
    assert [note.text for note in figure.layout.annotations] == ["no skill"]
    assert [len(trace.y) for trace in figure.data if trace.type == "violin"] == [2, 0]


def _without_skill(cell: CellResult) -> CellResult:
    assert cell.ablation is not None
    return replace(cell, ablation=replace(cell.ablation, baseline=cell.chance))


# --- the factor study ---


def test_the_tables_cells_are_the_factor_studys(whole: Reproduction) -> None:
    rows = factor_table(whole.results, whole.plan.protocols)
    found = {table.title: table for table in tables(whole)}
    table = found["Task 1 (distance), test accuracy, all other switches as in the program"]
    row = next(r for r in rows if (r.task, r.base, r.switch, r.end) == (DISTANCE, "rope", "readout", "released"))
    line = next(line for line in table.lines if line.title == "last token read")
    place = [base for base, _ in table.columns].index("rope")
    assert line.cells[place].text == interval(row.effect("accuracy"))
    paper = found["Task 1 (distance), test accuracy, all other switches as in the paper"]
    padding = next(line for line in paper.lines if line.title == "padding hidden")
    assert "no padding" in padding.cells[place].below
    drops = found["Task 1 (distance), largest loss by one head, all other switches as in the program"]
    assert re.fullmatch(r"single-head: \d → \d of 2", drops.lines[0].cells[0].below)
    assert [line.title for line in table.lines if line.sums][-1].startswith("left over")
    assert any(title.startswith(TASKS[COUNT]) for title in found)


def test_the_sentences_name_the_switch_that_moves_most(whole: Reproduction) -> None:
    rows = factor_table(whole.results, whole.plan.protocols)
    (said,) = (text for text in sentences(whole) if text.startswith("RoPE, Task 2"))
    here = [row for row in rows if (row.task, row.base) == (COUNT, "rope")]
    effects = {row.switch: row.effect("accuracy") for row in here}
    most = max((effect for effect in effects.values() if effect), key=lambda effect: abs(effect.value))
    assert f"by {interval(most)} points" in said
    assert ("not decided" in said) == (most.low <= 0 <= most.high)


def test_the_factor_figure_has_both_ends(whole: Reproduction, shown: dict[str, Block]) -> None:
    figure = panels(shown["factors"])[0]
    rows = [r for r in factor_table(whole.results, PROTOCOLS) if (r.task, r.base) == (DISTANCE, "nope")]
    for end in PROTOCOLS:
        effects = [effect for row in rows if row.end == end and (effect := row.effect("accuracy"))]
        means = next(trace for trace in figure.data if trace.meta == end and trace.error_x.array is not None)
        np.testing.assert_allclose(means.x, [100 * effect.value for effect in effects])
        np.testing.assert_allclose(means.error_x.array, [100 * (effect.high - effect.value) for effect in effects])


# --- RoPE on some heads, MLA, the measures ---


def test_partial_rope_keeps_the_first_heads_and_drawn_ones_apart(whole: Reproduction) -> None:
    first = rotated_heads(whole.results, "paper", DISTANCE, 4)
    drawn = rotated_heads(whole.results, "paper", DISTANCE, 4, drawn=True)
    assert [count for count, _ in first] == [0, 1, 2, 3, 4]
    assert drawn == [(1, "partial-1/random"), (2, "partial-2/random")]


def test_the_map_of_partial_ropes_peaks_is_the_mean_over_seeds(whole: Reproduction, shown: dict[str, Block]) -> None:
    figure = panels(shown["partial-peaks"])[0]
    rows = list(figure.layout.yaxis.ticktext)
    cells = [c for c in whole.results.under("paper").of(DISTANCE, "partial-2/random") if concentrated(c)]
    expected = np.mean([[layer.peak for layer in cell.deposits()] for cell in cells], axis=0)
    np.testing.assert_allclose(figure.data[0].z[rows.index("2 at random")], expected)
    assert "layer 1 alone" in rows


def test_mlas_table_has_each_variant_and_rope_in_its_program(whole: Reproduction) -> None:
    rows = {row.title: row for row in dict(variant_tables(whole))["released protocol"]}
    assert len(rows) == 10
    accuracy = whole.results.under("released").accuracy(DISTANCE, "rope/mla-program")
    assert rows["RoPE in MLA’s program"].accuracy == interval(over_seeds(accuracy), sign=False)
    assert sum(int(count.split("/")[0]) for _, count in rows["MLA in its program"].kinds) == 2


def test_training_curves_are_what_was_watched(whole: Reproduction, shown: dict[str, Block]) -> None:
    cell = whole.results.under("paper").of(DISTANCE, "rope")[0]
    figure = panels(shown["training"])[0]
    accuracy, first, *_ = figure.data
    assert list(accuracy.y) == [round(row["accuracy"], 4) for row in moments(cell)]
    drops = [row["drops"][0][0] for row in moments(cell)]
    np.testing.assert_allclose(list(first.y[: len(drops)]), drops, atol=1e-4)
    assert first.y[len(drops)] is None, "heads of a layer are lines of their own"


def test_exponents_along_training_are_the_mean_over_heads_and_seeds(
    whole: Reproduction, shown: dict[str, Block]
) -> None:
    cells = whole.results.under("paper").of(DISTANCE, "rope")
    assert len(cells) > 1
    figure = panels(shown["seed-training"])[0]
    low, high, mean = (
        next(t for i, t in enumerate(figure.data) if t.meta == "layer-2" and i % 3 == k) for k in range(3)
    )
    for place, step in enumerate(mean.x):
        rows = [next(row for row in cell.watched if row["step"] == step) for cell in cells]
        by_seed = [np.mean(row["exponent"][1]) for row in rows]
        np.testing.assert_allclose(mean.y[place], np.mean(by_seed), atol=1e-4)
        np.testing.assert_allclose([low.y[place], high.y[place]], [min(by_seed), max(by_seed)], atol=1e-4)


def test_a_head_is_placed_by_what_it_and_its_position_are_worth(whole: Reproduction, shown: dict[str, Block]) -> None:
    cell = whole.results.under("paper").of(DISTANCE, "rope")[0]
    assert cell.ablation is not None
    taken = cell.measures["position"]["drops"]
    found = points_of(panels(shown["position"])[0])
    assert (round(100 * cell.ablation.drops[1, 2], 2), round(100 * taken[1][2], 2)) in found


def test_head_sets_are_drawn_where_they_were_run(whole: Reproduction, shown: dict[str, Block]) -> None:
    cells = whole.results.under("paper").of(DISTANCE, "rope")
    records = [found for cell in cells if (found := cell.measure("sets"))]
    greedy = panels(shown["sets"])[0].data[0]
    expected = np.mean([record.greedy for record in records], axis=0)
    run = np.isfinite(expected)
    assert not run.all()
    assert list(greedy.x) == np.flatnonzero(run).tolist()
    np.testing.assert_allclose(greedy.y, expected[run], atol=1e-4)
    sizes = panels(shown["sets-size"])[0]
    assert {x for x, _ in points_of(sizes)} == {2.0}


def test_the_representation_is_compared_with_the_sinusoid_alone(shown: dict[str, Block]) -> None:
    figure = panels(shown["representation"])[0]
    assert {trace.meta for trace in figure.data} == {"rope-absolute", "rope"}, "this scale has no absolute encoding"
    assert all(value is not None for _, value in points_of(figure) if _ < 1.5)


def test_seed_curves_and_leads_are_the_records(whole: Reproduction, shown: dict[str, Block]) -> None:
    cells = whole.results.under("paper").of(DISTANCE, "mla")
    records = [strength_of(cell) for cell in cells]
    logits = [record.levels["logits"] for record in records if record]
    assert len(logits) == 2
    # the second view is that of the logits: its first panel follows those of the first view
    figure = panels(shown["seed-strength"])[2]
    (line,) = (trace for trace in figure.data if trace.meta == "mla")
    np.testing.assert_allclose(line.y, np.mean([level.layers.strength[0] for level in logits], axis=0), atol=1e-5)
    reference = figure.data[0]
    np.testing.assert_allclose(np.array(reference.y) * np.sqrt(reference.x), 1, err_msg="slope -1/2 through 1")
    lead = panels(shown["seed-lead"])[2]
    expected = [margins(level.signal).ratio[0] for level in logits]
    assert {round(x, 9) for x, _ in points_of(lead)} >= {round(float(value), 9) for value in expected}


def test_every_plot_of_every_part_has_words(shown: dict[str, Block]) -> None:
    for block in shown.values():
        for _, panel in block.places:
            assert len(panel.words) > 30, block.id


def test_the_summary_answers_what_the_parts_ask(whole: Reproduction) -> None:
    found = answers(whole)
    assert len(found) == 7
    (nope,) = (findings for question, findings in found.items() if "NoPE" in question)
    assert any("not decided" in text or "leaves 0 out" in text for text in nope)
    (mla,) = (findings for question, findings in found.items() if "MLA" in question)
    assert "inside that program" in mla[-1]


# --- numbers in words ---


def test_intervals_are_told_with_sign_and_true_minus() -> None:
    estimate = over_seeds(np.array([-0.1, 0.0, 0.04]))
    assert interval(estimate) == "−2.0 [−19.9, 15.9]"
    assert interval(over_seeds(np.array([0.123]))) == "+12.3 (one seed)"
    assert interval(None) == "–"
    assert told_mean(estimate, 100) == "−2.0 [−19.9, 15.9] over 3 seeds"
