"""A small decoder that generates: with a cache, padding and beams it says what it says without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from toeplens import encodings
from toeplens.ground import InputError
from toeplens.nn import Transformer, generate

PADDING = torch.tensor([[True] * 3 + [False] * 4, [False] * 7])


def model(name: str = "rope", vocabulary: int = 30, **more: Any) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(vocabulary, 24, 2, 3, encoding=name, max_len=64, **more).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def prompts(vocabulary: int = 30) -> Tensor:
    return torch.randint(vocabulary, (2, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", encodings.names())
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache_is_generation_without(name: str, beams: int) -> None:
    made, given = model(name), prompts()
    for padding in (None, PADDING):
        how = {"max_new_tokens": 8, "beams": beams, "key_padding_mask": padding}
        cached = made.generate(given, **how)
        assert cached.shape == (2, 15)
        assert cached.equal(made.generate(given, use_cache=False, **how))
    if not made.encoding.length_dependent:
        alone = made.generate(given[:1, 3:], max_new_tokens=8, beams=beams)
        assert cached[:1, 3:].equal(alone)


def test_beams_find_what_looking_at_all_finds() -> None:
    """Vocabulary of 4, three new tokens: with 64 beams the likeliest of all 64 texts."""
    made, given = model(vocabulary=4), prompts(4)
    texts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    found = made.generate(given, max_new_tokens=3, beams=64)
    for prompt, ours in zip(given, found, strict=True):
        whole = torch.cat((prompt.expand(64, -1), texts), dim=1)
        with torch.no_grad():
            log_p = made(whole).log_softmax(-1)[:, 6:9].gather(2, texts.unsqueeze(-1)).sum((1, 2))
        assert ours[7:].equal(texts[log_p.argmax()])


def test_an_ended_text_stays_ended() -> None:
    made, given = model(vocabulary=4), prompts(4)
    free = made.generate(given, max_new_tokens=12)[:, 7:]
    end = int(free[0, 3])
    out = made.generate(given, max_new_tokens=12, end=end)[:, 7:]
    ended = (free == end).int().cummax(1).values.bool()
    assert out.equal(torch.where(ended, end, free))
    out = made.generate(given, max_new_tokens=12, end=end, beams=3)[:, 7:]
    ended = (out == end).int().cummax(1).values.bool()
    assert bool((out[ended] == end).all())


def test_sampling_follows_the_probabilities_and_its_limits() -> None:
    """One step, 4,000 draws: frequencies within 4 standard deviations of the model's probabilities."""
    made = model(vocabulary=6)
    prompt = prompts(6)[:1].expand(4000, -1)
    with torch.no_grad():
        p = (made(prompt[:1])[0, -1] / 2.0).softmax(-1)
    draw = lambda **how: made.generate(  # noqa: E731
        prompt, max_new_tokens=1, temperature=2.0, generator=torch.Generator().manual_seed(0), **how
    )[:, -1].bincount(minlength=6)
    seen = draw() / 4000
    assert bool(((seen - p).abs() <= 4 * (p * (1 - p) / 4000).sqrt()).all())
    assert int((draw(top_k=2) > 0).sum()) == 2
    order = p.sort(descending=True).values
    assert int((draw(top_p=float(order[:2].sum()) - 1e-6) > 0).sum()) == 2
    assert int((draw(top_p=1e-9) > 0).sum()) == 1


def test_it_learns_and_is_saved(tmp_path) -> None:
    made, given = Transformer(30, 24, 2, 3, encoding="t5", dropout=0.1), prompts()
    optimiser = torch.optim.Adam(made.parameters(), lr=1e-2)
    first = last = 0.0
    for step in range(60):
        loss = torch.nn.functional.cross_entropy(made(given)[:, :-1].flatten(0, 1), given[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        first, last = (loss.item(), 0.0) if not step else (first, loss.item())
    assert last < 0.2 * first
    save_model(made, str(tmp_path / "model.safetensors"))
    again = Transformer(30, 24, 2, 3, encoding="t5")
    load_model(again, str(tmp_path / "model.safetensors"))
    assert again.eval()(given).equal(made.eval()(given))


def test_what_cannot_be_is_refused() -> None:
    made, given = model(), prompts()
    for how, sentence in {
        "key_padding_mask": ({"key_padding_mask": PADDING.flip(1)}, "texts go on at the end, pad left"),
        "beams": ({"beams": 2, "temperature": 1.0}, "beams take the likeliest tokens"),
        "temperature": ({"top_k": 3}, "with top_k or top_p it must be over 0"),
        "max_new_tokens": ({"max_new_tokens": 0}, "it must be at least 1"),
        "top_p": ({"top_p": 2.0, "temperature": 1.0}, "at most 1"),
    }.values():
        with pytest.raises(InputError, match=sentence):
            generate(made, given, **{"max_new_tokens": 3, **how})
    with pytest.raises(InputError, match=r"^cache: 1 layers were given; this model has 2"):
        made(given, cache=made.new_cache(2, 9)[:1])
    assert not made.training


@pytest.mark.parametrize(
    "value", ["x", [1.5], {"a": 1}, torch.ones(2, 3), object(), len], ids=lambda x: type(x).__name__
)
def test_values_of_another_type_are_refused_in_one_sentence(value: Any) -> None:
    made, given = model(), prompts()
    names = ("max_new_tokens", "key_padding_mask", "end", "temperature", "top_k", "top_p", "beams", "length_penalty")
    calls: list[Callable[[], Any]] = [
        *(partial(made.generate, given, **{"max_new_tokens": 2, name: value}) for name in names),
        *(partial(made.generate, given, max_new_tokens=2, **{name: value}) for name in ("generator", "use_cache")),
        partial(made.generate, value, max_new_tokens=2),
        partial(generate, value, given, max_new_tokens=2),
        partial(made, value),
        partial(made, given, cache=value),
    ]
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_tokens_that_the_vocabulary_has_not_are_refused() -> None:
    made = model()
    words = made.embedding.num_embeddings
    for token in (-1, words):
        with pytest.raises(InputError, match=rf"^tokens: must be from 0 to {words - 1} \(got .*{token}"):
            made(torch.tensor([[1, token]]))
    with pytest.raises(InputError, match=rf"^end: must be a token, from 0 to {words - 1} \(got {words}\)"):
        made.generate(prompts(), max_new_tokens=2, beams=2, end=words)
