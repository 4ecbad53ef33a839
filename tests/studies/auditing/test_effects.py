"""Effects: estimates that exact ones bear out, deposits above their noise, and the first places of an elimination."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from toeplens.backends.hf import HeadEffects, head_effects
from toeplens.backends.hf.effects import head_estimates
from toeplens.studies.auditing import Audit, HeadRecord, audit, sentences
from toeplens.studies.auditing import effects as silencing
from toeplens.studies.auditing.effects import Elimination, EstimateFn, concentration, eliminate
from toeplens.studies.auditing.record import AuditCache
from toeplens.utils import InputError

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(3, 40, (9, 16), generator=torch.Generator().manual_seed(1))


def model_of(weight: float) -> Any:
    """A model whose attention adds little or much to the stream: for little of it first-order estimates are right."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
        for name, x in model.named_parameters():
            if x.ndim > 1:
                x.data = (weight if "o_proj" in name else 0.3) * torch.randn(x.shape)
    return model


def test_accurate_estimates_are_reported_with_their_check() -> None:
    model = model_of(0.001)
    actual, exact = (audit(model, TOKENS, effects=method) for method in ("attribution", "exact"))
    assert actual.check.is_reliable
    assert actual.check.slope == pytest.approx(1, abs=0.1)
    assert sorted(actual.check.exact) == pytest.approx(sorted(head.effect or 0 for head in exact.heads), abs=1e-9)
    calls = [(f"model.layers.{layer}.self_attn", "decoder", "self", layer, 4) for layer in range(2)]
    estimates = head_effects(model, {"input_ids": TOKENS}, calls, method="attribution").effects
    expected = np.concatenate([each.mean(0) for each in estimates])
    np.testing.assert_allclose([head.effect or 0 for head in actual.heads], expected, atol=1e-12)
    assert exact.check is None
    assert type(actual).from_dict(actual.to_dict()) == actual


def test_inaccurate_estimates_are_not_reported() -> None:
    actual = audit(model_of(2.0), TOKENS, effects="attribution")
    assert not actual.check.is_reliable
    assert (actual.effect, actual.method, actual.baseline) == (None, None, None)
    assert {head.effect for head in actual.heads} == {None}
    assert "do not read the estimates as effects" in actual.about["no_effects"]


def test_shares_are_of_effects_above_the_noise() -> None:
    """Helping and harming heads are both counted; a layer of nothing but noise has no largest share."""
    effects = np.array([0.05, -0.02, 0.004, -0.001])
    summary = concentration(effects, effects - 0.005, effects + 0.005)
    assert summary["helps"] == pytest.approx(0.054)
    assert summary["harms"] == pytest.approx(-0.021)
    assert summary["top_share"] == pytest.approx(0.05 / 0.054)
    lost = concentration(effects, effects - 0.05, effects + 0.05)
    assert (lost["top_share"], lost["effective_heads"], lost["gini"]) == (None, None, None)
    assert lost["helps"] == summary["helps"]
    unknown = np.full(4, np.nan)
    assert concentration(effects, unknown, unknown)["top_share"] is None
    rng, false = np.random.default_rng(0), 0
    for _ in range(500):  # heads without any effect, measured with noise
        noise = rng.normal(0, 0.01, 12)
        false += concentration(noise, noise - 0.0196, noise + 0.0196)["top_share"] is not None
    assert false <= 35


def test_harmful_heads_are_distinguished_from_noise() -> None:
    """Heads whose whole interval is below 0."""

    def made(half: float) -> Audit:
        values = dict(enumerate([0.02, -0.03, -0.01, -0.001]))
        ends = {n: {"effect": x, "effect_low": x - half, "effect_high": x + half} for n, x in values.items()}
        heads = tuple(HeadRecord("decoder", "self", 0, n, **numbers) for n, numbers in ends.items())
        return Audit({"intervals": "over sequences"}, (), heads, "loss", "exact", 2.0, 0.0)

    assert [head.head for head in sentences.harmful_heads(made(0.002))] == [1, 2]
    text = " ".join(sentences.finding_sentences(made(0.002)))
    assert "decoder L1 H2, decoder L1 H3; largest for decoder layer 1 head 2 " in text
    assert "we would expect about 0 of 4 such heads" in text
    assert sentences.harmful_heads(made(0.05)) == []


