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
from toeplens.utils import ToeplensError
from toeplens.utils.execution import INTERRUPTED_EXIT_CODE, INTERRUPTED_MESSAGE
from toeplens.utils.machine import is_out_of_memory
from toeplens.version import __version__

__all__ = ["app", "report_error"]


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


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"toeplens {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def report_error(error: BaseException) -> int:
    """Print an error as one line, if it is one that a user can fix or the machine's; raise it again if it is not.

    Returns the exit code: 2 for bad input, 3 for failures of the machine, 130 if interrupted.
    """
    if isinstance(error, ToeplensError):
        return _print_error(_name_options(error), error.exit_code)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())  # type: ignore[attr-defined]
        return 2
    if isinstance(error, typer.TyperException):
        return _print_error(error.format_message(), 2)
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"{INTERRUPTED_MESSAGE}\n")
        return INTERRUPTED_EXIT_CODE
    if isinstance(error, OSError):
        sys.stdout = None  # otherwise Python flushes it again at exit
        if isinstance(error, BrokenPipeError):
            return 0
        # a full disk behind standard output, say
        return _print_error(f"{error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}.", 3)
    if is_out_of_memory(error):
        return _print_error("Out of memory. Lower --workers or the sizes.", 3)
    raise error


def _name_options(error: ToeplensError) -> str:
    """The error's message, with names as they are typed: --max-tokens for max_tokens, MODEL for model."""
    commands = vars(typer.main.get_command(app))["commands"]
    command = next((commands[word] for word in sys.argv[1:] if word in commands), None)
    flags = {}
    for param in command.params if command else ():
        if param.opts[0].startswith("-"):  # --format for form and format, --set for set_ and set
            flags |= dict.fromkeys((param.name, param.opts[0].lstrip("-").replace("-", "_")), param.opts[0])
        else:
            flags[param.name] = param.name.upper()
    names = re.sub(r"[\w.]+", lambda match: flags.get(match[0], match[0]), error.name)
    return names + str(error)[len(error.name) :]


def _print_error(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code
