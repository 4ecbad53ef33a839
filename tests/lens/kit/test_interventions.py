"""Whatever takes a head's place and however the harm is counted: what the whole model, edited and run anew, gives."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy
from tests.lens import models
from tests.lens.models import loud_decoder, split
from torch import Tensor

from toeplens.backends import DecoderSource
from toeplens.ground import InputError
from toeplens.lens.ablation.ablate import ablate_heads
from toeplens.lens.kit.interventions import Batch, Intervention, donors, mean_outputs, replacements
from toeplens.model import Decoder

replaying = importlib.import_module("toeplens.backends.decoder")

LAYERS, HEADS, LENGTH, CLASSES, COUNT = 2, 3, 6, 5, 9
SIZES = {
    "vocab_size": 9,
    "num_classes": CLASSES,
    "d_model": 24,
    "d_ff": 20,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "max_len": 8,
}
NAMES = ("nope", "sinusoidal", "t5", "alibi", "rope", "rope-absolute", "mla", "fox", "urpe", "path")
VARIANTS: dict[str, dict[str, Any]] = {name: {"encoding": name} for name in NAMES} | {
    "partial-rope": {"encoding": "partial-rope", "encoding_options": {"heads": 1}}
}
both_protocols = pytest.mark.parametrize("protocol", ["paper", "released"])
replacing = pytest.mark.parametrize("intervention", ["mean", "resample", "position"])
every_intervention = pytest.mark.parametrize("intervention", ["zero", "mean", "resample", "position"])


def decoder(variant: str = "rope", protocol: str = "paper", **fields: Any) -> Decoder:
    return loud_decoder(**{**SIZES, "protocol": protocol, **VARIANTS[variant], **fields})


def examples(*, padded: bool = True, ignored: int = 2) -> Batch:
    return models.examples(COUNT, LENGTH, padded=padded, ignored=ignored)


# ---- the plain program ----------------------------------------------------------------------------------------------


@torch.no_grad()
def with_heads(model: Decoder, batch: Batch, given: dict[tuple[int, int], Tensor]) -> Tensor:
    """The whole model run anew; hooks put outputs [b, N, d] into heads' slices of the projections' inputs."""
    tokens, _, lengths = batch
    handles = []
    for (layer, head), outputs in given.items():

        def put(_: Any, args: tuple[Tensor], head: int = head, outputs: Tensor = outputs) -> tuple[Tensor]:
            z = args[0].clone()
            here = outputs
            if z.shape[1] == 1:  # one position is read
                last = torch.full((len(tokens),), LENGTH - 1) if lengths is None else lengths - 1
                here = outputs[torch.arange(len(tokens)), last][:, None]
            z.unflatten(-1, (HEADS, -1))[..., head, :] = here
            return (z,)

        handles.append(model.block(layer).attention.out.register_forward_pre_hook(put))
    try:
        return model(tokens, lengths)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def outputs(model: Decoder, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The input [L, b, N, D] and head outputs [b, N, H, d] of each layer, as hooks see them where all is computed."""
    whole = Decoder(model.config.model_copy(update={"readout": "mean"})).double().eval()
    whole.load_state_dict(model.state_dict())
    seen: list[Tensor] = []
    inputs: list[Tensor] = []
    for layer in range(LAYERS):
        block = whole.block(layer)
        block.norm_attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
        block.attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(-1, (HEADS, -1))))
    whole(batch[0], batch[2])
    return torch.stack(inputs), seen


@torch.no_grad()
def without_position(model: Decoder, layer: int, x: Tensor, batch: Batch) -> Tensor:
    """Softmax of q . k alone, query by query and key by key, [b, N, H, d]."""
    block, lengths = model.block(layer), batch[2]
    _, context = model.begin(batch[0], lengths)
    q, k, v = block.project(x, context)
    found = torch.zeros_like(v)
    for b in range(len(x)):
        length = LENGTH if lengths is None or not model.config.pad_mask else int(lengths[b])
        for i in range(LENGTH):
            keys = min(i + 1, length) if model.config.causal else length
            logits = torch.einsum("hd,hjd->hj", q[b, :, i], k[b, :, :keys]) * block.attention.scale
            found[b, :, i] = torch.einsum("hj,hjd->hd", logits.softmax(-1), v[b, :, :keys])
    return found.transpose(1, 2)


