"""What a model is audited on: sequences of one length, of tokens that are given, of a text, or random and repeated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from toeplens.ground import InputError

SEQUENCES, TOKENS = 16, 256  # unless told otherwise


@dataclass(frozen=True)
class Sequences:
    """Sequences of one length.

    tokens  [B, N] their token ids
    origin  where they came from, in words
    words   the tokens of the first sequence as text; empty where no tokenizer made them
    """

    tokens: Int[Tensor, "B N"]
    origin: str
    words: tuple[str, ...] = ()


def repeated(vocabulary: int, special: Sequence[int], sequences: int, tokens: int, seed: int) -> Sequences:
    """Random tokens whose second half repeats the first, so that induction shows (Elhage et al. 2021).

    Arguments
        vocabulary  tokens of the model
        special     ids that are not drawn
    """
    plain = np.setdiff1d(np.arange(vocabulary), np.asarray(list(special), dtype=np.int64))
    plain = plain if len(plain) else np.arange(vocabulary)
    random = np.random.Generator(np.random.Philox(seed))
    half = random.choice(plain, (sequences, (tokens + 1) // 2))
    drawn = np.concatenate((half, half), axis=1)[:, :tokens]
    return Sequences(torch.from_numpy(drawn), f"random tokens, the second half as the first (seed {seed})")


def given(tokens: Any, sequences: int, length: int | None) -> Sequences:
    """Token ids as a tensor, an array or lists: [B, N], or [N] for one sequence; cut to so many and so long."""
    try:
        array = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    except ValueError:
        raise InputError("tokens: sequences of different lengths were given; all must be of one length.") from None
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(
            f"tokens: {list(array.shape)} of {array.dtype} were given; they must be whole numbers, sequences by tokens."
        )
    found = torch.from_numpy(array.astype(np.int64))
    if found.shape[0] < 1 or found.shape[1] < 2:
        raise InputError(f"tokens: {list(found.shape)} were given; at least one sequence of 2 tokens is needed.")
    return Sequences(found[:sequences, :length], "tokens as given")


def from_texts(tokenizer: Any, texts: Sequence[str], sequences: int, length: int, origin: str) -> Sequences:
    """A text's tokens, cut into sequences of ``length`` with the tokenizer's special tokens around each.

    What does not fill a sequence at a text's end is left out, unless there is nothing else; several texts give the
    longest sequences that all have.
    """
    found: list[list[int]] = []
    for text in texts:
        made = _cut(tokenizer, text, length)
        whole = [each for each in made if len(each) == length]
        found += whole or [max(made, key=len, default=[])]
        if len(found) >= sequences:
            break
    most = max(map(len, found), default=0)
    kept = [each for each in found if len(each) == most][:sequences]
    if most < 2:
        raise InputError("text: it has less than 2 tokens; there is no attention to look at.")
    if not any(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts):
        raise InputError("text: there is none; a text of at least one token is needed.")
    words = tuple(str(word) for word in tokenizer.convert_ids_to_tokens(kept[0]))
    return Sequences(torch.tensor(kept), origin, words)


def _cut(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """Pieces of a text, with the special tokens that the tokenizer puts around a text."""
    added = len(tokenizer("")["input_ids"])
    if length <= added:
        raise InputError(f"max_tokens: {length} was given; this tokenizer adds {added} to each sequence.")
    found = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    if found and isinstance(found[0], int):  # tokenizers written in Python give the first piece alone
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [bare[start : start + length] for start in range(0, len(bare), length)] if added == 0 else [found]
    return [list(piece) for piece in found]


def read_tokens(path: Path) -> Any:
    """Token ids of a file: .npy, or .json with a list, or a list of lists."""
    if not path.is_file():
        raise InputError(f"tokens: there is no file {path}.")
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".json":
            return np.asarray(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError, EOFError, RecursionError) as error:
        why = "its lists are of different lengths" if "inhomogeneous" in str(error) else error
        raise InputError(f"tokens: {path} could not be read ({why}).") from None
    raise InputError(f"tokens: {path} was given; it must be a .npy or a .json file.")


def read_text(path: Path) -> str:
    """The text of a file, in UTF-8."""
    if not path.is_file():
        raise InputError(f"text: there is no file {path}.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: {path} could not be read ({error}).") from None
