"""The page of a pretrained model's study says what the record says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.charts import rows_of

from toeplens.papers.positional_symbolic.pretrained import PretrainedStudy, gather
from toeplens.papers.positional_symbolic.pretrained.parts import effects_of

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def study() -> PretrainedStudy:
    return gather(RESULTS / "smollm2")


def test_the_first_screen_counts_heads_and_verdicts(study: PretrainedStudy) -> None:
    page, heads = study.page(), study.heads("text")
    assert heads is not None
    assert page.question == "Do the heads of models/smollm2 use position or content?"
    many = [int((heads.mean(name) > 0.5).sum()) for name in ("positional", "symbolic")]
    assert page.answer.startswith(f"{many[0]} of 270 heads are mostly positional, {many[1]} mostly symbolic.")
    tally = Counter(entry.verdict for entry in study.entries)
    assert all(f"{verdict} ({count})" in page.answer for verdict, count in tally.items())
    assert study.entries[0].evidence[0].capitalize() in page.answer
    assert [row[2].plain_text for row in page.tables[0].body] == [entry.verdict for entry in study.entries]
    assert not page.warnings


def test_charts_draw_the_record(study: PretrainedStudy, tmp_path: Path) -> None:
    charts, heads = study.charts(), study.heads("text")
    assert heads is not None
    assert list(charts) == ["plane", "frequencies", "maps", "silenced", "position", "bands", "layers", "needles"]
    rows = [row for row in rows_of(charts["plane"]) if row["kind"] == "The model"]
    np.testing.assert_allclose([row["positional"] for row in rows], heads.mean("positional"), rtol=1e-4)
    np.testing.assert_allclose([row["symbolic"] for row in rows], heads.mean("symbolic"), rtol=1e-4)
    removed = [row["value"] for row in rows_of(charts["position"])]
    np.testing.assert_allclose(removed, effects_of(study.audits["position"]), rtol=1e-4)
    bands = {(row["series"], row["band"]): row["value"] for row in rows_of(charts["bands"])}
    more = study.probes["still-3"].summary("copying").more_nats
    assert more is not None
    assert bands["Copying", 4] == pytest.approx(more.value, rel=1e-4)
    needles = {row["change"]: row["right"] for row in rows_of(charts["needles"])}
    assert needles["retrieval heads ablated"] == 0
    for chart in charts.values():
        chart.save(tmp_path / "chart.svg")


def test_encoders_and_empty_studies_have_pages(study: PretrainedStudy) -> None:
    encoder = gather(RESULTS / "minilm")
    assert list(encoder.charts()) == ["plane", "maps", "silenced"]
    empty = replace(study, audits={}, probes={}, finished=0).with_verdicts()
    page = empty.page()
    assert page.picture is None
    assert page.warnings == [f"0 of {study.total} parts are finished. Claims on others stay open."]
    assert page.html() == page.html()
    assert len(study.page().html()) < 1_500_000
