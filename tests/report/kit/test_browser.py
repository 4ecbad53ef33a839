"""What all pages do in a browser: they are printed whole and on white, and say so where their program does not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.report.browsing import ALL_DRAWN, Visit
from tests.report.grid.language_state import language_grid
from tests.report.grid.state import made_up_grid

from toeplens.report.grid.page import render_grid, write_grid
from toeplens.report.kit.page import pack, packed_plotly

pytestmark = pytest.mark.heavy
_INK = """() => [...document.querySelectorAll(".ytick text")].filter((text) => text.getClientRects().length)
    .flatMap((text) => getComputedStyle(text).fill.match(/[0-9]+/g).slice(0, 3).map(Number))"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("print")
    page = directory / "page.html"
    page.write_text(render_grid(made_up_grid(directory / "grid")), encoding="utf-8")
    return page


@pytest.fixture
def visit(browser: Browser, path: Path) -> Visit:
    """A page that draws what is near the window and nothing else until it is printed."""
    visit = Visit(browser, path)
    visit.page.add_init_script("window.requestIdleCallback = () => 0")
    visit.open(path)
    return visit


def test_a_printed_page_has_every_figure(visit: Visit) -> None:
    assert not visit.page.evaluate(f"({ALL_DRAWN})()")
    assert visit.page.pdf().startswith(b"%PDF")
    assert visit.page.evaluate(f"({ALL_DRAWN})()")
    visit.end()


def test_a_dark_page_is_printed_on_white(visit: Visit) -> None:
    visit.page.emulate_media(color_scheme="dark")
    visit.until(f"() => Math.min(...({_INK})()) > 150")
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert max(visit.page.evaluate(_INK)) < 120, "dark letters"
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert min(visit.page.evaluate(_INK)) > 150, "as they were"
    visit.page.emulate_media(media="print", color_scheme="dark")
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    visit.end()


def test_a_program_that_is_not_the_pages_own_is_not_run_and_figures_are_words(
    browser: Browser, path: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "page.html"
    changed.write_text(
        path.read_text(encoding="utf-8").replace(packed_plotly(), pack("window.Plotly = {}")), encoding="utf-8"
    )
    visit = Visit(browser, changed)
    assert visit.page.locator(".banner").first.inner_text() == (
        "The figures are described in words: this browser cannot run plotly."
    )
    for place in visit.page.locator(".plot").all():
        assert place.text_content() == place.get_attribute("aria-label")
    assert visit.page.get_by_role("button", name="SVG").count() == 0
    assert visit.fits_any_window()
    assert [said for said in visit.complaints if "Content Security Policy" not in said] == []
    assert len(visit.complaints) == 1
    visit.page.close()


@pytest.mark.parametrize("kind", ["grid", "language"])
def test_a_page_draws_every_plot_without_a_word_and_fits_any_window(
    browser: Browser, path: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "language":
        path = write_grid(language_grid(tmp_path, finished=8))
    visit = Visit(browser, path, 390)
    visit.read_to_the_end()
    if kind == "grid":
        lines = visit.page.locator("#lengths-0-0-0 .scatterlayer .trace")
        expect(lines).to_have_count(5)
        visit.page.locator("#figure-lengths .legend button").first.click()
        expect(lines).to_have_count(4)
        visit.unfold()
    elif kind == "language":
        lengths = visit.page.locator("#needles-0-0-0 .xtick").all_text_contents()
        assert lengths == ["½", "1", "2", "4", "8"], "no label is taken for a place"
    sizes = visit.sizes()
    assert len(sizes) > 10
    assert all(100 < across <= 390 and down > 80 for _, across, down in sizes), sizes
    assert visit.fits_any_window()
    assert visit.barriers() == visit.barriers("dark") == []
    visit.end()
