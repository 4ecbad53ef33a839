"""An encoding stands for its rotation, pairing and bias wherever frequencies do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.lens.following.test_behaviour import shares, shares_of

from toeplens import encodings
from toeplens.encodings import PositionalEncoding, Rotary
from toeplens.ground import InputError
from toeplens.lens.following.behaviour import behaviour, permutation_scores
from toeplens.lens.frequency.use import frequency_use

ENCODED = [
    ("rope", {}),
    ("rope", {"pairing": "half"}),
    ("partial-rope", {"rotary_pct": 0.5}),
    ("rope-yarn", {}),
    ("xpos", {}),
    ("alibi", {}),
    ("t5", {}),
    ("nope", {}),
]


def encoding_of(name: str, **options: Any) -> PositionalEncoding:
    torch.manual_seed(0)
    made = encodings.build(name, d_model=16, num_heads=2, head_dim=8, max_len=8, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))
    return made


@pytest.mark.parametrize(("name", "options"), ENCODED)
@pytest.mark.parametrize("k_position", [False, True])
def test_an_encoding_is_taken_for_its_rotation_pairing_and_bias(
    name: str, options: dict[str, Any], k_position: bool
) -> None:
    """Against tables of what the encoding itself makes of every key at every place (float64, 1e-6: its own tables)."""
    encoding = encoding_of(name, **options)
    q, k = torch.randn(2, 2, 2, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p = torch.randn(7, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) if k_position else None
    lengths, places = torch.tensor([7, 4]), torch.arange(7)
    given = encoding.bias(places, places)
    bias = torch.zeros(2, 7, 7) if given is None else given
    tables: list[list[np.ndarray]] = [[], []]
    for sequence, query in itertools.product(range(2), range(1, 7)):
        seen = range(query + 1)
        for head in range(2 if query < lengths[sequence] else 0):
            table = np.empty((query + 1, query + 1))
            for content in seen:
                own = k[sequence, :, content] - (0 if p is None else p[content])
                keys = own.unsqueeze(1) + (torch.zeros(7, 8) if p is None else p)
                turned_q, turned_k = encoding.rotate(q[sequence, None], keys[None], places, places)
                logits = 0.5 * turned_q[0, head, query] @ turned_k[0, head].T + bias[head, query]
                table[:, content] = logits[: query + 1].detach().numpy()
            tables[head].append(table)
    found = behaviour(q, k, rotation=encoding, k_position=p, lengths=lengths, scale=0.5)
    expected = shares_of(tables)
    np.testing.assert_allclose(shares(found), expected[:3], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.variance, expected[3], rtol=1e-6)
    assert found.queries == 6 + 3


def test_an_encoding_in_every_measure_is_its_frequencies() -> None:
    """Windows, one head, grouped keys; behaviour, permutations and frequency use."""
    encoding = encoding_of("rope", pairing="half")
    assert isinstance(encoding, Rotary)
    q, k = torch.randn(2, 2, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    k = k[:1]
    asked: dict[str, Any] = {"rotation": encoding.frequencies[0], "pairing": "half"}
    for options in ({}, {"window": 3}, {"causal": False}):
        for measure in (behaviour, permutation_scores, frequency_use):
            expected, found = (measure(q, k, **options, **each).to_dict() for each in (asked, {"rotation": encoding}))
            for name, value in expected.items():
                if isinstance(value, dict):
                    assert found[name].keys() == value.keys()
                    for key in value:
                        np.testing.assert_allclose(found[name][key], value[key], rtol=0, atol=1e-9)
                else:
                    np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-9)
    alone = encodings.build("rope", d_model=8, num_heads=1, head_dim=8, max_len=8)
    assert behaviour(q[0], k[0], rotation=alone).positional.shape == ()


def test_an_encoding_that_does_not_fit_is_refused() -> None:
    q, k = torch.zeros(2, 2, 7, 8, dtype=torch.float64)
    encoding = encoding_of("rope")
    with pytest.raises(InputError, match="bias must not be set with an encoding"):
        behaviour(q, k, rotation=encoding, bias=torch.zeros(7))
    with pytest.raises(InputError, match="pairing must be 'interleaved', as in the encoding, got 'half'"):
        behaviour(q, k, rotation=encoding, pairing="half")
    with pytest.raises(InputError, match="rotation must have 1 heads of 8 dimensions, as q has, got 2 heads of 8"):
        behaviour(q[:1], k[:1], rotation=encoding)
    with pytest.raises(InputError, match=r"FoX reads the tokens' content. Use a trace"):
        behaviour(q, k, rotation=encoding_of("fox"))
    with pytest.raises(InputError, match="logits of Shaw are not a sum over pairs of dimensions"):
        frequency_use(q, k, rotation=encoding_of("shaw"))
