"""What a piece may need of a cluster's machine, and what is refused before any is asked."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from toeplens.engine import Cluster
from toeplens.ground import InputError


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cpus": 0.0}, "^cpus_per_cell must be over 0, and a whole number if .*, got 0.0"),
        ({"gpus": 1.5}, "^gpus_per_cell must be 0 or more, and a whole number if .*, got 1.5"),
        ({"memory": 0}, "^memory_per_cell must be at least 1 byte, got 0"),
        ({"at_once": 0}, "^workers must be at least 1, got 0"),
    ],
)
def test_needs_that_cannot_be_are_named(given: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        Cluster(**given)


@pytest.mark.parametrize(
    ("gpus", "asked", "told"), [(0.25, "auto", "cuda"), (0.25, "cpu", "cpu"), (0.0, "auto", "cpu")]
)
def test_a_device_is_the_workers_and_not_this_machines(gpus: float, asked: str, told: str):
    assert Cluster(gpus=gpus).device(asked) == told


@pytest.mark.parametrize(
    ("given", "device", "says"),
    [
        ({"gpus": 1.0}, "cuda:1", "^device must be auto, cpu or cuda with a cluster, got 'cuda:1'"),
        ({}, "cuda", "^gpus_per_cell must be over 0 with device cuda, got 0"),
    ],
)
def test_a_device_that_a_worker_cannot_have_is_refused(given: dict[str, Any], device: str, says: str):
    with pytest.raises(InputError, match=says):
        Cluster(**given).must_serve(device)


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
        Cluster(address).must_serve("cpu")


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Exception, match="engine: ray is not installed"):
        Cluster().join()
