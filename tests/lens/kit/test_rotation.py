"""Rotations of any model's queries and keys: what is rotated and undone is what a plain program rotates."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import wrong_types
from torch import Tensor

from toeplens import lens
from toeplens.lens import RotaryPairs, behaviour, frequency_use, permutation_scores, rotary_offsets, toeplitz_profile
from toeplens.lens.kit.separable_keys import AttentionOptionArguments, AttentionOptions
from toeplens.utils import InputError

Q, K = (torch.randn(2, n, 9, 12, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (4, 2))
LAYOUTS = ("half", "interleaved")
TOLERANCE = 1e-7  # in float64: a process's first cosines can differ by up to 7e-9 from later ones


def rotated_by_hand(x: Tensor, rotation: RotaryPairs, start: int = 0) -> Tensor:
    """Pair by pair and position by position; also where the pairs lie elsewhere afterwards."""
    result, n = x.clone(), rotation.num_pairs
    for t in range(n):
        (a, b), (c, d) = (
            (rotation.first + i for i in ((t, t + n) if name == "half" else (2 * t, 2 * t + 1)))
            for name in (rotation.pairing, rotation.pairing_after or rotation.pairing)
        )
        for i in range(x.shape[-2]):
            angle = (start + i) * float(rotation.frequencies[t])
            cos, sin = rotation.magnitude * math.cos(angle), rotation.magnitude * math.sin(angle)
            result[..., i, c] = cos * x[..., i, a] - sin * x[..., i, b]
            result[..., i, d] = sin * x[..., i, a] + cos * x[..., i, b]
    return result


def numbers_of(found: Any) -> list[np.ndarray]:
    """All arrays of a result, and of the results in it."""
    if isinstance(found, np.ndarray | Tensor):
        return [np.asarray(found)]
    values = vars(found).values() if hasattr(found, "__dict__") else found if isinstance(found, tuple) else ()
    return [x for value in values for x in numbers_of(value)]


def measures(q: Tensor, k: Tensor, start: int = 0, **options: Any) -> list[np.ndarray]:
    """What every measure on tensors finds, with the same arguments; the energies only for positions from 0."""
    found: list[Any] = [f(q, k, **options) for f in (behaviour, frequency_use, permutation_scores, toeplitz_profile)]
    if start:
        found[1] = replace(found[1], q_energy=torch.zeros(0), k_energy=torch.zeros(0))
    strength, angle = rotary_offsets(q, k, **{name: value for name, value in options.items() if name != "scale"})
    return numbers_of((*found, strength, angle.cos(), angle.sin()))


@st.composite
def rotations(draw: st.DrawFn) -> RotaryPairs:
    first, pairs = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    frequencies = torch.tensor(draw(st.lists(st.floats(-3, 3), min_size=pairs, max_size=pairs)))
    pairing, after = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([None, *LAYOUTS]))
    return RotaryPairs(frequencies, pairing, 12, first, draw(st.sampled_from([1.0, 1.3])), after)


@given(rotations())
def test_rotation_and_its_inverse_match_a_plain_program(rotation: RotaryPairs) -> None:
    expected = rotated_by_hand(Q, rotation)
    torch.testing.assert_close(rotation.rotate(Q), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(rotation.rotate(expected, inverse=True), Q, rtol=0, atol=TOLERANCE)


@given(rotations(), st.sampled_from([0, 1, 1000]), st.booleans())
def test_queries_and_keys_give_the_same_before_and_after_the_rotation(
    rotation: RotaryPairs, start: int, by_token: bool
) -> None:
    """By every measure, from any first position on, in both layouts, with fewer heads of keys."""
    expected = measures(Q, K, start, rotation=rotation, scale=0.5)
    q, k = (rotated_by_hand(x, rotation, start) for x in (Q, K))
    q, k = (q.transpose(1, 2), k.transpose(1, 2)) if by_token else (q, k)
    layout = "bnhd" if by_token else "bhnd"
    actual = measures(q, k, start, rotation=rotation, rotated=True, scale=0.5, layout=layout)
    assert len(actual) == len(expected) > 20
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE)


def test_float32_tensors_give_the_same_up_to_their_rounding() -> None:
    """Rotated in float32, as models do: by angles up to 9, with relative errors of about 1e-7 each."""
    rotation = lens.rope(dim=12, layout="half", base=100.0)
    q, k = (rotated_by_hand(x.float(), rotation) for x in (Q, K))
    for options in ({"rotated": True}, {}):
        tensors = (q, k) if options else (Q.float(), K.float())
        found = behaviour(*tensors, rotation=rotation, **options)
        np.testing.assert_allclose(found.positional, behaviour(Q, K, rotation=rotation).positional, rtol=0, atol=1e-6)
    before, after = behaviour(Q, K, rotation=rotation), behaviour(q, k, rotation=rotation)
    assert np.abs(before.positional - after.positional).max() > 1e-2, "rotated twice is something else"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rotation_is_its_frequencies_with_their_pairing(layout: Any) -> None:
    """Bit for bit; and no pairing is needed."""
    rotation = lens.rope(base=1e6, dim=12, layout=layout)
    plain = {"rotation": 1e6 ** -(torch.arange(0, 12, 2, dtype=torch.float64) / 12), "pairing": layout}
    for measure in (behaviour, frequency_use, permutation_scores, rotary_offsets):
        for x, y in zip(numbers_of(measure(Q, K, rotation=rotation)), numbers_of(measure(Q, K, **plain)), strict=True):
            np.testing.assert_array_equal(x, y)
    per_head = plain["rotation"] * torch.tensor([[1.0], [2.0], [0.0], [0.5]], dtype=torch.float64)
    x, y = (
        behaviour(Q, K, rotation=r, pairing=p)
        for r, p in ((RotaryPairs(per_head, layout, 12), None), (per_head, layout))
    )
    np.testing.assert_array_equal(x.positional, y.positional)
    with pytest.raises(InputError, match=r"^rotation must have one row, or one per head of q and of k"):
        behaviour(Q, K, rotation=RotaryPairs(per_head, layout, 12), rotated=True)


def test_rotated_dimensions_may_begin_anywhere_and_be_scaled() -> None:
    """As if the dimensions were in another order, and the magnitude were in queries and keys."""
    rotation = RotaryPairs(torch.tensor([1.0, 0.2]), "half", 12, first=5, magnitude=1.5)
    order, sizes = [5, 6, 7, 8, 0, 1, 2, 3, 4, 9, 10, 11], torch.tensor([1.5] * 4 + [1.0] * 8)
    part = torch.randn(9, 12, dtype=torch.float64)
    actual = behaviour(Q, K, rotation=rotation, k_position=part)
    expected = behaviour(
        *(x[..., order] * sizes for x in (Q, K)),
        rotation=rotation.frequencies,
        pairing="half",
        k_position=part[..., order] * sizes,
    )
    for x, y in zip(numbers_of(actual), numbers_of(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("base", "dim", "rotary_dim"), [(1e6, 128, None), (10000.0, 64, 16)])
def test_the_frequencies_are_those_of_transformers(base: float, dim: int, rotary_dim: int | None) -> None:
    """Which computes them in float32."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        head_dim=rotary_dim or dim, rope_parameters={"rope_theta": base, "rope_type": "default"}
    )
    rotation = lens.rope(base=base, dim=dim, layout="half", rotary_dim=rotary_dim)
    torch.testing.assert_close(rotation.frequencies.float(), LlamaRotaryEmbedding(config).inv_freq)
    assert (rotation.head_dim, rotation.first, rotation.magnitude, rotation.pairing) == (dim, 0, 1.0, "half")


