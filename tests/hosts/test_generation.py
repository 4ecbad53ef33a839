"""Encodings in a Llama: generation with a key cache is generation without, with padding and with beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.backends.hf.models import tiny
from tests.builders import REPRESENTATIVES
from tests.hosts.families import FAMILIES, model_with_encoding
from torch import Tensor

from toeplens import hosts
from toeplens.utils import InputError

PROMPTS = torch.randint(3, 31, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(PROMPTS)
MASK[0, :4] = 0
GENERATE_OPTIONS = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
OTHERS = ["Mistral", "Gemma 3", "GPT-2", "OPT", "BLOOM", "GPT-NeoX", "T5"]
OTHER_NAMES = ["rope", "stick-breaking", "alibi", "sinusoidal", "path", "shaw", "t5"]


def generate(model: Any, prompts: Tensor = PROMPTS, mask: Tensor = MASK, **more: Any) -> Tensor:
    return model.generate(prompts, attention_mask=mask, **GENERATE_OPTIONS, **more)


def float64_model(name: str, family: str = "Llama") -> Any:
    """A model in float64 with the encoding at random parameters."""
    return model_with_encoding(name, family).double()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", [name for name in REPRESENTATIVES if name != "mla"])
def test_generation_with_a_cache_matches_without(name: str, beams: int) -> None:
    model = float64_model(name)
    cached = generate(model, num_beams=beams)
    # else a pass over all tokens works the earlier ones again, at the new length, and need not say the same
    if not any(encoding.length_dependent for encoding in model.toeplens_encodings):
        assert cached.equal(generate(model, num_beams=beams, use_cache=False))
        assert cached[:1, 4:].equal(generate(model, PROMPTS[:1, 4:], MASK[:1, 4:], num_beams=beams))
    if name in ("rope", "path") and beams == 1:
        assert cached.equal(generate(model, cache_implementation="static"))


@pytest.mark.parametrize(("family", "name"), [*zip(OTHERS, OTHER_NAMES, strict=True), *((f, "fox") for f in OTHERS)])
def test_generation_with_a_cache_matches_in_other_families(family: str, name: str) -> None:
    model = float64_model(name, family)
    for beams in (1, 2):
        cached = generate(model, num_beams=beams)
        assert cached.equal(generate(model, num_beams=beams, use_cache=False))


@pytest.mark.parametrize("name", ["rope", "fox"])
def test_a_cache_is_carried_over_and_cropped(name: str) -> None:
    model = float64_model(name)
    with torch.no_grad():
        full = model(PROMPTS).logits
        first = model(PROMPTS[:, :5], use_cache=True)
        cache = first.past_key_values
        assert torch.allclose(model(PROMPTS[:, 5:], past_key_values=cache).logits, full[:, 5:], atol=1e-9)
        cache.crop(-2)
        assert torch.allclose(model(PROMPTS[:, 7:], past_key_values=cache).logits, full[:, 7:], atol=1e-9)


CUMULATIVE = ["alibi", "cable", "path", "selective-rope", "dape-v2"]


@pytest.mark.parametrize(
    ("family", "name"), [*(("Llama", name) for name in CUMULATIVE), ("GPT-2", "fox"), ("BLOOM", "path")]
)
def test_padding_between_tokens_changes_nothing(family: str, name: str) -> None:
    """Three turns on a cache, padded on either side, and all in one pass."""
    model = float64_model(name, family)
    is_token = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 0, 1, 1]])
    cache, turns = None, []
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 7), (7, 9)):
            out = model(
                PROMPTS[:, start:stop], attention_mask=is_token[:, :stop], past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            turns.append(out.logits)
        alone = torch.cat([model(PROMPTS[row : row + 1, real.bool()]).logits[0] for row, real in enumerate(is_token)])
        for out in (torch.cat(turns, dim=1), model(PROMPTS, attention_mask=is_token).logits):
            assert torch.allclose(out[is_token.bool()], alone, atol=1e-9)
        with pytest.raises(InputError, match=r"^attention_mask must have shape \[2, 10\]"):
            model(PROMPTS[:, :1], attention_mask=is_token, past_key_values=cache)


@pytest.mark.parametrize("name", CUMULATIVE)
def test_tree_attention_matches_its_paths_or_is_refused(name: str) -> None:
    model = float64_model(name)
    paths = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [5], [5, 6], [5, 7]]
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    for token, path in enumerate(paths):
        mask[..., token, path] = True
    arguments = {"attention_mask": mask, "position_ids": torch.tensor([[len(path) - 1 for path in paths]])}
    with torch.no_grad():
        if name in ("path", "selective-rope"):
            with pytest.raises(InputError, match="must see one contiguous run of tokens"):
                model(PROMPTS[:1, :8], **arguments)
            return
        out = model(PROMPTS[:1, :8], **arguments).logits[0]
        alone = torch.stack([model(PROMPTS[:1, path]).logits[0, -1] for path in paths])
    assert torch.allclose(out, alone, atol=1e-9)


@pytest.mark.parametrize("name", ["rope", "alibi", "fox", "path"])
def test_packed_sequences_match_separate_calls(name: str) -> None:
    """Position ids that begin again tell transformers, and us, that another text begins."""
    model = float64_model(name)
    ids, places = PROMPTS[:1], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        apart = [model(ids[:, some], use_cache=False).logits for some in (slice(0, 4), slice(4, 9))]
    assert torch.allclose(packed, torch.cat(apart, dim=1), atol=1e-9)


def test_a_cache_filled_before_installation_is_refused() -> None:
    model = tiny(FAMILIES["Llama"][0], **FAMILIES["Llama"][1])
    cache = model(PROMPTS[:, :5], use_cache=True).past_key_values
    hosts.install(model, "alibi")
    with pytest.raises(
        InputError, match=r"^past_key_values must be empty or filled by this model .*, got a cache of 5 tokens"
    ):
        model(PROMPTS[:, 5:], past_key_values=cache)
