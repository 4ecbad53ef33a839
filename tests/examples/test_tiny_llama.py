"""The example model learns to count, and generates with a key cache what a full pass would choose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.builders import script

tiny_llama = script(Path(__file__).parents[2] / "examples" / "tiny_llama.py")


def test_it_learns_to_count_and_goes_on() -> None:
    assert tiny_llama.main("alibi", steps=40) == list(range(5, 16))


@pytest.mark.parametrize("encoding", ["sinusoidal", "rope", "fox"])
def test_the_cache_gives_the_tokens_of_full_passes(encoding: str) -> None:
    torch.manual_seed(1)
    model = tiny_llama.TinyLlama(30, 24, 2, 3, encoding).double()
    tokens = torch.randint(30, (2, 4))
    generated = model.generate(tokens, 5)
    for _ in range(5):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generated, tokens)
    torch.manual_seed(2)
    assert not torch.equal(model.generate(tokens, 5, temperature=5.0), model.generate(tokens, 5, temperature=5.0))
