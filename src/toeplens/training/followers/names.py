"""Followers by name: what a command line says, and what processes and machines are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from toeplens.ground import EnvironmentFailure
from toeplens.ground.errors import first_line
from toeplens.training.followers.behind import in_time
from toeplens.training.followers.mlflow import MLflow, make_ready
from toeplens.training.followers.protocol import Follower
from toeplens.training.followers.telling import LOG
from toeplens.training.followers.tensorboard import TensorBoard
from toeplens.training.followers.wandb import WandB

FOLLOWERS: dict[str, Callable[[str | None, str | None], Follower]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}  # by the name of their package, and of the extra that brings it
_READY: dict[str, Callable[[str | None], None]] = {"mlflow": make_ready}
_PATIENCE = 20.0  # seconds


def followers_named(names: Sequence[str], label: str | None = None, group: str | None = None) -> list[Follower]:
    """New followers for one run, which people call ``label``, of the study ``group``."""
    return [FOLLOWERS[name](label, group) for name in names]


def must_be_installed(names: Sequence[str]) -> None:
    """Raise an `EnvironmentFailure` that says how to get the package of a follower that is not here."""
    for name in names:
        if find_spec(name) is None:
            raise EnvironmentFailure(f"follow: {name} is not installed; pip install 'toeplens[{name}]'.")


def made_ready(names: Sequence[str], group: str | None) -> tuple[str, ...]:
    """Do what is to be done once before several processes follow; gives those that could be made ready.

    The others are said, and left out: no run has to find out again.
    """
    able = []
    for name in names:
        try:
            if name in _READY:
                in_time(lambda make=_READY[name]: make(group), _PATIENCE)
            able.append(name)
        except Exception as error:
            reason = first_line(error)
            LOG.warning("%s follows no run: %s.", name, reason)
    return tuple(able)
