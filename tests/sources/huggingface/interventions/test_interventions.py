"""Interventions agree with the same thing done another way: angles and weights edited, hooks, brute force."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tests.sources.huggingface.models import (
    BLOOM,
    GPT,
    GROUPED,
    INPUTS,
    LATENT,
    NARROW,
    SIZES,
    T5,
    TOKENS,
    calls_in,
    padded_inputs,
    state,
    tiny,
)
from torch import Tensor

from toeplens.encodings import BandControl
from toeplens.encodings.control import swapped
from toeplens.ground import InputError
from toeplens.lens.following.two_way import two_way
from toeplens.lens.kit.interventions import donors
from toeplens.lens.kit.movable import Given, movable_from
from toeplens.sources.huggingface import AttentionCall, Change, intervened
from toeplens.sources.huggingface.interventions.outputs import changed_outputs

pytestmark = pytest.mark.usefixtures("unchecked")

LLAMA = NARROW | {"sliding_window": None}
MIXED = {"num_local_experts": 2, "num_experts_per_tok": 1}
# the output projection of a layer's attention, from the model on
ROTARY: dict[str, tuple[dict[str, Any], str]] = {
    "LlamaForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "MistralForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "Qwen2ForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "Qwen3ForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "GemmaForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "Gemma2ForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "Gemma3ForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "PhiForCausalLM": (SIZES, "model.layers.{}.self_attn.dense"),
    "Phi3ForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "StableLmForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "GPTNeoXForCausalLM": (SIZES, "gpt_neox.layers.{}.attention.dense"),
    "OlmoForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "Olmo2ForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "CohereForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "GraniteForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "Starcoder2ForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "NemotronForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "GlmForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "SmolLM3ForCausalLM": (GROUPED, "model.layers.{}.self_attn.o_proj"),
    "PersimmonForCausalLM": (SIZES, "model.layers.{}.self_attn.dense"),
    "HeliumForCausalLM": (NARROW, "model.layers.{}.self_attn.o_proj"),
    "DeepseekV3ForCausalLM": (LATENT, "model.layers.{}.self_attn.o_proj"),
    "GptOssForCausalLM": (NARROW | MIXED, "model.layers.{}.self_attn.o_proj"),
}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2LMHeadModel": (GPT, "transformer.h.{}.attn.c_proj"),
    "GPTJForCausalLM": (GPT | {"rotary_dim": 4}, "transformer.h.{}.attn.out_proj"),
    "CodeGenForCausalLM": (GPT | {"rotary_dim": 4}, "transformer.h.{}.attn.out_proj"),
    "BloomForCausalLM": (BLOOM, "transformer.h.{}.self_attention.dense"),
    "MptForCausalLM": (
        {"vocab_size": 31, "d_model": 32, "n_heads": 4, "n_layers": 2},
        "transformer.blocks.{}.attn.out_proj",
    ),
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


def near(x: Tensor, y: Tensor, allowed: float = 1e-5) -> bool:
    """To so much of the largest number."""
    return bool((x - y).abs().max() <= allowed * y.abs().max())


def apart(x: Tensor, y: Tensor) -> bool:
    return not near(x, y, 1e-3)


@contextmanager
def angles(model: Any, layer: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """The cosines and sines that one layer's rotation is given are others."""
    names = vars(sys.modules[type(model).__module__])
    own = {name: value for name, value in names.items() if "apply" in name and "rot" in name and callable(value)}
    modules = [module for name, module in model.named_modules() if f"layers.{layer}." in f"{name}."]
    inside = {"now": 0}

    def enter(*_: Any) -> None:
        inside["now"] += 1

    def leave(*_: Any) -> None:
        inside["now"] -= 1

    def turned(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def other(*args: Any, **more: Any) -> Any:
            given = list(args)
            at = 2 if len(given) > 3 else 1  # of queries and keys together, or of each alone
            if inside["now"] and at == 2:
                given[2:4] = change(*given[2:4])
            return rotate(*given, **more)

        return other

    handles = [modules[0].register_forward_pre_hook(enter), modules[0].register_forward_hook(leave)]
    try:
        names |= {name: turned(value) for name, value in own.items()}
        yield
    finally:
        names |= own
        for handle in handles:
            handle.remove()


def stopped(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (cos.square() + sin.square()).sqrt(), torch.zeros_like(sin)


def without_head(
    model: Any, place: str, layer: int, head: int, heads: int, inputs: dict[str, Tensor] = INPUTS
) -> Tensor:
    """Logits where what the output projection is given has zeros in a head's place."""
    module = model.get_submodule(place.format(layer))

    def silence(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x.unflatten(-1, (heads, -1))[..., head, :] = 0
        return (x, *args[1:])

    handle = module.register_forward_pre_hook(silence)
    try:
        return logits(model, inputs)
    finally:
        handle.remove()


# ---- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_with_nothing_changed_the_pass_is_the_plain_one_and_nothing_is_left_behind(kind: str) -> None:
    model = tiny(kind, **ALL[kind][0])
    plain, before = logits(model), state(model)
    with intervened(model, ()):
        assert near(logits(model), plain)
    with intervened(model, Change(layer=1, output="zero")):
        assert apart(logits(model), plain)
    assert state(model) == before
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("kind", ALL)
def test_a_silent_head_is_one_whose_place_before_the_projection_is_empty(kind: str) -> None:
    sizes, place = ALL[kind]
    model = tiny(kind, **sizes)
    wanted = without_head(model, place, 1, 2, 4)
    with intervened(model, Change(layer=1, heads=(2,), output="zero")):
        assert near(logits(model), wanted)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_stopped_rotation_is_one_whose_angles_are_all_0(kind: str) -> None:
    model = tiny(kind, **ROTARY[kind][0])
    with angles(model, 1, stopped):
        wanted = logits(model)
    assert apart(wanted, logits(model))
    with intervened(model, Change(layer=1, speed=0.0)):
        assert near(logits(model), wanted)


@pytest.mark.parametrize("kind", ["GPTJForCausalLM", "CodeGenForCausalLM", *ROTARY])
def test_tokens_twice_as_far_apart_are_those_of_twice_the_position(kind: str) -> None:
    model = tiny(kind, **ALL[kind][0])
    wanted = logits(model, INPUTS | {"position_ids": 2 * torch.arange(TOKENS).unsqueeze(0)})
    if not apart(wanted, logits(model)):
        pytest.fail("positions do nothing")
    with intervened(model, [Change(layer=layer, speed=2.0) for layer in range(2)]):
        assert near(logits(model), wanted)


# ---- frequencies, heads, groups --------------------------------------------------------------------------------------


def of_band(band: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A change of one pair's columns, which lie half apart."""

    def changed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.clone(), sin.clone()
        for column in (band, band + cos.shape[-1] // 2):
            cos[..., column], sin[..., column] = change(cos[..., column], sin[..., column])
        return cos, sin

    return changed


def exchanged(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs 0 and 2 of 4."""
    order = [2, 1, 0, 3, 6, 5, 4, 7]
    return cos[..., order], sin[..., order]


@pytest.mark.parametrize(
    ("bands", "edited"),
    [
        (BandControl(still=(1,)), of_band(1, stopped)),
        (BandControl(silent=(0,)), of_band(0, lambda cos, sin: (0 * cos, 0 * sin))),
        (BandControl(order=swapped(4, [0], [2])), exchanged),
    ],
    ids=["still", "silent", "exchanged"],
)
def test_bands_are_columns_of_the_table_of_angles(bands: BandControl, edited: Any) -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    with angles(model, 0, edited):
        wanted = logits(model)
    assert apart(wanted, logits(model))
    with intervened(model, Change(layer=0, bands=bands)):
        assert near(logits(model), wanted)


def test_one_head_of_a_group_and_a_whole_group() -> None:
    """Outputs before the projection: of a head that is changed as where all are, of others as they were."""
    model = tiny("LlamaForCausalLM", **LLAMA)
    plain, seen = [], []

    def keep(into: list[Tensor]) -> Any:
        return lambda module, args: into.append(args[0].unflatten(-1, (4, -1)))

    place = model.model.layers[1].self_attn.o_proj
    for into in (plain, seen):
        handle = place.register_forward_pre_hook(keep(into))
        with angles(model, 1, stopped if into is seen else lambda cos, sin: (cos, sin)):
            logits(model)
        handle.remove()
    for change, heads in (
        (Change(layer=1, heads=(3,), speed=0.0), {3}),
        (Change(layer=1, groups=(0,), speed=0.0), {0, 1}),
    ):
        found: list[Tensor] = []
        handle = place.register_forward_pre_hook(keep(found))
        with intervened(model, change):
            logits(model)
        handle.remove()
        for head in range(4):
            wanted = (seen if head in heads else plain)[0][:, :, head]
            torch.testing.assert_close(found[0][:, :, head], wanted, atol=1e-5, rtol=1e-5)


def test_several_changes_in_one_pass_are_those_of_each() -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    changes = [
        Change(layer=0, heads=(1,), output="zero"),
        Change(layer=0, heads=(2, 3), speed=0.0),
        Change(layer=1, bands=BandControl(silent=(3,))),
    ]
    with intervened(model, changes):
        together = logits(model)
    with intervened(model, changes[0]), intervened(model, changes[1:]):  # the outer one sees nothing of the inner
        assert apart(logits(model), together)
    (first,) = (call for call in calls_in(model) if call.layer == 0)
    joint = changed_outputs(first, changes[0])
    joint[:, :, 2:] = changed_outputs(first, changes[1])[:, :, 2:]
    found: list[Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: found.append(args[0].unflatten(-1, (4, -1)))
    )
    with intervened(model, changes):
        logits(model)
    handle.remove()
    torch.testing.assert_close(found[0], joint)


# ---- biases ----------------------------------------------------------------------------------------------------------


def test_alibi_taken_away_is_a_table_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("BloomForCausalLM", **BLOOM)
    with intervened(model, [Change(layer=layer, bias=False) for layer in range(2)]):
        found = logits(model, padded_inputs())
    names, build = vars(sys.modules[type(model).__module__]), "build_alibi_tensor"
    own = names[build]
    monkeypatch.setitem(names, build, lambda *args, **more: 0 * own(*args, **more))
    wanted = logits(model, padded_inputs())
    monkeypatch.undo()
    there = padded_inputs()["attention_mask"].bool()
    assert near(found[there], wanted[there])
    assert apart(wanted[there], logits(model, padded_inputs())[there])


def test_t5s_bias_taken_away_is_a_bias_with_weights_of_zero() -> None:
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = INPUTS | {"decoder_input_ids": INPUTS["input_ids"].flip(1)}
    changes = [Change(layer=layer, side=side, bias=False) for layer in range(2) for side in ("encoder", "decoder")]
    with intervened(model, changes):
        found = logits(model, inputs)
    plain = logits(model, inputs)
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            weight.data.zero_()
    assert near(found, logits(model, inputs))
    assert apart(found, plain)


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_means_and_outputs_of_others() -> None:
    inputs = {"input_ids": torch.randint(4, 31, (3, TOKENS), generator=torch.Generator().manual_seed(5))}
    call = calls_in(tiny("LlamaForCausalLM", **LLAMA), inputs)[1]
    mean = changed_outputs(call, Change(layer=1, heads=(0,), output="mean"))
    other = changed_outputs(call, Change(layer=1, heads=(0,), output="resample", seed=2))
    giving = donors(np.full(3, TOKENS), 2)
    for row in range(3):
        torch.testing.assert_close(mean[row, :, 0], call.heads[:, :, 0].mean(0))
        torch.testing.assert_close(other[row, :, 0], call.heads[giving[row], :, 0])
        assert giving[row] != row
    for made in (mean, other):
        assert torch.equal(made[:, :, 1:], call.heads[:, :, 1:])


# ---- positional and symbolic parts -----------------------------------------------------------------------------------


def brute_force(call: AttentionCall, head: int, part: str) -> Tensor:
    """[B, N, dv]: the outputs, from every query's table of all contents at all positions, formed one by one."""
    parts = [x.double() for x in call.unrotated or (call.q, call.k)]
    group = head // (call.q.shape[1] // call.k.shape[1])
    found = torch.zeros(call.q.shape[0], call.q.shape[2], call.v.shape[-1], dtype=torch.float64)
    logits_ = call.logits()
    for row, i in np.ndindex(call.q.shape[0], call.q.shape[2]):
        seen = logits_[row, head, i].isfinite().nonzero().flatten().tolist()
        table = torch.empty(len(seen), len(seen), dtype=torch.float64)
        for a, j in enumerate(seen):
            for b, m in enumerate(seen):
                table[a, b] = call.scale * _product(call, parts[0][row, head, i], i, parts[1][row, group, m], j)
        made = table.mean(1) if part == "positional" else table.mean(0)
        if call.softcap is not None:
            made = call.softcap * (made / call.softcap).tanh()
        if call.bias is not None and part == "positional":
            bias = call.bias.expand(call.q.shape[0], call.q.shape[1], call.q.shape[2], -1)
            made = made + bias[row, head, i, seen].double()
        values = call.v[row, head // (call.q.shape[1] // call.v.shape[1]), seen].double()
        found[row, i] = call.softmax(made.view(1, 1, 1, -1).expand(1, call.q.shape[1], 1, -1))[0, head, 0] @ values
    return found


def _product(call: AttentionCall, q: Tensor, i: int, k: Tensor, j: int) -> Tensor:
    """A query at position i with a key put at position j."""
    rotation = call.rotation
    if rotation is None:
        return q @ k
    total, turned = torch.zeros((), dtype=torch.float64), set(rotation.pairs.flatten().tolist())
    for pair, theta, size in zip(rotation.pairs, rotation.frequencies, rotation.magnitudes, strict=True):
        angle = (i - j) * theta
        (a, b), (c, d) = q[pair], k[pair]
        total = total + size**2 * (angle.cos() * (a * c + b * d) + angle.sin() * (a * d - b * c))
    for each in set(range(len(q))) - turned:
        total = total + q[each] * k[each]
    return total


PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "window": ("MistralForCausalLM", NARROW),
    "cap": ("Gemma2ForCausalLM", NARROW),
    "sinks": ("GptOssForCausalLM", NARROW | MIXED),
    "partial": ("GPTNeoXForCausalLM", SIZES),
    "alibi": ("BloomForCausalLM", BLOOM),
    "encoder": ("EsmForMaskedLM", SIZES | {"position_embedding_type": "rotary", "mask_token_id": 3}),
}


@pytest.mark.parametrize("part", ["positional", "symbolic"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_logits_are_the_means_of_each_query_s_table(name: str, part: Any) -> None:
    kind, sizes = PARTS[name]
    call = calls_in(tiny(kind, **sizes))[0]
    found = changed_outputs(call, Change(layer=0, heads=(3,), attention=part))
    torch.testing.assert_close(found[:, :, 3].double(), brute_force(call, 3, part), atol=1e-5, rtol=1e-5)
    assert torch.equal(found[:, :, :3], call.heads[:, :, :3].to(found.dtype))


@pytest.mark.parametrize("name", ["llama", "window", "partial", "alibi"])
def test_the_parts_vary_as_the_analysis_of_variance_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`two_way` never forms the logits whose variance it gives."""
    kind, sizes = PARTS[name]
    call = calls_in(tiny(kind, **sizes))[0]
    placed = call.placed()
    ((_, _, keys),) = movable_from(placed.pop("q"), placed.pop("k"), Given(**placed))
    analysis = two_way(keys)
    made: list[Tensor] = []
    monkeypatch.setattr(
        "toeplens.sources.huggingface.capture.calls.Attention.softmax",
        lambda self, logits: made.append(logits.double()) or logits.softmax(-1),
    )
    for part, wanted in (("positional", analysis.positional), ("symbolic", analysis.symbolic)):
        made.clear()
        changed_outputs(call, Change(layer=0, attention=part))
        seen = made[-1].isfinite()
        mean = made[-1].where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        variance = (made[-1] - mean).square().where(seen, 0).sum(-1) / seen.sum(-1)
        torch.testing.assert_close(variance, wanted, atol=1e-6, rtol=1e-4)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (
            "LlamaForCausalLM",
            Change(layer=2, output="zero"),
            r"layer: 2 was given; there are 2 calls of self attention, co",
        ),
        (
            "LlamaForCausalLM",
            Change(layer=0, kind="cross", output="zero"),
            "layer: 0 was given; there are 0 calls of cross",
        ),
        (
            "LlamaForCausalLM",
            Change(layer=0, heads=(4,), output="zero"),
            r"heads: \[4\] were given; model.* has 4, counted",
        ),
        ("LlamaForCausalLM", Change(layer=0, heads=(1, 1), output="zero"), r"heads: \[1, 1\] were given"),
        (
            "LlamaForCausalLM",
            Change(layer=0, groups=(2,), output="zero"),
            r"groups: \[2\] were given; .* has 2, counted",
        ),
        (
            "LlamaForCausalLM",
            Change(layer=0, bands=BandControl(still=(4,))),
            r"still: .* 0 to 3 \(model.* turns 4 pairs\)",
        ),
        (
            "LlamaForCausalLM",
            Change(layer=0, bias=False),
            "bias: model.* adds nothing to its logits that could be taken",
        ),
        ("BloomForCausalLM", Change(layer=0, speed=0.0), "bands: .* has no rotation that could be stopped or changed"),
        ("GPT2LMHeadModel", Change(layer=0, bands=BandControl(silent=(0,))), "bands: .* has no rotation that could be"),
    ],
)
def test_what_is_not_there_is_one_sentence(kind: str, change: Change, sentence: str) -> None:
    sizes = LLAMA if kind == "LlamaForCausalLM" else ALL[kind][0]
    model = tiny(kind, **sizes)
    before = state(model)
    with intervened(model, change), pytest.raises(InputError, match=f"^{sentence}"):
        logits(model)
    assert state(model) == before


def test_one_sequence_has_no_other_to_draw_from() -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    change = Change(layer=0, output="resample")
    with intervened(model, change), pytest.raises(InputError, match=r"^output: resample was given for a batch of one"):
        logits(model, {"input_ids": INPUTS["input_ids"][:1]})


def test_a_head_is_changed_once_and_a_side_is_named_where_there_are_two() -> None:
    model = tiny("LlamaForCausalLM", **LLAMA)
    twice = [Change(layer=0, heads=(1, 2), output="zero"), Change(layer=0, heads=(2,), speed=0.0)]
    with intervened(model, twice), pytest.raises(InputError, match=r"^changes: head 2 of model.* is changed twice"):
        logits(model)
    model = tiny("T5ForConditionalGeneration", **T5)
    inputs = INPUTS | {"decoder_input_ids": INPUTS["input_ids"]}
    with intervened(model, Change(layer=0, output="zero")), pytest.raises(InputError, match=r"^side: it was not given"):
        logits(model, inputs)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "bands: none were given, nor speed, bias, attention or output"),
        ({"speed": 0.0, "output": "zero"}, "output: it was given beside speed"),
        ({"attention": "positional", "bias": False}, "attention: it was given beside bias"),
        ({"heads": (0,), "groups": (0,), "speed": 0.0}, "groups: they were given beside heads"),
        ({"bands": BandControl(heads=(0,))}, "bands: heads were given in them"),
        ({"speed": float("nan")}, "speed: nan was given"),
        ({"output": "gone"}, "output: there is no 'gone'; known: mean, resample, zero"),
        ({"attention": "both"}, "attention: there is no 'both'; known: positional, symbolic"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{sentence}"):
        Change(layer=0, **fields)


def test_a_cache_of_keys_is_refused_and_another_model_is_left_alone() -> None:
    model, other = (tiny("LlamaForCausalLM", **LLAMA) for _ in range(2))
    with torch.no_grad():
        cache = model(**INPUTS, use_cache=True).past_key_values
    with intervened(model, Change(layer=0, speed=0.0)):
        with pytest.raises(InputError, match=r"^inputs: past_key_values was given"):
            model(**INPUTS, past_key_values=cache)
        assert apart(logits(model), logits(other))
    assert torch.equal(logits(model), logits(other))
