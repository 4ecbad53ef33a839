"""Head ablation: prefix reuse and batched heads, compared with plain loops over forward hooks (one pass per head).

One loop runs our decoder, the other an equal transformers model: GPT-NeoX with the decoder's weights, so all three must
find the same accuracy drops on the same batch. They are timed in turn, layer by layer, so other load on the machine
affects all of them. The best time of each piece counts.

python benchmarks/ablation.py [--layers 6] [--heads 16] [--examples 4] [--threads 2] [--rounds 8] [--seconds 150]
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a busy machine, threads that spin while they wait slow all

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXModel

from toeplens.backends import DecoderSource
from toeplens.lens import ablate_heads
from toeplens.model import Decoder, DecoderConfig, decoder_config

Run = Callable[[Tensor], Tensor]


@torch.no_grad()
def with_hooks(run: Run, projection: nn.Module, heads: int, tokens: Tensor) -> Tensor:
    """The class logits [heads, b, C] without each head of a layer, by running the whole model once a head.

    A hook zeroes the head's slice of the INPUT of the layer's output projection.
    """
    result = []
    for head in range(heads):

        def silence(_: object, args: tuple[Tensor], head: int = head) -> tuple[Tensor]:
            z = args[0].clone()
            z.unflatten(-1, (heads, -1))[..., head, :] = 0
            return (z,)

        hook = projection.register_forward_pre_hook(silence)
        result.append(run(tokens))
        hook.remove()
    return torch.stack(result)


@torch.no_grad()
def transformers_twin(model: Decoder) -> tuple[Run, list[nn.Module]]:
    """The same function as a GPT-NeoX of transformers: how to run it, and its output projections."""
    config: DecoderConfig = model.config
    twin: Any = GPTNeoXModel(
        GPTNeoXConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.d_ff,
            hidden_act=config.activation,
            max_position_embeddings=config.max_len,
            use_parallel_residual=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            use_cache=False,
        )
    ).eval()

    def fill(layer_module: Any, ours: nn.Module) -> None:
        layer_module.load_state_dict(ours.state_dict())

    fill(twin.embed_in, model.embedding)
    fill(twin.final_layer_norm, model.final_norm)
    for layer, layer_module in enumerate(twin.layers):
        block: Any = model.block(layer)
        fill(layer_module.input_layernorm, block.norm_attention)
        fill(layer_module.post_attention_layernorm, block.norm_ffn)
        fill(layer_module.attention.dense, block.attention.out)
        fill(layer_module.mlp.dense_h_to_4h, block.ffn[0])
        fill(layer_module.mlp.dense_4h_to_h, block.ffn[3])
        for name, ours in block.attention.qkv.named_parameters():  # by kind, then head; theirs by head, then kind
            parts = ours.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
            getattr(layer_module.attention.query_key_value, name).copy_(parts)

    def run(tokens: Tensor) -> Tensor:
        return model.readout(twin(tokens).last_hidden_state[:, -1])

    return run, [layer.attention.dense for layer in twin.layers]


def logits_by_replay(source: DecoderSource, tokens: Tensor) -> Tensor:
    """The class logits behind our drops, [layers * heads, b, C]."""
    gains = 1 - torch.eye(source.num_heads)
    return torch.cat([source.replay(state, gains) for state in source.states(tokens, None)])


def time_interleaved(
    pieces: dict[str, list[Callable[[], Any]]], rounds: int, seconds: float
) -> dict[str, list[list[float]]]:
    """Seconds of each piece of each program in each round, the programs' pieces taken in turn."""
    began = time.perf_counter()
    result: dict[str, list[list[float]]] = {name: [] for name in pieces}
    for number in range(rounds):
        round_began = time.perf_counter()
        row: dict[str, list[float]] = {name: [] for name in pieces}
        for step in itertools.zip_longest(*pieces.values()):
            for name, piece in zip(pieces, step, strict=True):
                if piece is not None:
                    row[name].append(timeit.timeit(piece, number=1))
        for name, took in row.items():
            result[name].append(took)
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {sum(took):.2f} s" for name, took in row.items()), flush=True
        )
        now = time.perf_counter()
        if now - began + (now - round_began) > seconds:
            break
    return result


def main() -> None:
    """Time all three in turn; print times, the largest differences, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("heads", 16), ("examples", 4), ("threads", 2), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=120, help="time limit: start no round that would end later")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = {"d_model": 16 * args.heads, "d_ff": 32 * args.heads, "encoding_options": {"pairing": "half"}}
    model = Decoder(decoder_config(num_layers=args.layers, num_heads=args.heads, **sizes)).eval()
    source = DecoderSource(model)
    tokens = torch.randint(1, model.config.vocab_size, (args.examples, model.config.max_len))
    with torch.no_grad():
        labels = model(tokens).argmax(-1)
    print(f"{args.layers} layers x {args.heads} heads, {args.examples} texts of {tokens.shape[1]} tokens", flush=True)
    loops = {
        "hook loop": (model, [model.block(layer).attention.out for layer in range(args.layers)]),
        "transformers": transformers_twin(model),
    }
    logits: dict[str, dict[int, Tensor]] = {name: {} for name in loops}

    def one_layer(name: str, layer: int) -> None:
        run, projections = loops[name]
        logits[name][layer] = with_hooks(run, projections[layer], args.heads, tokens)

    drops: list[np.ndarray] = []

    def ours() -> None:
        drops.append(ablate_heads(source, [(tokens, labels, None)], cumulative=False, bootstrap=1).drops)

    pieces: dict[str, list[Callable[[], Any]]] = {"ours": [ours]}
    for name in loops:
        pieces[name] = [partial(one_layer, name, layer) for layer in range(args.layers)]
    times = time_interleaved(pieces, args.rounds, args.seconds)
    replayed_logits = logits_by_replay(source, tokens)
    for name, result in logits.items():
        theirs = torch.cat([result[layer] for layer in range(args.layers)])
        lost = (theirs.argmax(-1) != labels).double().mean(-1).view(args.layers, args.heads).numpy()
        apart = f"drops {np.abs(drops[-1] - lost).max():.2g}, logits {(replayed_logits - theirs).abs().max():.2g}"
        print(f"largest difference from the {name}: {apart} (of logits up to {replayed_logits.abs().max():.2g})")
    best = {name: sum(map(min, zip(*rounds, strict=True))) for name, rounds in times.items()}
    print("best of each piece: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in best.items()))
    over = [f"{best[name] / best['ours']:.2f}" for name in loops]
    print(f"speed-up over the hook loop: {over[0]}; over transformers: {over[1]}")


if __name__ == "__main__":
    main()
