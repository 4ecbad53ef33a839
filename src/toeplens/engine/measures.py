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
from toeplens.backends import DecoderGradients, DecoderSource
from toeplens.encodings.registry import package_of
from toeplens.engine import language
from toeplens.engine.circuit import Circuit, circuit
from toeplens.engine.extrapolation import Extrapolation, extrapolate
from toeplens.lens.kit.terms import dense_profile
from toeplens.lens.kit.toeplitz import ToeplitzShares
from toeplens.lens.toeplitz.spectrum import BiasSpread, bias_spread, contraction
from toeplens.model import Decoder
from toeplens.tasks import TEST_SHARE, Examples
from toeplens.tasks.language import LanguageTask
from toeplens.training import Batches, Run, RunSpec, initial_model, plan_execution
from toeplens.training.batches import LOGITS_PER_PASS
from toeplens.training.run import CHECKPOINT, RESULT
from toeplens.utils import InputError, ToeplensError, choose, invalid, read_json, validate_as, write_json
from toeplens.utils.errors import first_line
from toeplens.utils.outputs import lock_directory
from toeplens.utils.records import PositiveInt, Record
from toeplens.utils.renamed import rename_keys

DataSplit = Literal["test", "train+test"]  # the set that examples are taken from
_ABLATION_TOKENS = {"cpu": 2**16, "cuda": 2**20}
REASON_FIELD = "reason"  # the only field of a record for a measure that does not apply; holds the reason
_REQUEST_FIELD = "asked"  # the field with the examples of a record
MIN_EXAMPLES = 5  # minimum number of examples for `representation`
_MAX_SETS, _MAX_STREAM, _MAX_TRACED, _MAX_SPECTRA = 512, 512, 256, 16  # maximum number of examples of some measures
_PLANTED_TEXTS = 32  # maximum number of texts with planted spans
_GRADIENT_EXAMPLES = 4096  # examples for gradient statistics, independent of the requested number

Content = dict[str, Any]


@dataclass(frozen=True)
class ExampleRequest(Record):
    """The requested examples: number and split."""

    examples: PositiveInt
    split: DataSplit = "test"

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise invalid("examples", "be at least 1", self.examples)
        choose("split", self.split, get_args(DataSplit))


@dataclass(frozen=True)
class _RequestedRecord(Record):
    asked: ExampleRequest


@dataclass(frozen=True)
class InitialGradients(Record):
    """At initialisation: strength of the positional gradient over a batch, and positional drift of a step."""

    strength: lens.SeedStrength
    drift: lens.PositionalDrift


@dataclass(frozen=True)
class InitialSpectra(Record):
    """At initialisation: each head's spectrum with position relative to that without (`toeplens.lens.Contraction`)."""

    width: Float[np.ndarray, "L H"]
    norm: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class InitialShares(Record):
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
    available = min(int(spec.test_examples / TEST_SHARE), int(spec.train_examples / (1 - TEST_SHARE)))
    examples = min(examples, available)
    test = max(1, round(TEST_SHARE * examples))
    train = max(1, examples - test)
    parts = [task.dataset("train", train, spec.data_seed), task.dataset("test", test, spec.data_seed)]
    return Examples.join(parts)


