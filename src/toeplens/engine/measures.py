"""Measures of a finished run in addition to head ablation, and the records of both in the run's directory.

The first record of a measure is ``NAME.json``. Records for other examples are ``NAME-SPLIT-EXAMPLES.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float

from toeplens.encodings.registry import package_of
from toeplens.engine.circuit import Circuit, circuit
from toeplens.engine.examples import DataSplit, batches_of, examples_of, trace_of
from toeplens.engine.extrapolation import Extrapolation, extrapolate
from toeplens.engine.language import (
    Bits,
    Copying,
    Extension,
    HeadPatterns,
    Needles,
    bits,
    copying,
    extension,
    head_patterns,
    needles,
)
from toeplens.ground import InputError, ToeplensError, checked, choose, invalid, read_json, write_json
from toeplens.ground.errors import first_line
from toeplens.ground.locks import locked
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens import (
    AttentionTrace,
    BandAblation,
    Batch,
    Behaviour,
    FrequencyRecord,
    HeadAblation,
    HeadSets,
    PermutationScores,
    PositionalDrift,
    Representation,
    SeedStrength,
    ablate_bands,
    ablate_heads,
    behaviour,
    frequency_use,
    head_sets,
    permutation_scores,
    positional_drift,
    representation,
    seed_strength,
)
from toeplens.lens.kit.terms import written_out_profile
from toeplens.lens.kit.toeplitz import ToeplitzShares
from toeplens.lens.toeplitz.spectrum import BiasSpread, bias_spread, contraction
from toeplens.model import Decoder
from toeplens.sources import DecoderGradients, DecoderSource
from toeplens.tasks import Examples
from toeplens.tasks.language import LanguageTask
from toeplens.training import Batches, Run, initial_model, plan_execution
from toeplens.training.run import CHECKPOINT, RESULT

WHY = "why"  # the only field of a record for a measure that does not apply; holds the reason
_ASKED = "asked"  # the field with the examples of a record
FEWEST = 5  # minimum number of examples for `representation`
_SETS, _STREAM, _TRACED, _SPECTRA = 512, 512, 256, 16  # maximum number of examples of some measures
_PLANTED = 32  # maximum number of texts with planted spans
_POOL = 4096  # examples for gradient statistics, independent of the requested number

Found = dict[str, Any]


@dataclass(frozen=True)
class Asked(Record):
    """The requested examples: number and split."""

    examples: AtLeast1
    split: DataSplit = "test"

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise invalid("examples", "be at least 1", self.examples)
        choose("split", self.split, get_args(DataSplit))


@dataclass(frozen=True)
class _Asking(Record):
    asked: Asked


@dataclass(frozen=True)
class Seed(Record):
    """At initialisation: strength of the positional gradient over a batch, and positional drift of a step."""

    strength: SeedStrength
    drift: PositionalDrift


@dataclass(frozen=True)
class Spectra(Record):
    """At initialisation: each head's spectrum with position relative to that without (`toeplens.lens.Contraction`)."""

    width: Float[np.ndarray, "L H"]
    norm: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class Beginning(Record):
    """Before training: positional and symbolic shares, and the centre of the used frequencies, of each head.

    For the trained model see `toeplens.lens.Behaviour` and `toeplens.lens.FrequencyRecord`.
    """

    positional: Float[np.ndarray, "L H"]
    symbolic: Float[np.ndarray, "L H"]
    centre: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class Subject:
    """A finished run, the examples to evaluate, and the device."""

    run: Run
    examples: int
    split: DataSplit
    device: torch.device

    def model(self) -> Decoder:
        """The trained model."""
        return self.run.model().to(self.device)

    def untrained(self) -> Decoder:
        """The model at initialisation."""
        with torch.random.fork_rng(devices=[]):
            return initial_model(self.run.spec).to(self.device)

    def source(self) -> DecoderSource:
        """The trained model's attention."""
        return DecoderSource(self.model())

    def chosen(self, most: int | None = None) -> Examples:
        """The examples, at most ``most``."""
        count = self.examples if most is None else min(self.examples, most)
        return examples_of(self.run.spec, count, self.split)

    def batches(self, most: int | None = None) -> list[Batch]:
        """The examples in batches on which every head of a layer can be ablated at once."""
        return batches_of(self.run.spec, self.chosen(most), self.device)