def means(z: Tensor, batch: Batch) -> Tensor:
    """The mean by position over the sequences that count and have a token there, [b, N, H, d]."""
    _, labels, lengths = batch
    found = torch.zeros_like(z)
    for i in range(LENGTH):
        there = [b for b in range(COUNT) if labels[b] >= 0 and (lengths is None or i < lengths[b])]
        if there:
            found[:, i] = torch.stack([z[b, i] for b in there]).mean(0)
    return found


def instead(model: Decoder, batch: Batch, intervention: str, seed: int = 0) -> list[Tensor]:
    """What takes the heads' places in each layer, [b, N, H, d]."""
    inputs, z = outputs(model, batch)
    if intervention == "zero":
        return [torch.zeros_like(layer) for layer in z]
    if intervention == "mean":
        return [means(layer, batch) for layer in z]
    if intervention == "position":
        return [without_position(model, layer, inputs[layer], batch) for layer in range(LAYERS)]
    _, labels, lengths = batch
    counted = torch.nonzero(labels >= 0).squeeze(1)
    own = torch.full((COUNT,), LENGTH) if lengths is None else lengths
    other = torch.arange(COUNT)
    other[counted] = counted[torch.from_numpy(donors(own[counted].numpy(), seed))]
    return [layer[other] for layer in z]


def per_example(metric: str, logits: Tensor, intact: Tensor, labels: Tensor) -> np.ndarray:
    """The metric of each example that counts, from its definition."""
    rows = [b for b in range(COUNT) if labels[b] >= 0]
    p, q = (np.exp(x.log_softmax(-1).numpy()) for x in (intact, logits))
    if metric == "accuracy":
        return np.array([float(q[b].argmax() == labels[b]) for b in rows])
    return np.array([-np.log(q[b][labels[b]]) if metric == "loss" else entropy(p[b], q[b]) for b in rows])


def check(model: Decoder, batch: Batch, intervention: Intervention, metric: Any, cumulative: bool = True) -> None:
    """Drops, baseline and cumulative values are those of the whole model run anew (float64, 1e-10)."""
    labels = batch[1]
    found = ablate_heads(
        DecoderSource(model),
        split(batch, 5),
        metric=metric,
        intervention=intervention,
        bootstrap=5,
        cumulative=cumulative,
    )
    other = instead(model, batch, intervention)
    intact = with_heads(model, batch, {})
    before = per_example(metric, intact, intact, labels).mean()
    sign = 1 if metric == "accuracy" else -1
    assert found.baseline == pytest.approx(before, abs=1e-12)
    for layer in range(LAYERS):

        def value(heads: Any, layer: int = layer) -> float:
            logits = with_heads(model, batch, {(layer, head): other[layer][:, :, head] for head in heads})
            return float(per_example(metric, logits, intact, labels).mean())

        drops = np.array([sign * (before - value([head])) for head in range(HEADS)])
        np.testing.assert_allclose(found.drops[layer], drops, rtol=0, atol=1e-10)
        if cumulative:
            order = np.argsort(-found.drops[layer], kind="stable")
            together = [value(order[:k]) for k in range(HEADS + 1)]
            np.testing.assert_allclose(found.cumulative[layer], together, rtol=0, atol=1e-10)
    if metric == "accuracy":
        assert (found.metric, found.intervention, found.method) == ("accuracy", intervention, "exact")


@pytest.mark.parametrize(
    ("variant", "protocol"), [*((name, "paper") for name in VARIANTS), ("rope", "released"), ("mla", "released")]
)
def test_drops_without_position_are_what_running_the_whole_model_anew_gives(variant: str, protocol: str) -> None:
    check(decoder(variant, protocol), examples(), "position", "loss", cumulative=False)


@pytest.mark.parametrize("variant", ["rope", "mla"])
@both_protocols
@pytest.mark.parametrize("intervention", ["mean", "resample"])
def test_so_they_are_with_means_and_other_examples(variant: str, protocol: str, intervention: Intervention) -> None:
    check(decoder(variant, protocol), examples(), intervention, "loss", cumulative=False)


