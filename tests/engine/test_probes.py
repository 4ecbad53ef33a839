"""What a Ray cluster is asked before it is given work, and what is refused in one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from toeplens.engine import Cluster, Limits, must_have, nodes
from toeplens.engine.probes import Token, on_show
from toeplens.ground import InputError
from toeplens.version import __version__

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"address": "there"}, "address: 'there' was given; it must be HOST:PORT"),
        ({"address": "ray://localhost:10001"}, "address: 'ray://localhost:10001' was given; it must be HOST:PORT"),
        ({"address": "localhost:1"}, "address: 'localhost:1' was given; nothing answers there"),
    ],
)
def test_an_address_that_does_not_answer_is_named(given: dict[str, Any], says: str):
    ray.shutdown()
    with pytest.raises(InputError, match=says):
        Cluster(**given).must_serve("cpu")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cpus": 0.0}, "cpus_per_cell: 0.0 was given; it must be over 0"),
        ({"gpus": 1.5}, "gpus_per_cell: 1.5 was given; it must be 0 or more, and a whole number"),
        ({"gpus": float("nan")}, "gpus_per_cell: nan was given"),
        ({"memory": 0}, "memory_per_cell: 0 was given; it must be at least 1 byte"),
        ({"at_once": 0}, "workers: 0 was given; it must be at least 1"),
    ],
)
def test_needs_that_cannot_be_are_named(given: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        Cluster(**given)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("given", "device", "says"),
    [
        ({"gpus": 0.25}, "auto", "gpus_per_cell: 0.25 was given; the largest machine of the cluster has 0 GPUs"),
        ({"cpus": 2.0}, "auto", "cpus_per_cell: 2 was given; the largest machine of the cluster has 1 cores"),
        ({"memory": 10**15}, "auto", "memory_per_cell: 1000 TB was given; the largest machine"),
        ({}, "cuda", "gpus_per_cell: 0 was given with device cuda"),
    ],
)
def test_more_than_the_cluster_has_is_refused(machines: Any, given: dict[str, Any], device: str, says: str):
    with pytest.raises(InputError, match=says):
        Cluster(machines.address, **given).must_serve(device)


@contextmanager
def another(machines: Any, first: Path) -> Iterator[None]:
    """One more machine, whose Python looks into this directory first."""
    odd = machines.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(first)})
    machines.wait_for_nodes()
    try:
        yield
    finally:
        machines.remove_node(odd)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("content", "version", "says"),
    [
        ("raise ModuleNotFoundError('no toeplens here')", "0.0", r"cannot load toeplens \(ModuleNotFoundError"),
        ("", "0.0", r"has toeplens 0\.0; this one has"),
        ("", __version__, "has toeplens .* of another source; install the same on both"),
    ],
)
def test_a_machine_without_the_package_or_with_another_is_named(
    machines: Any, three: Cluster, tmp_path: Path, content: str, version: str, says: str
):
    package = tmp_path / "toeplens"
    package.mkdir()
    (package / "__init__.py").write_text(content, encoding="utf-8")
    (package / "version.py").write_text(f"__version__ = {version!r}", encoding="utf-8")
    with another(machines, tmp_path), pytest.raises(InputError, match=f"the cluster's machine .*{says}"):
        three.must_serve("auto")


@pytest.mark.heavy
def test_a_machine_with_another_torch_or_transformers_is_named(machines: Any, three: Cluster, tmp_path: Path):
    def installed(name: str, version: str) -> None:
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")

    installed("transformers", "0.1")
    with another(machines, tmp_path):
        with pytest.raises(InputError, match=r"the cluster's machine .* has transformers 0\.1; this one has \d"):
            three.must_serve("auto")
        three.must_serve("auto", packages=("torch",))  # a study takes none of its models
        installed("torch", "0.2")
        with pytest.raises(InputError, match=r"the cluster's machine .* has torch 0\.2; this one has \d"):
            three.must_serve("auto", packages=("torch",))


@pytest.mark.heavy
def test_what_a_machine_does_not_see_is_named(three: Cluster, tmp_path: Path):
    with on_show(None, tmp_path / "out") as beside, on_show(str(tmp_path / "store"), tmp_path / "out") as kept:
        three.must_serve("auto", beside)
        three.must_serve("auto", kept)
    assert not list(tmp_path.rglob("*.seen"))
    with pytest.raises(InputError, match=r"^out: the cluster's machine .* does not see what lies in .*/none; give a"):
        three.must_serve("auto", Token("out", str(tmp_path / "none"), "x"))
    with (
        on_show("memory://somewhere", tmp_path) as own,
        pytest.raises(
            InputError, match=r"^store: the cluster's machine .* does not see what lies in memory://somewhere"
        ),
    ):
        three.must_serve("auto", own)


def test_a_store_that_one_process_alone_sees_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"^store: memory://x was given, which only one process sees"):
        must_have(1, 1, Limits(store="memory://x"), tmp_path / "out")


def test_a_path_is_the_same_place_wherever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert Limits(store="runs/../store").store == Limits(store="file://store").store == str(tmp_path / "store")
    assert Limits(store="s3://bucket/store/").store == "s3://bucket/store"


@pytest.mark.parametrize(
    ("given", "device", "told"),
    [
        ({"gpus": 0.25}, "auto", "cuda"),
        ({"gpus": 0.25}, "cpu", "cpu"),
        ({}, "auto", "cpu"),
    ],
)
def test_a_device_is_the_workers_and_not_this_machines(given: dict[str, Any], device: str, told: str):
    assert Cluster(**given).device(device) == told


@pytest.mark.parametrize("device", ["gpu", "cuda:1"])
def test_a_device_that_a_worker_cannot_have_is_refused(device: str):
    with pytest.raises(InputError, match=f"device: '{device}' was given; with a cluster it must be auto, cpu or cuda"):
        Cluster(gpus=1.0).must_serve(device)


@pytest.mark.heavy
def test_as_many_at_a_time_as_there_is_room_for(machines: Any, three: Cluster):
    assert three.at_a_time() == 3
    assert Cluster(machines.address, at_once=2).at_a_time() == 2


def test_what_answers_and_is_not_ray_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    ray.shutdown()
    monkeypatch.setattr(nodes, "_JOINED", 2)
    command = (sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split(" port ")[1].split()[0]
        with pytest.raises(InputError, match=r"Ray does not answer there \(nothing that it knows for 2 seconds"):
            Cluster(f"127.0.0.1:{port}").must_serve("cpu")
        server.kill()
    assert capfd.readouterr() == ("", "")


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Exception, match="engine: ray is not installed"):
        nodes.Cluster().join()
