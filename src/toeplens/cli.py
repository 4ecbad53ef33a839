"""The command line: parse, call, print."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from toeplens import __version__, console, encodings, report, tasks
from toeplens.engine import Limits, ablate_run, stop_on_signals
from toeplens.ground import EnvironmentFailure, InputError, ToeplensError, choose, read_json
from toeplens.lens import THRESHOLDS, deposit
from toeplens.model import Protocol
from toeplens.studies import RULE
from toeplens.studies import reproduce as study
from toeplens.studies.card import make_card
from toeplens.training import Run, plan_execution, run_spec, train

app = typer.Typer(
    help="A laboratory for positional information in Transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON on standard output.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Compile = Annotated[str, typer.Option(help="torch.compile: auto (where it pays), on or off.")]
Budget = Annotated[str | None, typer.Option(help="Stop within this time, e.g. 90s, 9m, 2h; the same command goes on.")]


def _print_version(asked: bool) -> None:
    if asked:
        console.say(f"toeplens {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Directory of the study; one that was stopped is gone on with.")],
    scale: Annotated[
        str, typer.Option(help="smoke (a minute), laptop (under 10 minutes) or paper (a GPU, hours).")
    ] = "laptop",
    protocol: Annotated[str, typer.Option(help="paper, released, or both.")] = "both",
    seeds: Annotated[int, typer.Option(help="Trained models a cell; 3 or more give intervals over seeds.")] = 1,
    time_budget: Budget = None,
    workers: Annotated[int | None, typer.Option(help="Processes; one a core unless given.")] = None,
    device: Device = "auto",
    compile: Compile = "auto",
    as_json: Json = False,
) -> None:
    """Carry out the papers' central experiment: train, knock out heads, judge the claims, write the page."""
    choose("scale", scale, study.SCALES)
    if protocol != "both":
        choose("protocol", protocol, (*study.PROTOCOLS, "both"))
    protocols: tuple[Protocol, ...] = tuple(p for p in study.PROTOCOLS if protocol in (p, "both"))
    budget = _seconds(time_budget)
    plan = study.Plan(scale, protocols, seeds)
    execution = plan_execution(device, _compile(compile), "auto")
    cells = plan.cells()
    console.say(
        f"{len(cells)} cells at scale {scale} ({study.SCALES[scale].about}) on {execution.describe()}", aside=True
    )
    with stop_on_signals() as stopped, console.StudyProgress(cells) as progress:
        limits = study.limits_for(budget, Limits(device=device, compile=_compile(compile), should_stop=stopped))
        state = study.reproduce(
            out, scale=scale, protocols=protocols, seeds=seeds, limits=limits, workers=workers, on_event=progress
        )
    _print_state(state, as_json)
    if stopped():
        raise typer.Exit(130)


def _print_state(state: study.Reproduction, as_json: bool) -> None:
    page = report.write_page(state)
    if as_json:
        console.print_json(
            {
                "finished": state.finished,
                "total": state.total,
                "share": state.share,
                "page": str(page),
                "table": [row.to_dict() for row in state.table],
                "claims": [entry.to_dict() for entry in state.entries],
            }
        )
        return
    for table in console.accuracy_tables(state.table):
        console.out.print(table)
    console.out.print(console.claims_table(state.entries))
    if not state.complete:
        share = f"{100 * state.share:.3g} % of all training steps"
        console.say(f"{state.finished} of {state.total} cells are finished ({share}); the same command goes on.")
    console.say(f"page: {page.resolve()}")


