"""Encodings in a Llama: generation with a key cache is generation without, with padding and with beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.builders import REPRESENTATIVES
from tests.hosts.families import FAMILIES, installed
from tests.sources.huggingface.models import tiny
from torch import Tensor

from toeplens import hosts
from toeplens.ground import InputError

PROMPTS = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(PROMPTS)
MASK[0, :4] = 0
HOW = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
OTHERS = ["Mistral", "Gemma 3", "GPT-2", "OPT", "BLOOM", "GPT-NeoX", "T5"]
OTHER_NAMES = ["rope", "stick-breaking", "alibi", "sinusoidal", "path", "shaw", "t5"]


def generated(model: Any, prompts: Tensor = PROMPTS, mask: Tensor = MASK, **more: Any) -> Tensor:
    return model.generate(prompts, attention_mask=mask, **HOW, **more)


def host(name: str, family: str = "Llama") -> Any:
    """A model in float64 with the encoding at random parameters."""
    return installed(name, family).double()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", [name for name in REPRESENTATIVES if name != "mla"])
def test_with_a_cache_it_is_what_it_is_without(name: str, beams: int) -> None:
    model = host(name)
    cached = generated(model, num_beams=beams)
    # else a pass over all tokens works the earlier ones again, at the new length, and need not say the same
    if not any(encoding.length_dependent for encoding in model.toeplens_encodings):
        assert cached.equal(generated(model, num_beams=beams, use_cache=False))
        assert cached[:1, 4:].equal(generated(model, PROMPTS[:1, 4:], MASK[:1, 4:], num_beams=beams))
    if name in ("rope", "path") and beams == 1:
        assert cached.equal(generated(model, cache_implementation="static"))


@pytest.mark.parametrize(("family", "name"), [*zip(OTHERS, OTHER_NAMES, strict=True), *((f, "fox") for f in OTHERS)])
def test_in_other_families_too(family: str, name: str) -> None:
    model = host(name, family)
    for beams in (1, 2):
        cached = generated(model, num_beams=beams)
        assert cached.equal(generated(model, num_beams=beams, use_cache=False))


@pytest.mark.parametrize("name", ["rope", "fox"])
def test_a_cache_goes_from_pass_to_pass_and_is_cut(name: str) -> None:
    model = host(name)
    with torch.no_grad():
        whole = model(PROMPTS).logits
        first = model(PROMPTS[:, :5], use_cache=True)
        cache = first.past_key_values
        assert torch.allclose(model(PROMPTS[:, 5:], past_key_values=cache).logits, whole[:, 5:], atol=1e-9)
        cache.crop(-2)
        assert torch.allclose(model(PROMPTS[:, 7:], past_key_values=cache).logits, whole[:, 7:], atol=1e-9)


ADDING = ["alibi", "cable", "path", "selective-rope", "dape-v2"]


@pytest.mark.parametrize(
    ("family", "name"), [*(("Llama", name) for name in ADDING), ("GPT-2", "fox"), ("BLOOM", "path")]
)
def test_padding_between_tokens_changes_nothing(family: str, name: str) -> None:
    """Three turns on a cache, padded on either side, and all in one pass."""
    model = host(name, family)
    there = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 0, 1, 1]])
    cache, turns = None, []
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 7), (7, 9)):
            out = model(PROMPTS[:, start:stop], attention_mask=there[:, :stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            turns.append(out.logits)
        alone = torch.cat([model(PROMPTS[row : row + 1, real.bool()]).logits[0] for row, real in enumerate(there)])
        for out in (torch.cat(turns, dim=1), model(PROMPTS, attention_mask=there).logits):
            assert torch.allclose(out[there.bool()], alone, atol=1e-9)
        with pytest.raises(InputError, match=r"^attention_mask must have shape \[2, 10\]"):
            model(PROMPTS[:, :1], attention_mask=there, past_key_values=cache)


@pytest.mark.parametrize("name", ADDING)
def test_a_tree_of_texts_is_as_its_paths_or_refused(name: str) -> None:
    model = host(name)
    paths = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [5], [5, 6], [5, 7]]
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    for token, path in enumerate(paths):
        mask[..., token, path] = True
    given = {"attention_mask": mask, "position_ids": torch.tensor([[len(path) - 1 for path in paths]])}
    with torch.no_grad():
        if name in ("path", "selective-rope"):
            with pytest.raises(InputError, match="must see one contiguous run of tokens"):
                model(PROMPTS[:1, :8], **given)
            return
        out = model(PROMPTS[:1, :8], **given).logits[0]
        alone = torch.stack([model(PROMPTS[:1, path]).logits[0, -1] for path in paths])
    assert torch.allclose(out, alone, atol=1e-9)


@pytest.mark.parametrize("name", ["rope", "alibi", "fox", "path"])
def test_packed_texts_are_as_apart(name: str) -> None:
    """Position ids that begin again tell transformers, and us, that another text begins."""
    model = host(name)
    ids, places = PROMPTS[:1], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        apart = [model(ids[:, some], use_cache=False).logits for some in (slice(0, 4), slice(4, 9))]
    assert torch.allclose(packed, torch.cat(apart, dim=1), atol=1e-9)


def test_a_cache_that_was_filled_before_is_refused() -> None:
    model = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    cache = model(PROMPTS[:, :5], use_cache=True).past_key_values
    hosts.install(model, "alibi")
    with pytest.raises(
        InputError, match=r"^past_key_values must be empty or filled by this model .*, got a cache of 5 tokens"
    ):
        model(PROMPTS[:, 5:], past_key_values=cache)
