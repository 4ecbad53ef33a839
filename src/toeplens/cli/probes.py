"""Commands that ask a language model what it can do, intact and changed, and examine it as a study."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toeplens.cli.options import Budget, Json, ModelDevice, ModelDtype, Pickled, StudyOut, path
from toeplens.ground import InputError, invalid
from toeplens.ground.places import entered, must_be_of


def probe(
    model: Annotated[str, typer.Argument(help="A transformers model's directory or name on the hub, or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="Directory of the probe: its page and record.", parser=path)],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file (UTF-8; of .jsonl and .parquet the field text) that texts are taken from.", parser=path
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --text, a file of token ids (.npy or .json), for a model without a tokenizer. Only the "
            "loss by position and copying are measured.",
            parser=path,
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="What is done to its attention, e.g. 'layers=3-5 heads=1,4 output=zero' or 'layers=all still=1-8'; "
            "give it again for more. Layers, heads, groups and pairs count from 1."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the texts.")] = "256,512,1024",
    depths: Annotated[str, typer.Option(help="Depths of the needles, 0 to 1.")] = "0,0.25,0.5,0.75,1",
    repeats: Annotated[int, typer.Option(help="Needles of each length and depth.")] = 2,
    sequences: Annotated[int, typer.Option(help="Texts whose loss is taken, and copies of each length.")] = 8,
    lists: Annotated[int, typer.Option(help="Questions about lists, of each kind.")] = 24,
    heads: Annotated[bool, typer.Option(help="Look at the heads where the intact model answers.")] = True,
    dtype: ModelDtype = "auto",
    device: ModelDevice = "auto",
    pickled: Pickled = False,
    seed: Annotated[int, typer.Option(help="Seed of texts, needles and questions.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask a language model what it can do: loss by position, needles, copying, counting, order; intact and changed."""
    from toeplens.cli import audit_output, console
    from toeplens.report import write_probe
    from toeplens.sources.huggingface.beforehand import check_decoder
    from toeplens.sources.huggingface.loading import called_of, open_model
    from toeplens.studies import auditing, probing

    asked = probing.Asked(
        tuple(int(each) for each in _numbers("lengths", lengths, whole=True)),
        tuple(_numbers("depths", depths)),
        repeats,
        sequences,
        lists,
    )
    wishes = [probing.read_change(each) for each in change or ()]
    if len(text or ()) > 1:
        raise invalid("text", "be set only once", got=f"{len(text or ())} files")
    if text and tokens is None:
        data = auditing.read_text(text[0])
    elif tokens is not None and not text:
        data = auditing.read_tokens(tokens)
    else:
        raise InputError("text or tokens must be set, but not both.")
    with entered(out, "probe", (probing.RECORD,)), audit_output.AuditProgress() as progress:
        must_be_of(out / probing.RECORD, called_of(model), "probe")
        loaded = open_model(model, dtype=dtype, device=device, pickled=pickled)  # type: ignore[arg-type]
        check_decoder(loaded, "a probe")
        found = probing.probe(
            loaded,
            data,
            changes=probing.changes_of(loaded, wishes),
            asked=asked,
            heads=heads,
            seed=seed,
            on_progress=progress,
        )
        probing.save_probe(found, out)
        page = write_probe(found, out)
    if as_json:
        console.print_json({**found.to_dict(), "page": str(page)})
        return
    console.out.print(audit_output.probe_table(found))
    console.say(f"page: {page}")


def _numbers(field: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        return [int(each) if whole else float(each) for each in text.split(",")]
    except ValueError:
        kind = "whole numbers" if whole else "numbers"
        raise invalid(field, f"be {kind} with commas between them", text) from None


def pretrained(
    model: Annotated[str, typer.Argument(help="A transformers model's directory or name on the hub, or a GGUF file.")],
    text: Annotated[
        list[Path],
        typer.Option(
            help="A text file (UTF-8; of .jsonl and .parquet the field text); give it again for more.", parser=path
        ),
    ],
    out: StudyOut,
    sequences: Annotated[int, typer.Option(help="Sequences from each text.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence whose heads are measured.")] = 1024,
    effect_tokens: Annotated[int, typer.Option(help="Of those, for what is silenced or stopped one by one.")] = 256,
    probe_tokens: Annotated[int, typer.Option(help="Tokens of texts with needles, and of copies.")] = 512,
    dtype: ModelDtype = "auto",
    device: ModelDevice = "auto",
    seed: Annotated[int, typer.Option(help="Seed of places in the texts, of random weights and of questions.")] = 42,
    time_budget: Budget = None,
    as_json: Json = False,
) -> None:
    """Examine a pretrained language model: heads, frequencies, retrieval, beside models that know nothing; claims."""
    from toeplens.cli import tables
    from toeplens.cli.audit_output import PieceProgress
    from toeplens.cli.progress import carry_out, limits_of
    from toeplens.papers.positional_symbolic import pretrained as study
    from toeplens.papers.positional_symbolic.pretrained.page import write_pretrained
    from toeplens.studies import auditing

    texts = {each.stem: auditing.read_text(each) for each in text}
    if len(texts) < len(text):
        raise InputError("text must not name two files with the same file name.")
    limits, progress = limits_of(time_budget, "auto", "auto"), PieceProgress()
    sizes = {"sequences": sequences, "tokens": tokens, "effect_tokens": effect_tokens, "probe_tokens": probe_tokens}
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, **sizes}
    told = {"on_piece": progress.finished, "on_progress": progress}

    def show(state: study.Pretrained) -> None:
        tables.print_study(state, write_pretrained(state), as_json=as_json)

    carry_out(partial(study.examine, model, texts, out, **options, **told), progress, limits, show)
