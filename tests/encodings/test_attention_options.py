"""What attention is asked beyond an encoding: grouped keys, windows, soft caps, sinks; and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.encodings.samples import draw
from torch import Tensor

from toeplens import encodings
from toeplens.encodings import attend, attention_logits, attention_weights
from toeplens.encodings.conformance import SIZES, Specimen
from toeplens.ground import InputError

B, H, N, D = 2, 6, 21, 8


def given(name: str, length: int = N, start: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v of six heads and what attention is told, of an encoding with random parameters."""
    specimen = Specimen(lambda: encodings.build(name, **{**SIZES, "num_heads": H}))
    positions = specimen.positions(length, start)
    x = specimen.encoding.embed(specimen.content(B, length), positions)
    return *specimen.project(x), specimen.layer(x, positions)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9) -> None:
    scale = max(1.0, float(theirs.detach().abs().max()))
    assert float((ours - theirs).detach().abs().max()) <= tolerance * scale


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_grouped_keys_are_as_if_each_head_had_its_own(name: str, groups: int) -> None:
    q, k, v, told = given(name)
    k, v = k[:, :groups], v[:, :groups]
    whole = [x.repeat_interleave(H // groups, dim=1) for x in (k, v)]
    for fused in (True, False):
        close(attend(q, k, v, fused=fused, **told), attend(q, *whole, fused=fused, **told))
    close(attend(q, k, v, at_once=1, **told), attend(q, *whole, **told))
    close(attention_weights(q, k, **told), attention_weights(q, whole[0], **told))


@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_window_is_a_mask(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toeplens.encodings.attention.LEAST", 4)  # several blocks, each with its own keys
    q, k, v, told = given(name)
    offset = torch.arange(N)[:, None] - torch.arange(N)
    mask = (offset >= 0) & (offset < window)
    wanted = attend(q, k, v, mask=mask, fused=False, **told)
    ways: list[dict[str, Any]] = [{}, {"fused": False}, {"at_once": B * H * N * 4}]
    for more in ways:
        close(attend(q, k, v, window=window, **more, **told), wanted)
    padded = torch.arange(N) >= torch.tensor([0, 5])[:, None]
    wanted_padded = attend(q, k, v, mask=mask, padding=~padded, fused=False, **told)
    for more in ({"padding": ~padded}, {"mask": padded[:, None, None]}):
        close(attend(q, k, v, window=window, **more, **told), wanted_padded)
    last = {**told, "q_positions": told["q_positions"][-3:]}  # with a key cache
    close(attend(q[:, :, -3:], k, v, window=window, **last), wanted[:, :, -3:])


def test_what_a_window_leaves_out_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 tokens that see 100 each: no product of more keys than a window's and a block's."""
    sizes: list[tuple[int, int]] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, *args: Any, **more: Any) -> Tensor:
        sizes.append((q.shape[-2], k.shape[-2]))
        return fused(q, k, *args, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for name in ("rope", "alibi", "t5"):
        encoding = encodings.build(name, **{**SIZES, "num_heads": 1})
        q, k, v = draw(3, 1, 1, 4000, 8, dtype=torch.float32)
        p = torch.arange(4000)
        attend(q, k, v, encoding=encoding, scale=0.3, q_positions=p, k_positions=p, window=100)
    assert max(n * m for n, m in sizes) <= 512 * 612
    assert sum(n * m for n, m in sizes) < 3 * 4000 * 700


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "fox"])
def test_soft_caps_and_sinks_are_what_their_formulas_say(name: str) -> None:
    """By loops over heads and queries, in float64, to 1e-12."""
    q, k, v, told = given(name)
    cap, sinks = 0.7, draw(H, seed=3)
    plain = attention_logits(q, k, **told)
    encoding, p = told["encoding"], told["q_positions"]
    bias = torch.zeros_like(plain)
    if name == "alibi":
        bias = encoding.bias(p, p).expand_as(plain)
    out = attend(q, k, v, sinks=sinks, **told)
    for b in range(B):
        for h in range(H):
            for i in range(N):
                row = plain[b, h, i, : i + 1].exp()
                close(out[b, h, i], (row @ v[b, h, : i + 1]) / (row.sum() + sinks[h].exp()), 1e-12)
    if name != "fox":
        capped = attention_logits(q, k, softcap=cap, **told)
        seen = torch.ones(N, N, dtype=torch.bool).tril()
        wanted = cap * ((plain - bias) / cap).tanh() + bias
        close(capped[..., seen], wanted[..., seen], 1e-12)
        close(attend(q, k, v, softcap=cap, **told), capped.softmax(-1) @ v, 1e-12)
    close(attend(q, k, v, softcap=1e9, sinks=torch.full((H,), -math.inf), **told), attend(q, k, v, **told), 1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"q": draw(B, H, N)},
        r"^q must be a float tensor of shape \[B, 6, Nq, d\], got torch.float64 of shape \[2, 6, 21\]",
    ),
    ({"k": draw(B, 4, N, D)}, r"^k must have a number of heads that divides the 6 heads of q, got 4"),
    ({"k": draw(B, H, N, 4)}, r"^k must be .* shape \[2, G, Nk, 8\]"),
    ({"v": draw(B, 3, N, D)}, r"^v must be .* shape \[2, 6, 21, dv\]"),
    ({"q_positions": torch.arange(5)}, r"^q_positions must have shape \[21\] or \[2, 21\], got shape \[5\]"),
    ({"rows": torch.arange(3)}, r"^rows must be an integer tensor of shape \[21\]"),
    ({"mask": torch.ones(3, 1, 1, N, dtype=torch.bool)}, r"^mask must broadcast to .*, got shape \[3, 1, 1, 21\]"),
    (
        {"mask": torch.ones(B, 1, N, 1, dtype=torch.bool)},
        r"^mask must broadcast to .* with all keys, got shape \[2, 1, 21, 1\]",
    ),
    ({"padding": torch.zeros(B, N)}, r"^padding must be a bool tensor of shape \[2, 21\], got torch.float32"),
    ({"window": 3, "causal": False}, r"^window must be at least 1, and attention causal, got 3"),
    ({"softcap": 0.0}, r"^softcap must be finite and over 0, got 0.0"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_shapes_that_do_not_go_together_are_refused(change: dict[str, Any], sentence: str) -> None:
    q, k, v, told = given("rope")
    with pytest.raises(InputError, match=sentence):
        attend(**{"q": q, "k": k, "v": v, **told, **change})


def test_places_of_another_number_of_coordinates_are_refused() -> None:
    q, k, v, told = given("axial-rope")
    with pytest.raises(InputError, match=r"^q_positions must have shape \[21, 2\] .*, got shape \[21, 3\]"):
        attend(q, k, v, **{**told, "q_positions": torch.zeros(N, 3, dtype=torch.long)})