ROPE = lens.rope(dim=12, layout="half")
NAN = Q.clone()
NAN[1, 2, 3, 4] = torch.nan


@wrong_types
@pytest.mark.parametrize("measure", [behaviour, permutation_scores, frequency_use, toeplitz_profile, rotary_offsets])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": NAN}, "q must be finite"),
        ({"q": NAN, "rotated": True}, "q must be finite"),
        ({"k": K / 0}, "k must be finite"),
        ({"k": K[:, :, :5]}, r"q and k must have shapes .* got \[2, 4, 9, 12\] and \[2, 2, 5, 12\]\.$"),
        ({"k": K[..., :6]}, r"q and k must have shapes "),
        ({"k": K[:1]}, r"q and k must have shapes "),
        ({"k": K[:, [0, 1, 1]]}, "q must have a number of heads divisible by 3"),
        ({"q": Q.mT, "k": K.mT, "layout": "bhnd"}, "rotation must be of 9 dimensions per head, as q has, got 12"),
        ({"q": Q.transpose(1, 2), "k": K.transpose(1, 2)}, "layout must be 'bhnd' for 9 heads and 4 tokens, or 'bnhd'"),
        ({"q": Q[:, :, :3].transpose(1, 2), "k": K[:, :, :3].transpose(1, 2)}, ".* which layout='bnhd' fits"),
        ({"layout": "bnhd"}, r"q and k must have shapes \[..., N, H, d\] .* which layout='bhnd' fits"),
        ({"rotation": lens.rope(dim=8, layout="half")}, "rotation must be of 12 dimensions per head, as q has, got 8"),
        ({"rotation": 1e6}, "rotation must .* lens.rope or lens.rotation_of, got 1000000.0"),
    ],
)
def test_what_does_not_fit_is_one_sentence(measure: Any, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}") as raised:
        measure(**{"q": Q, "k": K, "rotation": ROPE} | change)
    assert str(raised.value).endswith(".")


