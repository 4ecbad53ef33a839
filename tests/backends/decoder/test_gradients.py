"""Gradients are each example's own, at the logits that enter the softmax and at q and k as projected."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.lens.models import SMALL, decoder
from torch import Tensor
from torch.nn import functional as F

from toeplens.backends import relevance
from toeplens.backends.decoder.gradients import DecoderGradients
from toeplens.lens.ablation import Batch
from toeplens.lens.gradients import Differentiable, LayerGradient, LayerView
from toeplens.model import Decoder, LatentAttention
from toeplens.utils import InputError

LAYERS, HEADS, LENGTH, COUNT, CLASSES = 2, 2, 6, 5, 7
SIZES = SMALL | {"num_classes": CLASSES, "d_model": 16, "d_ff": 12, "num_heads": HEADS}
RELEASED = ("rope", "mla")  # in the released protocol too
CASES = [(name, "paper") for name in REPRESENTATIVES] + [(name, "released") for name in RELEASED]
cases = pytest.mark.parametrize(("encoding", "protocol"), CASES)
both_protocols = pytest.mark.parametrize("protocol", ["paper", "released"])


@cache
def model_of(encoding: str = "rope", protocol: str = "paper", **switches: Any) -> Decoder:
    return decoder(seed=3, noise=0.3, encoding=encoding, protocol=protocol, dropout=0.1, **SIZES, **switches)


def examples(padded: bool = True) -> Batch:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, SIZES["vocab_size"], (COUNT, LENGTH), generator=draw)
    labels = torch.randint(0, CLASSES, (COUNT,), generator=draw)
    labels[2] = -100
    return tokens, labels, torch.tensor([6, 4, 6, 2, 5]) if padded else None


def losses_of(model: Decoder, batch: Batch, *, fused: bool = True) -> Tensor:
    tokens, labels, lengths = batch
    return F.cross_entropy(model(tokens, lengths, fused=fused), labels, ignore_index=-100, reduction="none")


def gradients(model: Decoder, batch: Batch) -> tuple[Tensor, list[LayerGradient]]:
    return DecoderGradients(model).gradients(*batch)


@cases
def test_losses_match_the_fused_path(encoding: str, protocol: str) -> None:
    """float64, 1e-10; an example that does not count has a loss of 0."""
    model = model_of(encoding, protocol)
    with torch.no_grad():
        expected = losses_of(model, examples())
    actual, layers = gradients(model, examples())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    assert actual[2] == 0
    assert not any(x[2].any() for layer in layers for x in (layer.logits, layer.q, layer.k))


def perturbed_model(model: Decoder, changes: dict[tuple[int, str], Tensor]) -> Decoder:
    """The model with something added to layers' logits, queries or keys: by their own encodings and projections."""
    twin = copy.deepcopy(model)
    for layer in range(LAYERS):
        block = twin.block(layer)
        block.shares_bias = False
        attention = block.attention
        attention.encoding = perturbed_encoding(attention.encoding, changes[layer, "logits"])
        attention.project = perturbed_projection(attention.project, changes[layer, "q"], changes[layer, "k"])
    return twin


def perturbed_encoding(encoding: Any, change: Tensor) -> Any:
    class Moved(type(encoding)):
        def call_hook(self, name: str, *arguments: Any, inputs: Any) -> Any:
            result = super().call_hook(name, *arguments, inputs=inputs)
            return result + change if name == "transform_logits" else result

    perturbed = copy.deepcopy(encoding)
    perturbed.__class__ = Moved
    return perturbed


