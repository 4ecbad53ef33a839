"""Effects of heads are what a plain pass gives whose output projection is fed 0 in place of a head."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from tests.sources.huggingface import models
from torch import Tensor, nn

from toeplens.ground import InputError
from toeplens.sources.huggingface import outcome, replay
from toeplens.sources.huggingface.effects import HeadEffects, head_effects

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
    "GptOss": (
        "GptOssForCausalLM",
        models.NARROW | {"num_local_experts": 2, "num_experts_per_tok": 1},
        "self_attn.o_proj",
        1,
    ),
    "DeepseekV3": ("DeepseekV3ForCausalLM", models.LATENT, "self_attn.o_proj", 1),
    "Gemma3n-text": ("Gemma3nForCausalLM", SHARED, "self_attn.o_proj", 0),
    # layers hand on [altup, B, N, D], of which neither the first nor the last part is a copy of the batch
    "Gemma3n-own": (
        "Gemma3nForCausalLM",
        SHARED | {"num_kv_shared_layers": 0, "altup_num_inputs": 4},
        "self_attn.o_proj",
        3,
    ),
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
    tokens, there = inputs[f"{side}input_ids"], inputs[f"{side}attention_mask"]
    labels = torch.full_like(tokens, -1)
    for row in range(len(tokens)):
        for place in range(tokens.shape[1] - 1):
            if there[row, place] and there[row, place + 1]:
                labels[row, place] = tokens[row, place + 1]
    return inputs, labels


def silence(head: int, heads: int, turn: int) -> Callable[..., Any]:
    """A hook that sets a head's part of a projection's input to 0, the ``turn``-th time that it is called."""
    passed = count()

    def hook(projection: nn.Module, args: Any) -> Any:
        x = args[0].clone()
        if next(passed) == turn:
            x.unflatten(-1, (heads, -1))[..., head, :] = 0
        return (x, *args[1:])

    return hook


def measured(name: str, dtype: torch.dtype) -> Callable[[], Any]:
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


def plain_effects(name: str, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """Each head's effects, by whole passes in which its part of the projection's input is 0."""
    model, plain = model_of(name, dtype), measured(name, dtype)
    intact = plain()
    by_call = []
    turns: dict[str, int] = {}
    for module, _, _, _, heads in calls_of(name):
        prefix, turn = module.split(" (")[0], turns.get(module, 0)
        turns[module] = turn + 1
        ending = MODELS[name][2]
        around = prefix.removesuffix(".self") + "."  # BERT's projection is not in the module that is captured
        found = [m for n, m in model.named_modules() if n.endswith(ending) and (n + ".").startswith(around)]
        assert len(found) == 1
        rows = []
        for head in range(heads):
            handle = found[0].register_forward_pre_hook(silence(head, heads, turn))
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
def test_exact_effects_are_those_of_plain_passes(name: str) -> None:
    found = effects_of(name)
    assert found.outcome == ("states" if name in STATES else "loss")
    assert found.replayed == MODELS[name][3]
    assert len(found.effects) == len(calls_of(name))
    if found.baseline is not None:
        np.testing.assert_allclose(found.baseline, measured(name, torch.float32)(), rtol=1e-5)
    for ours, theirs in zip(found.effects, plain_effects(name), strict=True):
        assert ours.dtype == np.float64
        assert np.abs(theirs).max() > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Bloom", "T5"])
def test_heads_one_by_one_and_positions_in_pieces_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = model_of(name), effects_of(name)
    monkeypatch.setattr(replay, "_CACHED", 1)
    monkeypatch.setattr(outcome, "AT_ONCE", 6 * 31)
    monkeypatch.setattr(outcome.Readout, "of", lambda *_: None)  # as if its head were no single product
    sizes: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.numel()))
    try:
        found = head_effects(model, inputs_of(model), calls_of(name))
    finally:
        handle.remove()
    assert max(sizes) <= 6 * 31
    for ours, theirs in zip(found.effects, whole.effects, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_blocks_of_positions_have_the_mean_over_labels(blocks: int) -> None:
    each, labels = torch.arange(1.0, 15.0).view(2, 7), torch.zeros(2, 7, dtype=torch.long)
    labels[0, :3] = outcome.NONE
    each = each.masked_fill(labels == outcome.NONE, 0)
    torch.testing.assert_close(outcome.over_labels(each, labels, blocks).mean(1), torch.tensor([5.5, 11.0]))


def test_some_of_the_calls() -> None:
    """Any calls, in any order, with nothing before them run but once."""
    for name in ("Llama", "T5", "Albert"):
        model, whole = model_of(name), effects_of(name)
        calls = calls_of(name)[:0:-1]
        seen: list[tuple[int, int]] = []
        found = head_effects(model, inputs_of(model), calls, on_progress=lambda *both, seen=seen: seen.append(both))
        assert found.replayed == len(calls)
        assert seen[-1] == (sum(call[4] for call in calls),) * 2
        for ours, theirs in zip(found.effects, whole.effects[:0:-1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert head_effects(model_of("Llama"), inputs_of(model_of("Llama")), []).effects == ()


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each layer is run from now on."""
    counts = [0] * len(model.model.layers)
    for place, layer in enumerate(model.model.layers):

        def count(*args: Any, place: int = place, forward: Any = layer.forward, **kwargs: Any) -> Any:
            counts[place] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", count)
    return counts


