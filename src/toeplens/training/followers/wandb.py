"""Weights & Biases: a run of its own for each run, under the same name, grouped by study."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from toeplens.training.followers.behind import Behind
from toeplens.training.followers.protocol import RunEnd, RunFacts, figures, imported

_PROJECT = "toeplens"
_PATIENCE = "15"  # seconds for a run to be opened


class WandB(Behind):
    """Logs to the project of ``WANDB_PROJECT``, else ``toeplens``; all else is as W&B's own variables say.

    The run's id is that of its directory, so that one that goes on goes on there too; rows that W&B has from before a
    kill are not sent again.
    """

    def opened(self, run: RunFacts) -> None:
        wandb: Any = imported("wandb", "wandb")
        wandb.setup(settings=wandb.Settings(silent=True))  # else it asks at the terminal for a key that is missing
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run.name,
            name=self.label or run.title,
            group=self.group,
            config=run.spec.content,
            resume="allow",
            reinit="create_new",  # of models trained as one, each has its own
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", _PATIENCE))
            ),
        )

    def sent(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        if step >= self.run.step:
            self.run.log(figures(row), step=step)

    def closed(self, end: RunEnd) -> None:
        told = {name: value for name, value in end.result.items() if value is not None}
        self.run.summary.update({**figures(told), "status": end.status, "reason": end.reason or ""})
        if end.status == "stopped":
            self.run.mark_preempting()
        self.run.finish(exit_code=0 if end.status == "complete" else 1)
