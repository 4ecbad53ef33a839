"""A training step of our decoder against other programs' models of equal shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from toeplens.model import Decoder
from toeplens.model.decoder import Context
from toeplens.studies.benching.peers import PEERS
from toeplens.studies.benching.race import race
from toeplens.studies.benching.record import Contest, Timed, Work
from toeplens.training import RunSpec, run_spec
from toeplens.training.environment import Execution
from toeplens.training.presets import DISTANCE, starting_spec

BATCH = {
    "cpu": {"laptop": 128, "desk": 128, "paper": 32, "language": 8},
    "cuda": {"laptop": 4096, "desk": 2048, "paper": 512, "language": 512},
}
LANGUAGE = "language"
_AGAIN = 3  # steps in a row that are counted; of one that follows another program's step the caches hold nothing
_COUNTED = 2  # texts of the step whose products are counted; they grow with the texts


class EveryPosition(Decoder):
    """Our decoder without its shortcut: the last layer too computes every position, and the last one is read."""

    def read_position(self, layer: int, tokens_shape: torch.Size, context: Context) -> None:
        """No layer computes one position alone."""

    def end(self, x: Tensor, context: Context) -> Tensor:
        """Class logits from the last position."""
        return self.readout(self.final_norm(x)[:, -1])


@dataclass(frozen=True)
class Program:
    """A model that takes part: how it is called (compiled, or as it is), and which work it does."""

    model: nn.Module
    run: Callable[[Tensor], Tensor]
    work: Work = "asked"


def contests(
    execution: Execution, scales: tuple[str, ...], rounds: int, seconds: float
) -> Iterator[tuple[Contest, list[str]]]:
    """One contest a scale, and what is not installed: RoPE, the distance task's sizes (or a language's), AdamW.

    Ours takes part as it is, which computes the read position alone in its last layer; again with every position
    computed, as all others do; and, where the scale's models are trained with dropout, as they are trained. A language
    model is read at each position, by all.
    """
    for scale in scales:
        spec = spec_of(scale)
        batch, length, shape = BATCH[execution.device.type][scale], spec.task_options["length"], spec.model
        programs, missing = programs_of(spec, execution)
        steps = {name: step_of(spec, each.model, each.run, batch, execution) for name, each in programs.items()}
        times = race(steps, execution.device, rounds=rounds, seconds=seconds, again=_AGAIN)
        timed = tuple(
            Timed(
                name=name,
                ours=isinstance(each.model, Decoder),
                work=each.work,
                flops=products(spec, each.model, execution) * batch,
                seconds=times[name],
            )
            for name, each in programs.items()
        )
        each = shape.readout == "each"
        read = "each is read" if each else "toeplens computes one position in its last layer, all others every one"
        work = (
            f"{scale}: {shape.num_layers} layers of {shape.num_heads} heads, width {shape.d_model}, "
            f"{batch} texts of {length} tokens; {read}"
        )
        yield Contest(kind="training", work=work, unit="tokens", count=batch * length, timed=timed), missing


def spec_of(scale: str) -> RunSpec:
    """The run whose training step is timed."""
    if scale != LANGUAGE:
        return run_spec(**starting_spec(scale, "paper", DISTANCE, "rope", 0))
    sizes = {"num_layers": 4, "num_heads": 4, "d_model": 128, "d_ff": 512, "vocab_size": 256, "max_len": 256}
    model = {**sizes, "encoding": "rope", "readout": "each", "dropout": 0.0, "attention_scale": None}
    return run_spec(task="markov-language", task_options={"words": 255, "length": 256}, model=model)


def programs_of(spec: RunSpec, execution: Execution) -> tuple[dict[str, Program], list[str]]:
    """All that take part by their names, ours first, and the names of those that are not installed."""
    torch.manual_seed(0)
    shape, device = spec.model.model_copy(update={"dropout": 0.0}), execution.device

    def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return torch.compile(model, dynamic=False)

    ours = Decoder(shape).to(device)
    each = shape.readout == "each"
    found = {"toeplens": Program(ours, ours)}
    if execution.compiled:
        found["toeplens, compiled"] = Program(ours, compiled(ours))
    if not each:
        every = EveryPosition(shape).to(device)
        found["toeplens, every position"] = Program(every, every, "equal")
    if spec.model.dropout:
        trained = Decoder(spec.model).to(device)
        name = f"toeplens, dropout {spec.model.dropout:g}{', compiled' if execution.compiled else ''}"
        found[name] = Program(trained, compiled(trained) if execution.compiled else trained, "trained")
    missing = []
    for name, package, make in PEERS:
        if importlib.util.find_spec(package) is None:
            missing.append(name)
        else:
            model = make(shape).to(device)
            found[name] = Program(model, model)
    return found, missing


def step_of(
    spec: RunSpec, model: nn.Module, run: Callable[[Tensor], Tensor], batch: int, execution: Execution
) -> Callable[[], None]:
    """One step: forward, backward, AdamW; bfloat16 products where the execution has them, for all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, betas=spec.betas, fused=True)
    length, device = spec.task_options["length"], execution.device
    tokens = torch.randint(1, spec.model.vocab_size, (batch, length), device=device)
    places = (batch, length) if spec.model.readout == "each" else (batch,)
    labels = torch.randint(1, spec.model.num_classes, places, device=device)

    def amp() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if execution.bf16 else nullcontext()

    def step() -> None:
        optimizer.zero_grad()
        with amp():
            logits = run(tokens)
        F.cross_entropy(logits.float().flatten(0, -2), labels.flatten()).backward()
        optimizer.step()

    return step


def products(spec: RunSpec, model: nn.Module, execution: Execution) -> float:
    """Operations a text of a step's products with weights, forward and backward, as torch counts them.

    Those between queries, keys and values are left out: programs form different parts of these tables.
    """
    step = step_of(spec, model, model, _COUNTED, execution)
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(product, 0) for product in (torch.ops.aten.mm, torch.ops.aten.addmm)) / _COUNTED
