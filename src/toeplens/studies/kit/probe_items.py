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

from toeplens.backends.hf import AttentionCall, capture_attention
from toeplens.backends.hf.load import LoadedModel
from toeplens.backends.hf.model import token_ids
from toeplens.lens import retrieval
from toeplens.studies.kit.options import ProbeSizes
from toeplens.utils import InputError, invalid, records
from toeplens.utils.files import read_yaml
from toeplens.utils.records import ApproxShare, Record

# behaviours that a probe measures
ProbeKind = Literal["loss", "needle", "no needle", "copying", "counting", "order", "word by number", "word by key"]
BY_WORDS: tuple[ProbeKind, ...] = ("word by number", "word by key")  # in lists of several lengths
_TEXTS: dict[str, Any] = read_yaml(Path(__file__).with_name("probe_items.yaml"))
DESCRIPTIONS: dict[ProbeKind, str] = _TEXTS["about"]  # descriptions of the behaviours
_PLACE_NAMES: str = _TEXTS["places"]
_LIST_WORDS: str = _TEXTS["words of lists"]
_NUMBERS = ("one", "two", "three", "four", "five")
_DIGITS = ("1", "2", "3", "4", "5")
_NUM_SOLVED = 3  # solved examples before a question about a list
_LIST_LENGTH = 6  # words per list
_MIN_WORDS = 2 * _LIST_LENGTH  # minimum number of words to draw lists from


@dataclass(frozen=True, kw_only=True)
class ProbeItem:
    """Tokens, and the positions to predict."""

    behaviour: ProbeKind
    tokens: tuple[int, ...]
    positions: tuple[int, ...]  # positions of the predicted tokens, ascending
    length: int  # requested number of tokens
    depth: float | None = None  # of a needle, from 0 (beginning of the text) to 1 (end)
    needle: tuple[int, int] | None = None  # its first token and the one after its last
    choices: tuple[int, ...] = ()  # candidates for the predicted token; any token if empty


