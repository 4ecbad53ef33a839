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

from toeplens.backends.hf import Change
from toeplens.backends.hf.interventions import check_causal, find_calls
from toeplens.backends.hf.load import Dtype, LoadedModel, open_model
from toeplens.backends.hf.model import import_transformers
from toeplens.backends.hf.prediction import Predictions, predict_tokens
from toeplens.encodings.cpu_products import fast_products
from toeplens.lens import Estimate, bootstrap_means, mean_over_seeds
from toeplens.lens.kit.intervals import newcombe_interval, wilson_interval
from toeplens.studies.kit.changes import (
    VERSIONS,
    ChangeSpec,
    changes_text,
    parse_changes,
    report_failures,
    resolve_changes,
)
from toeplens.studies.kit.frames import schema, table
from toeplens.studies.kit.options import MAX_SEED, ProbeSizes
from toeplens.studies.kit.pages import HasPage
from toeplens.studies.kit.probe_items import (
    BY_WORDS,
    DESCRIPTIONS,
    HeadRetrieval,
    ItemWriter,
    ProbeItem,
    ProbeKind,
    item_batches,
    measure_retrieval,
)
from toeplens.utils import InputError, invalid, write_json
from toeplens.utils.formatting import fmt
from toeplens.utils.options import check_range
from toeplens.utils.records import FiniteFloat, NonNegative, NonNegativeInt, Record, Share, StrictStr

_MIN_BOOTSTRAP = 8  # minimum number of items for a bootstrap; otherwise Student's t interval
Number = FiniteFloat | None


@dataclass(frozen=True, kw_only=True)
class ItemRecord(Record):
    """One item (`toeplens.studies.kit.probe_items.ProbeItem`), or one range of positions of a text."""

    behaviour: ProbeKind
    item: NonNegativeInt  # ranges of one text share this number
    length: NonNegativeInt
    depth: Number = None
    start: NonNegativeInt | None = None  # first position of a range
    stop: NonNegativeInt | None = None  # the one after its last
    nats: NonNegative  # mean -log p of the answer's tokens, among the choices if there are any
    right: Share  # whether all answer tokens are the most likely ones; for text and copying the share that is
    changed_nats: Number = None  # of the changed model; None without changes
    changed_right: Number = None

    @property
    def num_positions(self) -> int:
        """The weight of the range within its item."""
        return 1 if self.start is None or self.stop is None else self.stop - self.start

    def verify(self) -> None:
        if (self.start is None) != (self.stop is None) or (self.num_positions < 1):
            raise ValueError("stop must be after start.")
        if (self.changed_nats is None) != (self.changed_right is None):
            raise ValueError("changed_right and changed_nats must be set together.")


@dataclass(frozen=True)
class ProbeSummary:
    """Means over items of one kind with 95 % intervals; with changes also of the changed model and the difference."""

    behaviour: ProbeKind
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

    @property
    def title(self) -> str:
        """The behaviour's title, with the number of words of its lists if there are several."""
        text = title_of(self.behaviour)
        return f"{text}, {self.length} words" if self.behaviour in BY_WORDS and self.length else text

    def row(self) -> dict[str, Any]:
        """The summary as a row of a table."""
        row = {name: entry for name, entry in vars(self).items() if name not in _ESTIMATES}
        for name in _ESTIMATES:
            if (entry := getattr(self, name)) is not None:
                row |= {name: entry.value, f"{name}_low": entry.low, f"{name}_high": entry.high}
        return row


