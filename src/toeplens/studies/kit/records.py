"""What the files of a study's directory may hold, stated field by field (see `toeplens.ground.reading`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from toeplens.ground.machine import MOST_SEEDS
from toeplens.ground.reading import Count, Number, Positive, Share, Text, Truth
from toeplens.model import Protocol

Seeds = Annotated[int, Field(strict=True, ge=1, le=MOST_SEEDS)]
Environment = dict[Text, Text | Number | Truth | None]  # versions, machine and command


class Reproduced(BaseModel):
    """study.json of a reproduction; earlier versions had no parts, and did not say that it is one."""

    study: Literal["reproduce"] = "reproduce"
    scale: Text
    protocols: Annotated[list[Protocol], Field(min_length=1)]
    seeds: Seeds
    parts: list[Text] = []
    environment: Environment
    seconds: Positive


class Gridded(BaseModel):
    """study.json of a grid study."""

    study: Literal["grid"]
    spec: Text
    environment: Environment
    seconds: Positive


class Theorised(BaseModel):
    """study.json of the study of the mathematics."""

    study: Literal["theory"]
    scale: Text
    seeds: Seeds
    environment: Environment


KINDS: dict[str, type[BaseModel]] = {"reproduce": Reproduced, "grid": Gridded, "theory": Theorised}


class Executed(BaseModel):
    """environment.json of a run, as far as a study tells it; its history is `toeplens.training.history`'s."""

    execution: Text | None = None


class _Key(BaseModel):
    protocol: Protocol
    task: Text
    label: Text
    seed: Count


class _Epoch(BaseModel):
    train_accuracy: Share | None
    test_accuracy: Share | None


class _Result(BaseModel):
    test_accuracy: Share | None
    seconds: Positive


class Finished(BaseModel):
    """A cell of results.json; its ablation and its measures are stated where they are read.

    Earlier versions had no measures, and watched nothing.
    """

    key: _Key
    run: Text
    status: Literal["complete", "diverged"]
    chance: Share
    length_chance: Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
    parameters: Count
    epochs: list[_Epoch]
    result: _Result
    ablation: dict[str, Any] | None
    measures: dict[Text, dict[str, Any]] = {}
    watched: list[dict[str, Any]] = []
