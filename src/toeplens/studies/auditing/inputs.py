"""What a model is audited on: sequences of tokens that are given, of one text or several, or random and repeated."""

from __future__ import annotations

import inspect
import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from toeplens.ground import EnvironmentFailure, InputError, invalid, shown
from toeplens.ground.words import listed
from toeplens.sources.huggingface.beforehand import check_length, longest
from toeplens.sources.huggingface.loading import Loaded
from toeplens.sources.huggingface.model import token_ids
from toeplens.tasks.language.documents import documents_in

SEQUENCES, TOKENS = 16, 256  # unless told otherwise
_LARGEST = int(np.iinfo(np.int64).max)
_TOLD = 4  # texts whose names are told


@dataclass(frozen=True)
class Sequences:
    """Sequences, the longest first; shorter ones have padding on their right, which is no token of theirs.

    tokens   [B, N] their token ids, 0 in the padding
    origin   where they came from, in words
    words    the tokens of the first sequence as text; empty where no tokenizer made them
    lengths  of each sequence, without its padding; empty where all are of one length
    texts    what the text of each sequence is called; empty where they are not of several
    unused_bos  the beginning-of-text token that the tokenizer has and does not put before sequences; None if it does
    """

    tokens: Int[Tensor, "B N"]
    origin: str
    words: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    unused_bos: str | None = None

    @property
    def there(self) -> Bool[Tensor, "B N"] | None:
        """Which tokens are no padding; None without padding."""
        return torch.arange(self.tokens.shape[1]) < torch.tensor(self.lengths).unsqueeze(1) if self.lengths else None


def sequences_of(
    loaded: Loaded, data: Any, tokenizer: Any, sequences: int, max_tokens: int | None, seed: int
) -> tuple[Sequences, Any]:
    """What the model reads, and the tokenizer, if there is one."""
    limit, length = longest(loaded), max_tokens or TOKENS
    length = length if limit is None or max_tokens is not None else min(length, limit)
    if data is None:
        words = loaded.vocabulary
        if words is None:
            raise InputError("tokens must be set: the vocabulary of this model is unknown.")
        check_length(loaded, "max_tokens", length)
        named = (each for key, each in vars(loaded.model.config).items() if key.endswith("token_id"))
        special = [each for each in named if isinstance(each, int) and 0 <= each < words]
        return repeated(words, special, sequences, length, seed), tokenizer
    texts = texts_of(data)
    if texts is None:
        return given(data, sequences, max_tokens), tokenizer
    tokenizer = loaded.tokenizer() if tokenizer is None else tokenizer
    return from_texts(tokenizer, texts, sequences, length), tokenizer


def texts_of(data: Any) -> dict[str, str] | None:
    """The texts by what they are called, where one or several were given; None for other data."""
    if isinstance(data, str):
        return {"text as given": data}
    if isinstance(data, list | tuple) and all(isinstance(text, str) for text in data):
        data = {f"text {number}" if len(data) > 1 else "text as given": text for number, text in enumerate(data, 1)}
    if not isinstance(data, Mapping) or not data or not all(isinstance(text, str) for text in data.values()):
        return None
    return {str(name): text for name, text in data.items()}


def inputs_of(model: Any, read: Sequences) -> dict[str, Tensor]:
    """What ``forward`` takes; an encoder-decoder reads the same on both sides, the decoder's one place later.

    Raises `InputError` for padding that the model cannot be told of.
    """
    tokens, there = read.tokens, read.there
    if there is not None:
        pad, words = (getattr(model.config, name, None) for name in ("pad_token_id", "vocab_size"))
        known = isinstance(pad, int) and isinstance(words, int) and 0 <= pad < words
        tokens = tokens.masked_fill(~there, int(pad or 0) if known else 0)
    found, sides = {"input_ids": tokens.to(model.device)}, [""]
    if model.config.is_encoder_decoder:
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        given = ((name, id) for name in names if (id := getattr(model.config, name, None)) is not None)
        name, start = next(given, ("", 0))
        if not isinstance(start, int) or not 0 <= start <= _LARGEST:
            raise InputError(f"model: {name} must be a token of its vocabulary, got {shown(start)}.")
        ids = found["input_ids"]
        found["decoder_input_ids"] = torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), dim=1)
        sides.append("decoder_")
    if there is not None:
        names = [f"{side}attention_mask" for side in sides]
        found |= dict.fromkeys(names, there.to(device=model.device, dtype=torch.long))
        unknown = [name for name in names if name not in inspect.signature(model.forward).parameters]
        if unknown:
            raise InputError(f"tokens must be sequences of one length: {type(model).__name__} takes no {unknown[0]}.")
    return found


