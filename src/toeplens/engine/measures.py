"""What is measured of a finished run beside its head ablation, and the records of both in the run's directory.

The first record of a kind is ``NAME.json``. One of other examples never replaces it, and is never taken for it: that is
``NAME-SPLIT-EXAMPLES.json``.
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
from toeplens.lens.toeplitz.contraction import BiasSpread, bias_spread, contraction
from toeplens.model import Decoder
from toeplens.sources import DecoderGradients, DecoderSource
from toeplens.tasks import Examples
from toeplens.tasks.language import LanguageTask
from toeplens.training import Batches, Run, initial_model, plan_execution
from toeplens.training.run import CHECKPOINT, RESULT

WHY = "why"  # the field of a record that has no other, and says why an encoding has no such measure
_ASKED = "asked"  # the field that says of what examples a record was made
FEWEST = 5  # examples that the measure `representation` needs
_SETS, _STREAM, _TRACED, _SPECTRA = 512, 512, 256, 16  # examples that single measures look at, at most
_PLANTED = 32  # texts in which something is planted, at most
_POOL = 4096  # examples of the gradients' statistics, which need as many whatever else is looked at

Found = dict[str, Any]


@dataclass(frozen=True)
class Asked(Record):
    """What examples were asked for: how many, and of which split."""

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
    """At initialisation: what a batch leaves of the positional gradient, and where a step would move position."""

    strength: SeedStrength
    drift: PositionalDrift


@dataclass(frozen=True)
class Spectra(Record):
    """At initialisation: each head's spectrum with position over that without it, see `toeplens.lens.Contraction`."""

    width: Float[np.ndarray, "L H"]
    norm: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class Beginning(Record):
    """Before training: what each head follows, and the centre of the frequencies that it uses.

    As `toeplens.lens.Behaviour` and `toeplens.lens.FrequencyRecord` have them of the trained model.
    """

    positional: Float[np.ndarray, "L H"]
    symbolic: Float[np.ndarray, "L H"]
    centre: Float[np.ndarray, "L H"]


@dataclass(frozen=True)
class Subject:
    """A finished run, how many examples of which split are looked at, and where."""

    run: Run
    examples: int
    split: DataSplit
    device: torch.device

    def model(self) -> Decoder:
        """The trained model."""
        return self.run.model().to(self.device)

    def untrained(self) -> Decoder:
        """The model as the run began."""
        with torch.random.fork_rng(devices=[]):
            return initial_model(self.run.spec).to(self.device)

    def source(self) -> DecoderSource:
        """The trained model's attention."""
        return DecoderSource(self.model())

    def chosen(self, most: int | None = None) -> Examples:
        """The examples, at most so many of them."""
        count = self.examples if most is None else min(self.examples, most)
        return examples_of(self.run.spec, count, self.split)

    def batches(self, most: int | None = None) -> list[Batch]:
        """The same in batches on which every head of a layer can be replayed."""
        return batches_of(self.run.spec, self.chosen(most), self.device)


def measure_run(run: Run, name: str, *, examples: int, split: DataSplit = "test", device: str = "auto") -> Found:
    """One of `MEASURES` of a finished run, from its record ``NAME.json``, or measured now and written there.

    Arguments
        examples  how many examples the measure may look at; ``seed`` alone asks nothing of the trained model, and looks
                  at 4,096 examples of the training set (at all, if there are fewer) whatever is given
        split     which: of the ``test`` set, or ``train+test`` (70:30); longer texts are always those of the test set
        device    ``auto``, ``cpu``, ``cuda`` or ``cuda:N``

    Raises `InputError` for a run that is not finished or diverged, and for weights that are missing or damaged; of
    these nothing is recorded.
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
    """The measure; where it fails in another package's encoding, why."""
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
        again = f"delete {name}.json in the run's directory to measure again"
        return {WHY: f"encoding: {encoding!r} of the package {package} failed ({told}); {again}."}


