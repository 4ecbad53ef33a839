"""Examples and measures of a finished run, and its records in its directory.

The first record of a measure is ``NAME.json``. Records for other examples are ``NAME-SPLIT-EXAMPLES.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float

from toeplens import lens
from toeplens.encodings.registry import package_of
from toeplens.engine import language
from toeplens.engine.circuit import Circuit, circuit
from toeplens.engine.extrapolation import Extrapolation, extrapolate
from toeplens.ground import InputError, ToeplensError, checked, choose, invalid, read_json, write_json
from toeplens.ground.errors import first_line
from toeplens.ground.outputs import locked
from toeplens.ground.records import AtLeast1, Record
from toeplens.lens.kit.terms import written_out_profile
from toeplens.lens.kit.toeplitz import ToeplitzShares
from toeplens.lens.toeplitz.spectrum import BiasSpread, bias_spread, contraction
from toeplens.model import Decoder
from toeplens.sources import DecoderGradients, DecoderSource
from toeplens.tasks import TEST_SHARE, Examples
from toeplens.tasks.language import LanguageTask
from toeplens.training import Batches, Run, RunSpec, initial_model, plan_execution
from toeplens.training.batches import ANSWERS_AT_ONCE
from toeplens.training.run import CHECKPOINT, RESULT

DataSplit = Literal["test", "train+test"]  # the set that examples are taken from
_REPLAYED_TOKENS = {"cpu": 2**16, "cuda": 2**20}
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

    strength: lens.SeedStrength
    drift: lens.PositionalDrift


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


def examples_of(spec: RunSpec, examples: int, split: DataSplit = "test") -> Examples:
    """At most ``examples`` examples of a run: from the test set, or from both sets in the proportion 70:30.

    If one set is too small, fewer examples are taken from both, in the same proportion.
    """
    task = spec.build_task()
    if choose("split", split, get_args(DataSplit)) == "test":
        return task.dataset("test", min(examples, spec.test_examples), spec.data_seed)
    most = min(int(spec.test_examples / TEST_SHARE), int(spec.train_examples / (1 - TEST_SHARE)))
    examples = min(examples, most)
    test = max(1, round(TEST_SHARE * examples))
    train = max(1, examples - test)
    parts = [task.dataset("train", train, spec.data_seed), task.dataset("test", test, spec.data_seed)]
    return Examples.join(parts)


def replayed_at_once(spec: RunSpec, length: int, device: torch.device) -> int:
    """The number of sequences per batch for ablating every head of a layer at once."""
    tokens = _REPLAYED_TOKENS[device.type]
    if spec.model.readout == "each":
        tokens = min(tokens, ANSWERS_AT_ONCE[device.type] // spec.model.num_classes)
    return max(1, tokens // (spec.model.num_heads + 1) // length)


def batches_of(spec: RunSpec, examples: Examples, device: torch.device) -> list[lens.Batch]:
    """Batches on which every head of a layer can be ablated at once."""
    size = replayed_at_once(spec, examples.tokens.shape[1], device)
    return list(Batches.of(examples, device, spec.ignore_label).split(size))


def trace_of(model: Decoder, examples: Examples) -> lens.AttentionTrace:
    """The attention trace of the model on the examples."""
    data = Batches.of(examples, model.readout.weight.device)
    return lens.AttentionTrace(DecoderSource(model), data.tokens, data.lengths)


@dataclass(frozen=True)
class Subject:
    """A finished run, the examples to evaluate, and the device."""

    run: Run
    examples: int
    split: DataSplit
    device: torch.device

    @cached_property
    def model(self) -> Decoder:
        """The trained model."""
        return self.run.model().to(self.device)

    @property
    def source(self) -> DecoderSource:
        """The trained model's attention."""
        return DecoderSource(self.model)

    @property
    def language(self) -> LanguageTask:
        """The run's task; raises `InputError` if it is not a language task."""
        task = self.run.spec.build_task()
        if not isinstance(task, LanguageTask):
            raise InputError(f"task: {task.name} has no documents; this measure only applies to language models.")
        return task

    def untrained(self) -> Decoder:
        """The model at initialisation."""
        with torch.random.fork_rng(devices=[]):
            return initial_model(self.run.spec).to(self.device)

    def chosen(self, most: int | None = None) -> Examples:
        """The examples, at most ``most``."""
        count = self.examples if most is None else min(self.examples, most)
        return examples_of(self.run.spec, count, self.split)

    def batches(self, most: int | None = None) -> list[lens.Batch]:
        """The examples in batches on which every head of a layer can be ablated at once."""
        return batches_of(self.run.spec, self.chosen(most), self.device)

    def trace(self, most: int = _TRACED) -> lens.AttentionTrace:
        """The trained model's attention on at most so many examples."""
        return trace_of(self.model, self.chosen(most))


