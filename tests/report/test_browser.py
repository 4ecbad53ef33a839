"""All pages in a real browser: they draw every chart, ask nobody, fit a phone, and keep no reader out."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.report.browsing import ALL_DRAWN, PageVisit
from tests.report.pages import KINDS, page_of

from toeplens.report.exporting import csv_of
from toeplens.report.page import pack, packed_vega, vega_script, write_report

pytestmark = pytest.mark.heavy
MAX_BYTES, MAX_HEIGHT = 1_500_000, 8_000
TEXT_COLOURS = """() => [...document.querySelectorAll(".chart svg text")].filter((text) => text.getClientRects().length)
    .flatMap((text) => getComputedStyle(text).fill.match(/[0-9]+/g).slice(0, 3).map(Number))"""


class Pages(dict[str, Path]):
    """The pages by kind, made when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, name: str) -> Path:
        (self.root / name).mkdir()
        self[name] = write_report(self.root / name, page_of(name))
        return self[name]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("name", KINDS)
def test_a_page_is_small_complete_and_accessible(browser: Browser, pages: Pages, name: str) -> None:
    assert pages[name].stat().st_size < MAX_BYTES
    visit = PageVisit(browser, pages[name])
    visit.scroll_to_end()
    assert visit.page.evaluate("document.documentElement.scrollHeight") <= MAX_HEIGHT
    assert visit.sizes(), "a page shows a picture"
    assert all(200 < across <= 1040 and down > 40 for _, across, down in visit.sizes()), visit.sizes()
    assert visit.page.evaluate("document.querySelector('header .chart').getBoundingClientRect().top") < 900
    visit.expand_details()
    visit.scroll_to_end()
    assert len(visit.sizes()) == visit.page.locator(".chart").count()
    assert visit.has_no_overflow_at_any_size()
    assert visit.accessibility_violations() == visit.accessibility_violations("dark") == []
    visit.close()


def test_a_phone_shows_every_chart(browser: Browser, pages: Pages) -> None:
    visit = PageVisit(browser, pages["audit-smollm2"], 390)
    visit.scroll_to_end()
    assert all(100 < across <= 390 for _, across, _ in visit.sizes()), visit.sizes()
    assert visit.has_no_overflow()
    visit.close()


def test_links_tables_and_keys_work(browser: Browser, pages: Pages) -> None:
    visit = PageVisit(browser, pages["laptop"])
    visit.wait_until(ALL_DRAWN)
    visit.page.evaluate("location.hash = '#claim-deposit-first-layer'")
    visit.wait_until("() => document.querySelector('#claim-deposit-first-layer details').open")
    visit.expand_details()
    for table in page_of("laptop").tables:
        if table.css == "facts" or table.name.endswith(" ledger"):
            continue
        with visit.page.expect_download() as download:
            visit.page.get_by_label(f"Save as CSV: {table.name}", exact=True).first.click()
        saved = Path(download.value.path()).read_text("utf-8")
        assert [*csv.reader(io.StringIO(saved))] == [*csv.reader(io.StringIO(csv_of(table)))]
        visit.page.wait_for_timeout(120)  # Chromium drops downloads after the tenth within a second
    summary = visit.page.locator("details.more > summary").first
    summary.focus()
    visit.page.keyboard.press("Enter")
    assert not visit.page.evaluate("document.querySelector('details.more').open")
    visit.close()
    visit = PageVisit(browser, pages["audit-smollm2"])
    visit.expand_details()
    table = visit.page.locator("table.sortable").first
    table.locator("thead button").nth(2).click()
    values = [float(text.replace("−", "-")) for text in table.locator("tbody tr > :nth-child(3)").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    heads = []
    for _ in range(2):
        table.locator("thead button").first.click()
        heads.append(table.locator("tbody tr > :first-child").all_inner_texts())
    natural = [f"L{layer} H{head}" for layer in range(1, 31) for head in range(1, 10)]
    assert heads == [natural[::-1], natural]
    visit.close()


def test_charts_follow_a_window_resized_during_drawing(browser: Browser, pages: Pages) -> None:
    visit = PageVisit(browser, pages["theory"], 700)
    for width in (390, 1280, 600, 1000):
        visit.page.set_viewport_size({"width": width, "height": 900})
    visit.scroll_to_end()
    visit.wait_until(
        """() => [...document.querySelectorAll(".chart")].every((chart) => {
            const width = Number(chart.querySelector("svg").getAttribute("width")) / chart.clientWidth;
            return 0.7 < width && width < 1.02;
        })"""
    )
    visit.close()


def test_a_printed_page_has_every_chart_on_white(browser: Browser, pages: Pages) -> None:
    visit = PageVisit(browser, pages["theory"])
    visit.page.emulate_media(color_scheme="dark")
    visit.scroll_to_end()
    visit.wait_until(f"() => Math.min(...({TEXT_COLOURS})()) > 100")
    assert visit.page.locator("details:not([open]) .chart").count(), "some are folded"
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    visit.wait_until(f"() => Math.max(...({TEXT_COLOURS})()) < 150")
    assert visit.page.locator("details:not([open]) .chart").count() == 0
    visit.wait_until("() => [...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))")
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    visit.wait_until(f"() => Math.min(...({TEXT_COLOURS})()) > 100")
    assert visit.page.locator("details:not([open]) .chart").count(), "they are folded again"
    visit.page.emulate_media(media="print", color_scheme="dark")
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    visit.close()


def test_a_foreign_script_is_blocked_and_charts_fall_back_to_text(
    browser: Browser, pages: Pages, tmp_path: Path
) -> None:
    text = pages["theory"].read_text("utf-8")
    assert packed_vega() in text
    changed = tmp_path / "page.html"
    changed.write_text(text.replace(packed_vega(), pack("window.vegaEmbed = () => {}")), "utf-8")
    visit = PageVisit(browser, changed)
    visit.page.wait_for_timeout(500)
    for chart in visit.page.locator(".chart").all():
        assert (chart.text_content() or "").strip()
    assert visit.page.locator(".chart svg").count() == 0
    assert [complaint for complaint in visit.complaints if "Content Security Policy" not in complaint] == []
    assert visit.complaints
    visit.page.close()


def test_pages_can_share_the_script(browser: Browser, pages: Pages, tmp_path: Path) -> None:
    (tmp_path / "vega.js").write_text(vega_script(), "utf-8")
    shared = tmp_path / "page.html"
    shared.write_text(page_of("theory").html(script="vega.js"), "utf-8")
    assert shared.stat().st_size < pages["theory"].stat().st_size - 300_000
    visit = PageVisit(browser, shared)
    visit.scroll_to_end()
    assert visit.complaints == []
    visit.page.close()
