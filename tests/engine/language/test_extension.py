"""Longer contexts after training: each method against another way of doing the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from tests.engine.language.conftest import LENGTH, losses_of, model_of

from toeplens.engine.language import Extension, extension
from toeplens.engine.language.bits import cut_passages
from toeplens.engine.language.extension import FACTORS, TARGET_FACTOR, TUNED_METHODS, TUNING_RATE, TUNING_SHARE, _tune
from toeplens.model import Decoder
from toeplens.tasks.language import LanguageTask
from toeplens.training import RunSpec, run_spec
from toeplens.utils import InputError

module = import_module("toeplens.engine.language.extension")  # whose name in its package is the function's
NUM_TEXTS = 6  # that methods are compared on
METHODS = {
    *("none", "interpolation", "ntk", "dynamic", "yarn", "longrope", "p-rope", "rerope", "self-extend", "dropped"),
}


def spec_of(task: LanguageTask, model: Decoder) -> RunSpec:
    options = {"words": 40, "documents": 60, "document": 16 * LENGTH + 40, "length": LENGTH}
    sizes = {"train_examples": 200, "test_examples": 16, "epochs": 1, "batch_size": 8, "lr": 1e-2}
    return run_spec(task="markov-language", task_options=options, model=model.config, **sizes)


@pytest.fixture(scope="module", autouse=True)
def _few_texts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TEST_TEXTS", NUM_TEXTS)
        yield


@pytest.fixture(scope="module")
def model(task: LanguageTask) -> Decoder:
    return model_of(task)


@pytest.fixture(scope="module")
def extension_rows(task: LanguageTask, model: Decoder) -> Extension:
    return extension(model, spec_of(task, model), task, tuned=False)


def extension_row(extension_rows: Extension, method: str, factor: float) -> float:
    row = next(row for row in extension_rows.rows if (row.method, row.factor) == (method, factor))
    assert row.bits is not None, row.reason
    return row.bits.value


def test_every_method_is_evaluated_at_every_length(extension_rows: Extension):
    methods = [row.method for row in extension_rows.rows]
    assert set(methods) == METHODS
    assert all(methods.count(method) == len(FACTORS) for method in set(methods))
    for row in extension_rows.rows:
        assert row.bits is not None
        assert row.gain is not None
        assert row.gain.value == pytest.approx(
            row.bits.value - extension_row(extension_rows, "none", row.factor), abs=1e-9
        )
    assert extension_rows.steps == 0
    assert Extension.from_dict(extension_rows.to_dict(), "here").to_dict() == extension_rows.to_dict()


def with_encoding(task: LanguageTask, model: Decoder, encoding: str, **options: Any) -> Decoder:
    """The same weights with another encoding."""
    other_model = model_of(task, encoding, encoding_options=options)
    other_model.load_state_dict(dict(model.named_parameters()), strict=False)
    return other_model


def _factors(extension_rows: Extension) -> list[float]:
    """LongRoPE's, as they are recorded, rounded."""
    (words,) = {row.set for row in extension_rows.rows if row.method == "longrope"}
    return [float(part) for part in words.removeprefix("factors ").split(", ")]


