"""The report in a real browser: it draws everything, says nothing on the console, and asks the network for nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from toeplens.papers.deposit import Reproduction
from toeplens.papers.deposit.page import write_page

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Visit:
    """An opened report, and what the browser had to say about it."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(path).exists():
        pytest.fail("There is no chromium on this machine, so the report cannot be seen; `make test` installs it.")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(make_study: Callable[..., Reproduction], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(make_study(tmp_path_factory.mktemp("browser")))


def _open(browser: Browser, path: Path, width: int = 1280) -> Visit:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    visit = Visit(page, path.as_uri())
    page.on("console", lambda message: visit.complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: visit.complaints.append(f"error: {error}"))
    page.on("request", lambda request: visit.requests.append(request.url))
    page.goto(visit.address)
    return visit


def _until(page: Page, condition: str, argument: object = None) -> None:
    """Wait until a JavaScript function is true; asked from here, as the page's own policy forbids evaluation in it."""
    end = time.monotonic() + 15
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, f"never true: {condition}"
        page.wait_for_timeout(50)


_ALL_DRAWN = """() => [...document.querySelectorAll(".plot")].every(
    (plot) => !plot.offsetParent || plot.querySelector(".main-svg"))"""


def _read_to_the_end(page: Page) -> None:
    """Scroll through the page as a reader does; plots are drawn when they come near."""
    page.evaluate(
        """async () => {
            for (let y = 0; y < document.documentElement.scrollHeight; y += 800) {
                scrollTo({ top: y, behavior: "instant" });
                await new Promise((done) => setTimeout(done, 40));
            }
        }"""
    )
    _until(page, _ALL_DRAWN)


def _sizes(page: Page) -> list[tuple[str, float, float]]:
    """Id, width and height of every plot that is not hidden."""
    return page.evaluate(
        """[...document.querySelectorAll(".plot")].filter((plot) => plot.offsetParent).map((plot) => {
            const box = plot.querySelector(".main-svg").getBoundingClientRect();
            return [plot.id, box.width, box.height];
        })"""
    )


def _overflow(page: Page) -> float:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.mark.parametrize(("width", "scrolled"), [(1280, False), (400, True)])
def test_it_draws_every_figure_without_a_word_and_fits_the_window(
    browser: Browser, report: Path, width: int, scrolled: bool
) -> None:
    """Of a page that nobody scrolls through no figure is missing either, however it is printed or saved."""
    visit = _open(browser, report, width)
    page = visit.page
    if scrolled:
        _read_to_the_end(page)
    else:
        _until(page, _ALL_DRAWN)
    sizes = _sizes(page)
    assert len(sizes) > 20
    assert all(across > 100 and down > 50 for _, across, down in sizes), sizes
    assert all(across <= width for _, across, _ in sizes), sizes
    assert _overflow(page) <= 0
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert _overflow(page) <= 0, "nor with everything unfolded"
    assert visit.complaints == []
    outside = [url for url in visit.requests if not url.startswith(("data:", "blob:"))]
    assert outside == [visit.address], "the file itself, and nothing else"
    page.close()


@pytest.fixture(scope="module")
def desk(browser: Browser, report: Path) -> Iterator[Visit]:
    """The report on a wide screen, opened once for several tests; printed at once, which draws all there is to see."""
    visit = _open(browser, report)
    assert visit.page.evaluate(f"() => {{ dispatchEvent(new Event('beforeprint')); return ({_ALL_DRAWN})(); }}")
    yield visit
    visit.page.close()


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
    _until(desk.page, "() => document.querySelector('#claim-deposit-first-layer details').open")
    assert desk.complaints == []


def test_the_plots_follow_a_page_that_turns_dark(desk: Visit) -> None:
    page = desk.page
    page.locator("#figure-accuracy").scroll_into_view_if_needed()
    page.locator("#accuracy-0-0-0 .ytick text").first.wait_for(state="visible")
    assert max(page.evaluate(_INK)) < 120, "dark letters on a light page"
    page.emulate_media(color_scheme="dark")
    _until(page, f"() => Math.min(...({_INK})()) > 150")
    page.emulate_media(color_scheme="light")
    _until(page, f"() => Math.max(...({_INK})()) < 120")
    assert desk.complaints == []


_INK = """() => getComputedStyle(document.querySelector("#accuracy-0-0-0 .ytick text"))
    .fill.match(/[0-9]+/g).slice(0, 3).map(Number)"""


def test_every_view_of_every_menu_is_drawn(desk: Visit) -> None:
    menus = desk.page.locator("select[data-views]")
    assert menus.count() > 0
    for menu in menus.all():
        menu.select_option(str(menu.locator("option").count() - 1))
    _read_to_the_end(desk.page)
    sizes = _sizes(desk.page)
    assert all(across > 100 and down > 50 for _, across, down in sizes)
    assert any(place.startswith("heads-1-") for place, _, _ in sizes)
    assert not any(place.startswith("heads-0-") for place, _, _ in sizes)
    assert desk.complaints == []


def test_a_study_with_every_part_is_drawn_and_fits_a_phone(
    browser: Browser, make_study: Callable[..., Reproduction], tmp_path: Path
) -> None:
    state = make_study(tmp_path, protocols=("released",), parts=("all",), measured=True)
    visit = _open(browser, write_page(state), 390)
    page = visit.page
    page.evaluate(
        """document.querySelectorAll("#claims, #accuracy, #convergence, #heads, #run")
            .forEach((section) => { section.hidden = true; })"""
    )
    page.locator("select[data-views=table-factors]").select_option("1")
    assert page.locator("#table-factors .view:not([hidden]) table").count() == 1
    _read_to_the_end(page)
    drawn = {place.rsplit("-", 3)[0] for place, across, down in _sizes(page) if across > 100 and down > 50}
    assert {"deposit-encodings", "deposit-layers", "factors", "partial-peaks", "mla", "training", "position"} <= drawn
    assert _overflow(page) <= 0
    assert visit.complaints == []
    page.close()


def test_an_empty_study_is_shown_without_a_word(
    browser: Browser, make_study: Callable[..., Reproduction], tmp_path: Path
) -> None:
    visit = _open(browser, write_page(make_study(tmp_path, finished=0)), 400)
    assert "0 of" in visit.page.locator(".banner[role=status]").inner_text()
    assert _overflow(visit.page) <= 0
    assert visit.complaints == []
    visit.page.close()
