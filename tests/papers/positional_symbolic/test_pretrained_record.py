"""The committed records of pretrained models say what their own pieces say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from toeplens.ground import read_json
from toeplens.papers.positional_symbolic.pretrained import Pretrained, gather, is_pretrained, open_record
from toeplens.papers.positional_symbolic.pretrained.claims import by_text

RESULTS = Path(__file__).parents[3] / "results"
RECORDS = [name for name in ("smollm2", "gemma3") if (RESULTS / name / "claims.json").exists()]


@pytest.fixture(scope="module", params=RECORDS)
def record(request: pytest.FixtureRequest) -> Pretrained:
    return open_record(RESULTS / request.param / "results.json.xz")


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


def test_what_is_recorded_is_a_study_to_the_commands(record: Pretrained) -> None:
    """`toeplens report results/smollm2` makes its page."""
    assert is_pretrained(record.directory)
    assert gather(record.directory) == record


def test_texts_in_place_of_sequences(record: Pretrained) -> None:
    """Each text's two sequences as one number, by Student's interval of three means with two degrees of freedom."""
    found = list(by_text(record))
    claims = {"positional-frequency", "correspondence-learned", "pure-heads", "retrieval-symbolic"}
    assert claims <= {each.entry.claim.id for each in found} <= claims | {"previous-token-fast"}
    heads = record.heads("text")
    assert heads is not None
    ((_, which), *_) = heads.parts.items()
    means = np.reshape(heads.correlations("positional", "centre", which), (3, 2)).mean(1)
    first = next(each for each in found if each.entry.claim.id == "positional-frequency")
    reach = stats.t.ppf(0.975, 2) * means.std(ddof=1) / np.sqrt(3)
    np.testing.assert_allclose((first.value, first.low, first.high), means.mean() + np.array([0, -reach, reach]))
    for each in found:
        assert each.part.comparison is not None
        bars = each.part.comparison.low, each.part.comparison.high
        inside, outside = bars[0] < each.low and each.high < bars[1], each.high < bars[0] or bars[1] < each.low
        assert each.verdict == ("holds" if inside else "fails" if outside else "undecided")
    others = {each.entry.claim.id for each in found if each.differs and each.part.essential}
    smollm2 = record.directory.name == "smollm2"
    assert others == ({"correspondence-learned", "pure-heads"} if smollm2 else {"correspondence-learned"})
