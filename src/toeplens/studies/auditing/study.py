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

from toeplens.backends.hf import Change, NoGradient, NoPosition, as_tokens
from toeplens.backends.hf.interventions import InvalidTarget, find_calls
from toeplens.backends.hf.load import LoadedModel, display_name_of, open_model
from toeplens.backends.hf.model import device_of, import_transformers
from toeplens.encodings.cpu_products import fast_products
from toeplens.studies.auditing.effects import effects_of, without_effects
from toeplens.studies.auditing.estimate import LONG, estimate_audit
from toeplens.studies.auditing.inputs import (
    AuditContext,
    Progress,
    Sequences,
    expected_tokens,
    inputs_of,
    read_tokens,
    sequences_of,
    texts_of,
    tokens_by_name,
)
from toeplens.studies.auditing.measuring import measure
from toeplens.studies.auditing.record import PARTS, Audit, AuditCache, CallRecords, model_identity
from toeplens.studies.auditing.result import RECORD, finish_audit, open_audit, save_audit
from toeplens.studies.kit.changes import changes_text, report_failures, resolve_changes
from toeplens.studies.kit.options import AuditOptions, with_options
from toeplens.studies.kit.probe_items import ItemWriter, ProbeItem, measure_retrieval
from toeplens.utils import InputError, invalid
from toeplens.utils.outputs import check_same_model, open_output_dir

Data = Mapping[str, str] | Path | None  # texts by name, or a file of token ids
WritePage = Callable[[Path, Any], Path]  # writes a page to a directory


def is_run(model: Any) -> bool:
    """Whether the argument is a run or a run's directory."""
    if isinstance(model, str | Path):
        try:
            return (Path(model) / "spec.json").is_file()
        except OSError:  # not a valid file name
            return False
    return type(model).__module__ == "toeplens.training.run"


