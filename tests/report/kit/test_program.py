"""What a page says where the program that draws does not run, or lies elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.report.browsing import Visit
from tests.report.grid.state import made_up_grid

from toeplens.report.grid.page import render_grid
from toeplens.report.kit.packing import pack, packed_plotly


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_grid(made_up_grid(tmp_path_factory.mktemp("grid")))


def test_a_program_that_is_not_the_pages_own_is_not_run_and_figures_are_words(
    browser: Browser, page: str, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(page.replace(packed_plotly(), pack("window.Plotly = {}")), encoding="utf-8")
    visit = Visit(browser, path)
    assert visit.page.locator(".banner").first.inner_text() == (
        "The figures are told in words here: this browser does not run the program that draws them."
    )
    for place in visit.page.locator(".plot").all():
        assert place.text_content() == place.get_attribute("aria-label")
    assert visit.page.get_by_role("button", name="SVG").count() == 0
    assert visit.fits_any_window()
    assert [said for said in visit.complaints if "Content Security Policy" not in said] == []
    assert len(visit.complaints) == 1
    visit.page.close()


def test_a_card_without_the_program_beside_it_says_so(browser: Browser, page: str, tmp_path: Path) -> None:
    path, beside = tmp_path / "page.html", '<script src="plotly.js"></script>'
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    path.write_text(
        policy.sub("", page.replace(f'<script type="text/plain" id="plotly">{packed_plotly()}</script>', beside))
    )
    visit = Visit(browser, path)
    said = visit.page.locator(".banner").first.inner_text()
    assert said == "The figures are told in words here: plotly.js, which draws them, does not lie beside this page."
    visit.page.close()
