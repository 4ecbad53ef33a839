"""The command line: parse, call, print.

To start fast, a command's module holds only what ``--help`` and completion need; the command imports the rest.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from toeplens.cli import export, lists, pretrained, runs, studies
from toeplens.cli.options import Command
from toeplens.ground import ToeplensError
from toeplens.ground.execution import EXIT_CODE, INTERRUPTED
from toeplens.ground.machine import out_of_memory
from toeplens.version import __version__

__all__ = ["app", "report"]


app = typer.Typer(
    help="Measure and change what attention heads do with positions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Models and encodings": {
        "audit": pretrained.audit,
        "compare": pretrained.compare,
        "probe": pretrained.probe,
        "encodings": lists.list_encodings,
        "card": lists.card,
        "tasks": lists.list_tasks,
    },
    "Studies": {
        "reproduce": studies.reproduce,
        "study": studies.study,
        "pretrained": pretrained.pretrained,
        "theory": studies.theory,
        "report": studies.report_page,
        "claims": studies.claims,
        "figures": export.figures,
        "tables": export.tables,
        "cite": export.cite,
    },
    "Single runs": {
        "train": runs.train_run,
        "ablate": runs.ablate,
        "decompose": runs.decompose,
        "extrapolate": runs.extrapolate_run,
    },
}


def _paragraphs(command: Callable[..., None]) -> str:
    """The docstring, one line per paragraph, so that the terminal wraps it."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n"))


for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, cls=Command, rich_help_panel=_panel, help=_paragraphs(_command))(_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"toeplens {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def report(error: BaseException) -> int:
    """Print an error as one line, if it is one that a user can fix or the machine's; raise it again if it is not.

    Returns the exit code: 2 for bad input, 3 for failures of the machine, 130 if interrupted.
    """
    if isinstance(error, ToeplensError):
        return _fail(_with_options(error), error.exit_code)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())  # type: ignore[attr-defined]
        return 2
    if isinstance(error, typer.TyperException):
        return _fail(error.format_message(), 2)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"{INTERRUPTED}\n")
        return EXIT_CODE
    if isinstance(error, OSError):
        sys.stdout = None  # otherwise Python flushes it again at exit
        if isinstance(error, BrokenPipeError):
            return 0
        # a full disk behind standard output, say
        return _fail(f"{error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}.", 3)
    if out_of_memory(error):
        return _fail("Out of memory. Lower --workers or the sizes.", 3)
    raise error


def _with_options(error: ToeplensError) -> str:
    """The error's message, with names as they are typed: --max-tokens for max_tokens, MODEL for model."""
    commands = vars(typer.main.get_command(app))["commands"]
    command = next((commands[word] for word in sys.argv[1:] if word in commands), None)
    typed = {}
    for each in command.params if command else ():
        if each.opts[0].startswith("-"):  # --format for form and format, --set for set_ and set
            typed |= dict.fromkeys((each.name, each.opts[0].lstrip("-").replace("-", "_")), each.opts[0])
        else:
            typed[each.name] = each.name.upper()
    names = re.sub(r"[\w.]+", lambda found: typed.get(found[0], found[0]), error.name)
    return names + str(error)[len(error.name) :]


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code