@dataclass(frozen=True)
class ProbeRecord(HasPage, Record):
    """The results of a probe."""

    LABEL = "probe"
    PAGE = "toeplens.report.probe:probe_page"

    about: dict[str, Any]  # the model, the text, the settings, versions, seconds
    changes: tuple[StrictStr, ...]  # interventions on the attention
    items: tuple[ItemRecord, ...]
    heads: tuple[HeadRetrieval, ...]  # retrieval of every head, layer by layer; empty if not measured

    def table_makers(self) -> dict[str, Callable[[], pa.Table]]:
        kinds: list[tuple[ProbeKind, tuple[str, ...]]]
        kinds = [(name, by) for name in DESCRIPTIONS for by in _GROUPINGS.get(name, ((),)) if self.items_of(name)]
        return {
            "behaviours": lambda: table(BEHAVIOURS, [s.row() for name, by in kinds for s in self.summaries(name, *by)]),
            "items": lambda: table(ITEMS, map(vars, self.items)),
            "heads": lambda: table(HEADS, map(vars, self.heads)),
        }

    def items_of(self, behaviour: ProbeKind) -> list[ItemRecord]:
        """The items of one behaviour."""
        return [item for item in self.items if item.behaviour == behaviour]

    def overview(self) -> Iterator[ProbeSummary]:
        """A summary of each behaviour; of words of lists one per length."""
        for behaviour in DESCRIPTIONS:
            yield from self.summaries(behaviour, *_GROUPINGS.get(behaviour, ((),))[0])

    def summary(self, behaviour: ProbeKind) -> ProbeSummary:
        """Summary over all items of a behaviour; there must be at least one."""
        return next(self.summaries(behaviour))

    def summaries(self, behaviour: ProbeKind, *by: str) -> Iterator[ProbeSummary]:
        """Summaries of the items of a behaviour, grouped by the fields ``by``: ``length``, ``depth``, ``start``."""
        groups: dict[tuple[Any, ...], list[ItemRecord]] = {}
        for item in self.items_of(behaviour):
            groups.setdefault(tuple(getattr(item, name) for name in by), []).append(item)
        for key, items in sorted(groups.items()):
            yield _summarise(behaviour, dict(zip(by, key, strict=True)), items)


# the summaries of a behaviour by these fields; () is over all items, and the first one is that of the overview
_GROUPINGS: dict[ProbeKind, tuple[tuple[str, ...], ...]] = {"loss": ((), ("start",)), "no needle": ((), ("length",))}
_GROUPINGS |= {"needle": ((), ("length", "depth")), **dict.fromkeys(BY_WORDS, (("length",),))}
_ITEM_VALUES = "nats right changed_nats changed_right"
ITEMS = schema(f"item:count behaviour:text length:count depth start:count stop:count {_ITEM_VALUES}")
HEADS = schema("layer:count head:count score mass")
_ESTIMATES = (*_ITEM_VALUES.split(), "more_nats", "more_right")
BEHAVIOURS = schema(
    "behaviour:text length:count depth start:count count:count "
    + " ".join(f"{name} {name}_low {name}_high" for name in _ESTIMATES)
)


def _summarise(behaviour: ProbeKind, group: dict[str, Any], items: list[ItemRecord]) -> ProbeSummary:
    ids, index = np.unique([item.item for item in items], return_inverse=True)
    positions = np.array([item.num_positions for item in items], dtype=float)
    weights: Float[np.ndarray, "n"] = np.bincount(index, positions, len(ids))

    def means(name: str, baseline: str = "") -> Float[np.ndarray, "n"]:
        """The mean over the ranges of each item, weighted by their positions; of the difference from ``baseline``."""
        values = [float(getattr(item, name)) - (float(getattr(item, baseline)) if baseline else 0.0) for item in items]
        return np.bincount(index, positions * values, len(ids)) / weights

    changed: tuple[Estimate | None, ...] = (None, None, None, None)
    intact = means("right")
    if items[0].changed_nats is not None:
        right = means("changed_right")
        gain = _estimate(right - intact)
        if {*intact, *right} <= {0.0, 1.0}:
            gain = Estimate(gain.value, *newcombe_interval(intact, right), gain.count)
        changed = _estimate(means("changed_nats")), _share(right), _estimate(means("changed_nats", "nats")), gain
    length, depth, start = (group.get(name) for name in ("length", "depth", "start"))
    return ProbeSummary(behaviour, length, depth, start, len(ids), _estimate(means("nats")), _share(intact), *changed)


def _share(means: Float[np.ndarray, "n"]) -> Estimate:
    """Mean of shares with its interval: Wilson's if all values are 0 or 1."""
    estimate = _estimate(means)
    if {*means} <= {0.0, 1.0}:
        return Estimate(estimate.value, *wilson_interval(round(means.sum()), len(means)), estimate.count)
    return estimate


def _estimate(means: Float[np.ndarray, "n"]) -> Estimate:
    if len(means) < _MIN_BOOTSTRAP:
        return mean_over_seeds(means)
    (low,), (high,) = bootstrap_means(means[:, None])
    return Estimate(float(means.mean()), float(low), float(high), len(means))


