"""Commands on pretrained models: audit one or several, compare two audits, probe and study a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toeplens.cli.options import Device, Json, ModelDtype, Pickled, StudyOut, argument, option, with_options
from toeplens.ground import InputError, invalid
from toeplens.ground.execution import ClusterOptions, ExecutionOptions
from toeplens.ground.options import MEASURE
from toeplens.ground.outputs import entered, must_be_of
from toeplens.studies.kit.options import Asked, AuditOptions


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
    from toeplens.report import write_report
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
        page = write_report(out, found.page())
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
    from toeplens.report import write_report
    from toeplens.studies.auditing.inputs import read_text

    texts = {each.stem: read_text(each) for each in text}
    if len(texts) < len(text):
        raise InputError("text must not name two files with the same file name.")
    progress = AuditProgress()
    sizes = {"sequences": sequences, "tokens": tokens, "effect_tokens": effect_tokens, "probe_tokens": probe_tokens}
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, "on_progress": progress, **sizes}
    options["on_piece"] = lambda name, at, count: progress.finish(f"[{at}/{count}] {name}")
    with interruptible(execution) as limits:
        with progress:
            state = study.examine(model, texts, out, **options, limits=limits)
        tables.print_study(state, write_report(state.directory, state.page()), as_json=as_json)
