"""Head ablation: prefix reuse and batched heads against plain loops with forward hooks, one pass of the model a head.

One loop runs our decoder, the other an equal transformers model: GPT-NeoX with the decoder's own weights, so that all
three must find the same drops. All are given the same batch; they are timed in turn, and the best times are compared.

python benchmarks/ablation.py [--layers 6] [--heads 16] [--examples 4] [--threads 2] [--rounds 3] [--seconds 150]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXModel

from toeplens.lens import ablate_heads
from toeplens.model import Decoder, DecoderConfig, decoder_config
from toeplens.sources import DecoderSource

Run = Callable[[Tensor], Tensor]


@torch.no_grad()
def with_hooks(
    run: Run, projections: Sequence[nn.Module], heads: int, tokens: Tensor, labels: Tensor
) -> tuple[np.ndarray, Tensor]:
    """The drops [layers, heads] and the class logits [layers * heads, b, C], by running the whole model once a head.

    A hook zeroes the head's slice of the INPUT of the layer's output projection.
    """
    intact = (run(tokens).argmax(-1) == labels).double().mean()
    found = []
    for projection in projections:
        for head in range(heads):

            def silence(_: object, args: tuple[Tensor], head: int = head) -> tuple[Tensor]:
                z = args[0].clone()
                z.unflatten(-1, (heads, -1))[..., head, :] = 0
                return (z,)

            hook = projection.register_forward_pre_hook(silence)
            found.append(run(tokens))
            hook.remove()
    logits = torch.stack(found)
    drops = intact - (logits.argmax(-1) == labels).double().mean(-1)
    return drops.view(len(projections), heads).numpy(), logits


@torch.no_grad()
def transformers_twin(model: Decoder) -> tuple[Run, list[nn.Module]]:
    """The same function as a GPT-NeoX of transformers: how to run it, and its output projections."""
    config: DecoderConfig = model.config
    twin = GPTNeoXModel(
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

    def fill(own: nn.Module, ours: nn.Module) -> None:
        own.load_state_dict(ours.state_dict())

    fill(twin.embed_in, model.embedding)
    fill(twin.final_layer_norm, model.final_norm)
    for layer, own in enumerate(twin.layers):
        block = model.block(layer)
        fill(own.input_layernorm, block.norm_attention)
        fill(own.post_attention_layernorm, block.norm_ffn)
        fill(own.attention.dense, block.attention.out)
        fill(own.mlp.dense_h_to_4h, block.ffn[0])
        fill(own.mlp.dense_4h_to_h, block.ffn[3])
        for name, ours in block.attention.qkv.named_parameters():  # by kind, then head; theirs by head, then kind
            parts = ours.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1).flatten(0, 2)
            getattr(own.attention.query_key_value, name).copy_(parts)

    def run(tokens: Tensor) -> Tensor:
        return model.readout(twin(tokens).last_hidden_state[:, -1])

    return run, [layer.attention.dense for layer in twin.layers]


def ours(source: DecoderSource, tokens: Tensor, labels: Tensor) -> np.ndarray:
    return ablate_heads(source, [(tokens, labels, None)], cumulative=False, bootstrap=1).drops


def replayed(source: DecoderSource, tokens: Tensor) -> Tensor:
    """The class logits behind our drops, [layers * heads, b, C]."""
    gains = 1 - torch.eye(source.num_heads)
    return torch.cat([source.replay(state, gains) for state in source.states(tokens, None)])


def main() -> None:
    """Time all three in turn; print times, the largest differences, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("heads", 16), ("examples", 4), ("threads", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=150, help="begin no round that would last longer than this")
    given = parser.parse_args()
    began = time.perf_counter()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    sizes = {"d_model": 16 * given.heads, "d_ff": 32 * given.heads, "encoding_options": {"pairing": "half"}}
    model = Decoder(decoder_config(num_layers=given.layers, num_heads=given.heads, **sizes)).eval()
    source = DecoderSource(model)
    twin, projections = transformers_twin(model)
    tokens = torch.randint(1, model.config.vocab_size, (given.examples, model.config.max_len))
    with torch.no_grad():
        labels = model(tokens).argmax(-1)
    own_projections = [model.block(layer).attention.out for layer in range(given.layers)]
    programs = {
        "ours": lambda: (ours(source, tokens, labels), None),
        "hook loop": lambda: with_hooks(model, own_projections, given.heads, tokens, labels),
        "transformers": lambda: with_hooks(twin, projections, given.heads, tokens, labels),
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    results = {}
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{given.layers} layers x {given.heads} heads, {given.examples} texts of {tokens.shape[1]} tokens")
    for number in range(given.rounds):
        round_began = time.perf_counter()
        for name, program in programs.items():
            begun = time.perf_counter()
            results[name] = program()
            times[name].append(time.perf_counter() - begun)
        out.print(f"round {number + 1}: " + ", ".join(f"{name} {took[-1]:.2f} s" for name, took in times.items()))
        now = time.perf_counter()
        if now - began + (now - round_began) > given.seconds:
            break
    logits = replayed(source, tokens)
    for name in ("hook loop", "transformers"):
        drops, theirs = results[name]
        apart = f"drops {np.abs(results['ours'][0] - drops).max():.2g}, logits {(logits - theirs).abs().max():.2g}"
        out.print(f"largest difference from the {name}: {apart} (of logits up to {logits.abs().max():.2g})")
    best = {name: min(took) for name, took in times.items()}
    over = [f"{best[name] / best['ours']:.2f}" for name in ("hook loop", "transformers")]
    out.print(f"speed-up over the hook loop: {over[0]}; over transformers: {over[1]}")


if __name__ == "__main__":
    main()
