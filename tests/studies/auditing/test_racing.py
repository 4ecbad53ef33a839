"""A race for the first places finds those that all sequences would, and its numbers are those of whole passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from toeplens.ground import InputError
from toeplens.sources.huggingface import HeadEffects, head_effects
from toeplens.studies import audit
from toeplens.studies.auditing.effects import _raced, interval_of
from toeplens.studies.auditing.kept import Kept
from toeplens.studies.auditing.racing import Estimate, Heat, Race, race

transformers = pytest.importorskip("transformers")


class Worlds:
    """Effects that are drawn: each head's mean and a noise about it, so many parts a sequence."""

    def __init__(self, means: Sequence[float], counts: Sequence[int], noise: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.counts = list(counts)
        self.all = np.asarray(means) + noise * random.standard_normal((8, 20, len(means)))
        self.runs = 0
        self.known: list[list[int]] = []
        self.heads = 0

    def __call__(
        self, inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]], known: Collection[int]
    ) -> HeadEffects:
        self.known.append(list(known))
        rows = inputs["input_ids"][:, 0].numpy()
        parts, start = [], 0
        for count, heads in zip(self.counts, chosen, strict=True):
            made = np.full((len(rows), 20, count), np.nan)
            made[..., list(heads)] = self.all[rows][..., start : start + count][..., list(heads)]
            parts.append(made)
            start += count
        self.runs += 1
        self.heads += sum(map(len, chosen)) * len(rows)
        return HeadEffects(tuple(parts), rows.astype(float), "loss", "exact", 0, frozenset({1}))


def ran(world: Worlds, first: int, kept: Kept | None = None) -> Race:
    inputs = {"input_ids": torch.arange(8)[:, None].expand(8, 4), "other": 3}
    return race(world, inputs, world.counts, first, kept or Kept(None, {}), lambda done, total: None)


def pooled(parts: np.ndarray) -> np.ndarray:
    """Of each sequence sixteen parts of its twenty: four of two, twelve of one; these count for half as much."""
    cuts = [*([at, at + 1] for at in (0, 2, 4, 6)), *([at] for at in range(8, 20))]
    made = []
    for each in parts:
        mean = sum(each) / 20
        made += [mean + 0.8 * sum(each[place] - mean for place in at) for at in cuts]
    return np.array(made)


def left_by_hand(world: Worlds, first: int) -> list[int]:
    """How many of the rounds each head was in."""
    heads = list(range(sum(world.counts)))
    rounds = [0] * len(heads)
    for number in range(8):
        for head in heads:
            rounds[head] += 1
        rows = pooled(world.all[: number + 1])
        low, high = {}, {}
        for head in heads:
            own = rows[:, head]
            reach = stats.t.ppf(1 - 0.05 / 16, len(own) - 1) * own.std(ddof=1) / np.sqrt(len(own))
            low[head], high[head] = own.mean() - reach, own.mean() + reach
        if len(heads) > first:
            bar = sorted(low.values())[-first]
            heads = [head for head in heads if high[head] >= bar]
        if len(heads) <= first < sum(world.counts):
            break
    return rounds


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 5), st.floats(0.01, 2.0))
def test_heads_are_in_the_race_as_long_as_a_loop_says(seed: int, first: int, noise: float) -> None:
    random = np.random.default_rng(seed)
    world = Worlds(random.standard_normal(9).tolist(), (4, 5), noise, seed)
    found = ran(world, first)
    rows = np.concatenate([each[:, 0] for each in found.parts], axis=1)
    assert (np.isfinite(rows).sum(0) == 16 * np.array(left_by_hand(world, first))).all()
    whole = pooled(world.all)[: len(rows)]
    np.testing.assert_allclose(rows[np.isfinite(rows)], whole[np.isfinite(rows)], rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 24), st.integers(8, 300), st.integers(0, 1000))
