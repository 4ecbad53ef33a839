"""The positional and the symbolic part of the logits are those of tables that are formed one number at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sources.huggingface.interventions.ways import LLAMA, MIXED, brute_force
from tests.sources.huggingface.models import BLOOM, NARROW, SIZES, TOKENS, calls_in, tiny
from torch import Tensor

from toeplens.lens.head_types.two_way import two_way
from toeplens.lens.kit.movable import Given, movable_from
from toeplens.sources.huggingface import Change
from toeplens.sources.huggingface.interventions.change import changed_outputs

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
    wanted = brute_force(call, 3, part, range(TOKENS))
    torch.testing.assert_close(found[:, :, 3].double(), wanted, atol=1e-5, rtol=1e-5)
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
        lambda self, logits, *rows: made.append(logits.double()) or logits.softmax(-1),
    )
    for part, wanted in (("positional", analysis.positional), ("symbolic", analysis.symbolic)):
        made.clear()
        changed_outputs(call, Change(layer=0, attention=part))
        seen = made[-1].isfinite()
        mean = made[-1].where(seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        variance = (made[-1] - mean).square().where(seen, 0).sum(-1) / seen.sum(-1)
        torch.testing.assert_close(variance, wanted, atol=1e-6, rtol=1e-4)
