"""Text from a model of this package: greedy, sampled, or by beams, with a key cache or without."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from toeplens.encodings.kit import require_count, require_number, require_tensor
from toeplens.ground import InputError
from toeplens.ground.options import must_be


class Model(Protocol):
    """What text can be had from: `toeplens.nn.Transformer`, and what is called as it is."""

    training: bool

    def __call__(self, tokens: Tensor, **given: Any) -> Float[Tensor, "B N vocab_size"]: ...

    def new_cache(self, batch: int, length: int) -> Any: ...

    def train(self, mode: bool = True) -> Any: ...


@torch.no_grad()
def generate(
    model: Model,
    tokens: Int[Tensor, "B N"],
    *,
    max_new_tokens: int,
    key_padding_mask: Bool[Tensor, "B N"] | None = None,
    end: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> Int[Tensor, "B N+max_new_tokens"]:
    """``tokens`` and ``max_new_tokens`` more of each sequence.

    Arguments
        key_padding_mask  True where a token is padding, which must be on the left
        end               a token after which a sequence is over: it is repeated to the end
        temperature       0 takes the likeliest token; else tokens are drawn from the logits divided by it
        top_k, top_p      draw from the k likeliest tokens, from the fewest whose probabilities reach p
        beams             beams kept for each sequence; the one of the highest mean log-probability is given
        length_penalty    the power of the number of new tokens by which a beam's log-probability is divided
        generator         of random numbers
        use_cache         keep the keys of earlier tokens; without, each step is a pass over all of them
    """
    if not (callable(model) and hasattr(model, "new_cache") and hasattr(model, "training")):
        raise InputError(f"model: must be a toeplens.nn.Transformer or work as one (got {type(model).__name__}).")
    require_tensor("tokens", tokens, "integer", ("B", "N"))
    batch, start = tokens.shape
    require_count(max_new_tokens=max_new_tokens, beams=beams, start=start)
    temperature = float(require_number("temperature", temperature, at_least=0))
    length_penalty = float(require_number("length_penalty", length_penalty))
    must_be("use_cache", use_cache, bool)
    must_be("end", end, int | None)
    if end is not None:
        require_number("end", end, at_least=0, at_most=2**31 - 1)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"generator: must be a torch.Generator (got {type(generator).__name__}).")
    if key_padding_mask is not None:
        require_tensor("key_padding_mask", key_padding_mask, "bool", (batch, start))
    if top_k is not None:
        require_count(top_k=top_k)
    if top_p is not None:
        require_number("top_p", top_p, over=0, at_most=1)
    if beams > 1 and temperature > 0:
        raise InputError(
            f"beams: {beams} and a temperature were given; beams take the likeliest tokens, temperature 0."
        )
    if not temperature and (top_k is not None or top_p is not None):
        raise InputError("temperature: 0 takes the likeliest token; with top_k or top_p it must be over 0.")
    if key_padding_mask is not None and bool(key_padding_mask[:, -1].any()):
        raise InputError(
            "key_padding_mask: a sequence that ends in padding was given; texts go on at the end, pad left."
        )
    was_training = model.training
    model.train(False)
    try:
        told = _Told(model, tokens, key_padding_mask, start + max_new_tokens, use_cache)
        if beams > 1:
            return _by_beams(told, max_new_tokens, beams, end, length_penalty)
        over = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            new = _choose(told.logits(), temperature, top_k, top_p, generator)
            if end is not None:
                new = new.masked_fill(over, end)
                over = over | (new == end)
            told.add(new)
        return told.tokens
    finally:
        model.train(was_training)


class _Told:
    """The tokens so far, and what the model says comes next."""

    def __init__(self, model: Model, tokens: Tensor, padding: Tensor | None, most: int, use_cache: bool) -> None:
        self.model, self.tokens, self.padding = model, tokens, padding
        self.cache = model.new_cache(len(tokens), most) if use_cache else None

    def logits(self) -> Float[Tensor, "B vocab_size"]:
        if self.cache is None:
            return self.model(self.tokens, key_padding_mask=self.padding)[:, -1]
        seen = len(self.cache[0])
        padding = None if self.padding is None else self.padding[:, seen:]
        return self.model(self.tokens[:, seen:], key_padding_mask=padding, cache=self.cache)[:, -1]

    def add(self, new: Int[Tensor, "B"]) -> None:
        self.tokens = torch.cat((self.tokens, new[:, None]), dim=1)
        if self.padding is not None:
            self.padding = torch.cat((self.padding, torch.zeros_like(self.padding[:, :1])), dim=1)

    def repeat(self, times: int) -> None:
        self.tokens = self.tokens.repeat_interleave(times, dim=0)
        self.padding = None if self.padding is None else self.padding.repeat_interleave(times, dim=0)
        for cache in self.cache or ():
            cache.repeat(times)

    def reorder(self, sequences: Tensor) -> None:
        self.tokens = self.tokens[sequences]  # beams are of one sequence, so its padding is theirs
        for cache in self.cache or ():
            cache.reorder(sequences)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Int[Tensor, "B"]:
    if not temperature:
        return logits.argmax(-1)
    sorted_logits, order = (logits.float() / temperature).sort(-1, descending=True)
    probabilities = sorted_logits.softmax(-1)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    if top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= top_p * probabilities.sum(-1, keepdim=True)] = 0
    return order.gather(1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(1)


def _by_beams(told: _Told, steps: int, beams: int, end: int | None, power: float) -> Tensor:
    """Of each sequence's beams the likeliest; one that is over stays, and is not added to."""
    batch = len(told.tokens)
    device = told.tokens.device
    first = told.logits().log_softmax(-1)
    beams = min(beams, first.shape[-1])
    if end is not None and end >= first.shape[-1]:
        raise InputError(f"end: must be a token, from 0 to {first.shape[-1] - 1} (got {end}).")
    scores, new = first.topk(beams, dim=-1)
    told.repeat(beams)
    told.add(new.flatten())
    over = torch.zeros_like(scores, dtype=torch.bool) if end is None else new == end
    lengths = torch.ones_like(scores)
    for _ in range(steps - 1):
        more = told.logits().log_softmax(-1).view(batch, beams, -1)
        if end is not None:
            stays = torch.full_like(more[0, 0], float("-inf"))
            stays[end] = 0.0
            more = torch.where(over[..., None], stays, more)
        words = more.shape[-1]
        scores, best = (scores[..., None] + more).flatten(1).topk(beams, dim=-1)
        beam, new = best // words, best % words
        told.reorder((torch.arange(batch, device=device)[:, None] * beams + beam).flatten())
        told.add(new.flatten())
        over, lengths = over.gather(1, beam), lengths.gather(1, beam)
        lengths = lengths + (~over)
        over = over if end is None else over | (new == end)
    likeliest = (scores / lengths**power).argmax(-1)
    return told.tokens.view(batch, beams, -1)[torch.arange(batch, device=device), likeliest]
