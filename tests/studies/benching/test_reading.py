"""The audit beside hooks written by hand: the same numbers of every head, or the contest says that they are not."""

from __future__ import annotations

import pytest
import torch

from toeplens.ground import EnvironmentFailure
from toeplens.studies import audit
from toeplens.studies.benching import reading

CPU = torch.device("cpu")


def small() -> reading.Contest:
    return reading.audits(audit, CPU, 3, 0.0, sequences=2, tokens=16)


def test_audit_patterns_and_hooks_find_the_same_numbers():
    contest = small()
    assert [(each.name, each.ours, each.work) for each in contest.timed] == [
        ("toeplens", True, "asked"),
        ("toeplens, proof and patterns alone", True, "equal"),
        ("hooks written by hand", False, "asked"),
    ]
    assert contest.apart is not None
    assert contest.apart < 1e-4
    assert contest.count == 32


def test_hooks_read_weights_that_are_the_models_own():
    model, ids = reading.random_llama(CPU), reading._texts(CPU, 2, 16)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(ids, output_attentions=True).attentions
    found = reading.read_by_hooks(model, ids)
    assert set(found) == set(reading.READ)
    for layer, weights in enumerate(own):
        for name, numbers in reading._read(weights, ids).items():
            torch.testing.assert_close(torch.from_numpy(found[name][layer]), numbers, rtol=1e-4, atol=1e-5)


def test_patterns_of_attention_that_is_known():
    """Of one text: each query gives all to the token before it, the first to itself."""
    weights = torch.zeros(1, 1, 4, 4)
    weights[0, 0, 0, 0] = 1
    weights[0, 0, 1:, :-1] = torch.eye(3)
    found = reading._read(weights, torch.tensor([[5, 6, 5, 6]]))
    told = {name: float(value) for name, value in found.items()}
    # queries 2 and 3 see a key after a copy of their own: 1 and 2; query 2 looks at 1, query 3 at 2
    assert told == pytest.approx(
        {"previous": 1, "current": 0.25, "first": 1 / 3, "induction": 1, "entropy": 0, "distance": 0.75}
    )


def test_the_hooks_are_taken_off_again():
    model = reading.random_llama(CPU)
    reading.read_by_hooks(model, reading._texts(CPU, 1, 8))
    assert not any(module._forward_hooks for module in model.modules())


def test_numbers_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "_THETA", 100.0)
    with pytest.raises(EnvironmentFailure, match=r"audit: its numbers and those read by hand differ by .*; at most"):
        small()
