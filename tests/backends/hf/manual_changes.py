"""Other ways to change a model's attention: angles edited in its own rotation, what its output projection is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from tests.backends.hf.models import BLOOM, GPT, GROUPED, INPUTS, LATENT, MIXED, NARROW, SIZES, TOKENS
from torch import Tensor

from toeplens.backends.hf import AttentionCall
from toeplens.lens.kit.interventions import donors

LLAMA = NARROW | {"sliding_window": None}
# the output projection of a layer's attention, from the model on
ROTARY: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "Gemma2ForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "Gemma3ForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "StableLmForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "GPTNeoXForCausalLM": (SIZES, "gpt_neox.layers.{}.attention.dense"),
    "GlmForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "DeepseekV3ForCausalLM": (LATENT, "model.layers.{}.self_attn.o_proj"),
    "GptOssForCausalLM": (NARROW | MIXED, "model.layers.{}.self_attn.o_proj"),
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2LMHeadModel": (GPT, "transformer.h.{}.attn.c_proj"),
    "GPTJForCausalLM": (GPT | {"rotary_dim": 4}, "transformer.h.{}.attn.out_proj"),
    "BloomForCausalLM": (BLOOM, "transformer.h.{}.self_attention.dense"),
    "OPTForCausalLM": (
        SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "model.decoder.layers.{}.self_attn.out_proj",
    ),
    "BertForMaskedLM": (SIZES, "bert.encoder.layer.{}.attention.output.dense"),
}
ALL = ROTARY | OTHERS


def logits(model: Any, inputs: dict[str, Tensor] = INPUTS) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits.double()


def is_close(x: Tensor, y: Tensor, allowed: float = 1e-5) -> bool:
    """To so much of the largest number."""
    return bool((x - y).abs().max() <= allowed * y.abs().max())


def is_different(x: Tensor, y: Tensor) -> bool:
    return not is_close(x, y, 1e-3)


@contextmanager
def edit_angles(model: Any, layer: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The cosines and sines that one layer's rotation is given are others."""
    names = vars(sys.modules[type(model).__module__])
    functions = {name: value for name, value in names.items() if "apply" in name and "rot" in name and callable(value)}
    modules = [module for name, module in model.named_modules() if f"layers.{layer}." in f"{name}."]
    inside = {"now": 0}

    def enter(*_: Any) -> None:
        inside["now"] += 1

    def leave(*_: Any) -> None:
        inside["now"] -= 1

    def turned(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def other(*args: Any, **more: Any) -> Any:
            arguments = list(args)
            at = 2 if len(arguments) > 3 else 1  # of queries and keys together, or of each alone
            if inside["now"] and at == 2:
                arguments[2:4] = change(*arguments[2:4])
            return rotate(*arguments, **more)

        return other

    handles = [modules[0].register_forward_pre_hook(enter), modules[0].register_forward_hook(leave)]
    try:
        names |= {name: turned(value) for name, value in functions.items()}
        yield
    finally:
        names |= functions
        for handle in handles:
            handle.remove()


def freeze(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (cos.square() + sin.square()).sqrt(), torch.zeros_like(sin)


def drop(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(cos), torch.zeros_like(sin)


def columns(table: Tensor, pair: int) -> list[int]:
    """Where a pair's angle is in a table of cosines or sines: half apart, side by side, or once."""
    width = table.shape[-1]
    if torch.equal(table[..., : width // 2], table[..., width // 2 :]):
        return [pair, pair + width // 2]
    return [2 * pair, 2 * pair + 1] if torch.equal(table[..., ::2], table[..., 1::2]) else [pair]


def edit_pairs(pairs: list[int], change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A change of some pairs alone."""

    def changed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        at = [column for pair in pairs for column in columns(cos, pair)]
        cos, sin = cos.clone(), sin.clone()
        cos[..., at], sin[..., at] = change(cos[..., at], sin[..., at])
        return cos, sin

    return changed


def swap(first: int, second: int) -> Any:
    """Two pairs have each other's angles."""

    def changed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        order = list(range(cos.shape[-1]))
        for a, b in zip(columns(cos, first), columns(cos, second), strict=True):
            order[a], order[b] = b, a
        return cos[..., order], sin[..., order]

    return changed


@contextmanager
def edit_outputs(model: Any, place: str, layer: int, heads: int, change: Callable[[Tensor], None]) -> Iterator[None]:
    """What a layer's output projection is given, [B, N, H, dv], is changed in place."""

    def changed(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        change(x.unflatten(-1, (heads, -1)))
        return (x, *args[1:])

    handle = model.get_submodule(place.format(layer)).register_forward_pre_hook(changed)
    try:
        yield
    finally:
        handle.remove()


def zero_heads(*heads: int) -> Callable[[Tensor], None]:
    """Zeros in some heads' places."""

    def change(x: Tensor) -> None:
        x[..., list(heads), :] = 0

    return change


def head_outputs(model: Any, place: str, layer: int, inputs: dict[str, Tensor] = INPUTS, heads: int = 4) -> Tensor:
    """[B, N, H, dv]: what a layer's output projection is given in a pass."""
    result: list[Tensor] = []
    with edit_outputs(model, place, layer, heads, lambda x: result.append(x.clone())):
        logits(model, inputs)
    return result[0]


def mask_of(lengths: list[int], side: str = "right") -> Tensor:
    """What is a token in a batch of padded sequences of these lengths."""
    mask = (torch.arange(TOKENS) < torch.tensor(lengths).unsqueeze(1)).long()
    return mask if side == "right" else mask.flip(1)


def reference_outputs(way: str, there: Tensor, heads: list[int]) -> Callable[[Tensor], None]:
    """The mean, or the outputs of the sequences that `donors` draws for seed 2, one place at a time."""
    giving = donors(there.sum(1).numpy(), 2)

    def change(x: Tensor) -> None:
        result = x.clone()
        for row, position in there.nonzero().tolist():
            if way == "mean":
                tokens = [result[other, position] for other in range(len(result)) if there[other, position]]
                x[row, position, heads] = torch.stack(tokens).mean(0)[heads]
            else:
                assert there[giving[row], position]
                x[row, position, heads] = result[giving[row], position, heads]

    return change


def reference_component(call: AttentionCall, head: int, part: str, queries: Sequence[int]) -> Tensor:
    """[B, n, dv]: the outputs of some queries, from each one's table of all contents at all positions, one by one."""
    parts = [x.double() for x in call.unrotated or (call.q, call.k)]
    group = head // (call.q.shape[1] // call.k.shape[1])
    result = torch.zeros(call.q.shape[0], len(queries), call.v.shape[-1], dtype=torch.float64)
    own = call.logits()
    for row, (at, i) in product(range(len(result)), enumerate(queries)):
        visible = own[row, head, i].isfinite().nonzero().flatten().tolist()
        table = torch.empty(len(visible), len(visible), dtype=torch.float64)
        for (a, j), (b, m) in product(enumerate(visible), repeat=2):
            table[a, b] = call.scale * pair_logit(call, parts[0][row, head, i], i, parts[1][row, group, m], j)
        component = table.mean(1) if part == "positional" else table.mean(0)
        if call.softcap is not None:
            component = call.softcap * (component / call.softcap).tanh()
        if call.bias is not None and part == "positional":
            bias = call.bias.expand(call.q.shape[0], call.q.shape[1], call.q.shape[2], -1)
            component = component + bias[row, head, i, visible].double()
        values = call.v[row, head // (call.q.shape[1] // call.v.shape[1]), visible].double()
        weights = call.softmax(component.view(1, 1, 1, -1).expand(1, call.q.shape[1], 1, -1))[0, head, 0]
        result[row, at] = weights @ values
    return result


def pair_logit(call: AttentionCall, q: Tensor, i: int, k: Tensor, j: int) -> Tensor:
    """A query at position i with a key put at position j."""
    rotation = call.rotation
    if rotation is None:
        return q @ k
    (a, b), (c, d) = q[rotation.pairs].T, k[rotation.pairs].T
    angles = (i - j) * rotation.frequencies
    rotated = rotation.magnitudes**2 * (angles.cos() * (a * c + b * d) + angles.sin() * (a * d - b * c))
    rest = sorted(set(range(len(q))) - set(rotation.pairs.flatten().tolist()))
    return rotated.sum() + q[rest] @ k[rest]
