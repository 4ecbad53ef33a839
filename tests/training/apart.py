"""A process of several that train one run, each with a directory that no other sees: started by torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tests.builders import After

from toeplens.training import run_spec, train
from toeplens.training.session import Session


def main(given: str, out: str, units: str) -> None:
    rank, sessions = os.environ["RANK"], []
    begin = Session.__init__

    def kept(session: Session, *rest: object, **options: object) -> None:
        begin(session, *rest, **options)  # type: ignore[arg-type]
        sessions.append((session, session.step))

    Session.__init__ = kept  # type: ignore[method-assign]
    spec = run_spec(**json.loads(Path(given).read_text(encoding="utf-8")))
    run = train(spec, Path(out) / rank, device="cpu", should_stop=After(int(units)) if int(units) else None)
    ((session, begun),) = sessions
    weights = {name: parameter.detach() for name, parameter in session.model.named_parameters()}
    told = {"begun": begun, "ended": session.step, "status": run.status, "metrics": run.metrics, "weights": weights}
    torch.save(told, Path(out) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
