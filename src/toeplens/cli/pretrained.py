"""The command that carries out the study of a pretrained language model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toeplens.cli.options import Budget, Json, ModelDevice, ModelDtype, StudyOut, path
from toeplens.ground import InputError


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
        raise InputError("text: two files have the same name; each must have its own.")
    limits, progress = limits_of(time_budget, "auto", "auto"), PieceProgress()
    sizes = {"sequences": sequences, "tokens": tokens, "effect_tokens": effect_tokens, "probe_tokens": probe_tokens}
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, **sizes}
    told = {"on_piece": progress.finished, "on_progress": progress}

    def show(state: study.Pretrained) -> None:
        tables.print_study(state, write_pretrained(state), as_json=as_json)

    carry_out(partial(study.examine, model, texts, out, **options, **told), progress, limits, show)
