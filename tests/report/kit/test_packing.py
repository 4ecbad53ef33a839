"""What pages hold compressed comes back as it was, and the program that draws is the one that plotly.py means."""

from __future__ import annotations

import base64
import gzip
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs_version

from toeplens.report.kit.packing import pack, packed_plotly, plotly, unpack

FOREIGN = [base64.b64encode(content).decode() for content in (b"no gzip", gzip.compress(b"\xff", mtime=0))]


@given(st.text())
def test_packing_gives_back_what_was_packed(text: str) -> None:
    assert unpack(pack(text)) == text
    assert pack(text) == pack(text)
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", pack(text))


@pytest.mark.parametrize("packed", ["{", "a", "äöü", *FOREIGN])
def test_what_was_not_packed_is_refused(packed: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(packed)


def test_the_program_is_of_the_version_that_plotly_comes_with() -> None:
    """Else `python tools/page_programs.py`."""
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}" in plotly()[:200]
    assert len(packed_plotly()) < 7e5
