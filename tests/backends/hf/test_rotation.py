"""Rotations are found from queries and keys before and after them, whatever they are and whatever is 0, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.hf.models import (
    GROUPED,
    TOKENS,
    HandwrittenModel,
    SoftAttention,
    calls_in,
    reference_logits,
    tiny,
)
from torch import Tensor, nn

from toeplens.backends.hf import AttentionCall, rotation
from toeplens.backends.hf.rotation import find_rotation
from toeplens.lens import NotSeparable

ANGLES = torch.arange(TOKENS)[:, None] * torch.tensor([1.0, 0.1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation, under a name that says nothing."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def apply_rotary(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of heads of 4 dimensions, under a name that is observed."""
    return rotate(q, ANGLES.cos(), ANGLES.sin()), rotate(k, ANGLES.cos(), ANGLES.sin())


def rotate_pairs(x: Tensor, angles: Tensor, pairs: Tensor, out: Tensor | None = None) -> Tensor:
    """Pairs of dimensions, which may lie elsewhere after it."""
    rotated_x, out = x.clone(), pairs if out is None else out
    a, b = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    rotated_x[..., out[:, 0]] = a * angles.cos() - b * angles.sin()
    rotated_x[..., out[:, 1]] = a * angles.sin() + b * angles.cos()
    return rotated_x


class RotatedAttention(SoftAttention):
    """Queries and keys are rotated, and then changed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(*self.postprocess(*apply_rotary(q, k)), v)

    def postprocess(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class NormedAttention(RotatedAttention):
    def postprocess(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(TOKENS).unsqueeze(-1)
        return nn.functional.rms_norm(q, (4,)) * (1 + places).log(), nn.functional.normalize(k, dim=-1)


class WeightedAttention(RotatedAttention):
    def postprocess(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * (1 + 1e-4 * torch.arange(4)), k


class MethodRotatedAttention(SoftAttention):
    """A method rotates, as RoFormer's does."""

    @staticmethod
    def apply_rotary_position(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, ANGLES.cos(), ANGLES.sin()), rotate(k, ANGLES.cos(), ANGLES.sin())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(*self.apply_rotary_position(q, k), v)


class UnobservedRotationAttention(SoftAttention):
    """A rotation that is named, and is no function that is observed."""

    def rotate_by_hand(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., 2:], -x[..., :2]), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.rotate_by_hand(q), k, v)


class TwiceRotatedAttention(RotatedAttention):
    """A rotation that is seen, of what was turned before."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(rotate(q, ANGLES.cos(), ANGLES.sin()), rotate(k, ANGLES.cos(), ANGLES.sin()), v)


class AddedPositionAttention(SoftAttention):
    """Keys with vectors of their places."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k + 0.01 * torch.arange(TOKENS).unsqueeze(-1), v)


class UnrotatedAttention(SoftAttention):
    """Latent attention without a rotation: only a width is named after it."""

    qk_rope_head_dim = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = q[..., : self.qk_rope_head_dim], q[..., self.qk_rope_head_dim :]
        return super().attend(torch.cat(parts, -1), k, v)


def call_of(part: nn.Module) -> AttentionCall:
    model, before = HandwrittenModel(part), dict(vars(part))
    (call,) = calls_in(model)
    assert vars(part) == before
    return call


