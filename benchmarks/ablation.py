"""Head ablation: prefix reuse and batched heads against a plain loop with forward hooks, on the same model.

python benchmarks/ablation.py [--layers 6] [--heads 16] [--examples 256] [--threads 2]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from rich.console import Console

from toeplens.lens import ablate_heads
from toeplens.model import Decoder, decoder_config
from toeplens.sources import DecoderSource


@torch.no_grad()
def with_hooks(model: Decoder, tokens: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """The drops [layers, heads] by running the whole model once a head, its slice of the projection's input zeroed."""
    config = model.config
    intact = (model(tokens).argmax(-1) == labels).double().mean().item()
    drops = np.zeros((config.num_layers, config.num_heads))
    for layer in range(config.num_layers):
        for head in range(config.num_heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)

            def silence(_: object, args: tuple[torch.Tensor], own: slice = own) -> tuple[torch.Tensor]:
                z = args[0].clone()
                z[..., own] = 0
                return (z,)

            hook = model.block(layer).attention.out.register_forward_pre_hook(silence)
            drops[layer, head] = intact - (model(tokens).argmax(-1) == labels).double().mean().item()
            hook.remove()
    return drops


def main() -> None:
    """Time both, twice in turn, and print times, ratio and largest difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    config = decoder_config(
        num_layers=given.layers, num_heads=given.heads, d_model=16 * given.heads, d_ff=32 * given.heads
    )
    model = Decoder(config).eval()
    tokens = torch.randint(1, config.vocab_size, (given.examples, config.max_len))
    labels = model(tokens).argmax(-1)
    source = DecoderSource(model)
    batches = [(t, y, None) for t, y in zip(tokens.split(30), labels.split(30), strict=True)]
    times: dict[str, list[float]] = {"ours": [], "hooks": []}
    for _ in range(2):
        begun = time.perf_counter()
        ours = ablate_heads(source, batches, cumulative=False, bootstrap=1).drops
        times["ours"].append(time.perf_counter() - begun)
        begun = time.perf_counter()
        hooks = with_hooks(model, tokens, labels)
        times["hooks"].append(time.perf_counter() - begun)
    fast, slow = min(times["ours"]), min(times["hooks"])
    Console().print(
        f"{given.layers} layers x {given.heads} heads, {given.examples} examples, {given.threads} threads: "
        f"ours {fast:.1f} s, hooks {slow:.1f} s, ratio {slow / fast:.2f}, "
        f"largest difference {np.abs(ours - hooks).max():.2g}"
    )


if __name__ == "__main__":
    main()
