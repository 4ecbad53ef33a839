"""How a study is carried out, as options that its commands share: until when, on what machines, where runs are kept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toeplens.cli.options import Budget, Compile, Device, Workers
from toeplens.ground import InputError, choose, shown

if TYPE_CHECKING:
    from toeplens import engine as engines

_ENGINES = ("local", "ray")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Means:
    """The options as they were given."""

    time_budget: str | None
    workers: int | None
    device: str
    compile: str
    engine: str
    address: str | None
    cpus_per_cell: float | None
    gpus_per_cell: float | None
    memory_per_cell: str | None
    store: str | None

    def limits(self) -> engines.Limits:
        """When to stop, on which device, and where runs are kept."""
        from toeplens.cli.progress import limits_of

        return limits_of(self.time_budget, self.device, self.compile, self.store)

    def hands(self) -> engines.Workers:
        """Processes on this machine, or a cluster."""
        from toeplens.engine import Cluster

        of_ray = ("address", "cpus_per_cell", "gpus_per_cell", "memory_per_cell")
        if choose("engine", self.engine, _ENGINES) == "local":
            for name in of_ray:
                if (given := getattr(self, name)) is not None:
                    raise InputError(f"{name}: {shown(given)} was given, which only --engine ray takes.")
            return self.workers
        return Cluster(
            address=self.address,
            cpus=1.0 if self.cpus_per_cell is None else self.cpus_per_cell,
            gpus=self.gpus_per_cell or 0.0,
            memory=_bytes(self.memory_per_cell),
            at_once=self.workers,
        )


def _means(
    time_budget: Budget = None,
    workers: Workers = None,
    device: Device = "auto",
    compile: Compile = "auto",
    engine: Annotated[str, typer.Option(help="local (processes on this machine) or ray (machines of a cluster).")] = (
        "local"
    ),
    address: Annotated[
        str | None,
        typer.Option(help="With ray: HOST:PORT of the cluster's head, or auto; without it Ray starts on this machine."),
    ] = None,
    cpus_per_cell: Annotated[float | None, typer.Option(help="With ray: cores of a model, 1 unless given.")] = None,
    gpus_per_cell: Annotated[float | None, typer.Option(help="With ray: GPUs of a model; 0.25: four on each.")] = None,
    memory_per_cell: Annotated[str | None, typer.Option(help="With ray: memory a model reserves, e.g. 4G.")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Keep runs at this URL too (a path, s3://, gs://), which other machines may share."),
    ] = None,
) -> Means:
    return Means(**locals())


def with_means(command: Callable[..., None]) -> Callable[..., None]:
    """The command, its parameter ``means`` given by these options."""
    options = inspect.signature(_means, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        parameters += options.values() if name == "means" else [parameter]

    @wraps(command)
    def given(**values: Any) -> None:
        command(**{name: values[name] for name in values.keys() - options.keys()}, means=_of(values))

    def _of(values: dict[str, Any]) -> Means:
        return _means(**{name: values[name] for name in options})

    given.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    given.__annotations__ = {each.name: each.annotation for each in parameters}
    return given


def _bytes(text: str | None) -> int | None:
    """``500M``, ``4G`` or plain bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"memory_per_cell: {text!r} was given; it must be a positive size such as 500M or 4G.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
