"""Longer contexts after training: each method against another way of doing the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.language.conftest import LENGTH, model_of

from toeplens.engine.language import Extension, extension
from toeplens.engine.language.extension import FACTORS, RATE, SHARE, TARGET, TUNED, _tune
from toeplens.engine.language.texts import cut
from toeplens.ground import InputError
from toeplens.model import Decoder
from toeplens.tasks.language import LanguageTask
from toeplens.training import RunSpec, run_spec


def spec_of(task: LanguageTask, model: Decoder) -> RunSpec:
    options = {"words": 40, "documents": 60, "document": 16 * LENGTH + 40, "length": LENGTH}
    return run_spec(
        task="markov-language",
        task_options=options,
        model=model.config,
        train_examples=200,
        test_examples=16,
        epochs=1,
        batch_size=8,
        lr=1e-2,
    )


@pytest.fixture(scope="module")
def model(task: LanguageTask) -> Decoder:
    return model_of(task)


@pytest.fixture(scope="module")
def found(task: LanguageTask, model: Decoder) -> Extension:
    return extension(model, spec_of(task, model), task, tuned=False)


def _end(model: Decoder, tokens: np.ndarray, divided: float = 1.0) -> float:
    """Nats a token of the last half training length, with positions divided."""
    given = torch.from_numpy(tokens)
    places = torch.arange(given.shape[1] - 1, dtype=torch.float64) / divided
    with torch.no_grad():
        chances = model(given[:, :-1], positions=places).double().log_softmax(-1)
    losses = -chances.gather(-1, given[:, 1:, None]).squeeze(-1)
    return float(losses[:, -LENGTH // 2 :].mean())


def _row(found: Extension, method: str, factor: float) -> float:
    row = next(row for row in found.rows if (row.method, row.factor) == (method, factor))
    assert row.bits is not None, row.why
    return row.bits.value


def test_every_method_is_tried_at_every_length(found: Extension):
    methods = [row.method for row in found.rows]
    assert set(methods) >= {"none", "interpolation", "ntk", "dynamic", "yarn", "longrope", "p-rope", "rerope"}
    assert all(methods.count(method) == len(FACTORS) for method in set(methods))
    assert all(row.bits is not None for row in found.rows)
    assert found.steps == 0
    assert Extension.from_dict(found.to_dict(), "here").to_dict() == found.to_dict()


def test_interpolation_divides_positions(task: LanguageTask, model: Decoder, found: Extension):
    texts = cut(task.corpus(), "test", LENGTH * FACTORS[-1], 24, seed=0).tokens
    scale = _row(found, "none", 1.0) / _end(model, texts[:, -LENGTH - 1 :])
    for factor in FACTORS:
        tokens = texts[:, -LENGTH * factor - 1 :]
        assert _row(found, "none", factor) == pytest.approx(scale * _end(model, tokens), rel=1e-5)
        divided = _end(model, tokens, divided=float(TARGET))
        assert _row(found, "interpolation", factor) == pytest.approx(scale * divided, rel=1e-5)


def test_what_changes_nothing_within_the_training_length_does_not(found: Extension):
    for method in ("dynamic", "longrope"):
        assert _row(found, method, 1.0) == pytest.approx(
            _row(found, "none", 1.0), rel=0.02 if method == "longrope" else 1e-5
        )


def test_dropping_is_a_model_without_an_encoding(task: LanguageTask, model: Decoder, found: Extension):
    bare = model_of(task, "nope")
    bare.load_state_dict(model.state_dict(), strict=False)
    texts = cut(task.corpus(), "test", LENGTH * FACTORS[-1], 24, seed=0).tokens
    scale = _row(found, "none", 1.0) / _end(model, texts[:, -LENGTH - 1 :])
    assert _row(found, "dropped", 4.0) == pytest.approx(scale * _end(bare, texts[:, -4 * LENGTH - 1 :]), rel=1e-5)


def test_gains_are_against_the_model_as_it_is(found: Extension):
    for row in found.rows:
        assert row.gain is not None
        assert row.bits is not None
        assert row.gain.value == pytest.approx(row.bits.value - _row(found, "none", row.factor), abs=1e-9)
    told = {row.set for row in found.rows if row.method == "longrope"}
    (words,) = told
    factors = [float(part) for part in words.removeprefix("factors ").split(", ")]
    assert factors == sorted(factors)
    assert 1 <= factors[0] <= factors[-1] <= 1.25 * TARGET


def test_tuning_leaves_the_model_and_the_random_state_alone(task: LanguageTask):
    model = model_of(task)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    spec = spec_of(task, model)
    tuned = extension(model, spec, task, tuned=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tuned.steps == max(1, round(SHARE * spec.total_steps))
    assert {row.method for row in tuned.rows} == set(TUNED)
    assert all(row.gain is not None and row.gain.value != 0 for row in tuned.rows)
    assert extension(model, spec, task, tuned=True).to_dict() == tuned.to_dict()


def test_tuning_is_adamw_on_windows_of_the_target_length(task: LanguageTask):
    """The first step from a model, against torch's own optimiser on the same windows."""
    model = model_of(task)
    spec = spec_of(task, model)
    tuned = model_of(task)
    _tune(tuned, spec, task, LENGTH * TARGET, 1, 0)
    data = task.at_length(LENGTH * TARGET).dataset("train", spec.batch_size // TARGET, 0)
    by_hand = model_of(task)
    optimizer = torch.optim.AdamW(
        by_hand.parameters(), lr=RATE * spec.lr, betas=spec.betas, weight_decay=spec.weight_decay
    )
    logits = by_hand(torch.from_numpy(data.tokens))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(data.labels).flatten()).backward()
    optimizer.step()
    for name, tensor in tuned.state_dict().items():
        torch.testing.assert_close(tensor, by_hand.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_nope_has_its_logits_scaled_and_others_have_no_way(task: LanguageTask):
    bare = model_of(task, "nope")
    found = extension(bare, spec_of(task, bare), task, tuned=False)
    assert {row.method for row in found.rows} == {"none", "scaled"}
    assert {row.set for row in found.rows if row.method == "scaled"}.pop().startswith("factor ")
    other = model_of(task, "alibi")
    with pytest.raises(InputError, match="'alibi' was given; there are ways to extend 'rope' and 'nope'"):
        extension(other, spec_of(task, other), task, tuned=False)
