"""An audit: which heads of a model are positional, which symbolic, what they look at, and what is lost without them."""

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
from toeplens.sources.huggingface.beforehand import calls_of
from toeplens.sources.huggingface.loading import Dtype, Loaded, open_model
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
EXAMPLES = 256  # of a run's test set, unless told otherwise
_MOST = 100_000  # sequences, and heads that are wanted
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
    """Audit every attention head of a transformers model: its numbers are `toeplens.studies.auditing.COLUMNS`.

    Each attention call is taken apart and proved on the audited tokens, and the whole pass against a plain one; a model
    that is not understood is refused, by the name of the module. Layers are gone through one by one, with some queries
    at a time: memory grows with the tokens, not with their square, unless the model itself forms a table of all
    queries by all keys.

    Arguments
        model        a `transformers.PreTrainedModel`; a directory that holds one, or its name on the hub; or a finished
                     `toeplens.training.Run` or its directory, which is audited on examples of its test set
        data         token ids [B, N] or [N] (a tensor, an array, lists, which may be of different lengths), or a text
                     or several, in a list or by name; or what ``forward`` takes, tensors by name (`as_tokens` of the
                     sources); random tokens whose second half repeats the first unless given.
                     An encoder-decoder reads the same on both sides, the decoder's one place later. Sequences are
                     shared out among texts as evenly as these allow, and intervals are then over texts
        tokenizer    of a text; the one that lies with the model unless given
        layers       which layers are measured, as `LayerRecord.layer` counts them; all unless given
        sequences    at most so many; 16 unless given, of a run's examples 256
        max_tokens   of a sequence, at most; 256 unless given, of tokens as many as they have. A text that is shorter is
                     a sequence of its own length
        effects      what is done to each head: it is silenced (``exact``; ``attribution`` is an estimate of that, for
                     language models), position is taken from it, its rotation and its bias (``position``), or ``none``.
                     Or to each layer: ``bands`` of its frequencies stand still, one after the other
        dtype, device, pickled  of a model that is loaded, as in `toeplens.sources.huggingface.loading.load_model`
        seed         of random tokens, of masked ones, and of intervals
        first        how many heads' effects are wanted, where each is silenced exactly or loses its position: those
                     that cannot be among them are left out after some of the sequences; all unless given
        heads        which heads of each layer have effects, where each is silenced exactly or loses its position; all
                     unless given
        needles      how many texts with a number in them the heads' retrieval is measured on, as long as the sequences:
                     of a model that predicts the next token, and a text
        changes      of the model (`toeplens.sources.huggingface.Change`), without effects: every head is measured as it
                     reads what the changed heads before it put out. To be laid beside the audit of the intact model
        keep         the audit's directory: finished layers and effects are kept in it, and the same audit goes on with
                     them, until `toeplens.studies.auditing.save` has written it whole
        on_progress  is called with what is being done, how much of it is, and all

    Raises `InputError` for a model that is not understood and for tokens that do not fit it, `EnvironmentFailure` where
    memory runs out.
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
            except (NoGradient, NoPosition):  # what was asked for cannot be: nothing the model is to blame for
                raise
            except InputError as error:
                changed = not_silenced(measured, str(error))
    except InputError:  # and the same audit would be refused again
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
    """Refuse options of `audit` that go with no model, or not with one another."""
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
    """Refuse options that a run has no use for: what is given of them is not what they are without a word."""
    for name, value in options.items():
        nothing = value is None or (isinstance(value, str | int) and value in ("auto", 0))
        if name not in _OF_RUNS and not nothing:
            raise InputError(f"{name} must not be set for a run. Allowed are {listed(_OF_RUNS)}.")


def _check_heads(heads: frozenset[int] | None, first: int | None, counts: Sequence[int]) -> None:
    """Refuse heads that none of the calls has, and more heads than they have."""
    most = max(counts, default=0)
    if heads is not None and not 0 <= min(heads) <= max(heads) < most:
        raise NoSuchHead(max(heads), most - 1)
    there = sum(count if heads is None else len(heads) for count in counts)
    if first is not None and first > there:
        raise invalid("first", f"be at most {there}, the number of heads", first)


def needles_of(tokenizer: Any, data: Any, count: int, length: int, seed: int) -> list[Item]:
    """So many texts of this length with a needle in them, from their beginning to their end.

    Raises `InputError` for data that are no text.
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
    """The retrieval score of each head, of none without needles; what is kept is not measured again."""
    if not needles:
        return {}
    found = kept.get("needles")
    if found is None:
        found = [[one.layer, one.head, one.score] for one in retrieval_of(loaded, needles, report)]
        kept.put("needles", found)
    return {(layer, head): score for layer, head, score in found}


def _must_be_same(directory: Path, read: Sequences, changes: Sequence[Change]) -> None:
    """Refuse to replace a finished audit of other tokens, or of the model changed in another way."""
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
    """What tells these sequences from others."""
    shape = f"{list(read.tokens.shape)} {list(read.lengths)}"
    return hashlib.sha256(shape.encode() + read.tokens.numpy().tobytes()).hexdigest()


def _key(
    loaded: Loaded, read: Sequences, layers: frozenset[int] | None, effects: Any, mask_token: int | None, seed: int
) -> dict[str, Any]:
    """All that decides what an audit finds."""
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
    """What is said of the model."""
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
