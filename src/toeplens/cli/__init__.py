"""The command line: parse, call, print.

The commands' modules hold what ``--help`` and a shell's completion need; each command imports what it uses when it is
called, within `toeplens.start.starting`.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from toeplens.cli import audits, cite, export, lists, pretrained, probes, runs, studies
from toeplens.ground import EnvironmentFailure, ToeplensError
from toeplens.ground.machine import out_of_memory
from toeplens.ground.stops import EXIT_CODE, STOPPED, interrupted_by_signals
from toeplens.version import __version__

__all__ = ["app", "main"]

_NARROWEST, _DIGITS = 20, 4  # columns of a terminal, and how many digits that number has at most


class _Stopped(Exception):
    """A command was interrupted."""


class _Commands(TyperGroup):
    """All commands; typer would end an interrupted one without a word."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise _Stopped from stop


app = typer.Typer(
    cls=_Commands,
    help="A laboratory for positional information in Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _name, _command in {
    "reproduce": studies.reproduce,
    "study": studies.study,
    "theory": studies.theory,
    "audit": audits.audit,
    "compare": audits.compare,
    "probe": probes.probe,
    "pretrained": pretrained.pretrained,
    "train": runs.train_run,
    "ablate": runs.ablate,
    "decompose": runs.decompose,
    "extrapolate": runs.extrapolate_run,
    "report": studies.report_page,
    "claims": studies.claims,
    "figures": export.figures,
    "tables": export.tables,
    "cite": cite.cite,
    "encodings": lists.list_encodings,
    "card": lists.card,
    "tasks": lists.list_tasks,
}.items():
    app.command(_name)(_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"toeplens {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; errors are one line, exit code 2 for bad input and 3 for the machine's failures."""
    _make_printable()
    try:
        with interrupted_by_signals(_say_stopped):
            code = app(standalone_mode=False)
            print(end="", flush=True)
        sys.exit(code if isinstance(code, int) else 0)
    except ToeplensError as error:
        _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())
            sys.exit(2)
        _fail(error.format_message(), 2)
    except (_Stopped, KeyboardInterrupt):
        _say_stopped()
        sys.exit(EXIT_CODE)
    except BrokenPipeError:
        sys.stdout = None  # else Python would try again at its end
        sys.exit(0)
    except OSError as error:  # a full disk behind standard output, say
        sys.stdout = None
        _fail(f"{error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}.", 3)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _fail(str(EnvironmentFailure("the machine's memory is used up; lower --workers or the sizes.")), 3)


def _make_printable() -> None:
    """What the terminal's encoding lacks is escaped; a width in which nothing could be printed is not taken over."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and (len(columns) > _DIGITS or int(columns) < _NARROWEST):
        del os.environ["COLUMNS"]


def _fail(message: str, code: int) -> None:
    _say(message)
    sys.exit(code)


def _say(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def _say_stopped() -> None:
    _say(STOPPED)