@dataclass(frozen=True)
class Measure:
    """A measure of a trained model.

    record  the type of its record
    of      the measure; raises `InputError` if it does not apply to the run, which is recorded as the reason
    """

    record: type[Record]
    of: Callable[[Subject], Any]


def _position(subject: Subject, most: int | None, **choices: Any) -> lens.HeadAblation:
    """Effects of removing position from each head."""
    given: Any = {"chance": subject.run.spec.guess, "cumulative": False, **choices}
    return lens.ablate_heads(subject.source, subject.batches(most), intervention="position", **given)


def _sets(subject: Subject, **choices: Any) -> lens.HeadSets:
    """A set of heads that suffices when all other heads, or their position alone, are ablated."""
    return lens.head_sets(subject.source, subject.batches(_SETS), chance=subject.run.spec.guess, **choices)


def _bias(subject: Subject) -> BiasSpread:
    model, task = subject.model, subject.run.spec.build_task()
    layers = [model.encoding.for_layer(layer) for layer in range(len(model.blocks))]
    return bias_spread(layers, task.length, causal=subject.run.spec.model.causal)


def _circuit(subject: Subject) -> Circuit:
    spec = subject.run.spec
    return circuit(subject.source, subject.batches(_TRACED), spec.build_task(), spec.data_seed)


def _contraction(subject: Subject) -> Spectra:
    found = [contraction(layer) for layer in trace_of(subject.untrained(), subject.chosen(_SPECTRA))]
    return Spectra(*(torch.stack([getattr(each, name) for each in found]).cpu().numpy() for name in ("width", "norm")))


def _representation(subject: Subject) -> lens.Representation:
    trace = subject.trace(_STREAM)
    least = max(FEWEST, min(16, len(trace.tokens)))  # its own defaults, except in very small studies
    return lens.representation(trace, least=least)


def _seed(subject: Subject) -> Seed:
    spec = subject.run.spec
    source = DecoderGradients(subject.untrained())
    examples = spec.build_task().dataset("train", min(_POOL, spec.train_examples), spec.data_seed)
    pool = Batches.of(examples, subject.device, spec.ignore_label)
    strength = lens.seed_strength(source, pool.split(_STREAM), bootstrap=200)
    return Seed(strength, lens.positional_drift(source, pool.take(slice(_STREAM))))


def _beginning(subject: Subject) -> Beginning:
    """Before training, on the examples of the two measures."""
    trace = trace_of(subject.untrained(), subject.chosen(_TRACED))
    use, follows = lens.frequency_use(trace, counted="used"), lens.behaviour(trace, counted="used")
    return Beginning(follows.positional, follows.symbolic, np.asarray(use.centre()))


def _toeplitz(subject: Subject) -> ToeplitzShares:
    profiles = [written_out_profile(layer) for layer in subject.trace()]
    shares = [profile.share.numpy(force=True) for profile in profiles]
    return ToeplitzShares(np.stack(shares), np.stack([each.variance_explained.numpy(force=True) for each in profiles]))


def _planted(measure: Callable[..., Any], count: str) -> Callable[[Subject], Any]:
    """A measure of few texts with planted spans, whose argument ``count`` is their number."""
    return lambda of: measure(of.model, of.language, **{count: min(of.examples, _PLANTED)})


def _extension(subject: Subject, *, tuned: bool) -> language.Extension:
    return language.extension(subject.model, subject.run.spec, subject.language, tuned=tuned)


