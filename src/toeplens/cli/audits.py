"""Commands on pretrained models: audit one, lay two audits side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toeplens.cli.means import Hands, with_options
from toeplens.cli.options import Json, ModelDevice, ModelDtype, Pickled, path
from toeplens.ground import InputError, invalid
from toeplens.ground.places import entered

if TYPE_CHECKING:
    from toeplens.studies.auditing.many import Request


@with_options
def audit(
    model: Annotated[
        list[str],
        typer.Argument(
            help="A transformers model's directory or name on the hub, a GGUF file, or a run's directory; several are "
            "audited side by side, as --workers and the options after it say."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Directory of the audit: its page, record and tables; of several models, of a directory for each.",
            parser=path,
        ),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file (UTF-8; of .jsonl and .parquet the field text) to read; give it again for more. "
            "Sequences are shared out among the texts, and intervals are over texts then.",
            parser=path,
        ),
    ] = None,
    tokens: Annotated[
        list[Path] | None,
        typer.Option(help="Token ids instead: .npy, or .json with a list or a list of lists.", parser=path),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to measure, counted from 1, e.g. 1,4,9-12; all unless given.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads of each layer whose effects are taken, counted from 1; all unless given.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences at most; 16 unless given, of a run's examples 256.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a sequence at most; 256 unless given, of --tokens as many as it has.")
    ] = None,
    effects: Annotated[
        str | None,
        typer.Option(
            help="What is done to each head: exact or attribution (silenced, or an estimate of that), position "
            "(that is taken from it), none; or bands, of each layer's frequencies. Exact unless given; of a changed "
            "model none."
        ),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(
            help="Heads whose effects (exact or position) are wanted; others are left out as soon as they cannot be "
            "among them."
        ),
    ] = None,
    needles: Annotated[
        int,
        typer.Option(
            help="Texts with a number in them on which each head's retrieval is measured, of --text and a model that "
            "predicts the next token; as long as the sequences."
        ),
    ] = 0,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="What is done to the model, as in toeplens probe, e.g. 'layers=2 heads=3 output=zero'; every head is "
            "then measured as it reads what the changed ones before it put out. Give it again for more."
        ),
    ] = None,
    dtype: ModelDtype = "auto",
    device: ModelDevice = "auto",
    pickled: Pickled = False,
    seed: Annotated[int, typer.Option(help="Seed of random and of masked tokens, and of needles.")] = 0,
    *,
    hands: Hands,
    as_json: Json = False,
) -> None:
    """Audit a pretrained model: which heads are positional, which symbolic, what they look at, which matter.

    Without --text and --tokens it reads random tokens whose second half repeats the first. Of several models each is
    audited so, several at a time; one that fails is told at the end, and the same command goes on.
    """
    from toeplens.cli import audit_output, console
    from toeplens.sources.huggingface.checkpoints import is_there
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
            console.say(f"model: there is no directory {each}; the hub is asked for it.", aside=True)
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
    shorter = "--effects none leaves them out"
    if request.first is None and len(request.texts or ()) < 2:
        shorter = f"--first 10 asks for those that matter most alone, {shorter}"
    with audit_output.AuditProgress(f"{shorter}.") as progress:
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
    second: Annotated[Path, typer.Argument(help="Directory of another.", parser=path)],
    out: Annotated[Path, typer.Option(help="Directory for the page.", parser=path)],
    as_json: Json = False,
) -> None:
    """Lay two audits side by side: a base and its variant, two encodings, two checkpoints of a run."""
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
    """What two directories are called: by so many of their last folders as tell them apart."""
    parts = [each.resolve().parts for each in (first, second)]
    depth = next((n for n in range(1, max(map(len, parts))) if parts[0][-n:] != parts[1][-n:]), 1)
    one, other = ("/".join(each[-depth:]) for each in parts)
    return one, other
