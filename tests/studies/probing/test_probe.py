"""A probe's numbers are those of the model's own passes, paired where it is changed, and come back as written."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import binomtest
from tests.studies.probing.models import TEXT, save_model, tokenizer

from toeplens.backends.hf import AttentionCall, Change, capture_attention, intervene, load_model
from toeplens.studies.kit.probe_items import ItemWriter
from toeplens.studies.probing import ProbeRecord, ProbeSizes, open_probe, probe, save_probe
from toeplens.studies.probing.probe import ItemRecord
from toeplens.utils import InputError

SIZES = ProbeSizes(lengths=(64, 80), depths=(0.0, 1.0), repeats=1, sequences=2, lists=2, words=(3, 5))
CHANGES = (Change(layer=0, speed=0.0), Change(layer=1, heads=(1,), output="zero"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def probe_result(model: Path) -> ProbeRecord:
    return probe(str(model), TEXT, changes=CHANGES, sizes=SIZES, device="cpu")


def test_every_value_matches_a_pass_of_its_item_alone(model: Path, probe_result: ProbeRecord) -> None:
    model_directly = load_model(str(model), device="cpu").model
    for number, item in enumerate(ItemWriter(tokenizer(), TEXT, 0).items(SIZES)):
        tokens = torch.tensor([item.tokens])
        with torch.no_grad():
            passes = [model_directly(tokens).logits[0]]
            with intervene(model_directly, CHANGES):
                passes.append(model_directly(tokens).logits[0])
        rows = [row for row in probe_result.items if row.item == number]
        for logits, names in zip(passes, (("nats", "right"), ("changed_nats", "changed_right")), strict=True):
            each, right = [], []
            for place in item.positions:
                row = logits[place - 1]
                some = row if not item.choices else row[list(item.choices)]
                each.append(float(some.logsumexp(-1) - row[item.tokens[place]]))
                right.append(float(row[item.tokens[place]] == some.max()))
            for row in rows:
                part = [
                    at for at, place in enumerate(item.positions) if (row.start or 0) <= place < (row.stop or 10**6)
                ]
                share = np.mean if item.behaviour in ("loss", "copying") else np.min
                assert getattr(row, names[0]) == pytest.approx(np.mean([each[at] for at in part]), abs=2e-5)
                assert getattr(row, names[1]) == pytest.approx(share([right[at] for at in part]))
        assert sum(row.num_positions for row in rows if row.start) in (0, len(item.positions))


def recorded_call(probe_result: list[Any], call: AttentionCall) -> None:
    probe_result.append(call.weights[0].clone())


def test_retrieval_heads_match_their_attention_weights(model: Path, probe_result: ProbeRecord) -> None:
    own = load_model(str(model), device="cpu").model
    needles = [item for item in ItemWriter(tokenizer(), TEXT, 0).items(SIZES) if item.needle]
    score, mass = np.zeros((2, 2, 4))
    for item in needles:
        weights: list[Any] = []
        capture_attention(own, {"input_ids": torch.tensor([item.tokens])}, partial(recorded_call, weights))
        first, last = item.needle or (0, 0)
        for layer, own_weights in enumerate(weights):
            for head in range(4):
                for position in item.positions:
                    row = own_weights[head, position - 1]
                    hits = [j for j in range(first, last) if item.tokens[j] == item.tokens[position]]
                    score[layer, head] += (int(row.argmax()) in hits) / len(item.positions) / len(needles)
                    mass[layer, head] += float(row[hits].sum()) / len(item.positions) / len(needles)
    assert len(probe_result.heads) == 8
    for scored_head in probe_result.heads:
        assert scored_head.score == pytest.approx(score[scored_head.layer, scored_head.head])
        assert scored_head.mass == pytest.approx(mass[scored_head.layer, scored_head.head], abs=1e-6)


def test_means_are_by_item_and_differences_paired(probe_result: ProbeRecord) -> None:
    [summary] = probe_result.summaries("loss")
    items = {row.item for row in probe_result.items_of("loss")}
    assert summary.count == len(items) == 2
    by_item = [[row for row in probe_result.items_of("loss") if row.item == item] for item in sorted(items)]
    means = [
        sum(row.nats * row.num_positions for row in rows) / sum(row.num_positions for row in rows) for rows in by_item
    ]
    assert summary.nats.value == pytest.approx(np.mean(means))
    assert summary.more_nats.value == pytest.approx(summary.changed_nats.value - summary.nats.value)
    assert [each.length for each in probe_result.summaries("copying", "length")] == [64, 80]
    assert {(e.length, e.depth) for e in probe_result.summaries("needle", "length", "depth")} == {
        (length, depth) for length in (64, 80) for depth in (0.0, 1.0)
    }
    titles = ["Text", "Needle", "No needle", "Copying", "Counting", "Order"]
    titles += [f"Word by {how}, {words} words" for how in ("number", "key") for words in (3, 5)]
    assert [each.title for each in probe_result.overview()] == titles


@pytest.mark.parametrize("right", [0, 4])
def test_a_share_has_the_wilson_interval(right: int) -> None:
    rows = [
        ItemRecord(
            behaviour="needle", item=i, length=64, nats=1.0, right=float(i < right), changed_nats=1.0, changed_right=0.0
        )
        for i in range(10)
    ]
    summary = ProbeRecord({}, (), tuple(rows), ()).summary("needle")
    theirs = binomtest(right, 10).proportion_ci(method="wilson")
    assert (summary.right.low, summary.right.high) == pytest.approx((theirs.low, theirs.high))
    assert summary.changed_right.high == pytest.approx(0.2775, abs=1e-4)
    assert summary.more_right.low <= -right / 10 < summary.more_right.high


def test_a_probe_round_trips_and_has_a_page(probe_result: ProbeRecord, tmp_path: Path) -> None:
    save_probe(probe_result, tmp_path)
    restored = open_probe(tmp_path)
    assert restored == probe_result
    page = restored.page().html()
    assert page == probe_result.page().html()
    assert "layer 1: rotation frozen" in page
    assert "layer 2, head 2: zero-ablated" in page
    assert "Word by key, 5 words" in page
    assert "Does it find a word by its number or by its key?" in page
    damaged = json.loads((tmp_path / "probe.json").read_text())
    damaged["items"][0]["changed_right"] = None
    (tmp_path / "probe.json").write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"changed_right and changed_nats must be set together"):
        open_probe(tmp_path)
    with pytest.raises(InputError, match=r"contains no probe\.json"):
        open_probe(tmp_path / "nothing")


def test_changes_may_be_single_or_texts(model: Path) -> None:
    for changes in (Change(layer=0, output="zero"), "layers=1 output=zero"):
        record = probe(str(model), TEXT, changes=changes, sizes=SIZES, device="cpu")
        assert record.changes == ("layer 1: zero-ablated",)
    with pytest.raises(InputError, match="changes must be Change objects or texts, got 3"):
        probe(str(model), TEXT, changes=[3], sizes=SIZES, device="cpu")  # type: ignore[list-item]


def test_invalid_probes_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output must be zero for a probe, got mean"):
        probe(str(model), TEXT, changes=[Change(layer=0, output="mean")], sizes=SIZES, device="cpu")
    with pytest.raises(InputError, match=r"seed must be .*, got -1"):
        probe(str(model), TEXT, sizes=SIZES, device="cpu", seed=-1)
    with pytest.raises(InputError, match="lengths must be numbers from 64 to 1048576 in a tuple, got 64"):
        ProbeSizes(lengths=64)  # type: ignore[arg-type]
    weights = load_file(shutil.copytree(model, tmp_path / "copy") / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"weights are missing .* and would be random: lm_head\.weight"):
        probe(str(tmp_path / "copy"), TEXT, sizes=SIZES, device="cpu")


def test_token_ids_are_probed_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 20, (2, 60))
    actual = probe(str(model), ids, sizes=SIZES, device="cpu")
    assert {item.behaviour for item in actual.items} == {"loss", "copying"}
    assert actual.changes == actual.heads == ()
    assert all(row.changed_nats is None for row in actual.items)
    page = actual.page().html()
    assert "Needles" not in page
    own = load_model(str(model), device="cpu").model
    item = ItemWriter(None, ids.ravel(), 0).items(SIZES)[0]
    tokens = torch.tensor([item.tokens])
    with torch.no_grad():
        losses = -own(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    rows = [row for row in actual.items if row.item == 0]
    assert sum(row.nats * row.num_positions for row in rows) == pytest.approx(float(losses.sum()), rel=1e-4)
    for wrong in (np.array([0.5]), np.array([[0, 10**6]])):
        with pytest.raises(InputError, match=r"^tokens must be (whole numbers|from 0 to 699, .*, got 0 to 1000000)"):
            probe(str(model), wrong, sizes=SIZES, device="cpu")
