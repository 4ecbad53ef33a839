"""The papers' sizes on one GPU in 15 minutes: the models of scale `full`, then the papers' own training.

    python benchmarks/full_gpu.py --out DIR [--minutes 13] [--seeds 5]
    python benchmarks/full_gpu.py --out DIR --device cpu --minutes 2 --scale smoke --seeds 1     # a dry run without one

1. Gradients with bfloat16 products against float32, and the speed of both, of RoPE at the scale's size.
2. `toeplens reproduce --scale full` in DIR/full, with as many models of equal shape trained as one as fill the GPU. To
   go on with a study, copy its directory there.
3. RoPE, MLA and NoPE by the papers' own recipe (scale `paper`: dropout, 100 epochs) in DIR/paper, for the time that is
   left, each followed by the ablation of its heads.

A line per result is appended to DIR/results.jsonl at once. The same command goes on where it was, on any device. At the
end it says what is missing.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toeplens.engine import Event, ExecutionOptions, Job, run_job
from toeplens.model import Decoder
from toeplens.papers.deposit import SCALES, reproduce
from toeplens.papers.deposit.study import ReproductionPlan, make_cell
from toeplens.training import Batches, Run, environment, plan_execution, run_spec, train
from toeplens.training.batches import loss_of
from toeplens.training.presets import DISTANCE, PROTOCOLS
from toeplens.utils import EnvironmentFailure
from toeplens.utils.machine import is_out_of_memory

STEPS = 100  # of the comparison of speeds
LABELS = ("rope", "mla", "nope")  # of the papers' own recipe


def check_precision(job: Job, out: Path, execution: ExecutionOptions) -> dict[str, Any]:
    """The relative error of gradients with bfloat16 products, and tokens per second in both precisions."""
    spec, device = job.spec, plan_execution(execution.device, "off", "float32").device
    data = Batches.of(spec.build_task().dataset("train", spec.batch_size, 0), device)
    torch.manual_seed(0)
    model, gradients = Decoder(spec.model).to(device).eval(), []
    for enabled in (False, True):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            logits = model(data.tokens, data.lengths)
        grads = torch.autograd.grad(loss_of(logits.float(), data.labels), list(model.parameters()))
        gradients.append(torch.cat([grad.flatten().double() for grad in grads]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    speeds = {}
    for precision in ("float32", "bf16"):
        short = {"train_examples": STEPS * spec.batch_size, "epochs": 1, "evaluations": 1, "plateau": None}
        run = train(run_spec(**spec.model_dump() | short | {"precision": precision}), out / "precision", execution)
        if run.metrics:  # otherwise the time is over
            speeds[precision] = round(STEPS * data.tokens.numel() / run.metrics[-1]["seconds"])
    return {"gradient_error": float(error), "tokens_per_second": speeds}


def main() -> None:
    """Run the parts until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of runs and results")
    parser.add_argument("--minutes", type=float, default=13, help="time for everything")
    parser.add_argument("--device", default="cuda", help="device")
    parser.add_argument("--scale", default="full", choices=SCALES, help="scale of the study")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per cell")
    given = parser.parse_args()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    execution = ExecutionOptions(device=given.device, deadline=time.time() + 60 * given.minutes)

    def record(**row: Any) -> None:
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def finished(part: str, job: Job, run: Run) -> None:
        last = run.metrics[-1] if run.metrics else {}
        numbers = {name: last.get(name) for name in ("step", "test_loss", "test_accuracy", "seconds")}
        record(part=part, label=job.label, run=run.spec.name, status=run.status, **numbers)

    record(part="environment", **environment())
    plan = ReproductionPlan(scale=given.scale, protocols=PROTOCOLS, seeds=given.seeds)
    jobs = plan.jobs()

    def on_event(event: Event) -> None:
        if event.status is not None:
            job = jobs[event.job]
            finished("study", job, Run.open(out / given.scale / "runs" / job.spec.name))

    def study() -> bool:
        options: dict[str, Any] = {"scale": given.scale, "seeds": given.seeds, "workers": 1, "on_event": on_event}
        return reproduce(out / given.scale, **options, execution=execution).is_complete

    def paper(label: str) -> bool:
        job = make_cell(SCALES["paper"], "paper", DISTANCE, label, 42).job
        run = run_job(job, out / "paper", execution)
        finished("paper", job, run)
        return run.status != "stopped"

    def precision() -> bool:
        record(part="precision", **check_precision(jobs[0], out, execution))
        return True

    parts = {"precision": precision, "study": study, **{label: partial(paper, label) for label in LABELS}}
    missing = []
    for name, part in parts.items():
        try:
            if execution.is_late() or not part():
                missing.append(name)
        except (EnvironmentFailure, RuntimeError, MemoryError) as error:
            if not isinstance(error, EnvironmentFailure) and not is_out_of_memory(error):
                raise
            missing.append(f"{name} ({error})")
    record(part="missing", parts=missing)


if __name__ == "__main__":
    main()