def read_measures(directory: Path, names: Sequence[str], asked: Asked) -> dict[str, Found]:
    """Those of the named measures that the run directory holds of these examples."""
    found = {name: read_record(directory, name, asked) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def _position(**choices: Any) -> Callable[[Subject], Found]:
    """What is lost when position alone is taken from a head; by loss it shows in language, by accuracy hardly."""

    def measured(subject: Subject) -> Found:
        batches = subject.batches(_TRACED if choices else None)
        given = {"chance": subject.run.spec.guess, "cumulative": False, **choices}
        return ablate_heads(subject.source(), batches, intervention="position", **given).to_dict()

    return measured


def _position_sets(subject: Subject) -> Found:
    """A set of heads that suffices when position is taken from all others, which keep their content."""
    source, batches = subject.source(), subject.batches(_SETS)
    return _or_why(lambda: head_sets(source, batches, chance=subject.run.spec.guess, intervention="position"))


def _bias(subject: Subject) -> Found:
    """How much a bias on the distance weighs in each head."""
    model, task = subject.model(), subject.run.spec.build_task()
    layers = [model.encoding.for_layer(layer) for layer in range(len(model.blocks))]
    return _or_why(lambda: bias_spread(layers, task.length, causal=subject.run.spec.model.causal))


def _circuit(subject: Subject) -> Found:
    """The head on which most hangs: where it looks, what it depends on, who reads it."""
    task, seed = subject.run.spec.build_task(), subject.run.spec.data_seed
    source, batches = subject.source(), subject.batches(_TRACED)
    return _or_why(lambda: circuit(source, batches, task, seed))


def _contraction(subject: Subject) -> Found:
    """At initialisation: the spectra of the logits with position over those without it."""

    def spectra() -> Spectra:
        found = [contraction(layer) for layer in trace_of(subject.untrained(), subject.chosen(_SPECTRA))]
        return Spectra(
            *(torch.stack([getattr(each, name) for each in found]).cpu().numpy() for name in ("width", "norm"))
        )

    return _or_why(spectra)


def _representation(subject: Subject) -> Found:
    """The position part of the residual stream, layer by layer."""
    trace = trace_of(subject.model(), subject.chosen(_STREAM))
    least = max(FEWEST, min(16, len(trace.tokens)))  # its own bars, but for studies of toy size
    return representation(trace, least=least).to_dict()


def _seed(subject: Subject) -> Found:
    """At initialisation: what a batch leaves of the positional gradient, and where a step would move position."""
    spec, device = subject.run.spec, subject.device
    source = DecoderGradients(subject.untrained())
    count = min(_POOL, spec.train_examples)
    pool = Batches.of(spec.build_task().dataset("train", count, spec.data_seed), device, spec.ignore_label)
    strength = seed_strength(source, pool.split(_STREAM), bootstrap=200)
    drift = positional_drift(source, pool.take(slice(_STREAM)))
    return {"strength": strength.to_dict(), "drift": drift.to_dict()}


def _beginning(subject: Subject) -> Found:
    """Before training: what heads follow and which frequencies they use, on the examples of the two measures."""

    def both() -> Beginning:
        trace = trace_of(subject.untrained(), subject.chosen(_TRACED))
        use, follows = frequency_use(trace, counted="used"), behaviour(trace, counted="used")
        return Beginning(follows.positional, follows.symbolic, np.asarray(use.centre()))

    return _or_why(both)


def _extrapolation(subject: Subject) -> Found:
    """Accuracy on longer texts, always of the test set."""
    return extrapolate(subject.run, examples=subject.examples, device=str(subject.device)).to_dict()


def _bands(subject: Subject) -> Found:
    """What the model loses without each frequency of each head, in nats."""
    source, batches = subject.source(), subject.batches(_TRACED)
    return _or_why(lambda: ablate_bands(source, batches))


def _of_language(measure: Callable[[Decoder, LanguageTask, int], Any]) -> Callable[[Subject], Found]:
    """What a language model does with documents; of other tasks, that they have none."""

    def measured(subject: Subject) -> Found:
        task, model = subject.run.spec.build_task(), subject.model()
        if not isinstance(task, LanguageTask):
            return {WHY: f"task: {task.name} has no documents; this is measured of language models."}
        return _or_why(lambda: measure(model, task, subject.examples))

    return measured


def _planted(measure: Callable[..., Any], counted: str) -> Callable[[Subject], Found]:
    """A measure of language of few texts."""
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
    """What a lens finds in the trace of the first examples."""

    def measured(subject: Subject) -> Found:
        model, chosen = subject.model(), subject.chosen(_TRACED)
        return _or_why(lambda: lens(trace_of(model, chosen), **choices))

    return measured


def _or_why(measure: Callable[[], Any]) -> Found:
    """The measure; where an encoding has no such thing, why.

    That a model is not there is no reason of the encoding's, and is not recorded: it is asked for before.
    """
    try:
        found = measure()
    except InputError as error:
        return {WHY: str(error)}
    return found if isinstance(found, dict) else found.to_dict()


class Measure(NamedTuple):
    """What is measured of a trained model, and its record."""

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
    # what heads follow, by the analysis of variance and by sampled permutations, and which frequencies they use, over
    # the queries that the model uses
    "behaviour": Measure(Behaviour, _of_attention(behaviour, counted="used")),
    "permutations": Measure(
        PermutationScores, _of_attention(permutation_scores, counted="used", queries=64, permutations=16)
    ),
    "frequency": Measure(FrequencyRecord, _of_attention(frequency_use, counted="used")),
    "beginning": Measure(Beginning, _beginning),
    "toeplitz": Measure(ToeplitzShares, _of_attention(_toeplitz)),
    "bands": Measure(BandAblation, _bands),
    # of language models
    "bits": Measure(Bits, _of_language(lambda model, task, examples: bits(model, task, texts=examples))),
    "needles": Measure(Needles, _planted(needles, "trials")),
    "copying": Measure(Copying, _planted(copying, "trials")),
    "patterns": Measure(HeadPatterns, _planted(head_patterns, "texts")),
    "extension": Measure(Extension, _extension(tuned=False)),
    "extension-tuned": Measure(Extension, _extension(tuned=True)),
}
"""What a study can record of a trained model, by name: the type of its record, and what finds it."""
KINDS: dict[str, type[Record]] = {  # of record, by name
    "ablation": HeadAblation,
    "ablation-loss": HeadAblation,
    **{name: measure.record for name, measure in MEASURES.items()},
}