def check_fit(loaded: Loaded, read: Sequences) -> None:
    """Refuse tokens that the model has no vectors for, and places that it has none for."""
    words = loaded.vocabulary
    least, most = int(read.tokens.min()), int(read.tokens.max())
    if words is not None and not 0 <= least <= most < words:
        raise invalid("tokens", f"be from 0 to {words - 1}, the model's vocabulary", got=f"{least} to {most}")
    check_length(loaded, "max_tokens", read.tokens.shape[1])


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
    """Token ids as a tensor, an array or lists: [B, N], or [N] for one sequence; cut to so many and so long.

    Lists of sequences of different lengths are taken too.
    """
    rows = _uneven(tokens)
    if rows is not None:
        cut = [_few(_whole(row, 1)[:length]) for row in rows[:sequences]]
        short = next((number for number, row in enumerate(cut, 1) if len(row) < 2), None)
        if short is not None:
            raise invalid("tokens", "have at least 2 per sequence", got=f"{len(cut[short - 1])} in sequence {short}")
        return _together([row.tolist() for row in cut], "tokens as given")
    array = _few(_whole(tokens, 2)[:sequences, :length])
    try:
        found = torch.from_numpy(array.astype(np.int64))
    except MemoryError:
        size = " x ".join(map(str, array.shape))
        raise EnvironmentFailure(
            f"tokens: {size} tokens do not fit in memory. Lower sequences or max_tokens."
        ) from None
    if found.shape[0] < 1 or found.shape[1] < 2:
        raise invalid("tokens", "have at least one sequence of 2 tokens", got=f"shape {list(found.shape)}")
    return Sequences(found, "tokens as given")


def _uneven(tokens: Any) -> Sequence[Any] | None:
    """The sequences of a list whose sequences are of different lengths; None for anything else."""
    if not isinstance(tokens, list | tuple) or any(isinstance(row, str) for row in tokens):
        return None
    try:
        return tokens if len({len(row) for row in tokens}) > 1 else None
    except TypeError:  # numbers have no length
        return None


def _whole(tokens: Any, dimensions: int) -> Int[np.ndarray, "*N"]:
    """Token ids of so many dimensions, or of one fewer. Raises `InputError` for what are none."""
    if isinstance(tokens, list | tuple):
        tokens = [row.cpu() if isinstance(row, Tensor) else row for row in tokens]
    try:
        array = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    except ValueError:
        raise InputError("tokens must be whole numbers, got lists of different lengths.") from None
    array = array[None] if array.ndim == dimensions - 1 else array
    if array.ndim != dimensions or (array.dtype.kind not in "iu" and array.size):
        raise invalid("tokens", "be whole numbers of shape [B, N]", got=f"{array.dtype} of shape {list(array.shape)}")
    return array


def _few(array: Int[np.ndarray, "*N"]) -> Int[np.ndarray, "*N"]:
    """The tokens that are taken. Raises `InputError` for numbers that are too large."""
    if array.size and int(array.max()) > _LARGEST:
        raise invalid("tokens", f"be at most {_LARGEST}", int(array.max()))
    return array


def from_texts(tokenizer: Any, texts: Mapping[str, str], sequences: int, length: int) -> Sequences:
    """Tokens of one text or several, cut into sequences of ``length`` with the tokenizer's special tokens around each.

    The sequences are shared out among the texts as evenly as these allow, the first ones of each text. What does not
    fill a sequence at a text's end is left out, unless there is nothing else: a text that is shorter than ``length`` is
    one sequence of its own length.
    """
    read = list(texts)[:sequences]
    pieces = {name: _pieces(tokenizer, name if len(texts) > 1 else None, texts[name], length) for name in read}
    counts = shared({name: len(own) for name, own in pieces.items()}, sequences)
    rows = [(name, piece) for name, own in pieces.items() for piece in own[: counts[name]]]
    rows = sorted(rows, key=lambda row: -len(row[1]))
    words = tuple(str(word) for word in tokenizer.convert_ids_to_tokens(rows[0][1]))
    names = tuple(name for name, _ in rows) if len(counts) > 1 else ()
    bos = getattr(tokenizer, "bos_token_id", None)
    unused = None if bos is None or bos in rows[0][1] else str(tokenizer.bos_token)
    made = _together([piece for _, piece in rows], _origin(counts, len(texts)), words, names)
    return replace(made, unused_bos=unused)


