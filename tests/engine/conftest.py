"""A real Ray cluster on this machine, for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from toeplens.engine import ClusterOptions


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Three machines of one core, on this one."""
    import ray
    from ray.cluster_utils import Cluster as Machines

    ray.shutdown()  # of another test
    machines = Machines(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture
def three(machines: Any) -> ClusterOptions:
    return ClusterOptions(engine="ray", address=machines.address)
