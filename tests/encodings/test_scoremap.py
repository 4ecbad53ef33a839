"""DAPE, its second version and URPE against plain loops, and against the layers that the released program builds."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tests.encodings.samples import SIZES, draw
from tests.encodings.samples import build as samples_build
from torch import Tensor, nn

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend, attention_logits, attention_weights, conformance
from toeplens.encodings.logits import URPE, DAPEv2

B, H, N, D = 2, 3, 9, 8
DAPES: list[tuple[str, dict[str, Any]]] = [
    ("dape-v2", {}),
    ("dape-v2", {"base": "kerple-log", "kernel_size": 5}),
    ("dape-v2", {"base": "none"}),
    ("dape", {}),
    ("dape", {"base": "rope"}),
]
every_dape = pytest.mark.parametrize(("name", "options"), DAPES)
PAST = torch.ones(N, N, dtype=torch.bool).tril()

build = partial(samples_build, std=0.5)


def logits_of(encoding: PositionalEncoding, q: Tensor, k: Tensor, **more: Any) -> Tensor:
    p = torch.arange(k.shape[-2])
    return attention_logits(q, k, encoding=encoding, q_positions=p[-q.shape[-2] :], k_positions=p, scale=0.3, **more)


def maps(encoding: DAPEv2, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """S, and B or (where there is none) nothing."""
    p = torch.arange(N)
    if encoding.turns:
        q, k = encodings.build("rope", pairing="half", **SIZES).rotate(q, k, p, p)
    scores = q @ k.transpose(-1, -2) * 0.3
    if encoding.base is None or encoding.turns:
        return scores, scores[:, :0]
    return scores, encoding.base.bias(p, p).double().expand(B, -1, -1, -1)


def leaky(x: float) -> float:
    return x if x > 0 else 0.01 * x


# ---- DAPE -----------------------------------------------------------------------------------------------------------


@every_dape
def test_each_logit_is_the_network_on_its_row_with_nothing_beside_what_is_visible(name: str, options: dict) -> None:
    encoding = build(name, **options)
    q, k = draw(2, B, H, N, D)
    with torch.no_grad():
        ours = logits_of(encoding, q, k)
        scores, bias = maps(encoding, q, k)
    both = torch.cat((scores, bias), dim=1)
    inward, outward = encoding.inward, encoding.outward
    size = inward.weight.shape[-1]
    half = size // 2
    first, second = inward.weight[:, :, 0].detach(), outward.weight[:, :, 0].detach()

    def hidden(b: int, i: int, j: int) -> Tensor:
        total = inward.bias.detach().clone()
        for tap in range(size):
            if 0 <= j + tap - half <= i:
                total += first[:, :, tap] @ both[b, :, i, j + tap - half]
        return torch.tensor([leaky(x) for x in total.tolist()], dtype=torch.float64)

    for b, i, j in product(range(B), (0, 1, 5, N - 1), range(N)):
        if j > i:
            continue
        wanted = scores[b, :, i, j] + (bias[b, :, i, j] if bias.numel() else 0) + outward.bias.detach()
        for tap in range(size):
            wanted = wanted + second[:, :, tap] @ hidden(b, i, j + tap - half)
        assert float((ours[b, :, i, j] - wanted).abs().max()) < 1e-12


@every_dape
def test_it_is_the_released_layers_but_for_the_ends_of_the_map(name: str, options: dict) -> None:
    """The program: both maps cut to the lower triangle, and two padded convolutions over them, heads first."""
    encoding = build(name, **options)
    q, k = draw(2, B, H, N, D)
    size = encoding.inward.weight.shape[-1]
    width, half = encoding.inward.out_channels, size // 2
    theirs = nn.Sequential(
        nn.Conv2d(encoding.inward.in_channels, width, (1, size), (1, 1), (0, half)),
        nn.LeakyReLU(),
        nn.Conv2d(width, H, (1, size), (1, 1), (0, half)),
    ).double()
    with torch.no_grad():
        for layer, source in ((theirs[0], encoding.inward), (theirs[2], encoding.outward)):
            layer.weight.copy_(source.weight)
            layer.bias.copy_(source.bias)
        scores, bias = maps(encoding, q, k)
        wanted = theirs(torch.cat((scores, bias), dim=1).tril()) + scores + (bias if bias.numel() else 0)
        apart = (logits_of(encoding, q, k).masked_fill(~PAST, 0) - wanted.masked_fill(~PAST, 0)).abs()
    assert float(apart[..., half : N - half].max()) < 1e-12
    assert bool((apart[..., :half] > 1e-3).any()) == (half > 0)
    assert bool((apart[..., N - half :] > 1e-3).any()) == (half > 0)


def test_the_network_on_ropes_scores_turns_before_it_scores() -> None:
    encoding = build("dape", base="rope")
    assert encoding.overrides("rotate")
    assert not build("dape").overrides("rotate")
    assert encoding.inward.in_channels == H
    conformance.check("dape", skip=["compile"], base="rope")


def test_the_first_version_is_a_perceptron_on_each_pair() -> None:
    encoding = build("dape", base="kerple-log")
    q, k = draw(2, B, H, N, D)
    theirs = nn.Sequential(nn.Linear(2 * H, 32), nn.LeakyReLU(), nn.Linear(32, H)).double()
    with torch.no_grad():
        for layer, source in ((theirs[0], encoding.inward), (theirs[2], encoding.outward)):
            layer.weight.copy_(source.weight.flatten(1))
            layer.bias.copy_(source.bias)
        scores, bias = maps(encoding, q, k)
        pairs = torch.cat((scores, bias), dim=1).movedim(1, -1)
        wanted = scores + bias + theirs(pairs).movedim(-1, 1)
        assert float((logits_of(encoding, q, k) - wanted)[..., PAST].abs().max()) < 1e-12


@every_dape
def test_a_row_depends_on_its_visible_keys_alone(name: str, options: dict) -> None:
    """Cut off after the query, or shown among hidden keys on both sides: the same logits."""
    encoding, hidden = build(name, **options), 4
    q, k = draw(2, B, H, N, D)
    with torch.no_grad():
        whole = logits_of(encoding, q, k)
        for n in range(1, N):
            assert (
                float((logits_of(encoding, q[:, :, :n], k[:, :, :n])[:, :, -1] - whole[:, :, n - 1, :n]).abs().max())
                < 1e-12
            )
        if options.get("base") == "fire":
            return  # it counts from position 0
        padded = torch.cat((1e3 * draw(B, H, hidden, D, seed=7), k), dim=2)
        mask = torch.arange(N + hidden) >= hidden
        for causal in (True, False):
            alone = logits_of(encoding, q, k, causal=causal)
            beside = logits_of(encoding, q, padded, mask=mask.expand(B, 1, 1, -1), causal=causal)
            finite = alone.isfinite()
            assert float((beside[..., hidden:] - alone)[finite].abs().max()) < 1e-12


def test_masks_may_differ_by_head() -> None:
    encoding, (q, k) = build("dape-v2"), draw(2, B, H, N, D)
    window = PAST & ~torch.ones(N, N, dtype=torch.bool).tril(-3)
    mask = torch.stack((PAST, window, PAST)).unsqueeze(0)
    with torch.no_grad():
        ours = logits_of(encoding, q, k, mask=mask)
        scores, bias = maps(encoding, q, k)
        shown = torch.cat([part.masked_fill(~mask, 0) for part in (scores, bias)], dim=1)
        grown = nn.functional.pad(shown, (2, 2))
        refined = encoding.outward(nn.functional.leaky_relu(encoding.inward(grown)))
        wanted = (scores + bias + refined).masked_fill(~mask, float("-inf"))
    assert torch.equal(ours.isinf(), ~mask.expand_as(ours))
    assert float((ours - wanted)[mask.expand_as(ours)].abs().max()) < 1e-12


# ---- URPE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["t5", "relative-table", "none"])
def test_weights_are_a_softmax_times_a_factor_of_the_offset(base: str) -> None:
    encoding = build("urpe", base=base)
    q, k, v = draw(3, B, H, N, D)
    p = torch.tensor([0, 1, 2, 5, 9, 30, 63, 64, 200])  # offsets of 63 and more share a factor
    more: dict[str, Any] = {"encoding": encoding, "q_positions": p, "k_positions": p, "scale": 0.3}
    with torch.no_grad():
        weights = attention_weights(q, k, **more)
        out = attend(q, k, v, **more)
        wanted = torch.zeros_like(weights)
        for i in range(N):
            row = (q[:, :, i : i + 1] @ k[:, :, : i + 1].transpose(-1, -2)).squeeze(-2) * 0.3
            if encoding.base is not None:
                row = row + encoding.base.bias(p[i : i + 1], p[: i + 1])[:, 0]
            row = row.exp() / row.exp().sum(-1, keepdim=True)
            for j in range(i + 1):
                factor = encoding.factors.weight[min(int(p[i] - p[j]), 63) + 63]
                wanted[:, :, i, j] = row[:, :, j] * factor
    assert float((weights - wanted).abs().max()) < 1e-12
    assert float((out - wanted @ v).abs().max()) < 1e-12


def test_it_starts_as_its_base() -> None:
    torch.manual_seed(0)
    encoding = encodings.build("urpe", **SIZES)
    assert isinstance(encoding, URPE)
    assert torch.equal(encoding.factors.weight, torch.ones(127, H))
    wide = encodings.build("urpe", **SIZES, init_std=0.5)
    assert isinstance(wide, URPE)
    assert 0.3 < float(wide.factors.weight.detach().std()) < 0.7
    assert encoding.for_layer(3) is encoding


def test_without_a_base_it_couples_to_the_weights_alone() -> None:
    with_base, without = build("urpe"), build("urpe", base="none")
    assert (with_base.also_couples, without.also_couples) == (("bias",), ())
    assert (with_base.fixed_bias, without.fixed_bias) == (True, False)
    offsets = torch.arange(-5, 6)
    assert torch.equal(with_base.kernel(offsets), with_base.base.kernel(offsets))
    assert without.kernel(offsets) is None
    assert without.bias(offsets, offsets) is None
