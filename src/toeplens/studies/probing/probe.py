"""Probe a language model: its behaviours, intact and with changed attention, and the record of the results."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int

from toeplens.ground import InputError, invalid, records, write_json
from toeplens.ground.options import within
from toeplens.ground.records import Record
from toeplens.ground.words import fixed
from toeplens.lens import Estimate, bootstrap_means, over_seeds
from toeplens.lens.kit.intervals import newcombe, wilson
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.interventions import calls_of, check_predicts
from toeplens.sources.huggingface.load import Dtype, Loaded, open_model
from toeplens.sources.huggingface.model import library
from toeplens.sources.huggingface.prediction import Predictions, predictions
from toeplens.studies.kit.changes import VERSIONS, failures_of, told
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.options import SEEDS, Asked
from toeplens.studies.kit.pages import HasPage
from toeplens.studies.kit.questions import ABOUT, Behaviour, HeadRetrieval, Item, Writer, batches, retrieval_of

_ENOUGH = 8  # minimum number of items for a bootstrap; otherwise Student's t interval
Number = records.Number | None


@dataclass(frozen=True, kw_only=True)
class ItemRecord(Record):
    """One item (`toeplens.studies.kit.questions.Item`), or one range of positions of a text."""

    behaviour: Behaviour
    item: records.Count  # ranges of one text share this number
    length: records.Count
    depth: Number = None
    start: records.Count | None = None  # first position of a range
    stop: records.Count | None = None  # the one after its last
    nats: records.Positive  # mean -log p of the answer's tokens, among the choices if there are any
    right: records.Share  # whether all answer tokens are the most likely ones; for text and copying the share that is
    changed_nats: Number = None  # of the changed model; None without changes
    changed_right: Number = None

    @property
    def places(self) -> int:
        """The weight of the range within its item."""
        return 1 if self.start is None or self.stop is None else self.stop - self.start

    def verify(self) -> None:
        if (self.start is None) != (self.stop is None) or (self.places < 1):
            raise ValueError("stop must be after start.")
        if (self.changed_nats is None) != (self.changed_right is None):
            raise ValueError("changed_right and changed_nats must be set together.")


@dataclass(frozen=True)
class Summary:
    """Means over items of one kind with 95 % intervals; with changes also of the changed model and the difference."""

    behaviour: Behaviour
    length: int | None
    depth: float | None
    start: int | None
    count: int
    nats: Estimate
    right: Estimate
    changed_nats: Estimate | None
    changed_right: Estimate | None
    more_nats: Estimate | None
    more_right: Estimate | None

    def row(self) -> dict[str, Any]:
        """The summary as a row of a table."""
        made = {name: each for name, each in vars(self).items() if name not in _ESTIMATES}
        for name in _ESTIMATES:
            if (each := getattr(self, name)) is not None:
                made |= {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}
        return made


@dataclass(frozen=True)
class ProbeRecord(HasPage, Record):
    """The results of a probe."""

    WORDS = "probe"
    PAGE = "toeplens.report.probe:probe_page"

    about: dict[str, Any]  # the model, the text, the settings, versions, seconds
    changes: tuple[records.Text, ...]  # interventions on the attention
    items: tuple[ItemRecord, ...]
    heads: tuple[HeadRetrieval, ...]  # retrieval of every head, layer by layer; empty if not measured

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        every: list[tuple[Behaviour, tuple[str, ...]]]
        every = [(name, by) for name in ABOUT for by in _BY.get(name, ((),)) if self.of(name)]
        return {
            "behaviours": lambda: table(BEHAVIOURS, [s.row() for name, by in every for s in self.summaries(name, *by)]),
            "items": lambda: table(ITEMS, map(vars, self.items)),
            "heads": lambda: table(HEADS, map(vars, self.heads)),
        }

    def of(self, behaviour: Behaviour) -> list[ItemRecord]:
        """The items of one behaviour."""
        return [item for item in self.items if item.behaviour == behaviour]

    def summary(self, behaviour: Behaviour) -> Summary:
        """Summary over all items of a behaviour; there must be at least one."""
        return next(self.summaries(behaviour))

    def summaries(self, behaviour: Behaviour, *by: str) -> Iterator[Summary]:
        """Summaries of the items of a behaviour, grouped by the fields ``by``: ``length``, ``depth``, ``start``."""
        groups: dict[tuple[Any, ...], list[ItemRecord]] = {}
        for item in self.of(behaviour):
            groups.setdefault(tuple(getattr(item, name) for name in by), []).append(item)
        for key, items in sorted(groups.items()):
            yield _summary(behaviour, dict(zip(by, key, strict=True)), items)


# the summaries of a behaviour: over all items, and by these fields
_BY: dict[Behaviour, tuple[tuple[str, ...], ...]] = {"loss": ((), ("start",)), "no needle": ((), ("length",))}
_BY |= {"needle": ((), ("length", "depth"))}
_LOSS = "nats right changed_nats changed_right"
ITEMS = schema(f"item:count behaviour:text length:count depth start:count stop:count {_LOSS}")
HEADS = schema("layer:count head:count score mass")
_ESTIMATES = (*_LOSS.split(), "more_nats", "more_right")
BEHAVIOURS = schema(
    "behaviour:text length:count depth start:count count:count "
    + " ".join(f"{name} {name}_low {name}_high" for name in _ESTIMATES)
)


def _summary(behaviour: Behaviour, place: dict[str, Any], items: list[ItemRecord]) -> Summary:
    numbers, at = np.unique([item.item for item in items], return_inverse=True)
    places = np.array([item.places for item in items], dtype=float)
    weights: Float[np.ndarray, "n"] = np.bincount(at, places, len(numbers))

    def means(name: str, less: str = "") -> Float[np.ndarray, "n"]:
        """The mean over the ranges of each item, weighted by their positions; of the difference from ``less``."""
        values = [float(getattr(item, name)) - (float(getattr(item, less)) if less else 0.0) for item in items]
        return np.bincount(at, places * values, len(numbers)) / weights

    after: tuple[Estimate | None, ...] = (None, None, None, None)
    before = means("right")
    if items[0].changed_nats is not None:
        right = means("changed_right")
        more = _estimate(right - before)
        if {*before, *right} <= {0.0, 1.0}:
            more = Estimate(more.value, *newcombe(before, right), more.count)
        after = _estimate(means("changed_nats")), _share(right), _estimate(means("changed_nats", "nats")), more
    length, depth, start = (place.get(name) for name in ("length", "depth", "start"))
    return Summary(behaviour, length, depth, start, len(numbers), _estimate(means("nats")), _share(before), *after)


def _share(means: Float[np.ndarray, "n"]) -> Estimate:
    """Mean of shares with its interval: Wilson's if all values are 0 or 1."""
    found = _estimate(means)
    if {*means} <= {0.0, 1.0}:
        return Estimate(found.value, *wilson(round(means.sum()), len(means)), found.count)
    return found


