"""The specification of a grid study as a YAML file: tasks, encodings and common settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from toeplens import encodings, tasks
from toeplens.engine import MEASURES, MIN_EXAMPLES
from toeplens.model import DecoderConfig
from toeplens.studies.kit.results import Seeds
from toeplens.training import RunSpec
from toeplens.utils import InputError, choose, invalid, to_json_types, validation_message
from toeplens.utils.errors import with_location
from toeplens.utils.records import FiniteFloat, NonNegativeInt

_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")  # YAML tags that JSON can represent
_FIELDS = {  # without those that the grid sets
    "model": set(DecoderConfig.model_fields) - {"encoding", "encoding_options"},
    "training": set(RunSpec.model_fields) - {"task", "task_options", "model", "seed", "data_seed"},
}


class _SpecPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_to_defaults(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("options", "model", "training", mode="after", check_fields=False)
    @classmethod
    def _check_fields(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for name in value:
            if info.field_name in _FIELDS:
                choose(str(info.field_name), name, _FIELDS[info.field_name])
        return to_json_types(value, str(info.field_name))


class TaskSpec(_SpecPart):
    """A row of the grid."""

    task: str = ""  # name of the task (`toeplens.tasks.names`; default: the label)
    title: str = ""  # in reports
    options: dict[str, Any] = {}  # of the task
    model: dict[str, Any] = {}  # fields of `DecoderConfig` that differ for this task
    training: dict[str, Any] = {}  # fields of `RunSpec` that differ for this task
    watch: bool = False  # whether to probe heads during training (`toeplens.engine.HeadProbe`)


class EncodingSpec(_SpecPart):
    """A column of the grid.

    A scan has one option and its values; each value is a separate column ``LABEL/VALUE``. For combined encodings,
    options are by name, and the option of a scan is written as ``rope.base``.
    """

    encoding: str = ""  # name (`toeplens.encodings.names`), or a list of names to combine (default: the label)
    title: str = ""  # in reports
    options: dict[str, Any] = {}  # of the encoding
    scan: dict[str, list[FiniteFloat]] = {}
    model: dict[str, Any] = {}  # fields of `DecoderConfig` that differ for this encoding
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # labels of its tasks (default: all)

    @field_validator("encoding", mode="before")
    @classmethod
    def _canonical_name(cls, value: Any) -> Any:
        return encodings.canonical_name(value) if isinstance(value, list) else value

    @field_validator("scan", mode="after")
    @classmethod
    def _check_scan(cls, value: dict[str, list[float]]) -> dict[str, list[float]]:
        if len(value) > 1 or any(not values or len(set(values)) < len(values) for values in value.values()):
            raise ValueError(f"scan must have one option with different values, got {value}.")
        return value


@dataclass(frozen=True)
class EncodingColumn:
    """An encoding as one column of the grid, or one value of a scan."""

    label: str  # in the study
    title: str
    encoding: str
    options: dict[str, Any]
    model: dict[str, Any]
    tasks: tuple[str, ...]
    scan: str = ""  # label of the scan; empty without a scan
    value: float | None = None  # of the scanned option; None without a scan


class GridSpec(_SpecPart):
    """A study of tasks by encodings; the fields are those of the YAML file.

    title, about  for the report
    tasks         rows, by label
    encodings     columns, by label
    model         fields of `DecoderConfig` for all models. Vocabulary, classes and maximum length default to those of
                  the task, ``attention_scale`` to 1/sqrt(d) (``published``: the scale of each encoding's paper)
    training      fields of `RunSpec` for all models: sizes of the sets, epochs, optimiser
    seeds         trained models per cell; seeds of weights, order and data are ``first_seed`` and those after it
    measures      measures of each trained model in addition to head ablation (`toeplens.engine.MEASURES`)
    examples      number of test examples for ablation and measures
    claims        a set of claims to judge on the results (default: none)
    """

    title: str = Field("Tasks by encodings", min_length=1)
    about: str = ""
    tasks: dict[str, TaskSpec] = Field(min_length=1)
    encodings: dict[str, EncodingSpec] = Field(min_length=1)
    model: dict[str, Any] = {}
    training: dict[str, Any] = {}
    seeds: Seeds = 3
    first_seed: Annotated[NonNegativeInt, Field(le=2**63)] = 42
    measures: tuple[str, ...] = ("behaviour", "frequency", "toeplitz", "extrapolation")
    examples: Annotated[NonNegativeInt, Field(ge=1, le=10**9)] = 1024
    claims: str | None = None

    @model_validator(mode="after")
    def _check_names(self) -> GridSpec:
        for name in self.measures:
            choose("measures", name, MEASURES)
            if self.measures.count(name) > 1:
                raise ValueError(f"measures must not name {name!r} twice.")
        if self.claims:
            choose("claims", self.claims, entry_points(group="toeplens.claims").names)
        for field, parts in (("tasks", self.tasks), ("encodings", self.encodings)):
            if not all(label.strip() for label in parts):
                raise ValueError(f"{field} must have names that are not empty.")
        if "representation" in self.measures and self.examples < MIN_EXAMPLES:
            raise invalid("examples", f"be at least {MIN_EXAMPLES} for the measure representation", self.examples)
        for label, part in self.tasks.items():
            choose(f"tasks.{label}", part.task or label, tasks.names())
        for label, part in self.encodings.items():
            try:
                encodings.split_names(part.encoding or label)
            except InputError as error:
                raise InputError(
                    with_location(("encodings", label), str(error).removeprefix("encoding: ").removeprefix("encoding "))
                ) from error
            for task in part.tasks or ():
                choose(f"encodings.{label}.tasks", task, self.tasks)
        counts = Counter(column.label for column in self.columns())
        duplicate = next((label for label, count in counts.items() if count > 1), None)
        if duplicate is not None:
            raise ValueError(f"encodings must have different labels, got {duplicate!r} twice.")
        return self

    def columns(self) -> Iterator[EncodingColumn]:
        """The encodings in order, scans value by value."""
        for label, part in self.encodings.items():
            name = encodings.canonical_name(part.encoding or label)
            common = {"encoding": name, "model": part.model, "tasks": part.tasks or tuple(self.tasks)}
            base_title = part.title or (label if part.encoding else name)
            if not part.scan:
                yield EncodingColumn(label, base_title, options=part.options, **common)
            for option, values in part.scan.items():
                is_short = len({f"{value:g}" for value in values}) == len(values)
                parameter = encodings.options(name).get(option)
                types = () if parameter is None else get_args(parameter.annotation) or (parameter.annotation,)
                for value in values:
                    text = f"{value:g}" if is_short else repr(value)
                    is_int = value.is_integer() and int in types and float not in types
                    setting: Any = int(value) if is_int else value
                    options = {**part.options, option: setting}
                    if " + " in name:  # options of several encodings: rope.base
                        part_name, _, key = option.partition(".")
                        previous = part.options.get(part_name, {})
                        setting = {**previous, key: setting} if key and isinstance(previous, dict) else setting
                        options = {**part.options, part_name: setting}
                    title = f"{base_title}, {option} {text}"
                    yield EncodingColumn(f"{label}/{text}", title, options=options, scan=label, value=value, **common)

    def to_yaml(self) -> str:
        """The study as YAML, with tasks and encodings in order."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=120)

    def with_text(self, files: Sequence[str]) -> GridSpec:
        """The same study on other text; raises `InputError` if no task reads text from files."""
        content = self.model_dump(mode="json")
        changed = [label for label, part in self.tasks.items() if "text" in tasks.options(part.task or label)]
        if not changed:
            raise InputError("text must be set only for a study with the task language.")
        for label in changed:
            content["tasks"][label]["options"].pop("sha256", None)
            content["tasks"][label]["options"]["text"] = list(files)
        return grid_spec(content)

    def title_of(self, task: str) -> str:
        """The title of a task."""
        return self.tasks[task].title or task


def spec_names() -> tuple[str, ...]:
    """The names of the shipped studies, including those of other packages (entry point ``toeplens.studies``)."""
    return tuple(sorted(entry_points(group="toeplens.studies").names))


def read_spec(source: Path | str) -> GridSpec:
    """A study from a YAML file, or a shipped study by name; raises `InputError`."""
    path = Path(source)
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        path = Path(entry_points(group="toeplens.studies")[choose("spec", str(source), spec_names())].load())
    try:
        return spec_from_yaml(path.read_text("utf-8"), str(path))
    except FileNotFoundError:
        raise InputError(
            f"spec: file {path} does not exist. Give a YAML file or one of {', '.join(spec_names())}."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"spec: {path} cannot be read ({error}).") from None


def spec_from_yaml(text: str, source: str = "it") -> GridSpec:
    """A study from YAML text; ``source`` names the file in error messages."""
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise InputError(f"spec: {source} is not YAML ({' '.join(str(error).split())}).") from None
    except RecursionError:
        raise InputError(f"spec: {source} is not a study: its lists and mappings are nested too deep.") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"spec: {source} is not a study ({error}).") from None
    except Exception:  # PyYAML raises various errors, such as for !!bool maybe
        raise InputError(f"spec: {source} is not a study: a tag (!!) does not fit the type of its value.") from None
    return grid_spec(content)


class _Loader(yaml.SafeLoader):
    """YAML restricted to JSON types, without duplicate keys in mappings."""

    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _TAGS
    }

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """The tag of an untagged value: dates and 1:30 (90 in YAML 1.1) are strings."""
        tag: str = super().resolve(kind, value, implicit)
        is_yaml11 = tag.endswith(":timestamp") or (tag.endswith((":int", ":float")) and ":" in value)
        return self.DEFAULT_SCALAR_TAG if is_yaml11 else tag

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            entry = (key.tag, str(key.value))
            if isinstance(key, yaml.ScalarNode) and entry in keys:
                raise ValueError(f"{key.value!r} is set twice, again in line {key.start_mark.line + 1}")
            keys.add(entry)
        return node


def grid_spec(content: Any) -> GridSpec:
    """A `GridSpec` from plain values; invalid ones raise `InputError`."""
    if not isinstance(content, dict):
        raise InputError("spec must have the fields tasks and encodings, got none.")
    try:
        return GridSpec(**content)
    except ValidationError as error:
        raise InputError(validation_message(error, GridSpec)) from None
    except TypeError as error:
        raise InputError(f"spec: {error}.") from None
