"""Compare the speed of toeplens with other programs on this machine, and estimate the time of the papers' grid.

    python benchmarks/run.py [--contest training audit] [--scale laptop desk paper language] [--record FILE.json]
                             [--device auto|cpu|cuda] [--precision auto|float32|bf16] [--threads 2] [--seconds 30]
                             [--rounds 20] [--price-per-hour 3]

Contests: a training step against torch's encoder, transformers' Llama and x-transformers of equal shape; an audit of a
small Llama against hooks written by hand. In each round, all programs of a contest run in turn, in one process. Times
are medians over rounds, ratios are medians of the ratios within a round. Records in results/bench have this form.
Ablation and Toeplitz shares are timed by benchmarks/ablation.py and benchmarks/toeplitz.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from toeplens.backends.hf import capture_and_compare
from toeplens.encodings.cpu_products import fast_products
from toeplens.lens import PatternSums
from toeplens.model import Decoder, DecoderConfig
from toeplens.studies import audit
from toeplens.training import RunSpec, environment, plan_execution, run_spec
from toeplens.training.environment import Execution
from toeplens.training.presets import DISTANCE, starting_spec
from toeplens.utils import write_json

SCALES = ("laptop", "desk", "paper", "language")
BATCH = {
    "cpu": {"laptop": 128, "desk": 128, "paper": 32, "language": 8},
    "cuda": {"laptop": 4096, "desk": 2048, "paper": 512, "language": 512},
}
WARMUP_ROUNDS = 2  # rounds that are not counted
STEPS_PER_TURN = 3  # steps of a turn that are counted, after one that finds another program's data in the caches
TABLE_1 = 80 * 100 * 70_000 * 120  # tokens that 80 models, as many as arXiv 2505.13027's Table 1 has, see on Task 1
PATTERN_COLUMNS = ("previous", "current", "first", "induction", "entropy", "distance")
THETA = 10_000.0
Json = dict[str, Any]


# ---- timing ----------------------------------------------------------------------------------------------------------


def time_call(program: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, with all that it left to do on the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    begun = time.perf_counter()
    program()
    wait(device)
    return time.perf_counter() - begun


def time_rounds(
    programs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, seconds: float, again: int = 0
) -> dict[str, list[float]]:
    """Seconds of each program in each round: so many rounds, or as many as fit in the time, three at least.

    With ``again`` a turn is one call that is not counted and so many that are, of which the mean is taken.
    """
    result: dict[str, list[float]] = {name: [] for name in programs}
    begun = time.perf_counter()
    for number in range(-WARMUP_ROUNDS, rounds):
        if number >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, program in programs.items():
            took = time_call(program, device)
            if again:
                took = sum(time_call(program, device) for _ in range(again)) / again
            if number >= 0:
                result[name].append(took)
    return result


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large square product, the best of ten."""
    size = {"cpu": 2048, "cuda": 8192}[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(time_call(lambda: a @ b, device) for _ in range(10))


# ---- a training step -------------------------------------------------------------------------------------------------


class EveryPosition(Decoder):
    """Our decoder without its shortcut: the last layer too computes every position, and the last one is read."""

    def read_position(self, layer: int, tokens_shape: torch.Size, context: Any) -> None:
        """No layer computes one position alone."""

    def compute_logits(self, x: Tensor, context: Any) -> Tensor:
        """Class logits from the last position."""
        return self.readout(self.final_norm(x)[:, -1])


class Peer(nn.Module):
    """Another program's layers, which compute every position; read at each or at the last, as ours is."""

    def __init__(self, layers: nn.Module, states: Callable[[Any, Tensor], Tensor], shape: DecoderConfig) -> None:
        super().__init__()
        self.every, self.readout = shape.readout == "each", nn.Linear(shape.d_model, shape.num_classes)
        self.layers, self.states = layers, states

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.states(self.layers, tokens)
        return self.readout(x if self.every else x[:, -1])


def torch_encoder(shape: DecoderConfig) -> nn.Module:
    """torch's own layers, causal; it has no rotation to do."""
    options: Json = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layer = nn.TransformerEncoderLayer(shape.d_model, shape.num_heads, shape.d_ff, **options)
    layers = nn.TransformerEncoder(layer, shape.num_layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(shape.vocab_size, shape.d_model), layers)


def encoder_states(model: Any, tokens: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
    return model[1](model[0](tokens), mask=mask, is_causal=True)


def llama_of(shape: DecoderConfig) -> nn.Module:
    """transformers' Llama; its gated network has as many weights as ours."""
    sizes = {"vocab_size": shape.vocab_size, "hidden_size": shape.d_model, "intermediate_size": shape.d_ff * 2 // 3}
    sizes |= {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_heads}
    sizes |= {"num_hidden_layers": shape.num_layers, "max_position_embeddings": shape.max_len}
    return llama(**sizes, use_cache=False)


def x_transformers(shape: DecoderConfig) -> nn.Module:
    """x-transformers' decoder with rotation and its flash attention."""
    from x_transformers import Decoder as Layers
    from x_transformers import TransformerWrapper

    sizes = {"dim": shape.d_model, "depth": shape.num_layers, "heads": shape.num_heads}
    sizes |= {"attn_dim_head": shape.d_model // shape.num_heads, "ff_mult": shape.d_ff // shape.d_model}
    layers = Layers(**sizes, rotary_pos_emb=True, attn_flash=True)
    options: Json = {"num_tokens": shape.vocab_size, "max_seq_len": shape.max_len, "use_abs_pos_emb": False}
    return TransformerWrapper(**options, attn_layers=layers)


# name in tables, package, layers, their states at each position
PEERS: tuple[tuple[str, str, Callable[[DecoderConfig], nn.Module], Callable[[Any, Tensor], Tensor]], ...] = (
    ("torch.nn.TransformerEncoder", "torch", torch_encoder, encoder_states),
    ("transformers Llama", "transformers", llama_of, lambda model, tokens: model(tokens).last_hidden_state),
    ("x-transformers", "x_transformers", x_transformers, lambda model, ids: model(ids, return_embeddings=True)),
)


def llama(**sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**sizes))


def spec_of(scale: str) -> RunSpec:
    """The run whose training step is timed."""
    if scale != "language":
        return run_spec(**starting_spec(scale, "paper", DISTANCE, "rope", 0))
    sizes = {"num_layers": 4, "num_heads": 4, "d_model": 128, "d_ff": 512, "vocab_size": 256, "max_len": 256}
    model = {**sizes, "encoding": "rope", "readout": "each", "dropout": 0.0, "attention_scale": None}
    return run_spec(task="markov-language", task_options={"words": 255, "length": 256}, model=model)


def programs_of(spec: RunSpec, execution: Execution) -> dict[str, tuple[nn.Module, bool, str]]:
    """Each program's model, whether it is compiled and what it does (as in records), ours first.

    What ours does: ``asked``, one position computed in the last layer; ``equal``, every position, as the others do;
    ``trained``, with the dropout that the papers' models are trained with.
    """
    torch.manual_seed(0)
    shape, compiled = spec.model.model_copy(update={"dropout": 0.0}), execution.compiled
    result: dict[str, tuple[nn.Module, bool, str]] = {"toeplens": (Decoder(shape), False, "asked")}
    if compiled:
        result["toeplens, compiled"] = (result["toeplens"][0], True, "asked")
    if shape.readout != "each":
        result["toeplens, every position"] = (EveryPosition(shape), False, "equal")
    if spec.model.dropout:
        name = f"toeplens, dropout {spec.model.dropout:g}{', compiled' if compiled else ''}"
        result[name] = (Decoder(spec.model), compiled, "trained")
    for name, package, layers, states in PEERS:
        if importlib.util.find_spec(package) is not None:
            result[name] = (Peer(layers(shape), states, shape), False, "asked")
    return {name: (model.to(execution.device), *rest) for name, (model, *rest) in result.items()}  # type: ignore[misc]


def step_of(spec: RunSpec, model: nn.Module, compiled: bool, batch: int, execution: Execution) -> Callable[[], None]:
    """One step: forward, backward, AdamW; bfloat16 products where the execution has them, for all.

    toeplens computes its products as `toeplens.training.train` does (`fast_products`).
    """
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.lr, betas=spec.betas, fused=True)
    length, device = spec.task_options["length"], execution.device
    tokens = torch.randint(1, spec.model.vocab_size, (batch, length), device=device)
    places = (batch, length) if spec.model.readout == "each" else (batch,)
    labels = torch.randint(1, spec.model.num_classes, places, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if execution.bf16 else nullcontext():
            logits = run(tokens)
        F.cross_entropy(logits.float().flatten(0, -2), labels.flatten()).backward()
        optimizer.step()

    return fast_products()(step) if isinstance(model, Decoder) else step


def count_flops(spec: RunSpec, model: nn.Module, execution: Execution, texts: int = 2) -> float:
    """Operations per sequence of a step's products with weights, forward and backward, as torch counts them.

    Those between queries, keys and values are left out: programs form different parts of these tables.
    """
    step = step_of(spec, model, False, texts, execution)
    with FlopCounterMode(display=False) as counter:
        step()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(product, 0) for product in (torch.ops.aten.mm, torch.ops.aten.addmm)) / texts


def training_contest(scale: str, execution: Execution, rounds: int, seconds: float) -> Json:
    """A step of each program's model: equal shapes, RoPE where the program has it, AdamW."""
    spec = spec_of(scale)
    batch, length, shape = BATCH[execution.device.type][scale], spec.task_options["length"], spec.model
    programs = programs_of(spec, execution)
    steps = {name: step_of(spec, model, comp, batch, execution) for name, (model, comp, _) in programs.items()}
    times = time_rounds(steps, execution.device, rounds, seconds, STEPS_PER_TURN)
    last = "toeplens computes one position in its last layer, all others every one"
    sizes = f"{shape.num_layers} layers of {shape.num_heads} heads, width {shape.d_model}"
    read = "each is read" if shape.readout == "each" else last
    rows = [
        {
            "name": name,
            "ours": isinstance(model, Decoder),
            "work": work,
            "flops": count_flops(spec, model, execution) * batch,
            "seconds": times[name],
        }
        for name, (model, _, work) in programs.items()
    ]
    work = f"{scale}: {sizes}, {batch} texts of {length} tokens; {read}"
    return {"kind": "training", "work": work, "unit": "tokens", "count": batch * length, "apart": None, "timed": rows}


# ---- an audit --------------------------------------------------------------------------------------------------------


def audit_contest(device: torch.device, rounds: int, seconds: float, sequences: int = 8, tokens: int = 256) -> Json:
    """Every head of a small Llama read: by an audit, by its proof and patterns alone, and by hooks.

    The second half of each sequence repeats the first, so that there is induction to be seen.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": tokens}
    model = llama(**sizes, initializer_range=0.1).eval().to(device)
    half = torch.randint(1, 512, (sequences, tokens // 2), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((half, half), 1).to(device)
    result: dict[str, dict[str, np.ndarray]] = {}  # [layers, heads] by measure, of each program

    def whole() -> None:
        heads = audit(model, ids, effects="none").heads
        result["audit"] = {name: np.array([getattr(head, name) for head in heads], float) for name in PATTERN_COLUMNS}

    def patterns() -> None:
        rows: list[Any] = []

        def look(call: Any) -> None:
            sums = PatternSums(heads=call.q.shape[1], queries=tokens, keys=tokens, tokens=ids)
            for some, first, logits, weights in call.blocks():
                sums.add(some, logits, weights, start=first)
            rows.append(sums.result())

        capture_and_compare(model, {"input_ids": ids}, look)
        result["patterns"] = {name: np.stack([getattr(row, name) for row in rows]) for name in PATTERN_COLUMNS}

    def hooks() -> None:
        result["hooks"] = read_by_hooks(model, ids)

    programs = {"toeplens": whole, "toeplens, proof and patterns alone": patterns, "hooks written by hand": hooks}
    times = time_rounds(programs, device, rounds, seconds)
    read = {each: np.stack([numbers[name].ravel() for name in PATTERN_COLUMNS]) for each, numbers in result.items()}
    apart = max(float(np.abs(read[each] - read["hooks"]).max()) for each in ("audit", "patterns"))
    if not apart <= 1e-4:
        raise SystemExit(f"The numbers of the audit and of the hooks differ by {apart:.1g}, more than 0.0001.")
    rows = [
        {"name": name, "ours": work is not hooks, "work": "equal" if work is patterns else "asked", "flops": None}
        | {"seconds": times[name]}
        for name, work in programs.items()
    ]
    work = f"audit: a random Llama of 4 layers of 8 heads, {sequences} texts of {tokens} tokens; all give "
    work += f"{', '.join(PATTERN_COLUMNS)}; hooks prove nothing"
    return {"kind": "audit", "work": work, "unit": "heads", "count": 32, "apart": apart, "timed": rows}


@torch.no_grad()
def read_by_hooks(model: Any, ids: Tensor) -> dict[str, np.ndarray]:
    """As one writes it: q and k by hooks on their projections, rotated, their weights, and the patterns of these."""
    caught: dict[tuple[int, str], Tensor] = {}
    hooks = [
        getattr(layer.self_attn, part).register_forward_hook(
            lambda module, given, output, key=(number, part): caught.__setitem__(key, output)
        )
        for number, layer in enumerate(model.layers)
        for part in ("q_proj", "k_proj")
    ]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    rows, dim = [], model.config.hidden_size // model.config.num_attention_heads
    for number in range(len(model.layers)):
        q, k = (rotate(caught[number, part].unflatten(-1, (-1, dim)).transpose(1, 2)) for part in ("q_proj", "k_proj"))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # heads of keys serve neighbouring heads of queries
        logits = q @ k.transpose(-1, -2) / math.sqrt(dim)
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        rows.append(patterns_of(logits.masked_fill(later, -math.inf).softmax(-1), ids))
    return {name: torch.stack([row[name] for row in rows]).cpu().numpy() for name in PATTERN_COLUMNS}


def rotate(x: Tensor) -> Tensor:
    """[B, heads, N, dim] with its halves turned by each position's angles."""
    dim = x.shape[-1]
    frequencies = THETA ** (-torch.arange(0, dim, 2, device=x.device) / dim)
    angles = torch.arange(x.shape[2], device=x.device).unsqueeze(1) * frequencies
    (low, high), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def patterns_of(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Patterns of each head [H] from weights [B, H, N, N]: means over sequences and over the queries that have them."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    after = torch.zeros(len(ids), len(positions), len(positions), dtype=torch.bool, device=ids.device)
    after[:, :, 1:] = ids.unsqueeze(2) == ids[:, None, :-1]  # the key's token follows a copy of the query's
    after &= (positions <= positions.unsqueeze(1)) & (positions != positions.unsqueeze(1) + 1)
    entropies = -torch.special.xlogy(weights, weights).sum(-1)[..., 1:] / (positions[1:] + 1).log()
    return {
        "previous": weights.diagonal(-1, 2, 3).mean((0, 2)),
        "current": weights.diagonal(0, 2, 3).mean((0, 2)),
        "first": weights[:, :, 1:, 0].mean((0, 2)),
        "induction": (weights * after.unsqueeze(1)).sum((0, 2, 3)) / after.any(-1).sum(),
        "entropy": entropies.mean((0, 2)),
        "distance": (weights * (positions.unsqueeze(1) - positions).abs()).sum(-1).mean((0, 2)),
    }


# ---- what follows from the seconds -----------------------------------------------------------------------------------


def speed(contest: Json, row: Json) -> float:
    """Units per second, of the median round."""
    return contest["count"] / statistics.median(row["seconds"])


def ratio(row: Json, own: Json) -> float:
    """How many times as long a program takes as another: the median of the ratios within a round."""
    return statistics.median(b / a for a, b in zip(own["seconds"], row["seconds"], strict=True))


def equal_work_row(contest: Json) -> Json | None:
    """Ours with work that is equal to the others'; None where ours as it is has that."""
    return next((row for row in contest["timed"] if row["work"] == "equal"), None)


def best_peer(contest: Json) -> Json:
    """The fastest of those that are not ours."""
    return min((row for row in contest["timed"] if not row["ours"]), key=lambda row: statistics.median(row["seconds"]))


def table_1_hours(contests: Sequence[Json]) -> float | None:
    """Hours of the papers' Table 1 at the speed of its models' step with dropout; None where that was not timed."""
    for contest in contests:
        for row in contest["timed"]:
            if row["work"] == "trained" and contest["work"].startswith("paper"):
                return TABLE_1 / speed(contest, row) / 3600
    return None


def table_of(contest: Json, peak: float) -> Table:
    """Each program's time, speed, time over ours and share of the machine's peak."""
    unit, own, even = contest["unit"], contest["timed"][0], equal_work_row(contest)
    table = Table("program", "ms", f"{unit} / s", "time over ours", "over equal work", "of the peak")
    table.title = contest["work"]
    for row in contest["timed"]:
        median = statistics.median(row["seconds"])
        share = "" if row["flops"] is None else f"{row['flops'] / median / peak:.0%}"
        ratios = (f"{ratio(row, own):.2f}", "" if even is None else f"{ratio(row, even):.2f}")
        table.add_row(row["name"], f"{1e3 * median:,.1f}", f"{speed(contest, row):,.0f}", *ratios, share)
    return table


def contests_of(given: argparse.Namespace, execution: Execution) -> Iterator[Json]:
    """The contests that were chosen, one after another."""
    for scale in given.scale if "training" in given.contest else ():
        yield training_contest(scale, execution, given.rounds, given.seconds)
    if "audit" in given.contest and importlib.util.find_spec("transformers") is not None:
        yield audit_contest(execution.device, given.rounds, given.seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contest", nargs="+", choices=("training", "audit"), default=("training", "audit"))
    parser.add_argument("--scale", nargs="+", choices=SCALES, default=SCALES, help="shape of the trained models")
    parser.add_argument("--rounds", type=int, default=20, help="maximum number of rounds per contest (at least 3)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time limit per contest")
    parser.add_argument("--threads", type=int, help="threads on a CPU (default: torch's choice)")
    parser.add_argument(
        "--price-per-hour", type=float, help="price of this machine, to estimate the cost of the papers' Table 1"
    )
    parser.add_argument("--precision", choices=("auto", "float32", "bf16"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="also time compiled models")
    parser.add_argument("--record", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    execution = plan_execution(args.device, args.compile, args.precision)
    device, console = execution.device, Console(width=120)
    peak = matrix_peak(device, torch.bfloat16 if execution.bf16 else torch.float32)
    contests = []
    for contest in contests_of(args, execution):
        contests.append(contest)
        console.print(table_of(contest, peak))
    if (hours := table_1_hours(contests)) is not None:
        price = args.price_per_hour
        cost = "" if price is None else f" (at {price:g} per hour: {hours * price:,.0f})"
        console.print(f"The 80 models of the papers' Table 1, with their dropout, take {hours:,.1f} hours here{cost}.")
    if args.record is not None:
        missing = [name for name, package, *_ in PEERS if importlib.util.find_spec(package) is None]
        about = {"environment": environment(execution), "device": device.type, "peak": peak, "missing": missing}
        write_json(args.record, {"format": 1, **about, "contests": contests})


if __name__ == "__main__":
    main()