@every_intervention
@pytest.mark.parametrize("metric", ["accuracy", "loss", "kl"])
def test_so_they_are_with_every_metric_and_together(intervention: Intervention, metric: str) -> None:
    check(decoder(), examples(), intervention, metric)


@replacing
@pytest.mark.parametrize("readout", ["mean", "masked-mean"])
def test_so_they_are_with_every_readout_and_without_padding(intervention: Intervention, readout: str) -> None:
    check(decoder("alibi", readout=readout), examples(padded=False), intervention, "loss")


@every_intervention
@both_protocols
@pytest.mark.parametrize("numbers", [2 * LENGTH * 24, 4 * LENGTH * 24])
def test_how_much_is_worked_at_once_does_not_matter(
    intervention: Intervention, protocol: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, batch = DecoderSource(decoder("fox" if protocol == "paper" else "rope", protocol)), examples()
    gains = (torch.rand(6, LAYERS, HEADS, generator=torch.Generator().manual_seed(2)) > 0.4).float()
    other = replacements(source, [batch], intervention, 0)(0)
    state = next(iter(source.states(batch[0], batch[2])))
    whole = source.replay(state, gains, other)
    monkeypatch.setitem(replaying.AT_ONCE, "cpu", numbers)
    torch.testing.assert_close(source.replay(state, gains, other), whole, rtol=0, atol=1e-10)


@every_intervention
@both_protocols
def test_heads_of_several_layers_change_as_in_one_pass_with_gains(intervention: Intervention, protocol: str) -> None:
    """`replay` of a tree of copies against `scaled`, a plain pass a copy; gains of all sizes."""
    source, batch = DecoderSource(decoder(protocol=protocol)), examples()
    gains = torch.rand(5, LAYERS, HEADS, generator=torch.Generator().manual_seed(2)).double()
    gains[1], gains[2, 0], gains[3] = 1, gains[4, 0], gains[3].round()
    other = replacements(source, [batch], intervention, 0)(0)
    found = source.replay(next(iter(source.states(batch[0], batch[2]))), gains, other)
    for row, logits in zip(gains, found, strict=True):
        with torch.no_grad():
            plain = source.scaled(batch[0], batch[2], row[:, None].expand(-1, COUNT, -1), other)
        torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)


# ---- means ----------------------------------------------------------------------------------------------------------


def test_means_leave_padding_and_ignored_examples_out() -> None:
    source, batch = DecoderSource(decoder(protocol="released")), examples()
    tokens, labels, lengths = batch
    assert lengths is not None
    short = lengths < LENGTH
    tokens, labels, lengths = tokens[short], labels[short], lengths[short]  # no sequence reaches the last position
    found = mean_outputs(source, [(tokens, labels, lengths)])
    elsewhere = tokens.clone()
    elsewhere[labels < 0] = 1  # what does not count may say anything
    again = mean_outputs(source, [(elsewhere, labels, lengths)])
    for layer, other in zip(found, again, strict=True):
        assert torch.equal(layer, other)
        assert not layer[-1].any()
        assert layer[int(lengths[labels >= 0].max()) - 1].any()


# ---- donors ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=2, max_size=30), st.integers(0, 9))
def test_everyone_has_a_donor_of_the_same_length_where_there_is_one(lengths: list[int], seed: int) -> None:
    found = donors(np.array(lengths), seed)
    for taker, giver in enumerate(found):
        assert giver != taker
        if lengths.count(lengths[taker]) > 1:
            assert lengths[giver] == lengths[taker]
        elif lengths[taker] < max(lengths):
            assert lengths[giver] == min(n for n in lengths if n > lengths[taker])
        else:
            assert lengths[giver] == max(n for n in lengths if n < lengths[taker])
    for length in {n for n in lengths if lengths.count(n) > 1}:
        group = [taker for taker, n in enumerate(lengths) if n == length]
        assert sorted(found[group]) == group  # everyone gives once, within the length
    assert np.array_equal(found, donors(np.array(lengths), seed))


def test_one_example_has_no_donor() -> None:
    tokens, labels, lengths = examples(ignored=COUNT - 1)
    with pytest.raises(InputError, match="batches must have at least 2"):
        ablate_heads(DecoderSource(decoder()), [(tokens, labels, lengths)], intervention="resample")
