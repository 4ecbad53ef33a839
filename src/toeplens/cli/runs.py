"""Commands on one run: train, ablate heads, decompose logits, test on longer sequences."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from toeplens.cli.options import Device, Json, RunDirectory, apply_changes, argument, option, with_options
from toeplens.utils import InputError, choose, invalid, read_json
from toeplens.utils.execution import ClusterOptions, ExecutionOptions
from toeplens.utils.options import TRAINING, check_range
from toeplens.utils.outputs import check_output_file


@with_options("time_budget", "device", "compile", "follow")
def train_run(
    out: Path = option(..., "Parent directory; each run gets its own folder in it.", "PATH"),
    spec: Path | None = argument(None, "A run's spec as JSON (a run's spec.json).", is_path=True),
    encoding: str | None = option(None, "Encoding or sum of several, e.g. rope+alibi (default: rope).", "NAME"),
    protocol: str | None = option(None, "paper or released (default: paper).", "NAME"),
    task: str | None = option(None, "Task (default: trigger-distance).", "NAME"),
    scale: str | None = option(None, "smoke, laptop, desk, full or paper (default: laptop).", "NAME"),
    seed: int | None = option(None, "Seed of weights, order, dropout and data (default: 42).", "N"),
    set_: list[str] | None = option(
        None, "Change a field, e.g. model.d_model=32. Repeatable.", "FIELD=VALUE", flag="--set"
    ),
    watch: bool = option(False, "Record head statistics during training.", panel=TRAINING, flag="--watch/--no-watch"),
    *,
    execution: ExecutionOptions,
    as_json: Json = False,
) -> None:
    """Train one model, or resume an interrupted run."""
    from toeplens.cli import console
    from toeplens.cli.progress import ProgressBars, interruptible, opening_line
    from toeplens.training import describe_history, train
    from toeplens.training.loggers import build_loggers, must_be_installed
    from toeplens.training.run import PROBES

    arguments = {"scale": scale, "protocol": protocol, "task": task, "encoding": encoding, "seed": seed}
    run_spec = _load_spec(spec, {name: value for name, value in arguments.items() if value is not None}, set_ or [])
    must_be_installed(execution.follow)
    about = f"{run_spec.task}, {run_spec.model.encoding}, {run_spec.model.protocol} protocol"
    progress, probe = ProgressBars(opening_line(about, [run_spec], execution, ClusterOptions()), lines=False), None

    def on_progress(step: int, total: int, row: dict[str, Any] | None) -> None:
        accuracy = None if row is None else row["test_accuracy"]  # None where no example counted
        progress(run_spec.name, step, total, "" if accuracy is None else f"  test accuracy {accuracy:.3f}")

    if watch:
        from toeplens.engine import HeadProbe

        probe = HeadProbe(run_spec)
    with interruptible(execution) as execution:
        with progress:
            loggers = build_loggers(execution.follow)
            run = train(run_spec, out, execution, probe=probe, loggers=loggers, on_progress=on_progress)
        if run.status == "complete":
            run.model()  # fails if the weights were deleted or truncated since
        if as_json:
            about_run = {"directory": str(run.directory), "status": run.status, **run.result}
            history = [segment.to_dict() for segment in run.history]
            console.print_json({**about_run, "metrics": run.metrics, "probe_rows": run.probe_rows, "history": history})
            return
        accuracy = run.result.get("test_accuracy")  # None where no example counted
        accuracy_text = "" if accuracy is None else f", test accuracy {accuracy:.4f} (chance {run_spec.chance:.4f})"
        console.echo(f"{run.status}{accuracy_text}\nrun: {run.directory}")
        if len(run.history) > 1:
            history = describe_history(run.history)
            console.echo(f"resumed on different hardware or software ({history}); results may not be bit-identical")
        if run.probe_rows:
            console.echo(f"head statistics: {len(run.probe_rows)} checkpoints, in {run.directory / PROBES}")
        elif watch and run.result:
            console.echo("no head statistics: this run was already finished")


def _load_spec(file: Path | None, arguments: dict[str, Any], changes: list[str]) -> Any:
    """The run's spec: of a file or of a preset with these ``arguments``; with ``changes``."""
    from toeplens.model import without_published_scale
    from toeplens.training import run_spec, starting_spec

    if file is not None and arguments:
        raise InputError(f"{next(iter(arguments))} must not be set with {file}. Use --set.")
    if file is None:
        defaults = {"scale": "laptop", "protocol": "paper", "task": "trigger-distance", "encoding": "rope", "seed": 42}
        content = starting_spec(**defaults | arguments)
    elif not file.exists() or file.is_dir():
        problem = f"{file} is a directory" if file.is_dir() else f"file {file} does not exist"
        raise InputError(f"spec must be a JSON file with a run's spec, but {problem}.")
    elif not isinstance(content := read_json(file), dict):
        raise InputError(f"spec: {file} is not a run's spec.")
    if changes and isinstance(content.get("model"), dict):
        content = {**content, "model": without_published_scale(content["model"])}
    return run_spec(**apply_changes(content, changes))


