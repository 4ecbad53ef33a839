"""The committed records of pretrained models say what their own pieces say."""

from __future__ import annotations

from pathlib import Path

import pytest

from toeplens.ground import read_json
from toeplens.papers.positional_symbolic.pretrained import Pretrained, open_record
from toeplens.papers.positional_symbolic.pretrained.page import render_pretrained

RESULTS = Path(__file__).parents[3] / "results"
RECORDS = [name for name in ("smollm2", "gemma3") if (RESULTS / name / "claims.json").exists()]


@pytest.fixture(scope="module", params=RECORDS)
def record(request: pytest.FixtureRequest) -> Pretrained:
    return open_record(RESULTS / request.param / "results.json.gz")


def test_it_is_whole_and_its_ledger_follows_from_its_pieces(record: Pretrained) -> None:
    assert record.complete
    assert set(record.audits) | set(record.probes) == {name for name, _ in record.plan.pieces()}
    assert (record.plan.tokens, len(record.plan.texts)) == (1024, 3)
    recorded = read_json(record.directory / "claims.json")["claims"]
    assert [entry.to_dict() for entry in record.entries] == recorded


def test_every_pass_of_it_was_proved(record: Pretrained) -> None:
    for audit in record.audits.values():
        assert audit.whole < 1e-4
        for layer in audit.layers:
            assert layer.outputs <= layer.tolerance
            assert layer.unknown is None


def test_a_page_is_made_of_it(record: Pretrained) -> None:
    page = render_pretrained(record)
    for words in ("The map of heads", "Bands that stand still", "What needles need", "Frequencies against behaviour"):
        assert words in page
