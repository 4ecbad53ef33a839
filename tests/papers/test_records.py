"""The committed records say what their own data say: cells, tables and verdicts follow from what is recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from toeplens.backends.hf import load_model
from toeplens.cli.studies import load_study
from toeplens.engine.language import BitsPerByte
from toeplens.papers.deposit import accuracy_table
from toeplens.papers.deposit import grid as places
from toeplens.papers.mathematics import EXPERIMENTS, Theory
from toeplens.papers.positional_symbolic.pretrained.parts import PartRunner
from toeplens.papers.positional_symbolic.pretrained.study import compare_by_text
from toeplens.studies import grid
from toeplens.studies.auditing.inputs import read_text
from toeplens.studies.grid import language
from toeplens.studies.grid.measures import matrix
from toeplens.studies.kit.study import read_record
from toeplens.studies.kit.verdicts import GRAIN, MIN_SEEDS, OPEN_VERDICTS
from toeplens.training.loop import default_probe_steps
from toeplens.training.presets import PROTOCOLS
from toeplens.utils import InputError, read_json, write_json

RESULTS = Path(__file__).parents[2] / "results"
SCALE_SWEEP = "ladder"  # a part of desk, of which not every place is trained (results/README.md)
QWEN, LARGE_QWEN = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
DECODERS = ("smollm2", "gemma3", QWEN, LARGE_QWEN)
RECORDS = ("desk", "laptop", "full", SCALE_SWEEP, "canonical", "multihop", "language", *DECODERS, "minilm", "theory")
_states: dict[str, Any] = {}


def recorded_state(name: str) -> Any:
    if name not in _states:
        _states[name] = load_study(RESULTS / name)
    return _states[name]


def states_of(*names: str) -> pytest.MarkDecorator:
    """The models of desk and of canonical take long to read."""
    heavy = ("desk", "canonical")
    marks = [pytest.param(name, marks=pytest.mark.heavy if name in heavy else ()) for name in names]
    return pytest.mark.parametrize("name", marks)


def assert_rows_close(rows: list[dict[str, Any]], rel: float) -> list[dict[str, Any]]:
    return [{k: pytest.approx(x, rel=rel) if isinstance(x, float) else x for k, x in row.items()} for row in rows]


@states_of(*RECORDS)
def test_the_ledger_follows_from_the_data(name: str) -> None:
    actual = [entry.to_dict() for entry in recorded_state(name).entries]
    recorded = read_json(RESULTS / name / "claims.json")["claims"]
    fields = ("id", "protocol", "verdict", "uncorrected", "evidence")
    assert [[each[field] for field in fields] for each in actual] == [
        [each[field] for field in fields] for each in recorded
    ]


# ---- the reproduction ------------------------------------------------------------------------------------------------


@states_of("desk", "laptop", "full", SCALE_SWEEP)
def test_a_reproduction_has_every_cell_of_the_current_grid(name: str) -> None:
    about, results = read_record(RESULTS / name / "results.json.xz").content, recorded_state(name).results
    assert about["scale"] == ("desk" if name == SCALE_SWEEP else name)
    cells = places(about["scale"], about["protocols"], about["seeds"], about["parts"])
    if name == SCALE_SWEEP:
        assert (about["parts"], about["seeds"]) == ([SCALE_SWEEP], 3)
        recorded = Counter((cell.key.protocol, cell.key.label) for cell in results.cells)
        assert set(recorded.values()) == {3}, "a place is there with its three models or not at all"
        cells = [cell for cell in cells if (cell.key.protocol, cell.key.label) in recorded]
    elif name == "full":  # trained one by one
        recorded_keys = {cell.key for cell in results.cells}
        cells = [cell for cell in cells if cell.key in recorded_keys]
    else:
        assert about["seeds"] >= 5
    assert name == "full" or tuple(about["protocols"]) == PROTOCOLS
    assert {(cell.key, cell.run) for cell in results.cells} == {(cell.key, cell.job.spec.name) for cell in cells}
    actual = {cell.key: cell for cell in results.cells}
    watched = {cell.job.spec.name for cell in cells if cell.job.probe}  # two places may stand for the same run
    for cell in cells:
        assert actual[cell.key].measures.keys() <= set(cell.job.measures)
        steps = [row["step"] for row in actual[cell.key].probe_rows]
        due = default_probe_steps(cell.job.spec.total_steps) if cell.job.spec.name in watched else []
        if cell.job.spec.plateau is None:
            assert steps == due
        else:  # it ends when it has stopped learning, and events are looked at too
            assert steps == sorted(set(steps))
            assert {step for step in due if step <= steps[-1]} <= set(steps)
    table = accuracy_table(results, about["protocols"])
    assert [row.to_dict() for row in table] == assert_rows_close(about["table"], 1e-6)


# ---- grid studies ----------------------------------------------------------------------------------------------------


@states_of("canonical", "multihop", "language")
def test_a_grid_study_has_every_cell_of_its_current_file(name: str) -> None:
    """But for the text, which the record knows by its hash and this machine may not have."""
    result = recorded_state(name)
    ours = result.spec.model_dump(mode="json")
    if name == "language":
        assert len(ours["tasks"]["language"]["options"].pop("sha256")) == 64
    assert ours == grid.read_spec(name).model_dump(mode="json")
    assert result.is_complete
    assert result.spec.seeds >= 3
    cells = {cell.key: cell for cell in grid.grid_cells(result.spec)}
    assert {key: cell.job.spec.name for key, cell in cells.items()} == {c.key: c.run for c in result.results.cells}
    for cell in result.results.cells:
        job = cells[cell.key].job
        assert cell.measures.keys() == set(result.spec.measures)
        due = default_probe_steps(job.spec.total_steps) if job.probe else []
        assert [row["step"] for row in cell.probe_rows if row["step"] in due] == due
        assert all(row["events"] for row in cell.probe_rows if row["step"] not in due)
        if name == "language":
            assert cell.epochs[-1]["step"] == job.spec.total_steps
    assert result.spec.seeds >= MIN_SEEDS or {entry.verdict for entry in result.entries} <= set(OPEN_VERDICTS), (
        "few seeds only lean"
    )


@states_of("canonical", "multihop")
def test_the_table_and_the_relations_follow_from_the_cells(name: str) -> None:
    actual, about = recorded_state(name), read_record(RESULTS / name / "results.json.xz").content
    assert len(actual.relations) == len(about["relations"])
    for one, recorded in zip(actual.relations, about["relations"], strict=True):
        for field, value in one.to_dict().items():  # a last digit may differ between machines
            assert value == pytest.approx(recorded[field], abs=1e-6), field
    rows = [row.to_dict() for row in matrix(actual.spec, actual.results)]
    ours = [{field: row[field] for field in recorded} for row, recorded in zip(rows, about["table"], strict=True)]
    assert ours == assert_rows_close(about["table"], 1e-5)
    shares = [share for cell in actual.results.cells if (share := cell.measure("behaviour")) is not None]
    totals = [each.positional + each.symbolic + each.interaction for each in shares]
    assert max(np.nanmax(abs(total - 1), initial=0) for total in totals) < 1e-5, "to the six digits of a record"
    assert sum(np.isfinite(total).sum() for total in totals) > {"canonical": 2000, "multihop": 900}[name]


@states_of("language")
def test_language_models_are_better_than_counting(name: str) -> None:
    """Than the best of the tables of up to three tokens before, on the same texts; a row is the mean of its models."""
    actual = recorded_state(name)
    rows = language.language_rows(actual.spec, actual.results)
    assert len(rows) == 8
    for row in rows:
        cells = [cell for cell in actual.results.cells_of(name, row.label) if cell.status == "complete"]
        assert row.bits == pytest.approx(sum(language.bits_per_byte(cell) for cell in cells) / len(cells), abs=1e-9)
    for cell in actual.results.cells_of(name, "rope"):
        bits = cell.measure("bits")
        assert isinstance(bits, BitsPerByte)
        assert language.bits_per_byte(cell) < min(bits.ngrams.values())


# ---- pretrained models -----------------------------------------------------------------------------------------------


@states_of(*DECODERS)
def test_a_pretrained_record_is_complete_and_every_pass_is_proved(name: str) -> None:
    record = recorded_state(name)
    assert record.is_complete
    assert set(record.audits) | set(record.probes) == {piece for piece, _ in record.plan.iter_parts()}
    assert (record.plan.tokens, len(record.plan.texts)) == (1024, 3)
    assert not any("seed" in text for entry in record.entries for text in entry.missing)
    for audit in record.audits.values():
        assert audit.max_difference < 1e-4
        assert all(layer.outputs <= layer.tolerance and layer.unknown is None for layer in audit.layers)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "logit"), [(QWEN, 1000), (LARGE_QWEN, 10_000)])
def test_a_recorded_audit_of_qwen_is_repeated_by_its_weights(name: str, logit: float) -> None:
    """The audit of a sequence of the novel: every number of its heads, with logits of 1,000 and of 10,000."""
    models = RESULTS.parent / "models"
    if not (models / name).exists() or not (models / "texts").exists():
        pytest.skip("make real-models fetches the model and the texts")
    record = recorded_state(name)
    texts = {text: read_text(models / "texts" / f"{text}.txt") for text in record.plan.texts}
    runner = PartRunner(
        load_model(models / name, device="cpu"), replace(record.plan, texts=texts), models, lambda *_: 0
    )
    actual, expected = runner._audit_part("text-4"), record.audits["text-4"]
    assert max(layer.logit for layer in expected.layers) > logit
    for column in ("positional", "symbolic", "toeplitz", "centre", "previous", "induction", "first", "entropy"):
        values = ([getattr(head, column) for head in audit.heads] for audit in (actual, expected))
        got, known = (np.array(row, dtype=float) for row in values)
        np.testing.assert_allclose(got, known, rtol=1e-3, atol=1e-4, err_msg=column)


@states_of(*DECODERS)
def test_intervals_over_texts_instead_of_sequences(name: str) -> None:
    """Each text's two sequences as one number, by Student's interval of three means with two degrees of freedom."""
    record = recorded_state(name)
    actual = list(compare_by_text(record))
    claims = {"positional-frequency", "correspondence-learned", "pure-heads", "retrieval-symbolic"}
    assert claims <= {each.entry.claim.id for each in actual} <= claims | {"previous-token-fast"}
    heads = record.heads("text")
    ((_, which), *_) = heads.layer_groups.items()
    means = np.reshape(heads.correlations("positional", "centre", which), (3, 2)).mean(1)
    first = next(each for each in actual if each.entry.claim.id == "positional-frequency")
    reach = stats.t.ppf(0.975, 2) * max(means.std(ddof=1), GRAIN) / np.sqrt(3)
    np.testing.assert_allclose((first.value, first.low, first.high), means.mean() + np.array([0, -reach, reach]))
    for each in actual:
        assert each.finding.comparison is not None
        low, high = each.finding.comparison.low, each.finding.comparison.high
        inside, outside = low < each.low and each.high < high, each.high < low or high < each.low
        assert each.verdict == ("holds" if inside else "fails" if outside else "undecided")
    others = {each.entry.claim.id for each in actual if each.differs and each.finding.essential}
    assert others == {"smollm2": {"pure-heads"}, "gemma3": {"correspondence-learned"}}.get(name, set())


# ---- the mathematics -------------------------------------------------------------------------------------------------


def test_every_experiment_is_recorded_for_every_seed() -> None:
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