@pytest.mark.parametrize("part", [NormedAttention, MethodRotatedAttention])
def test_operations_that_commute_with_a_rotation_may_follow_it(part: type[nn.Module]) -> None:
    """Norms without weights, factors of tokens, repeated heads: the logits come again from what was not rotated."""
    call = call_of(part())
    assert call.unknown is None
    assert call.rotation is not None
    torch.testing.assert_close(
        call.rotation.frequencies, torch.tensor([1.0, 0.1], dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(call.rotation.magnitudes, torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)
    call_logits = call.logits()
    expected, largest = reference_logits(**call.behaviour_arguments()), float(call_logits.abs().max())
    torch.testing.assert_close(expected, call_logits, atol=2e-6 * largest, rtol=0)


def test_operations_that_do_not_commute_are_refused() -> None:
    """A weight for each dimension, however near to 1."""
    call = call_of(WeightedAttention())
    assert call.rotation is None
    with pytest.raises(NotSeparable, match="are changed before their product"):
        call.behaviour_arguments()


def test_unobserved_rotations_are_not_mistaken_for_none() -> None:
    """Its call is proved, and its parts are not known; where only a width is named, there is none."""
    call = call_of(UnobservedRotationAttention())
    assert call.rotation is None
    with pytest.raises(NotSeparable, match="a rotation that was not observed"):
        call.behaviour_arguments()
    assert call_of(UnrotatedAttention()).unknown is None


@pytest.mark.parametrize("part", [TwiceRotatedAttention, AddedPositionAttention])
def test_any_position_dependence_of_keys_is_detected(part: type[nn.Module]) -> None:
    """Under any name, beside a rotation that is understood, and as vectors that are added."""
    call = call_of(part())
    assert call.rotation is None
    assert call.proof.outputs < 1e-6
    with pytest.raises(NotSeparable, match="depend on position in an unknown way"):
        call.behaviour_arguments()


@settings(max_examples=10)
@given(
    pairing=st.sampled_from(("half", "interleaved")),
    frequencies=st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=4),
    still=st.integers(0, 3),
    magnitude=st.floats(0.5, 2.0),
    start=st.integers(0, 50),
)
def test_any_rotation_is_recovered(
    pairing: str, frequencies: list[float], still: int, magnitude: float, start: int
) -> None:
    generator = torch.Generator().manual_seed(still)
    turns, width = torch.tensor(frequencies, dtype=torch.float64), 2 * len(frequencies)
    order = torch.arange(width).view(2, -1).T if pairing == "half" else torch.arange(width).view(-1, 2)
    angles = torch.arange(start, start + 20)[:, None] * turns
    q, k = (torch.randn(2, h, 20, width + still, generator=generator, dtype=torch.float64) for h in (4, 2))
    sizes = torch.ones(width + still, dtype=torch.float64)
    sizes[:width] = magnitude
    both = ((x, sizes * rotate_pairs(x, angles, order)) for x in (q, k))
    actual = find_rotation(*both, torch.arange(20).unsqueeze(0))
    assert actual.pairing == pairing or len(frequencies) == 1
    assert torch.equal(actual.pairs[: len(frequencies)], order)
    torch.testing.assert_close(actual.frequencies[: len(frequencies)], turns, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        actual.magnitudes[: len(frequencies)], torch.full_like(turns, magnitude), atol=1e-6, rtol=0
    )


def test_other_rotations_are_refused() -> None:
    q, k = torch.randn(2, 2, 3, 20, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    places = torch.arange(20).unsqueeze(0)
    bent = places[0].double().square() * 0.05  # an angle that is not linear in the position
    after = [(x, rotate_pairs(x, bent[:, None], torch.tensor([[0, 1]]))) for x in (q, k)]
    with pytest.raises(NotSeparable, match="not one angle per position"):
        find_rotation(*after, places)
    grown = [(x, x * 0.9 ** places[0].unsqueeze(-1)) for x in (q, k)]  # a magnitude that is not the same everywhere
    with pytest.raises(NotSeparable, match="not one angle per position"):
        find_rotation(*grown, places)
    mixed = [(x, x @ torch.linalg.qr(q[0, 0, :8]).Q) for x in (q, k)]
    with pytest.raises(NotSeparable, match="rotates neither"):
        find_rotation(*mixed, places)
    with pytest.raises(NotSeparable, match="got 1"):
        find_rotation(*((x[:, :, :1], x[:, :, :1]) for x in (q, k)), places[:, :1])


LENGTH, PAIRS = 20, 4
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)
TABLE = torch.arange(LENGTH)[:, None] * FREQUENCIES
PLACES = torch.arange(LENGTH).unsqueeze(0)
CASES = [[0], [3], [1, 2], [0, 1, 2]]
ONE = GROUPED | {"num_hidden_layers": 1}
TEXT = {"input_ids": torch.randint(4, 31, (2, LENGTH), generator=torch.Generator().manual_seed(3))}


def dimensions(pairing: str, start: int) -> tuple[Tensor, Tensor]:
    """Of each pair, before and after; ``sorted`` is next to each other before, and half apart after."""
    half = start + torch.arange(2 * PAIRS).view(2, PAIRS).T
    beside = start + torch.arange(2 * PAIRS).view(PAIRS, 2)
    return half if pairing == "half" else beside, beside if pairing == "interleaved" else half


def queries_and_keys(dead: list[int], pairing: str, start: int, still: int) -> list[tuple[Tensor, Tensor]]:
    """Before and after; the rotated part begins at ``start``, and ``still`` dimensions follow it."""
    generator = torch.Generator().manual_seed(still)
    result = []
    for heads in (4, 2):
        x = torch.randn(2, heads, LENGTH, start + 2 * PAIRS + still, generator=generator, dtype=torch.float64)
        x[..., dimensions(pairing, start)[0][dead].flatten()] = 0
        result.append((x, rotate_pairs(x, TABLE, *dimensions(pairing, start))))
    return result


@pytest.mark.parametrize("pairing", ["half", "interleaved", "sorted"])
@pytest.mark.parametrize(("start", "still"), [(0, 0), (0, 3), (4, 0)])
def test_dead_pairs_are_identified(pairing: str, start: int, still: int) -> None:
    """First, last and middle ones, with rotations of all dimensions, of the first, and of the last."""
    pairs, out = dimensions(pairing, start)
    for dead in CASES:
        q, k = queries_and_keys(dead, pairing, start, still)
        alive = [pair for pair in range(PAIRS) if pair not in dead]
        actual = find_rotation(q, k, PLACES)
        assert actual.error < 1e-12
        assert torch.equal(actual.pairs, pairs[alive])
        assert torch.equal(actual.after, out[alive])
        torch.testing.assert_close(actual.frequencies, FREQUENCIES[alive], atol=1e-9, rtol=0)
        assert not actual.dead.any()
        assert not actual.tabled.any()

        actual = find_rotation(q, k, PLACES, other_inputs=[TABLE.cos().float(), TABLE.sin().float()])
        assert torch.equal(actual.pairs, pairs)
        assert actual.pairing == ("half" if pairing == "half" else "interleaved")
        torch.testing.assert_close(actual.frequencies, FREQUENCIES, atol=1e-6, rtol=0)
        torch.testing.assert_close(actual.magnitudes, torch.ones_like(FREQUENCIES), atol=1e-6, rtol=0)
        assert actual.dead.nonzero().flatten().tolist() == dead
        assert actual.tabled.nonzero().flatten().tolist() == dead


def only_call(model: Any) -> AttentionCall:
    (call,) = calls_in(model, TEXT)
    return call


def test_pairs_too_slow_for_low_precision_are_read_from_the_table() -> None:
    """In bfloat16 a turn of 0.001 a position does not move what it turns: it is not read as none."""
    model = tiny("LlamaForCausalLM", gain=0.3, **ONE).to(torch.bfloat16)
    call = only_call(model)
    assert call.rotation is not None
    assert not call.rotation.dead.any()
    assert bool(call.rotation.tabled[-1]) == bool(call.rotation.tabled.any())
    expected = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(call.rotation.frequencies, expected, atol=1e-3, rtol=0)


def rotated_tokens(
    tokens: int, rounding: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Queries and keys before and after three pairs are turned, the third of nothing; and the positions."""
    made, positions = torch.Generator().manual_seed(2), 5 + torch.arange(tokens)
    angles = positions[:, None] * torch.tensor([1.0, 0.1, 0.003], dtype=torch.float64)
    cos, sin = (x.to(rounding).float() for x in (angles.cos(), angles.sin()))
    both = []
    for heads in (4, 2):
        x = torch.randn(2, heads, tokens, 6, generator=made)
        x[..., 2::3] = 0
        both.append((x, rotate(x, cos, sin)))
    return both[0], both[1], positions.unsqueeze(0)


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_frequencies_of_long_inputs_are_refined_from_near_to_far(rounding: torch.dtype) -> None:
    """Neighbours alone would leave the slope off by turns at the end."""
    tokens = 30_000
    actual = find_rotation(*rotated_tokens(tokens, rounding), rounding=rounding)
    assert len(actual.frequencies) == 2
    wrong = (actual.frequencies - torch.tensor([1.0, 0.1], dtype=torch.float64)).abs()
    assert float(wrong.max()) * tokens < 0.02


@pytest.mark.parametrize("token", [0, 20, 33, 59])
def test_a_token_rotated_differently_is_detected(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is read or not."""
    monkeypatch.setattr(rotation, "_MAX_TOKENS", 10)
    q, k, positions = rotated_tokens(60)
    k[1][:, :, token] *= -1
    with pytest.raises(NotSeparable, match="rotation: it"):
        find_rotation(q, k, positions)