def test_each_sequence_counts_as_much_however_many_blocks_it_has(sequences: int, tokens: int, seed: int) -> None:
    """Rounds have one sequence more or fewer, and these more or fewer blocks, which sixteen need not divide."""
    all_blocks = {count: np.random.default_rng(seed).standard_normal((sequences, count, 3)) for count in range(1, 33)}
    means = np.random.default_rng(seed + 1).standard_normal((sequences, 3))

    def run(inputs: Mapping[str, Any], chosen: Any, known: Any) -> HeadEffects:
        rows = inputs["input_ids"][:, 0].numpy()
        made = all_blocks[1 if len(rows) >= 8 else max(1, min(-(-32 // len(rows)), tokens // 8))][rows]
        made = made - made.mean(1, keepdims=True) + means[rows][:, None]
        return HeadEffects((made,), rows.astype(float), "loss", "exact", 0, frozenset())

    inputs = {"input_ids": torch.arange(sequences)[:, None].expand(sequences, tokens)}
    (found,) = race(run, inputs, [3], 3, Kept(None, {}), lambda done, total: None).parts
    assert len(found) % sequences == 0
    np.testing.assert_allclose(found[:, 0].mean(0), means.mean(0), rtol=0, atol=1e-12)


def test_clear_winners_are_found_early_and_all_heads_have_intervals() -> None:
    world = Worlds([5.0, 4.0, *[0.0] * 8], (5, 5), 0.1, 0)
    found = ran(world, 2)
    assert world.runs == 1, "the first sequence tells them from the others"
    columns = [interval_of(each, 0) for each in found.parts]
    means = np.concatenate([each[0] for each in columns])
    assert set(np.argsort(-means)[:2]) == {0, 1}
    assert all(np.isfinite(each).all() for column in columns for each in column)
    assert found.baseline is not None
    assert found.outcome == "loss"


def test_heads_that_are_alike_take_all_sequences() -> None:
    world = Worlds([1.0] * 6, (3, 3), 1.0, 3)
    found = ran(world, 2)
    assert world.runs == 8
    assert found.baseline is not None
    assert found.baseline.tolist() == list(range(8))


def test_rounds_that_are_kept_are_not_run_again(tmp_path: Path) -> None:
    world, again = (Worlds([1.0, 0.9, *[0.5] * 4], (3, 3), 0.6, 5) for _ in range(2))
    first = ran(world, 2, Kept(tmp_path, {"a": 1}))
    second = ran(again, 2, Kept(tmp_path, {"a": 1}))
    assert again.runs == 0
    for one, other in zip(first.parts, second.parts, strict=True):
        np.testing.assert_array_equal(one, other)


def test_with_as_many_places_as_heads_all_sequences_are_read() -> None:
    world = Worlds([1.0, 2.0, 3.0], (1, 2), 0.1, 0)
    found = ran(world, 3)
    assert world.runs == 8
    assert len(found.parts[0]) == 128


def test_heads_without_an_effect_leave_at_once() -> None:
    world = Worlds([1.0] * 4, (2, 2), 1.0, 1)
    world.all[..., 1] = np.nan
    rows = np.concatenate([each[:, 0] for each in ran(world, 2).parts], axis=1)
    assert np.isnan(rows[:, 1]).all()
    assert np.isfinite(rows[:, 0]).all()


class Long(Worlds):
    """With effects of its own over the first quarter of the tokens."""

    def __init__(self, means: Sequence[float], early: Sequence[float], seed: int = 0) -> None:
        super().__init__(means, (len(means) // 2, len(means) - len(means) // 2), 0.1, seed)
        self.early = self.all - np.asarray(means) + np.asarray(early)
        self.lengths: list[int] = []

    def __call__(
        self, inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]], known: Collection[int]
    ) -> HeadEffects:
        self.lengths.append(inputs["input_ids"].shape[1])
        whole = self.all
        self.all = self.early if self.lengths[-1] == 128 else whole
        try:
            return super().__call__(inputs, chosen, known)
        finally:
            self.all = whole

    def race(
        self,
        first: int,
        sequences: int = 2,
        kept: Kept | None = None,
        heat: bool = True,
        estimate: Estimate = lambda inputs: None,
    ) -> Race:
        tokens = torch.arange(sequences)[:, None].expand(sequences, 512)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return race(self, inputs, self.counts, first, kept or Kept(None, {}), lambda done, total: None, heat, estimate)


RISING = [float(number) for number in range(40)]  # what 40 heads are worth


def test_a_heat_over_a_quarter_leaves_heads_out_and_the_others_have_whole_effects() -> None:
    world = Long(RISING, RISING)
    found = world.race(3)
    assert world.lengths[:2] == [128, 512]
    assert world.known[0] == [], "the heat asks of each layer whether the ones before it can be left out"
    assert all(each == [1] for each in world.known[1:])
    assert found.heat is not None
    assert (found.heat.left, found.heat.drawn, found.heat.missed) == (25, 8, 0)
    assert found.heat.over == "a quarter of the tokens"
    rows = np.concatenate([each[:, 0] for each in found.parts], axis=1)
    means = np.nan_to_num(rows[:16], nan=-1.0).mean(0)
    np.testing.assert_array_equal(np.argsort(-means)[:3], [39, 38, 37])
    there = np.isfinite(rows[:16]).all(0)
    assert there.sum() == 23
    assert there[25:].all(), "fifteen go on"
    np.testing.assert_allclose(rows[:16][:, there], pooled(world.all[:1])[:, there], rtol=1e-12)
    assert np.isnan(rows[:, ~there]).all(), "what a head is worth over a quarter is no effect"


def test_a_head_that_matters_later_alone_is_seen_where_it_is_drawn() -> None:
    early = RISING.copy()
    early[34:] = [-1.0] * 6  # nothing in the first quarter: 8 of 25 left out are drawn
    found = Long(RISING, early).race(3)
    assert found.heat is not None
    rows = np.concatenate([each[:, 0] for each in found.parts], axis=1)
    drawn = np.isfinite(rows[:16]).all(0)
    assert found.heat.missed == drawn[37:].sum() + min(3 - drawn[37:].sum(), drawn[34:37].sum())
    assert found.heat.missed > 0


def test_an_estimate_over_all_tokens_names_heads_that_a_heat_does_not() -> None:
    early = RISING.copy()
    early[34:] = [-1.0] * 6
    estimates = np.full(40, np.nan)
    estimates[[3, 35, 36, 37, 38, 39]] = [0.5, 1, 2, 3, 4, 5]
    found = Long(RISING, early).race(3, estimate=lambda inputs: estimates)
    assert found.heat is not None
    assert found.heat.over.endswith("from a first-order estimate over all of them")
    assert (found.heat.left, found.heat.drawn, found.heat.missed) == (40 - 9 - 6, 8, 0)
    rows = np.concatenate([each[:, 0] for each in found.parts], axis=1)
    there = np.flatnonzero(np.isfinite(rows[:16]).all(0))
    assert {3, *range(25, 34), *range(35, 40)} <= set(there)


def test_a_sequence_too_long_for_an_estimate_has_none() -> None:
    def never(inputs: Any) -> np.ndarray:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Long(RISING, RISING).race(3, 32, estimate=never)
    assert Long(RISING, RISING).race(3, 40, estimate=never).heat is not None


def test_the_heat_s_own_first_quarter_does_not_count() -> None:
    world = Long(RISING, RISING)
    world.early[:, :5] += np.where(np.arange(40) < 20, 1000.0, 0.0)  # five of its twenty blocks
    rows = np.concatenate([each[:, 0] for each in world.race(3).parts], axis=1)
    assert np.isfinite(rows[:16, 25:]).all()


@pytest.mark.parametrize("case", ["few heads", "no order of tokens", "short", "more than tokens", "padding first"])
def test_there_is_no_heat_where_it_would_save_nothing_or_mean_nothing(case: str) -> None:
    world = Long(RISING[:20] if case == "few heads" else RISING, RISING[:20] if case == "few heads" else RISING)
    if case in ("few heads", "no order of tokens"):
        found = world.race(3, heat=case == "few heads")
    else:
        tokens = torch.zeros(2, 511 if case == "short" else 512, dtype=torch.long)
        inputs = {"input_ids": tokens}
        if case == "more than tokens":
            inputs["bbox"] = torch.zeros(2, 512, 4)
        elif case == "padding first":
            inputs["attention_mask"] = (torch.arange(512) >= torch.tensor([[120], [0]])).long()
        found = race(world, inputs, world.counts, 3, Kept(None, {}), lambda done, total: None, True)
    assert found.heat is None
    assert 128 not in world.lengths


def test_a_heat_that_is_kept_is_not_run_again(tmp_path: Path) -> None:
    world, again = Long(RISING, RISING), Long(RISING, RISING)
    first = world.race(3, kept=Kept(tmp_path, {"a": 1}))
    second = again.race(3, kept=Kept(tmp_path, {"a": 1}))
    assert again.runs == 0
    assert first.heat == second.heat
    for one, other in zip(first.parts, second.parts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("missed", [0, 2])
def test_a_guess_is_told_with_what_became_of_those_drawn(missed: int) -> None:
    words = _raced(10, Heat(230, 8, missed, "a quarter of the tokens"))
    assert words.startswith("230 heads were left out by a guess")
    assert f"of 8 of these that were drawn and run on all, {missed or 'none'} came out among the first 10" in words
    assert ("others of them may be, too" in words) == (missed > 0)
    assert "guess" not in _raced(10, None)


@pytest.mark.parametrize("method", ["exact", "position"])
def test_an_audit_with_a_race_has_the_effects_of_whole_passes(method: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = transformers.LlamaForCausalLM(config).eval()
        tokens = torch.randint(31, (10, 24))
    raced = audit(model, tokens, effects=method, first=2)
    whole = audit(model, tokens, effects=method)
    assert raced.about["race"].endswith("were left out of the later sequences.")
    assert raced.method == method
    calls = [(x.module, x.side, x.kind, x.layer, x.heads) for x in whole.layers]
    cuts = np.array_split(np.arange(10), 8)
    parts = [head_effects(model, {"input_ids": tokens[cut]}, calls, method=method).parts for cut in cuts]
    rows = [np.concatenate([each.reshape(-1, 4) for each in call]) for call in zip(*parts, strict=True)]
    for head in raced.heads:
        own = rows[head.layer][:, head.head]
        sizes = np.cumsum([each[0].reshape(-1, 4).shape[0] for each in parts])
        ways = [own[:size].mean() for size in sizes]
        assert head.effect is not None
        assert min(abs(head.effect - way) for way in ways) < 1e-9
        assert head.effect_low is not None
        assert head.effect_low <= head.effect
    best, top = (max(found.heads, key=lambda head: head.effect or 0) for found in (whole, raced))
    assert (top.effect_high or 0) >= (best.effect_low or 0)


def test_what_no_race_can_be_run_for() -> None:
    tiny = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny))
    for effects in ("none", "bands", "attribution"):
        with pytest.raises(InputError, match=f"first: it was given beside effects '{effects}'"):
            audit(model, torch.zeros(2, 4, dtype=torch.long), effects=effects, first=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="first: 0 was given; it must be at least 1"):
        audit(model, torch.zeros(2, 4, dtype=torch.long), first=0)


@pytest.mark.parametrize("options", [{}, {"first": 1}, {"effects": "position"}])
def test_effects_of_chosen_heads_alone(options: dict[str, Any]) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).eval()
        tokens = torch.randint(31, (1, 24))
    some, whole = audit(model, tokens, heads=[1, 3], **options), audit(model, tokens, **options)
    for head, other in zip(some.heads, whole.heads, strict=True):
        assert head.effect == (pytest.approx(other.effect) if head.head in (1, 3) else None)
    assert all(layer.deposit == {} for layer in some.layers)
    assert all(layer.deposit for layer in whole.layers)
    refused = {(4,): "heads: 4 was given; the layers have heads 0 to 3 at most", (): "heads: none were given"}
    for heads, sentence in refused.items():
        with pytest.raises(InputError, match=sentence):
            audit(model, tokens, heads=heads, **options)
    with pytest.raises(InputError, match="heads: it was given beside effects 'none'"):
        audit(model, tokens, heads=[1], effects="none")
