"""Commands on pretrained models: audit one or several, compare two audits, probe and study a language model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from toeplens.cli.options import (
    AllowPickle,
    Device,
    Json,
    ModelDtype,
    ModelMemory,
    StudyOut,
    argument,
    option,
    with_options,
)
from toeplens.cli.studies import write_and_print
from toeplens.studies.kit.options import AuditOptions, ProbeSizes
from toeplens.utils import InputError, invalid
from toeplens.utils.execution import ClusterOptions, ExecutionOptions
from toeplens.utils.options import MEASURE
from toeplens.utils.outputs import check_same_model, open_output_dir, write_page


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
    from toeplens.backends.hf.checkpoints import is_local_path
    from toeplens.cli import audit_output, console
    from toeplens.studies.auditing.study import is_run

    if text and tokens:
        raise InputError("tokens and text must not both be set.")
    if len(tokens or ()) > 1:
        raise invalid("tokens", "be set only once", got=f"{len(tokens or ())} files")
    if len(model) == 1:
        for name, value in (("workers", cluster.workers), ("engine", cluster.engine if cluster.on_ray else None)):
            if value is not None:
                raise invalid(name, "not be set for a single model", value)
    for model_name in model:
        if is_run(model_name):
            options.check_run(text=text, tokens=tokens)
        elif not is_local_path(model_name):
            console.echo(f"model: {model_name} is not a local directory; looking it up on the hub.", stderr=True)
    data: Any = None
    if tokens:
        data = tokens[0]
    elif text:
        data = _texts(text)
    if len(model) > 1:
        audit_output.audit_all(model, out, data, options, cluster, as_json=as_json)
    else:
        audit_output.audit_one(model[0], out, data, options, as_json=as_json)


def _texts(files: Sequence[Path], key: Literal["name", "stem"] = "name") -> dict[str, str]:
    """The texts of files, by file name."""
    from toeplens.studies.auditing.inputs import read_text

    texts = {getattr(file, key): read_text(file) for file in files}
    if len(texts) < len(files):
        raise InputError("text must not name two files with the same file name.")
    return texts


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

    pair = [auditing.open_audit(each) for each in (first, second)]
    names = names_of(first, second)
    with open_output_dir(out, "comparison", (report.PAGE,)):
        page = report.comparison_page(pair[0], pair[1], names)
        path = write_page(out / report.PAGE, page.html(), page.command)
    audits = [{"name": name, **each.summary()} for name, each in zip(names, pair, strict=True)]
    console.print_page(path, as_json=as_json, audits=audits)


def names_of(first: Path, second: Path) -> tuple[str, str]:
    """Names of two directories: as many of their last folders as are needed to tell them apart."""
    parts = [each.resolve().parts for each in (first, second)]
    depth = next((n for n in range(1, max(map(len, parts))) if parts[0][-n:] != parts[1][-n:]), 1)
    first_name, second_name = ("/".join(each[-depth:]) for each in parts)
    return first_name, second_name


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
    sizes: ProbeSizes,
    heads: bool = option(True, "Find retrieval heads.", panel=MEASURE, flag="--heads/--no-heads"),
    dtype: ModelDtype = "auto",
    device: Device = "auto",
    memory: ModelMemory = None,
    pickled: AllowPickle = False,
    seed: int = option(0, "Random seed (default: 0).", "N", MEASURE),
    as_json: Json = False,
) -> None:
    """Test a model's recall, copying, counting and order.

    Also reports loss by position. Give --change to compare with interventions.
    """
    from toeplens.backends.hf.load import display_name_of, open_model
    from toeplens.cli import audit_output, console
    from toeplens.cli.progress import ProgressBars
    from toeplens.report import write_report
    from toeplens.studies import probing
    from toeplens.studies.auditing.inputs import read_text, read_tokens
    from toeplens.studies.kit.changes import parse_changes

    changes = parse_changes(change)
    if len(text or ()) > 1:
        raise invalid("text", "be set only once", got=f"{len(text or ())} files")
    if text and tokens is None:
        data = read_text(text[0])
    elif tokens is not None and not text:
        data = read_tokens(tokens)
    else:
        raise InputError("text or tokens must be set, but not both.")
    with open_output_dir(out, "probe", (probing.RECORD,)), ProgressBars() as progress:
        check_same_model(out / probing.RECORD, display_name_of(model), "probe")
        options: dict[str, Any] = {"dtype": dtype, "device": device, "memory": memory, "pickled": pickled}
        loaded = open_model(model, **options, on_progress=progress)
        loaded.check_decoder("a probe")
        record = probing.probe(loaded, data, changes=changes, sizes=sizes, heads=heads, seed=seed, on_progress=progress)
        probing.save_probe(record, out)
        page = write_report(out, record.page())
    if as_json:
        console.print_json({**record.to_dict(), "page": str(page)})
        return
    audit_output.print_probe(record)
    console.echo(f"page: {page}")


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
    from toeplens.cli.progress import ProgressBars, interruptible
    from toeplens.papers.positional_symbolic import pretrained as study

    texts = _texts(text, "stem")
    sizes = {"sequences": sequences, "tokens": tokens, "effect_tokens": effect_tokens, "probe_tokens": probe_tokens}
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, **sizes}
    with interruptible(execution) as execution:
        with ProgressBars() as progress:
            options["on_part"] = lambda name, index, count: progress.finish(f"[{index}/{count}] {name}")
            state = study.examine(model, texts, out, **options, execution=execution, on_progress=progress)
        write_and_print(state, as_json=as_json)