class ItemWriter:
    """Makes items from a text and a tokenizer; from token ids, only items for loss and copying.

    Words of lists are single tokens. If the tokenizer has too few (letters, bytes), words with different first tokens
    are used, and the first token of an answer is predicted.

    Raises `InputError` for a text that is too short, and for a tokenizer that cannot distinguish the words of lists.
    """

    def __init__(self, tokenizer: Any, text: str | Int[np.ndarray, "N"], seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = np.random.Generator(np.random.Philox(seed))
        self.has_text = isinstance(text, str)
        self.prefix: list[int] = []
        if self.has_text:  # the special tokens at the beginning of a text
            bare, full = self._ids("so"), token_ids(tokenizer, "so")
            starts = (start for start in range(len(full) - len(bare) + 1) if full[start : start + len(bare)] == bare)
            self.prefix = full[: next(starts, 0)]
        ids = token_ids(tokenizer, text, add_special_tokens=False, verbose=False) if isinstance(text, str) else text
        self.text = np.asarray(ids, dtype=np.int64)

    def items(self, sizes: ProbeSizes) -> list[ProbeItem]:
        """All items; deterministic for a seed."""
        items = [self.loss_item(max(sizes.lengths)) for _ in range(sizes.sequences)]
        for length in sizes.lengths:
            for depth in (*sizes.depths, None) if self.has_text else ():
                items += [self.needle_item(length, depth) for _ in range(sizes.repeats)]
            items += [self.copying_item(length) for _ in range(sizes.sequences)]
        if self.has_text:
            items += [self.list_item(behaviour) for _ in range(sizes.lists) for behaviour in ("counting", "order")]
            for count in sizes.words:
                items += [self.list_item(behaviour, count) for _ in range(sizes.lists) for behaviour in BY_WORDS]
        return items

    def loss_item(self, length: int) -> ProbeItem:
        """A piece of the text."""
        tokens = [*self.prefix, *self._excerpt(length - len(self.prefix))]
        first = max(1, len(self.prefix))
        positions = tuple(range(first, len(tokens)))
        return ProbeItem(behaviour="loss", tokens=tuple(tokens), positions=positions, length=length)

    def needle_item(self, length: int, depth: float | None, field: str = "lengths") -> ProbeItem:
        """A piece of the text with a sentence that states a five-digit number (if ``depth`` is given), and a question.

        Raises `InputError`, naming ``field``, if the length is too short.
        """
        place = self.rng.choice(_PLACE_NAMES.split())
        blank, number = self._split_word(str(self.rng.integers(10_000, 100_000)))
        statement = [*self._ids(f"\n\nThe secret number of the {place} is"), *blank]
        needle = [*statement, *number, *self._ids_after_word(".\n\n", "")] if depth is not None else []
        room = length - len(self.prefix) - len(needle) - len(statement) - len(number)
        if room < 1:
            raise invalid(field, f"be larger than the {length - room} tokens of a needle and its question", length)
        text = self._excerpt(room)
        cut = 0 if depth is None else round(depth * room)
        before = [*self.prefix, *text[:cut]]
        tokens = [*before, *needle, *text[cut:], *statement, *number]
        return ProbeItem(
            behaviour="needle" if depth is not None else "no needle",
            tokens=tuple(tokens),
            positions=tuple(range(len(tokens) - len(number), len(tokens))),
            length=length,
            depth=depth,
            needle=None if depth is None else (len(before), len(before) + len(needle)),
        )

    def copying_item(self, length: int) -> ProbeItem:
        """Tokens of the text in random order, twice."""
        half = (length - len(self.prefix)) // 2
        drawn = self.rng.choice(self.text, half).tolist()
        tokens = [*self.prefix, *drawn, *drawn]
        first = len(self.prefix) + half + 1
        positions = tuple(range(first, len(tokens)))
        return ProbeItem(behaviour="copying", tokens=tuple(tokens), positions=positions, length=length)

    def list_item(self, behaviour: ProbeKind, words: int | None = None) -> ProbeItem:
        """How often a word occurs in a list (``counting``), or which word follows another (``order``).

        With ``words``, of so many words: which one has an index in a list (``word by number``, from 0), or belongs to a
        key (``word by key``). The length of the item is then the number of words.
        """
        count = words or _LIST_LENGTH
        if count > len(self._list_words):
            most = len(self._list_words)
            raise invalid("words", f"be at most {most}, the number of words that the tokenizer distinguishes", count)
        tokens, end = [*self.prefix], ".\n\n" if words is None else "\n\n"
        for _ in range(_NUM_SOLVED):
            question, answer, _ = self._question(behaviour, count)
            tokens += [*self._ids(question), *self._ids_after_word(answer), *self._ids_after_word(end, "")]
        question, answer, listed = self._question(behaviour, count)
        blank, answer_ids = self._split_word(answer)
        tokens += [*self._ids(question), *blank, answer_ids[0]]
        choices = self._numerals if behaviour == "counting" else listed
        return ProbeItem(
            behaviour=behaviour,
            tokens=tuple(tokens),
            positions=(len(tokens) - 1,),
            length=words or len(tokens),
            choices=tuple(self._split_word(word)[1][0] for word in choices),
        )

    def _question(self, behaviour: ProbeKind, length: int) -> tuple[str, str, list[str]]:
        """A question, its answer, and the words of its list."""
        if behaviour == "counting":
            count = int(self.rng.integers(1, len(self._numerals) + 1))
            word, *others = self.rng.permutation(self._list_words)[: length - count + 1].tolist()
            words = self.rng.permutation([word] * count + others).tolist()
            return (
                f"List: {', '.join(words)}. How many times does {word} occur? Answer:",
                self._numerals[count - 1],
                words,
            )
        words = self.rng.permutation(self._list_words)[:length].tolist()
        if behaviour == "order":
            index = int(self.rng.integers(0, length - 1))
            question = f"List: {', '.join(words)}. Which word comes after {words[index]}? Answer:"
            return question, words[index + 1], words
        index, keys = int(self.rng.integers(0, length)), self.rng.permutation(self._list_words)[:length].tolist()
        if behaviour == "word by number":
            return f"words = [{', '.join(words)}]\nwords[{index}] =", words[index], words
        pairs = ", ".join(f"{key}: {word}" for key, word in zip(keys, words, strict=True))
        return f"{pairs}\n{keys[index]}:", words[index], words

    @cached_property
    def _list_words(self) -> list[str]:
        """The words that lists are drawn from."""
        words = _LIST_WORDS.split()
        distinct = self._distinct_words([word for word in words if len(self._ids_after_word(word)) == 1])
        distinct = distinct if len(distinct) >= _MIN_WORDS else self._distinct_words(words)
        if len(distinct) < _MIN_WORDS:
            raise InputError(
                f"model: its tokenizer has own first tokens for only {len(distinct)} of the list words. At least "
                f"{_MIN_WORDS} are needed."
            )
        return distinct

    @cached_property
    def _numerals(self) -> tuple[str, ...]:
        """One to five as words, or as digits if the words share first tokens."""
        chosen = next((names for names in (_NUMBERS, _DIGITS) if len(self._distinct_words(names)) == len(names)), None)
        if chosen is None:
            raise InputError("model: its tokenizer has no different first tokens for the numbers one to five.")
        return chosen

    def _distinct_words(self, words: Sequence[str]) -> list[str]:
        """The words whose first token is known and differs from those of earlier words."""
        firsts: dict[int, str] = {}
        for word in words:
            for token in self._split_word(word)[1][:1]:
                firsts.setdefault(token, word)
        firsts.pop(self.tokenizer.unk_token_id, None)
        return list(firsts.values())

    def _split_word(self, word: str) -> tuple[list[int], list[int]]:
        """The blank tokens before a word that follows another, and its own tokens; empty if the tokenizer drops it."""
        tokens = self._ids_after_word(word)
        i = next((i for i, token in enumerate(tokens) if self.tokenizer.decode([token]).strip()), len(tokens))
        return tokens[:i], tokens[i:]

    def _ids_after_word(self, text: str, space: str = " ") -> list[int]:
        """The tokens of a text that follows a word, after a space."""
        before = self._ids("so")
        full = self._ids(f"so{space}{text}")
        return full[len(before) :] if full[: len(before)] == before else self._ids(f"{space}{text}")

    def _ids(self, text: str) -> list[int]:
        return token_ids(self.tokenizer, text, add_special_tokens=False)

    def _excerpt(self, length: int) -> list[int]:
        """``length`` tokens of the text, from a random position."""
        if len(self.text) < length:
            raise invalid("text", f"have at least {length} tokens", len(self.text))
        first = int(self.rng.integers(0, len(self.text) - length + 1))
        return self.text[first : first + length].tolist()


def item_batches(items: Sequence[ProbeItem], tokens: int = 4096) -> Iterator[tuple[list[int], Int[np.ndarray, "B N"]]]:
    """Batches of at most ``tokens`` tokens: indices of items with equal length and positions, and their tokens."""
    groups: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault((len(item.tokens), item.positions, len(item.choices)), []).append(number)
    for (length, _, _), numbers in groups.items():
        step = max(1, tokens // length)
        for start in range(0, len(numbers), step):
            chunk = numbers[start : start + step]
            yield chunk, np.array([items[number].tokens for number in chunk])


# ---- retrieval heads: attention to a needle's number when the model has to predict it --------------------------------

MIN_RETRIEVAL = 0.1  # minimum score of a retrieval head (Wu et al. 2024, section 2)
_BATCH_TOKENS = 1024  # tokens per batch
_DECIMALS = 9  # decimals of a score, so that a tenth of the tokens is exactly 0.1


@dataclass(frozen=True, kw_only=True)
class HeadRetrieval(Record):
    """Retrieval of one head of the intact model, mean over needles (`toeplens.lens.Retrieval`)."""

    layer: records.NonNegativeInt
    head: records.NonNegativeInt
    score: ApproxShare
    mass: ApproxShare


@torch.no_grad()
def measure_retrieval(
    loaded: LoadedModel, items: Sequence[ProbeItem], report: Callable[[int, int], None]
) -> tuple[HeadRetrieval, ...]:
    """Retrieval of every self-attention head of the decoder, mean over all needles among the items.

    Raises `InputError` for models that do not predict the next token: with an encoder, or without causal attention.
    """
    if loaded.model.config.is_encoder_decoder:
        raise InputError("needles must not be set for a model with an encoder.")
    needle_items = [item for item in items if item.needle is not None]
    sums: dict[tuple[int, int], list[np.ndarray]] = {}
    done = 0
    report(0, len(needle_items))
    for numbers, tokens in item_batches(needle_items, _BATCH_TOKENS):
        batch = [needle_items[number] for number in numbers]
        ids = torch.from_numpy(tokens).to(loaded.device)
        pos = torch.tensor(batch[0].positions)
        needles = torch.tensor([item.needle for item in batch])

        def add_scores(call: AttentionCall, ids: Tensor = ids, pos: Tensor = pos, needles: Tensor = needles) -> None:
            loaded.check_attention(call.module)
            if call.kind != "self" or call.q.shape[2] != ids.shape[1]:
                return
            if not call.causal:
                raise InputError(f"needles need causal attention, but {call.module} also sees later keys.")
            rows = pos.to(call.q.device) - 1
            result = retrieval(call.softmax(call.logits(rows), rows), ids, pos, needles)
            for head, score_mass in enumerate(torch.stack(result).sum(1).T.cpu().numpy()):
                sums.setdefault((call.layer, head), []).append(score_mass)

        capture_attention(loaded.model, {"input_ids": ids}, add_scores)
        done += len(batch)
        report(done, len(needle_items))
    if not sums:
        raise InputError("needles: no self-attention of the model reads a whole text.")
    scores = ((key, np.sum(sums[key], 0) / len(needle_items)) for key in sorted(sums))
    return tuple(
        HeadRetrieval(layer=layer, head=head, score=round(float(score), _DECIMALS), mass=float(mass))
        for (layer, head), (score, mass) in scores
    )
