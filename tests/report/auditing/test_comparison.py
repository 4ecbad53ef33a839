"""Two audits side by side: their bands in one scale, with the change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.report.reading import figures, without_plotly
from tests.sources.huggingface.models import GROUPED, tiny

from toeplens.report.auditing.comparison import render_comparison
from toeplens.studies.auditing import Audit, audit

TOKENS = torch.randint(3, 31, (3, 20), generator=torch.Generator().manual_seed(4))
NAMES = ("before", "after")


@pytest.fixture(scope="module")
def banded() -> Audit:
    return audit(tiny("LlamaForCausalLM", **GROUPED), TOKENS, effects="bands")


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