def test_layers_before_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of("Llama"), calls_of("Llama")
    counts = counted(model, monkeypatch)
    head_effects(model, inputs_of(model), calls)
    # the intact pass and one of two copies; one for each layer up to its own; one that ends before the next layer
    assert counts == [2 + 1 + 1, 2 + 2 + 1, 2 + 3]


def test_of_long_sequences_it_is_asked_of_their_first_tokens_what_replays_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, chosen = model_of("Llama"), calls_of("Llama"), [[1], [0], [2]]
    inputs = {name: x[:1] for name, x in inputs_of(model).items()}
    assert inputs["attention_mask"].all()
    whole = head_effects(model, inputs, calls)
    monkeypatch.setattr(outcome, "_LONG", 12)
    monkeypatch.setattr(outcome, "_FIRST", 5)
    monkeypatch.setattr(replay, "_CACHED", 1)
    monkeypatch.setattr(replay, "_CALLS", 1)
    counts, lengths = counted(model, monkeypatch), list[int]()
    handle = model.model.layers[2].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    found = head_effects(model, inputs, calls, chosen=chosen)
    handle.remove()
    # the intact pass; of the first tokens another, and for each other layer two that end before it and one from it on;
    # one with nothing silenced from layer 0 on, the first of all; one for each head from its layer on; one that ends
    # before the next layer
    assert counts == [1 + (1 + 2) + 2 + 1, 1 + (1 + 2 + 1) + 2 + 1 + 1, 1 + (1 + 2) + 2 + 1 + 1]
    assert sorted(set(lengths)) == [5, 12]
    assert found.replayed == 2
    for ours, theirs, (head,) in zip(found.effects, whole.effects, chosen, strict=True):
        np.testing.assert_allclose(ours[:, head], theirs[:, head], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("long", [False, True])
def test_layers_that_share_more_than_their_output_take_whole_passes(
    long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, left = model_of("Llama"), []
    if long:
        monkeypatch.setattr(outcome, "_LONG", 12)
        monkeypatch.setattr(outcome, "_FIRST", 4)
    first, last = model.model.layers[0], model.model.layers[2]
    own_first, own_last = first.forward, last.forward

    def leave(*args: Any, **kwargs: Any) -> Any:
        left.append(own_first(*args, **kwargs))
        return left[-1]

    def take(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own_last(hidden + left.pop() if left else hidden, *args, **kwargs)

    monkeypatch.setattr(first, "forward", leave)
    monkeypatch.setattr(last, "forward", take)
    found = head_effects(model, inputs_of(model), calls_of("Llama"))
    assert found.replayed <= 1
    for ours, theirs in zip(found.effects, plain_effects("Llama"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_sequences_that_depend_on_each_other_are_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with places for the first 2 sequences of a pass alone, as experts of a fixed capacity have."""
    model = model_of("Llama")
    last = model.model.layers[2].mlp
    own = last.forward

    def crowded(x: Tensor) -> Tensor:
        return own(x) * (torch.arange(len(x)) < 2).view(-1, 1, 1)

    monkeypatch.setattr(last, "forward", crowded)
    found = head_effects(model, inputs_of(model), calls_of("Llama"))
    assert found.replayed == 2
    for ours, theirs in zip(found.effects, plain_effects("Llama"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "GPTJ", "T5"])
def test_model_and_tables_stay_as_they_were(name: str) -> None:
    model = model_of(name)
    inputs, calls = inputs_of(model), calls_of(name)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = models.state(model)

    def stop(done: int, total: int) -> None:
        raise ZeroDivisionError

    for method in ("exact", "attribution"):
        found = head_effects(model, inputs, calls, method=method)
        assert models.state(model) == before
        with pytest.raises(ZeroDivisionError):
            head_effects(model, inputs, calls, method=method, on_progress=stop)
        assert models.state(model) == before
        if method == "exact":
            np.testing.assert_allclose(found.effects[1], effects_of(name).effects[1], atol=1e-6)
    next(model.parameters()).requires_grad_(True)
    model.eval()


def test_sequences_without_a_prediction_have_no_effect() -> None:
    model = model_of("GPT2")
    inputs = inputs_of(model)
    inputs["attention_mask"][1, 1:] = 0
    for method in ("exact", "attribution"):
        found = head_effects(model, inputs, calls_of("GPT2"), method=method)
        assert found.baseline is not None
        assert np.isnan(found.baseline).tolist() == [False, True]
        for each in found.effects:
            assert np.isnan(each).tolist() == [[False] * 4, [True] * 4]
    bert = model_of("Bert-masked")
    assert head_effects(bert, inputs_of(bert), calls_of("Bert-masked")).outcome == "states"  # no mask token
    own = models.tiny(
        "BertLMHeadModel", **models.SIZES | {"num_hidden_layers": 1}
    )  # sees what comes next, so it is not asked for it
    call = ("bert.encoder.layer.0.attention.self", "encoder", "self", 0, 4)
    assert head_effects(own, inputs_of(own), [call]).outcome == "states"
    found = head_effects(own, inputs_of(own), [call], mask_token=MASK)
    assert found.outcome == "loss"
    bert = model_of("Bert")
    some = {name: each[:, :1] for name, each in inputs_of(bert).items()}
    for each in head_effects(bert, some, calls_of("Bert")).effects:  # one token has no variance
        assert np.isnan(each).all()


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
