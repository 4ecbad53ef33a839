"""The cells of a grid study, as runs."""

from __future__ import annotations

from toeplens import tasks
from toeplens.engine import Job
from toeplens.ground import InputError
from toeplens.model import decoder_config
from toeplens.studies.grid.spec import Column, GridSpec
from toeplens.studies.kit.cells import Cell
from toeplens.studies.kit.results import Key
from toeplens.training import run_spec

_MOST = 10_000  # models: listing and reading more would take minutes


def cells(spec: GridSpec) -> list[Cell]:
    """All cells: seed by seed, task by task, encoding by encoding; more than a study may have raise `InputError`."""
    columns = list(spec.columns())
    models = spec.seeds * sum(task in column.tasks for task in spec.tasks for column in columns)
    if models > _MOST:
        raise InputError(f"tasks by encodings: these are {models:,} models; a study may have at most {_MOST:,}.")
    return [
        _cell(spec, task, column, seed)
        for seed in range(spec.first_seed, spec.first_seed + spec.seeds)
        for task in spec.tasks
        for column in columns
        if task in column.tasks
    ]


def _cell(spec: GridSpec, label: str, column: Column, seed: int) -> Cell:
    part = spec.tasks[label]
    try:
        task = tasks.build(part.task or label, **part.options)
        sizes = {"vocab_size": task.vocab_size, "num_classes": max(task.labels) + 1, "max_len": task.length}
        common = {**sizes, "attention_scale": None}  # one for all encodings, see docs/decisions/015
        fields = {**common, **spec.model, **part.model, **column.model}
        model = decoder_config(**fields, encoding=column.encoding, encoding_options=column.options)
        training = {"seed": seed, "data_seed": seed, **spec.training, **part.training}
        run = run_spec(task=part.task or label, task_options=part.options, model=model, **training)
    except InputError as error:
        raise InputError(f"{column.label} on {label}: {error}") from None
    name = f"{spec.title_of(label)} · {column.title} · seed {seed}"
    return Cell(
        Key(model.protocol, label, column.label, seed),
        Job(run, name, spec.examples, "test", spec.measures, part.watch),
    )
