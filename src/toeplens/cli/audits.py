"""Commands on pretrained models: audit one, compare two audits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toeplens.cli.means import Hands, with_options
from toeplens.cli.options import MEASURE, Json, ModelDevice, ModelDtype, Pickled, option, path
from toeplens.ground import InputError, invalid
from toeplens.ground.places import entered

if TYPE_CHECKING:
    from toeplens.studies.auditing.many import Request


@with_options
def audit(
    model: Annotated[
        list[str],
        typer.Argument(help="Hugging Face model, GGUF file or toeplens run. Several are audited in parallel."),
    ],
    out: Annotated[
        Path,
        option(
            "Output directory; one folder per model if several.",
            metavar="PATH",
            parser=path,
        ),
    ],
    text: Annotated[
        list[Path] | None,
        option(
            "Text file to read (UTF-8, .jsonl or .parquet). Repeatable; intervals are then over files.",
            metavar="FILE",
            parser=path,
        ),
    ] = None,
    tokens: Annotated[
        list[Path] | None,
        option("Token ids to read instead: .npy or .json.", metavar="FILE", parser=path),
    ] = None,
    layers: Annotated[
        str | None,
        option("Layers, e.g. 1,4,9-12 (default: all).", panel=MEASURE, metavar="LIST"),
    ] = None,
    heads: Annotated[
        str | None,
        option("Heads of each layer to ablate (default: all).", panel=MEASURE, metavar="LIST"),
    ] = None,
    sequences: Annotated[
        int | None,
        option("Maximum sequences (default: 16; 256 for a run).", panel=MEASURE, metavar="N"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        option("Maximum tokens per sequence (default: 256; with --tokens all).", panel=MEASURE, metavar="N"),
    ] = None,
    effects: Annotated[
        str | None,
        option(
            "Ablation effect: exact, attribution (an estimate), position (ablate only position), bands (freeze "
            "frequencies) or none (default: exact; none with --change).",
            panel=MEASURE,
            metavar="NAME",
        ),
    ] = None,
    first: Annotated[
        int | None,
        option("Find only the N largest effects (faster).", panel=MEASURE, metavar="N"),
    ] = None,
    needles: Annotated[
        int,
        option(
            "Needle texts for retrieval heads (default: 0).",
            panel=MEASURE,
            metavar="N",
        ),
    ] = 0,
    change: Annotated[
        list[str] | None,
        option(
            "Intervention, e.g. 'layers=2 heads=3 output=zero'. Repeatable.",
            panel=MEASURE,
            metavar="CHANGE",
        ),
    ] = None,
    dtype: ModelDtype = "auto",
    device: ModelDevice = "auto",
    pickled: Pickled = False,
    seed: Annotated[int, option("Seed of tokens and needles (default: 0).", panel=MEASURE, metavar="N")] = 0,
    *,
    hands: Hands,
    as_json: Json = False,
) -> None:
    """Audit a model: which heads are positional, which symbolic.

    Checks that recomputed attention equals the model's own, then measures each head. Without --text or --tokens, it
    reads random tokens whose second half repeats the first. Layers and heads count from 1. Run the same command to
    resume.
    """
    from toeplens.backends.hf.checkpoints import is_there
    from toeplens.cli import audit_output, console
    from toeplens.studies import auditing, probing
    from toeplens.studies.auditing.many import Request

    if text and tokens:
        raise InputError("tokens and text must not both be set.")
    if len(tokens or ()) > 1:
        raise invalid("tokens", "be set only once", got=f"{len(tokens or ())} files")
    request = Request(
        tokens=tokens[0] if tokens else None,
        layers=None if layers is None else probing.numbers("layers", layers),
        heads=None if heads is None else probing.numbers("heads", heads),
        sequences=sequences,
        max_tokens=max_tokens,
        effects=effects,
        first=first,
        needles=needles,
        wishes=tuple(probing.read_change(each) for each in change or ()),
        dtype=dtype,
        device=device,
        pickled=pickled,
        seed=seed,
    )
    workers = hands.chosen()
    if len(model) == 1:
        hands.must_be_of_many("model")
    for each in model:
        if auditing.is_run(each):
            replace(request, texts={} if text else None).check_run(each)
        elif not is_there(each):
            console.say(f"model: {each} is not a local directory; looking it up on the hub.", aside=True)
    if text:
        texts = {each.name: auditing.read_text(each) for each in text}
        if len(texts) < len(text):
            raise InputError("text must not name two files with the same file name.")
        request = replace(request, texts=texts)
    if len(model) > 1:
        audit_output.audit_all(model, out, request, workers, as_json=as_json)
    else:
        _audit_one(model[0], out, request, as_json=as_json)


def _audit_one(model: str, out: Path, request: Request, *, as_json: bool) -> None:
    from toeplens import report
    from toeplens.cli import audit_output, console
    from toeplens.studies import auditing
    from toeplens.studies.auditing.many import audit_in

    ids = None if request.tokens is None else auditing.read_tokens(request.tokens)
    shorter = "--effects none skips them."
    if request.first is None and len(request.texts or ()) < 2:
        shorter = "--first 10 finds only the 10 largest effects; --effects none skips them."
    with audit_output.AuditProgress(shorter) as progress:
        found = audit_in(out, model, request, report.write_audit, tokens=ids, on_progress=progress)
    page = out / report.PAGE
    if as_json:
        console.print_json({**found.summary(), "page": str(page)})
        return
    for each in audit_output.audit_tables(found):
        console.out.print(each)
    for line in audit_output.audit_notes(found):
        console.say(line)
    console.say(f"page: {page}")


def compare(
    first: Annotated[Path, typer.Argument(help="Directory of an audit.", parser=path)],
    second: Annotated[Path, typer.Argument(help="Directory of another audit.", parser=path)],
    out: Annotated[Path, option("Output directory for the page.", metavar="PATH", parser=path)],
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