@pytest.mark.parametrize(("base", "pairing"), [(10_000.0, "interleaved"), (500.0, "half")])
def test_each_method_matches_its_encoding(task: LanguageTask, extension_rows: Extension, base: float, pairing: str):
    """Set for 128 tokens after 32, of RoPE with its defaults and of one with others."""
    model = model_of(task, encoding_options={} if base == 10_000 else {"base": base, "pairing": pairing})
    if base != 10_000:
        extension_rows = extension(model, spec_of(task, model), task, tuned=False)
    plain: dict[str, Any] = {"base": base, "pairing": pairing}
    ruled: dict[str, Any] = {"rope_theta": base, "pairing": pairing, "max_position_embeddings": 32}
    first: dict[str, Any] = {"original_max_position_embeddings": 32, "factor": 4.0}
    methods = {
        "none": with_encoding(task, model, "rope", **plain),
        "interpolation": with_encoding(task, model, "rope-linear", **ruled, factor=4.0),
        "ntk": with_encoding(task, model, "rope-ntk", **ruled, factor=4.0),
        "dynamic": with_encoding(task, model, "rope-dynamic", **ruled, factor=1.0),
        "yarn": with_encoding(task, model, "rope-yarn", **ruled, **first),
        "longrope": with_encoding(
            task, model, "rope-longrope", **ruled, **first, short_factor=[1.0] * 8, long_factor=_factors(extension_rows)
        ),
        "p-rope": with_encoding(task, model, "p-rope", **plain, p=0.5),
        "rerope": with_encoding(task, model, "rerope", **plain, window=16),
        "self-extend": with_encoding(
            task, model, "self-extend", **plain, window=16, group=7
        ),  # 112 / 16 tokens beyond it
        "dropped": with_encoding(task, model, "nope"),
    }
    assert methods.keys() == METHODS
    texts = cut_passages(task.corpus(), "test", LENGTH * FACTORS[-1], NUM_TEXTS, seed=0).tokens
    for name, other in methods.items():
        for factor in FACTORS:
            ends = losses_of(other, texts[:, -LENGTH * factor - 1 :])[:, -LENGTH // 2 :]
            rel = 1e-3 if name == "longrope" else 1e-5
            assert extension_row(extension_rows, name, factor) == pytest.approx(ends.mean() / math.log(2), rel=rel), (
                name
            )


def _second_half(task: LanguageTask, model: Decoder) -> float:
    """Nats a token of the later half of the validation texts by which something is searched."""
    texts = cut_passages(task.corpus(), "validation", LENGTH * TARGET_FACTOR, 8, seed=0).tokens
    return float(losses_of(model, texts)[:, -LENGTH * TARGET_FACTOR // 2 :].mean())


def test_longrope_search_does_not_worsen_its_start(task: LanguageTask, model: Decoder, extension_rows: Extension):
    """On validation texts: than interpolation, NTK and the line between."""
    factors = _factors(extension_rows)
    assert factors == sorted(factors)
    assert 1 <= factors[0] <= factors[-1] <= 1.25 * TARGET_FACTOR
    starts = [[4.0] * 8, [4 ** (pair / 7) for pair in range(8)], [1 + 3 * pair / 7 for pair in range(8)]]
    ruled: dict[str, Any] = {"pairing": "interleaved", "max_position_embeddings": 32, "factor": 4.0}
    ruled |= {"rope_theta": 10_000.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 8}
    *others, own = (
        _second_half(task, with_encoding(task, model, "rope-longrope", **ruled, long_factor=each))
        for each in (*starts, factors)
    )
    assert own <= min(others) + 1e-3  # factors are reported rounded


def test_tuning_leaves_the_model_and_the_random_state_unchanged(task: LanguageTask):
    model = model_of(task)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    spec = spec_of(task, model)
    tuned = extension(model, spec, task, tuned=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tuned.steps == max(1, round(TUNING_SHARE * spec.total_steps))
    assert {row.method for row in tuned.rows} == set(TUNED_METHODS)
    assert all(row.gain is not None and row.gain.value != 0 for row in tuned.rows)
    assert extension(model, spec, task, tuned=True).to_dict() == tuned.to_dict()


def test_tuning_is_adamw_on_windows_of_the_target_length(task: LanguageTask):
    """The first step from a model, against torch's own optimiser on the same windows."""
    model = model_of(task)
    spec = spec_of(task, model)
    tuned = model_of(task)
    _tune(tuned, spec, task, LENGTH * TARGET_FACTOR, 1, 0)
    data = task.at_length(LENGTH * TARGET_FACTOR).dataset("train", spec.batch_size // TARGET_FACTOR, 0)
    by_hand = model_of(task)
    optimizer = torch.optim.AdamW(
        by_hand.parameters(), lr=TUNING_RATE * spec.lr, betas=spec.betas, weight_decay=spec.weight_decay
    )
    logits = by_hand(torch.from_numpy(data.tokens))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(data.labels).flatten()).backward()
    optimizer.step()
    for name, tensor in tuned.state_dict().items():
        torch.testing.assert_close(tensor, by_hand.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_the_learning_rate_warms_up_over_two_of_twenty_steps(task: LanguageTask, monkeypatch: pytest.MonkeyPatch):
    by_hand = [1 / 2, 1, 1, *(left / 18 for left in range(17, 0, -1))]
    rates: list[float] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]))
    model = model_of(task)
    spec = spec_of(task, model)
    _tune(model, spec, task, LENGTH, 20, 0)
    assert rates == pytest.approx([TUNING_RATE * spec.lr * share for share in by_hand])


def test_tuning_uses_the_target_length_except_when_dropping_position(
    task: LanguageTask, model: Decoder, extension_rows: Extension, monkeypatch: pytest.MonkeyPatch
):
    """A tuning that forgets all: gains are against the model as it was before."""
    requests: list[tuple[str, int, int]] = []

    def forget(model: Decoder, spec: RunSpec, task: LanguageTask, length: int, steps: int, seed: int) -> None:
        requests.append((model.config.encoding, length, steps))
        torch.nn.init.zeros_(model.readout.weight)
        torch.nn.init.zeros_(model.readout.bias)

    monkeypatch.setattr(module, "_tune", forget)
    tuned = extension(model, spec_of(task, model), task, tuned=True)
    assert requests == [
        *((encoding, 4 * LENGTH, 1) for encoding in ("rope", "rope-linear", "rope-ntk", "rope-yarn")),
        ("nope", LENGTH, 1),
    ]
    for row in tuned.rows:
        assert row.bits is not None
        assert row.gain is not None
        assert row.bits.value == pytest.approx(math.log2(task.vocab_size))
        assert row.gain.value == pytest.approx(row.bits.value - extension_row(extension_rows, "none", row.factor))


@pytest.mark.parametrize(("weights", "best"), [(0, 1.0), (1, 1.5), (11, 1.3)])
def test_the_factor_of_logits_is_the_best_of_its_scales_on_validation_texts(
    task: LanguageTask, weights: int, best: float
):
    """Of models without position, of which some do better with sharper attention; the factor is put in the queries."""
    bare = model_of(task, "nope")
    torch.manual_seed(weights)
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter += 0.1 * torch.randn_like(parameter)

    def scaled(factor: float) -> Decoder:
        extended = with_encoding(task, bare, "nope")
        with torch.no_grad():
            for layer in range(2):
                queries: Any = extended.block(layer).attention.qkv
                queries.weight[:32] *= factor
                queries.bias[:32] *= factor
        return extended

    losses = {factor: _second_half(task, scaled(factor)) for factor in (1.0, 1.05, 1.1, 1.2, 1.3, 1.5)}
    assert min(losses, key=losses.__getitem__) == best
    actual = extension(bare, spec_of(task, bare), task, tuned=False)
    assert {(row.method, row.set) for row in actual.rows} == {("none", ""), ("scaled", f"factor {best:g}")}
    texts = cut_passages(task.corpus(), "test", LENGTH * FACTORS[-1], NUM_TEXTS, seed=0).tokens
    for factor in FACTORS:
        ends = losses_of(scaled(best), texts[:, -LENGTH * factor - 1 :])[:, -LENGTH // 2 :]
        assert extension_row(actual, "scaled", factor) == pytest.approx(ends.mean() / math.log(2), rel=1e-5)


def test_encodings_without_an_extension_method_have_none(task: LanguageTask):
    other = model_of(task, "alibi")
    with pytest.raises(InputError, match=r"encoding must be 'rope' or 'nope' .*, got 'alibi'"):
        extension(other, spec_of(task, other), task, tuned=False)