def shared(room: Mapping[str, int], count: int) -> dict[str, int]:
    """So many sequences shared out as evenly as there is room, first come first served where they do not come out."""
    found = dict.fromkeys(room, 0)
    for _ in range(min(count, sum(room.values()))):
        found[min((name for name in room if found[name] < room[name]), key=lambda name: found[name])] += 1
    return found


def _origin(counts: Mapping[str, int], texts: int) -> str:
    """Where sequences came from, and which texts none was taken of."""
    if texts == 1:
        return next(iter(counts))
    missing = texts - len(counts)
    left = f"; {missing} of {texts} texts left out, for want of sequences" if missing else ""
    if len(counts) > _TOLD:
        least, most = min(counts.values()), max(counts.values())
        of_each = f"{least}" if least == most else f"{least} to {most}"
        return f"{of_each} of each of {len(counts)} texts, {', '.join(list(counts)[:_TOLD])} and others{left}"
    return f"{listed(f'{count} of {name}' for name, count in counts.items())}{left}"


def _together(
    rows: Sequence[Sequence[int]], origin: str, words: tuple[str, ...] = (), texts: tuple[str, ...] = ()
) -> Sequences:
    """Sequences as one tensor, the longest first."""
    rows = sorted(rows, key=lambda row: -len(row))
    most = len(rows[0])
    lengths = tuple(map(len, rows)) if len(rows[-1]) < most else ()
    tokens = torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])
    return Sequences(tokens, origin, words, lengths, texts)


def _pieces(tokenizer: Any, name: str | None, text: str, length: int) -> list[list[int]]:
    """The sequences of a text of this name, or of the only one; all of one length."""
    made = _cut(tokenizer, text, length)
    whole = [each for each in made if len(each) == length]
    found = whole or [max(made, key=len, default=[])]
    if len(found[0]) < 2:
        raise InputError(f"text: {name or 'it'} has fewer than 2 tokens.")
    if len(found[0]) == len(token_ids(tokenizer, "")):
        where = "" if name is None else f" in {name}"
        raise InputError(f"text must have at least one token, got none{where}.")
    return found


def _cut(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """Pieces of a text, with the special tokens that the tokenizer puts around a text."""
    added = len(token_ids(tokenizer, ""))
    if length <= added:
        raise invalid("max_tokens", f"be larger than the {added} tokens that this tokenizer adds", length)
    found = token_ids(tokenizer, text, truncation=True, max_length=length, return_overflowing_tokens=True)
    if found and isinstance(found[0], int):  # tokenizers written in Python give the first piece alone
        bare = token_ids(tokenizer, text, add_special_tokens=False)
        return [bare[start : start + length] for start in range(0, len(bare), length)] if added == 0 else [found]
    return [list(piece) for piece in found]


def read_tokens(path: Path) -> Any:
    """Token ids of a file: .npy, or .json with a list, or a list of lists, which may be of different lengths."""
    _there(path, "tokens")
    try:
        if path.suffix == ".npy":
            try:
                return np.load(path, mmap_mode="r", allow_pickle=False)  # what is not taken is not read
            except OSError:
                raise
            except Exception:  # whatever NumPy makes of a header
                why = "it is not a .npy file, is damaged, or contains objects"
                raise InputError(f"tokens: {path} could not be read ({why}).") from None
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8-sig"))
            rows = content if isinstance(content, list) else [content]
            if any(isinstance(each, bool) for row in rows for each in (row if isinstance(row, list) else [row])):
                raise InputError(f"tokens must be whole numbers, got true or false in {path}.")
            return content if _uneven(content) is not None else np.asarray(content)
    except InputError:
        raise
    except (ValueError, OSError, EOFError, RecursionError, OverflowError) as error:
        why = "its lists are of different lengths" if "inhomogeneous" in str(error) else str(error).rstrip(".")
        raise InputError(f"tokens: {path} could not be read ({why}).") from None
    raise invalid("tokens", "be a .npy or a .json file", path)


def read_text(path: Path) -> str:
    """The text of a file or of a pipe, in UTF-8: of ``.jsonl`` and ``.parquet`` the field ``text`` of all rows, with
    a blank line between them.
    """
    _there(path, "text")
    try:
        return b"\n\n".join(filter(None, documents_in(path, "text"))).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: {path} could not be read ({error}).") from None


def _there(path: Path, field: str) -> None:
    """Refuse what is no file and no pipe."""
    try:
        kind = path.stat().st_mode
    except (OSError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', None) or error})".lower()
        raise InputError(f"{field}: file {path} does not exist{why}.") from None
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
        raise InputError(f"{field} must be a file or a pipe, got {str(path)!r}.")