@app.command("train")
def train_command(
    out: Annotated[Path, typer.Option(help="Directory for runs; the run gets a folder named by its content.")],
    spec: Annotated[
        Path | None, typer.Argument(help="A run's spec as JSON (as in a run directory's spec.json).")
    ] = None,
    encoding: Annotated[str, typer.Option(help="See 'toeplens encodings'.")] = "rope",
    protocol: Annotated[str, typer.Option(help="paper or released.")] = "paper",
    task: Annotated[str, typer.Option(help="See 'toeplens tasks'.")] = study.DISTANCE,
    scale: Annotated[str, typer.Option(help="Sizes to start from: smoke, laptop or paper.")] = "laptop",
    seed: Annotated[int, typer.Option(help="Seed of weights, order, dropout and data.")] = 42,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a field, e.g. --set epochs=3 --set model.d_model=32 --set model.encoding_options.base=500.",
        ),
    ] = None,
    time_budget: Budget = None,
    device: Device = "auto",
    compile: Compile = "auto",
    as_json: Json = False,
) -> None:
    """Fit one run, or go on with it; prints where it is and what it reached."""
    if spec is not None:
        content = read_json(spec)
        if not isinstance(content, dict):
            raise InputError(f"spec: {spec} does not hold a run's spec.")
    else:
        content = study.starting_spec(scale, protocol, task, encoding, seed)
    wanted = run_spec(**_changed(content, set_ or []))
    execution = plan_execution(device, _compile(compile), wanted.precision)
    about = f"{wanted.task}, {wanted.model.encoding}, {wanted.model.protocol} protocol"
    console.say(f"{about} on {execution.describe()}", aside=True)
    limits = study.limits_for(_seconds(time_budget), Limits())
    with stop_on_signals() as stopped, console.RunProgress(wanted.name) as progress:
        run = train(
            wanted,
            out,
            device=device,
            compile=_compile(compile),
            deadline=limits.deadline,
            should_stop=stopped,
            on_progress=progress,
        )
    if as_json:
        console.print_json(
            {"directory": str(run.directory), "status": run.status, **run.result, "metrics": run.metrics}
        )
    else:
        accuracy = run.result.get("test_accuracy")  # None where no example counted
        reached = "" if accuracy is None else f", test accuracy {accuracy:.4f} (chance {wanted.chance:.4f})"
        console.say(f"{run.status}{reached}\nrun: {run.directory}")
    if stopped():
        raise typer.Exit(130)


