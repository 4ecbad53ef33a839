"""The report in a real browser: it draws all, says nothing, asks nobody, fits a phone and keeps no reader out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.papers.deposit.worlds import make_study
from tests.report.browsing import ALL_DRAWN, Visit

from toeplens.papers.deposit.page import reproduction_page
from toeplens.report.kit.page import write_report

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = make_study(tmp_path_factory.mktemp("browser"))
    return write_report(state.directory, reproduction_page(state))


def test_it_draws_every_figure_without_a_word_and_fits_any_window(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report, 390)
    visit.read_to_the_end()
    sizes = visit.sizes()
    assert len(sizes) > 20
    assert all(100 < across <= 390 and down > 50 for _, across, down in sizes), sizes
    visit.unfold()
    assert visit.fits_any_window()
    assert visit.barriers() == visit.barriers("dark") == []
    visit.end()


def test_its_buttons_links_and_legends_do_what_they_say(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report)
    visit.until(ALL_DRAWN)
    name, content = visit.saved("Save the table “Accuracy, Task 1 (distance)” as CSV")
    assert name == "toeplens-accuracy-task-1-distance.csv"
    assert {len(line.split('","')) for line in content.decode().splitlines()}
    name, content = visit.saved("Save figure 1 as SVG")
    svg = content.decode()
    assert name.startswith("toeplens-accuracy")
    assert "Figure 1." in svg, "the figure whole, its title too"
    name, content = visit.saved("Save figure 1 as PNG")
    width = re.search(r' width="(\d+)"', svg)
    assert width is not None
    assert int.from_bytes(content[16:20]) == 2 * int(width[1])
    figure = visit.page.locator("#figure-convergence-trigger-distance")
    figure.scroll_into_view_if_needed()
    lines = figure.locator(".plot").nth(1).locator(".scatterlayer .trace")
    before = lines.count()
    figure.locator(".legend button").first.click()
    expect(lines).to_have_count(before - 1)
    visit.page.locator("#figure-heads").scroll_into_view_if_needed()
    visit.page.locator("#figure-heads .view:not([hidden]) .nsewdrag").first.hover()
    told = visit.page.locator("#figure-heads .hoverlayer .hovertext").first
    told.wait_for(state="visible")
    assert "accuracy drop" in (told.text_content() or "")
    visit.page.evaluate("location.hash = '#claim-deposit-first-layer'")
    visit.until("() => document.querySelector('#claim-deposit-first-layer details').open")
    visit.end()
