"""Effects of heads are what plain passes give in which a head is silent, has no position, or lacks frequencies.

Estimates of them are derivatives of plain passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.backends.hf import models
from torch import Tensor, nn
from torch.nn import functional as F

from toeplens.backends.hf import Change, NoPosition, effect_metric, effects, intervene, replay
from toeplens.backends.hf.effect_metric import NO_LABEL, EffectMetric, Readout
from toeplens.backends.hf.effects import HeadEffects, band_effects, head_effects, head_estimates
from toeplens.backends.hf.replay import layout_of, observe_passes
from toeplens.encodings import FrequencyMask
from toeplens.utils import InputError

SHARED = models.NARROW | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 31,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
NO_SHARED_KV = {"num_kv_shared_layers": 0, "altup_num_inputs": 4}
MODELS: dict[str, tuple[str, dict[str, Any], str, int]] = {  # class, sizes, output projection, calls replayed
    "Llama": ("LlamaForCausalLM", models.GROUPED | {"num_hidden_layers": 3}, "self_attn.o_proj", 2),
    "Gemma2": ("Gemma2ForCausalLM", models.NARROW | {"final_logit_softcapping": 2.0}, "self_attn.o_proj", 1),
    "GPT2": ("GPT2LMHeadModel", models.GPT, "attn.c_proj", 1),
    "GPTJ": ("GPTJForCausalLM", models.GPT | {"rotary_dim": 4}, "attn.out_proj", 1),
    "Bloom": ("BloomForCausalLM", models.BLOOM, "self_attention.dense", 1),
    "Bert": ("BertModel", models.SIZES, "attention.output.dense", 1),
    "Bert-masked": ("BertForMaskedLM", models.SIZES, "attention.output.dense", 1),
    "Albert": ("AlbertModel", models.SIZES | {"embedding_size": 16}, "attention.dense", 1),
    "T5": ("T5ForConditionalGeneration", models.T5, "Attention.o", 5),
    "GptOss": ("GptOssForCausalLM", models.NARROW | models.MIXED, "self_attn.o_proj", 1),
    "GPTNeoX": ("GPTNeoXForCausalLM", models.SIZES, "attention.dense", 1),
    "SmolLM3": ("SmolLM3ForCausalLM", models.GROUPED | {"no_rope_layers": [0, 1]}, "self_attn.o_proj", 1),
    "DeepseekV3": ("DeepseekV3ForCausalLM", models.LATENT, "self_attn.o_proj", 1),
    "Gemma3n-text": ("Gemma3nForCausalLM", SHARED, "self_attn.o_proj", 0),
    # layers hand on [altup, B, N, D], of which neither the first nor the last part is a copy of the batch
    "Gemma3n-own": ("Gemma3nForCausalLM", SHARED | NO_SHARED_KV, "self_attn.o_proj", 3),
    # layers hand on [N, B, D]; with a cache FSMT hides nothing, not even what comes next
    "FSMT": ("FSMTForConditionalGeneration", models.fsmt(2) | {"use_cache": False}, "out_proj", 5),
}
MASK = 3
STATES = ("Bert", "Albert")  # no loss


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return _model(name, dtype)


@cache
def _model(name: str, dtype: torch.dtype) -> Any:
    kind, sizes, _, _ = MODELS[name]
    return models.tiny(kind, **sizes).to(dtype)


def inputs_of(model: Any) -> dict[str, Tensor]:
    inputs = models.padded_inputs()
    if model.config.is_encoder_decoder:
        tokens, there = inputs["input_ids"], inputs["attention_mask"]
        inputs |= {"decoder_input_ids": tokens[:, 2:9], "decoder_attention_mask": there[:, 5:]}
    return inputs


@cache
def calls_of(name: str) -> list[tuple[str, str, str, int, int]]:
    calls = models.calls_in(model_of(name), inputs_of(model_of(name)))
    return [(c.module, c.side, c.kind, c.layer, c.heads.shape[2]) for c in calls]


@cache
def effects_of(name: str, dtype: torch.dtype = torch.float32) -> HeadEffects:
    model = model_of(name, dtype)
    return head_effects(model, inputs_of(model), calls_of(name), mask_token=MASK)


def labels_of(name: str, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The inputs of a pass, and the token that each position predicts, -1 for none: written out place by place."""
    if name.endswith("-masked"):
        random = np.random.Generator(np.random.Philox(0))
        tokens = inputs["input_ids"].clone()
        labels = torch.full_like(tokens, -1)
        for row, length in enumerate((models.TOKENS, models.PADDED)):
            for place in random.choice(np.arange(length), max(1, round(0.15 * length)), replace=False):
                labels[row, place], tokens[row, place] = tokens[row, place].clone(), MASK
        return inputs | {"input_ids": tokens}, labels
    if name in STATES:
        return inputs, None
    side = "decoder_" if name in ("T5", "FSMT") else ""
    tokens, is_token = inputs[f"{side}input_ids"], inputs[f"{side}attention_mask"]
    labels = torch.full_like(tokens, -1)
    for row in range(len(tokens)):
        for place in range(tokens.shape[1] - 1):
            if is_token[row, place] and is_token[row, place + 1]:
                labels[row, place] = tokens[row, place + 1]
    return inputs, labels


