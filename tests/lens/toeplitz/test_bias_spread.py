"""The spread of a bias against its values written out, one pair of tokens at a time."""

import numpy as np
import pytest
import torch

from toeplens import encodings
from toeplens.ground import InputError
from toeplens.lens.toeplitz.contraction import bias_spread

_SIZES = {"d_model": 16, "num_heads": 4, "head_dim": 4, "max_len": 12}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["alibi", "t5", "relative-table"])
def test_it_is_that_of_the_values_of_all_distances(name: str, causal: bool) -> None:
    torch.manual_seed(3)
    layers = [encodings.build(name, **_SIZES) for _ in range(2)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    found = bias_spread(layers, 12, causal=causal)
    positions = torch.arange(12)
    for layer, row in zip(layers, found.spread, strict=True):
        table = layer.bias(positions, positions)
        assert table is not None
        by_offset = {i - j: table[:, i, j] for i in range(12) for j in range(12) if i >= j or not causal}
        values = torch.stack([by_offset[offset] for offset in sorted(by_offset)], dim=-1).detach().double().numpy()
        centred = values - values.mean(1, keepdims=True)
        np.testing.assert_allclose(row, np.sqrt((centred**2).mean(1)), rtol=1e-6)
    assert found.doublings == pytest.approx(np.log2(np.sqrt((found.spread**2).mean())))


def test_a_constant_says_nothing_and_a_rotation_has_none() -> None:
    relative = encodings.build("relative-table", **_SIZES)
    for parameter in relative.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    assert bias_spread([relative], 12).spread.max() < 1e-6
    with pytest.raises(InputError, match="must add a bias by distance"):
        bias_spread([encodings.build("rope", **_SIZES)], 12)
