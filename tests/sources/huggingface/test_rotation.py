"""Rotations are found from queries and keys before and after them, whatever they are and whatever is 0, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sources.huggingface.models import GROUPED, TOKENS, Hand, SoftAttention, calls_in, remade, tiny
from torch import Tensor, nn

from toeplens.lens import NoForm
from toeplens.sources.huggingface import AttentionCall, rotation
from toeplens.sources.huggingface.rotation import find_rotation

ANGLES = torch.arange(TOKENS)[:, None] * torch.tensor([1.0, 0.1])


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotation, under a name that says nothing."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def apply_rotary(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of heads of 4 dimensions, under a name that is observed."""
    return turned(q, ANGLES.cos(), ANGLES.sin()), turned(k, ANGLES.cos(), ANGLES.sin())


def turned_pairs(x: Tensor, angles: Tensor, pairs: Tensor, out: Tensor | None = None) -> Tensor:
    """Pairs of dimensions, which may lie elsewhere after it."""
    made, out = x.clone(), pairs if out is None else out
    a, b = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    made[..., out[:, 0]] = a * angles.cos() - b * angles.sin()
    made[..., out[:, 1]] = a * angles.sin() + b * angles.cos()
    return made


class TurnedAttention(SoftAttention):
    """Queries and keys are rotated, and then changed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(*self.changed(*apply_rotary(q, k)), v)

    def changed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class NormedAttention(TurnedAttention):
    def changed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(TOKENS).unsqueeze(-1)
        return nn.functional.rms_norm(q, (4,)) * (1 + places).log(), nn.functional.normalize(k, dim=-1)


class WeightedAttention(TurnedAttention):
    def changed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * (1 + 1e-4 * torch.arange(4)), k


class OwnAttention(SoftAttention):
    """A method rotates, as RoFormer's does."""

    @staticmethod
    def apply_rotary_position(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return turned(q, ANGLES.cos(), ANGLES.sin()), turned(k, ANGLES.cos(), ANGLES.sin())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(*self.apply_rotary_position(q, k), v)


class HiddenAttention(SoftAttention):
    """A rotation that is named, and is no function that is observed."""

    def rotate_by_hand(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., 2:], -x[..., :2]), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.rotate_by_hand(q), k, v)


class TwiceAttention(TurnedAttention):
    """A rotation that is seen, of what was turned before."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(turned(q, ANGLES.cos(), ANGLES.sin()), turned(k, ANGLES.cos(), ANGLES.sin()), v)


class AddedAttention(SoftAttention):
    """Keys with vectors of their places."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k + 0.01 * torch.arange(TOKENS).unsqueeze(-1), v)


class StillAttention(SoftAttention):
    """Latent attention without a rotation: only a width is named after it."""

    qk_rope_head_dim = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = q[..., : self.qk_rope_head_dim], q[..., self.qk_rope_head_dim :]
        return super().attend(torch.cat(parts, -1), k, v)


def call_of(part: nn.Module) -> AttentionCall:
    model, before = Hand(part), dict(vars(part))
    (call,) = calls_in(model)
    assert vars(part) == before
    return call


