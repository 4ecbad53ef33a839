"""Probes during training: ablation effect, shares and positional gradient of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import numpy as np
from jaxtyping import Float

from toeplens.backends import DecoderSource
from toeplens.backends.decoder.gradients import DecoderGradients
from toeplens.engine.extrapolation import evaluate_groups, group_accuracies
from toeplens.engine.measures import DataSplit, batches_of, examples_of, trace_of
from toeplens.lens import HeadAblation, behaviour
from toeplens.lens.ablation import ablate_heads, ablate_heads_by_metric
from toeplens.lens.gradients import seed_strength
from toeplens.lens.kit.interventions import Metric
from toeplens.model import Decoder
from toeplens.training import Batches, RunSpec
from toeplens.training.loop import default_probe_steps
from toeplens.training.spec import Plateau
from toeplens.utils import InputError, choose, invalid
from toeplens.utils.records import ApproxShare, FiniteFloat, ItemType, NonNegative, NonNegativeInt, Record, Share

ABLATION_METRICS: tuple[Metric, ...] = ("accuracy", "loss")  # metrics of the same forward passes
ABLE_ACCURACY = 0.9  # test accuracy of the event "able"
EVENTS: dict[str, float | None] = {  # events for judging deposits, in multiples of the plateau's steps
    "able": None,
    "plateau": 1.0,
    "twice": 2.0,
    "four times": 4.0,
    "eight times": 8.0,
}
_PerHead = Float[np.ndarray, "L H"]
_HeadShares = Annotated[_PerHead, ItemType(ApproxShare)]
_SHARE_FIELDS = ("positional", "symbolic", "interaction", "variance")


@dataclass(frozen=True)
class HeadProbeRow(Record):
    """A row of `HeadProbe`; shares are None if they do not apply to the encoding."""

    ADDED_LATER = ("positional", "symbolic", "interaction", "variance", "events", "ablation", "by_loss", "groups")

    step: NonNegativeInt
    seconds: NonNegative
    accuracy: Share
    loss: FiniteFloat | None
    drops: _PerHead
    signal: _PerHead
    exponent: _PerHead
    positional: _HeadShares | None = None
    symbolic: _HeadShares | None = None
    interaction: _HeadShares | None = None
    variance: _PerHead | None = None
    events: tuple[str, ...] = ()
    ablation: HeadAblation | None = None
    by_loss: HeadAblation | None = None
    groups: dict[str, Share] | None = None


class HeadProbe:
    """A `toeplens.training.loop.EventProbe` that probes heads and gradients at ten checkpoints.

    The examples are always the same. It shows when the deposit forms (theory, sections 7 and 8) and when heads become
    positional or symbolic. Each row has

        accuracy  accuracy of the intact model on the examples of the ablation
        drops     [layers][heads] accuracy drop of each head on these examples (`ablate_heads`, exact)
        loss      mean loss over all examples that count
        signal    [layers][heads] norm of the batch mean of the diagonal means of dloss/dL (`seed_strength`)
        exponent  [layers][heads] slope of log SNR_n over n = 8, 16, ... up to the examples; -1/2 is pure cancellation
        groups    accuracy by group of examples (`toeplens.tasks.Task.groups`)
        positional, symbolic, interaction, variance  [layers][heads] see `toeplens.lens.behaviour`, for queries that
                  reach the output, on the examples of the ablation; None if they do not apply to the encoding

    and at the events of `EVENTS`

        events    names of the events
        ablation, by_loss  `ablate_heads` by accuracy and by loss on ``per_event`` examples, with intervals; missing at
                  the end of training, where the ablation of the finished model follows

    Ablation is the most expensive part, so it uses fewer examples: the standard error of a drop is at most
    1 / sqrt(ablated). For the overhead see docs/how-to/watch-training.md.

    Arguments
        spec      the run
        examples  maximum number of examples
        ablated   number of examples for ablation, at most ``examples``
        per_event  number of examples for ablation at `EVENTS`; 0 for none
        split     ``test``, or ``train+test`` (70:30)
    """

    def __init__(
        self, spec: RunSpec, *, examples: int = 256, ablated: int = 64, per_event: int = 0, split: DataSplit = "test"
    ) -> None:
        for name, value, low in (("examples", examples, 1), ("ablated", ablated, 1), ("per_event", per_event, 0)):
            if value < low:
                raise invalid(name, f"be at least {low}", value)
        choose("split", split, get_args(DataSplit))
        self.spec, self.per_event = spec, per_event
        self.split: DataSplit = split
        self.task, self.examples = spec.build_task(), examples_of(spec, examples, split)
        self.ablated = examples_of(spec, min(ablated, len(self.examples)), split)
        if (self.ablated.labels == spec.ignore_label).all():
            raise invalid(
                "ablated",
                f"be large enough to include a counted example (none of the first {len(self.ablated)} counts)",
                ablated,
            )
        self.plateau_rule = spec.plateau or Plateau()
        self.name = (
            f"heads and what they follow on {len(self.ablated)} and gradients on {len(self.examples)} {split} examples"
        )
        if per_event:
            self.name += f", and at moments on {per_event}"

    def probe_steps(self, total_steps: int) -> list[int]:
        """Steps of the checkpoints: initialisation, end, and eight in between, denser early in training."""
        return default_probe_steps(total_steps)

    def events(self, metrics: Sequence[dict[str, Any]]) -> list[str]:
        """The `EVENTS` that the last evaluation is the first to reach."""
        if not self.per_event:
            return []
        earlier = self._events_reached(metrics[:-1])
        return [name for name in self._events_reached(metrics) if name not in earlier]

    def _events_reached(self, metrics: Sequence[dict[str, Any]]) -> list[str]:
        if not metrics:
            return []
        plateau = self.plateau_rule.find_step(metrics, self.spec.guess, self.spec.total_evaluations)
        is_able = any((row["test_accuracy"] or 0) > ABLE_ACCURACY for row in metrics)
        ratio = 0.0 if plateau is None else metrics[-1]["step"] / plateau
        return [name for name, multiple in EVENTS.items() if (is_able if multiple is None else ratio >= multiple)]

    def measure_events(
        self, model: Decoder, events: Sequence[str], metrics: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """The ablations of ``model``, except for the finished one."""
        if self.spec.is_finished(metrics):
            return {}
        batches = batches_of(self.spec, examples_of(self.spec, self.per_event, self.split), model.readout.weight.device)
        source, guess = DecoderSource(model), self.spec.guess
        ablations = ablate_heads_by_metric(ABLATION_METRICS, source, batches, chance=guess, cumulative=False)
        return {"ablation": ablations["accuracy"].to_dict(), "by_loss": ablations["loss"].to_dict()}

    def measure(self, model: Decoder, step: int) -> dict[str, Any]:
        """The content of a row for ``model``, which is in evaluation mode."""
        device = model.readout.weight.device
        batches = batches_of(self.spec, self.ablated, device)
        ablation = ablate_heads(DecoderSource(model), batches, cumulative=False, bootstrap=0)
        data = Batches.of(self.examples, device, self.spec.ignore_label)
        gradients = seed_strength(DecoderGradients(model), [data.take(slice(None))], levels=("logits",), bootstrap=0)
        logits = gradients.levels["logits"]
        try:
            shares = behaviour(trace_of(model, self.ablated), counted="used").to_dict()
        except InputError:
            shares = {}
        return {
            "accuracy": ablation.baseline,
            "drops": ablation.drops.tolist(),
            "loss": gradients.loss,
            "signal": logits.signal.tolist(),
            "exponent": logits.heads.exponent.tolist(),
            **self._group_accuracies(model),
            **{name: shares.get(name) for name in _SHARE_FIELDS},
        }

    def _group_accuracies(self, model: Decoder) -> dict[str, Any]:
        if not self.task.groups(self.examples):
            return {}
        sums = evaluate_groups(model, self.task, self.examples, self.spec.ignore_label)
        return {"groups": group_accuracies(sums)}
