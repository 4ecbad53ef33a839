"""Audit a model: positional and symbolic heads, attention patterns, and ablation effects.

The flow: load the model, read its input (`inputs`), measure every attention call in one pass (`measuring`), measure the
effects of its heads (`effects`), and put the record together (`result`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from toeplens.ground import InputError, invalid
from toeplens.ground.outputs import entered, must_be_of
from toeplens.sources.huggingface import Change, NoGradient, NoPosition, as_tokens
from toeplens.sources.huggingface.interventions import NotThere, calls_of
from toeplens.sources.huggingface.load import Loaded, called_of, open_model
from toeplens.sources.huggingface.model import library
from toeplens.studies.auditing.effects import effects_of, without_effects
from toeplens.studies.auditing.inputs import Progress, Sequences, Work, inputs_of, read_tokens, sequences_of, texts_of
from toeplens.studies.auditing.measuring import measure
from toeplens.studies.auditing.record import PARTS, AuditRecord, Kept, Measured, identity
from toeplens.studies.auditing.result import RECORD, Audit, finished, open_audit, save
from toeplens.studies.kit.changes import changes_of, failures_of, told
from toeplens.studies.kit.options import AuditOptions, taking
from toeplens.studies.kit.questions import Item, Writer, retrieval_of

Data = Mapping[str, str] | Path | None  # texts by name, or a file of token ids
Write = Callable[[Path, Any], Path]  # writes a page to a directory


def is_run(model: Any) -> bool:
    """Whether the argument is a run or a run's directory."""
    if isinstance(model, str | Path):
        try:
            return (Path(model) / "spec.json").is_file()
        except OSError:  # not a valid file name
            return False
    return type(model).__module__ == "toeplens.training.run"


@taking(AuditOptions)
def audit(
    model: Any,
    data: Any = None,
    *,
    tokenizer: Any = None,
    keep: Path | str | None = None,
    on_progress: Progress | None = None,
    **options: Any,
) -> Audit:
    """Audit every attention head of a transformers model; the measures are `toeplens.studies.auditing.COLUMNS`.

    Each attention call is decomposed and proved on the audited tokens, and the captured forward pass is compared with a
    plain one. A model that cannot be decomposed is refused, with the name of the module. Memory grows linearly with the
    number of tokens, unless the model itself forms a full table of queries by keys.

    Arguments
        model        a `transformers.PreTrainedModel`; a directory that holds one, or its name on the hub; or a finished
                     `toeplens.training.Run` or its directory, which is audited on examples of its test set
        data         token ids [B, N] or [N] (tensor, array or lists, which may differ in length); one or several texts,
                     as a string, a list or by name; or tensors by name, as ``forward`` takes them (`as_tokens`).
                     (default: random tokens whose second half repeats the first.) The decoder of an encoder-decoder
                     reads the encoder's tokens shifted by one. Several texts contribute equally many sequences if
                     possible, and intervals are then over texts
        tokenizer    tokenizer for texts (default: the model's own)
        keep         directory of the audit. Finished layers and effects are saved there until
                     `toeplens.studies.auditing.save` writes the audit, so that an interrupted audit can be resumed
        on_progress  called with a description of the current work, the finished amount and the total
        options      the fields of `toeplens.studies.kit.options.AuditOptions`

    Raises `InputError` for a model that cannot be decomposed and for tokens that do not fit it, and
    `EnvironmentFailure` if memory runs out.
    """
    report = on_progress or (lambda what, done, total: None)
    return audit_with(AuditOptions(**options), model, data, tokenizer, None if keep is None else Path(keep), report)


def audit_with(
    options: AuditOptions, model: Any, data: Any, tokenizer: Any, directory: Path | None, report: Progress
) -> Audit:
    """`audit` with these options."""
    started = time.monotonic()
    if is_run(model):
        from toeplens.studies.auditing.decoder import audit_run

        options.check_run(data=data, tokenizer=tokenizer)
        return audit_run(model, options, directory, report)
    loaded = open_model(model, dtype=options.dtype, device=options.device, pickled=options.pickled)
    changes = changes_of(loaded, options.changes)
    if isinstance(data, Mapping) and any(isinstance(x, Tensor) for x in data.values()):
        loaded, data = as_tokens(loaded, data)
    loaded.check_numbers()
    read, tokenizer = sequences_of(loaded, data, tokenizer, options)
    if options.first is not None and read.texts:
        raise InputError(f"first must not be set for several texts, got {options.first}.")
    about = _about(loaded, read, options, changes)
    if directory is not None:
        _must_be_same(directory, about)
    inputs, mask_token = inputs_of(loaded.model, read), getattr(tokenizer, "mask_token_id", None)
    mask_token = mask_token if isinstance(mask_token, int) else None
    layers = options.layers
    if changes or not (layers is options.heads is options.first is None):  # a short pass knows what the model has
        calls = calls_of(loaded.model, inputs, changes)
        seen = {call.layer for call in calls}
        if calls and layers is not None and not {*layers} <= seen:
            raise NotThere("layers", min({*layers} - seen), max(seen) + 1)
        if calls:
            _check_heads(options, [call.heads for call in calls if layers is None or call.layer in layers])
    needles: list[Item] = []
    if options.needles:
        texts, count = texts_of(data), options.needles
        if texts is None:
            raise InputError("needles must not be set without a text.")
        writer, length = Writer(tokenizer, "\n\n".join(texts.values()), options.seed), read.tokens.shape[1]
        depths = (number / max(1, count - 1) for number in range(count))  # from the beginning to the end
        needles = [writer.needle(length, depth, field="max_tokens") for depth in depths]
    key: dict[str, Any] = {}
    if directory is not None:  # everything that determines the results
        key = {name: about[name] for name in ("class", "dtype", "device", "input", "transformers")}
        key |= {name: getattr(options, name) for name in ("layers", "heads", "effects", "first", "seed")}
        key |= {"model": identity(loaded.model, loaded.name), "needles": [item.tokens for item in needles]}
        key |= {"changes": [repr(change) for change in changes], "mask_token": mask_token}
    work = Work(loaded, options, read, inputs, mask_token, changes, Kept(directory, key), report)
    size = " sequences of ".join(map(str, read.tokens.shape))
    lower = "Lower sequences or max_tokens, use fewer layers or a smaller dtype, or set effects to none."
    with failures_of(loaded, "audit", f" with {size} tokens. {lower}"):
        try:
            scores = _retrieval(work, needles) if needles else {}
            measured, whole = measure(work)
            for at, each in enumerate(measured):
                if scores and each.layer.kind == "self":
                    heads = (replace(head, retrieval=scores.get((head.layer, head.head))) for head in each.heads)
                    measured[at] = replace(each, heads=tuple(heads))
            _check_heads(options, [each.layer.heads for each in measured])
            effects = without_effects(measured) if options.effects == "none" else _effects(work, measured)
        except InputError:  # the same audit would be refused again
            work.kept.clear()
            raise
    return finished(effects, about, seed=options.seed, started=started, whole=whole, words=read.words)


