"""Figures of pages: read with what stands around them, put on paper's sizes, drawn by a browser that asks nobody."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.builders import refusal
from tests.report.auditing.test_page import made_up
from tests.report.grid.state import made_up_grid
from tests.report.reading import figures as plots_of

from toeplens.ground import EnvironmentFailure
from toeplens.report.auditing.page import render_audit
from toeplens.report.exporting.drawing import draw
from toeplens.report.exporting.figures import Figure, Panel, Sign, read_figures, slug
from toeplens.report.exporting.maps import read_maps
from toeplens.report.exporting.pages import current, plots_in
from toeplens.report.exporting.printed import INCHES, PIXELS, printed
from toeplens.report.grid.page import render_grid
from toeplens.report.kit.colours import HEAT
from toeplens.report.kit.packing import FORMAT, MADE_BY
from toeplens.version import __version__

PATH = Path("page.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_grid(made_up_grid(tmp_path_factory.mktemp("grid")))


@pytest.fixture(scope="module")
def found(page: str) -> dict[str, Figure]:
    return {figure.id: figure for figure in read_figures(page, plots_in(page, PATH))}


def test_every_plot_of_a_page_is_a_panel_of_a_numbered_figure(page: str, found: dict[str, Figure]):
    places = [panel.place for figure in found.values() for panel in figure.panels]
    assert sorted(places) == sorted(plots_of(page))
    assert [figure.number for figure in found.values()] == list(range(1, len(found) + 1))
    for figure in found.values():
        assert figure.title
        assert figure.caption
        assert not figure.caption.startswith("Figure")
        assert "Press " not in figure.caption, "a paper has no buttons"
        assert not figure.caption.endswith("#"), "the link to the figure is no word of it"
        assert not re.search(r"\bpress\b|hover", figure.caption, re.IGNORECASE), "a printed figure cannot be pressed"
        assert figure.caption.endswith((".", ")"))
        names = list(figure.names())
        assert len(names) == len(figure.panels)
        assert all(re.fullmatch(rf"{figure.id}[a-z0-9-]*", name) for name in names)


def test_a_figure_has_the_pages_legend(found: dict[str, Figure]):
    signs = {sign.key: sign for sign in found["lengths"].legend}
    assert (signs["rope"].title, signs["rope"].tint, signs["rope"].glyph) == ("RoPE", "#2f6fe0", "●")
    views = {panel.view for panel in found["plane"].panels}
    assert len(views) > 1
    assert all(views)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_panel_is_as_wide_as_its_columns_in_type_of_eight_points(found: dict[str, Figure], columns: int):
    figure = found["lengths"]
    made = printed(figure, figure.panels[0], columns)
    assert made.inches[0] == pytest.approx(INCHES[columns], abs=0.01)
    assert made.plot["layout"]["font"]["size"] * 72 / PIXELS == 8
    assert made.height > figure.panels[0].plot["layout"]["height"]


def test_a_panel_has_a_legend_of_what_is_in_it_on_white(found: dict[str, Figure]):
    figure = found["lengths"]
    made = printed(figure, figure.panels[0]).plot
    there = {trace.get("meta") for trace in figure.panels[0].plot["data"]}
    entries = [trace["name"] for trace in made["data"] if trace["showlegend"]]
    assert entries == [sign.title for sign in figure.legend if not sign.key or sign.key in there]
    assert all(trace["x"] == [None] for trace in made["data"] if trace["showlegend"])
    assert made["layout"]["paper_bgcolor"] == made["layout"]["plot_bgcolor"] == "white"
    assert figure.panels[0].title in made["layout"]["title"]["text"]
    assert "showlegend" not in figure.panels[0].plot["data"][0], "the page's own plot is left as it is"


def test_heat_has_the_light_colours_and_their_scale():
    plot = {"data": [{"type": "heatmap", "z": [[1]], "coloraxis": "coloraxis"}]}
    plot |= {"layout": {"height": 100, "coloraxis": {"cmin": -1, "cmax": 1, "showscale": False}}}
    figure = Figure("heat", low="gains", high="loses", half=True, panels=[Panel("heat-0-0-1", plot)])
    layout = printed(figure, figure.panels[0]).plot["layout"]
    assert layout["coloraxis"]["colorscale"] == [[0, HEAT["light"][1]], [1, HEAT["light"][2]]]
    assert (layout["coloraxis"]["cmin"], layout["coloraxis"]["showscale"]) == (0, True)
    assert [note["text"] for note in layout["annotations"]] == ["loses", "gains"]


def test_every_kind_of_sign_is_an_entry():
    signs = [Sign("", "line", "#111111", dash="dot"), Sign("", "mark", "var(--ink)", "▲"), Sign("", "box", "#222222")]
    signs.append(Sign("", "lines", "#333333", pattern="/"))
    panel = Panel("a-0-0-1", {"data": [], "layout": {}}, legend=signs)
    line, mark, box, lines = printed(Figure("a", panels=[panel]), panel).plot["data"]
    assert line["line"]["dash"] == "dot"
    assert (mark["marker"]["symbol"], box["marker"]["symbol"]) == ("triangle-up", "square")
    assert "var" not in mark["marker"]["color"]
    assert lines["marker"]["pattern"]["shape"] == "/"


def test_the_map_of_an_audit_is_a_figure_a_column():
    audit = made_up()
    maps = {figure.id: figure for figure in read_maps(render_audit(audit))}
    (panel,) = maps["map-positional"].panels
    rows = panel.plot["data"][0]["z"]
    assert len(rows) * len(rows[0]) == len(audit.heads)
    ranked = sorted(range(len(audit.heads)), key=lambda at: audit.heads[at].positional or 0)
    flat = [value for row in rows for value in row]
    assert flat[ranked[-1]] == max(flat)


def test_a_map_of_a_billion_heads_is_not_begun():
    sheet = {"values": {"a": []}, "ends": {"a": {"low": "", "high": "", "half": False}}, "place": []}
    sheet["places"] = [{"title": "", "layers": [0], "heads": 10**9}]
    content = {"sheets": [sheet], "columns": [{"name": "a", "title": "A", "about": "", "digits": 1}]}
    with pytest.raises(ValueError, match="1000000000 heads in each of 1 layers"):
        read_maps(f'<script type="application/json" id="sheets">{json.dumps(content)}</script>')


def test_the_map_of_two_audits_is_left_to_the_page(page: str):
    assert read_maps(page) == []


@pytest.mark.parametrize("made_by", [f"format {FORMAT}, toeplens 0.1.0", f"format 0, toeplens {__version__}", ""])
def test_a_page_of_another_version_or_format_is_told(page: str, tmp_path: Path, made_by: str):
    new, old = tmp_path / "new.html", tmp_path / "old.html"
    new.write_text(page, encoding="utf-8")
    old.write_text(page.replace(MADE_BY, made_by), encoding="utf-8")
    assert (current(new), current(old)) == (True, False)


@pytest.mark.parametrize("kind", ["text/plain", "application/json"])  # as pages before 0.2 had them
def test_plots_that_cannot_be_read_are_one_sentence(kind: str):
    html = f'<script type="{kind}" id="figures">{{}}</script>'
    assert refusal(lambda: plots_in(html, PATH)).startswith(
        "page: the plots of page.html cannot be read; make it again"
    )
    assert plots_in("<p>", PATH) == {}


def test_names_of_files_are_plain():
    assert slug("Task 1 (distance), 50 %: “ok”/../x") == "task-1-distance-50-ok-x"
    figure = Figure("a", panels=[Panel("a-0-0-1", {}, title="Σ"), Panel("a-0-0-2", {}, title="ω")])
    assert list(figure.names()) == ["a", "a-2"]


def test_without_kaleido_or_a_browser_one_sentence_says_how_to_get_it(
    found: dict[str, Figure], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    figure = found["lengths"]
    panels = {tmp_path / "a.pdf": printed(figure, figure.panels[0])}
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-such-browser"))
    with pytest.raises(EnvironmentFailure) as failed:
        draw(panels, "pdf")
    said = str(failed.value)
    assert said.startswith(
        "figures: there is no Chrome or Chromium on this machine to draw them; 'apt-get install chromium'"
    )
    true = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "kaleido":
            raise ImportError(name)
        return true(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(EnvironmentFailure, match=r"pip install 'toeplens\[figures\]' gets it\.$"):
        draw(panels, "pdf")
    assert list(tmp_path.iterdir()) == []


def test_a_browser_draws_a_pdf_of_the_size_that_was_asked_for(found: dict[str, Figure], tmp_path: Path):
    made = {
        tmp_path / f"{name}.pdf": printed(found["lengths"], panel) for name, panel in found["lengths"].names().items()
    }
    told: list[Path] = []
    draw(made, "pdf", on_done=told.append)
    assert sorted(told) == sorted(made)
    for path, panel in made.items():
        content = path.read_bytes()
        box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", content)
        assert content.startswith(b"%PDF")
        assert box is not None
        assert float(box[1]) == pytest.approx(72 * INCHES[1], abs=1)
        assert float(box[2]) == pytest.approx(72 * panel.inches[1], abs=1)


@pytest.mark.heavy
def test_a_browser_draws_svg_and_png_too(found: dict[str, Figure], tmp_path: Path):
    figure = found["lengths"]
    panel = printed(figure, figure.panels[0])
    draw({tmp_path / "a.svg": panel}, "svg")
    svg = (tmp_path / "a.svg").read_text("utf-8")
    assert re.search(r'<svg[^>]* width="312"', svg)
    assert figure.legend[0].title in svg
    draw({tmp_path / "a.png": panel}, "png")
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20]) == pytest.approx(300 * INCHES[1], abs=1)
