"""Two audits side by side: a model before and after a change, and the bands of two audits in one scale."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.report.reading import figures, without_plotly
from tests.sources.huggingface.models import GROUPED, tiny

from toeplens.report.auditing.bands import bands_of_both
from toeplens.report.auditing.comparison import render_comparison, write_comparison
from toeplens.sources.huggingface import Change
from toeplens.studies.auditing import Audit, audit

TOKENS = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))
NAMES = ("before", "after")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("LlamaForCausalLM", **GROUPED)


@pytest.fixture(scope="module")
def banded(model: Any) -> Audit:
    return audit(model, TOKENS, effects="bands")


def sheets(page: str) -> list[dict[str, Any]]:
    (found,) = re.findall(r'<script type="application/json" id="sheets">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)["sheets"]


def test_a_model_before_and_after_a_change(model: Any, tmp_path: Path) -> None:
    """The changed layer's own heads read what they read before; those after it do not."""
    change = Change(layer=0, heads=(2,), output="zero")
    intact, changed = (audit(model, TOKENS, effects="none", changes=each) for each in ([], [change]))
    page = write_comparison(intact, changed, NAMES, tmp_path).read_text()
    first, second, less = sheets(page)
    for name in ("positional", "symbolic", "entropy", "centre"):
        moved = np.array(less["values"][name])
        np.testing.assert_allclose(moved, np.subtract(second["values"][name], first["values"][name]))
        layers = np.array(less["layer"])
        assert np.abs(moved[layers == 0]).max() < 1e-9
        assert np.abs(moved[layers == 1]).max() > 1e-3
    shares = np.array(less["values"]["positional"])
    at = int(np.abs(shares).argmax())
    for name, begins in (("previous", "Attention on the token before"), ("induction", "Attention on tokens after an")):
        assert re.search(rf"<li>{begins}[^:]*: most changed is layer \d head \d, from ", page), name
    assert f"Positional: most changed is layer 2 head {intact.heads[at].head + 1}, from " in page
    text = without_plotly(page)
    row = (
        r"<tr><th scope=\"row\">changes</th><td><code>–</code></td><td><code>layer 1, head 3: silenced</code></td></tr>"
    )
    assert re.search(row, text)
    assert "changed: layer 1, head 3: silenced" in text
    assert "Audited on other input" not in text, "the two read the same tokens"
    assert 'id="bands"' not in text


def test_bands_of_both_are_in_one_scale_with_their_change(banded: Audit) -> None:
    other = replace(
        banded,
        bands=tuple(
            replace(band, effect=(band.effect or 0) + (0.5 if at == 3 else 0.0)) for at, band in enumerate(banded.bands)
        ),
    )
    page = render_comparison(banded, other, NAMES)
    drawn = [figures(page)[f"bands-{view}-0-0"]["data"][0] for view in range(3)]
    effects = np.array([[band.effect for band in banded.bands_of(layer)] for layer in banded.layers])
    np.testing.assert_allclose(np.array(drawn[0]["z"], dtype=float), effects, atol=1e-4)
    moved = np.zeros_like(effects)
    moved.flat[3] = 0.5
    np.testing.assert_allclose(np.array(drawn[2]["z"], dtype=float), moved, atol=1e-4)
    ends = [figures(page)[f"bands-{view}-0-0"]["layout"]["coloraxis"]["cmax"] for view in range(3)]
    assert ends == pytest.approx([np.abs(effects + moved).max()] * 2 + [0.5], rel=1e-3)
    band = banded.bands[3]
    said = f"Most changed are pairs {band.first + 1} to {band.last + 1} in layer {band.layer + 1}, from "
    assert said in without_plotly(page)
    assert "<h2>Bands of frequencies</h2>" in page


def test_other_bands_have_no_change_and_other_effects_no_bands(model: Any, banded: Audit) -> None:
    fewer = replace(banded, bands=banded.bands[1:])
    assert [view.title for view in bands_of_both(banded, fewer, NAMES).views] == ["before", "after"]
    assert [view.title for view in bands_of_both(banded, banded, NAMES).views] == ["before", "after", "change"]
    for other in (replace(banded, effect="states"), audit(model, TOKENS, effects="none")):
        assert bands_of_both(banded, other, NAMES).views == []
        assert '<section id="bands">' not in render_comparison(banded, other, NAMES)
    unlike = replace(banded, method="exact")
    assert "<b>Effects are not compared:</b>" in render_comparison(banded, unlike, NAMES)
    assert '<section id="bands">' not in render_comparison(banded, unlike, NAMES)