@wrong_types
@pytest.mark.parametrize("measure", [behaviour, permutation_scores, frequency_use, toeplitz_profile, rotary_offsets])
def test_arrays_of_numpy_are_refused(measure: Any) -> None:
    for name, change in (("q", {"q": Q.numpy()}), ("k", {"k": K.numpy()}), ("k", {"k": None})):
        with pytest.raises(InputError, match=f"^{name} must be a torch.Tensor"):
            measure(**{"q": Q, "k": K, "rotation": ROPE} | change)


@pytest.mark.parametrize("measure", [behaviour, permutation_scores, frequency_use, rotary_offsets])
def test_options_that_do_not_fit_a_rotation_are_refused(measure: Any) -> None:
    with pytest.raises(InputError, match="pairing must be 'half', as in the rotation, got 'interleaved'"):
        measure(Q, K, rotation=ROPE, pairing="interleaved")
    with pytest.raises(InputError, match=r"^rotat(ed|ion) must "):
        measure(Q, K, rotated=True)


def test_known_heads_tell_the_layouts_apart() -> None:
    """With fewer tokens than heads, where shapes do not."""
    rotation = RotaryPairs(ROPE.frequencies, "half", 12, num_heads=9)
    q = Q.transpose(1, 2)  # 9 heads of 4 tokens
    expected = behaviour(q, q, rotation=ROPE, layout="bhnd").positional
    np.testing.assert_array_equal(behaviour(q, q, rotation=rotation).positional, expected)
    with pytest.raises(InputError, match="layout must be 'bhnd' for 4 heads and 9 tokens, or 'bnhd' for 9 heads and 4"):
        behaviour(Q, Q, rotation=rotation)
    behaviour(Q, Q, rotation=rotation, layout="bhnd")  # four of the layer's heads
    with pytest.raises(InputError, match=r"^k_position must not be set with rotated"):
        behaviour(Q, Q, rotation=ROPE, rotated=True, k_position=Q)


@wrong_types
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dim": 7}, "dim must be even and at least 2"),
        ({"layout": "neox"}, "layout must be one of half, interleaved, got 'neox'"),
        ({"rotary_dim": 3}, "rotary_dim must be even"),
        ({"rotary_dim": 10}, "rotary_dim must be at most 8"),
        ({"base": 0.0}, "base must be finite and over 0"),
        ({"base": "10000"}, "base must be a number"),
    ],
)
def test_an_impossible_rotation_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        lens.rope(**{"dim": 8, "layout": "half"} | change)
    for frequencies in (torch.ones(5), torch.ones(2, 2, 2), torch.full((2,), torch.nan)):
        with pytest.raises(InputError, match=r"^rotation must have "):
            RotaryPairs(frequencies, "half", 8)


def test_editors_know_every_option_of_the_measures_on_tensors() -> None:
    assert list(AttentionOptionArguments.__annotations__) == [field.name for field in fields(AttentionOptions)]