@pytest.mark.parametrize("part", [NormedAttention, OwnAttention])
def test_what_commutes_with_a_rotation_may_follow_it(part: type[nn.Module]) -> None:
    """Norms without weights, factors of tokens, repeated heads: the logits come again from what was not rotated."""
    call = call_of(part())
    assert call.unknown is None
    assert call.rotation is not None
    torch.testing.assert_close(
        call.rotation.frequencies, torch.tensor([1.0, 0.1], dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(call.rotation.magnitudes, torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)
    own = call.logits()
    torch.testing.assert_close(remade(**call.placed()), own, atol=2e-6 * float(own.abs().max()), rtol=0)


def test_what_does_not_commute_is_refused() -> None:
    """A weight for each dimension, however near to 1."""
    call = call_of(WeightedAttention())
    assert call.rotation is None
    with pytest.raises(NoForm, match="are changed before their product"):
        call.placed()


def test_rotations_that_are_not_seen_are_not_taken_for_none() -> None:
    """Its call is proved, and its parts are not known; where only a width is named, there is none."""
    call = call_of(HiddenAttention())
    assert call.rotation is None
    with pytest.raises(NoForm, match="a rotation that was not observed"):
        call.placed()
    assert call_of(StillAttention()).unknown is None


@pytest.mark.parametrize("part", [TwiceAttention, AddedAttention])
def test_whatever_makes_keys_depend_on_the_position_is_noticed(part: type[nn.Module]) -> None:
    """Under any name, beside a rotation that is understood, and as vectors that are added."""
    call = call_of(part())
    assert call.rotation is None
    assert call.proof.outputs < 1e-6
    with pytest.raises(NoForm, match="depend on position in an unknown way"):
        call.placed()


@settings(max_examples=10)
@given(
    pairing=st.sampled_from(("half", "interleaved")),
    frequencies=st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=4),
    still=st.integers(0, 3),
    magnitude=st.floats(0.5, 2.0),
    start=st.integers(0, 50),
)
def test_any_rotation_is_found(
    pairing: str, frequencies: list[float], still: int, magnitude: float, start: int
) -> None:
    generator = torch.Generator().manual_seed(still)
    turns, width = torch.tensor(frequencies, dtype=torch.float64), 2 * len(frequencies)
    order = torch.arange(width).view(2, -1).T if pairing == "half" else torch.arange(width).view(-1, 2)
    angles = torch.arange(start, start + 20)[:, None] * turns
    q, k = (torch.randn(2, h, 20, width + still, generator=generator, dtype=torch.float64) for h in (4, 2))
    sizes = torch.ones(width + still, dtype=torch.float64)
    sizes[:width] = magnitude
    both = ((x, sizes * turned_pairs(x, angles, order)) for x in (q, k))
    found = find_rotation(*both, torch.arange(20).unsqueeze(0))
    assert found.pairing == pairing or len(frequencies) == 1
    assert torch.equal(found.pairs[: len(frequencies)], order)
    torch.testing.assert_close(found.frequencies[: len(frequencies)], turns, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        found.magnitudes[: len(frequencies)], torch.full_like(turns, magnitude), atol=1e-6, rtol=0
    )


def test_other_rotations_are_refused() -> None:
    q, k = torch.randn(2, 2, 3, 20, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    places = torch.arange(20).unsqueeze(0)
    bent = places[0].double().square() * 0.05  # an angle that is not linear in the position
    after = [(x, turned_pairs(x, bent[:, None], torch.tensor([[0, 1]]))) for x in (q, k)]
    with pytest.raises(NoForm, match="not one angle per position"):
        find_rotation(*after, places)
    grown = [(x, x * 0.9 ** places[0].unsqueeze(-1)) for x in (q, k)]  # a magnitude that is not the same everywhere
    with pytest.raises(NoForm, match="not one angle per position"):
        find_rotation(*grown, places)
    mixed = [(x, x @ torch.linalg.qr(q[0, 0, :8]).Q) for x in (q, k)]
    with pytest.raises(NoForm, match="rotates neither"):
        find_rotation(*mixed, places)
    with pytest.raises(NoForm, match="got 1"):
        find_rotation(*((x[:, :, :1], x[:, :, :1]) for x in (q, k)), places[:, :1])


LENGTH, PAIRS = 20, 4
TURNS = torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64)
TABLE = torch.arange(LENGTH)[:, None] * TURNS
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
    found = []
    for heads in (4, 2):
        x = torch.randn(2, heads, LENGTH, start + 2 * PAIRS + still, generator=generator, dtype=torch.float64)
        x[..., dimensions(pairing, start)[0][dead].flatten()] = 0
        found.append((x, turned_pairs(x, TABLE, *dimensions(pairing, start))))
    return found


@pytest.mark.parametrize("pairing", ["half", "interleaved", "sorted"])
@pytest.mark.parametrize(("start", "still"), [(0, 0), (0, 3), (4, 0)])
def test_dead_pairs_are_told_apart(pairing: str, start: int, still: int) -> None:
    """First, last and middle ones, with rotations of all dimensions, of the first, and of the last."""
    pairs, out = dimensions(pairing, start)
    for dead in CASES:
        q, k = queries_and_keys(dead, pairing, start, still)
        alive = [pair for pair in range(PAIRS) if pair not in dead]
        found = find_rotation(q, k, PLACES)
        assert found.error < 1e-12
        assert torch.equal(found.pairs, pairs[alive])
        assert torch.equal(found.after, out[alive])
        torch.testing.assert_close(found.frequencies, TURNS[alive], atol=1e-9, rtol=0)
        assert not found.dead.any()
        assert not found.tabled.any()

        found = find_rotation(q, k, PLACES, others=[TABLE.cos().float(), TABLE.sin().float()])
        assert torch.equal(found.pairs, pairs)
        assert found.pairing == ("half" if pairing == "half" else "interleaved")
        torch.testing.assert_close(found.frequencies, TURNS, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.magnitudes, torch.ones_like(TURNS), atol=1e-6, rtol=0)
        assert found.dead.nonzero().flatten().tolist() == dead
        assert found.tabled.nonzero().flatten().tolist() == dead


def only_call(model: Any) -> AttentionCall:
    (call,) = calls_in(model, TEXT)
    return call


def test_pairs_too_slow_for_a_low_precision_are_the_tables() -> None:
    """In bfloat16 a turn of 0.001 a position does not move what it turns: it is not read as none."""
    model = tiny("LlamaForCausalLM", gain=0.3, **ONE).to(torch.bfloat16)
    call = only_call(model)
    assert call.rotation is not None
    assert not call.rotation.dead.any()
    assert bool(call.rotation.tabled[-1]) == bool(call.rotation.tabled.any())
    wanted = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(call.rotation.frequencies, wanted, atol=1e-3, rtol=0)


def rotated(
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
        both.append((x, turned(x, cos, sin)))
    return both[0], both[1], positions.unsqueeze(0)


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_frequencies_of_long_inputs_are_read_from_near_to_far(rounding: torch.dtype) -> None:
    """Neighbours alone would leave the slope off by turns at the end."""
    tokens = 30_000
    found = find_rotation(*rotated(tokens, rounding), rounding=rounding)
    assert len(found.frequencies) == 2
    wrong = (found.frequencies - torch.tensor([1.0, 0.1], dtype=torch.float64)).abs()
    assert float(wrong.max()) * tokens < 0.02


@pytest.mark.parametrize("token", [0, 20, 33, 59])
def test_a_token_that_is_turned_otherwise_is_noticed(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is read or not."""
    monkeypatch.setattr(rotation, "_READ", 10)
    q, k, positions = rotated(60)
    k[1][:, :, token] *= -1
    with pytest.raises(NoForm, match="rotation: it"):
        find_rotation(q, k, positions)