def measure_run(run: Run, name: str, *, examples: int, split: DataSplit = "test", device: str = "auto") -> Found:
    """One of `MEASURES` of a finished run, read from its record ``NAME.json`` or measured and recorded.

    Arguments
        examples  maximum number of examples. The measure ``seed`` does not use the trained model and always uses up to
                  4,096 examples of the training set
        split     ``test`` set, or ``train+test`` (70:30); longer sequences are always from the test set
        device    ``auto``, ``cpu``, ``cuda`` or ``cuda:N``

    Raises `InputError`, without recording anything, for a run that is not finished or diverged, and for missing or
    damaged weights.
    """
    measure = MEASURES[choose("measure", name, MEASURES)].of
    run.must_be_complete()
    asked = Asked(examples, split)
    content = read_record(run.directory, name, asked)
    if content is None:
        with locked(run.directory, "run"):
            content = _measured(
                name, measure, Subject(run, examples, split, plan_execution(device, "off", "float32").device)
            )
            write_record(run.directory, name, asked, content)
    return content


def _measured(name: str, measure: Callable[[Subject], Found], subject: Subject) -> Found:
    """The measure, or the reason if an encoding of another package fails."""
    encoding = subject.run.spec.model.encoding
    package = package_of(encoding)
    if package is None:
        return measure(subject)
    try:
        return measure(subject)
    except (ToeplensError, OSError, MemoryError):
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {first_line(error)}"
        again = f"to measure again, delete {name}.json in the run's directory"
        return {WHY: f"encoding: {encoding!r} of the package {package} failed ({told}); {again}."}


