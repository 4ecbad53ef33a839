"""Dots: where an axis ends, and what is told of longer intervals; what pages hold compressed comes back as it was."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs_version

from toeplens.report.kit.canvas import Series, dots
from toeplens.report.kit.page import pack, packed_plotly, plotly


def drawn(*values: dict[int, float], **options: Any) -> Any:
    series = Series("a", "", "circle", values, ["#000000"] * len(values))
    return dots([f"line {i}" for i in range(len(values))], [series], "numbers", **options)


def test_the_axis_holds_all_seeds_and_all_of_a_short_interval() -> None:
    low, high = drawn({seed: 10.0 + seed % 2 for seed in range(20)}, {0: 0.0, 1: 0.0, 2: 0.0}).layout.xaxis.range
    assert low < 0
    assert 11 < high < 12


def test_a_long_interval_of_few_seeds_does_not_make_all_else_a_dot() -> None:
    figure = drawn({0: 0.0, 1: 100.0}, {0: 40.0, 1: 60.0})  # Student's interval of the first: 50 and 635 on each side
    low, high = figure.layout.xaxis.range
    assert (low, high) == (pytest.approx(-58), pytest.approx(158))
    assert "-585.3, 685.3" in str(figure.data[-1].text).replace("\u2212", "-")
    assert figure.data[-1].error_x.array[0] == pytest.approx(635.3, abs=0.1)


@pytest.mark.parametrize("span", [None, (0.0, 9.0)])
def test_what_is_no_number_is_not_drawn(span: Any) -> None:
    figure = drawn({0: 1.0, 1: float("nan"), 2: 3.0}, {0: float("inf")}, {0: 2.0, 1: 4.0}, span=span)
    assert list(figure.data[0].x) == [1.0, 3.0, 2.0, 4.0]
    assert list(figure.data[1].x) == [3.0]
    json.loads(figure.to_json())


def test_ends_that_are_given_and_numbers_of_one_value_are_left_alone() -> None:
    assert drawn({0: 0.0, 1: 100.0}, span=(0, 100)).layout.xaxis.range == (0, 100)
    assert drawn({0: 3.0, 1: 3.0}).layout.xaxis.range is None


# ---- what pages hold compressed --------------------------------------------------------------------------------------


@given(st.text())
def test_packing_keeps_what_was_packed(text: str) -> None:
    assert gzip.decompress(base64.b64decode(pack(text), validate=True)).decode() == text
    assert pack(text) == pack(text)


def test_the_program_is_of_the_version_that_plotly_comes_with() -> None:
    """Else `python tools/page_programs.py`."""
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}" in plotly()[:200]
    assert len(packed_plotly()) < 7e5
