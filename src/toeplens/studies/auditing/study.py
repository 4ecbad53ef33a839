"""Audit a model: positional and symbolic heads, attention patterns, and ablation effects."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from toeplens.ground import EnvironmentFailure, InputError, choose, invalid
from toeplens.ground.machine import out_of_memory, within
from toeplens.ground.words import listed
from toeplens.sources.huggingface import Change, NoGradient, NoPosition, as_tokens
from toeplens.sources.huggingface.interventions import calls_of
from toeplens.sources.huggingface.load import Dtype, Loaded, open_model
from toeplens.sources.huggingface.model import library, of_libraries, words
from toeplens.studies.auditing.audit import RECORD, Audit, finished, open_audit
from toeplens.studies.auditing.effects import not_silenced, silence
from toeplens.studies.auditing.inputs import (
    SEQUENCES,
    Sequences,
    check_fit,
    inputs_of,
    mask_token_of,
    sequences_of,
    texts_of,
)
from toeplens.studies.auditing.kept import Kept, identity
from toeplens.studies.auditing.measuring import Progress, measure
from toeplens.studies.auditing.own import audit_run, is_run
from toeplens.studies.auditing.padded import measure_padded
from toeplens.studies.auditing.record import NoSuchHead, NoSuchLayer
from toeplens.studies.kit.changes import told
from toeplens.studies.kit.questions import LONGEST, MOST_ASKED, SEEDS, Item, Writer
from toeplens.studies.kit.retrieving import Place, retrieval_of

Silencing = Literal["exact", "position", "bands", "attribution", "none"]
EXAMPLES = 256  # default number of examples of a run's test set
_MOST = 100_000  # maximum of sequences, and of first
_BOUNDS = {
    "sequences": (1, _MOST),
    "max_tokens": (2, LONGEST),
    "seed": (0, SEEDS),
    "first": (1, _MOST),
    "needles": (0, MOST_ASKED),
}
_OF_RUNS = ("layers", "sequences", "effects", "device", "seed")


def audit(
    model: Any,
    data: Any = None,
    *,
    tokenizer: Any = None,
    layers: Sequence[int] | None = None,
    sequences: int | None = None,
    max_tokens: int | None = None,
    effects: Silencing = "exact",
    dtype: Dtype = "auto",
    device: str = "auto",
    pickled: bool = False,
    seed: int = 0,
    first: int | None = None,
    heads: Sequence[int] | None = None,
    needles: int = 0,
    changes: Sequence[Change] = (),
    keep: Path | str | None = None,
    on_progress: Progress | None = None,
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
        layers       layers to measure, as counted by `LayerRecord.layer` (default: all)
        sequences    maximum number of sequences (default: 16; 256 for a run)
        max_tokens   maximum number of tokens per sequence (default: 256; for token ids their full length). A shorter
                     text is one sequence of its own length
        effects      intervention whose effect is measured: ``exact`` ablates each head; ``attribution`` estimates this
                     from gradients, for language models; ``position`` removes the position of each head (rotation and
                     bias); ``bands`` freezes each frequency band of each layer; or ``none``
        dtype, device, pickled  for loading, as in `toeplens.sources.huggingface.load.load_model`
        seed         seed of random tokens, masked tokens and intervals
        first        for ``exact`` and ``position``: only find this many heads with the largest effect; the rest are
                     dropped early (default: measure all)
        heads        for ``exact`` and ``position``: heads of each layer to measure (default: all)
        needles      number of needle texts for measuring retrieval, as long as the sequences. Needs a causal language
                     model and a text
        changes      interventions on the model (`toeplens.sources.huggingface.Change`). Every head is measured on the
                     output of the changed heads before it. Not possible together with effects
        keep         directory of the audit. Finished layers and effects are saved there until
                     `toeplens.studies.auditing.save` writes the audit, so that an interrupted audit can be resumed
        on_progress  called with a description of the current work, the finished amount and the total

    Raises `InputError` for a model that cannot be decomposed and for tokens that do not fit it, and
    `EnvironmentFailure` if memory runs out.
    """
    started = time.monotonic()
    options: dict[str, Any] = {"max_tokens": max_tokens, "first": first, "heads": heads, "needles": needles}
    check_options(effects=effects, sequences=sequences, seed=seed, changes=changes, **options)
    report = on_progress or (lambda what, done, total: None)
    wanted = None if layers is None else frozenset(layers)
    directory = None if keep is None else Path(keep)
    if is_run(model):
        options |= {"changes": changes or None, "dtype": dtype, "pickled": pickled}
        check_run_options(data=data, tokenizer=tokenizer, **options)
        method, count = None if effects == "none" else effects, sequences or EXAMPLES
        return audit_run(model, wanted, count, method, device, seed, directory, report)
    loaded = open_model(model, dtype=dtype, device=device, pickled=pickled)
    if isinstance(data, Mapping) and any(isinstance(x, Tensor) for x in data.values()):
        loaded, data = as_tokens(loaded, data)
    model = loaded.model
    loaded.check_numbers()
    read, tokenizer = sequences_of(loaded, data, tokenizer, sequences or SEQUENCES, max_tokens, seed)
    check_fit(loaded, read)
    if first is not None and read.texts:
        raise InputError(f"first must not be set for several texts, got {first}.")
    if directory is not None:
        _must_be_same(directory, read, changes)
    inputs, mask_token = inputs_of(model, read), mask_token_of(tokenizer)
    some = None if heads is None else frozenset(heads)
    if wanted is not None or some is not None or first is not None or changes:
        calls = calls_of(model, inputs, changes)
        seen = {call.layer for call in calls}
        if calls and wanted is not None and not wanted <= seen:
            raise NoSuchLayer(min(wanted - seen), max(seen))
        if calls:
            _check_heads(some, first, [call.heads for call in calls if wanted is None or call.layer in wanted])
    how = (effects, first, None if some is None else sorted(some))
    asked = needles_of(tokenizer, data, needles, read.tokens.shape[1], seed)
    how = (*how, [item.tokens for item in asked], [repr(change) for change in changes])
    kept = Kept(directory, {} if directory is None else _key(loaded, read, wanted, how, mask_token, seed))
    try:
        scores = scores_of(loaded, asked, kept, partial(report, "needles"))
        if read.there is None:
            measured, whole = measure(loaded, inputs, wanted, kept, report, changes)
        else:
            measured, whole = measure_padded(loaded, inputs, read.there, wanted, kept, report, changes)
        for at, call in enumerate(measured if scores else ()):
            own = (replace(h, retrieval=scores.get((h.layer, h.head))) if h.kind == "self" else h for h in call.heads)
            measured[at] = replace(call, heads=tuple(own))
        changed = not_silenced(measured)
        _check_heads(some, first, [each.layer.heads for each in measured])
        if effects != "none":
            try:
                say = partial(report, "heads")
                changed = silence(
                    model, inputs, measured, effects, mask_token, seed, kept, say, first, some, read.texts
                )
            except (NoGradient, NoPosition):  # the request itself is impossible
                raise
            except InputError as error:
                changed = not_silenced(measured, str(error))
    except InputError:  # the same audit would be refused again
        kept.clear()
        raise
    except EnvironmentFailure:
        raise
    except Exception as error:
        if out_of_memory(error):
            size = " sequences of ".join(map(str, read.tokens.shape))
            raise EnvironmentFailure(
                f"Out of memory on {model.device} with {size} tokens. Lower sequences or max_tokens, use fewer layers "
                "or a smaller dtype, or set effects to none."
            ) from error
        if of_libraries(error):
            raise InputError(f"model: the audit of {type(model).__name__} failed: {words(error)}.") from error
        raise
    count, length = read.tokens.shape
    about = _about(loaded) | {"text": read.origin, "sequences": count, "tokens": length}
    about["input"] = _digest(read)
    more = {"needles": needles, "changes": told(changes), "texts": list(read.texts), "lengths": list(read.lengths)}
    more |= {"unused_bos": read.unused_bos}
    about |= {name: value for name, value in more.items() if value}
    return finished(changed, about, whole=whole, seed=seed, started=started, words=read.words)


