"""Probes during training: ablation effect, shares and positional gradient of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import numpy as np
from jaxtyping import Float

from toeplens.engine.measures import DataSplit, batches_of, examples_of, trace_of
from toeplens.ground import InputError, choose, invalid
from toeplens.ground.records import Count, Each, NearlyShare, Number, Positive, Record, Share
from toeplens.lens import HeadAblation, behaviour
from toeplens.lens.ablation import ablate_by, ablate_heads
from toeplens.lens.gradients import seed_strength
from toeplens.lens.kit.interventions import Metric
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.sources.decoder.gradients import DecoderGradients
from toeplens.training import Batches, RunSpec
from toeplens.training.loop import moments
from toeplens.training.spec import Plateau

TOGETHER: tuple[Metric, ...] = ("accuracy", "loss")  # metrics of the same forward passes
ABLE = 0.9  # test accuracy of the event "able"
MOMENTS: dict[str, float | None] = {  # events for judging deposits, in multiples of the plateau's steps
    "able": None,
    "plateau": 1.0,
    "twice": 2.0,
    "four times": 4.0,
    "eight times": 8.0,
}
_Heads = Float[np.ndarray, "L H"]
_Shares = Annotated[_Heads, Each(NearlyShare)]
_SHARES = ("positional", "symbolic", "interaction", "variance")


@dataclass(frozen=True)
class Watched(Record):
    """A row of `HeadWatch`; shares are None if they do not apply to the encoding."""

    LATER = ("positional", "symbolic", "interaction", "variance", "events", "ablation", "by_loss")

    step: Count
    seconds: Positive
    accuracy: Share
    loss: Number | None
    drops: _Heads
    signal: _Heads
    exponent: _Heads
    positional: _Shares | None = None
    symbolic: _Shares | None = None
    interaction: _Shares | None = None
    variance: _Heads | None = None
    events: tuple[str, ...] = ()
    ablation: HeadAblation | None = None
    by_loss: HeadAblation | None = None


class HeadWatch:
    """A `toeplens.training.loop.EventWatcher` that probes heads and gradients at ten checkpoints.

    The examples are always the same. It shows when the deposit forms (theory, sections 7 and 8) and when heads become
    positional or symbolic. Each row has

        accuracy  accuracy of the intact model on the examples of the ablation
        drops     [layers][heads] accuracy drop of each head on these examples (`ablate_heads`, exact)
        loss      mean loss over all examples that count
        signal    [layers][heads] norm of the batch mean of the diagonal means of dloss/dL (`seed_strength`)
        exponent  [layers][heads] slope of log SNR_n over n = 8, 16, ... up to the examples; -1/2 is pure cancellation
        positional, symbolic, interaction, variance  [layers][heads] see `toeplens.lens.behaviour`, for queries that
                  reach the output, on the examples of the ablation; None if they do not apply to the encoding

    and at the events of `MOMENTS`

        events    names of the events
        ablation, by_loss  `ablate_heads` by accuracy and by loss on ``whole`` examples, with intervals; missing at the
                  end of training, where the ablation of the finished model follows

    Ablation is the most expensive part, so it uses fewer examples: the standard error of a drop is at most
    1 / sqrt(ablated). For the overhead see docs/how-to/watch-training.md.

    Arguments
        spec      the run
        examples  maximum number of examples
        ablated   number of examples for ablation, at most ``examples``
        whole     number of examples for ablation at `MOMENTS`; 0 for none
        split     ``test``, or ``train+test`` (70:30)
    """

    def __init__(
        self, spec: RunSpec, *, examples: int = 256, ablated: int = 64, whole: int = 0, split: DataSplit = "test"
    ) -> None:
        for name, value, least in (("examples", examples, 1), ("ablated", ablated, 1), ("whole", whole, 0)):
            if value < least:
                raise invalid(name, f"be at least {least}", value)
        choose("split", split, get_args(DataSplit))
        self.spec, self.whole = spec, whole
        self.split: DataSplit = split
        self.examples = examples_of(spec, examples, split)
        self.ablated = examples_of(spec, min(ablated, len(self.examples)), split)
        if (self.ablated.labels == spec.ignore_label).all():
            raise invalid(
                "ablated",
                f"be large enough to include a counted example (none of the first {len(self.ablated)} counts)",
                ablated,
            )
        self.rule = spec.plateau or Plateau()
        self.name = (
            f"heads and what they follow on {len(self.ablated)} and gradients on {len(self.examples)} {split} examples"
        )
        if whole:
            self.name += f", and at moments on {whole}"

    def moments(self, total_steps: int) -> list[int]:
        """Steps of the checkpoints: initialisation, end, and eight in between, denser early in training."""
        return moments(total_steps)

    def events(self, metrics: Sequence[dict[str, Any]]) -> list[str]:
        """The events of `MOMENTS` that the last evaluation is the first to reach."""
        if not self.whole:
            return []
        before = self._reached(metrics[:-1])
        return [name for name in self._reached(metrics) if name not in before]

    def _reached(self, metrics: Sequence[dict[str, Any]]) -> list[str]:
        if not metrics:
            return []
        plateau = self.rule.reached(metrics, self.spec.guess, self.spec.total_evaluations)
        able = any((row["test_accuracy"] or 0) > ABLE for row in metrics)
        past = 0.0 if plateau is None else metrics[-1]["step"] / plateau
        return [name for name, times in MOMENTS.items() if (able if times is None else past >= times)]

    def look_at(self, model: Decoder, events: Sequence[str], metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The ablations of ``model``, except for the finished one."""
        if self.spec.is_over(metrics):
            return {}
        batches = batches_of(self.spec, examples_of(self.spec, self.whole, self.split), model.readout.weight.device)
        found = ablate_by(TOGETHER, DecoderSource(model), batches, chance=self.spec.guess, cumulative=False)
        return {"ablation": found["accuracy"].to_dict(), "by_loss": found["loss"].to_dict()}

    def look(self, model: Decoder, step: int) -> dict[str, Any]:
        """The content of a row for ``model``, which is in evaluation mode."""
        device = model.readout.weight.device
        batches = batches_of(self.spec, self.ablated, device)
        heads = ablate_heads(DecoderSource(model), batches, cumulative=False, bootstrap=0)
        data = Batches.of(self.examples, device, self.spec.ignore_label)
        seeds = seed_strength(DecoderGradients(model), [data.take(slice(None))], levels=("logits",), bootstrap=0)
        logits = seeds.levels["logits"]
        try:
            follows = behaviour(trace_of(model, self.ablated), counted="used").to_dict()
        except InputError:
            follows = {}
        return {
            "accuracy": heads.baseline,
            "drops": heads.drops.tolist(),
            "loss": seeds.loss,
            "signal": logits.signal.tolist(),
            "exponent": logits.heads.exponent.tolist(),
            **{name: follows.get(name) for name in _SHARES},
        }
