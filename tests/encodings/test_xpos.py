"""xPos: against plain loops, x-transformers and rotary-embedding-torch; far positions and wide spans."""

from __future__ import annotations

import cmath
from typing import Any

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor
from x_transformers import x_transformers

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, attend
from toeplens.ground import InputError

H, D = 2, 8
SIZES = {"d_model": 16, "num_heads": H, "head_dim": D, "max_len": 64}


def build(**options: Any) -> PositionalEncoding:
    return encodings.build("xpos", **SIZES, **options)


def vectors(length: int, dtype: torch.dtype = torch.float64, head_dim: int = D) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, H, length, head_dim)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


def logits(encoding: PositionalEncoding, q: Tensor, k: Tensor, places: Tensor) -> Tensor:
    turned_q, turned_k = encoding.rotate(q, k, places, places)
    return turned_q @ turned_k.mT


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize(("gamma", "scale_base"), [(0.4, 512.0), (1.0, 50.0)])
def test_logits_are_the_formulas(gamma: float, scale_base: float, pairing: str) -> None:
    places = [0, 1, 7, 100, 2345]
    q, k = vectors(len(places))
    ours = logits(build(gamma=gamma, scale_base=scale_base, pairing=pairing), q, k, torch.tensor(places))
    for row, i in enumerate(places):
        for column, j in enumerate(places[: row + 1]):
            total = 0.0
            for t in range(D // 2):
                a, b = (t, t + D // 2) if pairing == "half" else (2 * t, 2 * t + 1)
                x, y = complex(q[1, 0, row, a], q[1, 0, row, b]), complex(k[1, 0, column, a], k[1, 0, column, b])
                zeta = (2 * t / D + gamma) / (1 + gamma)
                turn = zeta ** ((i - j) / scale_base) * cmath.exp(1j * (i - j) * 10000.0 ** (-2 * t / D))
                total += (x * y.conjugate() * turn).real
            assert abs(float(ours[1, 0, row, column]) - total) < 1e-10


def test_it_is_x_transformers() -> None:
    places = torch.arange(128)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        theirs = x_transformers.RotaryEmbedding(D, use_xpos=True)
        ours = build()
        if dtype == torch.float64:  # its tables are made in float32: give it ours
            theirs.inv_freq, theirs.scale = ours.frequencies[0], (ours.log_decay * 512).exp()
        freqs, scale = theirs(places)
        q, k = vectors(128, dtype)
        their_q = x_transformers.apply_rotary_pos_emb(q, freqs, scale)
        their_k = x_transformers.apply_rotary_pos_emb(k, freqs, scale**-1)
        difference = (logits(ours, q, k, places) - their_q @ their_k.mT).tril().abs().max()
        assert float(difference) <= tolerance


@pytest.mark.parametrize("length", [128, 127])
def test_it_is_rotary_embedding_torchs(length: int) -> None:
    places = torch.arange(length)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 2e-6)):
        q, k = vectors(length, dtype)
        their_q, their_k = RotaryEmbedding(D, use_xpos=True).to(dtype).rotate_queries_and_keys(q, k)
        difference = (logits(build(), q, k, places) - their_q @ their_k.mT).tril().abs().max()
        assert float(difference) <= tolerance  # its tables are made in float32 in both


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float16, 2000), (torch.bfloat16, 18_000), (torch.float32, 18_000), (torch.float64, 140_000)],
)
def test_the_widest_span_is_finite_and_a_wider_one_refused(dtype: torch.dtype, limit: int) -> None:
    q, k = vectors(64, dtype)
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