@with_options(AuditOptions)
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
                     as a string, a list or by name; the output of a tokenizer, with ``input_ids``; or other tensors by
                     name, as ``forward`` takes them (`as_tokens`). (default: random tokens whose second half repeats
                     the first.) The decoder of an encoder-decoder reads the encoder's tokens shifted by one. Several
                     texts contribute equally many sequences if possible, and intervals are then over texts
        tokenizer    tokenizer for texts (default: the model's own)
        keep         directory of the audit. Finished layers and effects are saved there until
                     `toeplens.studies.auditing.save_audit` writes the audit, so an interrupted audit can be resumed
        on_progress  called with a description of the current work, the finished amount and the total
        options      the fields of `toeplens.studies.kit.options.AuditOptions`

    Raises `InputError` for a model that cannot be decomposed and for tokens that do not fit it, and
    `EnvironmentFailure` if memory runs out.
    """
    report = on_progress or (lambda what, done, total: None)
    return audit_with(AuditOptions(**options), model, data, tokenizer, None if keep is None else Path(keep), report)


@fast_products()
def audit_with(
    options: AuditOptions,
    model: Any,
    data: Any,
    tokenizer: Any,
    directory: Path | None,
    report: Progress,
    on_estimate: Callable[[str], None] = lambda line: None,
) -> Audit:
    """`audit` with these options; ``on_estimate`` is called before a long one with the memory and time it will need."""
    started = time.monotonic()
    if is_run(model):
        from toeplens.studies.auditing.runs import audit_run

        options.check_run(data=data, tokenizer=tokenizer)
        return audit_run(model, options, directory, report)
    if isinstance(data, Mapping) and not isinstance(data.get("input_ids"), str | None):
        data = tokens_by_name(data)
    loading = {name: getattr(options, name) for name in ("dtype", "device", "memory", "pickled")}
    loaded = open_model(model, **loading, tokens=expected_tokens(data, options), on_progress=report)
    changes = resolve_changes(loaded, options.changes)
    if isinstance(data, Mapping) and any(isinstance(x, Tensor) for x in data.values()):
        loaded, data = as_tokens(loaded, data)
    loaded.check_finite()
    batch, tokenizer = sequences_of(loaded, data, tokenizer, options)
    if options.first is not None and batch.texts:
        raise InputError(f"first must not be set for several texts, got {options.first}.")
    about = _describe(loaded, batch, options, changes)
    if directory is not None:
        _check_same_input(directory, about)
    inputs, mask_token = inputs_of(loaded.model, batch), getattr(tokenizer, "mask_token_id", None)
    mask_token = mask_token if isinstance(mask_token, int) else None
    layers = options.layers
    if changes or not (layers is options.heads is options.first is None):  # a short pass knows what the model has
        calls = find_calls(loaded.model, inputs, changes)
        present = {call.layer for call in calls}
        if calls and layers is not None and not {*layers} <= present:
            raise InvalidTarget("layers", min({*layers} - present), max(present) + 1)
        if calls:
            _check_heads(options, [call.heads for call in calls if layers is None or call.layer in layers])
    needles: list[ProbeItem] = []
    if options.needles:
        texts, count = texts_of(data), options.needles
        if texts is None:
            raise InputError("needles must not be set without a text.")
        writer, length = ItemWriter(tokenizer, "\n\n".join(texts.values()), options.seed), batch.tokens.shape[1]
        depths = (number / max(1, count - 1) for number in range(count))  # from the beginning to the end
        needles = [writer.needle_item(length, depth, field="max_tokens") for depth in depths]
    key: dict[str, Any] = {}
    if directory is not None:  # everything that determines the results
        key = {name: about[name] for name in ("class", "dtype", "device", "input", "transformers")}
        key |= {name: getattr(options, name) for name in ("layers", "heads", "effects", "first", "seed")}
        key |= {"model": model_identity(loaded.model, loaded.name), "needles": [item.tokens for item in needles]}
        key |= {"changes": [repr(change) for change in changes], "mask_token": mask_token}
    work = AuditContext(loaded, options, batch, inputs, mask_token, changes, AuditCache(directory, key), report)
    if (estimate := estimate_audit(work)) is not None and (estimate.seconds > LONG or estimate.on_disk):
        on_estimate(f"{loaded.display_name}: {estimate}")
    size = " sequences of ".join(map(str, batch.tokens.shape))
    advice = "Lower sequences, max_tokens or memory, use fewer layers or a smaller dtype, or set effects to none."
    with report_failures(loaded, "audit", f" with {size} tokens. {advice}"):
        try:
            scores = _retrieval_scores(work, needles) if needles else {}
            measured, diff = measure(work)
            for index, record in enumerate(measured):
                if scores and record.layer.kind == "self":
                    heads = (replace(head, retrieval=scores.get((head.layer, head.head))) for head in record.heads)
                    measured[index] = replace(record, heads=tuple(heads))
            _check_heads(options, [record.layer.heads for record in measured])
            effects = without_effects(measured) if options.effects == "none" else _measure_effects(work, measured)
        except InputError:  # the same audit would be refused again
            work.cache.clear()
            raise
    return finish_audit(effects, about, seed=options.seed, started=started, max_difference=diff, words=batch.words)


def audit_in(
    directory: Path,
    model: str,
    data: Data,
    options: AuditOptions,
    write: WritePage | None = None,
    *,
    digest: str | None = None,
    on_progress: Progress = lambda what, done, total: None,
    on_estimate: Callable[[str], None] = lambda line: None,
) -> Audit:
    """Audit a model and write its tables, its record and, with ``write``, its page to its directory, which is locked.

    Finished parts are saved there, and an interrupted audit is resumed. Error messages count layers and heads from 1.
    The ``digest`` of the request is recorded; ``on_estimate`` is as for `audit_with`.
    """
    with open_output_dir(directory, "audit", (RECORD, PARTS)):
        if not is_run(model):
            check_same_model(directory / RECORD, display_name_of(model), "audit")
        tokens = read_tokens(data) if isinstance(data, Path) else data
        try:
            new = audit_with(options, model, tokens, None, directory, on_progress, on_estimate)
        except InvalidTarget as error:
            raise error.counted_from_one() from None
        more = {"text": data.name if isinstance(data, Path) else None, "request": digest}
        new = replace(new, about=new.about | {name: value for name, value in more.items() if value is not None})
        if write is not None:
            write(directory, new.page())
        save_audit(new, directory)
    return new


def _check_heads(options: AuditOptions, counts: Sequence[int]) -> None:
    """Raise `InputError` for heads that no call has, and for more heads than there are."""
    max_heads, heads = max(counts, default=0), options.heads
    if missing := [head for head in heads or () if not 0 <= head < max_heads]:
        raise InvalidTarget("heads", missing[0], max_heads)
    num_heads = sum(count if heads is None else len({*heads}) for count in counts)
    if options.first is not None and options.first > num_heads:
        raise invalid("first", f"be at most {num_heads}, the number of heads", options.first)


def _measure_effects(work: AuditContext, measured: Sequence[CallRecords]) -> Audit:
    """The effects, or why there are none."""
    try:
        return effects_of(work, measured)
    except InputError as error:
        if isinstance(error, NoGradient | NoPosition):  # the request itself is impossible
            raise
        return without_effects(measured, no_effects=str(error))


def _retrieval_scores(work: AuditContext, needles: Sequence[ProbeItem]) -> dict[tuple[int, int], float]:
    """The retrieval score of each layer's heads. Saved scores are reused."""
    rows = work.cache.get("needles")
    if rows is None:
        retrieved = measure_retrieval(work.loaded, needles, partial(work.report, "needles"))
        rows = [[one.layer, one.head, one.score] for one in retrieved]
        work.cache.put("needles", rows)
    return {(layer, head): score for layer, head, score in rows}


def _check_same_input(directory: Path, about: Mapping[str, Any]) -> None:
    """Raise `InputError` instead of replacing a finished audit with other tokens or other changes."""
    if not (directory / RECORD).is_file():
        return
    old = open_audit(directory).about
    tokens = old.get("input") not in (None, about["input"])
    if tokens or (old.get("changes") or []) != about.get("changes", []):
        size, text = f"{old.get('sequences')} x {old.get('tokens')} tokens", old.get("text") or "source not recorded"
        raise InputError(
            f"out: {directory} contains a finished audit {'on other tokens' if tokens else 'with other changes'} "
            f"({size}, {text}). Choose an empty or new directory."
        )


def _describe(loaded: LoadedModel, data: Sequences, options: AuditOptions, changes: Sequence[Change]) -> dict[str, Any]:
    """The description of the model and of its input."""
    model, (count, length) = loaded.model, data.tokens.shape
    digest = hashlib.sha256(f"{list(data.tokens.shape)} {list(data.lengths)}".encode() + data.tokens.numpy().tobytes())
    extra = {"needles": options.needles, "changes": changes_text(changes), "texts": list(data.texts)}
    extra |= {"lengths": list(data.lengths), "unused_bos": data.unused_bos}
    return {
        "model": loaded.display_name,
        "class": type(model).__name__,
        "model_type": model.config.model_type,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "random_weights": list(loaded.missing),
        "unused_weights": list(loaded.unused),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": None if loaded.quantised is None else str(loaded.quantised),
        "device": str(device_of(model)),
        "transformers": import_transformers().__version__,
        "text": data.origin,
        "sequences": count,
        "tokens": length,
        "input": digest.hexdigest(),
        **{name: value for name, value in extra.items() if value},
    }
