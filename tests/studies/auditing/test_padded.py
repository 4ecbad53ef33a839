"""An audit of sequences of different lengths is that of each alone; padding that a model goes by is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.sources.huggingface.models import GPT, GROUPED, SIZES, T5, calls_in, tiny
from tests.studies.probing.models import tokenizer
from torch import Tensor

from toeplens.ground import InputError
from toeplens.lens import behaviour, frequency_use
from toeplens.studies.auditing import Audit, audit, read_tokens

LENGTHS = (12, 19, 26)
IDS = [torch.randint(4, 31, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    "GPT2": ("GPT2LMHeadModel", GPT),
    "BERT": ("BertModel", SIZES),
    "Bloom": ("BloomForCausalLM", {"vocab_size": 31, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "T5": ("T5ForConditionalGeneration", T5),
}
ROTARY = ("Llama", "Mistral")
# means over queries, and whether one query of a sequence has no such key
QUERIES = {"previous": True, "first": True, "next": True, "current": False, "distance": False, "entropy": False}


@cache
def model_of(kind: str) -> Any:
    name, sizes = KINDS[kind]
    return tiny(name, **sizes)


@cache
def together(kind: str) -> Audit:
    return audit(model_of(kind), IDS)


@cache
def alone(kind: str) -> list[Audit]:
    return [audit(model_of(kind), ids[None]) for ids in IDS]


def inputs_of(kind: str, ids: Tensor) -> dict[str, Tensor]:
    if kind != "T5":
        return {"input_ids": ids[None]}
    return {"input_ids": ids[None], "decoder_input_ids": torch.cat((torch.zeros(1, dtype=torch.long), ids[:-1]))[None]}


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_means_over_the_queries_of_each(kind: str) -> None:
    for at, head in enumerate(together(kind).heads):
        each = [found.heads[at] for found in alone(kind)]
        one_sees_itself = head.side == "decoder" and head.kind == "self"  # the first, whose entropy is not taken
        for name, less in QUERIES.items():
            less = one_sees_itself if name == "entropy" else less and head.kind == "self"
            values = [getattr(one, name) for one in each]
            if None in values:
                assert getattr(head, name) is None, name
            else:
                wanted = np.average(values, weights=[n - less for n in LENGTHS])
                assert getattr(head, name) == pytest.approx(wanted, abs=1e-5), name
        bins = [np.pad(one.profile, (0, len(head.profile) - len(one.profile))) for one in each]
        assert head.profile == pytest.approx(np.average(bins, axis=0, weights=LENGTHS).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "effects"),
    [("Mistral", "exact"), ("BERT", "exact"), ("T5", "exact"), ("Llama", "position"), ("Llama", "bands")],
)
def test_effects_are_means_over_the_sequences(kind: str, effects: Any) -> None:
    found, each = together(kind), alone(kind)
    if effects != "exact":
        found, *each = (audit(model_of(kind), data, effects=effects) for data in (IDS, *(ids[None] for ids in IDS)))
    assert found.effect == ("states" if kind == "BERT" else "loss")
    rows = [one.bands if effects == "bands" else one.heads for one in (found, *each)]
    for whole, *parts in zip(*rows, strict=True):
        assert whole.effect == pytest.approx(np.mean([part.effect for part in parts]), abs=1e-5)
    if kind != "BERT":
        assert found.baseline == pytest.approx(np.mean([one.baseline for one in each]), abs=1e-5)


@pytest.mark.parametrize("kind", ROTARY)
def test_shares_are_those_of_all_variances_together(kind: str) -> None:
    """Of each sequence alone, weighed by its queries and their variance; means of norms by its visible pairs."""
    pairs = [sum(min(i + 1, 5) if kind == "Mistral" else i + 1 for i in range(n)) for n in LENGTHS]
    calls = [calls_in(model_of(kind), inputs_of(kind, ids)) for ids in IDS]
    for layer in range(2):
        placed = [each[layer].placed() for each in calls]
        shares = [behaviour(**one) for one in placed]
        weights = np.stack([one.variance * one.queries for one in shares])
        norms = torch.stack([frequency_use(**one).norms for one in placed])
        use = (norms * torch.tensor(pairs).view(-1, 1, 1)).sum(0)
        for head in together(kind).of(together(kind).layers[layer]):
            for name in ("positional", "symbolic", "interaction"):
                values = [getattr(one, name)[head.head] for one in shares]
                assert getattr(head, name) == pytest.approx(np.average(values, weights=weights[:, head.head]), abs=1e-5)
            assert head.norm_use == pytest.approx((use / use.sum(-1, keepdim=True))[head.head].tolist(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_alone_and_together_are_known_alike(kind: str) -> None:
    found = together(kind)
    assert [one.unknown is None for one in found.layers] == [one.unknown is None for one in alone(kind)[0].layers]
    for one, other in zip(found.layers, alone(kind)[0].layers, strict=True):
        assert one.position.removesuffix(", with a mask on keys") == other.position
    assert [one.window for one in found.layers] == [5 if kind == "Mistral" else None] * len(found.layers)
    said = [one.unknown for one in found.layers]
    if kind in ("GPT2", "BERT"):
        assert all("at least 8 sequences of one length are needed" in (each or "") for each in said)


def test_lists_arrays_tensors_and_files_are_taken_alike(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([ids.tolist() for ids in IDS]))
    kinds = [[ids.tolist() for ids in IDS], [ids.numpy() for ids in IDS], read_tokens(tmp_path / "ids.json")]
    for data in kinds:
        assert audit(model_of("Llama"), data).heads == together("Llama").heads
    cut = audit(model_of("Llama"), IDS, max_tokens=12, effects="none")
    assert "lengths" not in cut.about
    assert cut.about["tokens"] == 12


def test_a_text_that_is_shorter_is_read_at_its_own_length() -> None:
    model, long, short = tiny("LlamaForCausalLM", **GROUPED | {"vocab_size": 700}), "apple dog river " * 30, "sea sun"
    texts = {"long": long, "short": short}
    found = audit(model, texts, tokenizer=tokenizer(), max_tokens=20, sequences=3, effects="none")
    assert found.about["lengths"] == [20, 20, len(tokenizer()(short)["input_ids"])]
    assert found.about["texts"] == ["long", "long", "short"]


def test_padding_that_changes_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a mask for it, and one that goes by the tokens after a sequence."""
    model = tiny("BertModel", **SIZES)
    own = type(model).forward
    monkeypatch.setattr(model, "forward", lambda input_ids: own(model, input_ids))
    with pytest.raises(InputError, match=r"^tokens must be sequences of one length: BertModel takes no attention_mask"):
        audit(model, IDS)
    monkeypatch.setattr(model, "forward", lambda input_ids, attention_mask=None: own(model, input_ids))
    with pytest.raises(InputError, match=r"padding changes the outputs of BertModel"):
        audit(model, IDS)


def test_a_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(InputError, match=r"tokens must have at least 2 per sequence, got 1 in sequence 2\."):
        audit(model_of("GPT2"), [[3, 4], [5]])