_PERMUTED: Any = {"counted": "used", "queries": 64, "permutations": 16}
MEASURES: dict[str, Measure] = {
    "position": Measure(lens.HeadAblation, partial(_position, most=None)),
    "position-loss": Measure(lens.HeadAblation, partial(_position, most=_TRACED, metric="loss")),
    "sets": Measure(lens.HeadSets, _sets),
    "position-sets": Measure(lens.HeadSets, partial(_sets, intervention="position")),
    "bias": Measure(BiasSpread, _bias),
    "circuit": Measure(Circuit, _circuit),
    "contraction": Measure(Spectra, _contraction),
    "representation": Measure(lens.Representation, _representation),
    "seed": Measure(Seed, _seed),
    "extrapolation": Measure(
        Extrapolation, lambda of: extrapolate(of.run, examples=of.examples, device=str(of.device))
    ),
    # over the queries that reach the output
    "behaviour": Measure(lens.Behaviour, lambda of: lens.behaviour(of.trace(), counted="used")),
    "permutations": Measure(lens.PermutationScores, lambda of: lens.permutation_scores(of.trace(), **_PERMUTED)),
    "frequency": Measure(lens.FrequencyRecord, lambda of: lens.frequency_use(of.trace(), counted="used")),
    "beginning": Measure(Beginning, _beginning),
    "toeplitz": Measure(ToeplitzShares, _toeplitz),
    "bands": Measure(lens.BandAblation, lambda of: lens.ablate_bands(of.source, of.batches(_TRACED))),
    # of language models
    "bits": Measure(language.Bits, lambda of: language.bits(of.model, of.language, texts=of.examples)),
    "needles": Measure(language.Needles, _planted(language.needles, "trials")),
    "copying": Measure(language.Copying, _planted(language.copying, "trials")),
    "patterns": Measure(language.HeadPatterns, _planted(language.head_patterns, "texts")),
    "extension": Measure(language.Extension, partial(_extension, tuned=False)),
    "extension-tuned": Measure(language.Extension, partial(_extension, tuned=True)),
}
"""The measures of a trained model by name."""

# ---- records --------------------------------------------------------------------------------------------------------


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
    choose("measure", name, MEASURES)
    run.must_be_complete()
    asked = Asked(examples, split)
    content = read_record(run.directory, name, asked)
    if content is None:
        with locked(run.directory, "run"):
            subject = Subject(run, examples, split, plan_execution(device, "off", "float32").device)
            content = _measured(name, subject)
            write_record(run.directory, name, asked, content)
    return content


def _measured(name: str, subject: Subject) -> Found:
    """The measure, or the reason why it does not apply, or why an encoding of another package fails."""
    _ = subject.model  # missing weights are no reason
    try:
        return MEASURES[name].of(subject).to_dict()
    except InputError as error:
        return {WHY: str(error)}
    except (ToeplensError, OSError, MemoryError):
        raise
    except Exception as error:
        encoding = subject.run.spec.model.encoding
        if (package := package_of(encoding)) is None:
            raise
        told = f"{type(error).__name__}: {first_line(error)}"
        again = f"to measure again, delete {name}.json in the run's directory"
        return {WHY: f"encoding: {encoding!r} of the package {package} failed ({told}); {again}."}


def read_measures(directory: Path, names: Sequence[str], asked: Asked) -> dict[str, Found]:
    """The recorded measures among ``names`` for these examples."""
    found = {name: read_record(directory, name, asked) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def as_record(name: str, content: Any, where: Path | str) -> Record | str:
    """The record of a measure or an ablation, or the reason why the measure does not apply.

    Raises `InputError`, naming ``where`` and the field, for invalid content.
    """
    if isinstance(content, dict) and content.keys() - {_ASKED} == {WHY}:
        return checked(dict[str, Any], content, where)[WHY]
    kind = MEASURES[name].record if name in MEASURES else lens.HeadAblation
    return kind.from_dict(content, where)


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
            if any(f"{path.stem}-".startswith(f"{name}-") for name in ("ablation", *MEASURES)):
                path.unlink()


def _places(directory: Path, name: str, asked: Asked) -> tuple[Path, Path]:
    return directory / f"{name}.json", directory / f"{name}-{asked.split}-{asked.examples}.json"


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    _Asking.from_dict(content, path)
    return content