def check_options(*, effects: str, heads: Sequence[int] | None, changes: Sequence[Any], **options: Any) -> None:
    """Raise `InputError` for options of `audit` that are invalid for every model or exclude each other."""
    choose("effects", effects, get_args(Silencing))
    for field, (least, most) in _BOUNDS.items():
        within(field, options[field], least, most)
    if heads is not None and not len(heads):
        raise InputError("heads must have at least one entry, got none.")
    for field, given in (("first", options["first"]), ("heads", heads)):
        if given is not None and effects not in ("exact", "position"):
            raise InputError(f"{field} must not be set with effects {effects!r}; use 'exact' or 'position'.")
    if changes and (effects != "none" or options["needles"]):
        field = "needles" if options["needles"] else "effects"
        raise InputError(f"changes and {field} must not both be set.")


def check_run_options(**options: Any) -> None:
    """Raise `InputError` for options that do not apply to runs but are not at their defaults."""
    for name, value in options.items():
        nothing = value is None or (isinstance(value, str | int) and value in ("auto", 0))
        if name not in _OF_RUNS and not nothing:
            raise InputError(f"{name} must not be set for a run. Allowed are {listed(_OF_RUNS)}.")


def _check_heads(heads: frozenset[int] | None, first: int | None, counts: Sequence[int]) -> None:
    """Raise `InputError` for heads that no call has, and for more heads than there are."""
    most = max(counts, default=0)
    if heads is not None and not 0 <= min(heads) <= max(heads) < most:
        raise NoSuchHead(max(heads), most - 1)
    there = sum(count if heads is None else len(heads) for count in counts)
    if first is not None and first > there:
        raise invalid("first", f"be at most {there}, the number of heads", first)


