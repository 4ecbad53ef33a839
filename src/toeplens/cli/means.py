"""Options that say how work is run: time budget, device, workers or cluster, output URL."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

from toeplens.cli.options import (
    CLUSTER,
    MACHINE,
    MEASURE,
    TRAINING,
    Budget,
    Compile,
    Device,
    Follow,
    ModelDevice,
    ModelDtype,
    Pickled,
    Workers,
    option,
)
from toeplens.ground import choose, invalid

if TYPE_CHECKING:
    from toeplens import engine as engines

_ENGINES = ("local", "ray")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Means:
    """Time budget, device, compilation, batched training, loggers, workers and output URL."""

    time_budget: Budget = None
    device: Device = "auto"
    compile: Compile = "auto"
    stack: Annotated[
        int | None, option("Models trained as one batch (default: auto).", panel=TRAINING, metavar="N")
    ] = None
    follow: Follow = None
    hands: Hands | None = None
    publish: str | None = None

    def limits(self) -> engines.Limits:
        """As the limits that the engine takes."""
        from toeplens.cli.progress import limits_of
        from toeplens.engine import Cluster

        limits = limits_of(self.time_budget, self.device, self.compile, self.stack, self.follow)
        chosen = None if self.hands is None else self.hands.chosen()
        machines = chosen.described(self.device) if isinstance(chosen, Cluster) else None
        return replace(limits, machines=machines, publish=self.publish)


@dataclass(frozen=True, kw_only=True)
class Hands:
    """Processes on this machine, or a cluster."""

    workers: Workers = None
    engine: Annotated[str, option("local or ray (a cluster) (default: local).", panel=MACHINE, metavar="NAME")] = (
        "local"
    )
    address: Annotated[
        str | None, option("Head node HOST:PORT, or auto (default: start Ray).", panel=CLUSTER, metavar="NODE")
    ] = None
    cpus_per_cell: Annotated[float | None, option("Cores per model (default: 1).", panel=CLUSTER, metavar="N")] = None
    gpus_per_cell: Annotated[
        float | None, option("GPUs per model; may be 0.25 (default: 0).", panel=CLUSTER, metavar="N")
    ] = None
    memory_per_cell: Annotated[
        str | None, option("Memory per model, e.g. 4G (default: none).", panel=CLUSTER, metavar="SIZE")
    ] = None

    def must_be_of_many(self, what: str) -> None:
        """Refuse these options for a single ``what``, which cannot be distributed."""
        given = {"workers": self.workers, "engine": None if self.engine == _ENGINES[0] else self.engine}
        for name, value in given.items():
            if value is not None:
                raise invalid(name, f"not be set for a single {what}", value)

    def chosen(self) -> engines.Workers:
        """As the workers that the engine takes."""
        from toeplens.engine import Cluster

        if choose("engine", self.engine, _ENGINES) == "local":
            for name in ("address", "cpus_per_cell", "gpus_per_cell", "memory_per_cell"):
                if (given := getattr(self, name)) is not None:
                    raise invalid(name, "not be set without --engine ray", given)
            return self.workers
        memory = None
        if (text := self.memory_per_cell) is not None:
            match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
            if match is None or float(match[1]) <= 0:
                raise invalid("memory_per_cell", "be a positive size such as 500M or 4G", text)
            memory = int(float(match[1]) * _UNITS[match[2].upper()])
        return Cluster(
            address=self.address,
            cpus=1.0 if self.cpus_per_cell is None else self.cpus_per_cell,
            gpus=self.gpus_per_cell or 0.0,
            memory=memory,
            at_once=self.workers,
        )


_OF_MODELS = {"dtype": ModelDtype, "device": ModelDevice, "pickled": Pickled}


def _parameters(group: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass that are options: annotated ones, and those of `toeplens.studies.kit.options`."""
    found, hints = [], get_type_hints(group, include_extras=True)
    for each in fields(group):
        about, hint = each.metadata, hints[each.name]
        if "help" in about:
            flags = [about["flag"]] if "flag" in about else []
            shown = option(about["help"], *flags, panel=MEASURE, metavar=about["metavar"])
            hint = Annotated[about.get("typed", hint), shown]
        elif get_origin(hint) is not Annotated:
            hint = _OF_MODELS.get(each.name)
        if hint is not None:
            default = None if each.default == () else each.default
            found.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a dataclass of options expanded to them.

    If ``out`` is a URL, the command works in a local copy, which is published when it ends.
    """
    parameters: list[inspect.Parameter] = []
    made: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            options = _parameters(parameter.annotation)
            parameters += options
            made[name] = parameter.annotation, [each.name for each in options]
        else:
            parameters.append(parameter)

    @wraps(command)
    def given(**values: Any) -> None:
        for name, (group, options) in made.items():
            values[name] = group(**{option: values.pop(option) for option in options})
        if "means" in made and "hands" in made:
            values["means"] = replace(values["means"], hands=values["hands"])
        if not isinstance(url := values.get("out"), str):
            command(**values)
            return
        from toeplens.engine import working_copy

        with working_copy(url) as directory:
            command(**{**values, "out": directory, "means": replace(values["means"], publish=url)})

    given.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    given.__annotations__ = {each.name: each.annotation for each in parameters}
    return given
