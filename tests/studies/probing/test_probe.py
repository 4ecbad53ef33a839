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
from tests.studies.probing.models import TEXT, saved, tokenizer

from toeplens.ground import InputError
from toeplens.sources.huggingface import AttentionCall, Change, captured, intervened, load_model
from toeplens.studies.kit.questions import Writer
from toeplens.studies.probing import Asked, ProbeRecord, open_probe, probe, save_probe
from toeplens.studies.probing.probe import ItemRecord

ASKED = Asked(lengths=(64, 80), depths=(0.0, 1.0), repeats=1, sequences=2, lists=2)
CHANGES = (Change(layer=0, speed=0.0), Change(layer=1, heads=(1,), output="zero"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def found(model: Path) -> ProbeRecord:
    return probe(str(model), TEXT, changes=CHANGES, asked=ASKED, device="cpu")


def test_every_number_is_that_of_a_pass_of_its_item_alone(model: Path, found: ProbeRecord) -> None:
    own = load_model(str(model), device="cpu").model
    for number, item in enumerate(Writer(tokenizer(), TEXT, 0).items(ASKED)):
        tokens = torch.tensor([item.tokens])
        with torch.no_grad():
            passes = [own(tokens).logits[0]]
            with intervened(own, CHANGES):
                passes.append(own(tokens).logits[0])
        rows = [row for row in found.items if row.item == number]
        for logits, names in zip(passes, (("nats", "right"), ("changed_nats", "changed_right")), strict=True):
            each, right = [], []
            for place in item.places:
                row = logits[place - 1]
                some = row if not item.choices else row[list(item.choices)]
                each.append(float(some.logsumexp(-1) - row[item.tokens[place]]))
                right.append(float(row[item.tokens[place]] == some.max()))
            for row in rows:
                part = [at for at, place in enumerate(item.places) if (row.start or 0) <= place < (row.stop or 10**6)]
                share = np.mean if item.behaviour in ("loss", "copying") else np.min
                assert getattr(row, names[0]) == pytest.approx(np.mean([each[at] for at in part]), abs=2e-5)
                assert getattr(row, names[1]) == pytest.approx(share([right[at] for at in part]))
        assert sum(row.places for row in rows if row.start) in (0, len(item.places))


def _keep(found: list[Any], call: AttentionCall) -> None:
    found.append(call.weights[0].clone())


def test_heads_retrieve_what_their_weights_say(model: Path, found: ProbeRecord) -> None:
    own = load_model(str(model), device="cpu").model
    needles = [item for item in Writer(tokenizer(), TEXT, 0).items(ASKED) if item.needle]
    score, mass = np.zeros((2, 2, 4))
    for item in needles:
        weights: list[Any] = []
        captured(own, {"input_ids": torch.tensor([item.tokens])}, partial(_keep, weights))
        first, last = item.needle or (0, 0)
        for layer, own_weights in enumerate(weights):
            for head in range(4):
                for place in item.places:
                    row = own_weights[head, place - 1]
                    hits = [j for j in range(first, last) if item.tokens[j] == item.tokens[place]]
                    score[layer, head] += (int(row.argmax()) in hits) / len(item.places) / len(needles)
                    mass[layer, head] += float(row[hits].sum()) / len(item.places) / len(needles)
    assert len(found.heads) == 8
    for each in found.heads:
        assert each.score == pytest.approx(score[each.layer, each.head])
        assert each.mass == pytest.approx(mass[each.layer, each.head], abs=1e-6)


def test_means_are_by_item_and_differences_paired(found: ProbeRecord) -> None:
    [whole] = found.summaries("loss")
    items = {row.item for row in found.of("loss")}
    assert whole.count == len(items) == 2
    by_item = [[row for row in found.of("loss") if row.item == item] for item in sorted(items)]
    means = [sum(row.nats * row.places for row in rows) / sum(row.places for row in rows) for rows in by_item]
    assert whole.nats.value == pytest.approx(np.mean(means))
    assert whole.more_nats.value == pytest.approx(whole.changed_nats.value - whole.nats.value)
    assert [each.length for each in found.summaries("copying", "length")] == [64, 80]
    assert {(e.length, e.depth) for e in found.summaries("needle", "length", "depth")} == {
        (length, depth) for length in (64, 80) for depth in (0.0, 1.0)
    }


@pytest.mark.parametrize("right", [0, 4])
def test_a_share_of_few_answers_has_wilsons_interval(right: int) -> None:
    rows = [
        ItemRecord(
            behaviour="needle", item=i, length=64, nats=1.0, right=float(i < right), changed_nats=1.0, changed_right=0.0
        )
        for i in range(10)
    ]
    whole = ProbeRecord({}, (), tuple(rows), ()).summary("needle")
    theirs = binomtest(right, 10).proportion_ci(method="wilson")
    assert (whole.right.low, whole.right.high) == pytest.approx((theirs.low, theirs.high))
    assert whole.changed_right.high == pytest.approx(0.2775, abs=1e-4)
    assert whole.more_right.low <= -right / 10 < whole.more_right.high


def test_it_comes_back_as_it_was_written_and_is_a_page(found: ProbeRecord, tmp_path: Path) -> None:
    save_probe(found, tmp_path)
    again = open_probe(tmp_path)
    assert again == found
    page = again.page().html()
    assert page == found.page().html()
    assert "layer 1: rotation frozen" in page
    assert "layer 2, head 2: zero-ablated" in page
    damaged = json.loads((tmp_path / "probe.json").read_text())
    damaged["items"][0]["changed_right"] = None
    (tmp_path / "probe.json").write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"changed_right and changed_nats must be set together"):
        open_probe(tmp_path)
    with pytest.raises(InputError, match=r"contains no probe\.json"):
        open_probe(tmp_path / "nothing")


def test_what_makes_no_sense_to_ask(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="output must be zero for a probe, got mean"):
        probe(str(model), TEXT, changes=[Change(layer=0, output="mean")], asked=ASKED, device="cpu")
    with pytest.raises(InputError, match=r"seed must be .*, got -1"):
        probe(str(model), TEXT, asked=ASKED, device="cpu", seed=-1)
    weights = load_file(shutil.copytree(model, tmp_path / "copy") / "model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"weights are missing .* and would be random: lm_head\.weight"):
        probe(str(tmp_path / "copy"), TEXT, asked=ASKED, device="cpu")


def test_token_ids_are_probed_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 20, (2, 60))
    found = probe(str(model), ids, asked=ASKED, device="cpu")
    assert {item.behaviour for item in found.items} == {"loss", "copying"}
    assert found.changes == found.heads == ()
    assert all(row.changed_nats is None for row in found.items)
    page = found.page().html()
    assert "Needles" not in page
    own = load_model(str(model), device="cpu").model
    item = Writer(None, ids.ravel(), 0).items(ASKED)[0]
    tokens = torch.tensor([item.tokens])
    with torch.no_grad():
        losses = -own(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    rows = [row for row in found.items if row.item == 0]
    assert sum(row.nats * row.places for row in rows) == pytest.approx(float(losses.sum()), rel=1e-4)
    for wrong in (np.array([0.5]), np.array([[0, 10**6]])):
        with pytest.raises(InputError, match=r"^tokens must be (whole numbers|from 0 to 699, .*, got 0 to 1000000)"):
            probe(str(model), wrong, asked=ASKED, device="cpu")