def ablation_hook(head: int, heads: int, turn: int) -> Callable[..., Any]:
    """A hook that sets a head's part of a projection's input to 0, the ``turn``-th time that it is called."""
    passed = count()

    def hook(projection: nn.Module, args: Any) -> Any:
        x = args[0].clone()
        if next(passed) == turn:
            x.unflatten(-1, (heads, -1))[..., head, :] = 0
        return (x, *args[1:])

    return hook


def measured_losses(name: str, dtype: torch.dtype) -> Callable[[], Any]:
    """What a plain pass gives: each sequence's loss, or its last hidden states at its tokens."""
    model = model_of(name, dtype)
    inputs, labels = labels_of(name, inputs_of(model))

    @torch.no_grad()
    def plain() -> Any:
        out = model(**inputs)
        if labels is None:
            return [out[0][0].double(), out[0][1, : models.PADDED].double()]
        chances = out.logits.double().log_softmax(-1)
        rows = []
        for row in range(2):
            places = [place for place in range(labels.shape[1]) if labels[row, place] >= 0]
            rows.append(-sum(chances[row, place, labels[row, place]] for place in places) / len(places))
        return np.array([float(each) for each in rows])

    return plain


def reference_effects(name: str, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """Each head's effects, by whole passes in which its part of the projection's input is 0."""
    model, plain = model_of(name, dtype), measured_losses(name, dtype)
    intact = plain()
    by_call = []
    turns: dict[str, int] = {}
    for module, _, _, _, heads in calls_of(name):
        prefix, turn = module.split(" (")[0], turns.get(module, 0)
        turns[module] = turn + 1
        ending = MODELS[name][2]
        around = prefix.removesuffix(".self") + "."  # BERT's projection is not in the module that is captured
        result = [m for n, m in model.named_modules() if n.endswith(ending) and (n + ".").startswith(around)]
        assert len(result) == 1
        rows = []
        for head in range(heads):
            handle = result[0].register_forward_pre_hook(ablation_hook(head, heads, turn))
            silenced = plain()
            handle.remove()
            if isinstance(intact, list):
                both = zip(intact, silenced, strict=True)
                rows.append([float((y - x).square().mean() / x.var(0, correction=0).mean()) for x, y in both])
            else:
                rows.append(silenced - intact)
        by_call.append(np.stack(rows, 1))
    return by_call


@pytest.mark.parametrize("name", MODELS)
def test_exact_effects_match_plain_passes(name: str) -> None:
    actual = effects_of(name)
    assert actual.metric == ("states" if name in STATES else "loss")
    assert actual.replayed == MODELS[name][3]
    assert len(actual.effects) == len(calls_of(name))
    if actual.baseline is not None:
        np.testing.assert_allclose(actual.baseline, measured_losses(name, torch.float32)(), rtol=1e-5)
    for ours, theirs in zip(actual.effects, reference_effects(name), strict=True):
        assert ours.dtype == np.float64
        assert np.abs(theirs).max() > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Bloom", "T5"])
def test_head_and_position_chunking_does_not_change_effects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = model_of(name), effects_of(name)
    monkeypatch.setattr(replay, "_CPU_TOKENS", 1)
    monkeypatch.setattr(effect_metric, "AT_ONCE", 6 * 31)
    monkeypatch.setattr(effect_metric.Readout, "of", lambda *_: None)  # as if its head were no single product
    sizes: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.numel()))
    try:
        actual = head_effects(model, inputs_of(model), calls_of(name))
    finally:
        handle.remove()
    assert max(sizes) <= 6 * 31
    for ours, theirs in zip(actual.effects, whole.effects, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def test_effects_of_a_subset_of_the_calls() -> None:
    """Any calls, in any order, with nothing before them run but once."""
    for name in ("Llama", "T5", "Albert"):
        model, whole = model_of(name), effects_of(name)
        calls = calls_of(name)[:0:-1]
        progress: list[tuple[int, int]] = []
        actual = head_effects(model, inputs_of(model), calls, on_progress=lambda *x, seen=progress: seen.append(x))
        assert actual.replayed == len(calls)
        assert progress[-1] == (sum(call[4] for call in calls),) * 2
        for ours, theirs in zip(actual.effects, whole.effects[:0:-1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert head_effects(model_of("Llama"), inputs_of(model_of("Llama")), []).effects == ()


def count_layer_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each layer is run from now on."""
    counts = [0] * len(model.model.layers)
    for layer_index, layer in enumerate(model.model.layers):

        def count(*args: Any, layer_index: int = layer_index, forward: Any = layer.forward, **kwargs: Any) -> Any:
            counts[layer_index] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", count)
    return counts


def test_earlier_layers_are_not_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of("Llama"), calls_of("Llama")
    counts = count_layer_calls(model, monkeypatch)
    head_effects(model, inputs_of(model), calls)
    # the intact pass and one of two copies; one for each layer up to its own; one that ends before the next layer
    assert counts == [2 + 1 + 1, 2 + 2 + 1, 2 + 3]


def test_long_sequences_are_checked_on_their_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, chosen = model_of("Llama"), calls_of("Llama"), [[1], [0], [2]]
    inputs = {name: x[:1] for name, x in inputs_of(model).items()}
    assert inputs["attention_mask"].all()
    whole = head_effects(model, inputs, calls)
    monkeypatch.setattr(effect_metric, "_LONG", 12)
    monkeypatch.setattr(effect_metric, "_FIRST", 5)
    monkeypatch.setattr(replay, "_CPU_TOKENS", 1)
    monkeypatch.setattr(replay, "_CALL_COST", 1)
    counts, lengths = count_layer_calls(model, monkeypatch), list[int]()
    handle = model.model.layers[2].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    actual = head_effects(model, inputs, calls, chosen=chosen)
    handle.remove()
    # the intact pass; of the first tokens another, and for each other layer two that end before it and one from it on;
    # one with nothing silenced from layer 0 on, the first of all; one for each head from its layer on; one that ends
    # before the next layer
    assert counts == [1 + (1 + 2) + 2 + 1, 1 + (1 + 2 + 1) + 2 + 1 + 1, 1 + (1 + 2) + 2 + 1 + 1]
    assert sorted(set(lengths)) == [5, 12]
    assert actual.replayed == 2
    for ours, theirs, (head,) in zip(actual.effects, whole.effects, chosen, strict=True):
        np.testing.assert_allclose(ours[:, head], theirs[:, head], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("long", [False, True])
def test_layers_that_share_other_state_use_full_passes(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, outputs_left = model_of("Llama"), []
    if long:
        monkeypatch.setattr(effect_metric, "_LONG", 12)
        monkeypatch.setattr(effect_metric, "_FIRST", 4)
    first, last = model.model.layers[0], model.model.layers[2]
    own_first, own_last = first.forward, last.forward

    def leave(*args: Any, **kwargs: Any) -> Any:
        outputs_left.append(own_first(*args, **kwargs))
        return outputs_left[-1]

    def take(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own_last(hidden + outputs_left.pop() if outputs_left else hidden, *args, **kwargs)

    monkeypatch.setattr(first, "forward", leave)
    monkeypatch.setattr(last, "forward", take)
    actual = head_effects(model, inputs_of(model), calls_of("Llama"))
    assert actual.replayed <= 1
    for ours, theirs in zip(actual.effects, reference_effects("Llama"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_interdependent_sequences_are_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with places for the first 2 sequences of a pass alone, as experts of a fixed capacity have."""
    model = model_of("Llama")
    last = model.model.layers[2].mlp
    own = last.forward

    def crowded(x: Tensor) -> Tensor:
        return own(x) * (torch.arange(len(x)) < 2).view(-1, 1, 1)

    monkeypatch.setattr(last, "forward", crowded)
    actual = head_effects(model, inputs_of(model), calls_of("Llama"))
    assert actual.replayed == 2
    for ours, theirs in zip(actual.effects, reference_effects("Llama"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "GPTJ", "T5"])
def test_model_and_tables_are_left_unchanged(name: str) -> None:
    model = model_of(name)
    inputs, calls = inputs_of(model), calls_of(name)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = models.full_state(model)

    def stop(done: int, total: int) -> None:
        raise ZeroDivisionError

    for method in ("exact", "attribution"):
        actual = head_effects(model, inputs, calls, method=method)
        assert models.full_state(model) == before
        with pytest.raises(ZeroDivisionError):
            head_effects(model, inputs, calls, method=method, on_progress=stop)
        assert models.full_state(model) == before
        if method == "exact":
            np.testing.assert_allclose(actual.effects[1], effects_of(name).effects[1], atol=1e-6)
    next(model.parameters()).requires_grad_(True)
    model.eval()


def test_sequences_without_a_prediction_have_no_effect() -> None:
    model = model_of("GPT2")
    inputs = inputs_of(model)
    inputs["attention_mask"][1, 1:] = 0
    for method in ("exact", "attribution"):
        actual = head_effects(model, inputs, calls_of("GPT2"), method=method)
        assert actual.baseline is not None
        assert np.isnan(actual.baseline).tolist() == [False, True]
        for each in actual.effects:
            assert np.isnan(each).tolist() == [[False] * 4, [True] * 4]
    bert = model_of("Bert-masked")
    assert head_effects(bert, inputs_of(bert), calls_of("Bert-masked")).metric == "states"  # no mask token
    own = models.tiny(
        "BertLMHeadModel", **models.SIZES | {"num_hidden_layers": 1}
    )  # sees what comes next, so it is not asked for it
    call = ("bert.encoder.layer.0.attention.self", "encoder", "self", 0, 4)
    assert head_effects(own, inputs_of(own), [call]).metric == "states"
    actual = head_effects(own, inputs_of(own), [call], mask_token=MASK)
    assert actual.metric == "loss"
    bert = model_of("Bert")
    some = {name: each[:, :1] for name, each in inputs_of(bert).items()}
    for each in head_effects(bert, some, calls_of("Bert")).effects:  # one token has no variance
        assert np.isnan(each).all()


def test_unmeasurable_effects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, bert, t5 = (model_of(name) for name in ("Llama", "Bert-masked", "T5"))
    call = calls_of("Llama")[0]
    with pytest.raises(InputError, match=r"method must be exact for last hidden states"):
        head_effects(bert, inputs_of(bert), calls_of("Bert-masked"), method="attribution")
    with pytest.raises(InputError, match="got 'guess'"):
        head_effects(llama, inputs_of(llama), [call], method="guess")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"calls must have 2 sequences and 5 heads, got shape \[2, 12, 4, 8\]"):
        head_effects(llama, inputs_of(llama), [(*call[:4], 5)])
    with pytest.raises(InputError, match=r"calls: model.layers.9 of layer 0 is not called"):
        head_effects(llama, inputs_of(llama), [("model.layers.9", *call[1:])])
    with pytest.raises(InputError, match="inputs must contain decoder_input_ids"):
        head_effects(t5, {"input_ids": torch.tensor([[5, 6]])}, calls_of("T5"))
    transform = bert.cls.predictions.transform
    own = transform.forward
    monkeypatch.setattr(transform, "forward", lambda x: own(x - x.mean(1, keepdim=True)))
    with pytest.raises(InputError, match="the head of BertForMaskedLM was not understood"):
        head_effects(bert, inputs_of(bert), calls_of("Bert-masked"), mask_token=MASK)


# ---- without position, and without some frequencies ------------------------------------------------------------------

ROTARY = ["Llama", "Gemma2", "GPTNeoX", "GPTJ", "SmolLM3"]


def assert_same_effects(name: str, change: Change, ours: np.ndarray) -> float:
    """The largest effect of a change, after checking that these are its effects."""
    plain = measured_losses(name, torch.float32)
    intact = plain()
    with intervene(model_of(name), change):
        expected = plain() - intact
    np.testing.assert_allclose(ours, expected, atol=2e-6)
    return float(np.abs(expected).max())


@pytest.mark.parametrize("name", [*ROTARY, "Bloom", "T5"])
def test_position_effects_match_passes_without_one_heads_position(name: str) -> None:
    model = model_of(name)
    calls = [call for call in models.calls_in(model, inputs_of(model)) if call.kind == "self"]
    actual = head_effects(model, inputs_of(model), [c for c in calls_of(name) if c[2] == "self"], method="position")
    assert actual.method == "position"
    largest = 0.0
    for call, ours in zip(calls, actual.effects, strict=True):
        if call.rotation is None and call.bias is None:
            assert np.isnan(ours).all()
            continue
        for head in range(call.q.shape[1]):
            how = {"speed": 1.0 if call.rotation is None else 0.0, "bias": call.bias is None}
            change = Change(layer=call.layer, side=call.side, heads=(head,), **how)
            largest = max(largest, assert_same_effects(name, change, ours[:, head]))
    assert largest > 1e-4, "none of them does anything"


@pytest.mark.parametrize("off", ["rotation", "pair"])
@pytest.mark.parametrize("name", ROTARY)
def test_band_effects_match_passes_without_the_band(name: str, off: Any) -> None:
    model = model_of(name)
    inputs = inputs_of(model)
    actual = band_effects(model, inputs, calls_of(name), bands=2, off=off)
    np.testing.assert_allclose(actual.baseline, measured_losses(name, torch.float32)(), atol=1e-6)
    largest = 0.0
    each = zip(models.calls_in(model, inputs), actual.effects, actual.bands, actual.frequencies, strict=True)
    for call, ours, bands, frequencies in each:
        if call.rotation is None:
            assert (ours.shape[1], bands, len(frequencies)) == (0, (), 0)
            continue
        np.testing.assert_array_equal(frequencies, call.rotation.frequencies)
        assert [each for band in bands for each in band] == list(range(len(frequencies)))
        for number, band in enumerate(bands):
            control = FrequencyMask(**{"freeze" if off == "rotation" else "drop": band})
            largest = max(largest, assert_same_effects(name, Change(layer=call.layer, bands=control), ours[:, number]))
    assert largest > 1e-4, "none of them does anything"


def test_heads_without_position_or_frequencies_are_refused_together() -> None:
    gpt2, bloom = model_of("GPT2"), model_of("Bloom")
    with pytest.raises(NoPosition, match=r"^effects: 'position' needs a rotation or a bias"):
        head_effects(gpt2, inputs_of(gpt2), calls_of("GPT2"), method="position")
    with pytest.raises(NoPosition, match=r"^effects: 'bands' needs a known rotation"):
        band_effects(bloom, inputs_of(bloom), calls_of("Bloom"))
    with pytest.raises(InputError, match=r"^bands must be at least 1, got 0"):
        band_effects(bloom, inputs_of(bloom), calls_of("Bloom"), bands=0)


# ---- estimates -------------------------------------------------------------------------------------------------------


def fixed_labels(labels: Tensor, draws: int) -> list[Tensor]:
    """Labels as if drawn: other ones in every draw."""
    own = torch.tensor([[3, 7, 1, 30, 2, 2, 9, 11, 4, 5, 6, 8], [*range(1, 13)]])[:, : labels.shape[1]]
    return [torch.where(labels == NO_LABEL, NO_LABEL, (own + 5 * draw) % 31) for draw in range(draws)]


def reference_estimates(name: str, draws: int, span: int) -> list[np.ndarray]:
    """First and second order of each head and position, [B, N, H] a call, from gains on what the projections are fed.

    Sums of products of positions in the same span are written out, pair by pair.
    """
    model = model_of(name, torch.float64)
    inputs, labels = labels_of(name, inputs_of(model))
    assert labels is not None
    rows, tokens = labels.shape
    projections = [module for place, module in model.named_modules() if place.endswith(MODELS[name][2])]
    heads = calls_of(name)[0][4]
    gains = [torch.ones(rows, tokens, heads, dtype=torch.float64, requires_grad=True) for _ in projections]
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, gain=gain: (
                args[0] * gain.repeat_interleave(args[0].shape[-1] // heads, -1).view(args[0].shape),
            )
        )
        for module, gain in zip(projections, gains, strict=True)
    ]
    chances = model(**inputs).logits.log_softmax(-1)
    for handle in handles:
        handle.remove()
    labels = labels.masked_fill(labels < 0, NO_LABEL)
    result = []
    for number, each in enumerate([labels, *fixed_labels(labels, draws)]):
        losses = F.nll_loss(chances.flatten(0, 1), each.flatten(), ignore_index=NO_LABEL, reduction="sum")
        slopes = [-x.numpy() for x in torch.autograd.grad(losses, gains, retain_graph=True)]
        for place, slope in enumerate(slopes):
            terms = np.zeros_like(slope)
            for row in range(rows):
                count = int((labels[row] != NO_LABEL).sum())
                for i in range(tokens):
                    near = [j for j in range(tokens) if j // span == i // span]
                    more = sum(slope[row, i] * slope[row, j] for j in near) / (2 * count * max(draws, 1))
                    terms[row, i] = slope[row, i] / count if number == 0 else more
            if number == 0:
                result.append(terms)
            else:
                result[place] = result[place] + terms
    return result


@pytest.mark.parametrize("whole_head", [True, False])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert-masked", "Gemma2"])  # the last has a cap after its head
def test_first_and_second_order_match_gradients_by_hand(
    name: str, whole_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64; through the head's own product, and as if it were none; in pieces of a few positions."""
    monkeypatch.setattr(effects, "_DRAWS", 3)
    monkeypatch.setattr(effects, "_SPAN", 5)
    monkeypatch.setattr(effects, "_LOGITS", 2 * 31 * 5)
    if not whole_head:
        monkeypatch.setattr(Readout, "of", lambda *_: None)
    at = 0

    def drawn(shares: Tensor, labels: Tensor, random: Any) -> Iterator[Tensor]:
        nonlocal at
        lengths_full = torch.full((2, 12), 0)
        lengths_full[:, places[at : at + labels.shape[1]]] = labels
        own = [each[:, places[at : at + labels.shape[1]]] for each in fixed_labels(lengths_full, 3)]
        at += labels.shape[1]
        yield from own

    model = model_of(name, torch.float64)
    _, labels = labels_of(name, inputs_of(model))
    assert labels is not None
    places = (labels >= 0).any(0).nonzero()[:, 0]
    monkeypatch.setattr(effects, "_draw_labels", drawn)
    actual = head_estimates(model, inputs_of(model), calls_of(name), mask_token=MASK)
    blocks = actual.block_effects[0].shape[1]
    for ours, each in zip(actual.block_effects, reference_estimates(name, 3, 5), strict=True):
        theirs = np.zeros_like(ours)
        for i in range(12):
            theirs[:, i * blocks // 12] += blocks * each[:, i]
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-12)


def test_labels_are_sampled_from_the_models_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "_DRAWS", 4000)
    shares = torch.tensor([[[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 1.0, 0.0]], [[0.1, 0.2, 0.3, 0.4], [0.25] * 4]])
    labels = torch.tensor([[1, 2], [0, NO_LABEL]])

    def draw(seed: int) -> Tensor:
        return torch.stack(list(effects._draw_labels(shares, labels, torch.Generator().manual_seed(seed))))

    actual = draw(0)
    assert actual.shape == (4000, 2, 2)
    assert (actual[:, 1, 1] == NO_LABEL).all(), "where there is no label none is drawn"
    for row, place in ((0, 0), (0, 1), (1, 0)):
        counts, expected = np.bincount(actual[:, row, place], minlength=4), 4000 * shares[row, place].numpy()
        assert (counts[expected == 0] == 0).all()
        possible = expected > 0
        if possible.sum() > 1:
            assert stats.chisquare(counts[possible], expected[possible] * counts.sum() / expected.sum()).pvalue > 1e-4
    assert torch.equal(actual, draw(0))
    assert not torch.equal(actual, draw(1))


def outputs_without_position(name: str) -> list[Tensor | None]:
    """What heads put out without position, but of the second layer nothing is known."""
    model = model_of(name, torch.float64)
    result = effects._outputs_without_position(model, inputs_of(model), calls_of(name))
    return [None if number == 1 else each for number, each in enumerate(result)]


def test_position_estimates_are_path_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against central differences of passes in which a head is moved by a step, norms being float32 inside; NaN where a
    head has no position."""
    name, step = "Llama", 1e-2
    model, calls, instead = model_of(name, torch.float64), calls_of(name), outputs_without_position(name)
    monkeypatch.setattr(effects, "_DRAWS", 0)
    monkeypatch.setattr(effects, "_outputs_without_position", lambda *_: instead)
    actual = head_estimates(model, inputs_of(model), calls, target="position")
    anatomy = layout_of(model)
    inputs = inputs_of(model)
    with observe_passes(model, anatomy):
        passes = replay.ReplayedPasses(model, anatomy, EffectMetric.of(model, inputs, {"decoder"}, None, 0))
        places = [effects.address_of(model, call, passes.addresses) for call in calls]
        for call, put in enumerate(instead):
            if put is None:
                assert np.isnan(actual.effects[call]).all()
                continue
            for head in range(calls[call][4]):

                def moved(by: float, head: int = head, call: int = call, put: Tensor = put) -> np.ndarray:
                    def change(heads: Tensor) -> Tensor:
                        heads = heads.clone()
                        heads[:, :, head] += by * (put[:, :, head] - heads[:, :, head])
                        return heads

                    with torch.no_grad():
                        return passes.losses(passes.run(changes={places[call]: change})).mean(1).numpy()

                np.testing.assert_allclose(
                    actual.effects[call][:, head], (moved(step) - moved(-step)) / (2 * step), rtol=2e-3, atol=5e-5
                )


def test_unestimable_effects_are_refused() -> None:
    model = model_of("Llama")
    with pytest.raises(InputError, match=r"target must be .*, got 'bands'"):
        head_estimates(model, inputs_of(model), calls_of("Llama"), target="bands")  # type: ignore[arg-type]
    bert = model_of("Bert")
    with pytest.raises(effects.NoGradient, match="method must be exact for last hidden states"):
        head_estimates(bert, inputs_of(bert), calls_of("Bert"))


# ---- losses some words at a time are those of all logits together ----------------------------------------------------


def head_of(words: int, width: int, bias: bool, dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(width, words, bias=bias, dtype=dtype)


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    words=st.integers(1, 40),
    at_once=st.tuples(st.integers(1, 7), st.integers(1, 50)),
    bias=st.booleans(),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_chunked_losses_match_the_full_logits(
    rows: int, tokens: int, words: int, at_once: tuple[int, int], bias: bool, size: float, seed: int
) -> None:
    """float64, to 1e-12 of the largest logit."""
    torch.manual_seed(seed)
    head, states = head_of(words, 6, bias), size * torch.randn(rows, tokens, 6, dtype=torch.float64)
    labels = torch.randint(words, (rows, tokens)).masked_fill(torch.rand(rows, tokens) < 0.3, NO_LABEL)
    with torch.no_grad():
        actual = Readout.of(head, states, head)
        assert actual is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(effect_metric, "_ROWS_AT_ONCE", at_once[0])
            patch.setattr(effect_metric, "_VOCAB_AT_ONCE", at_once[1])
            ours = actual.cross_entropies(states, labels)
        logits = head(states)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL, reduction="none")
    torch.testing.assert_close(ours, theirs.view(labels.shape), rtol=1e-12, atol=1e-12 * float(logits.abs().max() + 1))
    assert (ours[labels == NO_LABEL] == 0).all()


def softcapped(x: Tensor) -> Tensor:
    return 30 * (x / 30).tanh()


def test_an_output_layer_that_is_not_linear_is_not_used() -> None:
    torch.manual_seed(0)
    head, states = head_of(7, 4, False, torch.float32), torch.randn(2, 1, 4)
    with torch.no_grad():
        assert Readout.of(head, states, head) is not None
        assert Readout.of(head, states, lambda x: softcapped(head(x))) is None
        assert Readout.of(head, states, lambda x: 1.001 * head(x)) is None
        assert Readout.of(head, states, lambda x: head(x)[..., :6]) is None
        assert Readout.of(head, states.double(), lambda x: head(x.float()).double()) is None
        assert Readout.of(head, states[..., :3], lambda x: F.linear(x, head.weight[:, :3])) is None
        assert Readout.of(None, states, head) is None
        assert Readout.of(nn.Sequential(head), states, head) is None
        assert Readout.of(head.to("meta"), states, head) is None
