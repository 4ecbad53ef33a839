"""What a model is audited on: sequences of one length, of tokens that are given, of a text, or random and repeated."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from toeplens.ground import EnvironmentFailure, InputError
from toeplens.sources.huggingface.loading import Loaded

SEQUENCES, TOKENS = 16, 256  # unless told otherwise
_NUMPY = b"\x93NUMPY"  # how a .npy file begins
_LARGEST = int(np.iinfo(np.int64).max)
_NAMED = 200  # characters of a path that are told


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


def sequences_of(
    loaded: Loaded, data: Any, tokenizer: Any, sequences: int, max_tokens: int | None, seed: int
) -> tuple[Sequences, Any]:
    """What the model reads, and the tokenizer, if there is one."""
    limit, length = loaded.longest, max_tokens or TOKENS
    length = length if limit is None or max_tokens is not None else min(length, limit)
    if data is None:
        words = loaded.vocabulary
        if words is None:
            raise InputError("tokens: they must be given; the vocabulary of this model is not known.")
        named = (each for key, each in vars(loaded.model.config).items() if key.endswith("token_id"))
        special = [each for each in named if isinstance(each, int)]
        return repeated(words, special, sequences, length, seed), tokenizer
    texts = [data] if isinstance(data, str) else data
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        return given(data, sequences, max_tokens), tokenizer
    tokenizer = loaded.tokenizer() if tokenizer is None else tokenizer
    return from_texts(tokenizer, texts, sequences, length, "text as given"), tokenizer


def inputs_of(model: Any, tokens: Int[Tensor, "B N"]) -> dict[str, Tensor]:
    """What ``forward`` takes; an encoder-decoder reads the same on both sides, the decoder's one place later."""
    tokens = tokens.to(model.device)
    found = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = _shifted(tokens, model.config)
    return found


def _shifted(tokens: Int[Tensor, "B N"], config: Any) -> Int[Tensor, "B N"]:
    """What the decoder of an encoder-decoder reads: the token it starts with, then the tokens but the last."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), 0)
    return torch.cat((torch.full_like(tokens[:, :1], start), tokens[:, :-1]), dim=1)


def check_fit(loaded: Loaded, read: Sequences) -> None:
    """Refuse tokens that the model has no vectors for, and places that it has none for."""
    words = loaded.vocabulary
    least, most = int(read.tokens.min()), int(read.tokens.max())
    if words is not None and not 0 <= least <= most < words:
        raise InputError(
            f"tokens: they go from {least} to {most}; the model's vocabulary goes from 0 to {words - 1} (is the "
            "tokenizer another model's?)."
        )
    limit, length = loaded.longest, read.tokens.shape[1]
    if limit is not None and length > limit:
        raise InputError(f"max_tokens: sequences of {length} tokens were given; the model has positions for {limit}.")


def mask_token_of(tokenizer: Any) -> int | None:
    """The token that masks others; None where there is none."""
    found = getattr(tokenizer, "mask_token_id", None)
    return found if isinstance(found, int) else None


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
    array = array[:sequences, :length]
    if array.size and int(array.max()) > _LARGEST:
        raise InputError(f"tokens: they go up to {int(array.max())}; a token is at most {_LARGEST}.")
    try:
        found = torch.from_numpy(array.astype(np.int64))
    except MemoryError:
        size = " x ".join(map(str, array.shape))
        raise EnvironmentFailure(f"tokens: {size} do not fit into the memory; lower sequences or max_tokens.") from None
    if found.shape[0] < 1 or found.shape[1] < 2:
        raise InputError(f"tokens: {list(found.shape)} were given; at least one sequence of 2 tokens is needed.")
    return Sequences(found, "tokens as given")


def from_texts(tokenizer: Any, texts: Sequence[str], sequences: int, length: int, origin: str) -> Sequences:
    """A text's tokens, cut into sequences of ``length`` with the tokenizer's special tokens around each.

    What does not fill a sequence at a text's end is left out, unless there is nothing else. Sequences are of one
    length: of several texts those that are too short for it are left out, and the origin says how many.
    """
    found: list[list[int]] = []
    for text in texts:
        made = _cut(tokenizer, text, length)
        whole = [each for each in made if len(each) == length]
        found += whole or [max(made, key=len, default=[])]
        if len(found) >= sequences:
            break
    most = max(map(len, found), default=0)
    kept = [each for each in found if len(each) == most]
    short = len(found) - len(kept)
    if short:
        origin += f"; {short} of {len(texts)} texts left out, shorter than {most} tokens"
    kept = kept[:sequences]
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
    _there(path, "tokens")
    try:
        if path.suffix == ".npy":
            with path.open("rb") as stream:
                begins = stream.read(len(_NUMPY))
            if begins != _NUMPY:
                raise InputError(f"tokens: {path} could not be read (it is no .npy file).")
            return np.load(path, mmap_mode="r", allow_pickle=False)  # what is not taken is not read
        if path.suffix == ".json":
            return np.asarray(json.loads(path.read_text(encoding="utf-8")))
    except InputError:
        raise
    except (ValueError, OSError, EOFError, RecursionError, OverflowError) as error:
        why = "its lists are of different lengths" if "inhomogeneous" in str(error) else str(error).rstrip(".")
        raise InputError(f"tokens: {path} could not be read ({why}).") from None
    raise InputError(f"tokens: {path} was given; it must be a .npy or a .json file.")


def read_text(path: Path) -> str:
    """The text of a file or of a pipe, in UTF-8."""
    _there(path, "text")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: {path} could not be read ({error}).") from None


def _there(path: Path, field: str) -> None:
    """Refuse what is no file and no pipe."""
    try:
        kind = path.stat().st_mode
    except (OSError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', None) or error})".lower()
        raise InputError(f"{field}: there is no file {_named(path)}{why}.") from None
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
        raise InputError(f"{field}: {path} is no file; one must be given, or a pipe.")


def _named(path: Path) -> str:
    return str(path) if len(str(path)) <= _NAMED else f"{str(path)[:_NAMED]} ..."
