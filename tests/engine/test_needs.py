"""What of a cluster is refused before any piece is asked of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from toeplens.engine import ClusterOptions, must_serve
from toeplens.engine.pool import join
from toeplens.ground import EnvironmentFailure, InputError


@pytest.mark.parametrize(
    ("given", "device", "says"),
    [
        ({"gpus_per_cell": 1.0}, "cuda:1", "^device must be auto, cpu or cuda with a cluster, got 'cuda:1'"),
        ({}, "cuda", "^gpus_per_cell must be over 0 with device cuda, got 0"),
    ],
)
def test_a_device_that_a_worker_cannot_have_is_refused(given: dict[str, Any], device: str, says: str):
    with pytest.raises(InputError, match=says):
        must_serve(ClusterOptions(engine="ray", **given), device)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("there", "^address must be HOST:PORT of the cluster's head, or auto, got 'there'"),
        ("ray://localhost:10001", "^address must be HOST:PORT"),
        ("localhost:1", "address: nothing answers at 'localhost:1'"),
    ],
)
def test_an_address_that_does_not_answer_is_named(address: str, says: str):
    pytest.importorskip("ray").shutdown()
    with pytest.raises(InputError, match=says):
        must_serve(ClusterOptions(engine="ray", address=address), "cpu")


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFailure, match="engine: ray is not installed"):
        join(ClusterOptions(engine="ray"))
