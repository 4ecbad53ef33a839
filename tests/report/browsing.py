"""A page in a real browser: what it draws, what it says on the console, and what it asks the network for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ALL_DRAWN = """() => [...document.querySelectorAll(".chart")].every(
    (chart) => !chart.offsetParent || (chart.querySelector("svg") && "drawn" in chart.dataset))"""


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """This machine's browser."""
    path = shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(path).exists():
        pytest.fail("There is no chromium on this machine, so pages cannot be seen; `make test` installs it.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield browser
        browser.close()


class PageVisit:
    """An opened page, and what the browser had to say about it."""

    def __init__(self, browser: Browser, path: Path, width: int = 1280) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.wanted: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.open(path)

    def open(self, path: Path) -> None:
        self.wanted.append(path.as_uri())
        self.page.goto(path.as_uri())

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript function is true; asked from here, as the page's own policy forbids evaluation."""
        end = time.monotonic() + 60
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            self.page.wait_for_timeout(50)

    def scroll_to_end(self) -> None:
        """Scroll through the page as a reader does; plots are drawn when they come near."""
        self.page.evaluate(
            """async () => {
                for (let y = 0; y < document.documentElement.scrollHeight; y += 800) {
                    scrollTo({ top: y, behavior: "instant" });
                    await new Promise((done) => setTimeout(done, 40));
                }
            }"""
        )
        self.wait_until(ALL_DRAWN)

    def accessibility_violations(self, scheme: Literal["light", "dark"] = "light") -> list[str]:
        """What axe-core finds that keeps out readers with a keyboard, a screen reader or weak sight."""
        self.page.emulate_media(color_scheme=scheme)
        result = Axe().run(self.page).response["violations"]
        self.page.emulate_media(color_scheme="light")
        return [f"{rule['id']}: {[node['target'] for node in rule['nodes']][:3]}" for rule in result]

    def expand_details(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")

    def sizes(self) -> list[tuple[str, float, float]]:
        """Name, width and height of every chart that is not hidden."""
        return self.page.evaluate(
            """[...document.querySelectorAll(".chart")].filter((chart) => chart.offsetParent).map((chart) => {
                const box = chart.querySelector("svg").getBoundingClientRect();
                return [chart.dataset.chart, box.width, box.height];
            })"""
        )

    def has_no_overflow(self) -> bool:
        """Whether nothing hangs out of the window."""
        return self.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

    def has_no_overflow_at_any_size(self) -> bool:
        """Whether nothing does on a phone, a tablet or a wide screen, light or dark."""
        fitting = []
        for width in (390, 768, 1280):
            self.page.set_viewport_size({"width": width, "height": 900})
            end = time.monotonic() + 5  # plots follow the window a moment later
            while not (fits := self.has_no_overflow()) and time.monotonic() < end:
                self.page.wait_for_timeout(50)
            fitting.append(fits)
            self.page.emulate_media(color_scheme="dark")
        return all(fitting)

    def close(self) -> None:
        """Close the page, about which nothing was said and for which nothing was asked but itself."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == self.wanted
        self.page.close()
