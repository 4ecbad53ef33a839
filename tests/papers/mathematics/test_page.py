"""The page of the mathematics says what the record says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.charts import rows_of

from toeplens.papers.mathematics import Theory, gather

RECORDED = Path(__file__).parents[3] / "results" / "theory"


@pytest.fixture(scope="module")
def theory() -> Theory:
    return gather(RECORDED)


def test_the_first_screen_counts_the_verdicts(theory: Theory) -> None:
    page = theory.page()
    assert page.question == "Does the paper’s mathematics hold?"
    assert not page.warnings
    marks = rows_of(theory.charts()["verdicts"])
    assert {row["statement"]: row["verdict"] for row in marks} == {e.claim.statement: e.verdict for e in theory.entries}
    for form, words in (("as published", "as published"), ("corrected", "in a corrected form")):
        tally = Counter(row["series"] for row in marks if row["form"] == form)
        assert f"f {tally.total()} statements {words}, {tally['holds']} hold" in page.answer
    widths = [record["sizes"]["width_ratio"][-1][-1] for record in theory.records["contraction"]]
    assert f"{np.mean(widths):.2f} of the width ({min(widths):.2f} to {max(widths):.2f} over 5 seeds" in page.answer


def test_each_claim_is_one_line_with_its_verdict(theory: Theory) -> None:
    ledger = theory.page().tables[0]
    assert [[cell.plain_text for cell in row[::2]] for row in ledger.body] == [
        [entry.claim.statement, entry.verdict] for entry in theory.entries
    ]


def test_charts_draw_the_record(theory: Theory, tmp_path: Path) -> None:
    charts = theory.charts()
    assert list(charts) == ["verdicts", "free", "averaged", "ranges", "range", "phase", "curve", "signs", "levinson"]
    actual = [record["free"] for record in theory.records["contraction"]]
    drawn = {row["x"]: row for row in rows_of(charts["free"]) if row["series"].startswith("widest found")}
    for at, size in enumerate(actual[0]["searched_sizes"]):
        values = [each["ratio_found"][at] for each in actual]
        ends = [drawn[size][name] for name in ("value", "low", "high")]
        assert ends == pytest.approx([np.mean(values), min(values), max(values)], rel=1e-4)
    widths = sorted(float(v) for each in theory.records["heads"] for v in np.ravel(each["rope trained"]["width"]))
    points = [r["value"] for r in rows_of(charts["range"]) if (r["series"], r["state"]) == ("RoPE", "trained")]
    assert sorted(points) == pytest.approx(widths, rel=1e-4)
    for chart in charts.values():
        chart.save(tmp_path / "chart.svg")


def test_diverged_models_are_named(theory: Theory) -> None:
    heads = [{name: each for name, each in record.items() if "alibi" not in name} for record in theory.records["heads"]]
    page = replace(theory, records={"heads": heads}).page()
    text = page.sections[1].parts[1]
    assert "ALiBi" not in text.partition(".")[0]
    assert "10 models diverged or are missing: alibi untrained, alibi trained." in text
    assert page.html()
    nobody = replace(theory, records={"heads": [{}] * 5}).page()
    assert nobody.html()


def test_an_unfinished_study_is_marked(theory: Theory) -> None:
    some = {name: each[:1] for name, each in theory.records.items() if name != "heads"}
    page = replace(theory, records=some, seeds=1, finished=11, total=12).page()
    assert page.warnings[0].startswith("11 of 12 records finished")
    assert "1 seed: statements about trained heads need 5 seeds" in page.warnings[1]
    assert [figure.id for figure in page.figures] == ["verdicts", "free", "averaged", "ranges", "signs", "levinson"]
    nothing = replace(theory, records={}, entries=[], finished=0).page()
    assert nothing.html() == nothing.html()
    assert len(theory.page().html()) < 1_500_000
