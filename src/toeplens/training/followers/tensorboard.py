"""TensorBoard: event files in the run's own directory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from toeplens.training.followers.protocol import RunEnd, RunFacts, figures, imported

DIRECTORY = "tensorboard"
_LONGEST = 100  # characters


class TensorBoard:
    """Writes scalars into ``tensorboard/LABEL`` of the run's directory, by torch's own writer.

    A run that goes on has a further event file, which tells TensorBoard to forget what came after the checkpoint.
    """

    def __init__(self, label: str | None = None, group: str | None = None) -> None:
        """``label`` is what people call the run; the study is the directory above."""
        self.label = label

    def begin(self, run: RunFacts) -> None:
        label = self.label or run.title
        had = sorted(run.directory.glob(f"{DIRECTORY}/*/"))
        directory = had[0] if had else run.directory / DIRECTORY / _as_name(label)
        imported("tensorboard", "tensorboard")  # torch's has another sentence
        writer = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self.writer = writer(str(directory), purge_step=run.step + 1)
        if not had:
            self.writer.add_text("run", label)
            self.writer.add_text("spec", f"```json\n{json.dumps(run.spec.content, indent=2)}\n```")

    def look(self, row: Mapping[str, float]) -> None:
        for name, value in figures(row).items():
            self.writer.add_scalar(name, value, int(row["step"]))
        self.writer.flush()

    def end(self, end: RunEnd) -> None:
        if end.reason is not None:
            self.writer.add_text("end", f"{end.status}: {end.reason}", end.step)
        self.writer.close()


def _as_name(label: str) -> str:
    """A label as the name of a directory, which is what TensorBoard calls a run."""
    return re.sub(r"[^\w.+=-]+", "-", label).strip("-.")[:_LONGEST] or "run"
