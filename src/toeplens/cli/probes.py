"""Commands that probe a language model, and study a pretrained one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from toeplens.cli.options import Device, Json, ModelDtype, Pickled, StudyOut, option, path, with_options
from toeplens.ground import InputError, invalid
from toeplens.ground.execution import ExecutionOptions
from toeplens.ground.options import MEASURE
from toeplens.ground.places import entered, must_be_of
from toeplens.studies.kit.options import Asked


@with_options()
def probe(
    model: Annotated[str, typer.Argument(help="Hugging Face model or GGUF file.")],
    out: Annotated[Path, option("Output directory.", metavar="PATH", parser=path)],
    text: Annotated[
        list[Path] | None,
        option("Text file to read (UTF-8, .jsonl or .parquet).", metavar="FILE", parser=path),
    ] = None,
    tokens: Annotated[
        Path | None,
        option("Token ids instead; no needles or lists.", metavar="FILE", parser=path),
    ] = None,
    change: Annotated[
        list[str] | None,
        option("Intervention, e.g. 'layers=3-5 heads=1 output=zero'. Repeatable.", metavar="CHANGE"),
    ] = None,
    *,
    asked: Asked,
    heads: Annotated[bool, option("Find retrieval heads.", "--heads/--no-heads", panel=MEASURE)] = True,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    pickled: Pickled = False,
    seed: Annotated[int, option("Random seed (default: 0).", panel=MEASURE, metavar="N")] = 0,
    as_json: Json = False,
) -> None:
    """Test a model's recall, copying, counting and order.

    Also reports loss by position. Give --change to compare with interventions.
    """
    from toeplens.cli import audit_output, console
    from toeplens.report import write_probe
    from toeplens.sources.huggingface.load import called_of, open_model
    from toeplens.studies import probing
    from toeplens.studies.auditing.inputs import read_text, read_tokens
    from toeplens.studies.kit.changes import changes_of, read_change

    wishes = [read_change(each) for each in change or ()]
    if len(text or ()) > 1:
        raise invalid("text", "be set only once", got=f"{len(text or ())} files")
    if text and tokens is None:
        data = read_text(text[0])
    elif tokens is not None and not text:
        data = read_tokens(tokens)
    else:
        raise InputError("text or tokens must be set, but not both.")
    with entered(out, "probe", (probing.RECORD,)), audit_output.AuditProgress() as progress:
        must_be_of(out / probing.RECORD, called_of(model), "probe")
        loaded = open_model(model, dtype=dtype, device=device, pickled=pickled)  # type: ignore[arg-type]
        loaded.check_decoder("a probe")
        changes = changes_of(loaded, wishes)
        found = probing.probe(loaded, data, changes=changes, asked=asked, heads=heads, seed=seed, on_progress=progress)
        probing.save_probe(found, out)
        page = write_probe(found, out)
    if as_json:
        console.print_json({**found.to_dict(), "page": str(page)})
        return
    console.out.print(audit_output.probe_table(found))
    console.say(f"page: {page}")


@with_options("time_budget")
def pretrained(
    model: Annotated[str, typer.Argument(help="Hugging Face model or GGUF file.")],
    text: Annotated[
        list[Path],
        option("Text file to read (UTF-8, .jsonl or .parquet); repeatable.", metavar="FILE", parser=path),
    ],
    out: StudyOut,
    sequences: Annotated[int, option("Sequences per text (default: 2).", panel=MEASURE, metavar="N")] = 2,
    tokens: Annotated[int, option("Tokens per sequence (default: 1024).", panel=MEASURE, metavar="N")] = 1024,
    effect_tokens: Annotated[int, option("Tokens for ablation (default: 256).", panel=MEASURE, metavar="N")] = 256,
    probe_tokens: Annotated[int, option("Tokens per needle text (default: 512).", panel=MEASURE, metavar="N")] = 512,
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    seed: Annotated[int, option("Random seed (default: 42).", panel=MEASURE, metavar="N")] = 42,
    *,
    execution: ExecutionOptions,
    as_json: Json = False,
) -> None:
    """Study a pretrained language model and judge claims about it.

    Compares heads, frequencies and retrieval with random-weight baselines.
    """
    from toeplens.cli import tables
    from toeplens.cli.audit_output import AuditProgress
    from toeplens.cli.progress import interruptible
    from toeplens.papers.positional_symbolic import pretrained as study
    from toeplens.papers.positional_symbolic.pretrained.page import pretrained_page
    from toeplens.report.kit.page import write_report
    from toeplens.studies.auditing.inputs import read_text

    texts = {each.stem: read_text(each) for each in text}
    if len(texts) < len(text):
        raise InputError("text must not name two files with the same file name.")
    progress = AuditProgress()
    sizes = {"sequences": sequences, "tokens": tokens, "effect_tokens": effect_tokens, "probe_tokens": probe_tokens}
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, "on_progress": progress, **sizes}

    def on_piece(name: str, at: int, count: int) -> None:
        progress.finish(f"[{at}/{count}] {name}")

    with interruptible(execution) as limits:
        with progress:
            state = study.examine(model, texts, out, **options, on_piece=on_piece, limits=limits)
        tables.print_study(state, write_report(state.directory, pretrained_page(state)), as_json=as_json)
