"""The committed records say what their own data say: cells, tables and verdicts follow from what is recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from toeplens.cli.studies import gather
from toeplens.engine.language import Bits
from toeplens.ground import InputError, read_json, write_json
from toeplens.papers.deposit import accuracy_table
from toeplens.papers.deposit import grid as places
from toeplens.papers.mathematics import EXPERIMENTS, Theory
from toeplens.papers.positional_symbolic.pretrained.study import by_text
from toeplens.studies import grid
from toeplens.studies.grid import language
from toeplens.studies.grid.measured import matrix
from toeplens.studies.kit.study import read_record
from toeplens.studies.kit.verdicts import ENOUGH, OPEN
from toeplens.training.loop import moments
from toeplens.training.presets import PROTOCOLS

RESULTS = Path(__file__).parents[2] / "results"
LADDER = "ladder"  # a part of desk, of which not every place is trained (results/README.md)
RECORDS = ("desk", "laptop", LADDER, "canonical", "language", "smollm2", "gemma3", "minilm", "theory")
_states: dict[str, Any] = {}


def state(name: str) -> Any:
    if name not in _states:
        _states[name] = gather(RESULTS / name)
    return _states[name]


def of(*names: str) -> pytest.MarkDecorator:
    """The models of desk and of canonical take long to read."""
    heavy = ("desk", "canonical")
    marks = [pytest.param(name, marks=pytest.mark.heavy if name in heavy else ()) for name in names]
    return pytest.mark.parametrize("name", marks)


def near(rows: list[dict[str, Any]], rel: float) -> list[dict[str, Any]]:
    return [{k: pytest.approx(x, rel=rel) if isinstance(x, float) else x for k, x in row.items()} for row in rows]


@of(*RECORDS)
def test_the_ledger_follows_from_the_data(name: str) -> None:
    found = [entry.to_dict() for entry in state(name).entries]
    recorded = read_json(RESULTS / name / "claims.json")["claims"]
    fields = ("id", "protocol", "verdict", "plain", "evidence")
    assert [[each[field] for field in fields] for each in found] == [
        [each[field] for field in fields] for each in recorded
    ]


# ---- the reproduction ------------------------------------------------------------------------------------------------


@of("desk", "laptop", LADDER)
def test_a_reproduction_holds_every_cell_of_the_grid_as_it_is_now(name: str) -> None:
    about, results = read_record(RESULTS / name / "results.json.xz").content, state(name).results
    assert about["scale"] == ("desk" if name == LADDER else name)
    cells = places(about["scale"], PROTOCOLS, about["seeds"], about["parts"])
    if name == LADDER:
        assert (about["parts"], about["seeds"]) == ([LADDER], 3)
        there = Counter((cell.key.protocol, cell.key.label) for cell in results.cells)
        assert set(there.values()) == {3}, "a place is there with its three models or not at all"
        cells = [cell for cell in cells if (cell.key.protocol, cell.key.label) in there]
    else:
        assert about["seeds"] >= 5
    assert {(cell.key, cell.run) for cell in results.cells} == {(cell.key, cell.job.spec.name) for cell in cells}
    found = {cell.key: cell for cell in results.cells}
    watched = {cell.job.spec.name for cell in cells if cell.job.watch}  # two places may stand for the same run
    for cell in cells:
        assert found[cell.key].measures.keys() <= set(cell.job.measures)
        steps = [row["step"] for row in found[cell.key].watched]
        due = moments(cell.job.spec.total_steps) if cell.job.spec.name in watched else []
        if cell.job.spec.plateau is None:
            assert steps == due
        else:  # it ends when it has stopped learning, and events are looked at too
            assert steps == sorted(set(steps))
            assert {step for step in due if step <= steps[-1]} <= set(steps)
    assert [row.to_dict() for row in accuracy_table(results, PROTOCOLS)] == near(about["table"], 1e-6)


# ---- grid studies ----------------------------------------------------------------------------------------------------


@of("canonical", "language")
def test_a_grid_study_holds_every_cell_of_its_file_as_it_is_now(name: str) -> None:
    """But for the text, which the record knows by its hash and this machine may not have."""
    found = state(name)
    ours = found.spec.model_dump(mode="json")
    if name == "language":
        assert len(ours["tasks"]["language"]["options"].pop("sha256")) == 64
    assert ours == grid.read_spec(name).model_dump(mode="json")
    assert found.complete
    assert found.spec.seeds >= 3
    cells = {cell.key: cell for cell in grid.cells(found.spec)}
    assert {key: cell.job.spec.name for key, cell in cells.items()} == {c.key: c.run for c in found.results.cells}
    for cell in found.results.cells:
        job = cells[cell.key].job
        assert cell.measures.keys() == set(found.spec.measures)
        due = moments(job.spec.total_steps) if job.watch else []
        assert [row["step"] for row in cell.watched if row["step"] in due] == due
        assert all(row["events"] for row in cell.watched if row["step"] not in due)
        if name == "language":
            assert cell.epochs[-1]["step"] == job.spec.total_steps
    assert found.spec.seeds >= ENOUGH or {entry.verdict for entry in found.entries} <= set(OPEN), "few seeds only lean"


@of("canonical")
def test_the_table_and_the_relations_follow_from_the_cells(name: str) -> None:
    found, about = state(name), read_record(RESULTS / name / "results.json.xz").content
    assert len(found.relations) == len(about["relations"])
    for one, recorded in zip(found.relations, about["relations"], strict=True):
        for field, value in one.to_dict().items():  # a last digit may differ between machines
            assert value == pytest.approx(recorded[field], abs=1e-6), field
    rows = [row.to_dict() for row in matrix(found.spec, found.results)]
    ours = [{field: row[field] for field in recorded} for row, recorded in zip(rows, about["table"], strict=True)]
    assert ours == near(about["table"], 1e-5)
    shares = [share for cell in found.results.cells if (share := cell.measure("behaviour")) is not None]
    totals = [each.positional + each.symbolic + each.interaction for each in shares]
    assert max(np.nanmax(abs(total - 1), initial=0) for total in totals) < 1e-5, "to the six digits of a record"
    assert sum(np.isfinite(total).sum() for total in totals) > 2000


@of("language")
def test_language_models_are_better_than_counting(name: str) -> None:
    """Than the best of the tables of up to three tokens before, on the same texts; a row is the mean of its models."""
    found = state(name)
    rows = language.language_rows(found.spec, found.results)
    assert len(rows) == 8
    for row in rows:
        cells = [cell for cell in found.results.of(name, row.label) if cell.status == "complete"]
        assert row.bits == pytest.approx(sum(language.bits(cell) for cell in cells) / len(cells), abs=1e-9)
    for cell in found.results.of(name, "rope"):
        bits = cell.measure("bits")
        assert isinstance(bits, Bits)
        assert language.bits(cell) < min(bits.ngrams.values())


# ---- pretrained models -----------------------------------------------------------------------------------------------


@of("smollm2", "gemma3")
def test_a_pretrained_models_record_is_whole_and_every_pass_of_it_was_proved(name: str) -> None:
    record = state(name)
    assert record.complete
    assert set(record.audits) | set(record.probes) == {piece for piece, _ in record.plan.pieces()}
    assert (record.plan.tokens, len(record.plan.texts)) == (1024, 3)
    for audit in record.audits.values():
        assert audit.whole < 1e-4
        assert all(layer.outputs <= layer.tolerance and layer.unknown is None for layer in audit.layers)


@of("smollm2", "gemma3")
def test_texts_in_place_of_sequences(name: str) -> None:
    """Each text's two sequences as one number, by Student's interval of three means with two degrees of freedom."""
    record = state(name)
    found = list(by_text(record))
    claims = {"positional-frequency", "correspondence-learned", "pure-heads", "retrieval-symbolic"}
    assert claims <= {each.entry.claim.id for each in found} <= claims | {"previous-token-fast"}
    heads = record.heads("text")
    ((_, which), *_) = heads.parts.items()
    means = np.reshape(heads.correlations("positional", "centre", which), (3, 2)).mean(1)
    first = next(each for each in found if each.entry.claim.id == "positional-frequency")
    reach = stats.t.ppf(0.975, 2) * means.std(ddof=1) / np.sqrt(3)
    np.testing.assert_allclose((first.value, first.low, first.high), means.mean() + np.array([0, -reach, reach]))
    for each in found:
        assert each.part.comparison is not None
        low, high = each.part.comparison.low, each.part.comparison.high
        inside, outside = low < each.low and each.high < high, each.high < low or high < each.low
        assert each.verdict == ("holds" if inside else "fails" if outside else "undecided")
    others = {each.entry.claim.id for each in found if each.differs and each.part.essential}
    assert others == {"correspondence-learned", *(["pure-heads"] if name == "smollm2" else [])}


# ---- the mathematics -------------------------------------------------------------------------------------------------


def test_every_experiment_is_there_under_every_seed() -> None:
    content = read_json(RESULTS / "theory" / "results.json")
    assert content["finished"] == content["total"] == content["seeds"] * (len(EXPERIMENTS) + 1)
    assert set(content["records"]) == {*EXPERIMENTS, "heads"}
    assert content["seeds"] >= 5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("phases", {"ranges": {}}),  # unlike the record of the first seed
        ("filling", {"tallies": 3}),
        ("heads", {"rope trained": {"width": "wide"}}),
        ("small_norm", {"models": None}),
    ],
)
def test_a_damaged_record_is_refused(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    content = read_json(RESULTS / "theory" / "results.json")
    content["records"][name][1] |= change
    write_json(tmp_path / "results.json", content)
    with pytest.raises(InputError, match="damaged"):
        Theory.open_record(tmp_path / "results.json")