def as_record(name: str, content: Any, where: Path | str) -> Record | str:
    """The record of this name (`KINDS`), or the reason why an encoding has no such measure.

    What is neither raises an `InputError` that names ``where`` and the field. A record that says why there is no such
    measure has nothing else in it.
    """
    if isinstance(content, dict) and content.keys() - {_ASKED} == {WHY}:
        return checked(dict[str, Any], content, where)[WHY]
    return KINDS[name].from_dict(content, where)


def read_record(directory: Path, name: str, asked: Asked) -> dict[str, Any] | None:
    """The record of these examples, or None; a damaged one raises `InputError` (see `as_record`)."""
    for path in _places(directory, name, asked):
        if path.exists() and (content := _read(path)).pop(_ASKED) == asdict(asked):
            as_record(name, content, path)
            return content
    return None


def write_record(directory: Path, name: str, asked: Asked, content: dict[str, Any]) -> Path:
    """Write a record; returns where."""
    first, other = _places(directory, name, asked)
    path = other if first.exists() and _read(first)[_ASKED] != asdict(asked) else first
    write_json(path, {**content, _ASKED: asdict(asked)})
    return path


def forget_measured(directory: Path) -> None:
    """Remove what was measured of weights that are gone: a run that has no result and no checkpoint begins anew."""
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
