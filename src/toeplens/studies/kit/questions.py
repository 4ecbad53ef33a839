"""Items for probing a language model (text, needles, repeated tokens, counting, word order), and its retrieval heads.

An item is a sequence of tokens of which some are predicted. Pieces are tokenised separately and joined, so that an
answer has the same tokens in its needle and after the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from toeplens.ground import InputError, invalid, records
from toeplens.ground.files import read_yaml
from toeplens.ground.records import NearlyShare, Record
from toeplens.lens import retrieval
from toeplens.sources.huggingface import AttentionCall, captured
from toeplens.sources.huggingface.load import Loaded
from toeplens.sources.huggingface.model import token_ids
from toeplens.studies.kit.options import Asked

Behaviour = Literal["loss", "needle", "no needle", "copying", "counting", "order"]  # behaviours that a probe measures
_TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("questions.yaml"))
ABOUT: dict[Behaviour, str] = _TEXTS["about"]  # descriptions of the behaviours
_PLACES: str = _TEXTS["places"]
_WORDS: str = _TEXTS["words of lists"]
_COUNTS = ("one", "two", "three", "four", "five")
_DIGITS = ("1", "2", "3", "4", "5")
_SHOTS = 3  # solved examples before a question about a list
_LISTED = 6  # words per list
_ENOUGH = 2 * _LISTED  # minimum number of words to draw lists from


@dataclass(frozen=True, kw_only=True)
class Item:
    """Tokens, and the positions to predict."""

    behaviour: Behaviour
    tokens: tuple[int, ...]
    places: tuple[int, ...]  # positions of the predicted tokens, ascending
    length: int  # requested number of tokens
    depth: float | None = None  # of a needle, from 0 (beginning of the text) to 1 (end)
    needle: tuple[int, int] | None = None  # its first token and the one after its last
    choices: tuple[int, ...] = ()  # candidates for the predicted token; any token if empty


class Writer:
    """Makes items from a text and a tokenizer; from token ids, only items for loss and copying.

    Words of lists are single tokens. If the tokenizer has too few (letters, bytes), words with different first tokens
    are used, and the first token of an answer is predicted.

    Raises `InputError` for a text that is too short, and for a tokenizer that cannot distinguish the words of lists.
    """

    def __init__(self, tokenizer: Any, text: str | Int[np.ndarray, "N"], seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = np.random.Generator(np.random.Philox(seed))
        self.words = isinstance(text, str)
        self.start: list[int] = []
        if self.words:  # the special tokens at the beginning of a text
            bare, whole = self._ids("so"), token_ids(tokenizer, "so")
            starts = (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare)
            self.start = whole[: next(starts, 0)]
        ids = token_ids(tokenizer, text, add_special_tokens=False, verbose=False) if isinstance(text, str) else text
        self.text = np.asarray(ids, dtype=np.int64)

    def items(self, asked: Asked) -> list[Item]:
        """All items; deterministic for a seed."""
        found = [self.loss(max(asked.lengths)) for _ in range(asked.sequences)]
        for length in asked.lengths:
            for depth in (*asked.depths, None) if self.words else ():
                found += [self.needle(length, depth) for _ in range(asked.repeats)]
            found += [self.copying(length) for _ in range(asked.sequences)]
        if self.words:
            found += [self.listed(each) for _ in range(asked.lists) for each in ("counting", "order")]
        return found

    def loss(self, length: int) -> Item:
        """A piece of the text."""
        tokens = [*self.start, *self._piece(length - len(self.start))]
        first = max(1, len(self.start))
        return Item(behaviour="loss", tokens=tuple(tokens), places=tuple(range(first, len(tokens))), length=length)

    def needle(self, length: int, depth: float | None, field: str = "lengths") -> Item:
        """A piece of the text with a sentence that states a five-digit number (if ``depth`` is given), and a question.

        Raises `InputError`, naming ``field``, if the length is too short.
        """
        place = self.random.choice(_PLACES.split())
        blank, number = self._begun(str(self.random.integers(10_000, 100_000)))
        said = [*self._ids(f"\n\nThe secret number of the {place} is"), *blank]
        needle = [*said, *number, *self._within(".\n\n", "")] if depth is not None else []
        room = length - len(self.start) - len(needle) - len(said) - len(number)
        if room < 1:
            raise invalid(field, f"be larger than the {length - room} tokens of a needle and its question", length)
        text = self._piece(room)
        cut = 0 if depth is None else round(depth * room)
        before = [*self.start, *text[:cut]]
        tokens = [*before, *needle, *text[cut:], *said, *number]
        return Item(
            behaviour="needle" if depth is not None else "no needle",
            tokens=tuple(tokens),
            places=tuple(range(len(tokens) - len(number), len(tokens))),
            length=length,
            depth=depth,
            needle=None if depth is None else (len(before), len(before) + len(needle)),
        )

    def copying(self, length: int) -> Item:
        """Tokens of the text in random order, twice."""
        half = (length - len(self.start)) // 2
        drawn = self.random.choice(self.text, half).tolist()
        tokens = [*self.start, *drawn, *drawn]
        first = len(self.start) + half + 1
        return Item(behaviour="copying", tokens=tuple(tokens), places=tuple(range(first, len(tokens))), length=length)

    def listed(self, behaviour: Behaviour) -> Item:
        """How often a word occurs in a list (``counting``), or which word follows another (``order``)."""
        tokens = [*self.start]
        for _ in range(_SHOTS):
            question, answer, _ = self._question(behaviour)
            tokens += [*self._ids(question), *self._within(answer), *self._within(".\n\n", "")]
        question, answer, words = self._question(behaviour)
        blank, own = self._begun(answer)
        tokens += [*self._ids(question), *blank, own[0]]
        choices = tuple(self._begun(word)[1][0] for word in (self._counts if behaviour == "counting" else words))
        count = len(tokens)
        return Item(behaviour=behaviour, tokens=tuple(tokens), places=(count - 1,), length=count, choices=choices)

    def _question(self, behaviour: Behaviour) -> tuple[str, str, list[str]]:
        """A question, its answer, and the words of its list."""
        if behaviour == "counting":
            count = int(self.random.integers(1, len(self._counts) + 1))
            asked, *others = self.random.permutation(self._words)[: _LISTED - count + 1].tolist()
            words = self.random.permutation([asked] * count + others).tolist()
            question, answer = f"How many times does {asked} occur?", self._counts[count - 1]
        else:
            words = self.random.permutation(self._words)[:_LISTED].tolist()
            at = int(self.random.integers(0, _LISTED - 1))
            question, answer = f"Which word comes after {words[at]}?", words[at + 1]
        return f"List: {', '.join(words)}. {question} Answer:", answer, words

    @cached_property
    def _words(self) -> list[str]:
        """The words that lists are drawn from."""
        words = _WORDS.split()
        found = self._apart([word for word in words if len(self._within(word)) == 1])
        found = found if len(found) >= _ENOUGH else self._apart(words)
        if len(found) < _ENOUGH:
            raise InputError(
                f"model: its tokenizer has own first tokens for only {len(found)} of the list words. At least "
                f"{_ENOUGH} are needed."
            )
        return found

    @cached_property
    def _counts(self) -> tuple[str, ...]:
        """One to five as words, or as digits if the words share first tokens."""
        found = next((names for names in (_COUNTS, _DIGITS) if len(self._apart(names)) == len(names)), None)
        if found is None:
            raise InputError("model: its tokenizer has no different first tokens for the numbers one to five.")
        return found

    def _apart(self, words: Sequence[str]) -> list[str]:
        """The words whose first token is known and differs from those of earlier words."""
        firsts: dict[int, str] = {}
        for word in words:
            for token in self._begun(word)[1][:1]:
                firsts.setdefault(token, word)
        firsts.pop(self.tokenizer.unk_token_id, None)
        return list(firsts.values())

    def _begun(self, word: str) -> tuple[list[int], list[int]]:
        """The blank tokens before a word that follows another, and its own tokens; empty if the tokenizer drops it."""
        tokens = self._within(word)
        at = next((at for at, token in enumerate(tokens) if self.tokenizer.decode([token]).strip()), len(tokens))
        return tokens[:at], tokens[at:]

    def _within(self, text: str, space: str = " ") -> list[int]:
        """The tokens of a text that follows a word, after a space."""
        lead = self._ids("so")
        whole = self._ids(f"so{space}{text}")
        return whole[len(lead) :] if whole[: len(lead)] == lead else self._ids(f"{space}{text}")

    def _ids(self, text: str) -> list[int]:
        return token_ids(self.tokenizer, text, add_special_tokens=False)

    def _piece(self, length: int) -> list[int]:
        """``length`` tokens of the text, from a random position."""
        if len(self.text) < length:
            raise invalid("text", f"have at least {length} tokens", len(self.text))
        first = int(self.random.integers(0, len(self.text) - length + 1))
        return self.text[first : first + length].tolist()


def batches(items: Sequence[Item], tokens: int = 4096) -> Iterator[tuple[list[int], Int[np.ndarray, "B N"]]]:
    """Batches of at most ``tokens`` tokens: indices of items with equal length and positions, and their tokens."""
    alike: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    for number, item in enumerate(items):
        alike.setdefault((len(item.tokens), item.places, len(item.choices)), []).append(number)
    for (length, _, _), numbers in alike.items():
        step = max(1, tokens // length)
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            yield some, np.array([items[number].tokens for number in some])


# ---- retrieval heads: attention to a needle's number when the model has to predict it --------------------------------

RETRIEVES = 0.1  # minimum score of a retrieval head (Wu et al. 2024, section 2)
_AT_ONCE = 1024  # tokens per batch
_DECIMALS = 9  # decimals of a score, so that a tenth of the tokens is exactly 0.1


@dataclass(frozen=True, kw_only=True)
class HeadRetrieval(Record):
    """Retrieval of one head of the intact model, mean over needles (`toeplens.lens.Retrieval`)."""

    layer: records.Count
    head: records.Count
    score: NearlyShare
    mass: NearlyShare


@torch.no_grad()
def retrieval_of(
    loaded: Loaded, items: Sequence[Item], report: Callable[[int, int], None]
) -> tuple[HeadRetrieval, ...]:
    """Retrieval of every self-attention head of the decoder, mean over all needles among the items.

    Raises `InputError` for models that do not predict the next token: with an encoder, or without causal attention.
    """
    if loaded.model.config.is_encoder_decoder:
        raise InputError("needles must not be set for a model with an encoder.")
    asked = [item for item in items if item.needle is not None]
    sums: dict[tuple[int, int], list[np.ndarray]] = {}
    done = 0
    report(0, len(asked))
    for numbers, tokens in batches(asked, _AT_ONCE):
        some = [asked[number] for number in numbers]
        read = torch.from_numpy(tokens).to(loaded.model.device)
        places = torch.tensor(some[0].places)
        needles = torch.tensor([item.needle for item in some])

        def look(call: AttentionCall, read: Tensor = read, places: Tensor = places, needles: Tensor = needles) -> None:
            loaded.check_attention(call.module)
            if call.kind != "self" or call.q.shape[2] != read.shape[1]:
                return
            if not call.causal:
                raise InputError(f"needles need causal attention, but {call.module} also sees later keys.")
            rows = places.to(call.q.device) - 1
            found = retrieval(call.softmax(call.logits(rows), rows), read, places, needles)
            for head, both in enumerate(torch.stack(found).sum(1).T.cpu().numpy()):
                sums.setdefault((call.layer, head), []).append(both)

        captured(loaded.model, {"input_ids": read}, look)
        done += len(some)
        report(done, len(asked))
    if not sums:
        raise InputError("needles: no self-attention of the model reads a whole text.")
    scores = ((place, np.sum(sums[place], 0) / len(asked)) for place in sorted(sums))
    return tuple(
        HeadRetrieval(layer=layer, head=head, score=round(float(score), _DECIMALS), mass=float(mass))
        for (layer, head), (score, mass) in scores
    )