def ablate(
    run: RunDirectory,
    examples: int = option(2048, "Maximum number of examples (default: 2048).", "N"),
    split: str = option("test", "test, or train+test as in the released code (default: test).", "NAME"),
    intervention: str = option(
        "zero",
        "Replacement of a head's output: zero, mean, resample or position (the head without position) (default: zero).",
        "NAME",
    ),
    metric: str = option(
        "accuracy", "accuracy, loss, or kl (divergence from the intact model) (default: accuracy).", "NAME"
    ),
    method: str = option("exact", "exact, or attribution (estimate; --metric loss only) (default: exact).", "NAME"),
    sets: bool = option(
        False,
        "Also ablate growing sets of heads and search for a small sufficient set (at most 512 examples).",
        flag="--sets",
    ),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Ablate each head of a run and print the effects."""
    from toeplens import training
    from toeplens.cli import console, tables
    from toeplens.engine import ablate_run, measure_run
    from toeplens.lens import HeadSets, deposit

    data_options: Any = {"examples": examples, "split": choose("split", split, ("test", "train+test"))}
    trained_run, head_sets = training.Run.open(run), None
    with console.err.status("ablating heads"):
        options: Any = {"metric": metric, "intervention": intervention, "method": method}
        ablation = ablate_run(trained_run, **data_options, **options, execution=ExecutionOptions(device=device))
        if sets:
            head_sets = HeadSets.from_dict(measure_run(trained_run, "sets", **data_options, device=device))
    if not as_json:
        tables.print_ablation(ablation, head_sets)
        return
    content = ablation.to_dict()
    if ablation.metric == "accuracy":
        content["deposit"] = [asdict(layer) for layer in deposit(ablation)]
    if head_sets is not None:
        content["sets"] = head_sets.to_dict()
    console.print_json(content)


def decompose(
    run: RunDirectory,
    out: Path | None = option(None, "Page to write (default: decomposition.html in RUN).", "FILE"),
    split: str = option(
        "mean",
        "How to separate position: mean over sequences, ablate, or input (first layer only) (default: mean).",
        "NAME",
    ),
    layer: list[int] | None = option(None, "Layer to decompose, counted from 1; repeatable (default: all).", "N"),
    examples: int = option(256, "Maximum number of test sequences (default: 256).", "N"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Decompose a run's logits into content and position."""
    from toeplens import training
    from toeplens.cli import console, tables
    from toeplens.lens import Split
    from toeplens.studies.decomposition import decompose_run
    from toeplens.utils.outputs import write_page

    choose("split", split, get_args(Split))
    trained_run = training.Run.open(run)
    page = out or run / "decomposition.html"
    check_output_file(page, "decompose")
    depth = trained_run.spec.model.num_layers
    for number in layer or ():
        check_range("layer", number, 1, depth)
        if split == "input" and number > 1:
            raise invalid("split", f"be 'mean' or 'ablate' for layer {number}", got="'input'")
    layers = [number - 1 for number in layer or ([1] if split == "input" else range(1, depth + 1))]
    with console.err.status("decomposing logits"):
        structure = decompose_run(trained_run, split=split, examples=examples, layers=layers, device=device)  # type: ignore[arg-type]
    write_page(page, structure.page().html(), "decompose")
    if not as_json:
        tables.print_structure(structure)
    console.print_page(page, as_json=as_json, **structure.to_dict())


def extrapolate_run(
    run: RunDirectory,
    lengths: list[int] | None = option(
        None,
        "Sequence length to test; repeatable (default: 1, 1.25, 1.5, 2 and 4 times the training length).",
        "N",
        flag="--length",
    ),
    examples: int = option(2048, "Test sequences per length (default: 2048).", "N"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Test a run on sequences longer than in training."""
    from toeplens import training
    from toeplens.cli import console, tables
    from toeplens.engine import extrapolate

    trained_run = training.Run.open(run)
    with console.err.status("testing longer sequences"):
        result = extrapolate(trained_run, lengths or None, examples=examples, device=device)
    if as_json:
        console.print_json(result.to_dict())
    else:
        tables.print_extrapolation(result)
