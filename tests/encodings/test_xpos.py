"""xPos: against plain loops, x-transformers and rotary-embedding-torch; far positions and wide spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from tests.encodings.samples import agree, pair_by_pair, rope, turned_logits, vectors
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend
from toeplens.ground import InputError

H, D = 2, 8
SIZES = {"d_model": 16, "num_heads": H, "head_dim": D, "max_len": 64}


def build(**options: Any) -> PositionalEncoding:
    return encodings.build("xpos", **SIZES, **options)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(("gamma", "scale_base"), [(0.4, 512.0), (1.0, 50.0)])
def test_logits_are_the_formulas(gamma: float, scale_base: float, pairing: str) -> None:
    places = torch.tensor([0, 1, 7, 100, 2345])
    q, k = vectors(len(places), H)

    def factor(b: int, h: int, row: int, column: int, t: int) -> complex:
        offset = int(places[row] - places[column])
        return ((2 * t / D + gamma) / (1 + gamma)) ** (offset / scale_base) * rope(offset, t)

    ours = turned_logits(build(gamma=gamma, scale_base=scale_base, pairing=pairing), q, k, places)
    agree(ours.tril(), pair_by_pair(q, k, factor, pairing).real.tril(), 1e-10)


def test_it_is_x_transformers() -> None:
    places = torch.arange(128)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        theirs = x_transformers.RotaryEmbedding(D, use_xpos=True)
        ours = build()
        if dtype == torch.float64:  # its tables are made in float32: give it ours
            theirs.inv_freq, theirs.scale = ours.frequencies[0], (ours.log_decay * 512).exp()
        freqs, scale = theirs(places)
        q, k = vectors(128, H, dtype=dtype)
        their_q = x_transformers.apply_rotary_pos_emb(q, freqs, scale)
        their_k = x_transformers.apply_rotary_pos_emb(k, freqs, scale**-1)
        difference = (turned_logits(ours, q, k, places) - their_q @ their_k.mT).tril().abs().max()
        assert float(difference) <= tolerance


@pytest.mark.parametrize("length", [128, 127])
def test_it_is_rotary_embedding_torchs(length: int) -> None:
    places = torch.arange(length)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 2e-6)):
        q, k = vectors(length, H, dtype=dtype)
        their_q, their_k = RotaryEmbedding(D, use_xpos=True).to(dtype).rotate_queries_and_keys(q, k)
        difference = (turned_logits(build(), q, k, places) - their_q @ their_k.mT).tril().abs().max()
        assert float(difference) <= tolerance  # its tables are made in float32 in both


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float16, 2000), (torch.bfloat16, 18_000), (torch.float32, 18_000), (torch.float64, 140_000)],
)
def test_the_widest_span_is_finite_and_a_wider_one_refused(dtype: torch.dtype, limit: int) -> None:
    q, k = vectors(64, H, dtype=dtype)
    q, k = 3 * q, 3 * k
    q, k = q.requires_grad_(), k.requires_grad_()
    encoding = build()
    for start in (0, 1_000_000):
        places = torch.linspace(0, limit, 64).long() + start
        for fused in (True, False):
            out = attend(q, k, k, encoding=encoding, q_positions=places, k_positions=places, scale=0.3, fused=fused)
            grads = torch.autograd.grad(out.sum(), (q, k))
            assert all(bool(x.isfinite().all()) for x in (out, *grads))
        with pytest.raises(InputError, match=r"^positions must be within \d+ of .*\.$"):
            encoding.rotate(q, k, places * 2, places * 2)


def test_the_kernel_decays() -> None:
    kernel = build().kernel(torch.arange(2000))
    assert bool((kernel.abs().diff(dim=-1) < 0).all())
    torch.testing.assert_close(kernel[..., 0], torch.ones_like(kernel[..., 0]))
