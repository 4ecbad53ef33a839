"""The example model learns to count, and generates with a key cache what a full pass would choose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.builders import load_script

tiny_llama = load_script(Path(__file__).parents[2] / "examples" / "tiny_llama.py")


def test_the_model_learns_to_count_and_generates() -> None:
    assert tiny_llama.main("alibi", steps=40) == list(range(5, 16))


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "fox"])
def test_generation_with_a_cache_matches_full_passes(encoding: str) -> None:
    torch.manual_seed(1)
    model = tiny_llama.TinyLlama(30, 24, 2, 3, encoding).double()
    tokens = torch.randint(30, (2, 4))
    generated = model.generate(tokens, 5)
    for _ in range(5):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generated, tokens)
    torch.manual_seed(2)
    assert not torch.equal(model.generate(tokens, 5, temperature=5.0), model.generate(tokens, 5, temperature=5.0))