def ablation_batch_size(spec: RunSpec, length: int, device: torch.device) -> int:
    """The number of sequences per batch for ablating every head of a layer at once."""
    tokens = _ABLATION_TOKENS[device.type]
    if spec.model.readout == "each":
        tokens = min(tokens, LOGITS_PER_PASS[device.type] // spec.model.num_classes)
    return max(1, tokens // (spec.model.num_heads + 1) // length)


def batches_of(spec: RunSpec, examples: Examples, device: torch.device) -> list[lens.Batch]:
    """Batches on which every head of a layer can be ablated at once."""
    size = ablation_batch_size(spec, examples.tokens.shape[1], device)
    return list(Batches.of(examples, device, spec.ignore_label).split(size))


def trace_of(model: Decoder, examples: Examples) -> lens.AttentionTrace:
    """The attention trace of the model on the examples."""
    data = Batches.of(examples, model.readout.weight.device)
    return lens.AttentionTrace(DecoderSource(model), data.tokens, data.lengths)


@dataclass(frozen=True)
class MeasureInputs:
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

    def untrained_model(self) -> Decoder:
        """The model at initialisation."""
        with torch.random.fork_rng(devices=[]):
            return initial_model(self.run.spec).to(self.device)

    def load_examples(self, limit: int | None = None) -> Examples:
        """The examples, at most ``limit``."""
        count = self.examples if limit is None else min(self.examples, limit)
        return examples_of(self.run.spec, count, self.split)

    def batches(self, limit: int | None = None) -> list[lens.Batch]:
        """The examples in batches on which every head of a layer can be ablated at once."""
        return batches_of(self.run.spec, self.load_examples(limit), self.device)

    def trace(self, limit: int = _MAX_TRACED) -> lens.AttentionTrace:
        """The trained model's attention on at most so many examples."""
        return trace_of(self.model, self.load_examples(limit))


@dataclass(frozen=True)
class Measure:
    """A measure of a trained model.

    record_type  the type of its record
    compute      the measure; raises `InputError` if it does not apply to the run, which is recorded as the reason
    """

    record_type: type[Record]
    compute: Callable[[MeasureInputs], Any]


def _ablate_position(inputs: MeasureInputs, limit: int | None, **choices: Any) -> lens.HeadAblation:
    """Effects of removing position from each head."""
    arguments: Any = {"chance": inputs.run.spec.guess, "cumulative": False, **choices}
    return lens.ablate_heads(inputs.source, inputs.batches(limit), intervention="position", **arguments)


def _head_sets(inputs: MeasureInputs, **choices: Any) -> lens.HeadSets:
    """A set of heads that suffices when all other heads, or their position alone, are ablated."""
    return lens.head_sets(inputs.source, inputs.batches(_MAX_SETS), chance=inputs.run.spec.guess, **choices)


def _bias_spread(inputs: MeasureInputs) -> BiasSpread:
    model, task = inputs.model, inputs.run.spec.build_task()
    layers = [model.encoding.for_layer(layer) for layer in range(len(model.blocks))]
    return bias_spread(layers, task.length, causal=inputs.run.spec.model.causal)


def _find_circuit(inputs: MeasureInputs) -> Circuit:
    spec = inputs.run.spec
    return circuit(inputs.source, inputs.batches(_MAX_TRACED), spec.build_task(), spec.data_seed)


def _initial_spectra(inputs: MeasureInputs) -> InitialSpectra:
    spectra = [contraction(layer) for layer in trace_of(inputs.untrained_model(), inputs.load_examples(_MAX_SPECTRA))]
    return InitialSpectra(
        *(torch.stack([getattr(s, name) for s in spectra]).cpu().numpy() for name in ("width", "norm"))
    )


def _representation(inputs: MeasureInputs) -> lens.Representation:
    trace = inputs.trace(_MAX_STREAM)
    minimum = max(MIN_EXAMPLES, min(16, len(trace.tokens)))  # its own defaults, except in very small studies
    return lens.representation(trace, min_sequences=minimum)


def _initial_gradients(inputs: MeasureInputs) -> InitialGradients:
    spec = inputs.run.spec
    source = DecoderGradients(inputs.untrained_model())
    examples = spec.build_task().dataset("train", min(_GRADIENT_EXAMPLES, spec.train_examples), spec.data_seed)
    pool = Batches.of(examples, inputs.device, spec.ignore_label)
    strength = lens.seed_strength(source, pool.split(_MAX_STREAM), bootstrap=200)
    return InitialGradients(strength, lens.positional_drift(source, pool.take(slice(_MAX_STREAM))))


def _initial_shares(inputs: MeasureInputs) -> InitialShares:
    """Before training, on the examples of the two measures."""
    trace = trace_of(inputs.untrained_model(), inputs.load_examples(_MAX_TRACED))
    use, scores = lens.frequency_use(trace, counted="used"), lens.behaviour(trace, counted="used")
    return InitialShares(scores.positional, scores.symbolic, np.asarray(use.centre()))


def _toeplitz_shares(inputs: MeasureInputs) -> ToeplitzShares:
    profiles = [dense_profile(layer) for layer in inputs.trace()]
    shares = [profile.share.numpy(force=True) for profile in profiles]
    return ToeplitzShares(np.stack(shares), np.stack([p.variance_explained.numpy(force=True) for p in profiles]))


def _planted_measure(measure: Callable[..., Any], count: str) -> Callable[[MeasureInputs], Any]:
    """A measure of few texts with planted spans, whose argument ``count`` is their number."""
    return lambda x: measure(x.model, x.language, **{count: min(x.examples, _PLANTED_TEXTS)})


def _extension(inputs: MeasureInputs, *, tuned: bool) -> language.Extension:
    return language.extension(inputs.model, inputs.run.spec, inputs.language, tuned=tuned)


_SAMPLING: Any = {"counted": "used", "queries": 64, "permutations": 16}
MEASURES: dict[str, Measure] = {
    "position": Measure(lens.HeadAblation, partial(_ablate_position, limit=None)),
    "position-loss": Measure(lens.HeadAblation, partial(_ablate_position, limit=_MAX_TRACED, metric="loss")),
    "sets": Measure(lens.HeadSets, _head_sets),
    "position-sets": Measure(lens.HeadSets, partial(_head_sets, intervention="position")),
    "bias": Measure(BiasSpread, _bias_spread),
    "circuit": Measure(Circuit, _find_circuit),
    "contraction": Measure(InitialSpectra, _initial_spectra),
    "representation": Measure(lens.Representation, _representation),
    "seed": Measure(InitialGradients, _initial_gradients),
    "extrapolation": Measure(Extrapolation, lambda x: extrapolate(x.run, examples=x.examples, device=str(x.device))),
    # over the queries that reach the output
    "behaviour": Measure(lens.Behaviour, lambda x: lens.behaviour(x.trace(), counted="used")),
    "permutations": Measure(lens.PermutationScores, lambda x: lens.permutation_scores(x.trace(), **_SAMPLING)),
    "frequency": Measure(lens.FrequencyRecord, lambda x: lens.frequency_use(x.trace(), counted="used")),
    "beginning": Measure(InitialShares, _initial_shares),
    "toeplitz": Measure(ToeplitzShares, _toeplitz_shares),
    "bands": Measure(lens.BandAblation, lambda x: lens.ablate_bands(x.source, x.batches(_MAX_TRACED))),
    # of language models
    "bits": Measure(language.BitsPerByte, lambda x: language.bits_per_byte(x.model, x.language, texts=x.examples)),
    "needles": Measure(language.Needles, _planted_measure(language.needles, "trials")),
    "copying": Measure(language.Copying, _planted_measure(language.copying, "trials")),
    "patterns": Measure(language.HeadPatterns, _planted_measure(language.head_patterns, "texts")),
    "extension": Measure(language.Extension, partial(_extension, tuned=False)),
    "extension-tuned": Measure(language.Extension, partial(_extension, tuned=True)),
}
"""The measures of a trained model by name."""

# ---- records --------------------------------------------------------------------------------------------------------


def measure_run(run: Run, name: str, *, examples: int, split: DataSplit = "test", device: str = "auto") -> Content:
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
    request = ExampleRequest(examples, split)
    content = read_record(run.directory, name, request)
    if content is None:
        with lock_directory(run.directory, "run"):
            inputs = MeasureInputs(run, examples, split, plan_execution(device, "off", "float32").device)
            content = _compute_content(name, inputs)
            write_record(run.directory, name, request, content)
    return content


def _compute_content(name: str, inputs: MeasureInputs) -> Content:
    """The measure, or the reason why it does not apply, or why an encoding of another package fails."""
    _ = inputs.model  # missing weights are no reason
    try:
        return MEASURES[name].compute(inputs).to_dict()
    except InputError as error:
        return {REASON_FIELD: str(error)}
    except (ToeplensError, OSError, MemoryError):
        raise
    except Exception as error:
        encoding = inputs.run.spec.model.encoding
        if (package := package_of(encoding)) is None:
            raise
        message = f"{type(error).__name__}: {first_line(error)}"
        hint = f"to measure again, delete {name}.json in the run's directory"
        return {REASON_FIELD: f"encoding: {encoding!r} of the package {package} failed ({message}); {hint}."}


def read_measures(directory: Path, names: Sequence[str], request: ExampleRequest) -> dict[str, Content]:
    """The recorded measures among ``names`` for these examples."""
    records = {name: read_record(directory, name, request) for name in names}
    return {name: content for name, content in records.items() if content is not None}


def as_record(name: str, content: Any, where: Path | str) -> Record | str:
    """The record of a measure or an ablation, or the reason why the measure does not apply.

    Raises `InputError`, naming ``where`` and the field, for invalid content.
    """
    content = rename_keys(content, {REASON_FIELD})
    if isinstance(content, dict) and content.keys() - {_REQUEST_FIELD} == {REASON_FIELD}:
        return validate_as(dict[str, Any], content, where)[REASON_FIELD]
    record_type = MEASURES[name].record_type if name in MEASURES else lens.HeadAblation
    return record_type.from_dict(content, where)


def read_record(directory: Path, name: str, request: ExampleRequest) -> dict[str, Any] | None:
    """The record for these examples, or None. Raises `InputError` if it is damaged."""
    for path in _record_paths(directory, name, request):
        if path.exists() and (content := _read_content(path)).pop(_REQUEST_FIELD) == asdict(request):
            as_record(name, content, path)
            return content
    return None


def write_record(directory: Path, name: str, request: ExampleRequest, content: dict[str, Any]) -> Path:
    """Write a record; returns its path."""
    first, other = _record_paths(directory, name, request)
    path = other if first.exists() and _read_content(first)[_REQUEST_FIELD] != asdict(request) else first
    write_json(path, {**content, _REQUEST_FIELD: asdict(request)})
    return path


def remove_stale_records(directory: Path) -> None:
    """Remove the records of a run without result and checkpoint, which starts again."""
    if not any((directory / name).exists() for name in (RESULT, CHECKPOINT)):
        for path in directory.glob("*.json"):
            if any(f"{path.stem}-".startswith(f"{name}-") for name in ("ablation", *MEASURES)):
                path.unlink()


def _record_paths(directory: Path, name: str, request: ExampleRequest) -> tuple[Path, Path]:
    return directory / f"{name}.json", directory / f"{name}-{request.split}-{request.examples}.json"


def _read_content(path: Path) -> dict[str, Any]:
    content = read_json(path)
    _RequestedRecord.from_dict(content, path)
    return content