def read_measures(directory: Path, names: Sequence[str], asked: Asked) -> dict[str, Found]:
    """The recorded measures among ``names`` for these examples."""
    found = {name: read_record(directory, name, asked) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def _position(**choices: Any) -> Callable[[Subject], Found]:
    """Effects of removing position from each head."""

    def measured(subject: Subject) -> Found:
        batches = subject.batches(_TRACED if choices else None)
        given = {"chance": subject.run.spec.guess, "cumulative": False, **choices}
        return ablate_heads(subject.source(), batches, intervention="position", **given).to_dict()

    return measured


def _position_sets(subject: Subject) -> Found:
    """A set of heads that suffices when position is removed from all other heads, which keep their content."""
    source, batches = subject.source(), subject.batches(_SETS)
    return _or_why(lambda: head_sets(source, batches, chance=subject.run.spec.guess, intervention="position"))


def _bias(subject: Subject) -> Found:
    """Spread of the distance bias in each head."""
    model, task = subject.model(), subject.run.spec.build_task()
    layers = [model.encoding.for_layer(layer) for layer in range(len(model.blocks))]
    return _or_why(lambda: bias_spread(layers, task.length, causal=subject.run.spec.model.causal))


def _circuit(subject: Subject) -> Found:
    """The most important head: its attention, its frequencies, and the paths that read it."""
    task, seed = subject.run.spec.build_task(), subject.run.spec.data_seed
    source, batches = subject.source(), subject.batches(_TRACED)
    return _or_why(lambda: circuit(source, batches, task, seed))


def _contraction(subject: Subject) -> Found:
    """At initialisation: spectra of the logits with position relative to those without."""

    def spectra() -> Spectra:
        found = [contraction(layer) for layer in trace_of(subject.untrained(), subject.chosen(_SPECTRA))]
        return Spectra(
            *(torch.stack([getattr(each, name) for each in found]).cpu().numpy() for name in ("width", "norm"))
        )

    return _or_why(spectra)


def _representation(subject: Subject) -> Found:
    """Position in the residual stream, layer by layer."""
    trace = trace_of(subject.model(), subject.chosen(_STREAM))
    least = max(FEWEST, min(16, len(trace.tokens)))  # its own defaults, except in very small studies
    return representation(trace, least=least).to_dict()


def _seed(subject: Subject) -> Found:
    """At initialisation: strength of the positional gradient over a batch, and positional drift of a step."""
    spec, device = subject.run.spec, subject.device
    source = DecoderGradients(subject.untrained())
    count = min(_POOL, spec.train_examples)
    pool = Batches.of(spec.build_task().dataset("train", count, spec.data_seed), device, spec.ignore_label)
    strength = seed_strength(source, pool.split(_STREAM), bootstrap=200)
    drift = positional_drift(source, pool.take(slice(_STREAM)))
    return {"strength": strength.to_dict(), "drift": drift.to_dict()}


def _beginning(subject: Subject) -> Found:
    """Before training: shares and frequencies of the heads, on the examples of the two measures."""

    def both() -> Beginning:
        trace = trace_of(subject.untrained(), subject.chosen(_TRACED))
        use, follows = frequency_use(trace, counted="used"), behaviour(trace, counted="used")
        return Beginning(follows.positional, follows.symbolic, np.asarray(use.centre()))

    return _or_why(both)


def _extrapolation(subject: Subject) -> Found:
    """Accuracy on longer sequences of the test set."""
    return extrapolate(subject.run, examples=subject.examples, device=str(subject.device)).to_dict()


def _bands(subject: Subject) -> Found:
    """Effect in nats of freezing each frequency of each head."""
    source, batches = subject.source(), subject.batches(_TRACED)
    return _or_why(lambda: ablate_bands(source, batches))


def _of_language(measure: Callable[[Decoder, LanguageTask, int], Any]) -> Callable[[Subject], Found]:
    """A measure of language models; for other tasks the reason why it does not apply."""

    def measured(subject: Subject) -> Found:
        task, model = subject.run.spec.build_task(), subject.model()
        if not isinstance(task, LanguageTask):
            return {WHY: f"task: {task.name} has no documents; this measure only applies to language models."}
        return _or_why(lambda: measure(model, task, subject.examples))

    return measured


def _planted(measure: Callable[..., Any], counted: str) -> Callable[[Subject], Found]:
    """A measure of language models on few texts."""
    return _of_language(lambda model, task, examples: measure(model, task, **{counted: min(examples, _PLANTED)}))


def _extension(tuned: bool) -> Callable[[Subject], Found]:
    def measured(subject: Subject) -> Found:
        spec = subject.run.spec
        measure = _of_language(lambda model, task, _: extension(model, spec, task, tuned=tuned))
        return measure(subject)

    return measured


def _toeplitz(trace: AttentionTrace) -> Found:
    """Toeplitz share of each head's logits."""
    profiles = [written_out_profile(layer) for layer in trace]
    return {name: [getattr(each, name).tolist() for each in profiles] for name in ("share", "variance_explained")}


def _of_attention(lens: Callable[..., Any], **choices: Any) -> Callable[[Subject], Found]:
    """A lens applied to the trace of the first examples."""

    def measured(subject: Subject) -> Found:
        model, chosen = subject.model(), subject.chosen(_TRACED)
        return _or_why(lambda: lens(trace_of(model, chosen), **choices))

    return measured


def _or_why(measure: Callable[[], Any]) -> Found:
    """The measure, or the reason if it does not apply to the encoding.

    The model must be loaded before, so that a missing model is not recorded as a reason.
    """
    try:
        found = measure()
    except InputError as error:
        return {WHY: str(error)}
    return found if isinstance(found, dict) else found.to_dict()


class Measure(NamedTuple):
    """A measure of a trained model: its record type and its function."""

    record: type[Record]
    of: Callable[[Subject], Found]


MEASURES: dict[str, Measure] = {
    "position": Measure(HeadAblation, _position()),
    "position-loss": Measure(HeadAblation, _position(metric="loss")),
    "sets": Measure(
        HeadSets, lambda made: head_sets(made.source(), made.batches(_SETS), chance=made.run.spec.guess).to_dict()
    ),
    "position-sets": Measure(HeadSets, _position_sets),
    "bias": Measure(BiasSpread, _bias),
    "circuit": Measure(Circuit, _circuit),
    "contraction": Measure(Spectra, _contraction),
    "representation": Measure(Representation, _representation),
    "seed": Measure(Seed, _seed),
    "extrapolation": Measure(Extrapolation, _extrapolation),
    # positional and symbolic shares (by analysis of variance and by permutations) and frequency use, over the queries
    # that reach the output
    "behaviour": Measure(Behaviour, _of_attention(behaviour, counted="used")),
    "permutations": Measure(
        PermutationScores, _of_attention(permutation_scores, counted="used", queries=64, permutations=16)
    ),
    "frequency": Measure(FrequencyRecord, _of_attention(frequency_use, counted="used")),
    "beginning": Measure(Beginning, _beginning),
    "toeplitz": Measure(ToeplitzShares, _of_attention(_toeplitz)),
    "bands": Measure(BandAblation, _bands),
    # for language models
    "bits": Measure(Bits, _of_language(lambda model, task, examples: bits(model, task, texts=examples))),
    "needles": Measure(Needles, _planted(needles, "trials")),
    "copying": Measure(Copying, _planted(copying, "trials")),
    "patterns": Measure(HeadPatterns, _planted(head_patterns, "texts")),
    "extension": Measure(Extension, _extension(tuned=False)),
    "extension-tuned": Measure(Extension, _extension(tuned=True)),
}
"""The measures of a trained model by name: record type and function."""
KINDS: dict[str, type[Record]] = {  # record types by name
    "ablation": HeadAblation,
    "ablation-loss": HeadAblation,
    **{name: measure.record for name, measure in MEASURES.items()},
}


def as_record(name: str, content: Any, where: Path | str) -> Record | str:
    """The record of this name (`KINDS`), or the reason why the measure does not apply.

    Raises `InputError`, naming ``where`` and the field, for invalid content.
    """
    if isinstance(content, dict) and content.keys() - {_ASKED} == {WHY}:
        return checked(dict[str, Any], content, where)[WHY]
    return KINDS[name].from_dict(content, where)


def read_record(directory: Path, name: str, asked: Asked) -> dict[str, Any] | None:
    """The record for these examples, or None. Raises `InputError` if it is damaged."""
    for path in _places(directory, name, asked):
        if path.exists() and (content := _read(path)).pop(_ASKED) == asdict(asked):
            as_record(name, content, path)
            return content
    return None


def write_record(directory: Path, name: str, asked: Asked, content: dict[str, Any]) -> Path:
    """Write a record; returns its path."""
    first, other = _places(directory, name, asked)
    path = other if first.exists() and _read(first)[_ASKED] != asdict(asked) else first
    write_json(path, {**content, _ASKED: asdict(asked)})
    return path


def forget_measured(directory: Path) -> None:
    """Remove the records of a run without result and checkpoint, which starts again."""
    if not any((directory / name).exists() for name in (RESULT, CHECKPOINT)):
        for path in directory.glob("*.json"):
            if any(f"{path.stem}-".startswith(f"{name}-") for name in KINDS):
                path.unlink()


def _places(directory: Path, name: str, asked: Asked) -> tuple[Path, Path]:
    return directory / f"{name}.json", directory / f"{name}-{asked.split}-{asked.examples}.json"


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    _Asking.from_dict(content, path)
    return content