def _estimate(means: Float[np.ndarray, "n"]) -> Estimate:
    if len(means) < _ENOUGH:
        return over_seeds(means)
    (low,), (high,) = bootstrap_means(means[:, None])
    return Estimate(float(means.mean()), float(low), float(high), len(means))


def title_of(behaviour: Behaviour) -> str:
    """The title of a behaviour in tables."""
    return {"loss": "Text"}.get(behaviour, behaviour.capitalize())


def interval(each: Estimate | None, digits: int = 3, *, least: float | None = 0.0, most: float | None = None) -> str:
    """A mean and its interval as text, clipped to the possible range from ``least`` to ``most``."""
    if each is None:
        return "–"
    low = each.low if least is None else max(least, each.low)
    high = each.high if most is None else min(most, each.high)
    return f"{fixed(each.value, digits)} [{fixed(low, digits)}, {fixed(high, digits)}]"


RECORD = "probe.json"  # file name of the record
NEEDING = "a probe"  # for error messages about models that do not predict the next token
_AT_ONCE = 4096  # tokens per batch
_CHANGED_AT_ONCE = 1024  # tokens per batch of a changed model
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Probing:
    """Items for a model and its predictions. The intact model is evaluated once, for any number of changes."""

    loaded: Loaded
    items: tuple[Item, ...]
    about: dict[str, Any]
    report: Progress

    @classmethod
    def of(
        cls, loaded: Loaded, text: Any, asked: Asked, *, tokenizer: Any = None, seed: int = 0, report: Progress
    ) -> Probing:
        """Items from a text or token ids. Raises `InputError` as `probe` does."""
        loaded.check_decoder(NEEDING)
        loaded.check_numbers()
        loaded.check_all()
        within("seed", seed, 0, SEEDS)
        if isinstance(text, str):
            writer = Writer(loaded.tokenizer() if tokenizer is None else tokenizer, text, seed)
            source = {"characters": len(text), "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
        else:
            ids = _ids(text, loaded.vocabulary)
            writer = Writer(None, ids, seed)
            source = {"token_ids": len(ids), "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
        loaded.check_length("lengths", max(asked.lengths))
        items = tuple(writer.items(asked))
        about = {
            "model": loaded.called,
            "class": type(loaded.model).__name__,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "weights": None if loaded.quantised is None else str(loaded.quantised),
            **source,
            **{name: list(x) if isinstance(x, tuple) else x for name, x in vars(asked).items()},
            "seed": seed,
            "transformers": library().__version__,
            **VERSIONS,
        }
        return cls(loaded, items, about, report)

    @cached_property
    def intact(self) -> dict[int, Predictions]:
        """Predictions of the intact model for each item."""
        return _answers(self.loaded.model, self.items, (), partial(self.report, "items"))

    @cached_property
    def heads(self) -> tuple[HeadRetrieval, ...]:
        """Retrieval scores of the intact model's heads."""
        return retrieval_of(self.loaded, self.items, partial(self.report, "needles"))

    def record(self, changes: Sequence[Change] = (), *, heads: bool = False) -> ProbeRecord:
        """The record of the intact model and, with ``changes``, of the changed one; ``heads`` adds retrieval scores."""
        started, changed = time.monotonic(), None
        for change in changes:
            if change.output in ("mean", "resample"):
                raise InputError(f"output must be zero for a probe, got {change.output}.")
        with failures_of(self.loaded, "probe", ". Use smaller lengths or a smaller dtype."):
            tokens = torch.tensor([self.items[0].tokens], device=self.loaded.model.device)
            check_predicts(self.loaded, calls_of(self.loaded.model, {"input_ids": tokens}, changes), NEEDING)
            intact = self.intact
            if changes:
                changed = _answers(self.loaded.model, self.items, changes, partial(self.report, "changed"))
            found = self.heads if heads and any(item.needle for item in self.items) else ()
        rows = [row for number, item in enumerate(self.items) for row in _rows(number, item, intact, changed)]
        about = self.about | {"seconds": round(time.monotonic() - started, 1)}
        return ProbeRecord(about, tuple(told(changes)), tuple(rows), found)


def probe(
    model: Any,
    text: Any,
    *,
    changes: Sequence[Change] = (),
    asked: Asked | None = None,
    tokenizer: Any = None,
    heads: bool = True,
    dtype: Dtype = "auto",
    device: str = "auto",
    pickled: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> ProbeRecord:
    """Probe a causal transformers language model: the intact model and, with ``changes``, the changed one.

    Measures loss by position, needles by depth and length, copying, counting and word order
    (`toeplens.studies.kit.questions`). Both models get the same items, so differences are paired.

    Arguments
        model      a `transformers.PreTrainedModel`, its directory, a GGUF file or a name on the hub
        text       source text, at least as long as the longest of ``asked.lengths``; or token ids [N] or [B, N] (rows
                   are concatenated), which only allow loss by position and copying
        changes    interventions on the attention (`toeplens.sources.huggingface.Change`)
        asked      number and size of the items
        tokenizer  tokenizer of the text (default: the model's own)
        heads      whether to measure retrieval scores of the intact model's heads
        dtype, device, pickled  as in `toeplens.sources.huggingface.load_model`
        seed       seed of the items

    Raises `InputError` for a model that does not predict the next token or cannot be decomposed, for lengths beyond the
    model's maximum, for a text that is too short, and for changes that do not fit the model; `EnvironmentFailure` if
    memory runs out.
    """
    report = on_progress or (lambda what, done, total: None)
    loaded = open_model(model, dtype=dtype, device=device, pickled=pickled)
    probing = Probing.of(loaded, text, asked or Asked(), tokenizer=tokenizer, seed=seed, report=report)
    return probing.record(changes, heads=heads)


def _ids(data: Any, vocabulary: int | None) -> Int[np.ndarray, "N"]:
    """Token ids as one row."""
    try:
        ids = np.asarray(data)
    except ValueError:
        ids = np.empty(0)
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise InputError("tokens must be whole numbers of shape [N] or [B, N].")
    least, most = ids.min(), ids.max()
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        must = "not be negative" if vocabulary is None else f"be from 0 to {vocabulary - 1}, the model's vocabulary"
        raise invalid("tokens", must, got=f"{least} to {most}")
    return ids.astype(np.int64).ravel()


def save_probe(record: ProbeRecord, directory: Path) -> Path:
    """Write the record to a directory atomically; returns its path."""
    path = Path(directory) / RECORD
    write_json(path, record.to_dict())
    return path


def open_probe(directory: Path | str) -> ProbeRecord:
    """The probe in a directory. Raises `InputError` if there is none or if it is damaged."""
    return ProbeRecord.in_directory(directory, RECORD)


def _answers(
    model: Any, items: Sequence[Item], changes: Sequence[Change], report: Callable[[int, int], None]
) -> dict[int, Predictions]:
    """Predictions for the answer tokens of each item."""
    found: dict[int, Predictions] = {}
    report(0, len(items))
    for numbers, tokens in batches(items, _CHANGED_AT_ONCE if changes else _AT_ONCE):
        one = items[numbers[0]]
        choices = torch.tensor([items[number].choices for number in numbers]) if one.choices else None
        made = predictions(model, torch.from_numpy(tokens), one.places, choices=choices, changes=changes)
        for number, nats, right in zip(numbers, made.nats.cpu(), made.right.cpu(), strict=True):
            found[number] = Predictions(nats, right)
        report(len(found), len(items))
        if not bool(made.nats.isfinite().all()):
            raise InputError("model: its outputs are not finite. Use --dtype float32.")
    return found


def _rows(
    number: int, item: Item, intact: dict[int, Predictions], changed: dict[int, Predictions] | None
) -> list[ItemRecord]:
    """The records of an item; for the loss of a text one per range of positions 1, 2-3, 4-7, ..."""
    places, share = np.array(item.places), item.behaviour in ("loss", "copying")
    ranges: list[tuple[int | None, int | None, slice]] = [(None, None, slice(None))]
    if item.behaviour == "loss":
        octave = np.frexp(places)[1]
        ends = [np.flatnonzero(octave == each)[[0, -1]].tolist() for each in np.unique(octave)]
        ranges = [(int(places[first]), int(places[last]) + 1, slice(first, last + 1)) for first, last in ends]

    def told(made: Predictions, part: slice, prefix: str) -> dict[str, Any]:
        right = made.right[part].double()
        share_right = float(right.mean() if share else right.amin())
        return {f"{prefix}nats": float(made.nats[part].mean()), f"{prefix}right": share_right}

    found = []
    about: dict[str, Any] = {"behaviour": item.behaviour, "item": number, "length": item.length, "depth": item.depth}
    for start, stop, part in ranges:
        results = told(intact[number], part, "")
        if changed is not None:
            results |= told(changed[number], part, "changed_")
        found.append(ItemRecord(**about, start=start, stop=stop, **results))
    return found