def title_of(behaviour: ProbeKind) -> str:
    """The title of a behaviour in tables."""
    return {"loss": "Text"}.get(behaviour, behaviour.capitalize())


def mean_text(mean: Estimate | None, digits: int = 3, *, least: float | None = 0.0, most: float | None = None) -> str:
    """A mean and its interval as text, clipped to the possible range from ``least`` to ``most``."""
    if mean is None:
        return "–"
    low = mean.low if least is None else max(least, mean.low)
    high = mean.high if most is None else min(most, mean.high)
    return f"{fmt(mean.value, digits)} [{fmt(low, digits)}, {fmt(high, digits)}]"


RECORD = "probe.json"  # file name of the record
PURPOSE = "a probe"  # for error messages about models that do not predict the next token
_BATCH_TOKENS = 4096  # tokens per batch
_CHANGED_BATCH_TOKENS = 1024  # tokens per batch of a changed model
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ModelProbe:
    """Items for a model and its predictions. The intact model is evaluated once, for any number of changes."""

    loaded: LoadedModel
    items: tuple[ProbeItem, ...]
    about: dict[str, Any]
    report: Progress

    @classmethod
    def from_data(
        cls, loaded: LoadedModel, text: Any, sizes: ProbeSizes, *, tokenizer: Any = None, seed: int, report: Progress
    ) -> ModelProbe:
        """Items from a text or token ids. Raises `InputError` as `probe` does."""
        loaded.check_decoder(PURPOSE)
        loaded.check_finite()
        loaded.check_complete()
        check_range("seed", seed, 0, MAX_SEED)
        if isinstance(text, str):
            writer = ItemWriter(loaded.tokenizer() if tokenizer is None else tokenizer, text, seed)
            source = {"characters": len(text), "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
        else:
            ids = _ids(text, loaded.vocabulary)
            writer = ItemWriter(None, ids, seed)
            source = {"token_ids": len(ids), "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
        loaded.check_length("lengths", max(sizes.lengths))
        items = tuple(writer.items(sizes))
        about = {
            "model": loaded.display_name,
            "class": type(loaded.model).__name__,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "weights": None if loaded.quantised is None else str(loaded.quantised),
            **source,
            **{name: list(x) if isinstance(x, tuple) else x for name, x in vars(sizes).items()},
            "seed": seed,
            "transformers": import_transformers().__version__,
            **VERSIONS,
        }
        return cls(loaded, items, about, report)

    @cached_property
    def intact(self) -> dict[int, Predictions]:
        """Predictions of the intact model for each item."""
        return _predict_answers(self.loaded.model, self.items, (), partial(self.report, "items"))

    @cached_property
    def heads(self) -> tuple[HeadRetrieval, ...]:
        """Retrieval scores of the intact model's heads."""
        return measure_retrieval(self.loaded, self.items, partial(self.report, "needles"))

    @fast_products()
    def record(self, changes: Sequence[Change] = (), *, heads: bool = False) -> ProbeRecord:
        """The record of the intact model and, with ``changes``, of the changed one; ``heads`` adds retrieval scores."""
        started, changed = time.monotonic(), None
        for change in changes:
            if change.output in ("mean", "resample"):
                raise InputError(f"output must be zero for a probe, got {change.output}.")
        with report_failures(self.loaded, "probe", ". Use smaller lengths or a smaller dtype."):
            tokens = torch.tensor([self.items[0].tokens], device=self.loaded.device)
            check_causal(self.loaded, find_calls(self.loaded.model, {"input_ids": tokens}, changes), PURPOSE)
            intact = self.intact
            if changes:
                changed = _predict_answers(self.loaded.model, self.items, changes, partial(self.report, "changed"))
            retrieval = self.heads if heads and any(item.needle for item in self.items) else ()
        rows = [row for number, item in enumerate(self.items) for row in _item_rows(number, item, intact, changed)]
        about = self.about | {"seconds": round(time.monotonic() - started, 1)}
        return ProbeRecord(about, tuple(changes_text(changes)), tuple(rows), retrieval)


def probe(
    model: Any,
    text: Any,
    *,
    changes: Change | str | Sequence[Change | ChangeSpec | str] = (),
    sizes: ProbeSizes | None = None,
    tokenizer: Any = None,
    heads: bool = True,
    dtype: Dtype = "auto",
    device: str = "auto",
    memory: str | None = None,
    pickled: bool = False,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> ProbeRecord:
    """Probe a causal transformers language model: the intact model and, with ``changes``, the changed one.

    Measures loss by position, needles by depth and length, copying, counting and word order, and with ``sizes.words``
    words of lists by number and by key (`toeplens.studies.kit.probe_items`). Both models get the same
    items, so differences are paired.

    Arguments
        model      a `transformers.PreTrainedModel`, its directory, a GGUF file or a name on the hub
        text       source text, at least as long as the longest of ``sizes.lengths``; or token ids [N] or [B, N] (rows
                   are concatenated), which only allow loss by position and copying
        changes    interventions on the attention: `toeplens.backends.hf.Change`, or texts as on the command line
        sizes      number and size of the items
        tokenizer  tokenizer of the text (default: the model's own)
        heads      whether to measure retrieval scores of the intact model's heads
        dtype, device, memory, pickled  as in `toeplens.backends.hf.load_model`
        seed       seed of the items

    Raises `InputError` for a model that does not predict the next token or cannot be decomposed, for lengths beyond the
    model's maximum, for a text that is too short, and for changes that do not fit the model; `EnvironmentFailure` if
    memory runs out.
    """
    report = on_progress or (lambda what, done, total: None)
    parsed = parse_changes(changes)
    loaded = open_model(model, dtype=dtype, device=device, memory=memory, pickled=pickled)
    resolved = resolve_changes(loaded, parsed)
    options: dict[str, Any] = {"tokenizer": tokenizer, "seed": seed, "report": report}
    return ModelProbe.from_data(loaded, text, sizes or ProbeSizes(), **options).record(resolved, heads=heads)


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
    return ProbeRecord.from_directory(directory, RECORD)


def _predict_answers(
    model: Any, items: Sequence[ProbeItem], changes: Sequence[Change], report: Callable[[int, int], None]
) -> dict[int, Predictions]:
    """Predictions for the answer tokens of each item."""
    answers: dict[int, Predictions] = {}
    report(0, len(items))
    for numbers, tokens in item_batches(items, _CHANGED_BATCH_TOKENS if changes else _BATCH_TOKENS):
        first = items[numbers[0]]
        choices = torch.tensor([items[number].choices for number in numbers]) if first.choices else None
        batch = predict_tokens(model, torch.from_numpy(tokens), first.positions, choices=choices, changes=changes)
        for number, nats, right in zip(numbers, batch.nats.cpu(), batch.correct.cpu(), strict=True):
            answers[number] = Predictions(nats, right)
        report(len(answers), len(items))
        if not bool(batch.nats.isfinite().all()):
            raise InputError("model: its outputs are not finite. Use a model in float32 (--dtype float32).")
    return answers


def _item_rows(
    number: int, item: ProbeItem, intact: dict[int, Predictions], changed: dict[int, Predictions] | None
) -> list[ItemRecord]:
    """The records of an item; for the loss of a text one per range of positions 1, 2-3, 4-7, ..."""
    positions, is_share = np.array(item.positions), item.behaviour in ("loss", "copying")
    ranges: list[tuple[int | None, int | None, slice]] = [(None, None, slice(None))]
    if item.behaviour == "loss":
        octave = np.frexp(positions)[1]
        ends = [np.flatnonzero(octave == value)[[0, -1]].tolist() for value in np.unique(octave)]
        ranges = [(int(positions[first]), int(positions[last]) + 1, slice(first, last + 1)) for first, last in ends]

    def scores_of(predicted: Predictions, span: slice, prefix: str) -> dict[str, Any]:
        right = predicted.correct[span].double()
        share_right = float(right.mean() if is_share else right.amin())
        return {f"{prefix}nats": float(predicted.nats[span].mean()), f"{prefix}right": share_right}

    rows = []
    about: dict[str, Any] = {"behaviour": item.behaviour, "item": number, "length": item.length, "depth": item.depth}
    for start, stop, span in ranges:
        results = scores_of(intact[number], span, "")
        if changed is not None:
            results |= scores_of(changed[number], span, "changed_")
        rows.append(ItemRecord(**about, start=start, stop=stop, **results))
    return rows