class RandomEffects:
    """Effects that are drawn: each head's mean and a noise about it, so many parts a sequence."""

    def __init__(self, means: Sequence[float], counts: Sequence[int], noise: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.counts = list(counts)
        self.all = np.asarray(means) + noise * random.standard_normal((8, 20, len(means)))
        self.runs = 0
        self.heads = 0

    def __call__(self, inputs: Mapping[str, Any], chosen: Sequence[Sequence[int]], progress: Any) -> HeadEffects:
        progress(1, 2)
        rows = inputs["input_ids"][:, 0].numpy()
        parts, start = [], 0
        for count, heads in zip(self.counts, chosen, strict=True):
            blocks = np.full((len(rows), 20, count), np.nan)
            blocks[..., list(heads)] = self.all[rows][..., start : start + count][..., list(heads)]
            parts.append(blocks)
            start += count
        self.runs += 1
        self.heads += sum(map(len, chosen)) * len(rows)
        return HeadEffects(tuple(parts), rows.astype(float), "loss", "exact", 0)


def run_elimination(
    world: RandomEffects,
    first: int,
    kept: AuditCache | None = None,
    estimate: EstimateFn = lambda inputs: None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Elimination:
    inputs = {"input_ids": torch.arange(8)[:, None].expand(8, 4), "other": 3}
    return eliminate(world, inputs, world.counts, first, kept or AuditCache(None, {}), report, estimate)


def test_progress_is_reported_within_each_round() -> None:
    seen: list[tuple[int, int]] = []
    run_elimination(RandomEffects([1.0] * 40, (20, 20), 0.1, 0), 39, report=lambda *numbers: seen.append(numbers))
    assert seen[:4] == [(0, 320), (20, 320), (40, 320), (60, 320)]
    assert seen == sorted(seen)
    assert seen[-1] == (320, 320)


def pooled_effects(parts: np.ndarray) -> np.ndarray:
    """Of each sequence sixteen parts of its twenty: four of two, twelve of one; these count for half as much."""
    cuts = [*([at, at + 1] for at in (0, 2, 4, 6)), *([at] for at in range(8, 20))]
    rows = []
    for each in parts:
        mean = sum(each) / 20
        rows += [mean + 0.8 * sum(each[place] - mean for place in at) for at in cuts]
    return np.array(rows)


def reference_rounds(world: RandomEffects, first: int) -> list[int]:
    """How many of the rounds each head was in."""
    heads = list(range(sum(world.counts)))
    rounds = [0] * len(heads)
    for number in range(8):
        for head in heads:
            rounds[head] += 1
        rows = pooled_effects(world.all[: number + 1])
        low, high = {}, {}
        for head in heads:
            effects = rows[:, head]
            reach = stats.t.ppf(1 - 0.05 / 16, len(effects) - 1) * effects.std(ddof=1) / np.sqrt(len(effects))
            low[head], high[head] = effects.mean() - reach, effects.mean() + reach
        if len(heads) > first:
            bar = sorted(low.values())[-first]
            heads = [head for head in heads if high[head] >= bar]
        if len(heads) <= first < sum(world.counts):
            break
    return rounds


@given(st.integers(0, 1000), st.integers(1, 5), st.floats(0.01, 2.0))
def test_elimination_matches_a_loop(seed: int, first: int, noise: float) -> None:
    random = np.random.default_rng(seed)
    world = RandomEffects(random.standard_normal(9).tolist(), (4, 5), noise, seed)
    actual = run_elimination(world, first)
    rows = np.concatenate([each[:, 0] for each in actual.parts], axis=1)
    assert (np.isfinite(rows).sum(0) == 16 * np.array(reference_rounds(world, first))).all()
    whole = pooled_effects(world.all)[: len(rows)]
    np.testing.assert_allclose(rows[np.isfinite(rows)], whole[np.isfinite(rows)], rtol=1e-12, atol=1e-12)


@given(st.integers(1, 24), st.integers(8, 300), st.integers(0, 1000))
def test_each_sequence_counts_equally_whatever_its_blocks(sequences: int, tokens: int, seed: int) -> None:
    """Rounds have one sequence more or fewer, and these more or fewer blocks, which sixteen need not divide."""
    all_blocks = {count: np.random.default_rng(seed).standard_normal((sequences, count, 3)) for count in range(1, 33)}
    means = np.random.default_rng(seed + 1).standard_normal((sequences, 3))

    def run(inputs: Mapping[str, Any], chosen: Any, progress: Any) -> HeadEffects:
        rows = inputs["input_ids"][:, 0].numpy()
        blocks = all_blocks[1 if len(rows) >= 8 else max(1, min(-(-32 // len(rows)), tokens // 8))][rows]
        blocks = blocks - blocks.mean(1, keepdims=True) + means[rows][:, None]
        return HeadEffects((blocks,), rows.astype(float), "loss", "exact", 0)

    inputs = {"input_ids": torch.arange(sequences)[:, None].expand(sequences, tokens)}
    (actual,) = eliminate(run, inputs, [3], 3, AuditCache(None, {}), lambda done, total: None).parts
    assert len(actual) % sequences == 0
    np.testing.assert_allclose(actual[:, 0].mean(0), means.mean(0), rtol=0, atol=1e-12)


def test_cached_rounds_are_not_repeated(tmp_path: Path) -> None:
    world, again = (RandomEffects([1.0, 0.9, *[0.5] * 4], (3, 3), 0.6, 5) for _ in range(2))
    first = run_elimination(world, 2, AuditCache(tmp_path, {"a": 1}))
    second = run_elimination(again, 2, AuditCache(tmp_path, {"a": 1}))
    assert again.runs == 0
    for one, other in zip(first.parts, second.parts, strict=True):
        np.testing.assert_array_equal(one, other)


RISING_EFFECTS = [float(number) for number in range(40)]  # what 40 heads are worth


def fully_measured(found: Elimination) -> np.ndarray:
    """Which heads went through the first round."""
    rows = np.concatenate([each[:, 0] for each in found.parts], axis=1)
    return np.flatnonzero(np.isfinite(rows[:16]).all(0))


def test_an_estimate_prunes_heads_and_the_rest_are_fully_measured() -> None:
    world = RandomEffects(RISING_EFFECTS, (20, 20), 0.1, 0)
    actual = run_elimination(world, 3, estimate=lambda inputs: np.array(RISING_EFFECTS))
    assert (actual.skipped, actual.drawn, actual.missed) == (20, 8, 0)
    measured = fully_measured(actual)
    assert len(measured) == 20
    assert set(range(28, 40)) <= set(measured), "four times three go on"
    rows = np.concatenate([each[:, 0] for each in actual.parts], axis=1)
    np.testing.assert_allclose(rows[:16][:, measured], pooled_effects(world.all[:1])[:, measured], rtol=1e-12)
    left = np.setdiff1d(np.arange(40), measured)
    assert np.isnan(rows[:, left]).all(), "an estimate is no effect"
    drawn = measured[measured < 28].tolist()
    assert drawn != list(range(20, 28)), "others are drawn, and not the next best"


def test_a_head_missed_by_the_estimate_is_detected_when_sampled() -> None:
    estimates = np.array(RISING_EFFECTS)
    estimates[34:] = -1.0  # 8 of 28 left out are drawn
    actual = run_elimination(RandomEffects(RISING_EFFECTS, (20, 20), 0.1, 0), 3, estimate=lambda inputs: estimates)
    measured = np.isin(np.arange(40), fully_measured(actual))
    assert actual.missed == measured[37:].sum() + min(3 - measured[37:].sum(), measured[34:37].sum())
    assert actual.missed > 0


@pytest.mark.parametrize(
    ("other", "tokens", "given"),
    [
        ("bbox", 1000, (2, 1000)),
        ("bbox", 2049, None),
        ("decoder_input_ids", 1000, (1, 1000)),
        ("decoder_input_ids", 1500, (1, 1024)),
    ],
)
def test_an_estimate_uses_a_subset_of_a_rounds_sequences(
    other: str, tokens: int, given: tuple[int, int] | None
) -> None:
    """Three a round; a decoder's tokens count; and none where inputs hold more than tokens and are too long."""
    shapes = []
    world = RandomEffects(RISING_EFFECTS, (20, 20), 0.1, 0)
    world.all = np.repeat(world.all, 3, 0)
    ids = torch.arange(24)[:, None].expand(24, tokens)
    inputs = {"input_ids": ids, other: torch.zeros(24, tokens, 4) if other == "bbox" else ids}

    def estimate(some: Mapping[str, Any]) -> None:
        shapes.append(tuple(some["input_ids"].shape))
        assert some[other].shape == (*shapes[-1], *inputs[other].shape[2:])

    eliminate(world, inputs, world.counts, 3, AuditCache(None, {}), lambda done, total: None, estimate)
    assert shapes == ([] if given is None else [given])


def llama(heads: int, *shape: int) -> tuple[Any, torch.Tensor]:
    """A Llama of two layers of so many heads, and tokens."""
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=heads)).eval()
        return model, torch.randint(31, shape)


@pytest.mark.parametrize("method", ["exact", "position"])
def test_an_audit_continues_with_the_heads_an_estimate_selects(method: Any) -> None:
    """Sixteen heads, of which one is wanted: four go on, and eight that are drawn, with their whole effects."""
    model, tokens = llama(8, 1, 24)
    raced, exact = audit(model, tokens, effects=method, first=1), audit(model, tokens, effects=method)
    calls = [(x.module, x.side, x.kind, x.layer, x.heads) for x in exact.layers]
    actual = head_estimates(model, {"input_ids": tokens}, calls, target=method)
    best = np.argsort(-np.concatenate([each.mean((0, 1)) for each in actual.block_effects]))[:4]
    measured = {8 * head.layer + head.head for head in raced.heads if head.effect is not None}
    assert len(measured) == 12
    assert set(best) <= measured
    assert raced.about["race"].startswith("A gradient-based estimate excluded 4 heads ")
    for one, other in zip(raced.heads, exact.heads, strict=True):
        if one.effect is not None:
            assert one.effect == pytest.approx(other.effect, abs=1e-9)
    some = audit(model, tokens, effects=method, first=1, heads=[1])
    assert {head.head for head in some.heads if head.effect is not None} == {1}, "and of chosen heads alone"
    assert "estimate" not in some.about["race"]


def test_without_a_finite_estimate_all_heads_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients that overflow in 16 bits; layers that are quantised."""
    model, tokens = llama(16, 2, 40)

    def overflown(*args: Any, **options: Any) -> HeadEffects:
        actual = head_estimates(*args, **options)
        actual.block_effects[1][:, :, 5] = np.inf
        return actual

    monkeypatch.setattr(silencing, "head_estimates", overflown)
    actual = audit(model, tokens, first=1)
    assert all(head.effect is not None for head in actual.heads)
    assert "estimate" not in actual.about["race"]
    others = audit(model, tokens, first=1, heads=[n for n in range(16) if n != 5])
    assert "estimate" in others.about["race"], "of heads that are not wanted nothing need be known"
    monkeypatch.undo()
    own = model.model.layers[1].forward
    monkeypatch.setattr(model.model.layers[1], "forward", lambda *args, **kwargs: own(*args, **kwargs).detach())
    assert "estimate" not in audit(model, tokens, first=1).about["race"]


@pytest.mark.parametrize("options", [{}, {"first": 1}])
def test_effects_of_selected_heads(options: dict[str, Any]) -> None:
    model, tokens = llama(4, 1, 24)
    some, all_heads = audit(model, tokens, heads=[1, 3], **options), audit(model, tokens, **options)
    for head, other in zip(some.heads, all_heads.heads, strict=True):
        assert head.effect == (pytest.approx(other.effect) if head.head in (1, 3) else None)
    assert all(layer.deposit == {} for layer in some.layers)
    assert all(layer.deposit for layer in all_heads.layers)
    with pytest.raises(InputError, match="heads must have at least one entry, got none"):
        audit(model, tokens, heads=[], **options)