def perturbed_projection(project: Any, q_change: Tensor, k_change: Tensor) -> Any:
    def other(queries: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(queries, context)
        return q + q_change, k + k_change, v

    return other


@cases
def test_gradients_match_central_differences_of_each_loss(encoding: str, protocol: str) -> None:
    """float64, 1e-6: at the largest entry and at two others, in every layer, at logits, queries and keys.

    One pass does for all: copies of an example, each with one entry moved up or down.
    """
    model, batch = model_of(encoding, protocol), examples()
    _, layers = gradients(model, batch)
    draw = torch.Generator().manual_seed(5)
    b, step = 1, 1e-6
    actual = {(layer.layer, name): getattr(layer, name)[b] for layer in layers for name in ("logits", "q", "k")}
    places = [
        (key, int(flat))
        for key, values in actual.items()
        for flat in (values.abs().argmax(), *torch.randint(0, values.numel(), (2,), generator=draw))
    ]
    changes = {key: torch.zeros(2 * len(places), *values.shape).double() for key, values in actual.items()}
    for index, (key, flat) in enumerate(places):
        changes[key][2 * index].view(-1)[flat] = step
        changes[key][2 * index + 1].view(-1)[flat] = -step
    copies = tuple(part[b : b + 1].repeat(2 * len(places), *[1] * (part.ndim - 1)) for part in batch)
    with torch.no_grad():
        up, down = losses_of(perturbed_model(model, changes), copies, fused=False).unflatten(0, (-1, 2)).unbind(1)
    expected = (up - down) / (2 * step)
    ours = torch.stack([actual[key].flatten()[flat] for key, flat in places])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert all(values.abs().max() > 1e-4 for values in actual.values())


@pytest.mark.parametrize("readout", ["last", "mean", "masked-mean"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_last_layer_has_only_its_computed_queries(readout: str, padded: bool) -> None:
    batch = examples(padded)
    _, layers = gradients(model_of("alibi", readout=readout), batch)
    every = torch.arange(LENGTH).expand(COUNT, -1)
    last = torch.full((COUNT, 1), LENGTH - 1) if batch[2] is None else batch[2].unsqueeze(1) - 1
    assert torch.equal(layers[0].rows, every)
    assert torch.equal(layers[1].rows, last if readout == "last" else every)
    for layer in layers:
        assert layer.logits.shape == (COUNT, HEADS, layer.rows.shape[1], LENGTH)
        unseen = torch.arange(LENGTH) > layer.rows.unsqueeze(-1)
        unseen = (unseen | ~layer.present.unsqueeze(1)).unsqueeze(1).expand_as(layer.logits)
        assert not layer.logits[unseen].any()
        assert layer.logits[~unseen].any()


@pytest.mark.parametrize("encoding", ["rope", "sinusoidal", "t5", "mla"])
@both_protocols
def test_per_example_parameter_gradients_match_backward(encoding: str, protocol: str) -> None:
    """Outer products with the inputs are what a backward pass for each example gives (float64, 1e-10)."""
    model, (tokens, labels, lengths) = model_of(encoding, protocol), examples()
    _, layers = gradients(model, (tokens, labels, lengths))
    for b in (0, 1, 3):
        alone = (tokens[b : b + 1], labels[b : b + 1], lengths[b : b + 1])
        for layer in layers:
            projections = layer.projections
            by_q = torch.einsum("hqd,qe->hde", layer.q[b], projections.queries[b])
            by_k = torch.einsum("hnd,nf->hdf", layer.k[b], projections.keys[b])
            attention = model.block(layer.layer).attention
            loss = losses_of(model, alone).sum()
            if not isinstance(attention, LatentAttention):
                (weight,) = torch.autograd.grad(loss, attention.qkv.weight)
                to_q, to_k, _ = weight.unflatten(0, (3, HEADS, -1))
            else:
                up_q, turn_q, up_kv, turn_k = torch.autograd.grad(
                    loss, [x.weight for x in (attention.up_q, attention.rotary_q, attention.up_kv, attention.rotary_k)]
                )
                to_q = torch.cat([x.unflatten(0, (HEADS, -1)) for x in (up_q, turn_q)], dim=1)
                content, latent = attention.head_dim, attention.down_kv.out_features
                to_k = up_kv[: up_q.shape[0]].unflatten(0, (HEADS, -1))
                by_shared = by_k[:, content:, latent:].sum(0)
                torch.testing.assert_close(by_shared, turn_k, rtol=0, atol=1e-10)
                assert projections.weight_mask[:content, :latent].all()
                assert projections.weight_mask[content:, latent:].all()
                assert projections.weight_mask.sum() == content * latent + (len(projections.weight_mask) - content) * (
                    projections.weight_mask.shape[1] - latent
                )
                by_k = by_k[:, :content, :latent]
            torch.testing.assert_close(by_q, to_q, rtol=0, atol=1e-10)
            torch.testing.assert_close(by_k, to_k, rtol=0, atol=1e-10)


def test_the_model_is_left_unchanged() -> None:
    model = copy.deepcopy(model_of("t5")).train()
    model.block(1).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    source = DecoderGradients(model)
    first, _ = source.gradients(*examples())
    source.layer_views(examples()[0], None)
    source.descend(total_measure, examples(), examples())
    with torch.no_grad():
        relevance(model, examples()[0], examples()[2])
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(first, gradients(model_of("t5"), examples())[0])  # dropout was off
    assert isinstance(source, Differentiable)


def total_measure(layers: list[LayerView]) -> Tensor:
    """A measure of everything that a layer's trace holds."""
    return torch.stack([(view.trace.q.square().sum() + view.trace.k.sin().sum()) for view in layers])


@cases
def test_the_slope_matches_a_small_gradient_step(encoding: str, protocol: str) -> None:
    """Central difference in float64 (1e-6 of the largest)."""
    model, batch = model_of(encoding, protocol), examples()
    value, actual, gradient_norm, parameter_norm = DecoderGradients(model).descend(total_measure, batch, batch)
    parameters = list(model.parameters())
    loss = losses_of(model, batch).sum() / (COUNT - 1)
    made = torch.autograd.grad(loss, parameters, allow_unused=True)
    direction = [torch.zeros_like(p) if g is None else -g for p, g in zip(parameters, made, strict=True)]
    values = []
    for step in (-1e-6, 0.0, 1e-6):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, along in zip(twin.parameters(), direction, strict=True):
                parameter.add_(step * along)
            values.append(total_measure(DecoderGradients(twin).layer_views(batch[0], batch[2])))
    slope = (values[2] - values[0]) / 2e-6
    torch.testing.assert_close(value, values[1])
    torch.testing.assert_close(actual, slope, rtol=0, atol=1e-6 * float(slope.abs().max()))
    assert gradient_norm == pytest.approx(float(torch.cat([d.flatten() for d in direction]).norm()))
    assert parameter_norm == pytest.approx(float(torch.cat([p.detach().flatten() for p in parameters]).norm()))


def test_without_counted_examples_there_is_no_direction() -> None:
    tokens, labels, lengths = examples()
    none = (tokens, torch.full_like(labels, -100), lengths)
    with pytest.raises(InputError, match="at least one example that counts"):
        DecoderGradients(model_of()).descend(total_measure, none, none)
