"""The running mean of the weights, against one kept by hand; what is tested and kept is that model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import tiny

from toeplens.model import Decoder
from toeplens.training import RunSpec, initial_model, train
from toeplens.training.loop import EMA, Session


def spec(**fields: Any) -> RunSpec:
    return tiny(**{"epochs": 3, "train_examples": 48, "lr": 3e-3, "average": 0.8, "schedule": "constant"} | fields)


def steps(model: Decoder) -> list[dict[str, torch.Tensor]]:
    """Made-up weights after each of some steps."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()} for _ in range(60)
    ]


@pytest.mark.parametrize("decay", [0.2, 0.9, 0.998])
def test_the_ema_matches_the_recursion(decay: float) -> None:
    model = initial_model(spec())
    average = EMA(model, decay)
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for step, weights in enumerate(steps(model), start=1):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        average.update(model, step)
        keep = min(decay, (1 + step) / (10 + step))
        expected = {name: keep * mean + (1 - keep) * weights[name].double() for name, mean in expected.items()}
    for name, parameter in average.model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_ema_weights_are_evaluated_and_saved_and_training_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    original = Session.finish

    def kept(session: Session, status: Any) -> None:
        sessions.append(session)
        original(session, status)

    monkeypatch.setattr(Session, "finish", kept)
    run, plain = train(spec(), tmp_path), train(spec(average=None), tmp_path)
    with_it, without = sessions
    for own, other in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(own, other)
    assert with_it.ema is not None
    for saved, mean in zip(run.model().parameters(), with_it.ema.model.parameters(), strict=True):
        assert torch.equal(saved, mean)
    assert [row["train_loss"] for row in run.metrics] == [row["train_loss"] for row in plain.metrics]
    assert [row["test_loss"] for row in run.metrics] != [row["test_loss"] for row in plain.metrics]
