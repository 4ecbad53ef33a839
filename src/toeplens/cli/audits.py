"""Commands on pretrained models: audit one or several, compare two audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.cli.options import Json, argument, option, with_options
from toeplens.ground import InputError, invalid
from toeplens.ground.execution import ClusterOptions
from toeplens.ground.places import entered
from toeplens.studies.kit.options import AuditOptions


@with_options()
def audit(
    model: list[str] = argument(..., "Hugging Face model, GGUF file or toeplens run. Several are audited in parallel."),
    out: Path = option(..., "Output directory; one folder per model if several.", "PATH"),
    text: list[Path] | None = option(
        None, "Text file to read (UTF-8, .jsonl or .parquet). Repeatable; intervals are then over files.", "FILE"
    ),
    tokens: list[Path] | None = option(None, "Token ids to read instead: .npy or .json.", "FILE"),
    *,
    options: AuditOptions,
    cluster: ClusterOptions,
    as_json: Json = False,
) -> None:
    """Audit a model: which heads are positional, which symbolic.

    Checks that recomputed attention equals the model's own, then measures each head. Without --text or --tokens, it
    reads random tokens whose second half repeats the first. Layers and heads count from 1. Run the same command to
    resume.
    """
    from toeplens.cli import audit_output, console
    from toeplens.sources.huggingface.checkpoints import is_there
    from toeplens.studies.auditing.inputs import read_text
    from toeplens.studies.auditing.study import is_run

    if text and tokens:
        raise InputError("tokens and text must not both be set.")
    if len(tokens or ()) > 1:
        raise invalid("tokens", "be set only once", got=f"{len(tokens or ())} files")
    if len(model) == 1:
        for name, value in (("workers", cluster.workers), ("engine", cluster.engine if cluster.on_ray else None)):
            if value is not None:
                raise invalid(name, "not be set for a single model", value)
    for each in model:
        if is_run(each):
            options.check_run(text=text, tokens=tokens)
        elif not is_there(each):
            console.say(f"model: {each} is not a local directory; looking it up on the hub.", aside=True)
    data: Any = None
    if tokens:
        data = tokens[0]
    elif text:
        data = {each.name: read_text(each) for each in text}
        if len(data) < len(text):
            raise InputError("text must not name two files with the same file name.")
    if len(model) > 1:
        audit_output.audit_all(model, out, data, options, cluster, as_json=as_json)
    else:
        audit_output.audit_one(model[0], out, data, options, as_json=as_json)


def compare(
    first: Path = argument(..., "Directory of an audit.", is_path=True),
    second: Path = argument(..., "Directory of another audit.", is_path=True),
    out: Path = option(..., "Output directory for the page.", "PATH"),
    as_json: Json = False,
) -> None:
    """Compare two audits head by head.

    For example a base model and its fine-tuned version, two encodings, or two checkpoints.
    """
    from toeplens import report
    from toeplens.cli import console
    from toeplens.studies import auditing

    found = [auditing.open_audit(each) for each in (first, second)]
    names = names_of(first, second)
    with entered(out, "comparison", (report.PAGE,)):
        page = report.write_comparison(found[0], found[1], names, out)
    audits = [{"name": name, **each.summary()} for name, each in zip(names, found, strict=True)]
    console.print_page(page, as_json=as_json, audits=audits)


def names_of(first: Path, second: Path) -> tuple[str, str]:
    """Names of two directories: as many of their last folders as are needed to tell them apart."""
    parts = [each.resolve().parts for each in (first, second)]
    depth = next((n for n in range(1, max(map(len, parts))) if parts[0][-n:] != parts[1][-n:]), 1)
    one, other = ("/".join(each[-depth:]) for each in parts)
    return one, other
