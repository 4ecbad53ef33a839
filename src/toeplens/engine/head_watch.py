"""What is looked at during training: what each head is worth and what its gradient says about position."""

from __future__ import annotations

from typing import Any, get_args

from toeplens.engine.examples import DataSplit, batches_of, examples_of, trace_of
from toeplens.ground import InputError, choose
from toeplens.lens import behaviour
from toeplens.lens.ablation.ablate import ablate_heads
from toeplens.lens.gradients.signal import seed_strength
from toeplens.model import Decoder
from toeplens.sources import DecoderSource
from toeplens.sources.decoder.gradients import DecoderGradients
from toeplens.training import Batches, RunSpec
from toeplens.training.watcher import moments

_SHARES = ("positional", "symbolic", "interaction", "variance")


class HeadWatch:
    """A `toeplens.training.watcher.Watcher`: heads and gradient seeds at ten moments, always on the same examples.

    With it the moments at which the deposit forms (theory, sections 7 and 8) and at which heads become positional or
    symbolic can be seen. Each row has

        accuracy  of the intact model, on the examples of the ablation
        drops     [layers][heads] accuracy lost without the head on these examples (`ablate_heads`, exact)
        loss      mean over all the examples that count
        signal    [layers][heads] norm of the batch mean of the diagonal means of dloss/dL (`seed_strength`)
        exponent  [layers][heads] slope of log SNR_n over n = 8, 16, ... up to the examples; -1/2 is pure cancellation
        positional, symbolic, interaction, variance  [layers][heads] see `toeplens.lens.behaviour`, of the queries that
                  the model uses, on the examples of the ablation; None where the encoding has no such table

    The ablation is most of the cost, so it has fewer examples: a drop's standard error is at most 1 / sqrt(ablated).
    docs/training.md has the share of the training time that was measured.

    Arguments
        spec      the run that is watched
        examples  how many of its examples are looked at; fewer where it has fewer
        ablated   on how many heads are silenced; no more than ``examples``
        split     which: ``test``, or ``train+test`` (70:30)
    """

    def __init__(self, spec: RunSpec, *, examples: int = 256, ablated: int = 64, split: DataSplit = "test") -> None:
        for name, value in (("examples", examples), ("ablated", ablated)):
            if value < 1:
                raise InputError(f"{name}: {value} was given; it must be at least 1.")
        choose("split", split, get_args(DataSplit))
        self.spec = spec
        self.examples = examples_of(spec, examples, split)
        self.ablated = examples_of(spec, min(ablated, len(self.examples)), split)
        if (self.ablated.labels == spec.ignore_label).all():
            raise InputError(f"ablated: {ablated} was given; none of these {len(self.ablated)} examples counts.")
        self.name = (
            f"heads and what they follow on {len(self.ablated)} and gradients on {len(self.examples)} {split} examples"
        )

    def moments(self, total_steps: int) -> list[int]:
        """The initialisation, the end, and eight moments between, more of them early."""
        return moments(total_steps)

    def look(self, model: Decoder, step: int) -> dict[str, Any]:
        """A row's content for ``model``, which is in evaluation mode."""
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