def needles_of(tokenizer: Any, data: Any, count: int, length: int, seed: int) -> list[Item]:
    """``count`` texts of this length with needles at depths from the beginning to the end.

    Raises `InputError` for data other than text.
    """
    if not count:
        return []
    texts = texts_of(data)
    if texts is None:
        raise InputError("needles must not be set without a text.")
    writer = Writer(tokenizer, "\n\n".join(texts.values()), seed)
    return [writer.needle(length, number / max(1, count - 1), field="max_tokens") for number in range(count)]


def scores_of(
    loaded: Loaded, needles: Sequence[Item], kept: Kept, report: Callable[[int, int], None]
) -> dict[Place, float]:
    """The retrieval score of each head; empty without needles. Saved scores are reused."""
    if not needles:
        return {}
    found = kept.get("needles")
    if found is None:
        found = [[one.layer, one.head, one.score] for one in retrieval_of(loaded, needles, report)]
        kept.put("needles", found)
    return {(layer, head): score for layer, head, score in found}


def _must_be_same(directory: Path, read: Sequences, changes: Sequence[Change]) -> None:
    """Raise `InputError` instead of replacing a finished audit with other tokens or other changes."""
    if not (directory / RECORD).is_file():
        return
    about = open_audit(directory).about
    for name, had, now in (
        ("on other tokens", about.get("input"), _digest(read)),
        ("with other changes", about.get("changes") or [], told(changes)),
    ):
        if had is not None and list(had) != list(now):
            raise InputError(
                f"out: {directory} contains a finished audit {name} ({about.get('sequences')} x {about.get('tokens')} "
                f"tokens, {about.get('text') or 'source not recorded'}). Choose an empty or new directory."
            )


def _digest(read: Sequences) -> str:
    """A digest of these sequences."""
    shape = f"{list(read.tokens.shape)} {list(read.lengths)}"
    return hashlib.sha256(shape.encode() + read.tokens.numpy().tobytes()).hexdigest()


def _key(
    loaded: Loaded, read: Sequences, layers: frozenset[int] | None, effects: Any, mask_token: int | None, seed: int
) -> dict[str, Any]:
    """Everything that determines the results of an audit."""
    model = loaded.model
    return {
        "model": identity(model, loaded.name),
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "device": str(model.device),
        "tokens": _digest(read),
        "layers": None if layers is None else sorted(layers),
        "effects": effects,
        "mask_token": mask_token,
        "seed": seed,
        "transformers": library().__version__,
    }


def _about(loaded: Loaded) -> dict[str, Any]:
    """The description of the model."""
    model = loaded.model
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
    }
