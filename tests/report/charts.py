"""What a chart draws."""

from __future__ import annotations

from typing import Any


def rows_of(chart: Any) -> list[dict[str, Any]]:
    """The rows of the data that a chart draws last."""
    return _rows(chart.to_dict())


def _rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [*spec.get("layer", ()), *([spec["spec"]] if "spec" in spec else [])]
    found = [rows for each in inner if (rows := _rows(each))]
    return found[-1] if found else spec.get("data", {}).get("values", [])
