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
    rank, found = os.environ["RANK"], {}
    begin, take = Session.__init__, Session.take_step

    def begun(session: Session, *rest: object, **options: object) -> None:
        begin(session, *rest, **options)  # type: ignore[arg-type]
        assert found == {}
        found.update(begun=session.step, ended=session.step, model=session.model)

    def stepped(session: Session) -> None:
        take(session)
        found.update(ended=session.step)

    # not the session: what talks to the others must be gone before the processes part
    Session.__init__, Session.take_step = begun, stepped  # type: ignore[method-assign]
    spec = run_spec(**json.loads(Path(given).read_text(encoding="utf-8")))
    run = train(spec, Path(out) / rank, device="cpu", should_stop=After(int(units)) if int(units) else None)
    names = (task.read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").glob("*/comm"))
    connected = [name for name in names if "gloo" in name]
    weights = {name: parameter.detach() for name, parameter in found.pop("model").named_parameters()}
    told = {**found, "connected": connected, "status": run.status, "metrics": run.metrics, "weights": weights}
    torch.save(told, Path(out) / f"{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
