"""Commands that probe a language model, and study a pretrained one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.cli.options import Device, Json, ModelDtype, Pickled, StudyOut, argument, option, with_options
from toeplens.ground import InputError, invalid
from toeplens.ground.execution import ExecutionOptions
from toeplens.ground.options import MEASURE
from toeplens.ground.places import entered, must_be_of
from toeplens.studies.kit.options import Asked


@with_options()
def probe(
    model: str = argument(..., "Hugging Face model or GGUF file."),
    out: Path = option(..., "Output directory.", "PATH"),
    text: list[Path] | None = option(None, "Text file to read (UTF-8, .jsonl or .parquet).", "FILE"),
    tokens: Path | None = option(None, "Token ids instead; no needles or lists.", "FILE"),
    change: list[str] | None = option(
        None, "Intervention, e.g. 'layers=3-5 heads=1 output=zero'. Repeatable.", "CHANGE"
    ),
    *,
    asked: Asked,
    heads: bool = option(True, "Find retrieval heads.", panel=MEASURE, flag="--heads/--no-heads"),
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    pickled: Pickled = False,
    seed: int = option(0, "Random seed (default: 0).", "N", MEASURE),
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
    *,
    model: str = argument(..., "Hugging Face model or GGUF file."),
    text: list[Path] = option(..., "Text file to read (UTF-8, .jsonl or .parquet); repeatable.", "FILE"),
    out: StudyOut,
    sequences: int = option(2, "Sequences per text (default: 2).", "N", MEASURE),
    tokens: int = option(1024, "Tokens per sequence (default: 1024).", "N", MEASURE),
    effect_tokens: int = option(256, "Tokens for ablation (default: 256).", "N", MEASURE),
    probe_tokens: int = option(512, "Tokens per needle text (default: 512).", "N", MEASURE),
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    seed: int = option(42, "Random seed (default: 42).", "N", MEASURE),
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
    from toeplens.papers.positional_symbolic.pretrained.page import write_pretrained
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
        tables.print_study(state, write_pretrained(state), as_json=as_json)
