"""What rotation does to a real head's spectra, against matrices written out; and the bound that must hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lens.models import decoder

from toeplens.backends import DecoderSource
from toeplens.ground import InputError
from toeplens.lens import AttentionTrace, LayerTrace
from toeplens.lens.toeplitz import contraction as module
from toeplens.lens.toeplitz.contraction import contraction

LENGTHS = torch.tensor([10, 6, 10])


def layer_of(encoding: str, **options: Any) -> LayerTrace:
    sizes = {"vocab_size": 20, "d_model": 32, "d_ff": 24, "num_layers": 1, "num_heads": 4, "max_len": 12}
    model = decoder(seed=3, noise=0.0, **sizes, encoding=encoding, encoding_options=options)
    return AttentionTrace(DecoderSource(model), torch.randint(0, 20, (3, 10)), LENGTHS)[0]


@pytest.mark.parametrize("encoding", ["rope", "alibi", "mla", "partial-rope", "t5"])
def test_ratios_by_hand(encoding: str) -> None:
    """float64, 1e-9; every head of every sequence by itself."""
    layer = layer_of(encoding)
    found = contraction(layer, sequences=2)
    q, k = layer.turned
    bias = layer.encoding.bias(layer.positions, layer.positions)
    for head in range(4):
        widths, norms, grams = [], [], []
        for sequence, size in enumerate((10, 6)):
            own = layer.q[sequence, head, :size] @ layer.k[sequence, head, :size].T * layer.scale
            made = q[sequence, head, :size] @ k[sequence, head, :size].T * layer.scale
            if bias is not None:
                made = made + bias[head, :size, :size]
            ranges = [torch.linalg.eigvalsh((x + x.T) / 2) for x in (made, own)]
            widths.append((ranges[0][-1] - ranges[0][0]) / (ranges[1][-1] - ranges[1][0]))
            norms.append(torch.linalg.svdvals(made)[0] / torch.linalg.svdvals(own)[0])
            keys = [x[sequence, head, :size] for x in (k, layer.k)]
            grams.append(
                torch.linalg.eigvalsh(keys[0] @ keys[0].T)[-1] / torch.linalg.eigvalsh(keys[1] @ keys[1].T)[-1]
            )
        torch.testing.assert_close(found.width[head], torch.stack(widths).mean(), rtol=1e-9, atol=0)
        torch.testing.assert_close(found.norm[head], torch.stack(norms).mean(), rtol=1e-9, atol=0)
        if encoding in ("alibi", "t5"):
            assert found.gram[head].isnan()
        else:
            torch.testing.assert_close(found.gram[head], torch.stack(grams).mean(), rtol=1e-9, atol=0)


def test_the_bound_is_the_sum_of_its_frequencies_by_hand() -> None:
    layer = layer_of("rope")
    found = contraction(layer, sequences=2)
    k = layer.turned[1]
    for head in range(4):
        bounds = []
        for sequence, size in enumerate((10, 6)):
            keys = k[sequence, head, :size]
            alone = [keys[:, [pair, pair + 1]] for pair in range(0, keys.shape[1], 2)]
            largest = [torch.linalg.eigvalsh(x @ x.T)[-1] for x in (keys, *alone)]
            bounds.append(largest[0] / sum(largest[1:]))
        torch.testing.assert_close(found.bound[head], torch.stack(bounds).mean(), rtol=1e-9, atol=0)


def test_matrices_too_large_to_look_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 9)
    with pytest.raises(InputError, match="positions must be at most 9, got 10"):
        contraction(layer_of("rope"))


def test_a_sequence_of_one_token_has_no_spectrum_and_spoils_none() -> None:
    layer = layer_of("rope")
    short = replace(layer, lengths=torch.tensor([1, 6, 10]))
    rest = replace(layer, lengths=LENGTHS[1:], **{name: getattr(layer, name)[1:] for name in ("q", "k", "v")})
    for found, expected in zip(
        vars(contraction(short, sequences=2)).values(), vars(contraction(rest)).values(), strict=True
    ):
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    with pytest.raises(InputError, match="lengths must include a sequence"):
        contraction(replace(layer, lengths=torch.ones(3, dtype=torch.long)))


def test_what_has_no_spectrum_without_position_is_refused() -> None:
    for encoding in ("fox", "shaw", "cope"):
        with pytest.raises(InputError, match=r"encoding must be a rotation, a bias or vectors at the input, got"):
            contraction(layer_of(encoding))
