"""What a chart draws."""

from __future__ import annotations

from typing import Any

from toeplens.report.page import Page


def rows_of(chart: Any) -> list[dict[str, Any]]:
    """The rows of the data that a chart draws last."""
    return _rows(chart.to_dict(), [])


def figure_rows(page: Page, figure: str) -> list[dict[str, Any]]:
    """The rows of a figure's chart."""
    return rows_of(page.charts()[figure])


def _rows(spec: dict[str, Any], above: list[dict[str, Any]]) -> list[dict[str, Any]]:
    values = spec.get("data", {}).get("values", above)
    inner = [*spec.get("layer", ()), *([spec["spec"]] if "spec" in spec else [])]
    return _rows(inner[-1], values) if inner else values
