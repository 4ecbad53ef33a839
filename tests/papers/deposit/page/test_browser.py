"""The report in a real browser: it draws everything, says nothing on the console, and asks the network for nothing."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect
from tests.report.browsing import ALL_DRAWN, Visit

from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page import write_page


@pytest.fixture(scope="module")
def report(make_study: Callable[..., Reproduction], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(make_study(tmp_path_factory.mktemp("browser")))


@pytest.mark.parametrize(("width", "scrolled"), [(1280, False), (768, True), (390, True)])
def test_it_draws_every_figure_without_a_word_and_fits_the_window(
    browser: Browser, report: Path, width: int, scrolled: bool
) -> None:
    """Of a page that nobody scrolls through no figure is missing either, however it is printed or saved."""
    visit = Visit(browser, report, width)
    if scrolled:
        visit.read_to_the_end()
    else:
        visit.until(ALL_DRAWN)
    sizes = visit.sizes()
    assert len(sizes) > 20
    assert all(across > 100 and down > 50 for _, across, down in sizes), sizes
    assert all(across <= width for _, across, _ in sizes), sizes
    assert visit.fits()
    visit.unfold()
    assert visit.fits(), "nor with everything unfolded"
    visit.end()


@pytest.fixture(scope="module")
def desk(browser: Browser, report: Path) -> Iterator[Visit]:
    """The report on a wide screen, opened once for several tests; printed at once, which draws all there is to see."""
    visit = Visit(browser, report)
    assert visit.page.evaluate(f"() => {{ dispatchEvent(new Event('beforeprint')); return ({ALL_DRAWN})(); }}")
    yield visit
    visit.end()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_a_reader_out(desk: Visit, scheme: Literal["light", "dark"]) -> None:
    assert desk.barriers(scheme) == []


def test_buttons_save_a_figure_and_a_table(desk: Visit) -> None:
    name, content = desk.saved("Save the table “Accuracy, Task 1 (distance)” as CSV")
    assert name == "toeplens-accuracy-task-1-distance.csv"
    rows = list(csv.reader(content.decode().splitlines()))
    assert len({len(row) for row in rows}) == 1
    assert {"MLA", "NoPE"} <= {row[0] for row in rows}
    assert rows[0][1] != ""
    name, content = desk.saved("Save figure 1 as SVG")
    assert name.startswith("toeplens-accuracy")
    svg = content.decode()
    assert svg.startswith("<svg")
    assert "Figure 1." in svg, "the figure whole, its title too"
    assert len(desk.page.locator("#figure-accuracy .plot").all()) <= svg.count("main-svg")
    name, content = desk.saved("Save figure 1 as PNG")
    assert name.endswith(".png")
    assert content.startswith(b"\x89PNG")
    width = re.search(r' width="(\d+)"', svg)
    assert width is not None
    assert int.from_bytes(content[16:20]) == 2 * int(width[1])
    assert desk.complaints == []


def test_a_program_that_is_not_the_page_s_own_does_not_run(browser: Browser, report: Path, tmp_path: Path) -> None:
    """Programs are known by their hashes; whatever is written into a page, by a name say, is none of them."""
    changed = tmp_path / "changed.html"
    changed.write_text(report.read_text().replace("<main>", "<main><script>document.title = 'taken over'</script>", 1))
    visit = Visit(browser, changed)
    assert visit.page.title() != "taken over"
    assert any("Content Security Policy" in said for said in visit.complaints)
    visit.page.close()


def test_figures_and_claims_have_links_of_their_own(desk: Visit) -> None:
    desk.page.keyboard.press("Tab")  # so that what has the focus is shown to have it
    shown = desk.page.evaluate(
        """[...document.querySelectorAll("figure[id], .ledger [id]")].map((each) => {
            const link = each.querySelector(`.anchor[href="#${each.id}"]`);
            link.focus();
            return getComputedStyle(link).opacity;
        })"""
    )
    assert len(shown) > 20
    assert set(shown) == {"1"}, "seen by who comes with the keyboard"
    for link in desk.page.locator("a.anchor, .ledger a").all():
        aim = link.get_attribute("href") or ""
        assert aim.startswith(("#figure-", "#claim-"))
        assert desk.page.locator(f"[id='{aim[1:]}']").count() == 1


def test_print_unfolds_the_figures_and_folds_them_again(desk: Visit) -> None:
    folded = desk.page.locator("details.figures:not([open])")
    before = folded.count()
    desk.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert folded.count() == 0
    assert desk.page.evaluate(f"({ALL_DRAWN})()")
    desk.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert folded.count() == before


def test_hovering_tells_the_drop_and_its_interval(desk: Visit) -> None:
    figure = desk.page.locator("#figure-heads")
    figure.scroll_into_view_if_needed()
    figure.locator(".view:not([hidden]) .nsewdrag").first.hover()
    told = figure.locator(".hoverlayer .hovertext").first
    told.wait_for(state="visible")
    assert "points lost" in (told.text_content() or "")
    assert "[" in (told.text_content() or "")
    assert desk.complaints == []


def test_a_legend_entry_hides_its_lines_and_brings_them_back(desk: Visit) -> None:
    figure = desk.page.locator("#figure-convergence-trigger-distance")
    figure.scroll_into_view_if_needed()
    lines = figure.locator(".plot").nth(1).locator(".scatterlayer .trace")
    lines.first.wait_for(state="attached")
    before, entry = lines.count(), figure.locator(".legend button").first
    entry.click()
    expect(lines).to_have_count(before - 1)
    assert entry.get_attribute("aria-pressed") == "false"
    entry.click()
    expect(lines).to_have_count(before)
    assert desk.complaints == []


def test_a_link_to_a_claim_opens_it(desk: Visit) -> None:
    desk.page.evaluate("location.hash = '#claim-deposit-first-layer'")
    desk.until("() => document.querySelector('#claim-deposit-first-layer details').open")
    assert desk.complaints == []


def test_the_plots_follow_a_page_that_turns_dark(desk: Visit) -> None:
    page = desk.page
    page.locator("#figure-accuracy").scroll_into_view_if_needed()
    page.locator("#accuracy-0-0-0 .ytick text").first.wait_for(state="visible")
    assert max(page.evaluate(_INK)) < 120, "dark letters on a light page"
    page.emulate_media(color_scheme="dark")
    desk.until(f"() => Math.min(...({_INK})()) > 150")
    page.emulate_media(color_scheme="light")
    desk.until(f"() => Math.max(...({_INK})()) < 120")
    assert desk.complaints == []


_INK = """() => getComputedStyle(document.querySelector("#accuracy-0-0-0 .ytick text"))
    .fill.match(/[0-9]+/g).slice(0, 3).map(Number)"""


def test_every_view_of_every_menu_is_drawn(desk: Visit) -> None:
    menus = desk.page.locator("select[data-views]")
    assert menus.count() > 0
    for menu in menus.all():
        menu.select_option(str(menu.locator("option").count() - 1))
    desk.read_to_the_end()
    sizes = desk.sizes()
    assert all(across > 100 and down > 50 for _, across, down in sizes)
    assert any(place.startswith("heads-1-") for place, _, _ in sizes)
    assert not any(place.startswith("heads-0-") for place, _, _ in sizes)
    assert desk.complaints == []


def test_a_study_with_every_part_is_drawn_and_fits_a_phone(
    browser: Browser, make_study: Callable[..., Reproduction], tmp_path: Path
) -> None:
    state = make_study(tmp_path, protocols=("released",), parts=("all",), measured=True)
    visit = Visit(browser, write_page(state), 390)
    page = visit.page
    page.evaluate(
        """document.querySelectorAll("#claims, #accuracy, #convergence, #heads, #run")
            .forEach((section) => { section.hidden = true; })"""
    )
    page.locator("select[data-views=table-factors]").select_option("1")
    assert page.locator("#table-factors .view:not([hidden]) table").count() == 1
    visit.read_to_the_end()
    drawn = {place.rsplit("-", 3)[0] for place, across, down in visit.sizes() if across > 100 and down > 50}
    assert {"deposit-encodings", "deposit-layers", "factors", "partial-peaks", "mla", "training", "position"} <= drawn
    assert visit.fits()
    visit.end()


def test_an_empty_study_is_shown_without_a_word(
    browser: Browser, make_study: Callable[..., Reproduction], tmp_path: Path
) -> None:
    visit = Visit(browser, write_page(make_study(tmp_path, finished=0)), 400)
    assert "0 of" in visit.page.locator(".banner[role=status]").inner_text()
    assert visit.fits()
    visit.end()
