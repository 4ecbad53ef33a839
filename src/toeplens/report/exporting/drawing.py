"""Plots as pictures: kaleido draws them in the machine's Chrome or Chromium, which asks the network for nothing."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from toeplens.ground import EnvironmentFailure, write_bytes
from toeplens.report.exporting.printed import PIXELS, Printed

Format = Literal["svg", "png", "pdf"]
FORMATS: tuple[Format, ...] = ("svg", "png", "pdf")
DOTS = 300  # an inch of PNG
_CSS = 96  # pixels an inch, as browsers have it
_NOWHERE = "127.0.0.1:9"  # a proxy that is none: nothing that a browser asks for leaves the machine
_MOST = 4  # tabs
_MISSING = "figures: kaleido is not installed, which draws them; pip install 'toeplens[figures]' gets it."
_NO_BROWSER = (
    "figures: there is no Chrome or Chromium on this machine to draw them; 'apt-get install chromium' or "
    "'kaleido_get_chrome' gets one, and BROWSER_PATH may name one."
)


def draw(
    panels: Mapping[Path, Printed],
    form: Format,
    *,
    tabs: int = 2,
    on_done: Callable[[Path], None] = lambda path: None,
) -> None:
    """Draw panels into files, each whole or not at all.

    Arguments
        panels   by their file
        form     ``svg``, ``png`` (300 dots an inch) or ``pdf``
        tabs     how many are drawn at a time
        on_done  told of each that is written

    Raises `EnvironmentFailure` without kaleido, without a browser, and where that fails.
    """
    kaleido, errors = programs()
    try:
        _carried_out(_draw(kaleido, panels, form, min(tabs, _MOST, len(panels)), on_done))
    except errors.ChromeNotFoundError:
        raise EnvironmentFailure(_NO_BROWSER) from None
    except (errors.BrowserClosedError, errors.BrowserFailedError, errors.ChannelClosedError, TimeoutError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise EnvironmentFailure(f"figures: the browser that draws them failed ({said[:200]}).") from None


def programs() -> tuple[Any, Any]:
    """Kaleido and the errors of its browser; raises `EnvironmentFailure` where it is not installed."""
    try:
        return importlib.import_module("kaleido"), importlib.import_module("choreographer.errors")
    except ImportError:
        raise EnvironmentFailure(_MISSING) from None


def _carried_out(work: Coroutine[Any, Any, None]) -> None:
    """In a loop of its own; a notebook's thread has one that is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1) as beside:
        beside.submit(asyncio.run, work).result()


async def _draw(
    kaleido: Any, panels: Mapping[Path, Printed], form: Format, tabs: int, on_done: Callable[[Path], None]
) -> None:
    """A tab is given back when its panel is done, so that no more wait than there are tabs."""
    scale = (DOTS if form == "png" else _CSS) / PIXELS
    async with kaleido.Kaleido(n=tabs, mathjax=False, proxy_server=_NOWHERE) as browser:
        free = asyncio.Semaphore(tabs)

        async def one(path: Path, panel: Printed) -> None:
            async with free:
                size = {"width": panel.width, "height": panel.height}
                write_bytes(path, await browser.calc_fig(panel.plot, opts={"format": form, "scale": scale, **size}))
                on_done(path)

        async with asyncio.TaskGroup() as group:
            for path, panel in panels.items():
                group.create_task(one(path, panel))
