"""Time of a training step and a decoding step with an installed encoding, relative to the model's own position.

python benchmarks/hosts.py [--names rope,alibi,t5,fire,fox] [--width 256] [--layers 4] [--heads 8] [--tokens 256]
                           [--batch 4] [--context 512] [--threads 2] [--rounds 9] [--record FILE.json]

Two Llamas with random weights: unchanged (fused attention, its own RoPE), and with an encoding installed instead. They
are timed in turn in one process; times are medians over rounds. A training step is a forward pass, a backward pass and
an AdamW step. A decoding step adds one token to a cached context of one sequence.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from toeplens import hosts


def llama(args: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 4),
        max_position_embeddings=4 * args.context,
    )
    return transformers.LlamaForCausalLM(config)


def training_step(model: Any, args: argparse.Namespace) -> Callable[[], None]:
    """One step of training, as a call."""
    model = copy.deepcopy(model).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(1024, (args.batch, args.tokens))

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def decoding_step(model: Any, args: argparse.Namespace) -> Callable[[], None]:
    """Sixteen tokens more, as a call; the context is put back afterwards."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        cache = model(torch.randint(1024, (1, args.context)), use_cache=True).past_key_values
    token = torch.randint(1024, (1, 1))

    @torch.no_grad()
    def step() -> None:
        for _ in range(16):
            model(token, past_key_values=cache, use_cache=True)
        cache.crop(-16)

    return step


def main() -> None:
    """Print the table, and write it down if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default="rope,alibi,t5,fire,fox")
    sizes = {"width": 256, "layers": 4, "heads": 8, "tokens": 256, "batch": 4, "context": 512}
    sizes |= {"threads": 2, "rounds": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.names.split(","):
        own, host = llama(args), llama(args)
        hosts.install(host, name)
        row: dict[str, Any] = {"encoding": name}
        for step_kind, make in {"training": training_step, "decoding": decoding_step}.items():
            calls = [make(model, args) for model in (own, host)]
            times = [[timeit.timeit(call, number=1) for call in calls] for _ in range(args.rounds + 2)][2:]
            theirs, ours = (statistics.median(each) for each in zip(*times, strict=True))
            ratio = statistics.median(b / a for a, b in times)
            row |= {f"{step_kind}_own": theirs, f"{step_kind}_host": ours, f"{step_kind}_ratio": ratio}
        rows.append(row)
    table = Table("encoding", "training step", "of the model's own", "16 tokens decoded", "of the model's own")
    for row in rows:
        cells = [f"{1e3 * row['training_host']:.0f} ms", f"{row['training_ratio']:.2f}"]
        table.add_row(row["encoding"], *cells, f"{1e3 * row['decoding_host']:.0f} ms", f"{row['decoding_ratio']:.2f}")
    Console().print(table)
    if args.record:
        content = {"sizes": {name: getattr(args, name) for name in sizes}, "torch": torch.__version__, "rows": rows}
        args.record.write_text(json.dumps(content | {"transformers": transformers.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
