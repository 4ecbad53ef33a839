"""Commands on pretrained models: audit one, lay two audits side by side."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from toeplens.cli.options import Json, Workers
from toeplens.ground import InputError, choose
from toeplens.ground.files import make_directory
from toeplens.start import starting

_MOST_LAYERS = 10_000


def audit(
    model: Annotated[
        str, typer.Argument(help="A transformers model's directory or name on the hub, or the directory of a run.")
    ],
    out: Annotated[Path, typer.Option(help="Directory of the audit: its page, record and tables.")],
    text: Annotated[Path | None, typer.Option(help="A text file (UTF-8) to read.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Token ids instead: .npy, or .json with a list or a list of lists.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to measure, e.g. 0,3,8-11; all unless given.")] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences at most; 16 unless given, of a run's examples 256.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a sequence at most; 256 unless given, of --tokens as many as it has.")
    ] = None,
    effects: Annotated[
        str, typer.Option(help="Silence each head: exact, attribution (first order, for language models) or none.")
    ] = "exact",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[
        str, typer.Option(help="auto (spread over GPUs, if there are some), cpu, cuda or cuda:N.")
    ] = "auto",
    pickled: Annotated[
        bool, typer.Option("--pickled", help="Read weights that are no safetensors; they can run what they hold.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of random and of masked tokens.")] = 0,
    as_json: Json = False,
) -> None:
    """Audit a pretrained model: which heads are positional, which symbolic, what they look at, which matter.

    Without --text and --tokens it reads random tokens whose second half repeats the first.
    """
    with starting():
        from toeplens import console, report
        from toeplens.sources.huggingface.loading import Dtype
        from toeplens.studies import auditing
        from toeplens.studies.auditing.run import Silencing

    if text is not None and tokens is not None:
        raise InputError("tokens: it was given beside text; one of the two is allowed.")
    data: Any = None
    if text is not None:
        data = auditing.read_text(text)
    elif tokens is not None:
        data = auditing.read_tokens(tokens)
    with console.AuditProgress() as progress:
        found = auditing.audit(
            model,
            data,
            layers=_layers(layers),
            sequences=sequences,
            max_tokens=max_tokens,
            effects=choose("effects", effects, get_args(Silencing)),
            dtype=choose("dtype", dtype, get_args(Dtype)),
            device=device,
            pickled=pickled,
            seed=seed,
            on_progress=progress,
        )
    if data is not None:
        found = replace(found, about=found.about | {"text": str(text or tokens)})
    auditing.save(found, out)
    page = report.write_audit(found, out, auditing.parquet_of(found))
    if as_json:
        console.print_json(found.to_dict())
    else:
        for each in console.audit_tables(found):
            console.out.print(each)
        if "no_effects" in found.about:
            console.say(f"heads could not be silenced: {found.about['no_effects']}")
        console.say(f"the captured pass differs from a plain one by {found.whole:.1e} (relative)\npage: {page}")


def compare(
    first: Annotated[Path, typer.Argument(help="Directory of an audit.")],
    second: Annotated[Path, typer.Argument(help="Directory of another.")],
    out: Annotated[Path, typer.Option(help="Directory for the page.")],
) -> None:
    """Lay two audits side by side: a base and its variant, two encodings, two checkpoints of a run."""
    with starting():
        from toeplens import console, report
        from toeplens.studies import auditing

    found = [auditing.open_audit(each) for each in (first, second)]
    if (out / auditing.RECORD).exists():
        raise InputError(f"out: {out} holds an audit, whose page would be replaced; another directory is needed.")
    make_directory(out)
    page = report.write_comparison(found[0], found[1], (str(first), str(second)), out)
    console.say(f"page: {page}")


def survey(
    out: Annotated[Path, typer.Option(help="Directory of the survey; one that was stopped is gone on with.")],
    only: Annotated[
        list[str] | None, typer.Option(help="A model type of transformers (may be repeated); all unless given.")
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Build every text model of the installed transformers small and audit it: what is understood, and what is not."""
    with starting():
        from toeplens import console
        from toeplens.studies import survey as survey_of

    with console.AuditProgress() as progress:
        count = len(only or survey_of.model_types())
        done = iter(range(1, count + 1))
        found = survey_of.survey(
            out, only=only, workers=workers, on_progress=lambda _: progress("types", next(done), count)
        )
    if as_json:
        console.print_json(found.to_dict())
        return
    for each in console.survey_tables(found):
        console.out.print(each)
    console.say(f"record: {out / survey_of.RESULT}")


def _layers(text: str | None) -> list[int] | None:
    """``0,3,8-11`` as numbers."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or not int(match[1]) <= int(match[2] or match[1]) < _MOST_LAYERS:
            raise InputError(
                f"layers: {text!r} was given; it must be numbers below {_MOST_LAYERS} and ranges such as 0,3,8-11."
            )
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