def audit_in(
    directory: Path,
    model: str,
    data: Data,
    options: AuditOptions,
    write: Write | None = None,
    *,
    digest: str | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> Audit:
    """Audit a model and write its tables, its record and, with ``write``, its page to its directory, which is locked.

    Finished parts are saved there, and an interrupted audit is resumed. Error messages count layers and heads from 1.
    The ``digest`` of the request is recorded.
    """
    with entered(directory, "audit", (RECORD, PARTS)):
        if not is_run(model):
            must_be_of(directory / RECORD, called_of(model), "audit")
        read = read_tokens(data) if isinstance(data, Path) else data
        try:
            found = audit_with(options, model, read, None, directory, on_progress)
        except NotThere as error:
            raise error.for_people() from None
        more = {"text": data.name if isinstance(data, Path) else None, "request": digest}
        found = replace(found, about=found.about | {name: value for name, value in more.items() if value is not None})
        if write is not None:
            write(directory, found.page())
        save(found, directory)
    return found


def _check_heads(options: AuditOptions, counts: Sequence[int]) -> None:
    """Raise `InputError` for heads that no call has, and for more heads than there are."""
    most, heads = max(counts, default=0), options.heads
    if heads is not None and not 0 <= min(heads) <= max(heads) < most:
        raise NotThere("heads", max(heads), most)
    there = sum(count if heads is None else len({*heads}) for count in counts)
    if options.first is not None and options.first > there:
        raise invalid("first", f"be at most {there}, the number of heads", options.first)


def _effects(work: Work, measured: Sequence[Measured]) -> AuditRecord:
    """The effects, or why there are none."""
    try:
        return effects_of(work, measured)
    except InputError as error:
        if isinstance(error, NoGradient | NoPosition):  # the request itself is impossible
            raise
        return without_effects(measured, no_effects=str(error))


def _retrieval(work: Work, needles: Sequence[Item]) -> dict[tuple[int, int], float]:
    """The retrieval score of each layer's heads. Saved scores are reused."""
    found = work.kept.get("needles")
    if found is None:
        retrieved = retrieval_of(work.loaded, needles, partial(work.report, "needles"))
        found = [[one.layer, one.head, one.score] for one in retrieved]
        work.kept.put("needles", found)
    return {(layer, head): score for layer, head, score in found}


def _must_be_same(directory: Path, about: Mapping[str, Any]) -> None:
    """Raise `InputError` instead of replacing a finished audit with other tokens or other changes."""
    if not (directory / RECORD).is_file():
        return
    had = open_audit(directory).about
    tokens = had.get("input") not in (None, about["input"])
    if tokens or (had.get("changes") or []) != about.get("changes", []):
        size, text = f"{had.get('sequences')} x {had.get('tokens')} tokens", had.get("text") or "source not recorded"
        raise InputError(
            f"out: {directory} contains a finished audit {'on other tokens' if tokens else 'with other changes'} "
            f"({size}, {text}). Choose an empty or new directory."
        )


def _about(loaded: Loaded, read: Sequences, options: AuditOptions, changes: Sequence[Change]) -> dict[str, Any]:
    """The description of the model and of its input."""
    model, (count, length) = loaded.model, read.tokens.shape
    digest = hashlib.sha256(f"{list(read.tokens.shape)} {list(read.lengths)}".encode() + read.tokens.numpy().tobytes())
    more = {"needles": options.needles, "changes": told(changes), "texts": list(read.texts)}
    more |= {"lengths": list(read.lengths), "unused_bos": read.unused_bos}
    return {
        "model": loaded.called,
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "random_weights": list(loaded.missing),
        "unused_weights": list(loaded.left_over),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": None if loaded.quantised is None else str(loaded.quantised),
        "device": str(model.device),
        "transformers": library().__version__,
        "text": read.origin,
        "sequences": count,
        "tokens": length,
        "input": digest.hexdigest(),
        **{name: value for name, value in more.items() if value},
    }