@app.command()
def ablate(
    run: Annotated[Path, typer.Argument(help="A finished run's directory.")],
    examples: Annotated[int, typer.Option(help="Examples to count.")] = 2048,
    split: Annotated[str, typer.Option(help="test, or train+test (70:30, as the released program).")] = "test",
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Silence each head of a run's model and print what it loses, with intervals and the deposit of each layer."""
    choose("split", split, ("test", "train+test"))
    with console.err.status("silencing heads"):
        ablation = ablate_run(Run.open(run), examples=examples, split=split, limits=Limits(device=device))  # type: ignore[arg-type]
    if as_json:
        console.print_json({**ablation.to_dict(), "deposit": [asdict(layer) for layer in deposit(ablation)]})
        return
    console.say(f"intact: {ablation.baseline:.4f} on {ablation.examples} examples, chance {ablation.chance:.4f}")
    for table in console.ablation_tables(ablation):
        console.out.print(table)
    console.say(THRESHOLDS)


@app.command("report")
def report_command(
    directory: Annotated[Path, typer.Argument(help="A study's directory.")],
    as_json: Json = False,
) -> None:
    """Write a study's page again from what is finished."""
    page = report.write_page(study.gather(directory))
    if as_json:
        console.print_json({"page": str(page)})
    else:
        console.say(f"page: {page.resolve()}")


@app.command()
def claims(
    directory: Annotated[Path, typer.Argument(help="A study's directory.")],
    evidence: Annotated[bool, typer.Option(help="Also print each verdict's evidence.")] = False,
    as_json: Json = False,
) -> None:
    """Judge the papers' claims on a study's results and print the ledger."""
    state = study.gather(directory)
    if as_json:
        console.print_json([entry.to_dict() for entry in state.entries])
        return
    console.out.print(console.claims_table(state.entries))
    if evidence:
        for entry in state.entries:
            console.say(f"{entry.claim.id}, {entry.protocol}: {entry.verdict}")
            for line in entry.evidence:
                console.say(f"  {line}")
    console.say(RULE)


@app.command("encodings")
def encodings_command(as_json: Json = False) -> None:
    """List the positional encodings, their class and their options."""
    rows = []
    for name in encodings.names():
        kind = encodings.get(name)
        options = {n: _default(p) for n, p in encodings.options(name).items()}
        facts = {field: getattr(kind, field) for field in ("coupling", "also_couples", "toeplitz", "data_dependent")}
        rows.append({"name": name, **facts, "formula": kind.formula, "options": options, "citation": kind.citation})
    if as_json:
        console.print_json(rows)
        return
    table = console.table(None, "encoding", "enters by", "Toeplitz", "content", "options (defaults)", "citation")
    for row in rows:
        options = "\n".join(f"{n}={v}" for n, v in row["options"].items())
        where = "\n".join((row["coupling"], *row["also_couples"]))
        toeplitz, content = ("yes" if row[fact] else "no" for fact in ("toeplitz", "data_dependent"))
        table.add_row(row["name"], where, toeplitz, content, options, row["citation"])
    console.out.print(table)


@app.command()
def card(
    out: Annotated[Path, typer.Option(help="The page to write; for all encodings, the directory of their pages.")],
    name: Annotated[str | None, typer.Argument(help="See 'toeplens encodings'; all of them unless given.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the encoding, e.g. --set base=500.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the texts that are measured.")] = 512,
    as_json: Json = False,
) -> None:
    """Measure an encoding and write its card: formula, kernel, symbol, class, resolution by dtype, cost."""
    if name is None and set_:
        raise InputError("set: an option was given, but no encoding; name the one that it belongs to.")
    names = encodings.names() if name is None else (choose("encoding", name, encodings.names()),)
    options = _changed({}, set_ or [])
    cards = [make_card(each, length=length, **options) for each in console.track(names, "measuring")]
    page = report.write_card(cards[0], out) if name is not None else report.write_cards(cards, out)
    if as_json:
        console.print_json({"page": str(page), "cards": [made.to_dict() for made in cards]})
    else:
        console.say(f"page: {page.resolve()}")


@app.command("tasks")
def tasks_command(as_json: Json = False) -> None:
    """List the tasks, what their answer depends on, chance, and their options."""
    rows = []
    for name in tasks.names():
        kind, task = tasks.get(name), tasks.build(name)
        options = {n: _default(p) for n, p in tasks.options(name).items()}
        rows.append(
            {
                "name": name,
                "answer": kind.answer,
                "chance": task.chance(),
                "options": options,
                "about": inspect.getdoc(kind),
            }
        )
    if as_json:
        console.print_json(rows)
        return
    table = console.table(None, "task", "answer depends on", "chance (defaults)", "options (defaults)", "about")
    for row in rows:
        options = "\n".join(f"{n}={v}" for n, v in row["options"].items())
        table.add_row(row["name"], row["answer"], f"{row['chance']:.4f}", options, row["about"].splitlines()[0])
    console.out.print(table)


def _default(parameter: inspect.Parameter) -> Any:
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _compile(mode: str) -> Any:
    return choose("compile", mode, ("auto", "on", "off"))


def _seconds(text: str | None) -> float | None:
    """``90s``, ``9m``, ``2h`` or plain seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"time_budget: {text!r} was given; it must be a positive time such as 90s, 9m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _changed(content: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """A spec with ``path=value`` changes; a model's protocol switches follow if its encoding or protocol changes."""
    content = json.loads(json.dumps(content))
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not path:
            raise InputError(f"set: {change!r} was given; it must be of the form field=value.")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        place = content
        *parents, last = path.split(".")
        for name in parents:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(f"set: {path} was given; {name} has no fields.")
        place[last] = value
    return content


def main() -> None:
    """Run the command line; errors are one line, exit code 2 for bad input and 3 for the machine's failures."""
    try:
        code = app(standalone_mode=False)
        print(end="", flush=True)
        sys.exit(code if isinstance(code, int) else 0)
    except ToeplensError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            console.say(error.format_message())
            sys.exit(2)
        _fail(error.format_message(), 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("stopped; what was finished is kept, and the same command goes on.", 130)
    except BrokenPipeError:
        sys.stdout = None  # else Python would try again at its end
        sys.exit(0)
    except OSError as error:  # a full disk behind standard output, say
        sys.stdout = None
        _fail(f"{error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}.", 3)
    except MemoryError:
        _fail(str(EnvironmentFailure("the machine's memory is used up; lower --workers or the sizes.")), 3)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
